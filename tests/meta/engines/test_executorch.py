"""The adapters of ExecuTorch: trees whose rows stay in place, and chains that are rewound by position."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

executorch_tree = pytest.importorskip(
    "specverify.backends.adapt.engines.executorch_tree", reason="executorch is not installed"
)

from specverify.backends.adapt import transformers_model  # noqa: E402
from specverify.backends.adapt.export.executorch_program import ROWS  # noqa: E402
from specverify.properties.invariants import ALL  # noqa: E402
from specverify.properties.strategies.models import GALLERY  # noqa: E402
from specverify.properties.verdict.judge import judge  # noqa: E402
from specverify.reference.architecture import Seeded  # noqa: E402
from specverify.reference.case import Case  # noqa: E402
from specverify.reference.draft import Scripted  # noqa: E402
from specverify.reference.oracle.decoder import Oracle  # noqa: E402
from specverify.reference.sampling import Stops  # noqa: E402
from specverify.reference.tree import Tree  # noqa: E402
from specverify.setup.subjects import subject_of  # noqa: E402

ORACLE = Oracle()
MODEL = Seeded(next(arch for arch in GALLERY if arch.family == "qwen3" and not any(arch.windows)), 0)
PROMPT = (3, 1, 4)
AHEAD = ORACLE(Case(MODEL, PROMPT, stops=Stops(8))).output
WRONG = tuple((token + 1) % MODEL.vocab_size for token in AHEAD)


def branching() -> Case:
    """A case whose first tree accepts the second child of the root and one below it, and whose second is a chain."""
    first = Tree((0, 0, 0, 2, 2, 1), (PROMPT[-1], WRONG[0], AHEAD[0], WRONG[1], AHEAD[1], AHEAD[1]))
    second = Tree((0, 0, 1), (AHEAD[2], AHEAD[3], WRONG[4]))
    return Case(MODEL, PROMPT, Scripted((first, second)), stops=Stops(8))


def chain() -> Case:
    """A case whose chains are rejected after one token, and after none."""
    first = Tree((0, 0, 1, 2), (PROMPT[-1], AHEAD[0], WRONG[1], AHEAD[2]))
    second = Tree((0, 0, 1), (AHEAD[1], WRONG[2], AHEAD[3]))
    return Case(MODEL, PROMPT, Scripted((first, second)), stops=Stops(6))


@pytest.mark.parametrize(
    ("make", "opened"), [(branching, "open_tree"), (chain, "open_tree"), (chain, "open_overwrite")]
)
def test_what_the_runtime_decodes_is_judged(make: Callable[[], Case], opened: str) -> None:
    verdict = judge(make(), ALL, ORACLE, subject_of(getattr(executorch_tree, opened)()))
    assert not [name for name, outcome in verdict.outcomes.items() if outcome == "failed"]
    for name in ("acceptance.greedy-walk", "lossless.greedy-match", "draft.fidelity"):
        assert verdict.outcomes[name] == "checked"


def test_a_row_sees_its_own_path_alone_in_a_tree_of_several_calls() -> None:
    parents = (0, *range(ROWS), 3, 3, 20 % ROWS)
    tree = Tree(parents, tuple((7 * node + 3) % MODEL.vocab_size for node in range(len(parents))))
    case = Case(MODEL, (*PROMPT, tree.token[0]), Scripted((tree,)), stops=Stops(2))
    step = executorch_tree.open_tree().run(case).steps[0]
    network = transformers_model(MODEL, "float32")
    for node in range(len(tree)):
        text = torch.tensor([[*case.prefix, *(tree.token[up] for up in tree.path(node))]])
        alone = network(text).logits[0, -1].detach()
        torch.testing.assert_close(torch.tensor(step.scored.logits[node]), alone, atol=2e-4, rtol=0)


def failed_invariants(case: Case, opened: str) -> list[str]:
    verdict = judge(case, ALL, ORACLE, subject_of(getattr(executorch_tree, opened)()))
    return [name for name, outcome in verdict.outcomes.items() if outcome == "failed"]


def test_slots_of_a_rejected_branch_that_are_kept_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    keep = executorch_tree.Engine.keep
    monkeypatch.setattr(executorch_tree.Engine, "keep", lambda self, path: keep(self, range(len(path))))
    assert failed_invariants(branching(), "open_tree")
    assert not failed_invariants(chain(), "open_tree")  # in a chain the accepted rows are the first ones


def test_a_cache_that_is_not_rewound_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    written = executorch_tree.OverwritingEngine.slots_for

    def slots_behind(self: Any, tree: Tree, length: int) -> list[int]:
        self.furthest = max(getattr(self, "furthest", length), length)
        slots: list[int] = written(self, tree, self.furthest)
        self.furthest += len(tree)
        return slots

    monkeypatch.setattr(executorch_tree.OverwritingEngine, "slots_for", slots_behind)
    verify = executorch_tree.OverwritingEngine.verify

    def all_below(self: Any, tree: Tree, length: int) -> Any:
        self.held_slots = list(range(max(getattr(self, "furthest", length), length)))
        return verify(self, tree, length)

    monkeypatch.setattr(executorch_tree.OverwritingEngine, "verify", all_below)
    assert failed_invariants(chain(), "open_overwrite")


def test_what_no_program_can_be_is_declined() -> None:
    tree, overwrite = (getattr(executorch_tree, name)().declaration for name in ("open_tree", "open_overwrite"))
    assert tree.outside(branching()) is None
    assert "trees that branch" in str(overwrite.outside(branching()))
    windowed = Seeded(next(arch for arch in GALLERY if any(arch.windows)), 0)
    assert "sliding window" in str(tree.outside(Case(windowed, PROMPT)))
