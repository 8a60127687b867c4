"""Components: a stranger's function in its place in our engine is judged there, and nothing else is blamed for it."""

import importlib.util
import json
import re
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from specverify.adapt import component
from specverify.backends.adapt.component import CONTRACTS
from specverify.cli import main
from specverify.properties.invariants import ALL
from specverify.properties.strategies import cases
from specverify.properties.strategies.models import GALLERY
from specverify.properties.strategies.settings import explore
from specverify.properties.verdict.judge import judge
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.draft import LanguageModel, Scripted
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.tree import RankTree, Tree
from specverify.setup.subjects import subject_of
from tests.inprocess import in_this_process
from tests.judging import verdict_of
from tests.models import LLAMA
from tests.strangers.components import plain

ORACLE = Oracle(keep=256)
PLAIN = "tests.strangers.components.plain:open_verify"


def right(kind: str) -> Any:
    """The opened component of `plain` without a fault."""
    return getattr(plain, f"open_{kind}")()


def accepting(case: Case) -> Case:
    """The case with a tree in which the second child of the root is accepted, and one below it."""
    ahead = ORACLE(case).output
    wrong_token = (ahead[0] + 1) % case.model.vocab_size
    tree = Tree((0, 0, 0, 2, 2), (case.prompt[-1], wrong_token, ahead[0], wrong_token, ahead[1]))
    return Case(case.model, case.prompt, Scripted((tree,)), stops=case.stops)


GREEDY = accepting(Case(Seeded(GALLERY[1], 6), (3, 1, 4), stops=Stops(6)))
DRAWN = Case(
    LLAMA,
    (3, 1, 4),
    LanguageModel(Seeded(GALLERY[1], 3), RankTree((0, 0, 1), (0, 0, 0))),
    sampling=Sampling(2.5, draws="with-replacement"),
    stops=Stops(6),
)
KINDS = {"tree_builder": GREEDY, "verify": GREEDY, "sampler": DRAWN, "coined": DRAWN, "attention": GREEDY,
         "commit": GREEDY}  # fmt: skip
CHECKED = {
    "tree_builder": ("structure.mask-is-ancestry", "structure.positions-are-depth", "attention.context-exact"),
    "verify": ("acceptance.greedy-walk", "acceptance.support", "lossless.greedy-match"),
    "sampler": ("acceptance.law-exact", "acceptance.law-joint", "lossless.distribution"),
    "coined": ("acceptance.sampled-walk", "acceptance.proposal-consistent"),
    "attention": ("attention.visibility-exact", "attention.context-exact", "attention.no-leakage"),
    "commit": ("cache.commit-equivalence", "cache.untouched-slots"),
}
"""The invariants of each kind's stage that must have compared something."""
UNSEEN = {"tree_builder": "structure.links-walk-the-tree", "sampler": "acceptance.sampled-walk"}
"""Invariants that need what the component does not show."""


HEAVY = ("acceptance.law-", "acceptance.renamed-law", "acceptance.support-at-edges", "lossless.distribution",
         "lossless.seeded")  # fmt: skip
"""Invariants that run a sampler on given coins hundreds of times or more."""


def light(heavy: bool) -> tuple[Any, ...]:
    """The invariants; without HEAVY unless they are wanted."""
    return tuple(invariant for invariant in ALL if heavy or not invariant.name.startswith(HEAVY))


@pytest.mark.parametrize("kind", KINDS)
def test_a_right_component_agrees_and_its_stage_is_checked(kind: str) -> None:
    verdict = judge(KINDS[kind], light(kind != "coined"), ORACLE, subject_of(right(kind)))
    assert verdict.findings == ()
    assert verdict.unsupported is None
    assert [verdict.outcomes[name] for name in CHECKED[kind]] == ["checked"] * len(CHECKED[kind])
    if kind in UNSEEN:
        assert verdict.outcomes[UNSEEN[kind]] == "unobserved"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["acceptance.law-exact", "acceptance.law-joint"])
def test_the_exact_law_of_a_sampler_on_given_coins_is_enumerated(name: str) -> None:
    chosen = [invariant for invariant in ALL if invariant.name == name]
    assert judge(DRAWN, chosen, ORACLE, subject_of(right("coined"))).outcomes[name] == "checked"
    wrong = component(sampler=plain.coined("residual"), draws=plain.DRAWN)()
    assert judge(DRAWN, chosen, ORACLE, subject_of(wrong)).outcomes[name] == "failed"


@pytest.mark.parametrize("fault", plain.FAULTS)
def test_a_planted_fault_is_found_at_the_stage_of_its_component(fault: str) -> None:
    invariant, opened = plain.FAULTS[fault]
    kind = fault.split("-")[0]
    subject, case = subject_of(opened()()), KINDS[kind]
    # A wrong coin decides otherwise for some coins only.
    seeds = range(12) if kind == "coined" else range(1)
    tried = (replace(case, sampling=replace(case.sampling, seed=seed)) for seed in seeds)
    verdicts = (judge(tried_case, light(kind != "coined"), ORACLE, subject) for tried_case in tried)
    verdict = next(verdict for verdict in verdicts if verdict.findings)
    stage = CONTRACTS[{"coined": "sampler"}.get(kind, kind)].stage
    assert verdict.first is not None
    assert verdict.first.stage is stage
    assert any(finding.invariant.startswith(invariant) and finding.stage is stage for finding in verdict.findings)


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_component_cannot_take_is_not_drawn(kind: str) -> None:
    backend = right(kind)
    declared, some = backend.declaration, list[Case]()
    explore(1, 12, cases(declared.dtypes, within=declared), lambda case: some.append(case))
    assert [declared.outside(case) for case in some] == [None] * len(some)
    assert all(case.sampling.greedy is (kind not in ("sampler", "coined")) for case in some)
    assert not any(case.session for case in some)


BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "no dict": (lambda: component(tree_builder=lambda parent: 3), "returned int, expected a dict with any of mask"),
    "an unknown array": (
        lambda: component(tree_builder=lambda parent: {"depths": parent}), "a dict with any of mask, .* not of depths"),
    "too few rows": (
        lambda: component(tree_builder=lambda parent: {"depth": parent[:2]}), r"depth: .*expected int \[rows=5\]"),
    "a mask of other columns": (
        lambda: component(tree_builder=lambda parent: {"mask": torch.ones(5, 6)}), r"mask: .* expected bool"),
    "no pair": (lambda: component(verify=lambda tokens, best: [0]), "returned list of 1, expected a pair"),
    "no root": (lambda: component(verify=lambda tokens, best: ([1], 0)), r"rows that begin with the root \(0\)"),
    "a row too far": (lambda: component(verify=lambda tokens, best: ([0, 9], 0)), "path.*9.*a row from 0 to 4"),
    "a token too far": (lambda: component(verify=lambda tokens, best: ([0], 99)), "bonus: 99, expected a token from"),
    "one head less": (
        lambda: component(attention=lambda query, key, value, mask, scaling: query[:1]), r"output: .* expected float"),
    "keys alone": (
        lambda: component(commit=lambda keys, values, committed, path: keys), "returned Tensor, expected a pair"),
    "a column too many": (
        lambda: component(commit=lambda keys, values, committed, path: (keys, values)), r"keys: .*committed \+ len"),
    "a crash": (lambda: component(verify=lambda tokens, best: 1 / 0), "ZeroDivisionError: division by zero"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_an_answer_of_another_form_is_a_finding_of_its_stage_in_one_line(what: str) -> None:
    opened, line = BAD[what]
    backend = opened()()
    verdict = verdict_of(backend, GREEDY)
    assert verdict.first is not None
    assert verdict.first.invariant == "lossless.completes"
    observed = str(verdict.first.observed)
    assert "\n" not in observed
    assert re.search(line, observed), observed


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "none": ({}, "give one function, as one of tree_builder, verify, sampler, attention, commit, target; found none"),
    "two": ({"verify": plain.verify(), "commit": plain.commit()}, "found verify and commit"),
    "no function": ({"verify": 3}, "verify is int, expected a function"),
    "a strange argument": ({"verify": lambda tokens, mask: 0}, "needs mask, which is none of tokens, parent"),
    "a missing argument": ({"attention": lambda query, key, value, mask: 0}, "takes no scaling; it is given query"),
    "one coin": (
        {"sampler": lambda tokens, p, bonus_coin: 0}, "takes one of accept_coins and bonus_coin; take both or none"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_no_component_is_refused_in_one_line(what: str) -> None:
    parts, line = REFUSED[what]
    with pytest.raises(TypeError, match=line):
        component(**parts)


def test_a_sampler_whose_draws_cannot_be_followed_is_tested_by_generations_alone() -> None:
    def opaque(tokens: torch.Tensor, p: torch.Tensor) -> tuple[list[int], int]:
        coin = int(torch.randint(0, 2**30, ())) / 2**30  # whole numbers cannot be followed
        return [0], min(int((p[0].cumsum(-1) <= coin).sum()), len(p[0]) - 1)

    verdict = verdict_of(component(sampler=opaque, draws=("top-k",))(), Case(
        DRAWN.model, DRAWN.prompt, DRAWN.draft, sampling=Sampling(2.5, draws="top-k"), stops=Stops(6)))  # fmt: skip
    assert verdict.outcomes["acceptance.law-exact"] == "unobserved"
    assert verdict.outcomes["acceptance.law-joint"] == "unobserved"
    assert verdict.outcomes["lossless.distribution"] == "checked"


PARTS = {
    "transformers": ("open_sdpa", "open_eager", "open_sampler"),
    "economize": ("open_layout", "open_greedy", "open_rejection"),
    "dejavuu": ("open_layout", "open_accept", "open_sampled", "open_gather"),
    "sglang": ("open_build", "open_verify", "open_chain", "open_blockwise", "open_extend"),
    "vllm": ("open_greedy", "open_sampled"),
}
"""The parts of other packages that stand beside these tests, in `PACKAGE_parts.py`."""
OF_STAGE = {
    **dict.fromkeys(("open_layout", "open_build"), "structure.mask-is-ancestry"),
    **dict.fromkeys(("open_greedy", "open_accept", "open_verify"), "acceptance.greedy-walk"),
    **dict.fromkeys(("open_sdpa", "open_eager", "open_extend"), "attention.context-exact"),
    "open_gather": "cache.commit-equivalence",
}
"""The invariants that must have compared something, by part; for a sampler on coins the walk, else its proposals."""
EACH = [(package, name) for package, names in PARTS.items() for name in names]


def part(package: str, name: str) -> Any:
    """The opened component of a package; the test is skipped by name where the package is absent."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    try:
        return getattr(import_module(f"tests.strangers.components.{package}_parts"), name)()
    except ImportError as why:
        pytest.skip(f"{package} {metadata.version(package)} cannot be imported: {why}")


@pytest.mark.parametrize(("package", "name"), EACH)
@pytest.mark.filterwarnings("ignore")  # other packages warn as they like
def test_a_part_of_another_package_is_right_on_drawn_cases(package: str, name: str) -> None:
    backend = part(package, name)
    subject, some = subject_of(backend), list[Case]()
    declared = backend.declaration
    explore(7, 6, cases(declared.dtypes, within=declared), lambda case: some.append(case))
    looking = tuple(invariant for invariant in light(False) if invariant.looks_at_run)
    verdicts = [judge(case, looking, ORACLE, subject) for case in some]
    assert [verdict.findings for verdict in verdicts] == [()] * len(verdicts)
    assert all(verdict.judged for verdict in verdicts)
    walked = "acceptance.sampled-walk" if declared.takes_tape else "acceptance.proposal-consistent"
    assert any(verdict.outcomes[OF_STAGE.get(name, walked)] == "checked" for verdict in verdicts)


def test_a_component_is_judged_by_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    in_this_process(monkeypatch)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["diff", "--backend", PLAIN, "--cases", "12", "--jobs", "1", "--json", "result.json"])
    result = json.loads((tmp_path / "result.json").read_text())
    assert (ended.value.code, result["judged"], result["declined"]) == (0, 12, {})
