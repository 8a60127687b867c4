"""Faults of drafts of blocks: slots and what they see, columns of context, selectors, and mask tokens."""

import torch
from torch import Tensor

from specverify.backends.engine.draft.block import BlockDraft, BlockHead
from specverify.backends.engine.draft.filling import Levels
from specverify.backends.engine.draft.head import HeadDraft
from specverify.backends.engine.draft.peagle import ParallelDraft
from specverify.backends.engine.model.head import HeadModel
from specverify.backends.engine.sampling.step import StepSampling
from specverify.backends.faults.fault import drafted_fault, in_place_of_draft, in_place_of_head


@drafted_fault(
    "block-root-slot-masked",
    "arXiv 2602.06036, section 3: a block begins with the last verified token; z-lab/dflash, dflash_generate",
    "a draft of blocks",
)
@in_place_of_draft
class RootMasked(BlockDraft):
    """The first slot of a block holds the mask token, as the others do, and not the pending root."""

    def block_tokens(self, root: int) -> list[int]:
        return super().block_tokens(self.words.mask_token)


@drafted_fault(
    "block-filled-with-token-0",
    "NVIDIA-NeMo/Automodel PR #2461: mask slots are filled with the padding token where no mask token was read",
    "a draft of blocks of two slots whose mask token is not token 0",
)
@in_place_of_draft
class PaddingFilled(BlockDraft):
    """The slots behind the root hold token 0, the padding token, and not the mask token of the weights."""

    def block_tokens(self, root: int) -> list[int]:
        return [root] + [0] * (self.words.slots - 1)


@drafted_fault(
    "block-windows-run-as-full",
    "ikawrakow/ik_llama.cpp PR #2021: a draft trained with sliding windows silently runs at full attention",
    "a draft of blocks with a window shorter than its context",
)
@in_place_of_draft
class WithoutWindows(BlockDraft):
    """Layers with a window see the whole context; which of them are causal stays."""

    def window(self, layer: int) -> int:
        return 0


@drafted_fault(
    "block-causal-inside",
    "microsoft/onnxruntime PR #32225, lightseekorg/tokenspeed PR #263: attention bakes in a causal mask",
    "a draft of blocks of three slots that see the whole block",
)
@in_place_of_draft
class CausalInside(BlockDraft):
    """A slot sees the slots up to its own where it should see the whole block."""

    def is_causal(self, layer: int) -> bool:
        return True


@drafted_fault(
    "block-sees-all-slots",
    "vllm-project/speculators PR #749, NVIDIA/Model-Optimizer PR #1960: windows are causal or not by the trainer",
    "a draft of blocks with a causal layer",
)
@in_place_of_draft
class SeesAll(BlockDraft):
    """A slot sees the whole block in layers that are causal."""

    def is_causal(self, layer: int) -> bool:
        return False


@drafted_fault(
    "block-slots-read-one-early",
    "lightseekorg/tokenspeed PR #829, review: candidate k is scored from the output of slot k - 1",
    "a draft of blocks that scores in place",
)
@in_place_of_draft
class ReadEarly(BlockDraft):
    """The token at each depth is scored by the slot before its own, the first one by the root's slot."""

    def slot_of(self, depth: int) -> int:
        return depth


@drafted_fault(
    "block-first-scores-dropped",
    "sgl-project/SpecForge, DSparkDraftModel: trained from the anchor on, and read without the anchor's slot",
    "a draft of blocks that scores from the root's slot",
)
@in_place_of_draft
class FirstDropped(BlockDraft):
    """The scores of the root's slot are dropped, and those of each later slot are taken for the token before.

    The deepest token has no slot left and takes the last one.
    """

    def slot_of(self, depth: int) -> int:
        return min(depth + 1, self.words.slots - 1)


@drafted_fault(
    "block-length-counted-twice",
    "sgl-project/sglang PR #31739: worker and attention metadata both add the block's size to the length",
    "a draft of blocks",
)
@in_place_of_draft
class CountedTwice(BlockDraft):
    """The length of the block is added twice, so that its slots stand a block further from the context."""

    def slot_positions(self, first: int, count: int) -> Tensor:
        return super().slot_positions(first + count, count)


@drafted_fault(
    "block-context-missing-behind-hit",
    "vllm-project/vllm issue #47930, PR #47926: no state makes context of tokens whose KV a prefix hit restored",
    "a draft of blocks that begins with known pages or as a fork",
)
@in_place_of_draft
class WithoutKnownContext(BlockDraft):
    """No context is made of known columns for this request: its slots see the columns behind them alone."""

    def visible_columns(self, layer: int, first: int, count: int) -> Tensor:
        visible = super().visible_columns(layer, first, count).clone()
        visible[:, : self.adopted] = False
        return visible


@drafted_fault(
    "block-context-one-slot-late",
    "Avarok-Cybersecurity/atlas PR #693: captured rows are written too high, and stale rows stay below",
    "a draft of blocks with two columns of context",
)
@in_place_of_draft
class OneSlotLate(BlockDraft):
    """Each column of the context is written one slot too far; the last one falls on the block, which overwrites it.

    The first slot keeps what was there: zeros.
    """

    def append(self, states: Tensor) -> None:
        super().append(torch.cat([torch.zeros_like(states[:1]), states[:-1]]))


@drafted_fault(
    "block-rows-kept-as-context",
    "z-lab/dflash issue #15: keys and values of a block are those of mask tokens, and are cropped after each draft",
    "a draft of blocks with an accepted node, and a step after it",
)
@in_place_of_draft
class RowsKept(BlockDraft):
    """The rows of accepted slots stay in the cache as the context of their tokens, as a draft model's rows would."""

    def settle(self, rows: list[int]) -> None:
        kept_rows = list(range(min(len(rows) - 1, self.words.slots)))
        self.seams.roll_back(self.cache, kept_rows)
        self.rows = []


@drafted_fault(
    "markov-bias-of-the-root",
    "ikawrakow/ik_llama.cpp PR #2303: each predicted token conditions the next Markov position",
    "a draft of blocks with a Markov head, and a node at depth two",
)
@in_place_of_draft
class BiasOfRoot(BlockDraft):
    """The Markov head's bias follows from the root at every depth, and not from the token before."""

    def markov_path(self, path: list[int]) -> list[int]:
        return [path[0]] * len(path)


def _is_block(head: HeadModel) -> bool:
    return isinstance(head, BlockHead)


@drafted_fault(
    "selector-of-fewer-candidates",
    "Atlas-Inf/atlas PR #46: the selector chose between 4 candidates where the checkpoint declares selector_top_k 16",
    "a draft of blocks with a selector",
)
@in_place_of_head(_is_block)
class FewerCandidates(BlockHead):
    """The selector chooses between half of the candidates that its weights declare."""

    def candidates(self, scores: Tensor) -> Tensor:
        best = super().candidates(scores)
        return best[: max(1, len(best) // 2)]


@drafted_fault(
    "selector-left-out",
    "Pushkinist/rMLX issue #502: a DFlash2 drafter is opened with the keys of DFlash alone",
    "a draft of blocks with a selector",
)
@in_place_of_head(_is_block)
class SelectorLeftOut(BlockHead):
    """A draft with a selector names the best tokens of each slot, as one without."""

    def select(self, scores: Tensor, normed: Tensor, previous: int) -> Tensor:
        return scores


@drafted_fault(
    "selector-behind-the-anchor",
    "family of vllm-project/vllm PR #52816: the first slot stands behind the anchor, the others behind candidates",
    "a draft of blocks with a selector, and an inner node below the root",
)
@in_place_of_draft
class BehindAnchor(BlockDraft):
    """The selector scores every slot behind the root's token, and not behind the token before."""

    def previous(self, path: list[int]) -> int:
        return path[0]


@drafted_fault(
    "convolution-around-the-block",
    "family of vllm-project/vllm PR #52816: taps are zero across the block boundary",
    "a draft of blocks with convolutions of two taps",
)
@in_place_of_head(_is_block)
class AroundBlock(BlockHead):
    """A tap that reaches before the block reads the slots at its end, as a buffer of several blocks would give."""

    def shift(self, x: Tensor, tap: int) -> Tensor:
        return torch.roll(x, tap, 0)


@drafted_fault(
    "convolution-without-deltas",
    "family of Pushkinist/rMLX issue #502: kernels of the convolutions are adapted to each slot's content",
    "a draft of blocks with convolutions",
)
@in_place_of_head(_is_block)
class WithoutDeltas(BlockHead):
    """The convolutions run with their base kernels, without what each slot adds to them."""

    def kernels(self, x: Tensor, name: str) -> tuple[Tensor | None, Tensor | None]:
        if not self.settings.conv_taps:
            return None, None
        before, after = self.weights[f"{name}.base_kernel"][:, None].expand(-1, len(x), -1, -1)
        return before, after


@drafted_fault(
    "mask-tokens-run-level-by-level",
    "vllm-project/vllm #43010: a head of P-EAGLE silently drafts one token after the other",
    "a head with mask tokens, and a tree with an inner node below the root",
)
@in_place_of_draft
class LevelByLevel(ParallelDraft):
    """A head that scores its levels at once, by mask tokens, is run level by level as one without them."""

    def levels(self, tokens: list[int], chance: StepSampling | None = None, hidden: Tensor | None = None) -> Levels:
        return (yield from HeadDraft.levels(self, tokens, chance, hidden))

    def feed(self, level: list[int], token: list[int], root: int) -> Tensor:
        return HeadDraft.feed(self, level, token, root)


@drafted_fault(
    "mask-state-not-loaded",
    "vllm-project/speculators, PEagleDraftModel: a file may lack mask_hidden, and nothing says so",
    "a head with mask tokens, and a tree with an inner node below the root",
)
@in_place_of_draft
class MaskStateMissing(ParallelDraft):
    """Zeros stand beside the mask tokens, as if the state of the weights was never loaded."""

    def mask_states(self, count: int) -> Tensor:
        return torch.zeros_like(super().mask_states(count))
