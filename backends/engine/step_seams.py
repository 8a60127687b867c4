"""The seams of one request: the functions that a speculative step is composed of, each exchanged by its name."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from backends.engine.columns import Attend
from backends.engine.kv.base import KvCache
from backends.engine.kv.seams import KvSeams
from backends.engine.lower_tree import TreeTensors
from backends.engine.reach import Reach
from backends.engine.sampling.seams import SamplingSeams
from backends.engine.stops import Limits, Written
from reference.tree import RankTree, Tree


@dataclass(frozen=True, kw_only=True)
class StepSeams:
    """One function per decision of a request's speculative step.

    Attributes:
        name_children: Draft logits and ranks to draft ids and target ids.
        branch_rows: Positions and visible branch columns of the draft's inner nodes.
        draft_attend: Attention of the draft model.
        inside_chunk: Rows of a drafted tree that lie in the chunk of its root.
        tensorise: A tree to its index tensors.
        attend: Attention of the target.
        score: Flat logits of the verify forward to one row per node.
        walk: Logits to accepted rows and bonus.
        clip: An accepted block to what is emitted of it after what is written, and why the output ends.
        commit: Keeps the accepted rows of the target's cache; returns why the layout's fast way was not taken.
        advance: Rows kept by a commit to how far positions move on.
        roll_back: Keeps the accepted rows of the draft's cache that were fed.
        logprobs: Logits to log-probabilities, row by row.
        kv: The classes of which caches are made.
        sampling: What decides where the request samples.
        prefill_attend: Attention of its prefills, where it is another; None for the same.
    """

    name_children: Callable[[Tensor, list[int], Tensor], tuple[list[int], list[int]]]
    branch_rows: Callable[[RankTree, list[int], dict[int, int], int], tuple[list[int], list[list[int]]]]
    draft_attend: Attend
    inside_chunk: Callable[[Tree, int, list[Reach]], list[int]]
    tensorise: Callable[[Tree, int, int, list[Reach], int], TreeTensors]
    attend: Attend
    score: Callable[[Tensor, Tensor], Tensor]
    walk: Callable[[TreeTensors, Tensor], tuple[list[int], int]]
    clip: Callable[[list[int], Written, Limits], tuple[list[int], str | None]]
    commit: Callable[[KvCache, list[int]], str | None]
    advance: Callable[[int], int]
    roll_back: Callable[[KvCache, list[int]], None]
    logprobs: Callable[[Tensor], Tensor]
    kv: KvSeams
    sampling: SamplingSeams
    prefill_attend: Attend | None = None
