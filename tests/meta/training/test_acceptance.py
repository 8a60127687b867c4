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
    texts = []
    for length, prompt in ((14, 3), (11, 5)):
        tokens = torch.tensor(draw.choice([1, 2, 5], length))
        states = torch.tensor(draw.normal(size=(length, 3 * LLAMA.architecture.hidden_size)))
        texts.append(HeldOutText(tokens, prompt, states))
    return texts


def question(tokens: tuple[int, ...], states: Any) -> Question:
    return Question(tokens, 0, None, cast("Any", None), states, LLAMA)


def paths(tree: Tree) -> set[tuple[int, ...]]:
    return {tuple(tree.token[up] for up in tree.path(node)[1:]) for node in range(1, len(tree))}


def walk_depth(tree_paths: set[tuple[int, ...]], truth: tuple[int, ...]) -> int:
    depth = 0
    while depth < len(truth) and truth[: depth + 1] in tree_paths:
        depth += 1
    return depth


def steps(text: HeldOutText, propose: Any) -> list[int]:
    """Accepted tokens of each step of one text, whose trees `propose` gives."""
    tokens, root, accepted_lengths = tuple(text.tokens.tolist()), text.prompt - 1, []
    while root < len(tokens) - 1:
        tree = propose(question(tokens[: root + 1], text.states[:root].numpy())).tree
        accepted_lengths.append(walk_depth(paths(tree), tokens[root + 1 :]))
        root += accepted_lengths[-1] + 1
    return accepted_lengths


def test_trees_of_a_head_are_the_trees_of_the_oracle() -> None:
    head, texts = module(DRAFT), held_out()
    padded = [torch.nn.functional.pad(text.tokens, (0, 14 - len(text.tokens))) for text in texts]
    states = [torch.nn.functional.pad(text.states, (0, 0, 0, 14 - len(text.states))) for text in texts]
    opened, roots = head.open(torch.stack(padded), torch.stack(states)), torch.tensor([6, 4])
    head_paths = grow_paths(opened, head.names(), roots, GROWN)
    for text, root, text_paths in zip(texts, roots.tolist(), head_paths, strict=True):
        head_question = question(tuple(text.tokens[: root + 1].tolist()), text.states[:root].numpy())
        assert text_paths == paths(propose_by_head(Eagle3Formulas(DRAFT, head_question), head_question).tree)


def test_the_acceptance_of_a_head_is_the_walk_over_the_trees_of_the_oracle() -> None:
    head, texts = module(DRAFT), held_out()
    expected_steps = [
        steps(text, lambda text_question: propose_by_head(Eagle3Formulas(DRAFT, text_question), text_question))
        for text in texts
    ]
    acceptance = head_acceptance(head, texts, GROWN)
    assert sorted(acceptance.steps) == sorted(expected_steps[0] + expected_steps[1])
    assert 0 < acceptance.mean < GROWN.depth


def test_the_acceptance_of_a_lookup_is_the_walk_over_the_trees_of_the_oracle() -> None:
    draft = Ngram(RankTree((0, 0, 1, 0, 3), (0, 0, 0, 1, 0)), 3)
    expected_steps = [steps(text, lambda text_question: propose(draft, text_question)) for text in held_out()]
    acceptance = ngram_acceptance(draft, held_out())
    assert acceptance.steps == expected_steps[0] + expected_steps[1]
    assert acceptance.mean > 0


def test_figures_of_steps() -> None:
    acceptance = Acceptance([0, 2, 1, 3])
    assert (acceptance.mean, acceptance.tokens_per_call) == (1.5, 2.5)
    assert acceptance.by_depth(4) == [0.75, 0.5, 0.25, 0.0]
    assert Acceptance().by_depth(2) == [0.0, 0.0]
