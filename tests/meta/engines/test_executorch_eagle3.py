"""The adapter of ExecuTorch's plan for EAGLE-3: exported programs are judged, and faults planted in them are found."""

import json
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specverify.backends.adapt import save_executorch_eagle3, transformers_model
from specverify.backends.adapt.eagle3_programs import open_pair
from specverify.backends.adapt.eagle3_runner import DECLARATION, Eagle3Runner
from specverify.backends.adapt.export.executorch_eagle3 import (
    TARGET,
    AllRows,
    LastRow,
    Lengths,
    TargetRows,
    save_draft,
    save_target,
)
from specverify.cli import main
from specverify.properties.invariants import ALL
from specverify.properties.strategies.models import GALLERY
from specverify.properties.verdict.finding import Verdict
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.draft import Scripted
from specverify.reference.draft.eagle3 import Eagle3
from specverify.reference.draft.hidden import HiddenStates
from specverify.reference.draft.layer_head import HeadLayer
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.tree import RankTree, Tree
from specverify.reference.weights import head_weights
from tests import judging
from tests.headfiles import checkpoint, save_head
from tests.inprocess import in_this_process

pytest.importorskip("executorch", reason="executorch is not installed")
# Its exporter calls what Python 3.11 and torch deprecate.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

MODEL = Seeded(next(arch for arch in GALLERY if arch.family == "qwen3" and not any(arch.windows)), 0)
PROMPT = (3, 1, 4, 1, 5)
AHEAD = Oracle()(Case(MODEL, PROMPT, stops=Stops(8))).output
HEAD = Eagle3(
    RankTree((0, 0, 1, 2), (0, 0, 0, 0)), HiddenStates((-1, 0), shift=1), HeadLayer(4, 2, 8, 32),
    tuple(sorted({*AHEAD[:3], 2, 18})), seed=1,
)  # fmt: skip
LENGTHS = Lengths(max_seq_len=64, max_prefill_chunk=4, num_speculative_tokens=3)
CASE = Case(MODEL, PROMPT, HEAD, stops=Stops(8))


ON_THESE_PROGRAMS = [invariant.name for invariant in ALL if invariant.name != "acceptance.vocabulary-permutation"]
"""Invariants of which no variant has other models."""


def verdict_of(backend: Eagle3Runner, case: Case) -> Verdict:
    return judging.verdict_of(backend, case, *ON_THESE_PROGRAMS)


def network() -> Any:
    return transformers_model(MODEL, "float32")


@lru_cache
def draft_program(folder: Path) -> Path:
    weights = {name: torch.tensor(values) for name, values in head_weights(HEAD.weights, MODEL).items()}
    return save_draft(network(), HEAD, weights, folder / "draft.pte", LENGTHS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("programs")


def open_runner(folder: Path, name: str, **options: Any) -> Eagle3Runner:
    """The backend of the head's program and of a target that is exported with `options`."""
    pair = open_pair(save_target(network(), HEAD.reads, folder / name, LENGTHS, **options), draft_program(folder))
    return Eagle3Runner(DECLARATION, lambda case: pair)


@pytest.fixture(scope="module")
def sound(folder: Path) -> Eagle3Runner:
    return open_runner(folder, "sound.pte")


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, seed=5, top_p=0.9)], ids=["greedy", "sampled"])
def test_chains_of_a_head_agree_with_the_oracle(sound: Eagle3Runner, sampling: Sampling) -> None:
    verdict = verdict_of(sound, replace(CASE, sampling=sampling))
    assert verdict.agreed, verdict.first
    checked = {name for name, outcome in verdict.outcomes.items() if outcome == "checked"}
    assert {"draft.fidelity", "draft.hidden-state-descriptor", "attention.context-exact"} <= checked
    assert ("acceptance.greedy-walk" in checked) == sampling.greedy


def test_some_chains_are_accepted_and_some_rejected(sound: Eagle3Runner) -> None:
    lengths = {len(step.accepted.path) for step in sound.run(CASE).steps if step.accepted is not None}
    assert len(lengths) > 1


def test_a_whole_prompt_is_prefilled_in_chunks_where_no_state_is_needed(sound: Eagle3Runner) -> None:
    chain = Tree((0, 0, 1, 2), (PROMPT[-1], AHEAD[0], (AHEAD[1] + 1) % MODEL.vocab_size, AHEAD[2]))
    verdict = verdict_of(sound, replace(CASE, prompt=(2, 7, *PROMPT), draft=Scripted((chain,))))
    assert verdict.agreed, verdict.first


class StateBefore(LastRow):
    """`target_decode` with the state of the call before."""

    stale: Tensor

    def __init__(self, rows: TargetRows) -> None:
        super().__init__(rows)
        self.register_buffer("stale", torch.zeros(1, HEAD.reads.parts * network().config.hidden_size))

    def forward(self, tokens: Tensor, input_pos: Tensor) -> tuple[Tensor, Tensor]:
        logits, states = super().forward(tokens, input_pos)
        handed = self.stale.clone()
        self.stale.copy_(states)
        return logits, handed


class ShiftedLogits(AllRows):
    """`target_verify` with the logits of the row before; the first keeps its own."""

    def forward(self, tokens: Tensor, input_pos: Tensor) -> tuple[Tensor, Tensor]:
        logits, states = super().forward(tokens, input_pos)
        return torch.cat([logits[:, :1], logits], 1)[:, :-1], states


class StaleRows(TargetRows):
    """A cache in which a row sees what a rejected chain left in the two slots behind it."""

    def visible(self, input_pos: Tensor) -> Tensor:
        return torch.where(self.places[None] <= input_pos[:, None] + 2, 0.0, -1e9)


def failures(backend: Eagle3Runner, case: Case) -> set[str]:
    return {name for name, outcome in verdict_of(backend, case).outcomes.items() if outcome == "failed"}


@pytest.mark.parametrize(
    ("options", "invariant"),
    [
        ({"methods": {**TARGET, "target_decode": StateBefore}}, "draft.hidden-state-descriptor"),
        ({"methods": {**TARGET, "target_verify": ShiftedLogits}}, "attention.context-exact"),
        ({"rows": StaleRows}, "attention.context-exact"),
    ],
    ids=["decode-state-before", "verify-logits-shifted", "stale-rows-visible"],
)
def test_a_fault_in_an_exported_target_is_found(folder: Path, options: dict[str, Any], invariant: str) -> None:
    assert invariant in failures(open_runner(folder, "faulty.pte", **options), CASE)


@pytest.mark.slow
def test_programs_of_a_user_are_judged_on_their_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    in_this_process(monkeypatch)
    head = Eagle3(RankTree((0,), (0,)), HiddenStates((1, 3, 4), shift=1), HeadLayer(2, 1, 4, 12), (1, 2, 5, 11, 16))
    checkpoint(tmp_path / "target")
    save_head(tmp_path / "head", head, "safeailab")
    files = (tmp_path / "target.pte", tmp_path / "draft.pte")
    save_executorch_eagle3(
        "target", "head", *files, "all", max_seq_len=64, max_prefill_chunk=8, num_speculative_tokens=4
    )
    Path("my_programs.py").write_text(
        "from specverify.adapt import executorch_eagle3\n\nopen_ = executorch_eagle3('target.pte', 'draft.pte')\n"
    )
    arguments = ("--model", "target", "--draft", "head", "--cases", "3", "--new-tokens", "6", "--dtype", "float32")
    with pytest.raises(SystemExit) as ended:
        main(["diff", "--backend", "my_programs:open_", *arguments, "--json", "out.json"])
    out, err = capfd.readouterr()
    assert ended.value.code == 0, out + err
    assert json.loads(Path("out.json").read_text())["invariants"]["draft.hidden-state-descriptor"]["checked"] > 0
