"""The estimated time of a gate on a large checkpoint and one card, the measure `gate-time`.

Nothing large runs here. Counts and host seconds come from judged prompts of a narrow checkpoint with a head. Seconds of
a layer come from one layer of the large checkpoint's shape. The card's part follows from its data sheet, at the share
of its peak that this processor reaches in the same work.
"""

import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from specverify.backends.engine.model.causal_lm import CausalLm
from specverify.checkpoints.cases import CLOSE_STEPS, prepare
from specverify.plan import Plan
from specverify.properties.invariants import ALL
from specverify.properties.verdict.judge import judge
from specverify.reference.draft.eagle1 import Eagle1
from specverify.reference.draft.hidden import HiddenStates
from specverify.reference.draft.layer_head import HeadLayer
from specverify.reference.oracle.checkpoint import identify
from specverify.reference.oracle.configuration import read_architecture
from specverify.reference.oracle.draft.eagle1 import Eagle1Formulas
from specverify.reference.oracle.parameters import parameters_by_layer
from specverify.reference.oracle.shared_prefix import SharedPrefix
from specverify.reference.sampling import Sampling
from specverify.reference.trace import Trace
from specverify.reference.tree import RankTree, Tree
from specverify.reference.weights import shapes
from specverify.references.certificate import CASES_PER_CERTIFICATE, ROWS_ON_CHECKPOINT
from specverify.references.torch_oracle import TorchOracle
from specverify.setup.subjects import open_planted, subject_of
from tests.headfiles import safeailab


@dataclass(frozen=True)
class Card:
    """The peaks of an accelerator by its data sheet: dense bfloat16 and float64 on tensor cores, memory."""

    name: str
    bfloat16_flops: float
    float64_flops: float
    bytes_per_s: float
    source: str


H100 = Card("H100 SXM", 989e12, 67e12, 3.35e12, "NVIDIA H100 Tensor Core GPU data sheet")


@dataclass(frozen=True)
class Llama:
    """The sizes of a Llama."""

    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    vocabulary: int

    @property
    def layer_weights(self) -> int:
        """The weights of one layer."""
        head_dim = self.hidden // self.heads
        return 2 * self.hidden**2 + 2 * self.hidden * self.kv_heads * head_dim + 3 * self.hidden * self.inner

    @property
    def weights(self) -> int:
        """All weights, norms left out."""
        return self.layers * self.layer_weights + 2 * self.vocabulary * self.hidden


LARGE = Llama(32, 4096, 14336, 32, 8, 128256)
"""Llama 3.1 8B."""

MEASURED_TOKENS = 4
"""New tokens of a measured prompt, whose own tokens are drawn."""

NARROW = Llama(2, 64, 128, 4, 2, 16032)
"""The checkpoint of measured prompts: an eighth of LARGE's vocabulary, with which the judge's time is taken to grow."""

PARTS = ("engine", "reference", "head", "certificate", "judge")
"""The parts of a prompt's time: forwards of the engine and of the reference on the card; NumPy's head and certificate,
and all else, on the host."""


def measure(prompts: int, tokens: int, accepted: float, card: Card = H100, large: Llama = LARGE) -> dict[str, Any]:
    """Estimate a gate of `prompts` prompts of `tokens` new tokens each, greedy and sampled, drafted by an EAGLE-1 head.

    Args:
        prompts: The prompts of each kind.
        tokens: The new tokens of a prompt.
        accepted: Drafted tokens that are accepted per step.
        card: The card on which engine and reference compute.
        large: The sizes of the checkpoint.

    Returns:
        card, prompts, tokens; factors: rows of name, value, unit and source; kinds: for greedy and sampled runs the
        minutes by part; minutes: all of them.
    """
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        layer = _layer_seconds(Path(folder) / "layers", large)
        save_llama(Path(folder) / "narrow", NARROW)
        save_head(Path(folder) / "head", NARROW)
        counts = {
            kind: _count_prompts(Path(folder), sampling)
            for kind, sampling in (("greedy", Sampling()), ("sampled", Sampling(temperature=1.0)))
        }
    factors = {**layer, "accepted": accepted, "steps": tokens / (1 + accepted)}
    kinds = {}
    for kind, by_prompt in counts.items():
        varied, plain = (_seconds(count, factors, tokens, accepted, card, large) for count in by_prompt)
        num_varied = min(Plan().variants, prompts)
        kinds[kind] = {part: (num_varied * varied[part] + (prompts - num_varied) * plain[part]) / 60 for part in PARTS}
    rows = [*_factor_rows(factors, card, large), *_count_rows(counts)]
    total = sum(sum(parts.values()) for parts in kinds.values())
    return {"card": card.name, "prompts": prompts, "tokens": tokens, "factors": rows, "kinds": kinds, "minutes": total}


def save_llama(folder: Path, sizes: Llama) -> None:
    """Write a checkpoint of these sizes with random weights in bfloat16."""
    folder.mkdir()
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": sizes.vocabulary,
        "hidden_size": sizes.hidden, "intermediate_size": sizes.inner, "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads, "num_key_value_heads": sizes.kv_heads, "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "hidden_act": "silu", "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: (torch.randn(shape, generator=generator) / shape[-1] ** 0.5 + (len(shape) == 1)).bfloat16()
        for name, shape in shapes(read_architecture(folder / "config.json")).items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def save_head(folder: Path, target: Llama) -> None:
    """Write an EAGLE-1 head of random weights for a target of these sizes."""
    folder.mkdir()
    layer = HeadLayer(target.heads, target.kv_heads, target.hidden // target.heads, target.inner)
    head = Eagle1(RankTree((0,), (0,)), HiddenStates(place="normed", shift=1), layer)
    architecture = read_architecture(folder.parent / "narrow" / "config.json")
    config, named = safeailab(head, architecture)
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(1)
    state = {
        named(name): torch.randn(shape, generator=generator) / shape[-1] ** 0.5
        for name, shape in head.tensors(architecture).items()
    }
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def _layer_seconds(folder: Path, large: Llama) -> dict[str, float]:
    """Seconds of one large layer for ROWS_ON_CHECKPOINT rows, by torch and by NumPy with its reading, and shares."""
    save_llama(folder, replace(large, layers=1, vocabulary=256))
    checkpoint = identify(folder)
    tree = Tree((0, *range(ROWS_ON_CHECKPOINT - 1)), tuple(range(ROWS_ON_CHECKPOINT)))
    by_torch = TorchOracle("cpu").model(checkpoint, "bfloat16")
    torch_s = _process_seconds(lambda: by_torch.nodes((), tree))
    numpy_s = _process_seconds(lambda: SharedPrefix(parameters_by_layer(checkpoint, "bfloat16")).nodes((), tree))
    digest_s = _process_seconds(lambda: identify(folder))
    peak = _float64_flops()
    flops = 2 * large.layer_weights * ROWS_ON_CHECKPOINT
    return {
        "torch_layer_s": torch_s,
        "numpy_layer_s": numpy_s,
        "digest_bytes_per_s": 2 * large.layer_weights / digest_s,
        "host_flops": peak,
        "share": min(1.0, flops / (torch_s * peak)),
    }


def _float64_flops() -> float:
    """Floating-point operations a second of this processor in a product of two float64 matrices."""
    side = 1536
    left, right = (torch.randn(side, side, dtype=torch.float64) for _ in range(2))
    return 2 * side**3 / min(_process_seconds(lambda: left @ right) for _ in range(4))


def _process_seconds(run: Any) -> float:
    began = time.process_time()
    run()
    return time.process_time() - began


@dataclass
class Count:
    """The costs of judging a case.

    Attributes:
        grows: Whether it grows with the tokens of the prompt; the close case has CLOSE_STEPS steps.
        steps: Steps of the case's own run.
        engine_forwards: Forwards of the engine's target.
        engine_s: Processor seconds in them.
        reference_passes: Passes of the reference through the target's layers.
        reference_rows: The rows of all passes.
        reference_s: Processor seconds in them.
        head_rows: Rows that NumPy's head scored over the vocabulary.
        head_s: Processor seconds in that.
        judge_s: Processor seconds in everything else.
    """

    grows: bool
    steps: int = 0
    engine_forwards: int = 0
    engine_s: float = 0.0
    reference_passes: int = 0
    reference_rows: int = 0
    reference_s: float = 0.0
    head_rows: int = 0
    head_s: float = 0.0
    judge_s: float = 0.0


def _count_prompts(folder: Path, sampling: Sampling) -> tuple[list[Count], list[Count]]:
    """The counts of a prompt with variants, and of one without."""
    plan = Plan(
        model=str(folder / "narrow"), draft=str(folder / "head"), cases=2, new_tokens=MEASURED_TOKENS,
        sampling=sampling, dtypes=("bfloat16",), variants=1,
    )  # fmt: skip
    subject, oracle = subject_of(open_planted("cpu-eager", None)), TorchOracle("cpu")
    counts = []
    for case, invariants in prepare(plan, subject, ALL).cases(oracle):
        with _counted(Count(not case.steps)) as count:
            judge(case, invariants, oracle, subject)
            outcome = subject.outcome(case)
        count.steps = len(outcome.steps) if isinstance(outcome, Trace) else CLOSE_STEPS
        counts.append(count)
    return counts[: len(counts) // 2], counts[len(counts) // 2 :]


@contextmanager
def _counted(count: Count) -> Iterator[Count]:
    """Count what runs inside the `with`, in processor seconds of this process."""
    patched = [(CausalLm, "forward"), (SharedPrefix, "_run_tree"), (SharedPrefix, "_append"), (Eagle1Formulas, "score")]
    originals = [getattr(owner, name) for owner, name in patched]

    def forward(model: Any, batch: Any, *inputs: Any, **named: Any) -> Any:
        count.engine_forwards += 1
        began = time.process_time()
        try:
            return originals[0](model, batch, *inputs, **named)
        finally:
            count.engine_s += time.process_time() - began

    def passes(original: Any) -> Any:
        def run(evaluator: Any, context: Any, rows: Any) -> Any:
            count.reference_passes += 1
            count.reference_rows += len(rows)
            began = time.process_time()
            nested_before = count.reference_s
            try:
                return original(evaluator, context, rows)
            finally:  # a pass of a tree may run one of its context inside it
                count.reference_s = nested_before + time.process_time() - began

        return run

    def score(head: Any, output: Any) -> Any:
        count.head_rows += 1 if np.ndim(output) == 1 else len(output)
        began = time.process_time()
        try:
            return originals[3](head, output)
        finally:
            count.head_s += time.process_time() - began

    replacements = [forward, passes(originals[1]), passes(originals[2]), score]
    began = time.process_time()
    try:
        for (owner, name), replacement in zip(patched, replacements, strict=True):
            setattr(owner, name, replacement)
        yield count
    finally:
        for (owner, name), original in zip(patched, originals, strict=True):
            setattr(owner, name, original)
        measured = count.engine_s + count.reference_s + count.head_s
        count.judge_s = time.process_time() - began - measured


def _seconds(
    counts: list[Count], factors: dict[str, float], tokens: int, accepted: float, card: Card, large: Llama
) -> dict[str, float]:
    """The seconds of one prompt by part."""
    seconds = dict.fromkeys(PARTS, 0.0)
    share = factors["share"]
    for count in counts:
        scale = tokens / (1 + accepted) / count.steps if count.grows else 1.0
        # Forwards of narrow layers take the host's time alone: calls of operators, as many as a large layer has.
        launches = large.layers / NARROW.layers
        weights_s = 2 * large.weights / (card.bytes_per_s * share)
        seconds["engine"] += scale * max(count.engine_forwards * weights_s, count.engine_s * launches)
        # A weight is read in bfloat16, written in float64 and read again.
        widening_s = (2 + 8 + 8) * large.weights / (card.bytes_per_s * share)
        products_s = 2 * large.weights * count.reference_rows / (card.float64_flops * share)
        card_s = count.reference_passes * widening_s + products_s
        seconds["reference"] += scale * max(card_s, count.reference_s * launches)
        head_flops = 2 * large.vocabulary * large.hidden * count.head_rows
        seconds["head"] += scale * head_flops / (factors["host_flops"] * share)
        # NumPy runs the context and the rows: two passes through all layers, with embedding and head.
        layers = large.weights / large.layer_weights
        seconds["certificate"] += 2 * layers * factors["numpy_layer_s"] / CASES_PER_CERTIFICATE
        seconds["judge"] += scale * count.judge_s * large.vocabulary / NARROW.vocabulary
    return seconds


def _factor_rows(factors: dict[str, float], card: Card, large: Llama) -> list[dict[str, Any]]:
    here = "measured here, one core"
    data = [
        ("weights of the checkpoint", large.weights, "", "its sizes"),
        ("weights of a layer", large.layer_weights, "", "its sizes"),
        (f"torch in float64, a layer, {ROWS_ON_CHECKPOINT} rows", factors["torch_layer_s"], "s", here),
        (f"NumPy, a layer with its reading, {ROWS_ON_CHECKPOINT} rows", factors["numpy_layer_s"], "s", here),
        ("digest of the files", factors["digest_bytes_per_s"], "bytes/s", here),
        ("products of float64 matrices", factors["host_flops"], "flop/s", here),
        ("share of that peak in a layer, assumed of the card", factors["share"], "", here),
        ("float64 on tensor cores", card.float64_flops, "flop/s", card.source),
        ("memory", card.bytes_per_s, "bytes/s", card.source),
        ("cases per certificate", CASES_PER_CERTIFICATE, "", "certificate.py"),
        ("accepted drafted tokens per step", factors["accepted"], "", "given"),
        ("steps of a prompt", factors["steps"], "", "tokens / (1 + accepted)"),
    ]
    return [dict(zip(("name", "value", "unit", "source"), row, strict=True)) for row in data]


def _count_rows(counts: dict[str, tuple[list[Count], list[Count]]]) -> list[dict[str, Any]]:
    """The costs of a prompt's cases, per step of a long case and in all of a close one."""
    rows = []
    for kind, by_prompt in counts.items():
        for words, cases in zip(("with variants", "without"), by_prompt, strict=True):
            for count in cases:
                per = f"per step of {kind} text" if count.grows else f"of the first steps of {kind} text"
                steps = count.steps if count.grows else 1
                for field, value in (
                    ("engine forwards", count.engine_forwards), ("reference passes", count.reference_passes),
                    ("reference rows", count.reference_rows), ("head rows", count.head_rows),
                    ("judge", count.judge_s),
                ):  # fmt: skip
                    unit = "s" if field == "judge" else ""
                    row = {"name": f"{field} {per}, {words}", "value": value / steps, "unit": unit}
                    rows.append({**row, "source": "measured here, narrow checkpoint"})
    return rows
