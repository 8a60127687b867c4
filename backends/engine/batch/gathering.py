"""The rows of a batch in its verify forward."""

from specverify.backends.engine.model.causal_lm import Rows
from specverify.backends.engine.request import Request


def gather(batch: list[Request]) -> list[Rows]:
    """The rows of each request of `batch` for one verify forward, in the batch's order; every request has a tree."""
    return [request.rows for request in batch]
