"""Greedy continuations that steer drawn trees are those of the oracle's plain decode."""

import numpy as np
import pytest

from specverify.properties.strategies.acceptance import LOOKAHEAD, ORACLE, continuation, first_law
from specverify.properties.strategies.models import GALLERY
from specverify.reference.architecture import Architecture, Seeded
from specverify.reference.case import Case
from specverify.reference.malformed import Malformed
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.oracle.model import Nodes
from specverify.reference.sampling import Stops
from specverify.reference.tree import Tree
from tests.models import FOUR_TOKENS


@pytest.mark.parametrize("arch", GALLERY[:40:3], ids=lambda arch: arch.family)
def test_a_continuation_is_plain_decode(arch: Architecture) -> None:
    model, prompt = Seeded(arch, 3), (1, 0, 1, 1)
    run = Oracle()(Case(model, prompt, stops=Stops(LOOKAHEAD), dtype="float64"))
    ahead = continuation(model, prompt)
    assert ahead[3] == run.output[3]
    assert tuple(ahead) == run.output
    assert (len(ahead), len(ahead[5:])) == (LOOKAHEAD, LOOKAHEAD - 5)
    assert tuple(ahead[2:][1:4]) == run.output[3:6]
    assert ahead[6:][1] == ahead[-1] == run.output[-1]
    assert not ahead[LOOKAHEAD:]
    assert first_law(model, prompt, 0.0) == ()
    scored = run.steps[0].scored
    assert scored is not None
    weights = np.exp(scored.logits[0] / 0.7 - (scored.logits[0] / 0.7).max())
    np.testing.assert_allclose(first_law(model, prompt, 0.7), np.sort(weights / weights.sum())[::-1], atol=1e-11)


def test_a_continuation_decodes_what_is_asked_for() -> None:
    model, asked = Seeded(GALLERY[1], 41), list[int]()
    evaluator = ORACLE.model(model, "float64")
    nodes = evaluator.nodes

    def note(context: tuple[int, ...], tree: Tree) -> Nodes:
        asked.append(len(context))
        return nodes(context, tree)

    evaluator.nodes = note  # type: ignore[method-assign]
    ahead = continuation(model, (1, 2, 3))
    assert len(ahead) == LOOKAHEAD
    assert asked == []
    rest = ahead[2:]
    assert rest[0] == ahead[2]
    assert asked == [2, 3, 4]
    assert continuation(model, (1, 2, 3))[1] == ahead[1]
    assert asked == [2, 3, 4]


def test_no_continuation_goes_beyond_the_longest_sequence() -> None:
    with pytest.raises(Malformed):
        continuation(FOUR_TOKENS, (1, 2, 3) * 3)
