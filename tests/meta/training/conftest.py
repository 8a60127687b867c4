"""A training sets the threads of torch for its process, which the tests after it share."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
