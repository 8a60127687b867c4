"""Every option of `diff` that shapes a case, against every backend that we ship: in effect, or refused by its name.

An option that a backend drops in silence makes AGREE of a run that judged something else than what was asked for.
Packages that this machine lacks are stood in for: what a backend declares needs none of them.
"""

import importlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest

from specverify.backends.adapters import ADAPTERS, FOLDER, Adapter
from specverify.backends.base import Declaration, Unavailable, Unsupported
from specverify.backends.registry import open_backend
from specverify.backends.shipped import ROWS
from specverify.campaign.ignored import refuse_ignored
from specverify.campaign.worker import drawn_within
from specverify.checkpoints.cases import prepare
from specverify.commands import diff as command
from specverify.dispatch.table import table_json
from specverify.plan import Plan
from specverify.properties.invariants import ALL
from specverify.properties.verdict.subject import Subject
from specverify.reference.case import Case
from specverify.reference.draft_trees import Dispatch
from specverify.reference.layout import KINDS
from specverify.reference.malformed import Malformed
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.rules import Rule
from specverify.reference.sampling import Sampling
from specverify.reference.tree import RankTree
from specverify.setup.errors import UnusableInput
from specverify.setup.given_grammar import read_grammar
from specverify.setup.selection import Unknown, check_declared, check_dtypes, check_latent
from specverify.setup.subjects import open_planted
from tests.checkpoints import readable
from tests.inprocess import exit_code_of

PROCESSOR = "tests.meta.shell.test_every_option:ban_first"


class Anything(type):
    """The class of classes of which each attribute is a class of this kind."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return stand_in(name)


def _stand_in_attribute(self: object, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return stand_in(name)


def stand_in(name: str) -> Any:
    """A class whose objects have any attribute, and return what they are called with: as decorators they do nothing."""
    members = {
        "__init__": lambda self, *_, **__: None,
        "__call__": lambda self, *arguments, **__: arguments[0] if arguments else self,
        "__getattr__": _stand_in_attribute,
    }
    return Anything(name, (), members)


class Missing(ModuleType):
    """A module that stands in for one of a package that is not installed: each of its names is a class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return stand_in(name)


class StandIns:
    """The finder of modules that stand in for the packages `names`."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """The spec of a module of one of the packages; None for any other."""
        is_missing = any(fullname == name or fullname.startswith(f"{name}.") for name in self._names)
        return ModuleSpec(fullname, cast(Any, self), is_package=True) if is_missing else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """An empty module."""
        module = Missing(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing."""


def is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False


@contextmanager
def standing_in(adapter: Adapter) -> Iterator[None]:
    """Inside the `with`, the adapter's file can be imported, whatever is installed."""
    # OpenVINO's exporter imports a module that its adapter's row leaves to the package.
    missing = [name for name in (*adapter.imports, "openvino") if not is_installed(name)]
    before = set(sys.modules)
    finder = StandIns(missing)
    sys.meta_path.insert(0, cast(Any, finder))
    try:
        yield
    finally:
        sys.meta_path.remove(cast(Any, finder))
        for name in set(sys.modules) - before:
            if name.startswith(FOLDER) or any(name == package or name.startswith(f"{package}.") for package in missing):
                del sys.modules[name]


@cache
def declarations() -> dict[str, Declaration]:
    """What each shipped backend declares; those of devices that are absent declare what their twin here does."""
    declared: dict[str, Declaration] = {}
    for row in ROWS:
        try:
            backend = open_backend(row.name)
        except Unavailable:
            backend = open_backend("cpu-eager")
        declared[row.name] = replace(
            backend.declaration, name=row.name, dtypes=row.dtypes, layouts=row.layouts, ranks=row.ranks
        )
    for adapter in ADAPTERS:
        with standing_in(adapter):
            module = importlib.import_module(adapter.module)
            declared[adapter.name] = getattr(module, adapter.attribute)().declaration
    return declared


@dataclass(frozen=True)
class Option:
    """An option with a value.

    Attributes:
        plan: From a plan to the plan with it.
        holds: Whether a case has the value.
    """

    plan: Callable[[Plan, Path], Plan]
    is_met: Callable[[Case], bool]


def with_sampling(rule: Rule = Rule(), draws: str = "", **settings: Any) -> Callable[[Plan, Path], Plan]:  # noqa: B008 - frozen
    """The plan with a temperature, and siblings named as the rule has it, as the command makes it."""
    sampling = Sampling(0.7, rule=rule, draws=draws or rule.promise.draws, **settings)
    return lambda plan, folder: replace(plan, sampling=sampling)


def with_grammar(plan: Plan, folder: Path) -> Plan:
    file = folder / "digits.regex"
    file.write_text("[0-9 ]+")
    return replace(plan, grammar=read_grammar(str(file), "plain"))


def with_trees(plan: Plan, folder: Path) -> Plan:
    file = folder / "trees.json"
    trees = Dispatch((1, 4), (RankTree((0, 0, 1), (0, 0, 0)), RankTree((0, 0, 0), (0, 0, 1))))
    file.write_text(json.dumps(table_json(trees)))
    return replace(plan, draft=f"model:{plan.model}", draft_trees=str(file))


def is_rounded(case: Case) -> bool:
    return case.draft.in_bits == "int8"


OPTIONS: dict[str, Option] = {
    "--batch 2": Option(lambda plan, _: replace(plan, batch=2, cases=2), lambda case: case.session is not None),
    "--concurrency 2": Option(
        lambda plan, _: replace(plan, concurrency=(2,), cases=2), lambda case: case.session is not None
    ),
    "--ranks 2": Option(lambda plan, _: replace(plan, ranks=2), lambda case: case.ranks == 2),
    "--dtype float64": Option(lambda plan, _: replace(plan, dtypes=("float64",)), lambda case: case.dtype == "float64"),
    "--new-tokens 3": Option(lambda plan, _: replace(plan, new_tokens=3), lambda case: case.stops.max_new_tokens == 3),
    "--temperature 0.7": Option(with_sampling(), lambda case: case.sampling.temperature == 0.7),
    "--top-k 2": Option(with_sampling(top_k=2), lambda case: case.sampling.top_k == 2),
    "--top-p 0.5": Option(with_sampling(top_p=0.5), lambda case: case.sampling.top_p == 0.5),
    "--rule typical": Option(with_sampling(rule=Rule("typical")), lambda case: case.sampling.rule.name == "typical"),
    "--draws top-k": Option(with_sampling(draws="top-k"), lambda case: case.sampling.draws == "top-k"),
    "--processor": Option(
        lambda plan, folder: replace(with_sampling()(plan, folder), processors=(PROCESSOR,)),
        lambda case: case.sampling.processors == (PROCESSOR,),
    ),
    "--grammar": Option(with_grammar, lambda case: case.sampling.grammar is not None),
    "--draft ngram": Option(lambda plan, _: replace(plan, draft="ngram"), lambda case: case.draft.TAG == "ngram"),
    "--draft model": Option(
        lambda plan, _: replace(plan, draft=f"model:{plan.model}"), lambda case: case.draft.TAG == "model"
    ),
    "--draft-weights int8": Option(
        lambda plan, _: replace(plan, draft=f"model:{plan.model}", draft_weights="int8"), is_rounded
    ),
    "--draft-trees": Option(with_trees, lambda case: isinstance(case.draft.dispatch, Dispatch)),
    **{
        f"--layout {kind}": Option(
            lambda plan, _, kind=kind: replace(plan, layout=kind),  # type: ignore[misc]
            lambda case, kind=kind: case.layout.kind == kind,  # type: ignore[misc]
        )
        for kind in KINDS
    },
}


def ban_first(tokens: tuple[int, ...], logits: Any) -> Any:
    """A processor that lowers the first logit."""
    changed = logits.copy()
    changed[0] -= 1.0
    return changed


REFUSALS = (UnusableInput, Unknown, Unsupported, Malformed)


class Declared:
    """A subject that is asked for its abilities alone."""

    def __init__(self, abilities: Any) -> None:
        self.abilities = abilities


def outcome(plan: Plan, declared: Declaration, option: Option) -> str:
    """`in effect`, the line that refuses the option or declines its case, or `dropped`."""
    try:
        if plan.layout is not None:
            check_declared(plan.layout, plan.backend, declared.layouts)
            check_latent(plan.layout, plan.backend, declared.layout_settings)
        check_dtypes(plan.dtypes, plan.backend, declared.dtypes)
        within = drawn_within(plan, declared, Oracle())
        refuse_ignored(plan, within, plan.backend)
        # The drafts of a sampled plan that names none are made of what the backend decodes first.
        if plan.draft is None and not plan.sampling.greedy and "ngram" in declared.drafts:
            plan = replace(plan, draft="ngram")
        prepared = prepare(plan, cast(Subject, Declared(within)), ALL)
        cases = [case for case, _ in prepared.cases(Oracle())] if plan.batch or plan.concurrency else [prepared.first]
    except REFUSALS as why:
        return str(why)
    declines = [declared.outside(case) for case in cases]
    if any(declines):
        return f"declared no {next(filter(None, declines)).removeprefix(f'{declared.name} declares no ')}"
    return "in effect" if any(map(option.is_met, cases)) else "dropped"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return readable("llama", tmp_path_factory.mktemp("options"))


NAMES = [*(row.name for row in ROWS), *(adapter.name for adapter in ADAPTERS)]


@pytest.mark.parametrize("name", NAMES)
def test_an_option_is_in_effect_or_refused_by_name(name: str, checkpoint: Path, tmp_path: Path) -> None:
    declared = declarations()[name]
    ranks = 0 if 1 in declared.ranks else declared.ranks[0]
    plain = Plan(
        backend=name, model=str(checkpoint), cases=1, new_tokens=2, dtypes=declared.dtypes[:1], jobs=1, ranks=ranks
    )
    outcomes = {words: outcome(option.plan(plain, tmp_path), declared, option) for words, option in OPTIONS.items()}
    assert [words for words, told_outcome in outcomes.items() if told_outcome == "dropped"] == []
    takes_trees = declared.trees == "any"
    assert outcomes["--new-tokens 3"] == ("in effect" if takes_trees else "declared no trees that branch")
    if declared.max_temperature and takes_trees:
        own_draws = Rule().promise.draws
        assert outcomes["--temperature 0.7"] == (
            "in effect" if not declared.draws or own_draws in declared.draws else f"declared no draws {own_draws}"
        )
        assert outcomes["--draws top-k"] == "in effect" or "top-k" not in declared.draws


def test_our_engine_obeys_every_option(checkpoint: Path, tmp_path: Path) -> None:
    """Refusals for another reason than the option would hide an option that is dropped."""
    declared = declarations()["cpu-eager"]
    plain = Plan(backend="cpu-eager", model=str(checkpoint), cases=1, new_tokens=2, dtypes=("float32",), jobs=1)
    outcomes = {words: outcome(option.plan(plain, tmp_path), declared, option) for words, option in OPTIONS.items()}
    # The words of this checkpoint's tokenizer are whole numbers.
    assert "no bytes to fall back on" in outcomes.pop("--grammar")
    assert outcomes.pop("--concurrency 2") == "--concurrency 2: cpu-eager declares no continuous batching"
    assert set(outcomes.values()) == {"in effect"}, outcomes


def test_the_table_has_every_option_that_shapes_a_case() -> None:
    """The others say where results go, how long a run may take, or what is compared: no backend reads them."""
    other_options = {
        "--backend", "--against", "--model", "--prompts", "--invariant", "--cases", "--time-budget", "--device",
        "--seed", "--jobs", "--report", "--trace", "--junit", "--json", "--html", "--case-timeout", "--start-timeout",
        "--memory-limit", "--keep-going", "--max-failures", "--verbose", "--help", "--threads", "--watch",
        "--lossy", "--own-settings",  # words beside --rule and --temperature
        "--grammar-library", "--grammar-after", "--thinking-budget",  # words beside --grammar
        "--reference", "--steps", "--layers", "--variants",  # what computes the oracle, how much of a prompt is judged
        "--fault", "--mode", "--focus",  # below
    }  # fmt: skip
    every = {name for option in command.diff.params for name in option.opts if name.startswith("--")}
    assert every - other_options == {words.split()[0] for words in OPTIONS}


def test_what_shapes_no_case_is_refused_too(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Unknown, match="--mode reference: backend hf-generate has no modes"):
        open_planted("hf-generate", None, "reference")
    with pytest.raises(Unknown, match="hf-generate"):
        open_planted("hf-generate", "retrieve-index-without-offset")
    declared = declarations()["executorch-tree"]
    with pytest.raises(Unknown, match="--focus distribution: executorch-tree declares no temperature above 0"):
        drawn_within(Plan(backend="executorch-tree", focus="distribution"), declared, Oracle())
    for options, line in {
        ("--jobs", 2): "--jobs 2 is for drawn cases",
        ("--dtype", "float32", "--dtype", "float64"): "--dtype is given 2 times",
    }.items():
        assert exit_code_of("diff", "--model", checkpoint, "--cases", 1, *options) == 2
        assert line in " ".join(capsys.readouterr().err.split())
