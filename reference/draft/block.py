"""Block: a head that scores every token of a block in one forward.

The source is DFlash (arXiv 2602.06036; z-lab's package `dflash`, SpecForge, speculators). The block is the pending root
x_L, at position L, and mask tokens at the positions behind it. Each decoder layer attends to the context and to the
block. The context of token i < L is `hidden_norm(fc(s_i))`, of the target's states s_i at several layers side by side:
its keys and values stand in the head's KV cache at position i. It passes no layer, so that a row follows from its state
alone. Queries and keys are normed by head, and the target's embedding and head are used unless the head has its own.

The switches are those in which published drafts of blocks differ:

- Slot i of the block stands at the root's position + i. In DFlash it scores the token of its own position, and the slot
  of the root, the anchor, scores none. In DSpark (arXiv 2607.05147) it scores the token behind, so that a block of n
  slots reaches n levels (`from_anchor`).
- A layer may have a window. Slots see the whole block, or slots up to their own: in layers with a window (z-lab,
  SpecForge), or in all (`causal`). A row at position q sees position k if k > q - window, and also k < q + window.
- The Markov head of DSpark adds to the scores of a slot a bias by the token before: `w2 w1[x]`, in rank `markov_rank`.
  The embedding w1[x] may pass a gate first, which reads the slot's output too, or a recurrent state over the block.
- The convolutions of DFlash2 (vllm-project/vllm PR #52816) stand before and after attention and before and after the
  feed-forward block of each layer. Slot i becomes the sum over taps t of `(base[t] + delta[i, t]) x[i - t]`, slots
  before the block being zero; `kernel_projection` makes the deltas of both convolutions around a part from the normed
  input of the first, one for each group of `conv_group` channels.
- The selector of DFlash2 scores the `selector_top_k` best tokens of a slot alone: their scores, and beside them
  `<predecessor[a] * hidden_projection(output), successor[b]>` for a token b behind the token a. No other token can be
  drafted: its score is minus infinity. Of equal scores the lower id is the better.

One law stands for each depth, and with a Markov head or a selector for each path. The children of a node are drawn from
it by coins of their own, as Medusa's are, so that a rule is lossless here wherever it is lossless there.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, ClassVar

from specverify.reference.architecture import Architecture, Model, Seeded
from specverify.reference.draft.base import Tokens
from specverify.reference.draft.head import TOKENS_SCHEMA, Head, head_schema
from specverify.reference.draft.layer_head import LAYER_SCHEMA, MOST_LAYERS, SEEDED_SIZES, HeadLayer, decoder_layer
from specverify.reference.malformed import Malformed
from specverify.reference.rules import OMIT_DEFAULT
from specverify.reference.tree import RankTree, Tree

CAUSAL = ("none", "windowed", "all")
"""The layers in which a slot sees no later slot of its block."""

MARKOV = ("vanilla", "gated", "rnn")
"""The uses of the embedding of the token before, under the names of published configs.

It is used as it is, passes a gate, or enters a recurrent state.
"""

MOST_SLOTS = 64
"""Most slots of a block; published blocks have 4 to 16."""

MOST_RANK = 4096
"""The largest rank of a Markov head; published ones have 256."""

MARKOV_PREFIX = "markov_head"
"""The prefix of the Markov head in published checkpoints."""

PREVIOUS = f"{MARKOV_PREFIX}.markov_w1.weight"
"""The name of the embedding of the token before."""

BIAS = f"{MARKOV_PREFIX}.markov_w2.weight"
"""The name of the matrix from rank to scores."""

SELECTOR = "candidate_selector"
"""The prefix of the selector in published checkpoints."""

PREDECESSOR, SUCCESSOR = f"{SELECTOR}.predecessor_codebook", f"{SELECTOR}.successor_codebook"
"""The names of the vectors of the token before and of a candidate."""

CONFIDENCE = ("", "state", "markov")
"""Inputs of a confidence head: none, without such a head; the output of a slot; this and the token before."""

CONFIDENCE_HEAD = "confidence_head.proj"
"""The name of the confidence head in published checkpoints."""

CONVOLUTIONS = ("attention_conv", "mlp_conv")
"""The names of the convolutions around attention and around the feed-forward block of a layer."""

SIDES = 2
"""Convolutions around a part: before and after it."""

MOST_TAPS = 16
"""Most taps of a convolution; published ones have two."""


def layer_prefix(number: int) -> str:
    """The prefix of the decoder layer `number` in published checkpoints."""
    return f"layers.{number}"


@dataclass(frozen=True)
class Block(Head):
    """Layers that score every token of a block in one forward: DFlash, DSpark, causal blocks.

    Attributes:
        layer: The sizes of each decoder layer.
        slots: The tokens of a block, the root included.
        mask_token: The target id that stands in every slot but the root's.
        layers: The number of decoder layers.
        windows: The window of each layer, 0 for none; empty if no layer has one.
        causal: The layers in which a slot sees no later slot, one of CAUSAL.
        from_anchor: Whether a slot scores the token behind its own position, the root's slot the first one.
        vocabulary: Target ids that the head can name, ascending, by draft id; empty for all of them. A head with a
            reduced vocabulary has a head matrix of its own.
        markov_rank: The rank of the Markov head; 0 for none.
        markov: What the Markov head does with its embedding, one of MARKOV.
        conv_taps: The taps of the convolutions; 0 for none.
        conv_group: The channels that share the deltas of a convolution; 0 without convolutions.
        selector_rank: The rank of the selector; 0 for none.
        selector_top_k: The candidates of a slot between which the selector chooses; 0 without a selector.
        candidates: For each level below the root, the draft ids of the selector's candidates in place of the best ones;
            empty for the best. A step whose engine showed its candidates is scored in this way.
        unselected: Whether the selector is left out: every token has the score of its slot, which the selector reads.
        confidence: What the confidence head reads, one of CONFIDENCE; empty without such a head. It gives each slot the
            probability that its token is accepted where those before it were (arXiv 2607.05147), and ends paths of a
            tree with `"when": "head"` alone.
    """

    TAG = "block"
    WORD = "block"
    _SIZE: ClassVar[Mapping[str, Any]] = {"type": "integer", "minimum": 0, "maximum": 1048576}
    SCHEMA = head_schema(
        {
            "layers": {"type": "integer", "minimum": 1, "maximum": MOST_LAYERS},
            "windows": {"type": "array", "items": _SIZE, "maxItems": MOST_LAYERS},
            "causal": {"enum": list(CAUSAL)},
            "from_anchor": {"type": "boolean"},
            "vocabulary": TOKENS_SCHEMA,
            "markov_rank": {"type": "integer", "minimum": 0, "maximum": MOST_RANK},
            "markov": {"enum": list(MARKOV)},
            "conv_taps": {"type": "integer", "minimum": 0, "maximum": MOST_TAPS},
            "conv_group": _SIZE,
            "selector_rank": {"type": "integer", "minimum": 0, "maximum": MOST_RANK},
            "selector_top_k": _SIZE,
            "candidates": {"type": "array", "items": TOKENS_SCHEMA, "maxItems": MOST_SLOTS},
            "unselected": {"type": "boolean"},
            "confidence": {"enum": list(CONFIDENCE)},
        },
        layer=LAYER_SCHEMA,
        slots={"type": "integer", "minimum": 1, "maximum": MOST_SLOTS},
        mask_token={"type": "integer", "minimum": 0, "maximum": 2147483647},
    )
    SHIFT: ClassVar[int] = 0

    layer: HeadLayer
    slots: int
    mask_token: int
    layers: int = field(default=1, metadata=OMIT_DEFAULT, kw_only=True)
    windows: tuple[int, ...] = field(default=(), metadata=OMIT_DEFAULT, kw_only=True)
    causal: str = field(default=CAUSAL[0], metadata=OMIT_DEFAULT, kw_only=True)
    from_anchor: bool = field(default=False, metadata=OMIT_DEFAULT, kw_only=True)
    vocabulary: tuple[int, ...] = field(default=(), metadata=OMIT_DEFAULT, kw_only=True)
    markov_rank: int = field(default=0, metadata=OMIT_DEFAULT, kw_only=True)
    markov: str = field(default=MARKOV[0], metadata=OMIT_DEFAULT, kw_only=True)
    conv_taps: int = field(default=0, metadata=OMIT_DEFAULT, kw_only=True)
    conv_group: int = field(default=0, metadata=OMIT_DEFAULT, kw_only=True)
    selector_rank: int = field(default=0, metadata=OMIT_DEFAULT, kw_only=True)
    selector_top_k: int = field(default=0, metadata=OMIT_DEFAULT, kw_only=True)
    candidates: tuple[tuple[int, ...], ...] = field(default=(), metadata=OMIT_DEFAULT, kw_only=True)
    unselected: bool = field(default=False, metadata=OMIT_DEFAULT, kw_only=True)
    confidence: str = field(default=CONFIDENCE[0], metadata=OMIT_DEFAULT, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.layers <= MOST_LAYERS:
            raise Malformed("layers", f"{self.layers}; a draft of blocks has 1 to {MOST_LAYERS} decoder layers")
        if not 1 <= self.slots <= MOST_SLOTS:
            raise Malformed("slots", f"{self.slots}; a block has 1 to {MOST_SLOTS} slots")
        if self.levels < 1:
            raise Malformed("slots", "a block of the root alone scores no token")
        for name, words in (("causal", CAUSAL), ("markov", MARKOV), ("confidence", CONFIDENCE)):
            if getattr(self, name) not in words:
                raise Malformed(name, f"{getattr(self, name)!r} is none of {', '.join(words)}")
        self._check_windows()
        if self.layer.sections:
            raise Malformed("layer.sections", f"{self.WORD} drafts number rows on one axis")
        if any(a >= b for a, b in zip(self.vocabulary, self.vocabulary[1:], strict=False)):
            raise Malformed("vocabulary", "target ids must ascend")
        if not 0 <= self.markov_rank <= MOST_RANK:
            raise Malformed("markov_rank", f"{self.markov_rank} is no rank from 0 to {MOST_RANK}")
        if self.markov != MARKOV[0] and not self.markov_rank:
            raise Malformed("markov", f"{self.markov}, and there is no Markov head (markov_rank is 0)")
        if self.confidence == "markov" and not self.markov_rank:
            raise Malformed("confidence", "markov, and there is no Markov head (markov_rank is 0)")
        self._check_convolutions()
        self._check_selector()
        for name, most in SEEDED_SIZES.items() if self.files is None else ():
            if getattr(self.layer, name) > most:
                raise Malformed(f"layer.{name}", f"{getattr(self.layer, name)}; a seeded head has at most {most}")
        deepest = self.height if self.expansion is None else self.expansion.depth
        if deepest > self.levels:
            raise Malformed(
                "shape", f"a tree of depth {deepest}, and a block of {self.slots} slots reaches {self.levels} levels"
            )

    def _check_windows(self) -> None:
        """Raise Malformed unless each layer has one window, of which one at least is none of 0."""
        if self.windows and len(self.windows) != self.layers:
            raise Malformed("windows", f"{len(self.windows)} windows for {self.layers} layers")
        if self.windows and (min(self.windows) < 0 or not max(self.windows)):
            raise Malformed("windows", f"{list(self.windows)}: a window has 1 token or more; leave out zeros alone")
        if self.causal == "windowed" and not self.windows:
            raise Malformed("causal", "windowed, and no layer has a window")

    def _check_convolutions(self) -> None:
        """Raise Malformed unless taps and groups of the convolutions are both numbers of convolutions, or both 0."""
        if not 0 <= self.conv_taps <= MOST_TAPS:
            raise Malformed("conv_taps", f"{self.conv_taps} is no number of taps from 0 to {MOST_TAPS}")
        if bool(self.conv_taps) != (self.conv_group > 0):
            raise Malformed("conv_group", f"{self.conv_group} channels in a group, and {self.conv_taps} taps")

    def _check_selector(self) -> None:
        """Raise Malformed unless rank and candidates of the selector are both positive, or both 0."""
        if not 0 <= self.selector_rank <= MOST_RANK:
            raise Malformed("selector_rank", f"{self.selector_rank} is no rank from 0 to {MOST_RANK}")
        if bool(self.selector_rank) != (self.selector_top_k > 0):
            raise Malformed("selector_top_k", f"{self.selector_top_k}, and selector_rank is {self.selector_rank}")
        for name in ("candidates", "unselected") if not self.selector_rank else ():
            if getattr(self, name):
                raise Malformed(name, "a word of a selector, and there is none (selector_rank is 0)")
        if not self.selector_rank:
            return
        if self.markov_rank:
            raise Malformed("selector_rank", "a selector beside a Markov head: no published draft has both")
        if self.expansion is not None:
            raise Malformed("shape", "a selector beside a dynamic tree, whose scores are of every token")
        for level, ids in enumerate(self.candidates):
            if len(ids) != self.selector_top_k or any(a >= b for a, b in pairwise(ids)):
                raise Malformed(f"candidates[{level}]", f"{len(ids)} ids; {self.selector_top_k} in ascending order")

    @property
    def weights(self) -> "Block":
        """See `Head`."""
        return replace(super().weights, candidates=(), unselected=False)

    @property
    def has_confidence_head(self) -> bool:
        """See `Static`."""
        return bool(self.confidence)

    @property
    def selects(self) -> bool:
        """Whether a selector chooses between the tokens of a slot."""
        return self.selector_rank > 0 and not self.unselected

    def without_selector(self) -> "Block":
        """The draft that names any token by the scores of its slots, which the selector reads."""
        return replace(self, candidates=(), unselected=True)

    @property
    def levels(self) -> int:
        """The depth of the deepest node that a block can score."""
        return self.slots if self.from_anchor else self.slots - 1

    def slot_of(self, depth: int) -> int:
        """The slot that scores the children of a node at `depth`."""
        return depth if self.from_anchor else depth + 1

    def window(self, layer: int) -> int:
        """The window of `layer`; 0 for none."""
        return self.windows[layer] if self.windows else 0

    def is_causal(self, layer: int) -> bool:
        """Whether slots of `layer` see no later slot."""
        return self.causal == "all" or (self.causal == "windowed" and self.window(layer) > 0)

    def tensors(self, target: Architecture) -> dict[str, tuple[int, ...]]:
        """See `Head`; matrices by token have a row for every target id, of which those of `vocabulary` are stored."""
        hidden = target.hidden_size
        norms = ("hidden_norm", "norm")
        shapes: dict[str, tuple[int, ...]] = {
            "fc.weight": (hidden, self.reads.parts * hidden),
            **{f"{name}.weight": (hidden,) for name in norms},
        }
        for prefix in map(layer_prefix, range(self.layers)):
            shapes |= decoder_layer(prefix, self.layer, hidden, hidden)
            shapes |= {f"{prefix}.self_attn.{name}_norm.weight": (self.layer.head_dim,) for name in "qk"}
            for name in ("input_layernorm", "post_attention_layernorm"):
                shapes[f"{prefix}.{name}.weight"] = (hidden,)
        if self.vocabulary:
            shapes["lm_head.weight"] = (target.vocab_size, hidden)
        # The last ones: a draft without them has the same weights otherwise.
        shapes |= self._markov_tensors(target) | self._convolution_tensors(hidden) | self._selector_tensors(target)
        return shapes | self._confidence_tensors(hidden)

    def _confidence_tensors(self, hidden: int) -> dict[str, tuple[int, ...]]:
        """The shapes of the weights of the confidence head, if there is one."""
        if not self.confidence:
            return {}
        width = hidden + self.markov_rank * (self.confidence == "markov")
        return {f"{CONFIDENCE_HEAD}.weight": (1, width), f"{CONFIDENCE_HEAD}.bias": (1,)}

    def _convolution_tensors(self, hidden: int) -> dict[str, tuple[int, ...]]:
        """The shapes of the weights of the convolutions, if there are any."""
        shapes: dict[str, tuple[int, ...]] = {}
        for prefix in map(layer_prefix, range(self.layers if self.conv_taps else 0)):
            for name in CONVOLUTIONS:
                shapes[f"{prefix}.{name}.base_kernel"] = (SIDES, self.conv_taps, hidden)
                rows = SIDES * self.conv_taps * (hidden // self.conv_group)
                shapes[f"{prefix}.{name}.kernel_projection.weight"] = (rows, hidden)
        return shapes

    def _selector_tensors(self, target: Architecture) -> dict[str, tuple[int, ...]]:
        """The shapes of the weights of the selector, if there is one."""
        rank = self.selector_rank
        if not rank:
            return {}
        shapes: dict[str, tuple[int, ...]] = {name: (target.vocab_size, rank) for name in (PREDECESSOR, SUCCESSOR)}
        shapes[f"{SELECTOR}.hidden_projection.weight"] = (rank, target.hidden_size)
        return shapes

    def _markov_tensors(self, target: Architecture) -> dict[str, tuple[int, ...]]:
        """The shapes of the weights of the Markov head, if there is one."""
        rank, hidden = self.markov_rank, target.hidden_size
        if not rank:
            return {}
        shapes: dict[str, tuple[int, ...]] = {PREVIOUS: (target.vocab_size, rank), BIAS: (target.vocab_size, rank)}
        sizes = {"gated": ("gate_proj", rank, hidden + rank), "rnn": ("joint_proj", 3 * rank, 2 * rank + hidden)}
        if self.markov in sizes:
            name, out, into = sizes[self.markov]
            shapes |= {f"{MARKOV_PREFIX}.{name}.weight": (out, into), f"{MARKOV_PREFIX}.{name}.bias": (out,)}
        return shapes

    def by_token(self, target: Architecture) -> tuple[str, ...]:
        """See `Head`."""
        return (
            *(("lm_head.weight",) if self.vocabulary else ()),
            *((PREVIOUS, BIAS) if self.markov_rank else ()),
            *((PREDECESSOR, SUCCESSOR) if self.selector_rank else ()),
        )

    @property
    def read_by_token(self) -> tuple[str, ...]:
        """See `Head`; the token before may be any."""
        return (*((PREVIOUS,) if self.markov_rank else ()), *((PREDECESSOR,) if self.selector_rank else ()))

    def token_fields(self) -> list[tuple[str, Tokens]]:
        """See `Draft`."""
        return [*super().token_fields(), ("mask_token", (self.mask_token,))]

    def with_renamed_tokens(self, rename: Callable[[Tokens], Tokens], relabel: int) -> "Block | None":
        """See `Draft`; the vocabulary must ascend, whatever order the new ids have."""
        head = super().with_renamed_tokens(rename, relabel)
        if head is None:
            return None
        (mask_token,) = rename((self.mask_token,))
        vocabulary = tuple(sorted(rename(self.vocabulary)))
        return replace(head, vocabulary=vocabulary, mask_token=mask_token, candidates=())

    def as_chain(self) -> "Block":
        """See `Static`; the chain is no deeper than the block."""
        height = min(max(self.height, 2), self.levels)
        return self.with_widest_tree(RankTree((0, *range(height)), (0,) * (height + 1)))

    def with_fixed_tree(self, tree: Tree) -> "Block | None":
        """See `Draft`; None for a tree that is deeper than the block."""
        return super().with_fixed_tree(tree) if tree.height <= self.levels else None

    @property
    def kv_sizes(self) -> tuple[int, int, int] | None:
        """See `Draft`."""
        return self.layers, self.layer.kv_heads, self.layer.head_dim

    @property
    def open_rows(self) -> int:
        """See `Draft`; a proposal opens the rows of the block, whatever the tree."""
        return self.slots

    @property
    def settings_weight(self) -> int:
        """See `Draft`."""
        defaults = [not self.windows, self.causal == CAUSAL[0], not self.vocabulary, not self.markov_rank]
        defaults += [not self.conv_taps, not self.selector_rank]
        words = MARKOV.index(self.markov) + CONFIDENCE.index(self.confidence)
        return self.slots + self.layers + self.from_anchor + defaults.count(False) + words

    @property
    def description(self) -> str:
        """See `Draft`."""
        parts = [f"blocks of {self.slots} slots"]
        if self.from_anchor:
            parts.append("scored from the root's slot")
        if self.causal != CAUSAL[0]:
            parts.append("causal" if self.causal == "all" else "causal in layers with a window")
        if self.confidence:
            parts.append("with a confidence head")
        if self.markov_rank:
            parts.append("Markov head" if self.markov == MARKOV[0] else f"Markov head ({self.markov})")
        if self.conv_taps:
            parts.append(f"convolutions of {self.conv_taps} taps")
        if self.selector_rank:
            parts.append(f"selector among {self.selector_top_k}")
        return f"{super().description}, {', '.join(parts)}"

    def simpler(self) -> Iterator["Block"]:
        """The head with a smaller dynamic tree, with one layer, with fewer slots, and without each switch."""
        yield from super().simpler()
        if self.files is not None:
            return
        if self.layers > 1:
            yield replace(self, layers=1, windows=self.windows[:1])
        least = max(self.height if self.expansion is None else self.expansion.depth, 1) + (not self.from_anchor)
        if self.slots > least:
            yield replace(self, slots=least)
        if self.windows:
            yield replace(self, windows=(), causal="all" if self.causal == "all" else CAUSAL[0])
        confidence = "state" if self.confidence == "markov" else self.confidence
        if confidence != self.confidence:
            yield replace(self, confidence=confidence)
        if self.confidence and (self.stopped is None or self.stopped.when != "head"):
            yield replace(self, confidence=CONFIDENCE[0])
        if self.markov_rank:
            yield replace(self, markov_rank=0, markov=MARKOV[0], confidence=confidence)
        if self.conv_taps:
            yield replace(self, conv_taps=0, conv_group=0)
        if self.selector_rank:
            yield replace(self, selector_rank=0, selector_top_k=0, candidates=(), unselected=False)
        yield from self.with_defaults("markov", "causal", "vocabulary", "candidates", "unselected")
        if self.from_anchor:
            yield replace(self, from_anchor=False, slots=self.slots + 1)

    def check_target(self, target: Model) -> None:
        """See `Draft`; the mask token has a row of the target's embedding."""
        super().check_target(target)
        if self.selects:
            named = len(self.vocabulary) or target.vocab_size
            if self.selector_top_k > named:
                raise Malformed("selector_top_k", f"{self.selector_top_k} of the {named} tokens that it can name")
            self.check_rank(self.selector_top_k)
        channels = target.architecture.hidden_size if isinstance(target, Seeded) else 0
        if self.conv_group and channels % self.conv_group:
            raise Malformed("conv_group", f"{self.conv_group} does not divide the {channels} channels of a row")
        if self.mask_token >= target.vocab_size:
            raise Malformed("mask_token", f"{self.mask_token}: the target has token ids 0 to {target.vocab_size - 1}")
