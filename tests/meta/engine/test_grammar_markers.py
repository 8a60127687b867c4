"""Grammars behind a marker: the oracle's reading against the engine's matcher, and a text by hand."""

import random
from dataclasses import replace
from importlib.util import find_spec

import pytest

from specverify.backends.engine.guided.guide import masks, open_guide
from specverify.reference.case import Case
from specverify.reference.draft import Scripted
from specverify.reference.grammar import LIBRARIES, Grammar
from specverify.reference.malformed import Malformed
from specverify.reference.oracle.language import legal_after
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.tree import Shape
from tests.models import LLAMA

WORDS = ("61", "62", "63", "", "7a", "6162", "ff", "")
END = 7
LANGUAGE = "(ab|b)*c?"
INSTALLED = {
    name: pytest.mark.skipif(find_spec(name) is None, reason="pip install '.[grammars]'") for name in LIBRARIES[1:]
}


def grammar(*markers: tuple[int, ...], budget: int = 0) -> Grammar:
    return Grammar("regex", LANGUAGE, WORDS, markers=markers, budget=budget)


def legal(marked: Grammar, *output: int) -> set[int]:
    after = legal_after(marked, (END,), output)
    assert not after.refused
    return {token for token in range(len(WORDS)) if after.tokens[token]}


def test_the_text_begins_behind_the_first_marker() -> None:
    """a, b and c are tokens 0, 1 and 2, ab is 5; the words of 3 and 4 are no text of the language."""
    marked = grammar((4, 3), (2, 2, 2))
    assert legal(marked) == legal(marked, 4) == legal(marked, 4, 4) == legal(marked, 2, 2) == set(range(8))
    inside = {0, 1, 2, 5, END}
    assert legal(marked, 4, 3) == legal(marked, 0, 4, 3) == legal(marked, 2, 2, 2) == inside
    # Another marker behind the first is text like any other, and refused as such.
    assert legal_after(marked, (END,), (4, 3, 4)).refused
    assert legal(marked, 4, 3, 0) == {1}
    # An end token ends the text before the marker as well.
    assert not legal(marked, 0, END)
    assert legal_after(marked, (END,), (0, END, 1)).refused


def test_a_budget_forces_the_first_marker() -> None:
    forced = grammar((4, 3), (2,), budget=2)
    assert legal(forced, 0) == set(range(8))
    assert legal(forced, 0, 0) == {4}
    assert legal(forced, 0, 0, 4) == {3}
    assert legal(forced, 0, 0, 4, 3) == {0, 1, 2, 5, END}
    assert legal_after(forced, (END,), (0, 0, 1)).refused
    # The other marker begins the text before the budget is used up.
    assert legal(forced, 0, 2) == {0, 1, 2, 5, END}


@pytest.mark.parametrize(
    ("library", "count"), [("plain", 2000), *(pytest.param(name, 400, marks=INSTALLED[name]) for name in LIBRARIES[1:])]
)
def test_oracle_and_matcher_agree_on_any_text(library: str, count: int) -> None:
    rng = random.Random(1)
    compared = begun = 0
    for _ in range(count):
        markers = [tuple(rng.randrange(7) for _ in range(rng.randint(1, 3))) for _ in range(rng.randint(1, 2))]
        marked = replace(grammar(*markers, budget=rng.choice((0, 0, 1, 2, 4))), library=library)
        guide = open_guide(marked, (END,))
        output: list[int] = []
        for _ in range(rng.randint(0, 8)):
            after = legal_after(marked, (END,), tuple(output))
            assert guide.is_lost == after.refused
            if after.refused:
                break
            assert guide.row().tolist() == after.tokens.tolist()
            compared += 1
            begun += guide.read > 0 and not after.tokens.all()
            choices = [token for token in range(8) if after.tokens[token]]
            output.append(rng.choice(choices) if choices and rng.random() < 0.9 else rng.randrange(8))
            guide.accept_token(output[-1])
    assert compared > 2.5 * count
    assert begun > 0.5 * count


@pytest.mark.parametrize("library", ["plain", *(pytest.param(name, marks=INSTALLED[name]) for name in LIBRARIES[1:])])
def test_a_walk_over_a_tree_leaves_the_matcher_where_it_was(library: str) -> None:
    """The marker stands on one branch; the nodes below it are guided, those of the other branch are free."""
    marked = replace(grammar((4,)), library=library)
    guide = open_guide(marked, (END,))
    shape, token = Shape((0, 0, 1, 0, 3)), [3, 4, 0, 3, 0]
    node_masks = masks(guide, shape, token)
    for node, path in enumerate(((), (4,), (4, 0), (3,), (3, 0))):
        assert node_masks.legal[node].tolist() == legal_after(marked, (END,), path).tokens.tolist()
    assert guide.row().all()


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ({"markers": ((),)}, r"markers\[0\]: holds no token"),
        ({"markers": ((8,),)}, r"markers\[0\]: \(8,\) holds a token outside the vocabulary of 8"),
        ({"markers": ((1,),), "budget": -1}, "budget: -1 is not a number of tokens"),
        ({"budget": 2}, "budget: forces the first marker, and there is none"),
    ],
)
def test_what_no_marker_can_be(words: dict[str, object], complaint: str) -> None:
    with pytest.raises(Malformed, match=complaint):
        Grammar("regex", LANGUAGE, WORDS, **words)  # type: ignore[arg-type]


def test_an_end_token_is_no_part_of_a_marker() -> None:
    words = (*WORDS, *["7a"] * (LLAMA.vocab_size - len(WORDS)))
    marked = Grammar("regex", LANGUAGE, words, markers=((4, END),))
    with pytest.raises(Malformed, match=r"sampling\.grammar\.markers: an end token stands in a marker"):
        Case(LLAMA, (3,), Scripted(), sampling=Sampling(grammar=marked), stops=Stops(4, (END,)))
