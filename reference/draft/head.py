"""Head: the common base of drafts that read the target's hidden states.

Tokens x_0 .. x_L are given, x_L being the pending root; the target's state s_i is known for i < L. Row i of the head
holds the token x_{i+1} beside the state s_i, and its output scores the token after x_{i+1}. The row of a node of the
tree holds the node's token beside the output of its parent's row. The row of the root is row L - 1.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, TypeVar

from reference.architecture import Architecture, Model, Seeded
from reference.draft.base import Tokens
from reference.draft.hidden import HiddenStates
from reference.draft.static import Static
from reference.draft_trees import DraftTree, draft_tree_from_json
from reference.malformed import Malformed, under
from reference.rules import OMIT_DEFAULT
from reference.tree import Shape, Tree

Own = TypeVar("Own", bound="Head")


@dataclass(frozen=True)
class HeadLayer:
    """The sizes of a head's decoder layer; its hidden size is the target's, its rotary embedding has no variant."""

    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    theta: float = 10000.0
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        for name in ("heads", "kv_heads", "head_dim", "intermediate_size"):
            if getattr(self, name) < 1:
                raise Malformed(name, f"{getattr(self, name)} is not a size")
        if self.heads % self.kv_heads:
            raise Malformed("kv_heads", f"{self.heads} heads do not share {self.kv_heads} KV heads evenly")
        if self.head_dim % 2:
            raise Malformed("head_dim", f"{self.head_dim} is odd; rotary embedding turns pairs")
        # `not a > b` instead of `a <= b`: NaN is refused too.
        if not self.theta > 1:
            raise Malformed("theta", f"{self.theta} is not a rotary base (more than 1)")
        if not 0 < self.norm_eps <= 1:
            raise Malformed("norm_eps", f"{self.norm_eps} is not above 0 and at most 1")


LAYER_SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "required": ["heads", "kv_heads", "head_dim", "intermediate_size", "theta", "norm_eps"],
    "properties": {
        **{name: {"type": "integer", "minimum": 1, "maximum": 256} for name in ("heads", "kv_heads", "head_dim")},
        "intermediate_size": {"type": "integer", "minimum": 1, "maximum": 4096},
        "theta": {"type": "number"},
        "norm_eps": {"type": "number"},
    },
}
"""The JSON Schema of HeadLayer."""

READS_SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "required": ["layers", "place"],
    "properties": {
        "layers": {"type": "array", "items": {"type": "integer", "minimum": -1}, "maxItems": 64},
        "place": {"type": "string"},
        "shift": {"type": "integer"},
    },
}
"""The JSON Schema of HiddenStates."""

TOKENS_SCHEMA: Mapping[str, Any] = {
    "type": "array",
    "items": {"type": "integer", "minimum": 0, "maximum": 2147483647},
    "maxItems": 1048576,
}
"""The JSON Schema of a list of token ids."""


def head_schema(**own: Mapping[str, Any]) -> Mapping[str, Any]:
    """The JSON Schema of a kind of head with the fields `own` beside those of every head."""
    every = {"kind": {}, "shape": {"$ref": "#/$defs/draftTree"}, "reads": READS_SCHEMA, "layer": LAYER_SCHEMA}
    seed = {"seed": {"type": "integer", "minimum": 0}}
    required = [*every, *seed, *own]
    return {
        "type": "object",
        "additionalProperties": False,
        "required": required,
        "properties": {**every, **seed, **own, "fixed": TOKENS_SCHEMA},
    }


@dataclass(frozen=True)
class Head(Static):
    """A seeded draft head on a built-in target.

    Attributes:
        shape: The tree that the head fills, static or dynamic.
        reads: The target's hidden states that stand beside the tokens.
        layer: The sizes of the head's decoder layer.
        seed: The seed of the head's weights.
        fixed: The token of each node, root first, in place of the best by rank; empty for the best. A tree whose tokens
            were drawn is scored in this way.
    """

    has_law: ClassVar[bool] = True
    model = None

    shape: DraftTree
    reads: HiddenStates = field()  # without the default of Static
    layer: HeadLayer
    seed: int = 0
    fixed: tuple[int, ...] = field(default=(), metadata=OMIT_DEFAULT, kw_only=True)

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise Malformed("seed", "seeds are not negative")
        if self.reads.shift != 1:
            raise Malformed(
                "reads.shift", f"{self.reads}: a row holds the token after its state, so the shift is 1 in {self.WORD}"
            )
        if self.fixed and (self.expansion is not None or len(self.fixed) != len(self.shapes[0])):
            raise Malformed("fixed", f"{len(self.fixed)} tokens for {self.told}")

    @classmethod
    def read(cls: type[Own], content: Mapping[str, Any]) -> Own:
        """See `Draft`."""
        given = {key: value for key, value in content.items() if key != "kind"}
        with under("shape"):
            given["shape"] = draft_tree_from_json(content["shape"])
        with under("reads"):
            given["reads"] = HiddenStates(**{**content["reads"], "layers": tuple(content["reads"]["layers"])})
        with under("layer"):
            # JSON has one kind of number: 10000 may stand where a fraction is meant.
            fractions = {name: float(content["layer"][name]) for name in ("theta", "norm_eps")}
            given["layer"] = HeadLayer(**{**content["layer"], **fractions})
        for one in fields(cls):
            if one.name in given and isinstance(given[one.name], list):
                given[one.name] = tuple(given[one.name])
        return cls(**given)

    @abstractmethod
    def tensors(self, target: Architecture) -> dict[str, tuple[int, ...]]:
        """The shape of each weight of the head on `target`, by its name in published checkpoints of the kind."""

    @property
    def kv_sizes(self) -> tuple[int, int, int] | None:
        """See `Draft`."""
        return 1, self.layer.kv_heads, self.layer.head_dim

    def with_shapes(self: Own, shapes: tuple[Shape, ...]) -> Own:
        """See `Draft`; tokens that were fixed for another tree are dropped."""
        return super(Head, replace(self, fixed=())).with_shapes(shapes)

    def proposing(self: Own, tree: Tree) -> Own:
        """See `Draft`."""
        return replace(self.with_shapes((tree,)), fixed=tree.token)

    def renamed(self: Own, renamed: Callable[[Tokens], Tokens], relabel: int) -> Own:
        """See `Draft`; the weights follow the target's names of tokens."""
        return replace(self, fixed=renamed(self.fixed))

    def token_fields(self) -> list[tuple[str, Tokens]]:
        """See `Draft`."""
        return [*super().token_fields(), *([("fixed", self.fixed)] if self.fixed else [])]

    def check_target(self, target: Model) -> None:
        """See `Draft`."""
        if not isinstance(target, Seeded):
            raise Malformed("", f"a seeded {self.WORD} head is made for a built-in target, not for a checkpoint")
        self.check_rank(len(self.vocabulary) or target.vocab_size)
        missing = set(self.fixed[1:]) - set(self.vocabulary) if self.vocabulary else ()
        if missing:
            raise Malformed("fixed", f"{min(missing)} is not in the vocabulary of the head")


def decoder_layer(at: str, layer: HeadLayer, width: int, hidden: int) -> dict[str, tuple[int, ...]]:
    """The shapes of a Llama layer's projections under the prefix `at`, whose attention reads rows of `width`."""
    wide, narrow, inner = layer.heads * layer.head_dim, layer.kv_heads * layer.head_dim, layer.intermediate_size
    return {
        f"{at}.self_attn.q_proj.weight": (wide, width),
        f"{at}.self_attn.k_proj.weight": (narrow, width),
        f"{at}.self_attn.v_proj.weight": (narrow, width),
        f"{at}.self_attn.o_proj.weight": (hidden, wide),
        f"{at}.mlp.gate_proj.weight": (inner, hidden),
        f"{at}.mlp.up_proj.weight": (inner, hidden),
        f"{at}.mlp.down_proj.weight": (hidden, inner),
    }
