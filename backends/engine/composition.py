"""The fault-free composition of the engine: one function or class for every seam."""

from specverify.backends.engine import accept, stops
from specverify.backends.engine.attention.eager import eager
from specverify.backends.engine.draft import filling
from specverify.backends.engine.handover.mailbox import HandOver
from specverify.backends.engine.kv.arena import Arena
from specverify.backends.engine.kv.base import KvCache
from specverify.backends.engine.kv.recurrent import commit_states
from specverify.backends.engine.kv.seams import KvSeams
from specverify.backends.engine.lower_tree import lower_tree
from specverify.backends.engine.model.causal_lm import Rows
from specverify.backends.engine.model.hidden import HiddenTap
from specverify.backends.engine.model.quantised import dequantise
from specverify.backends.engine.request import Request
from specverify.backends.engine.sampling.seams import SamplingSeams
from specverify.backends.engine.seams import Seams
from specverify.backends.engine.tree_growth import TreeGrowth


def commit(cache: KvCache, path: list[int]) -> str | None:
    """Keep the accepted rows `path` in the way of the cache's layout, and the states of the last of them."""
    fallback = cache.commit(path)
    commit_states(cache, path)
    return fallback


def gather(batch: list[Request]) -> list[Rows]:
    """The rows of each request of `batch` for one verify forward, in the batch's order; every request has a tree."""
    return [request.rows for request in batch]


SEAMS = Seams(
    branch_rows=filling.branch_rows,
    draft_attend=eager,
    lower_tree=lower_tree,
    gather=gather,
    attend=eager,
    retrieve=accept.retrieve,
    score=accept.gather_rows,
    walk=accept.greedy_walk,
    clip=stops.clip,
    commit=commit,
    roll_back=filling.roll_back,
    logprobs=accept.logprobs,
    kv=KvSeams(),
    arena=Arena,
    trees=TreeGrowth(),
    tap=HiddenTap,
    network=lambda model: model,
    dequantise=dequantise,
    request=Request,
    sampling=SamplingSeams(),
    hand_over=HandOver(),
)
