"""Legal tokens of grammars: the oracle against all strings, the plain matcher and the libraries against the oracle."""

import itertools
import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specverify.backends.base import Unsupported
from specverify.backends.engine.guided.guide import masks, open_guide
from specverify.properties.strategies.grammars import LANGUAGES
from specverify.reference.grammar import CONVENTIONS, LIBRARIES, Convention, Grammar
from specverify.reference.malformed import Malformed
from specverify.reference.oracle.language import legal_after
from specverify.reference.tree import Shape

WORDS = ("a", "b", "c", "ab", "bc", "aba", "0", "1", "10", ".", "é", b"\xc3", b"\xa9", "(", ")", "[", "]", ",", "")
HEX = tuple((word if isinstance(word, bytes) else word.encode()).hex() for word in WORDS)
END = len(WORDS) - 1
BYTES = (*(bytes([byte]).hex() for byte in range(256)), "")


def spell(*words: str) -> tuple[int, ...]:
    return tuple(WORDS.index(word) for word in words)


def allowed_tokens(grammar: Grammar, output: tuple[int, ...]) -> set[int]:
    return set(legal_after(grammar, (END,), output).tokens.nonzero()[0].tolist())


@pytest.mark.parametrize(
    ("text", "alphabet"),
    [
        ("(ab|bc)*c?", "abc"),
        ("a{1,3}b?(c|10)", "abc10"),
        ("(0|1[01]{0,2})(\\.[01]{1,2})?", "01."),
        ("(a|b)*a(a|b){2}", "ab"),
        ("[^b0-9]{2,4}(b|c)?", "abc"),
        ("((a?b)*c){1,2}", "abc"),
    ],
)
def test_the_oracle_allows_what_all_strings_of_the_language_go_on_with(text: str, alphabet: str) -> None:
    size = 8 if len(alphabet) < 4 else 6
    strings = map("".join, itertools.chain(*(itertools.product(alphabet, repeat=k) for k in range(size + 1))))
    language = {string for string in strings if re.fullmatch(text, string)}
    begun = {string[:cut] for string in language for cut in range(len(string) + 1)}
    grammar = Grammar("regex", text, HEX)
    inside = [
        index for index, word in enumerate(WORDS) if isinstance(word, str) and word and set(word) <= set(alphabet)
    ]
    compared = 0
    for output in itertools.chain(*(itertools.product(inside, repeat=k) for k in range(3))):
        so_far = "".join(str(WORDS[token]) for token in output)
        if so_far not in begun or len(so_far) > size - 5:
            continue
        expected = {index for index in inside if so_far + str(WORDS[index]) in begun}
        assert allowed_tokens(grammar, output) & {*inside, END} == expected | ({END} if so_far in language else set())
        compared += 1
    assert compared > 1


def test_a_text_ends_is_refused_or_closed() -> None:
    grammar = Grammar("regex", "ab?", HEX)
    assert allowed_tokens(grammar, ()) == {*spell("a", "ab")}
    assert allowed_tokens(grammar, spell("a")) == {*spell("b"), END}
    assert allowed_tokens(grammar, spell("ab")) == {END}
    assert legal_after(grammar, (END,), spell("b")).refused
    over = legal_after(grammar, (END,), (*spell("a"), END))
    assert over.is_closed
    assert not over.refused
    assert legal_after(grammar, (END,), (END,)).refused
    assert legal_after(grammar, (END,), (*spell("a"), END, *spell("b"))).refused
    # Without an end token nothing may follow a text that is complete.
    assert legal_after(grammar, (), spell("ab")).is_closed


def test_a_character_may_be_spread_over_tokens() -> None:
    grammar = Grammar("regex", "[^a]b", HEX)
    assert WORDS.index(b"\xc3") in allowed_tokens(grammar, ())
    assert WORDS.index(b"\xa9") not in allowed_tokens(grammar, ())
    assert allowed_tokens(grammar, (WORDS.index(b"\xc3"),)) == {WORDS.index(b"\xa9")}


@pytest.mark.parametrize(
    ("kind", "text", "why"),
    [
        ("regex", "(a", "is not closed"),
        ("regex", "a)", "nothing to close"),
        ("regex", "*a", "nothing to repeat"),
        ("regex", "a.b", "is refused"),
        ("regex", "\\d", "is refused"),
        ("regex", "a{3,1}", "is refused"),
        ("regex", "[b-a]", "backwards"),
        ("ebnf", 'root ::= root "a" | "b"', "before it has matched"),
        ("ebnf", 'root ::= "a" root', "matches no text"),
        ("ebnf", 'start ::= "a"', "no rule root"),
        ("ebnf", 'root ::= "a" other', "no rule other"),
        ("json_schema", "{", "is no JSON"),
        ("json_schema", '{"type": "string"}', "llguidance does not"),
        ("json_schema", '{"type": "integer"}', "xgrammar does not"),
        ("json_schema", '{"oneOf": []}', "libraries read it"),
        ("json_schema", '{"type": "object", "properties": {}}', "additionalProperties"),
    ],
)
def test_a_grammar_outside_the_dialect_is_refused_in_one_line(kind: str, text: str, why: str) -> None:
    with pytest.raises(Malformed, match=why) as refused:
        legal_after(Grammar(kind, text, HEX), (END,), ())
    assert "\n" not in str(refused.value)


def outputs(grammar: Grammar, dice: random.Random, ends: tuple[int, ...]) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Outputs that go on with legal tokens, and now and then with another one; each with its next token."""
    output: tuple[int, ...] = ()
    for _ in range(9):
        legal = [int(token) for token in legal_after(grammar, ends, output).tokens.nonzero()[0] if token not in ends]
        token = dice.choice(legal) if legal and dice.random() < 0.9 else dice.randrange(len(grammar.words))
        yield token, output
        if token not in legal:
            return
        output += (token,)


def agree(grammar: Grammar, ends: tuple[int, ...], dice: random.Random) -> int:
    """Walk through the grammar with the engine's matcher, back and forth, and compare it with the oracle."""
    guide, compared = open_guide(grammar, ends), 0
    for token, output in outputs(grammar, dice, ends):
        true = legal_after(grammar, ends, output)
        assert guide.row().tolist() == true.tokens.tolist(), (grammar.kind, grammar.text, output)
        compared += 1
        if token in ends:
            return compared
        legal = bool(true.tokens[token])
        if legal and guide.matcher.push(token):
            guide.matcher.pop()
            assert guide.row().tolist() == true.tokens.tolist()
        assert guide.accept_token(token) == legal
    return compared


SCHEMAS = (
    {"type": "object", "properties": {"a": {"type": "integer", "minimum": 0}, "b": {"const": "c"}}, "required": ["b"],
     "additionalProperties": False},
    {"type": "array", "items": {"enum": [1, 10, "ab", None]}, "minItems": 2},
    {"anyOf": [{"type": "boolean"}, {"type": "string", "pattern": "^[a-c]{1,2}0?$"}]},
    {"type": "array", "items": {"type": "null"}, "maxItems": 1},
)  # fmt: skip
JSON_HEX = tuple(
    word.encode().hex()
    for word in ("{", "}", "[", "]", '"', ":", ",", *"abcntrufelsw01", '{"', '"b":', "ab", "10", "tr", "null", "],")
)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**20))
def test_the_plain_matcher_agrees_with_the_oracle(number: int) -> None:
    dice = random.Random(number)
    kind, text, own_words = dice.choice(LANGUAGES)
    words = [*own_words, *(dice.choice(own_words) for _ in range(6)), ""]
    dice.shuffle(words)
    vocabulary = tuple((word if isinstance(word, bytes) else word.encode()).hex() for word in words)
    assert agree(Grammar(kind, text, vocabulary), (vocabulary.index(""),), dice)
    assert agree(Grammar("json_schema", json.dumps(dice.choice(SCHEMAS)), JSON_HEX), (), dice)


def test_a_library_that_is_absent_is_refused_by_name() -> None:
    for library in LIBRARIES[1:]:
        if find_spec(library) is None:
            with pytest.raises(Unsupported, match=rf"the library {library} is not installed: pip install"):
                open_guide(Grammar("regex", "a", HEX, library), ())


WITH_LIBRARIES = pytest.mark.skipif(
    any(find_spec(library) is None for library in LIBRARIES[1:]), reason="pip install '.[grammars]'"
)


def drawn_regex(dice: random.Random, depth: int = 3) -> str:
    """A regular expression over the letters of WORDS."""
    kind = dice.randrange(7) if depth else 0
    if kind <= 1:
        return dice.choice(["a", "b", "c", "é", "[ab]", "[^a]", "[a-c0]", "\\.", "10", "0", "\\("])
    beginning, ending = (drawn_regex(dice, depth - 1) for _ in range(2))
    counted = f"({beginning})" + dice.choice(["*", "+", "?", "{2}", "{1,3}", "{2,}"])
    return [beginning + ending, f"({beginning}|{ending})", counted, beginning + ending, counted][kind - 2]


def drawn_grammar(dice: random.Random, number: int) -> Grammar:
    """A grammar of one of the three kinds."""
    if number % 5 == 3:
        schema = dice.choice(SCHEMAS)
        return Grammar(
            "json_schema", json.dumps({"type": "array", "items": schema, "maxItems": 1 + number % 3}), JSON_HEX
        )
    if number % 5 == 4:
        classes = dice.sample(["[ab]", "[^()]", '"ab"', '"é"', "[0-1]{1,2}"], 3)
        text = f'root ::= "(" root ")" | {classes[0]} | item root\nitem ::= {classes[1]} ({classes[2]})?'
        return Grammar("ebnf", text, HEX)
    return Grammar("regex", drawn_regex(dice), HEX)


@WITH_LIBRARIES
@pytest.mark.slow
def test_brute_force_and_both_libraries_agree_on_the_nodes_of_drawn_trees() -> None:
    dice, nodes, refused = random.Random(5), Counter[str](), 0
    for number in range(50):
        grammar = drawn_grammar(dice, number)
        ends = (END,) if grammar.words == HEX else ()
        guides = {library: open_guide(replace(grammar, library=library), ends) for library in LIBRARIES}
        for _ in range(30):
            shape = Shape((0, *(dice.randrange(node) for node in range(1, 12))))
            paths: list[tuple[int, ...]] = [()]
            for node in range(1, len(shape)):
                path = paths[shape.parent[node]]
                legal = legal_after(grammar, ends, path).tokens.nonzero()[0].tolist()
                token = dice.choice(legal) if legal and dice.random() < 0.85 else dice.randrange(len(grammar.words))
                paths.append((*path, token))
            tokens = [0, *(path[-1] for path in paths[1:])]
            true = [legal_after(grammar, ends, path) for path in paths]
            for library, guide in guides.items():
                node_masks = masks(guide, shape, tokens)
                assert node_masks.refused.tolist() == [answer.refused for answer in true], (library, grammar, tokens)
                for node, answer in enumerate(true):
                    if not answer.refused:
                        assert node_masks.legal[node].tolist() == answer.tokens.tolist(), (
                            library,
                            grammar,
                            paths[node],
                        )
                        nodes[library] += 1
            refused += sum(answer.refused for answer in true)
    assert refused > 1000
    assert all(nodes[library] >= 10_000 for library in LIBRARIES)


@WITH_LIBRARIES
@pytest.mark.slow
def test_llguidance_lexes_rules_that_are_given_to_it_as_they_are() -> None:
    from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
    from llguidance.gbnf_to_lark import any_to_lark

    class Bytes:
        eos_token_id, bos_token_id, special_token_ids = 256, None, [256]
        tokens = [*(bytes([byte]) for byte in range(256)), b"</s>"]  # noqa: RUF012

        def __call__(self, text: bytes) -> list[int]:
            return list(text)

    text = 'root ::= "ab" | [ab] root'
    tokenizer = LLTokenizer(TokenizerWrapper(Bytes()), n_vocab=257, eos_token=256, slices=[])
    as_it_is = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(any_to_lark(text)))
    assert as_it_is.try_consume_tokens(list(b"abab")) < 4
    words = tuple(bytes([byte]).hex() for byte in range(256))
    for library in LIBRARIES:
        guide = open_guide(Grammar("ebnf", text, words, library), ())
        assert all(map(guide.matcher.push, b"abab"))
        assert guide.matcher.complete()


@pytest.mark.parametrize(
    ("library", "kind", "text", "legal", "illegal"),
    [
        ("xgrammar", "regex", r"\d{2}[\w-]", ("10a", "01_", "00-"), ("1\u0663a", "10é", "1a")),
        ("llguidance", "regex", r"\d{2}[\w-]", ("10a", "1\u0663a", "10é"), ("10.", "1a", "10 ")),
        ("xgrammar", "regex", r"\S\D", ("ab", "\u0663é", "\x85a"), (" a", "a1", "\xa0a", "\u2003a")),
        ("llguidance", "regex", r"\S\W", ("a.", "1 "), ("ab", " .", "\u2003.")),
        ("xgrammar", "json_schema", '{"type": "string"}', ('"a\\/"', '"\x7f"', '"\\u00e9"'), ('"\n"', '"\\u12"', '"a')),
        ("llguidance", "json_schema", '{"type": "string"}', ('"a\\n"', '"\\u001F"'), ('"\\/"', '"\x7f"', '"\\u00e9"')),
        ("xgrammar", "json_schema", '{"type": "integer"}', ("0", "-10"), ("-0", "01", "1.0")),
        ("llguidance", "json_schema", '{"type": "integer"}', ("0", "-0", "-10"), ("01", "+1")),
        ("llguidance", "json_schema", r'{"type": "string", "pattern": "^\\d+$"}', ('"10"', '"\u0663"'), ('""', '"a"')),
        ("xgrammar", "json_schema", r'{"type": "string", "pattern": "^\\w+$"}', ('"a1_"',), ('"é"', '"-"')),
    ],
)  # fmt: skip
def test_what_libraries_read_differently_is_read_as_the_named_library_reads_it(
    library: str, kind: str, text: str, legal: tuple[str, ...], illegal: tuple[str, ...]
) -> None:
    grammar = Grammar(kind, text, BYTES, library)
    with pytest.raises(Malformed):
        legal_after(replace(grammar, library="plain"), (), ())
    for string in legal:
        after = legal_after(grammar, (), tuple(string.encode()))
        assert not after.refused
    for string in illegal:
        *beginning, last = string.encode()
        begun = legal_after(grammar, (256,), tuple(beginning))
        ends = legal_after(grammar, (256,), tuple(string.encode())).tokens[256]
        assert begun.refused or not begun.tokens[last] or not ends


@WITH_LIBRARIES
@pytest.mark.slow
@pytest.mark.parametrize("library", LIBRARIES[1:])
@pytest.mark.parametrize("letter", "dwsDWS")
def test_a_class_of_letters_is_the_librarys_at_every_code_point(library: str, letter: str) -> None:
    grammar = Grammar("regex", f"\\{letter}", BYTES[:256], library)
    matcher = open_guide(grammar, ()).matcher
    characters = 0

    def compare(heads: tuple[int, ...]) -> None:
        nonlocal characters
        legal = legal_after(grammar, (), heads).tokens.nonzero()[0].tolist()
        assert matcher.legal().nonzero()[:, 0].tolist() == legal, heads
        for byte in legal:
            assert matcher.push(byte)
            if matcher.complete():
                characters += 1
            else:
                compare((*heads, byte))
            matcher.pop()

    compare(())
    assert characters >= 7


@WITH_LIBRARIES
@pytest.mark.slow
@pytest.mark.parametrize("library", LIBRARIES[1:])
def test_strings_and_integers_of_a_library_are_read_as_it_reads_them(library: str) -> None:
    dice = random.Random(11)
    schema = {
        "type": "array",
        "items": {"anyOf": [{"type": "string"}, {"type": "integer"}, {"type": "string", "pattern": "^\\d\\w*$"}]},
    }
    pieces = ('"', "\\", "/", "u", "0", "-", "1", "f", "7F", "\x7f", "é", "[", "]", ",", '",', '["', "\\u", "00", "n")
    words = tuple(piece.encode().hex() for piece in (*pieces, "\n", "-0", "_", "\u0663"))
    grammar = Grammar("json_schema", json.dumps(schema), words, library)
    assert sum(agree(grammar, (), dice) for _ in range(400)) > 1500


@WITH_LIBRARIES
@pytest.mark.slow
@pytest.mark.parametrize("convention", CONVENTIONS, ids=lambda convention: f"{convention.kind}: {convention.grammar}")
def test_a_convention_is_a_difference_between_the_libraries(convention: Convention) -> None:
    words = tuple(bytes([byte]).hex() for byte in range(256))

    def is_accepted_by(library: str) -> bool:
        try:
            guide = open_guide(Grammar(convention.kind, convention.grammar, words, library), ())
        except Unsupported:
            return False
        return all(map(guide.matcher.push, convention.text.encode())) and guide.matcher.complete()

    assert (is_accepted_by("xgrammar"), is_accepted_by("llguidance")) == (convention.xgrammar, convention.llguidance)
    with pytest.raises(Malformed):
        legal_after(Grammar(convention.kind, convention.grammar, words), (), ())
