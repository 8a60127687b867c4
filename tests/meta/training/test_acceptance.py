"""The simulated acceptance is that of the oracle's trees along the target's tokens."""

from typing import Any, cast

import numpy as np
import torch

from specverify.reference.draft import Ngram
from specverify.reference.draft.eagle3 import Eagle3
from specverify.reference.draft_trees import Expansion
from specverify.reference.oracle.draft.eagle3 import Eagle3Formulas
from specverify.reference.oracle.draft.head import propose_by_head
from specverify.reference.oracle.draft.ngram import propose
from specverify.reference.oracle.draft.question import Question
from specverify.reference.tree import RankTree, Tree
from specverify.training.acceptance import Acceptance, HeldOutText, grow_paths, head_acceptance, ngram_acceptance
from tests.meta.training.test_trained_heads import FUSED, LAYER, module
from tests.models import LLAMA

GROWN = Expansion(3, 3, 8)
DRAFT = Eagle3(GROWN, FUSED, LAYER, vocabulary=(1, 2, 5, 11, 16))


def held_out() -> list[HeldOutText]:
    draw = np.random.default_rng(3)
    found = []
    for length, prompt in ((14, 3), (11, 5)):
        tokens = torch.tensor(draw.choice([1, 2, 5], length))
        states = torch.tensor(draw.normal(size=(length, 3 * LLAMA.architecture.hidden_size)))
        found.append(HeldOutText(tokens, prompt, states))
    return found


def question(tokens: tuple[int, ...], states: Any) -> Question:
    return Question(tokens, 0, None, cast("Any", None), states, LLAMA)


def paths(tree: Tree) -> set[tuple[int, ...]]:
    return {tuple(tree.token[up] for up in tree.path(node)[1:]) for node in range(1, len(tree))}


def walked(found: set[tuple[int, ...]], truth: tuple[int, ...]) -> int:
    taken = 0
    while taken < len(truth) and truth[: taken + 1] in found:
        taken += 1
    return taken


def steps(text: HeldOutText, propose: Any) -> list[int]:
    """Accepted tokens of each step of one text, whose trees `propose` gives."""
    tokens, root, found = tuple(text.tokens.tolist()), text.prompt - 1, []
    while root < len(tokens) - 1:
        tree = propose(question(tokens[: root + 1], text.states[:root].numpy())).tree
        found.append(walked(paths(tree), tokens[root + 1 :]))
        root += found[-1] + 1
    return found


def test_trees_of_a_head_are_the_trees_of_the_oracle() -> None:
    head, texts = module(DRAFT), held_out()
    padded = [torch.nn.functional.pad(one.tokens, (0, 14 - len(one.tokens))) for one in texts]
    states = [torch.nn.functional.pad(one.states, (0, 0, 0, 14 - len(one.states))) for one in texts]
    opened, roots = head.open(torch.stack(padded), torch.stack(states)), torch.tensor([6, 4])
    ours = grow_paths(opened, head.names(), roots, GROWN)
    for text, root, found in zip(texts, roots.tolist(), ours, strict=True):
        asked = question(tuple(text.tokens[: root + 1].tolist()), text.states[:root].numpy())
        assert found == paths(propose_by_head(Eagle3Formulas(DRAFT, asked), asked).tree)


def test_the_acceptance_of_a_head_is_the_walk_over_the_trees_of_the_oracle() -> None:
    head, texts = module(DRAFT), held_out()
    wanted = [steps(text, lambda asked: propose_by_head(Eagle3Formulas(DRAFT, asked), asked)) for text in texts]
    found = head_acceptance(head, texts, GROWN)
    assert sorted(found.steps) == sorted(wanted[0] + wanted[1])
    assert 0 < found.mean < GROWN.depth


def test_the_acceptance_of_a_lookup_is_the_walk_over_the_trees_of_the_oracle() -> None:
    draft = Ngram(RankTree((0, 0, 1, 0, 3), (0, 0, 0, 1, 0)), 3)
    wanted = [steps(text, lambda asked: propose(draft, asked)) for text in held_out()]
    found = ngram_acceptance(draft, held_out())
    assert found.steps == wanted[0] + wanted[1]
    assert found.mean > 0


def test_figures_of_steps() -> None:
    found = Acceptance([0, 2, 1, 3])
    assert (found.mean, found.tokens_per_call) == (1.5, 2.5)
    assert found.by_depth(4) == [0.75, 0.5, 0.25, 0.0]
    assert Acceptance().by_depth(2) == [0.0, 0.0]
