"""Strategies for grammars: small languages, and vocabularies that spell them."""

from dataclasses import replace
from random import Random

from hypothesis import strategies as st

from specverify.properties.strategies.acceptance import LOOKAHEAD, ORACLE, continuation
from specverify.reference.abilities import Abilities
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.grammar import Grammar
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.spelling import usual_spelling

LANGUAGES: tuple[tuple[str, str, tuple[str | bytes, ...]], ...] = (
    ("regex", "(ab|b)*c?", ("a", "b", "c", "ab", "bb", "bc")),
    ("regex", "(a|b)*a(a|b){2}", ("a", "b", "ab", "ba", "aba", "bb")),
    ("regex", "(0|1[01]*)([.][01]{1,2})?", ("0", "1", ".", "10", "01", "1.", ".0")),
    ("regex", "[^a\n]{1,4}(a[^a\n]{1,3})*", ("a", "b", "é", "b€", b"\xe2", b"\x82", b"\xac", "ab", "€a")),
    ("regex", "((é|€)[ab]?){1,}", ("é", "a", "b", "€", b"\xc3", b"\xa9", b"\xe2\x82", b"\xac", "éa", b"\xacb")),
    ("ebnf", 'root ::= "(" root ")" | "a" | "b" root', ("(", ")", "a", "b", "((", "a)", "b(", "bb", "))")),
    ("ebnf", 'root ::= item ("," item)*\nitem ::= [0-2]{1,3} | "x" root', ("0", "1", "2", ",", "x", "12", "x1", ",x")),
    (
        "json_schema",
        '{"type": "array", "items": {"enum": [1, 12, null, "a"]}, "minItems": 1, "maxItems": 6}',
        ("[", "]", "1", "2", ",", '"a"', "12", ",1", "null", "nu", "ll", '"', "a", "[1"),
    ),
)
"""Kinds, texts, and words of which the first ones, or some of them, spell every text."""

ROOMY = ("regex", "([ -`b-~]|a[ -`b-~]){2,20}", ("a", "b"))
"""A language in which most words of ASCII are legal, so that a draft that knows no grammar has tokens accepted.

Parts of other letters are not: in a small vocabulary there may be no word that goes on behind one.
"""

ROOMY_SHARE = 3
"""Of so many grammars of an engine that drafts by itself, one is ROOMY."""

FOREIGN = ("z", "~", "", "za", b"\xff")
"""Words that no language has; the empty one belongs to a token without text."""


@st.composite
def with_grammar(
    draw: st.DrawFn, settings: Sampling, stops: Stops, vocab: int, within: Abilities | None = None
) -> tuple[Sampling, Stops]:
    """The settings with a grammar in place of bans, and mostly with an end token; as they are for few tokens.

    Every word of the language's own stands in the vocabulary; most of its other tokens repeat them. For an engine that
    reads words from a tokenizer, they are those of the usual one, and the grammar's end is the only stop.
    """
    if has_tokenizer(within):
        return draw(with_usual_words(settings, stops, vocab))
    fitting = [language for language in LANGUAGES if vocab >= len(language[2]) + len(FOREIGN)]
    if not fitting:
        return settings, stops
    # Kinds are drawn first: there are five regular expressions and one schema.
    kind = draw(st.sampled_from(sorted({name for name, *_ in fitting})))
    kind, text, spelling = draw(st.sampled_from([language for language in fitting if language[0] == kind]))
    # One number decides the words: a list of choices for each token would fill the buffer that shrinking works on.
    dice = Random(draw(st.integers(0, 255)))
    other_words = [
        dice.choice(spelling) if dice.random() < 0.75 else dice.choice(FOREIGN)
        for _ in range(vocab - len(spelling) - 1)
    ]
    words: list[str | bytes] = [*spelling, FOREIGN[0], *other_words]
    dice.shuffle(words)
    grammar = Grammar(kind, text, tuple(map(_hex, words)))
    ends = stops.eos
    if not ends and draw(st.integers(0, 3)):
        # A token that no text needs, so that ends of text leave the language as it is.
        ends = (next(token for token, word in enumerate(words) if word in FOREIGN),)
    stops = replace(stops, eos=ends)
    sampling = replace(settings, grammar=grammar, bad_words=(), min_tokens=0, processors=())
    return sampling, stops


def has_tokenizer(within: Abilities | None) -> bool:
    """Whether the engine reads the words of its grammars from a tokenizer."""
    return within is not None and within.grammar_words == "tokenizer"


@st.composite
def with_usual_words(draw: st.DrawFn, settings: Sampling, stops: Stops, vocab: int) -> tuple[Sampling, Stops]:
    """The same over `usual_spelling`, which has all words of a language or does not get it."""
    spelling = usual_spelling(vocab)
    fitting = [language for language in LANGUAGES if set(map(_hex, language[2])) <= set(spelling.words)]
    if not fitting:
        return settings, stops
    kind = draw(st.sampled_from(sorted({name for name, *_ in fitting})))
    kind, text, _ = draw(st.sampled_from([language for language in fitting if language[0] == kind]))
    if draw(st.integers(0, ROOMY_SHARE - 1)) == ROOMY_SHARE - 1:
        kind, text, _ = ROOMY
    grammar = Grammar(kind, text, spelling.words)
    sampling = replace(settings, grammar=grammar, bad_words=(), min_tokens=0, processors=())
    return sampling, ended(stops, grammar)


def ended(stops: Stops, grammar: Grammar) -> Stops:
    """The stops with the end of `usual_spelling` in place of all other ends but lengths."""
    return replace(stops, eos=(usual_spelling(len(grammar.words)).end,), stop_tokens=(), stop_strings=(), pieces=())


def _hex(word: str | bytes) -> str:
    return (word.encode() if isinstance(word, str) else word).hex()


MARKED = 2
"""Share of grammars that begin behind a marker: 1 in this many."""

LATEST_BEGINNING = 4
"""The most tokens of the model's own text before a drawn marker."""


@st.composite
def with_marker(draw: st.DrawFn, sampling: Sampling, stops: Stops, model: Seeded, prompt: tuple[int, ...]) -> Sampling:
    """The settings with a grammar behind a marker, in one of MARKED draws where they have a grammar.

    The marker is a piece of the model's own greedy text, so that it is met early, or a budget forces it.
    """
    if sampling.grammar is None or draw(st.integers(0, MARKED - 1)) < MARKED - 1:
        return sampling
    text = continuation(model, prompt)
    first = draw(st.integers(0, min(LATEST_BEGINNING, len(text) - 1)))
    marker = tuple(text[first : first + draw(st.integers(1, 2))])
    other_markers = draw(st.lists(st.tuples(st.integers(0, model.vocab_size - 1)), max_size=1))
    markers = tuple(sequence for sequence in dict.fromkeys((marker, *other_markers)) if not {*sequence} & {*stops.eos})
    if not markers:
        return sampling
    budget = draw(st.sampled_from((0, 0, 1, 2, 3)))
    return replace(sampling, grammar=replace(sampling.grammar, markers=markers, budget=budget))


def output_under_grammar(model: Seeded, prompt: tuple[int, ...], sampling: Sampling, stops: Stops) -> tuple[int, ...]:
    """The next LOOKAHEAD greedy tokens under the grammar; behind the end of a text, the model's own."""
    plain = Sampling(grammar=sampling.grammar)
    first = ORACLE(Case(model, prompt, sampling=plain, stops=Stops(LOOKAHEAD, stops.eos), dtype="float64")).output
    return (*first, *continuation(model, prompt + first))[:LOOKAHEAD]


def greedy_output(model: Seeded, prompt: tuple[int, ...], sampling: Sampling, stops: Stops) -> tuple[int, ...]:
    """The next LOOKAHEAD greedy tokens under the grammar of `sampling`, if it has any."""
    if sampling.grammar is None:
        return tuple(continuation(model, prompt))
    return output_under_grammar(model, prompt, sampling, stops)
