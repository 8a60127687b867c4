"""Rules of sampling, stops, layouts and drafts: each limit is met, and passed by one step."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import inf, nan

import pytest

from specverify.reference.draft import LanguageModel, Ngram, Scripted, largest_tree_size
from specverify.reference.layout import KvLayout
from specverify.reference.malformed import Malformed, under
from specverify.reference.rules import RULES, Rule
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.tree import RankTree, Shape, Tree
from tests.models import FOUR_TOKENS

PAIR = RankTree((0, 0, 0), (0, 1, 2))
PAGED = KvLayout(kind="paged", page_size=2)
LEAST = 5e-324
"""The smallest number above 0."""


def sampling(**changes: object) -> Callable[[], object]:
    return lambda: Sampling(**{"temperature": 1.0, **changes})  # type: ignore[arg-type]


def stops(**changes: object) -> Callable[[], object]:
    return lambda: Stops(**changes)  # type: ignore[arg-type]


def layout(**changes: object) -> Callable[[], object]:
    return lambda: KvLayout(**changes)  # type: ignore[arg-type]


def paged(**changes: object) -> Callable[[], object]:
    return lambda: replace(PAGED, **changes)  # type: ignore[arg-type]


def texts(*words: str, pieces: tuple[str, ...] = ("a",)) -> Callable[[], object]:
    return lambda: Stops(stop_strings=words, pieces=pieces)


THRESHOLDS = ("threshold_single", "threshold_acc", "epsilon", "delta")

ALLOWED: dict[str, Callable[[], object]] = {
    "the smallest temperature": sampling(temperature=LEAST),
    "the edges of a tape": sampling(tape=(0.0, 1 - 2**-53)),
    "penalties that encourage": sampling(repetition_penalty=LEAST, presence_penalty=-1e300, frequency_penalty=-1e300),
    "the smallest masses": sampling(top_p=LEAST, min_p=0.0),
    "the largest masses": sampling(top_p=1.0, min_p=1.0),
    "the smallest counts": sampling(top_k=0, min_tokens=0, seed=0),
    "the largest seed": sampling(seed=2**63 - 1),
    "the smallest thresholds": lambda: [Rule("typical", **{name: LEAST}) for name in THRESHOLDS],
    "one token": stops(max_new_tokens=1, max_length=0),
    "characters beside the surrogates": texts("\ud7ff\ue000\U0001f600"),
    "no padding": layout(padded_nodes=0, prefill_chunk=0, overhang=0),
    "every way of branch": lambda: [KvLayout(commit=name) for name in ("path", "fast", "length")],
    "pages of one and of 128": lambda: [replace(PAGED, page_size=size) for size in (1, 128)],
    "pages in any order": paged(pages=(2, 0, 1)),
    "an order of 2": lambda: Ngram(PAIR, 2),
    "as many ranks as names": lambda: LanguageModel(FOUR_TOKENS, PAIR, (0, 2, 3)),
    "as many ranks as tokens": lambda: LanguageModel(FOUR_TOKENS, RankTree((0, 0, 0, 0, 0), (0, 0, 1, 2, 3))),
}

BROKEN: dict[str, tuple[Callable[[], object], str]] = {
    "a negative temperature": (sampling(temperature=-LEAST), "temperature: "),
    "an infinite temperature": (sampling(temperature=inf), "temperature: inf"),
    "no temperature": (sampling(temperature=nan), "temperature: nan"),
    "a coin of 1": (sampling(tape=(0.5, 1.0)), "tape[1]: 1.0 is not in [0, 1)"),
    "a negative coin": (sampling(tape=(-LEAST,)), "tape[0]: "),
    "a repetition penalty of 0": (sampling(repetition_penalty=0.0), "repetition_penalty: 0.0"),
    "an infinite repetition penalty": (sampling(repetition_penalty=inf), "repetition_penalty: inf"),
    "an infinite presence penalty": (sampling(presence_penalty=-inf), "presence_penalty: -inf"),
    "an infinite frequency penalty": (sampling(frequency_penalty=inf), "frequency_penalty: inf"),
    "a word of nothing": (sampling(bad_words=((1,), ())), "bad_words: an empty word"),
    "negative min_tokens": (sampling(min_tokens=-1), "min_tokens: is negative"),
    "a negative top_k": (sampling(top_k=-1), "top_k: is negative"),
    "a top_p of 0": (sampling(top_p=0.0), "top_p: 0.0"),
    "a top_p above 1": (sampling(top_p=1.01), "top_p: 1.01"),
    "a negative min_p": (sampling(min_p=-0.01), "min_p: -0.01"),
    "a min_p above 1": (sampling(min_p=1.01), "min_p: 1.01"),
    "draws that there are not": (sampling(draws="beam"), "draws: 'beam' is none"),
    "a negative seed": (sampling(seed=-1), "seed: -1"),
    "a seed of 64 bits": (sampling(seed=2**63), "seed: 9223372036854775808"),
    "a rule that there is not": (lambda: Rule("lenient"), "name: 'lenient' is no acceptance rule"),
    **{
        f"{name} of {value}": (partial(Rule, "typical", **{name: value}), f"{name}: {value} is not")
        for name in THRESHOLDS
        for value in (0.0, inf, -1.0)
    },
    "no token": (stops(max_new_tokens=0), "max_new_tokens: 0 leaves nothing"),
    "a negative length": (stops(max_length=-1), "max_length: -1 is negative"),
    "half a surrogate pair": (texts("a", "b\ud800"), "stop_strings[1]: holds half"),
    "the other half": (texts("a", pieces=("\udfff",)), "pieces[0]: holds half"),
    "an empty stop string": (texts("a", ""), "stop_strings[1]: an empty text"),
    "a stop string without texts": (texts("a", pieces=()), "pieces: missing"),
    "texts without a stop string": (texts(), "pieces: there is no stop string"),
    "a commit that there is not": (layout(commit="move"), "commit: 'move' is none"),
    "a kind that there is not": (layout(kind="ring"), "kind: 'ring' is none"),
    "a sync that there is not": (layout(draft_sync="drop"), "draft_sync: 'drop' is none"),
    "a poison that there is not": (layout(poison="zero"), "poison: 'zero' is none"),
    "negative padding": (layout(padded_nodes=-1), "padded_nodes: -1 is negative"),
    "a negative chunk of prefill": (layout(prefill_chunk=-1), "prefill_chunk: -1 is negative"),
    "a negative overhang": (paged(overhang=-1), "overhang: -1 is negative"),
    "a way of branch elsewhere": (layout(kind="scratch", commit="fast"), "commit: 'fast' is a way of branch"),
    "pages of no size": (layout(kind="paged"), "page_size: 0 is not 1 to 128"),
    "pages too large": (paged(page_size=129), "page_size: 129 is not"),
    "a page outside the pool": (paged(pages=(0, 2)), "pages[1]: page 2 is outside the pool of 2"),
    "a negative page": (paged(pages=(0, -1)), "pages[1]: page -1 is outside"),
    "a page twice": (paged(pages=(1, 0, 1)), "pages[2]: page 1 is owned twice"),
    "a size without pages": (layout(page_size=1), "page_size: branch has no pages"),
    "a list without pages": (layout(kind="static", pages=(0,)), "pages: static has no pages"),
    "an overhang without pages": (layout(overhang=1), "overhang: branch has no pages"),
    "an order of 1": (lambda: Ngram(PAIR, 1), "order: 1: a context needs"),
    "names that do not ascend": (
        lambda: LanguageModel(FOUR_TOKENS, PAIR, (0, 3, 2)),
        "vocabulary: target ids must ascend",
    ),
    "a name twice": (lambda: LanguageModel(FOUR_TOKENS, PAIR, (0, 2, 2)), "vocabulary: target ids must ascend"),
    "a rank without a name": (
        lambda: LanguageModel(FOUR_TOKENS, PAIR, (0, 2)),
        "shape.rank: rank 2 needs more than the 2",
    ),
    "a rank without a token": (
        lambda: LanguageModel(FOUR_TOKENS, RankTree((0, 0), (0, 4))),
        "shape.rank: rank 4 needs more than the 4",
    ),
}


def test_what_a_limit_allows_is_made() -> None:
    for make in ALLOWED.values():
        make()


@pytest.mark.parametrize("name", BROKEN)
def test_what_passes_a_limit_is_refused_where_it_stands(name: str) -> None:
    make, line = BROKEN[name]
    with pytest.raises(Malformed) as error:
        make()
    assert str(error.value).startswith(line)


def test_a_complaint_says_where_however_deep() -> None:
    with pytest.raises(Malformed) as error, under("session"), under("mates[1]"):
        Rule("lenient")
    assert str(error.value).startswith("session.mates[1].name: 'lenient'")
    with pytest.raises(Malformed) as error, under("drafts"):
        raise Malformed("[2]", "is odd")
    assert str(error.value) == "drafts[2]: is odd"


def test_what_settings_say_of_themselves() -> None:
    assert [Sampling(temperature).greedy for temperature in (0.0, LEAST, 1.0)] == [True, False, False]
    changes = {
        "repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": -0.1, "bad_words": ((1,),),
        "min_tokens": 1, "processors": ("a:b",), "top_k": 1, "top_p": 0.9, "min_p": 0.1,
    }  # fmt: skip
    assert not Sampling(0.5, (0.5,), seed=3, draws="with-replacement", rule=Rule("eagle")).processes
    for name, value in changes.items():
        assert replace(Sampling(), **{name: value}).processes, name  # type: ignore[arg-type]
    assert [Stops(5, max_length=most).room(3) for most in (0, 4, 8, 9)] == [5, 1, 5, 5]
    assert [PAGED.pages_for(columns) for columns in (0, 1, 2, 3, 4, 5)] == [0, 1, 1, 2, 2, 3]
    assert [replace(PAGED, overhang=1).pages_for(columns) for columns in (0, 1, 2, 3)] == [1, 1, 2, 2]
    assert largest_tree_size(Scripted()) == 1
    assert largest_tree_size(Scripted((Tree((0, 0), (0, 0)), Tree((0, 0, 1), (0, 0, 0)), Tree((0,), (0,))))) == 3
    assert largest_tree_size(Ngram(PAIR)) == 3


def test_what_rules_promise() -> None:
    """Lossless as published: target-only by its thresholds, both it and SpecInfer by how siblings were named."""
    for name in RULES:
        for draws in ("top-k", "without-replacement", "with-replacement"):
            for distinct in (True, False):
                expected = {
                    **dict.fromkeys(("typical", "ensemble", "fly", "synthetic"), False),
                    "target-only": distinct,
                    "specinfer": draws == "with-replacement" or (draws == "top-k" and distinct),
                }.get(name, True)
                assert Rule(name).lossless(draws, distinct) is expected
        branches = Rule(name).refuses(Shape((0, 0, 1, 1)).branches)
        assert (branches is not None) == (name in ("chain", "block", "ensemble", "fly", "synthetic"))
        assert Rule(name).refuses(Shape((0, 0, 1, 2)).branches) is None
    assert not Rule("target-only", threshold_acc=0.99).lossless("top-k", True)
    assert not Rule("target-only", threshold_single=0.99).lossless("top-k", True)
    assert Rule("target-only", threshold_single=1.5).lossless("top-k", True)
