"""The tests of backends draw the same cases in every process, whatever else it has loaded."""

from collections.abc import Iterator

import pytest

from specverify.properties.strategies.settings import without_local_constants


@pytest.fixture(autouse=True)
def same_cases() -> Iterator[None]:
    """Keep constants of loaded modules, the backend's among them, out of what Hypothesis draws."""
    with without_local_constants():
        yield
