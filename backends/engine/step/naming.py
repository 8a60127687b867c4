"""The stage to which an exception of a request belongs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from backends.base import StageFailure, Unsupported
from reference.trace import Stage


class Staged(Protocol):
    """A request, which knows its current stage."""

    at: Stage


@contextmanager
def naming(request: Staged) -> Iterator[None]:
    """Turn every exception inside the `with` into a StageFailure at the request's current stage."""
    try:
        yield
    except (StageFailure, Unsupported):
        raise
    except Exception as error:
        why = " ".join(str(error).split())[:200]
        raise StageFailure(request.at, f"{type(error).__name__}: {why}") from error
