"""Faults of drafts that end by their own confidence: what is compared, and what becomes of the token."""

from dataclasses import replace

from torch import Tensor

from specverify.backends.engine.draft.block import BlockDraft
from specverify.backends.engine.draft.language_model import ModelDraft
from specverify.backends.engine.kv.recurrent import states_of
from specverify.backends.engine.seams import Seams
from specverify.backends.engine.tree_growth import PathEnds, TreeGrowth, log_probabilities
from specverify.backends.faults.fault import Plant, committed_fault, drafted_fault, in_place_of_draft
from specverify.reference.draft_trees import Stopped


def in_place_of_ends(kind: type[PathEnds]) -> Plant:
    """A decorator that makes a class of ends a plant of the growth of trees."""

    class Growth(TreeGrowth):
        __doc__ = kind.__doc__

        def path_ends(self, stop: Stopped) -> PathEnds:
            return kind(stop)

    def plant(seams: Seams) -> Seams:
        return replace(seams, trees=Growth())

    plant.__doc__ = kind.__doc__
    return plant


@drafted_fault(
    "confidence-bound-bypassed",
    "ggml-org/llama.cpp issue #26100: a path of the draft bypasses p_min; sgl-project/sglang PR #30204: the confident "
    "prefix is applied behind the verification",
    "a draft that ends by its own confidence, below its bound at a node",
)
@in_place_of_ends
class NeverEnding(PathEnds):
    """The bound is not read: the whole tree is drafted and verified."""

    def falls_short(self, above: float, own: float) -> bool:
        return False


@drafted_fault(
    "confidence-of-one-token-for-the-prefix",
    "vllm-project/speculators PR #849: confidences are conditional, and are applied as if each stood alone; "
    "NVIDIA/TensorRT-LLM PR #17056: the length of the prefix is computed with the wrong algorithm",
    "a draft that ends where the product of its probabilities falls below a bound, on a path of two tokens",
)
@in_place_of_ends
class ApartEnds(PathEnds):
    """Where the product along a path is to be compared, the last probability is."""

    def falls_short(self, above: float, own: float) -> bool:
        return super().falls_short(0.0, own)


@drafted_fault(
    "confidence-one-token-late",
    "family of sgl-project/sglang PR #33831: the confidences of a block have a row less than its drafts",
    "a draft that ends by its own confidence, on a path of two tokens",
)
@in_place_of_ends
class LateEnds(PathEnds):
    """The confidence of the token before is compared, that of the first token never."""

    def ends_before(self, node: int, logits: Tensor, confidence: float) -> bool:
        return self.stop.when == "before" and self.falls_short(self.scores[self.parents[node]], self.own[node])

    def goes_on(self, node: int) -> bool:
        if node not in self.scores:
            return False
        before = self.parents[node]
        return self.stop.when != "after" or not self.falls_short(self.scores[self.parents[before]], self.own[before])


@drafted_fault(
    "unconfident-token-withdrawn",
    "ggml-org/llama.cpp, common/speculative.cpp: p_min is compared behind the draw, before the token is kept",
    "a draft that ends behind a token of low probability",
)
@in_place_of_ends
class WithdrawingEnds(PathEnds):
    """A token below the bound is not drafted, in place of being the last one; its siblings go with it."""

    def ends_before(self, node: int, logits: Tensor, confidence: float) -> bool:
        return self.falls_short(self.scores[node], float(log_probabilities(logits.detach()).max()))


@committed_fault(
    "ended-leaf-taken-for-run",
    "huggingface/transformers PR #48000: the draft's cache is cut to a length counted from the tokens that were asked "
    "for, and not from those that were drafted",
    "a draft model that ends by its own confidence; an accepted path that ends there; another step",
)
@in_place_of_draft
class CountingDraft(ModelDraft):
    """The last token of an accepted path that ended early counts as run: its row holds that of the token before."""

    def settle(self, kept_nodes: list[int]) -> None:
        last_node = kept_nodes[-1]
        not_run = last_node > 0 and last_node not in self.slots
        rows = self.plan.rows_in_tree(self.shape.children) if isinstance(self.plan, Stopped) else None
        super().settle(kept_nodes)
        if not not_run or rows is None or states_of(self.cache) is not None:
            return
        assert isinstance(self.plan, Stopped)
        if self.plan.tree.children[rows[last_node]]:
            last_rows = [self.cache.read(layer) for layer in range(self.cache.layers)]
            self.cache.open(1)
            for layer, (keys, values) in enumerate(last_rows):
                self.cache.write(layer, keys[:, -1:], values[:, -1:])
            self.cache.commit([0])


@drafted_fault(
    "confidence-of-the-slot-before",
    "family of sgl-project/sglang PR #33831: the confidences of a block have a row less than its drafts",
    "a draft of blocks whose confidence head ends a path below the first level",
)
@in_place_of_draft
class ShiftedConfidence(BlockDraft):
    """The confidence of a token is that of the slot before its own."""

    def confidence_slot(self, depth: int) -> int:
        return max(super().confidence_slot(depth) - 1, 0)


@drafted_fault(
    "confidence-beside-the-roots-token",
    "NVIDIA/TensorRT-LLM PR #15808: what the confidence head reads of the Markov head is not that of its position",
    "a draft of blocks whose confidence head reads the token before, below the first level",
)
@in_place_of_draft
class ConfidenceOfTheRoot(BlockDraft):
    """The confidence head reads the pending root's token beside every slot, and not the token before."""

    def confidence_at(self, node: int, token: list[int]) -> float | None:
        return super().confidence_at(node, [token[0]] * len(token))
