"""The adapter of llama.cpp's tree batch: rows see their own path alone, and the accepted branch's rows are kept."""

import pytest
import torch

pytest.importorskip("gguf")
llama_cpp_tree = pytest.importorskip(
    "specverify.backends.adapt.engines.llama_cpp_tree", reason="llama-cpp-python is not installed"
)

from specverify.backends.adapt import transformers_model  # noqa: E402
from specverify.backends.adapt.engines.llama_cpp_tree import below  # noqa: E402
from specverify.properties.invariants import ALL  # noqa: E402
from specverify.properties.verdict.judge import judge  # noqa: E402
from specverify.reference.case import Case  # noqa: E402
from specverify.reference.draft import Scripted  # noqa: E402
from specverify.reference.oracle.decoder import Oracle  # noqa: E402
from specverify.reference.sampling import Stops  # noqa: E402
from specverify.reference.tree import Tree  # noqa: E402
from specverify.setup.subjects import subject_of  # noqa: E402
from tests.models import LLAMA  # noqa: E402

ORACLE = Oracle()
PROMPT = (3, 1, 4)


def branching() -> Case:
    """A case whose first tree accepts the second child of the root and one below it, and whose second is a chain."""
    ahead = ORACLE(Case(LLAMA, PROMPT, stops=Stops(8))).output
    wrong = (ahead[0] + 1) % LLAMA.vocab_size
    first = Tree((0, 0, 0, 2, 2, 1), (PROMPT[-1], wrong, ahead[0], wrong, ahead[1], ahead[1]))
    second = Tree((0, 0, 1), (ahead[2], ahead[3], (ahead[4] + 1) % LLAMA.vocab_size))
    return Case(LLAMA, PROMPT, Scripted((first, second)), stops=Stops(8))


def test_branches_are_judged_and_the_accepted_one_is_kept() -> None:
    case = branching()
    backend = llama_cpp_tree.open_tree()
    verdict = judge(case, ALL, ORACLE, subject_of(backend))
    assert not [name for name, outcome in verdict.outcomes.items() if outcome == "failed"]
    for name in ("acceptance.greedy-walk", "lossless.greedy-match", "draft.fidelity"):
        assert verdict.outcomes[name] == "checked"
    paths = [step.accepted.path for step in backend.run(case).steps]
    assert paths[:2] == [(0, 2, 4), (0, 1)]


def test_each_row_sees_its_own_path_alone() -> None:
    case = branching()
    step = llama_cpp_tree.open_tree().run(case).steps[0]
    tree, network = step.drafted.tree, transformers_model(LLAMA, "float32")
    for node in range(len(tree)):
        text = torch.tensor([[*case.prefix, *(tree.token[up] for up in tree.path(node))]])
        alone = network(text).logits[0, -1].detach()
        torch.testing.assert_close(torch.tensor(step.scored.logits[node]), alone, atol=2e-4, rtol=0)


def test_a_kept_branch_of_the_wrong_leaf_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_leaf = llama_cpp_tree.Engine.keep_leaf
    monkeypatch.setattr(llama_cpp_tree.Engine, "keep_leaf", lambda self, leaf, length: keep_leaf(self, 0, length))
    verdict = judge(branching(), ALL, ORACLE, subject_of(llama_cpp_tree.open_tree()))
    assert [name for name, outcome in verdict.outcomes.items() if outcome == "failed"]


def test_a_node_belongs_to_every_leaf_below_it() -> None:
    assert below(Tree((0, 0, 0, 2, 2), (5, 1, 2, 3, 4))) == [[0, 1, 2], [0], [1, 2], [1], [2]]
    assert below(Tree((0,), (5,))) == [[0]]
