"""The seams of one request: the replaceable functions of a speculative step.

A composition or a planted fault replaces one of them by its name.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from specverify.backends.engine.columns import Attend
from specverify.backends.engine.kv.base import KvCache
from specverify.backends.engine.kv.seams import KvSeams
from specverify.backends.engine.lower_tree import TreeTensors
from specverify.backends.engine.model.absent import AbsentModel
from specverify.backends.engine.model.causal_lm import CausalLm
from specverify.backends.engine.model.head import HeadModel
from specverify.backends.engine.model.hidden import HiddenTap
from specverify.backends.engine.model.quantised import Dequantise
from specverify.backends.engine.reach import Reach
from specverify.backends.engine.sampling.seams import SamplingSeams
from specverify.backends.engine.stops import Limits, OutputTail
from specverify.backends.engine.tree_growth import TreeGrowth
from specverify.reference.tree import Shape, Tree

DraftModel: TypeAlias = CausalLm | HeadModel
DraftPart: TypeAlias = CausalLm | HeadModel | AbsentModel


@dataclass(frozen=True, kw_only=True)
class StepSeams:
    """One function per decision of a request's speculative step.

    Attributes:
        branch_rows: From the nodes of a level to their positions and visible branch columns in the draft's cache.
        draft_attend: The attention of the draft model.
        lower_tree: From a tree to its index tensors.
        attend: The attention of the target.
        retrieve: From the lowered trees of a batch and the number of a request to the rows of its nodes among the
            logits of the whole batch.
        score: From the logits of the verify forward, row by row, to one row per node.
        walk: From logits to the accepted rows and the bonus token.
        clip: From an accepted block, the output before it and the limits to the emitted tokens and the reason to end.
        commit: Keeps the accepted rows of the target's cache; returns why the layout's fast way was not taken.
        roll_back: Keeps those accepted rows of the draft's cache that were fed to the draft.
        logprobs: From logits to log-probabilities, row by row.
        kv: The classes of the KV caches.
        sampling: The functions that decide for a request that samples.
        trees: The decisions on tokens and shape of a drafted tree.
        tap: The class that takes the target's hidden states out of a forward.
        network: From the target's model to the model whose forwards run, by default the same.
        draft_network: The same for the causal model that a draft runs; the same model must give the same one each time.
        draft_part: From the model or the head that a draft runs to what this rank has of it; the same one must give the
            same part each time.
        dequantise: From the numbers and the scales of a draft's quantised weights to the weights.
        prefill_attend: The attention of prefills; None if it is `attend`.
    """

    branch_rows: Callable[[Shape, list[int], dict[int, int], int], tuple[list[int], list[list[int]]]]
    draft_attend: Attend
    lower_tree: Callable[[Tree, int, int, list[Reach], int], TreeTensors]
    attend: Attend
    retrieve: Callable[[list[TreeTensors], int], Tensor]
    score: Callable[[Tensor, Tensor], Tensor]
    walk: Callable[[TreeTensors, Tensor], tuple[list[int], int]]
    clip: Callable[[list[int], OutputTail, Limits], tuple[list[int], str | None]]
    commit: Callable[[KvCache, list[int]], str | None]
    roll_back: Callable[[KvCache, list[int]], None]
    logprobs: Callable[[Tensor], Tensor]
    kv: KvSeams
    sampling: SamplingSeams
    trees: TreeGrowth
    tap: type[HiddenTap]
    network: Callable[[CausalLm], CausalLm]
    dequantise: Dequantise
    draft_network: Callable[[CausalLm], CausalLm] = lambda model: model
    draft_part: Callable[[DraftModel], DraftPart] = lambda model: model
    prefill_attend: Attend | None = None
