"""Heads under training compute what the oracle's heads compute, with the same weights, within 1e-9 in float64."""

from typing import Any

import numpy as np
import pytest
import torch

from specverify.reference.case import Case
from specverify.reference.draft.eagle1 import Eagle1
from specverify.reference.draft.eagle3 import Eagle3
from specverify.reference.draft.hidden import HiddenStates
from specverify.reference.draft.layer_head import HeadLayer
from specverify.reference.draft.medusa import Medusa
from specverify.reference.oracle.draft.eagle1 import Eagle1Formulas
from specverify.reference.oracle.draft.eagle3 import Eagle3Formulas
from specverify.reference.oracle.draft.medusa import guess
from specverify.reference.oracle.draft.question import Question
from specverify.reference.oracle.sampled_step import SampledStep
from specverify.reference.tree import RankTree
from specverify.reference.weights import seeded_head, seeded_weights
from specverify.training.heads.base import Batch, TrainedHead
from specverify.training.heads.eagle1 import Eagle1Module
from specverify.training.heads.eagle3 import Eagle3Module
from specverify.training.heads.layer import DecoderLayer, Paths
from specverify.training.heads.medusa import MedusaModule
from tests.headfiles import packed_experts
from tests.models import LLAMA

CLOSE = 1e-9
LAYER = HeadLayer(4, 2, 4, 12, theta=5000.0, norm_eps=1e-4)
TREE = RankTree((0, 0), (0, 0))
FUSED, NORMED = HiddenStates((-1, 0, 1), shift=1), HiddenStates(place="normed", shift=1)
EAGLE3 = Eagle3(TREE, FUSED, LAYER, vocabulary=(1, 2, 5, 11, 16))
DEEP = Eagle3(TREE, FUSED, LAYER, vocabulary=(1, 2, 5, 11, 16), layers=3)
EAGLE1 = Eagle1(TREE, NORMED, LAYER)
LAYERS = Eagle1(TREE, NORMED, LAYER, layers=3)
IROPE = Eagle1(TREE, NORMED, LAYER, layers=3, unrotated=(1,))
EXPERTS = Eagle1(TREE, NORMED, LAYER, layers=2, unrotated=(0,), experts=3, experts_per_token=2)
EVERY_EAGLE1 = {"eagle1": EAGLE1, "eagle1-layers": LAYERS, "eagle1-irope": IROPE, "eagle1-experts": EXPERTS}
MEDUSA = Medusa(TREE, HiddenStates(place="normed"), 3)
LENGTHS = (7, 5)


@pytest.fixture(autouse=True)
def _float64() -> Any:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def matrices() -> tuple[torch.Tensor, torch.Tensor]:
    shared = seeded_weights(LLAMA)
    head = "model.embed_tokens.weight" if LLAMA.architecture.tied else "lm_head.weight"
    return torch.tensor(shared["model.embed_tokens.weight"]), torch.tensor(shared[head])


def module(draft: Any) -> TrainedHead:
    weights = {name: torch.tensor(array) for name, array in seeded_head(draft, LLAMA).items()}
    head: TrainedHead
    if isinstance(draft, Eagle3):
        head = Eagle3Module(LAYER, FUSED, torch.tensor(draft.vocabulary), *matrices(), layers=draft.layers)
        if draft.layers > 1:  # the layout that has further layers
            weights = {name.replace("midlayer.", "layers.0."): weight for name, weight in weights.items()}
    elif isinstance(draft, Eagle1):
        head = Eagle1Module(
            LAYER,
            *matrices(),
            layers=draft.layers,
            unrotated=draft.unrotated,
            experts=draft.experts,
            taken=draft.experts_per_token,
        )
        if draft.experts:  # all experts of a layer stand in one tensor
            packed = packed_experts(seeded_head(draft, LLAMA), draft)
            weights = {name: torch.tensor(array) for name, array in packed.items()}
    else:
        head = MedusaModule(draft.heads, *matrices())
    head.double().load_published(weights)
    published = head.published_tensors()
    assert set(published) == set(weights)
    for name, weight in weights.items():
        assert torch.equal(published[name], weight), name
    return head


def question_of(draft: Any) -> Question:
    """A question of a step of `draft`, of which the formulas read the target alone."""
    case = Case(LLAMA, (1,), draft, dtype="float64")
    return Question(case.prompt, 0, None, SampledStep(case, (), 0), target=LLAMA, dtype=case.dtype)


def texts(width: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = np.random.default_rng(5)
    tokens = draw.integers(0, LLAMA.vocab_size, (2, max(LENGTHS)))
    return torch.tensor(tokens), torch.tensor(draw.normal(size=(2, max(LENGTHS), width)))


def batch(width: int, firsts: tuple[int, ...]) -> Batch:
    tokens, states = texts(width)
    hidden = LLAMA.architecture.hidden_size
    last = torch.zeros(2, max(LENGTHS), hidden)
    return Batch(tokens, states, last, torch.tensor(LENGTHS), torch.tensor(firsts))


@pytest.mark.parametrize("firsts", [(0, 0), (3, 1)])
@pytest.mark.parametrize("draft", [EAGLE3, DEEP, *EVERY_EAGLE1.values()], ids=["eagle3", "three-layers", *EVERY_EAGLE1])
def test_rows_of_the_training_time_test_are_the_rows_of_a_tree(draft: Any, firsts: tuple[int, ...]) -> None:
    head = module(draft)
    assert isinstance(head, Eagle3Module | Eagle1Module)
    formulas = (Eagle3Formulas if isinstance(draft, Eagle3) else Eagle1Formulas)(draft, question_of(draft))
    hidden = LLAMA.architecture.hidden_size
    drawn_batch = batch(draft.reads.parts * hidden, firsts)
    compared = 0
    for step, (outputs, rows, real) in enumerate(head.run(drawn_batch, 3)):
        scores = head.scores(outputs)
        for lane, row in np.ndindex(*real.shape):
            if not real[lane, row]:
                continue
            number = int(rows[lane, row])
            tokens = tuple(drawn_batch.tokens[lane].tolist())
            states = formulas.target_states(drawn_batch.states[lane, : number + 1].numpy())
            past = formulas.extend(formulas.empty_past(), tokens[1 : number + 2], states)
            for deeper in range(step):
                ahead = tokens[number + 2 + deeper : number + 3 + deeper]
                past = formulas.extend(past, ahead, formulas.feed_back(past.output)[None])
            expected = formulas.score(past.output)
            assert np.abs(scores[lane, row].detach().numpy() - expected).max() < CLOSE * max(1, np.abs(expected).max())
            compared += 1
    assert compared == sum(
        max(0, length - 1 - first - step) for length, first in zip(LENGTHS, firsts, strict=True) for step in range(3)
    )


@pytest.mark.parametrize(
    "draft",
    [EAGLE3, DEEP, *EVERY_EAGLE1.values(), MEDUSA],
    ids=["eagle3", "three-layers", *EVERY_EAGLE1, "medusa"],
)
def test_a_drafted_level_has_the_scores_of_the_oracle(draft: Any) -> None:
    head = module(draft)
    tokens, states = texts(draft.reads.parts * LLAMA.architecture.hidden_size)
    roots, first = torch.tensor([4, 3]), torch.tensor([[1, 5], [2, 11]])
    second, parents = torch.tensor([[2, 16, 1], [5, 5, 11]]), torch.tensor([[1, 0, 1], [0, 1, 1]])
    opened = head.open(tokens, states)
    levels = [opened.root(roots)[:, None], opened.level(first, torch.zeros(2, 2, dtype=torch.int64))]
    levels.append(opened.level(second, parents))
    for lane, root in enumerate(roots.tolist()):
        paths: list[list[list[int]]] = [
            [[]],
            [[token] for token in first[lane].tolist()],
            [
                [int(first[lane, parent]), token]
                for token, parent in zip(second[lane].tolist(), parents[lane], strict=True)
            ],
        ]
        for level, level_paths in enumerate(paths):
            for index, path in enumerate(level_paths):
                expected = oracle(draft, tokens[lane, : root + 1].tolist(), states[lane, :root].numpy(), path)
                assert (
                    np.abs(levels[level][lane, index].detach().numpy() - expected).max()
                    < CLOSE * np.abs(expected).max()
                )


def oracle(draft: Any, tokens: list[int], states: Any, path: list[int]) -> Any:
    if isinstance(draft, Medusa):
        return guess(draft, question_of(draft), states[-1], len(path))
    formulas = (Eagle3Formulas if isinstance(draft, Eagle3) else Eagle1Formulas)(draft, question_of(draft))
    past = formulas.extend(formulas.empty_past(), tuple(tokens[1:]), formulas.target_states(states))
    for token in path:
        past = formulas.extend(past, (token,), formulas.feed_back(past.output)[None])
    return formulas.score(past.output)


def test_a_row_that_sees_a_token_too_many_is_told_apart() -> None:
    """The comparison can fail: the row's own step is hidden from it, or a later true row is shown."""
    head = module(EAGLE3)
    assert isinstance(head, Eagle3Module)
    drawn_batch = batch(FUSED.parts * LLAMA.architecture.hidden_size, (0, 0))
    (first, _, real), *_ = head.run(drawn_batch, 1)
    later = drawn_batch.tokens.clone()
    later[:, 4] = (later[:, 4] + 1) % LLAMA.vocab_size
    (second, _, _), *_ = head.run(
        Batch(later, drawn_batch.states, drawn_batch.last, drawn_batch.lengths, drawn_batch.firsts), 1
    )
    assert torch.equal(first[:, :3], second[:, :3])
    assert not torch.equal(first[0, 3:][real[0, 3:]], second[0, 3:][real[0, 3:]])


def test_a_mask_that_hides_a_diagonal_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catalogue BZ-008: each unrolled step of the training-time test loses a diagonal of the rows that it may see."""
    forward = DecoderLayer.forward

    def band_forward(
        layer: DecoderLayer,
        x: torch.Tensor,
        residual: torch.Tensor,
        positions: torch.Tensor,
        paths: Paths,
        visible: torch.Tensor,
    ) -> torch.Tensor:
        if paths.steps:
            diagonal = torch.arange(visible.shape[-1]) == positions[..., None] - len(paths.steps)
            visible = visible & ~diagonal
        return forward(layer, x, residual, positions, paths, visible)

    monkeypatch.setattr(DecoderLayer, "forward", band_forward)
    with pytest.raises(AssertionError):
        test_rows_of_the_training_time_test_are_the_rows_of_a_tree(EAGLE3, (0, 0))
