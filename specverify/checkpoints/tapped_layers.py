"""Layers between two taps: what `--layers a:b` judges of a checkpoint, on the engine's own inputs.

An engine shows hidden states to a draft head that reads them. So a small EAGLE-3 head of seeded weights is written,
which reads the residual stream before layer a and behind layer b - 1. What it drafts is hardly ever accepted, and its
trees are what the layers are judged on.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from specverify.checkpoints.opening import MODELS, open_checkpoint
from specverify.isolation.limits import size_words
from specverify.plan import Plan
from specverify.properties.invariants import BESIDE_LAYERS
from specverify.properties.verdict.invariant import Invariant, NotApplicable
from specverify.reference.abilities import Abilities
from specverify.reference.architecture import Checkpoint
from specverify.reference.case import Case
from specverify.reference.draft.eagle3 import Eagle3
from specverify.reference.files.fields import UnreadableCheckpoint
from specverify.reference.malformed import Malformed
from specverify.reference.oracle.layer_span import LayerSpan, SpanStep, check_span, load_span
from specverify.reference.oracle.parameters import parameters_by_layer
from specverify.reference.oracle.scored_choices import ScoredChoices
from specverify.reference.trace import Array, Stage, Trace
from specverify.references.memory import ROOM, free_bytes, layer_sizes
from specverify.setup.errors import MissingInput, UnusableInput
from specverify.setup.files import make_folder
from specverify.setup.selection import Unknown, check_globs

WIDTH = 32
"""Width of the rows of the head, and the tokens that it names."""


class SpanOracle:
    """The oracle of a run with `--layers`: it runs the layers of the span, and no whole target.

    Args:
        first: The first layer, from 0.
        last: The layer behind the last one.
    """

    def __init__(self, first: int, last: int) -> None:
        self._first, self._last = first, last
        self._read: tuple[Checkpoint, str, LayerSpan] | None = None

    @property
    def span(self) -> range:
        """The layers of the span."""
        return range(self._first, self._last)

    def __call__(self, case: Case) -> Trace:
        """Refuse to run a whole target.

        Raises:
            NotApplicable: Always.
        """
        raise NotApplicable(f"--layers {self._first}:{self._last} runs these layers alone")

    def outputs(
        self, case: Case, text: Array, nodes: Sequence[Array], steps: Sequence[SpanStep]
    ) -> tuple[Array, list[Array]]:
        """See `specverify.reference.oracle.layer_span.LayerSpan.outputs`; the weights are read at the first call."""
        return self._layers_of(case).outputs(text, nodes, steps)

    def output_movements(
        self, case: Case, text: Array, nodes: Sequence[Array], steps: Sequence[SpanStep]
    ) -> tuple[Array, list[Array]]:
        """See `LayerSpan.output_movements`."""
        return self._layers_of(case).output_movements(text, nodes, steps)

    def span_choices(
        self, case: Case, kind: str, text: Array, entering: Array, step: SpanStep, rows: list[int]
    ) -> ScoredChoices | None:
        """See `LayerSpan.scored_choices`."""
        return self._layers_of(case).scored_choices(kind, text, entering, step, rows)

    def span_movements(
        self, case: Case, kind: str, text: Array, nodes: Sequence[Array], steps: Sequence[SpanStep]
    ) -> list[Array] | None:
        """See `LayerSpan.score_movements`."""
        return self._layers_of(case).score_movements(kind, text, nodes, steps)

    def _layers_of(self, case: Case) -> LayerSpan:
        """The layers of the target of `case`, read once."""
        assert isinstance(case.model, Checkpoint)
        if self._read is None or self._read[:2] != (case.model, case.dtype):
            self._read = None  # before others are read
            self._read = (case.model, case.dtype, load_span(case.model, case.dtype, self._first, self._last))
        return self._read[2]


def span_of(case: Case) -> SpanOracle | None:
    """The oracle of the layers between the two taps that the draft of `case` reads; None where it reads no two."""
    reads = case.draft.reads
    if reads is None or len(reads.layers) != 2:
        return None
    before, behind = reads.layers
    return SpanOracle(before + 1, behind + 1)


@dataclass(frozen=True)
class TappedRun:
    """The parts of a run with `--layers`.

    Attributes:
        plan: The plan, with the head that reads both taps as its draft.
        oracle: The oracle of the span.
        invariants: The invariants that need no whole target.
        left_out: What is not judged, a sentence of `Declaration.excluded`.
    """

    plan: Plan
    oracle: SpanOracle
    invariants: tuple[Invariant, ...]
    left_out: str


def tapped_run(plan: Plan, within: Abilities, reveals: frozenset[Stage]) -> TappedRun:
    """The run that judges `plan.layers`.

    Raises:
        UnusableInput: The engine shows no hidden states, there are no such layers, or they cannot be run alone.
        MissingInput: The layers do not fit into memory.
        Unknown: No invariant of the plan needs these layers alone.
    """
    assert plan.layers is not None
    assert plan.model is not None
    first, last = plan.layers
    words = f"--layers {first}:{last}"
    if Eagle3.TAG not in within.drafts or not {Stage.DRAFTED, Stage.SCORED} <= reveals:
        raise UnusableInput(
            f"{words}: {plan.backend} shows no hidden states: it runs no {Eagle3.WORD} head on traced trees"
        )
    checkpoint = open_checkpoint(plan.model)
    try:
        parameters = parameters_by_layer(checkpoint, plan.dtypes[0])
        check_span(parameters, first, last)
        sizes = layer_sizes(checkpoint.source)
    except (Malformed, UnreadableCheckpoint) as why:
        raise UnusableInput(f"{words}: {why}") from None
    # Once more, changed a little, where a row lies beyond its bound.
    taken, free = ROOM + 2 * sum(sizes.get(layer, 0) for layer in range(first, last)), free_bytes()
    if free is not None and taken > free:
        raise MissingInput(
            f"{words} takes {size_words(taken)} of memory: these layers in float64, and once more changed a "
            f"little; {size_words(free)} are free; "
            "name fewer layers"
        )
    head = write_head(checkpoint, parameters.architecture.hidden_size, first, last)
    layers = parameters.architecture.layers
    others = [_words_of(begin, end) for begin, end in ((0, first), (last, layers)) if begin < end]
    left_out = (
        f"layers: {words} judges {_words_of(first, last)} of {layers} on the engine's own inputs; "
        f"{', '.join([*others, 'embedding, head'])} and the tokens that they choose were not judged"
    )
    return TappedRun(replace(plan, draft=str(head)), SpanOracle(first, last), _matching(plan.invariants), left_out)


def _words_of(first: int, last: int) -> str:
    """`layer 3`, or `layers 3 to 5`, for those from `first` to `last` - 1."""
    return f"layer {first}" if last - first == 1 else f"layers {first} to {last - 1}"


def _matching(globs: tuple[str, ...]) -> tuple[Invariant, ...]:
    check_globs(globs)
    matching = tuple(
        invariant
        for invariant in BESIDE_LAYERS
        if not globs or any(fnmatchcase(invariant.name, glob) for glob in globs)
    )
    if not matching:
        raise Unknown(f"every invariant that matches {', '.join(globs)} needs the whole target, not --layers")
    return matching


def write_head(checkpoint: Checkpoint, hidden_size: int, first: int, last: int) -> Path:
    """The directory of a seeded EAGLE-3 head that reads the residual stream before and behind the layers; made once."""
    digest = checkpoint.digest.rpartition(":")[2][:12]
    folder = (MODELS / f"taps-{digest}-{first}-{last}").absolute()
    if (folder / "config.json").exists():
        return folder
    named = np.unique(np.linspace(0, checkpoint.vocab_size - 1, min(WIDTH, checkpoint.vocab_size), dtype=np.int64))
    shapes = {
        "embed_tokens.weight": (checkpoint.vocab_size, WIDTH),
        "fc.weight": (WIDTH, 2 * hidden_size),
        "midlayer.self_attn.q_proj.weight": (WIDTH, 2 * WIDTH),
        "midlayer.self_attn.k_proj.weight": (WIDTH, 2 * WIDTH),
        "midlayer.self_attn.v_proj.weight": (WIDTH, 2 * WIDTH),
        "midlayer.self_attn.o_proj.weight": (WIDTH, WIDTH),
        "midlayer.mlp.gate_proj.weight": (WIDTH, WIDTH),
        "midlayer.mlp.up_proj.weight": (WIDTH, WIDTH),
        "midlayer.mlp.down_proj.weight": (WIDTH, WIDTH),
        "lm_head.weight": (len(named), WIDTH),
    }
    rng = np.random.default_rng([first, last])
    tensors: dict[str, Array] = {
        name: (rng.standard_normal(shape) / WIDTH).astype(np.float16) for name, shape in shapes.items()
    }
    for norm in ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm"):
        tensors[f"{norm}.weight"] = np.ones(WIDTH, np.float16)
    tensors["d2t"] = named - np.arange(len(named))
    tensors["t2d"] = np.isin(np.arange(checkpoint.vocab_size), named)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "hidden_size": WIDTH, "target_hidden_size": hidden_size,
        "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": WIDTH, "intermediate_size": WIDTH,
        "num_hidden_layers": 1, "vocab_size": checkpoint.vocab_size, "draft_vocab_size": len(named),
        "eagle_aux_hidden_state_layer_ids": [first - 1, last - 1],
    }  # fmt: skip
    make_folder(folder)
    save_file(tensors, folder / "model.safetensors")
    # Last: a directory with it is whole.
    (folder / "config.json").write_text(json.dumps(config))
    return folder
