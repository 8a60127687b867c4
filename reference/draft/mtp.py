"""Mtp: multi-token prediction modules behind a target's last layer.

The source is DeepSeek-V3 (arXiv 2412.19437, section 2.2). A module mixes `u = eh_proj [enorm(embedding(x)); hnorm(s)]`,
runs one decoder layer on u, and scores with the head on `shared_head.norm` of the output. Embedding and head are the
target's matrices, or each module has its own (Step-3.5-Flash, vllm-project/vllm PR #38493). Each of the n modules has a
row for each token, with keys and values of its own; rows of a module see the rows of the same module above them.

The row of a token in module m > 0 holds the output of module m - 1 in the row of the token before. In module 0 it holds
the target's state before the token, where that is known, and else the output of the last module in the row before. So
the module that scores the children of a node of depth d is d mod n. With one module this is the recurrence of EAGLE and
of vLLM; a tree no deeper than n is drafted as transformers drafts its chain, each module once. Module m has no row for
the first m tokens that have a row in module 0. Where fewer states are known than there are modules, a row of the tree
has no output above it in some modules: such a module has no row there either, and gives none to the next module.
Positions are those of the tokens, whatever rows a module lacks.

A module's decoder layer is one of the target's own family, as in every published model (`layer` is None: attention over
latent rows, experts, partial rotary embedding, gates and gains are those of the target), or a plain one of its own
sizes. It has full attention, and experts wherever the family has them (`Family.modules`).

The law of a node's children depends on the tokens of its path, as EAGLE's does, and each node's children are drawn from
it anew: every static tree is sampled without loss, with that law as the proposal.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import prod

from specverify.reference.architecture import LARGEST, Architecture, Model, Seeded
from specverify.reference.draft.head import head_schema
from specverify.reference.draft.layer_head import (
    CONVENTIONS_SCHEMA,
    LAYER_SCHEMA,
    HeadLayer,
    LayerHead,
    decoder_layer,
)
from specverify.reference.layer_shapes import layer_shapes
from specverify.reference.malformed import Malformed
from specverify.reference.rules import OMIT_DEFAULT

NORMS = ("enorm", "hnorm", "input_layernorm", "post_attention_layernorm", "shared_head.norm")
"""The norms of a module: of the embedding, of the state, around attention, and of the output."""

OUTER_NORMS = ("enorm", "hnorm", "shared_head.norm")
"""The norms of a module that do not belong to its decoder layer."""

EMBEDDING, HEAD = "embed_tokens", "shared_head.head"
"""The matrices that a module may have of its own."""

PLAIN_LAYER = HeadLayer(1, 1, 4, 8)
"""The simplest layer of a module."""


def module_prefix(layers: int, module: int) -> str:
    """The prefix of a module in published checkpoints, which count modules on from the target's `layers`."""
    return f"model.layers.{layers + module}"


def module_architecture(target: Architecture, count: int) -> Architecture:
    """The architecture whose layers are those of `count` modules on `target`; layer m is that of module m.

    Raises:
        Malformed: the target's family has no such modules.
    """
    of_modules = target.words.modules
    if of_modules is None:
        raise Malformed("layer", f"missing, and {target.family} has no MTP modules of its own layers: state its sizes")
    return replace(target, windows=(0,) * count, chunks=(), settings=of_modules(target.settings))


@dataclass(frozen=True)
class Mtp(LayerHead):
    """MTP modules.

    Attributes:
        layer: The sizes of a plain decoder layer; None for a layer of the target's own family and sizes.
        count: Number of modules (`num_nextn_predict_layers` of published configurations).
        normed_back: Whether the output is fed back after `shared_head.norm` (transformers) or before it (vLLM).
        zero_first: Whether the embedding in row 0 is zero (vLLM; the row of x_1), or that of its token (transformers).
        state_first: Whether `eh_proj` takes [state; embedding] (MiMo, Inkling) in place of [embedding; state].
        own_embedding: Whether each module has an embedding of its own in place of the target's.
        own_head: Whether each module has a head of its own in place of the target's.
    """

    TAG = "mtp"
    WORD = "MTP"
    _FLAG = {"type": "boolean"}  # noqa: RUF012 - a part of SCHEMA
    SCHEMA = head_schema(
        {**CONVENTIONS_SCHEMA, "layer": LAYER_SCHEMA, "own_embedding": _FLAG, "own_head": _FLAG},
        count={"type": "integer", "minimum": 1, "maximum": 16},
        normed_back=_FLAG,
        zero_first=_FLAG,
        state_first=_FLAG,
    )
    vocabulary = ()

    layer: HeadLayer | None = field(default=None, metadata=OMIT_DEFAULT)  # type: ignore[assignment]  # of no other head
    count: int = 1
    normed_back: bool = False
    zero_first: bool = False
    state_first: bool = False
    own_embedding: bool = field(default=False, metadata=OMIT_DEFAULT)
    own_head: bool = field(default=False, metadata=OMIT_DEFAULT)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.count < 1:
            raise Malformed("count", f"{self.count} is no number of modules")
        if self.count > 1 and self.alignment == "last":
            # Near the beginning of a text such a row is missing in some modules, and no published engine keeps it.
            raise Malformed("alignment", f"last, with {self.count} modules: rows of a tree are not kept there")

    @property
    def modules(self) -> int:
        """See `LayerHead`."""
        return self.count

    @property
    def kv_sizes(self) -> tuple[int, int | None, int | None] | None:
        """See `Draft`."""
        return (self.count, None, None) if self.layer is None else super().kv_sizes

    @property
    def description(self) -> str:
        """See `Draft`."""
        return f"{super().description}, layers of the target's family" if self.layer is None else super().description

    @property
    def settings_weight(self) -> int:
        """See `Draft`; a plain layer is simpler than one of the target's."""
        return int(self.layer is None)

    def resting_gain(self, target: Architecture) -> float:
        """See `Head`; the norms of modules with the target's layers are the target's too."""
        return super().resting_gain(target) if self.layer is not None else target.words.resting_gain

    def tensors(self, target: Architecture) -> dict[str, tuple[int, ...]]:
        """See `Head`."""
        hidden = target.hidden_size
        shapes: dict[str, tuple[int, ...]] = {}
        for module in range(self.count):
            prefix = module_prefix(target.layers, module)
            shapes[f"{prefix}.eh_proj.weight"] = (hidden, 2 * hidden)
            shapes |= {f"{prefix}.{name}.weight": (target.vocab_size, hidden) for name in self.own_matrices}
            if self.layer is not None:
                shapes |= {f"{prefix}.{name}.weight": (hidden,) for name in NORMS}
                shapes |= decoder_layer(prefix, self.layer, hidden, hidden)
                continue
            shapes |= {f"{prefix}.{name}.weight": (hidden,) for name in OUTER_NORMS}
            layer_prefix = module_prefix(0, module)
            shapes |= {
                prefix + name.removeprefix(layer_prefix): shape
                for name, shape in layer_shapes(module_architecture(target, self.count), module).items()
            }
        return shapes

    def count_weights(self, target: Architecture) -> int:
        """The number of weights of all modules on `target`."""
        return sum(prod(shape) for shape in self.tensors(target).values())

    @property
    def own_matrices(self) -> tuple[str, ...]:
        """Which of EMBEDDING and HEAD each module has of its own."""
        return (EMBEDDING,) * self.own_embedding + (HEAD,) * self.own_head

    def by_token(self, target: Architecture) -> tuple[str, ...]:
        """See `Head`."""
        prefixes = [module_prefix(target.layers, module) for module in range(self.count)]
        return tuple(f"{prefix}.{name}.weight" for prefix in prefixes for name in self.own_matrices)

    def simpler(self) -> Iterator["Mtp"]:
        """The head with a smaller dynamic tree, with a plain layer, with one module, and without each flag."""
        yield from super().simpler()
        if self.files is None:
            if self.layer is None:
                yield replace(self, layer=PLAIN_LAYER)
            yield from self.with_defaults(
                "count", "normed_back", "zero_first", "state_first", "own_embedding", "own_head"
            )

    def check_target(self, target: Model) -> None:
        """See `Draft`; a module reads one state, since `eh_proj` is as wide as an embedding and a state."""
        super().check_target(target)
        if self.layer is None and isinstance(target, Seeded):
            weights = self.count_weights(target.architecture)
            if weights > LARGEST:
                raise Malformed(
                    "count", f"{weights} weights of modules; those of a built-in model are at most {LARGEST}"
                )
        if self.reads.parts != 1:
            raise Malformed("reads", f"MTP weights expect one hidden state, and the case gives the {self.reads}")
