"""`--draft`: heads and second models on a checkpoint, refusals in one line, and replays by digest."""

import json
import re
import shlex
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specverify.backends.compositions import open_cpu
from specverify.backends.engine.model.models import from_disk
from specverify.backends.registry import open_backend
from specverify.checkpoints.cases import prepare
from specverify.checkpoints.given_draft import given_draft
from specverify.checkpoints.sessions import check_admitted, side_by_side
from specverify.cli import main
from specverify.commands.sampling_options import sampling_of
from specverify.plan import Plan
from specverify.properties.invariants import ALL
from specverify.properties.tally import Failure
from specverify.properties.verdict.finding import Finding, Verdict
from specverify.properties.verdict.judge import judge
from specverify.reference.abilities import Abilities
from specverify.reference.case import Case
from specverify.reference.draft import LanguageModel
from specverify.reference.draft.block import Block
from specverify.reference.draft.eagle1 import Eagle1
from specverify.reference.draft.eagle3 import Eagle3
from specverify.reference.draft.head import Head
from specverify.reference.draft.hidden import HiddenStates
from specverify.reference.draft.layer_head import HeadLayer
from specverify.reference.draft.medusa import Medusa
from specverify.reference.draft.mtp import Mtp
from specverify.reference.draft_files import open_head
from specverify.reference.layout import KINDS
from specverify.reference.oracle.checkpoint import identify
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.oracle.parameters import load
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.trace import Stage
from specverify.reference.tree import RankTree
from specverify.reference.weights import seeded_weights
from specverify.reports import bundle
from specverify.setup.errors import UnusableInput
from specverify.setup.subjects import open_planted, subject_of
from tests.corruption import ORACLE
from tests.headfiles import TARGET, checkpoint, save_head, weights_of
from tests.inprocess import in_this_process
from tests.tiers import first

BARE, NORMED = RankTree((0,), (0,)), HiddenStates(place="normed", shift=1)
LAYER = HeadLayer(2, 1, 4, 12)
EAGLE1 = Eagle1(BARE, NORMED, LAYER)
EAGLE3 = Eagle3(BARE, HiddenStates((1, 3, 4), shift=1), LAYER, (1, 2, 5, 11, 16))
MEDUSA = Medusa(BARE, HiddenStates(place="normed"), 2)
MTP = Mtp(BARE, NORMED, LAYER, 2, normed_back=True)
DFLASH = Block(BARE, HiddenStates((1, 3, 5)), LAYER, 5, 23, layers=2, windows=(3, 0), causal="windowed")

DFLASH2 = replace(DFLASH, causal="none", conv_taps=2, conv_group=4, selector_rank=3, selector_top_k=4)


@pytest.fixture(autouse=True)
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    in_this_process(monkeypatch)
    return tmp_path


def run_command(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    assert isinstance(ended.value.code, int)
    out, err = capfd.readouterr()
    return ended.value.code, out + err


JUDGED = ("--invariant", "draft.fidelity", "--invariant", "lossless.greedy-match")
SHORT = ("--cases", "1", "--new-tokens", "4", "--dtype", "float64", *JUDGED)

HEADS: dict[str, tuple[Head, str]] = {
    "eagle1": (EAGLE1, "vllm"), "eagle3": (EAGLE3, "safeailab"), "medusa": (MEDUSA, "fasterdecoding"),
    "block": (DFLASH, "zlab"),
}  # fmt: skip


@pytest.mark.parametrize("kind", [*HEADS, "mtp"])
def test_a_head_drafts_for_a_checkpoint(kind: str, work: Path, capfd: pytest.CaptureFixture[str]) -> None:
    if kind == "mtp":
        checkpoint(work / "target", weights_of(MTP), num_nextn_predict_layers=2)
        code, output = run_command(capfd, "diff", "--model", "target", "--draft", "target", "--verbose", *SHORT)
    else:
        checkpoint(work / "target")
        save_head(work / "head", *HEADS[kind])
        code, output = run_command(capfd, "diff", "--model", "target", "--draft", "head", "--verbose", *SHORT)
    assert code == 0, output
    lines = (work / ".specverify" / "results.jsonl").read_text().splitlines()
    outcomes = [json.loads(line) for line in lines]
    assert len(outcomes) >= 2
    assert f"({kind} " in " ".join(output.split())


@pytest.mark.slow
@pytest.mark.parametrize(
    "draft", [DFLASH, DFLASH2, replace(DFLASH, from_anchor=True, markov_rank=3)], ids=["dflash", "dflash2", "dspark"]
)
def test_a_published_draft_of_blocks_agrees_and_tokens_of_it_are_accepted(
    draft: Block, work: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    checkpoint(work / "target")
    save_head(work / "head", draft, "zlab")
    code, output = run_command(
        capfd, "diff", "--model", "target", "--draft", "head", "--cases", "6", "--new-tokens", "12"
    )
    assert code == 0, output
    accepted = re.search(r"([\d.]+) drafted tokens? accepted per step", " ".join(output.split()))
    assert accepted is not None, output
    assert float(accepted[1]) > 0
    wrong = (
        ("--fault", "block-slots-read-one-early")
        if not draft.from_anchor
        else ("--fault", "block-first-scores-dropped")
    )
    code, output = run_command(
        capfd, "diff", "--model", "target", "--draft", "head", "--cases", "2", "--new-tokens", "8", *wrong
    )
    assert code == 1, output
    assert "draft.fidelity" in output


@pytest.mark.parametrize("kind", [*HEADS, "mtp"])
def test_each_side_reads_the_weights_that_were_written(kind: str, work: Path) -> None:
    head = MTP if kind == "mtp" else HEADS[kind][0]
    if kind == "mtp":
        further = {
            f"model.layers.{layer}.shared_head.head.weight": seeded_weights(TARGET)["lm_head.weight"]
            for layer in (8, 9)
        }
        folder = checkpoint(work / "target", weights_of(MTP) | further, num_nextn_predict_layers=2)
    else:
        checkpoint(work / "target")
        folder = save_head(work / "head", *HEADS[kind])
    opened = open_head(folder, identify(work / "target"))
    assert opened.words == replace(head, files=opened.words.files)
    for name, array in weights_of(head).items():
        np.testing.assert_array_equal(opened.weights[name], array)


REFUSED = {
    "builtin:eagle3": "no package ships a draft head yet; known: ngram, scripted, model:DIR, or the directory",
    "nowhere": "nowhere: no such directory; give the directory of a draft head",
    "large": "hidden_size is 64, and the target target has 8: the head of another target",
    "target": "its tensors are those of no draft head that is read here",
    "model:other": "another vocabulary than the target's: id 2 is 'x' there and 'c' in target",
    "model:mute": "no tokenizer",
    "model:narrow": "it scores 22 token ids and the target 24, and its tokenizer has the token 23",
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_draft_that_cannot_be_used_is_refused_in_one_line(
    name: str, work: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    letters = "abcdefghijklmnopqrstuvw?"
    checkpoint(work / "target", tokens=letters)
    save_head(work / "large", EAGLE3, "safeailab", {"hidden_size": 64})
    checkpoint(work / "other", tokens=letters.replace("c", "x"))
    checkpoint(work / "mute")
    narrow = {name: np.ones((22, 8)) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    checkpoint(work / "narrow", narrow, letters, vocab_size=22)
    code, output = run_command(capfd, "diff", "--model", "target", "--draft", name, *SHORT)
    assert code == 2
    assert REFUSED[name] in output
    assert output.startswith("specverify: ")
    assert output.count("\n") == 1


LETTERS = "abcdefghijklmnopqrs?"
"""The tokens of a target of 24 rows and of a draft with other rows; the rows behind them have no token."""

SIZES = (22, 30)
"""Fewer rows than the target has, as Qwen 2.5 0.5B beside 7B, and more."""


def save_padded(folder: Path, rows: int) -> Path:
    """A second model with the tokens LETTERS and `rows` rows; the scores of those without a token are the largest."""
    seeded = seeded_weights(replace(TARGET, seed=5))
    weights = {}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = np.full((rows, 8), 0.5)
        weights[name][: len(LETTERS)] = seeded[name][: len(LETTERS)]
    return checkpoint(folder, weights, LETTERS, vocab_size=rows)


@pytest.mark.parametrize("rows", first(SIZES, 1))
def test_a_second_model_with_other_rows_drafts_tokens_alone(rows: int, work: Path) -> None:
    target = identify(checkpoint(work / "target", tokens=LETTERS))
    save_padded(work / "second", rows)
    draft = given_draft("model:second", target, None)
    assert isinstance(draft, LanguageModel)
    assert draft.vocabulary == tuple(range(len(LETTERS)))
    checks = tuple(invariant for invariant in ALL if invariant.name in ("draft.fidelity", "lossless.greedy-match"))
    proposed: set[int] = set()
    for prompt in ((3, 1, 4), (23, 21, 22), (7,)):  # the second one has ids without a token
        case = Case(target, prompt, draft, stops=Stops(8), dtype="float64")
        verdict = judge(case, checks, ORACLE, subject_of(open_cpu()))
        assert not verdict.findings
        assert verdict.outcomes["draft.fidelity"] == "checked"
        steps = ORACLE(case).steps
        proposed |= {token for step in steps if step.drafted for token in step.drafted.tree.token[1:]}
    assert proposed
    assert max(proposed) < len(LETTERS)
    wrong = subject_of(open_planted("cpu-eager", "padded-row-proposed"))
    assert judge(case, checks, ORACLE, wrong).first is not None


@pytest.mark.parametrize("rows", SIZES)
def test_oracle_engine_and_transformers_have_the_same_resized_rows(rows: int, work: Path) -> None:
    model = identify(save_padded(work / "second", rows)).with_rows(24)
    weights = load(model, "float64").state
    network = from_disk(model, "float64").state_dict()
    stored = load(model.with_rows(rows), "float64").state
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert weights[name].shape == (24, 8)
        np.testing.assert_array_equal(weights[name], network[name].numpy())
        np.testing.assert_array_equal(weights[name][:22], stored[name][:22])
        assert rows > 24 or not weights[name][22:].any()


def test_a_second_model_with_other_rows_runs_from_the_command_line(
    work: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    checkpoint(work / "target", tokens=LETTERS)
    save_padded(work / "second", 22)
    arguments = ("diff", "--model", "target", "--draft", "model:second", *SHORT)
    assert run_command(capfd, *arguments)[0] == 0
    code, output = run_command(capfd, *arguments, "--fault", "padded-row-proposed")
    assert code == 1, output


def test_a_backend_that_drafts_by_itself_is_told_no_part_of_a_vocabulary(work: Path) -> None:
    target = identify(checkpoint(work / "target", tokens=LETTERS))
    save_padded(work / "second", 22)
    own_drafts = Abilities(dtypes=("float64",), drafts=("model",), draft_trees=False)
    with pytest.raises(UnusableInput, match="declares no drafts that name a part of the vocabulary"):
        given_draft("model:second", target, own_drafts)


def test_a_draft_needs_a_model(capfd: pytest.CaptureFixture[str]) -> None:
    code, output = run_command(capfd, "diff", "--draft", "ngram")
    assert code == 2
    assert "--draft needs --model" in output


@pytest.mark.parametrize("name", ["ngram", "scripted", "model:target"])
def test_a_draft_without_weights_of_its_own_is_the_only_one(
    name: str, work: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    checkpoint(work / "target", tokens="abcdefghijklmnopqrstuvw?")
    code, output = run_command(capfd, "diff", "--model", "target", "--draft", name, "--verbose", *SHORT)
    assert code == 0, output
    assert f"({name.partition(':')[0]} " in " ".join(output.split())


def test_a_replay_opens_a_head_only_where_the_user_names_it(work: Path, capfd: pytest.CaptureFixture[str]) -> None:
    target = identify(checkpoint(work / "target"))
    save_head(work / "head", EAGLE3, "safeailab")
    words = open_head("head", target).words
    case = Case(target, (3, 5), replace(words, shape=RankTree((0, 0), (0, 0))), stops=Stops(3), dtype="float64")
    finding = Finding("draft.fidelity", Stage.DRAFTED, 0, {"node": 0}, 1, 2)
    verdict = Verdict(case, "cpu-eager", {finding.invariant: "failed"}, (finding,))
    failure = Failure(verdict, finding, case.id, backend="cpu-eager", model="target")
    file = str(bundle.save(".", failure, {}))
    code, output = run_command(capfd, "replay", file, "--model", "target")
    assert code == 2
    assert "runs the EAGLE-3 head head" in output
    assert "add --draft head, or the folder where these weights lie" in output
    (work / "head").rename(work / "moved")
    code, output = run_command(capfd, "replay", file, "--model", "target", "--draft", "moved")
    assert (code, output.split()[0]) == (0, "FIXED")
    command = bundle.replay_command(replace(failure, file=file))
    assert command is not None
    assert shlex.split(command)[-4:] == ["--model", "target", "--draft", "head"]
    save_head(work / "head", EAGLE3, "safeailab", {"rope_theta": 5e5})
    code, output = run_command(capfd, "replay", file, "--model", "target", "--draft", "head")
    assert code == 2
    assert "a name in a file opens nothing" in output


QUICK = ("branch", "paged")
"""Layouts that stand for the others where -m slow is not asked for."""


@pytest.mark.parametrize(
    "layout", [pytest.param(kind, marks=() if kind in QUICK else pytest.mark.slow) for kind in KINDS]
)
def test_prompts_run_side_by_side_in_every_layout(layout: str, work: Path, capfd: pytest.CaptureFixture[str]) -> None:
    checkpoint(work / "target")
    save_head(work / "head", EAGLE3, "safeailab")
    short = ("--cases", "3", "--new-tokens", "3", "--dtype", "float64", "--batch", "2", "--layout", layout)
    judged = ("--invariant", "lossless.greedy-match", "--invariant", "lossless.interruption-isolated")
    code, output = run_command(
        capfd, "diff", "--model", "target", "--draft", "head", *short, *judged, "--json", "told.json"
    )
    assert code == 0, output
    result = json.loads((work / "told.json").read_text())
    for name in judged[1::2]:
        assert result["invariants"][name]["checked"] == 2, result["invariants"][name]


def test_a_session_of_prompts_evicts_and_forks(work: Path) -> None:
    target = identify(checkpoint(work / "target"))
    alone = [Case(target, (3, 1, token), stops=Stops(3)) for token in (4, 5, 6)]
    together, last = side_by_side(alone, 2)
    assert together.session is not None
    assert last.session is not None
    assert [len(case.session.mates) for case in (together, last) if case.session] == [2, 1]
    kinds = {action.kind for action in together.session.actions}
    assert kinds == {"add", "step", "fork", "preempt", "evict", "restore"}
    oracle = Oracle()
    run = subject_of(open_backend("cpu-eager"))(together)
    assert run.shared is not None
    members = [request for request in run.shared.requests if request is not None]
    assert len(members) == 3
    assert [member.output for member in members[:2]] == [oracle(case).output for case in alone[:2]]
    assert all(member.finish == "length" for member in members)


def test_a_batch_is_refused_where_the_backend_runs_one_request(work: Path, capfd: pytest.CaptureFixture[str]) -> None:
    target = identify(checkpoint(work / "target"))
    case = next(side_by_side([Case(target, (3, 1), stops=Stops(3))] * 4, 4))
    for lacking, words in (({"sessions": False}, "sessions"), ({"most_requests": 2}, "session of 5 requests")):
        declared = replace(open_backend("cpu-eager").declaration, **lacking)
        with pytest.raises(UnusableInput, match=f"^--batch 4: the backend declares no {words}$"):
            check_admitted(case, declared, "--batch 4")
    code, output = run_command(capfd, "diff", "--model", "target", "--draft", "scripted", "--batch", "2")
    assert code == 2
    assert "--batch needs --model, and a draft other than scripted" in output
    # An engine that takes a prompt and returns a text runs no session: each prompt alone would be another test.
    (work / "alone.py").write_text(
        "from specverify.adapt import blackbox\nopen_ = blackbox(lambda prompt_ids, max_new_tokens: [])\n"
    )
    code, output = run_command(
        capfd, "diff", "--backend", "alone:open_", "--model", "target", "--cases", "2", "--batch", "2"
    )
    assert (code, output.count("\n")) == (2, 1)
    assert "--batch 2: the backend declares no sessions" in output


def test_a_run_tells_its_time_before_its_first_case_and_ends_at_the_checkpoints_own_token(
    work: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    checkpoint(work / "target", eos_token_id=list(range(0, 24, 2)))
    code, output = run_command(capfd, "diff", "--model", "target", "--draft", "ngram", *SHORT, "--new-tokens", "30")
    assert code == 0
    first, line = (text_line for text_line in output.splitlines() if text_line.startswith("specverify: "))
    assert first == "specverify: target: 2 cases; its weights are being read"
    assert re.fullmatch(
        r"specverify: 2 cases of up to 30 tokens: about \d+ s; reading the weights and the first step took [\d.]+ s, "
        r"a step takes [\d.]+ s in the oracle and [\d.]+ s in the backend",
        line,
    ), line
    checkpoint_of = identify(work / "target")
    plan = Plan(model="target", draft="ngram", cases=2, new_tokens=30, dtypes=("float64",), layout="paged")
    subject = subject_of(open_backend("cpu-eager"))
    for case, _ in prepare(plan, subject, ALL).cases(Oracle()):
        assert case.model == replace(checkpoint_of, source="target")
        assert case.stops.eos == tuple(range(0, 24, 2))
        assert case.layout.kind == "paged"
        if not case.steps:
            assert subject(case).finish == "eos"


STATED = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1}


@pytest.mark.parametrize("sampled", [True, False])
def test_a_run_takes_the_checkpoints_own_settings(sampled: bool, work: Path, capfd: pytest.CaptureFixture[str]) -> None:
    checkpoint(work / "target")
    (work / "target" / "generation_config.json").write_text(json.dumps({**STATED, "do_sample": sampled}))
    sampling = sampling_of("target", {"own_settings": True, "rule": None, "draws": None})
    assert sampling.temperature == (0.6 if sampled else 0.0)
    assert sampling.repetition_penalty == 1.1
    assert (sampling.top_p, sampling.top_k) == ((0.9, 20) if sampled else (1.0, 0))
    code, output = run_command(
        capfd,
        "diff",
        "--model",
        "target",
        "--draft",
        "ngram",
        "--own-settings",
        *SHORT[:6],
        *JUDGED[:2],
        "--invariant",
        "lossless.stops",
        "--new-tokens",
        "3",
    )
    assert code == 0, output


WRONG_SETTINGS = {
    "both": ({}, ["--temperature", "1"], "--own-settings and --temperature contradict each other"),
    "beams": ({"num_beams": 4}, [], "num_beams is 4, which no case can hold"),
    "heat": ({"do_sample": True, "temperature": -1}, [], "generation_config.json: temperature"),
    "none": (None, [], "generation_config.json is missing"),
    "forced": ({"forced_eos_token_id": 4}, [], "forced_eos_token_id is 4, which no case can hold; remove it"),
    "beyond": ({"suppress_tokens": [99]}, [], "sampling.bad_words[0][0]: 99 is not in the vocabulary of 24"),
}


@pytest.mark.parametrize("name", WRONG_SETTINGS)
def test_settings_that_no_case_can_hold_are_refused(name: str, work: Path, capfd: pytest.CaptureFixture[str]) -> None:
    content, further, words = WRONG_SETTINGS[name]
    checkpoint(work / "target")
    if content is not None:
        (work / "target" / "generation_config.json").write_text(json.dumps(content))
    code, output = run_command(capfd, "diff", "--model", "target", "--own-settings", *further)
    assert code == 2
    assert words in output


SECOND_MODEL_BOX = """
import torch
from specverify.adapt import Generated, blackbox


@torch.no_grad()
def generate(prompt_ids, max_new_tokens, model, draft_model):
    text, drafted, accepted = list(prompt_ids), 0, 0
    while len(text) < len(prompt_ids) + max_new_tokens:
        drafter = draft_model or model
        proposed = int(drafter(torch.tensor([text])).logits[0, -1].argmax())
        best = int(model(torch.tensor([text])).logits[0, -1].argmax())
        drafted += 1
        accepted += proposed == best
        text.append({CHOICE})
    return Generated(text[len(prompt_ids):], proposed=drafted, accepted=accepted)


open_ = blackbox(generate, dtypes=("float64",))
"""


@pytest.mark.parametrize(("choice", "code"), [("best", 0), ("proposed", 1)])
def test_a_black_box_is_judged_with_a_second_model(
    choice: str, code: int, work: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    letters = "abcdefghijklmnopqrstuvw?"
    checkpoint(work / "target", tokens=letters)
    scores = seeded_weights(TARGET)["lm_head.weight"]
    checkpoint(work / "second", {"lm_head.weight": np.concatenate([scores[11::-1], scores[12:]])}, letters)
    (work / f"appends_{choice}.py").write_text(SECOND_MODEL_BOX.replace("{CHOICE}", choice))
    judged = ("--cases", "2", "--new-tokens", "6", "--json", "told.json")
    drafted = ("--model", "target", "--draft", "model:second")
    ended, output = run_command(capfd, "diff", "--backend", f"appends_{choice}:open_", *drafted, *judged)
    assert ended == code, output
    assert json.loads((work / "told.json").read_text())["judged"] > 0


@pytest.mark.parametrize(
    ("draft", "changes"),
    [
        *product((None, "ngram", "scripted", "head"), ({}, {"sampling": Sampling(0.8)}, {"steps": 2})),
        *product((None, "ngram", "head"), ({"batch": 2},)),
    ],
)
def test_a_backend_of_chains_is_given_chains(draft: str | None, changes: dict[str, Any], work: Path) -> None:
    checkpoint(work / "target")
    save_head(work / "head", EAGLE3, "safeailab")
    subject = subject_of(open_planted("cpu-eager", None))
    assert subject.abilities is not None
    subject.abilities = replace(subject.abilities, trees="chains")
    plan = replace(Plan(model="target", draft=draft, cases=2, new_tokens=4, dtypes=("float64",)), **changes)
    cases = [case for case, _ in prepare(plan, subject, ALL).cases(Oracle())]
    assert cases
    refusals = {Abilities.outside(subject.abilities, case) for case in cases}
    assert refusals == {None}
