"""The stage to which an exception of a request belongs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from specverify.backends.base import StageFailure, Unsupported
from specverify.reference.trace import Stage


class StagedRequest(Protocol):
    """A request, which knows its current stage."""

    stage: Stage


@contextmanager
def naming_stage(request: StagedRequest) -> Iterator[None]:
    """Turn every exception inside the `with` into a StageFailure at the request's current stage."""
    try:
        yield
    except (StageFailure, Unsupported):
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise StageFailure(request.stage, f"{type(error).__name__}: {reason}") from error
