"""Where an output ends does not depend on how it was cut into blocks, and the engine finds it where the oracle does."""

import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from typing import Any

import pytest

from specverify.backends import faults
from specverify.backends.base import Declaration
from specverify.backends.compositions import open_cpu
from specverify.backends.engine import stops as engine
from specverify.backends.faults.fault import faults_in
from specverify.backends.faults.output import stop_conditions
from specverify.properties.invariants import ALL
from specverify.properties.strategies.acceptance import continuation, steer_again
from specverify.properties.strategies.models import GALLERY
from specverify.properties.verdict.judge import judge
from specverify.properties.verdict.subject import Subject
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.case_json import case_from_json, case_to_json
from specverify.reference.draft import LanguageModel, Scripted
from specverify.reference.malformed import Malformed
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.oracle.stopping import clip, completes, finish_reason
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.trace import Stage, Trace
from specverify.reference.tree import RankTree, Tree
from specverify.setup.subjects import subject_of
from tests.models import TINY_LLAMA

Block = tuple[int, ...]

MODEL = Seeded(GALLERY[9], 0)
VOCABULARY = GALLERY[9].vocab_size
PROMPT = (3, 1, 4)
AHEAD = tuple(continuation(MODEL, PROMPT))
LINE = Scripted((Tree((0, 0, 1, 2, 3), (PROMPT[-1], *AHEAD[:4])),))
"""A chain of four right tokens: the first block is five tokens long."""


def splits(text: Block) -> Iterator[tuple[Block, ...]]:
    """Every way to cut `text` into blocks."""
    for cuts in product((False, True), repeat=len(text) - 1):
        bounds = [0, *(place + 1 for place, cut in enumerate(cuts) if cut), len(text)]
        yield tuple(text[start:end] for start, end in pairwise(bounds))


def draw_stops(rng: random.Random) -> tuple[Stops, int, int]:
    """Stops of every kind, the length of a prompt, and min_tokens."""
    vocab, prompt = rng.randint(2, 5), rng.randint(1, 4)
    pieces = tuple("".join(rng.choices("ab", k=rng.randint(0, 3))) for _ in range(vocab))
    strings = tuple("".join(rng.choices("ab", k=rng.randint(1, 6))) for _ in range(rng.randint(0, 3)))
    eos, stop = (tuple(rng.sample(range(vocab), rng.choice((0, 0, 1)))) for _ in range(2))
    length = rng.choice((0, 0, prompt + rng.randint(1, 9)))
    stops = Stops(rng.randint(1, 12), eos, stop, strings, pieces if strings else (), length)
    return stops, prompt, rng.choice((0, 0, rng.randint(0, 7)))


def by_hand(text: Block, stops: Stops, prompt: int, least: int) -> tuple[Block, str | None]:
    """The end of `text`, written another way: each kind of end by itself, then the first of them."""
    length = min(stops.max_new_tokens, stops.max_length - prompt if stops.max_length else stops.max_new_tokens)
    ends = [(length, 2, "length")]
    ends += [(position + 1, 0, "eos") for position in range(least, len(text)) if text[position] in stops.eos]
    ends += [(position + 1, 1, "stop") for position in range(least, len(text)) if text[position] in stops.stop_tokens]
    if stops.stop_strings:
        owner = [index for index, token in enumerate(text) for _ in stops.pieces[token]]
        full_text = "".join(stops.pieces[token] for token in text)
        for stop_string in stops.stop_strings:
            for start in range(len(full_text) - len(stop_string) + 1):
                last = owner[start + len(stop_string) - 1]
                if full_text[start : start + len(stop_string)] == stop_string and last >= least:
                    ends.append((last + 1, 1, "stop"))
    end, _, why = min(ends)
    return (text[:end], why) if end <= len(text) else (text, None)


def in_blocks(blocks: tuple[Block, ...], stops: Stops, prompt: int, least: int) -> tuple[Block, str | None]:
    output: Block = ()
    for block in blocks:
        clipped_block, why = clip(block, output, stops, prompt, least)
        output += clipped_block
        if why is not None:
            return output, why
    return output, None


def test_the_end_does_not_depend_on_the_blocks() -> None:
    rng, reasons = random.Random(1), Counter[str | None]()
    for _ in range(250):
        stops, prompt, least = draw_stops(rng)
        vocab = len(stops.pieces) or 3
        text = tuple(rng.choices(range(vocab), k=7))
        expected = by_hand(text, stops, prompt, least)
        reasons[expected[1]] += 1
        for blocks in splits(text):
            assert in_blocks(blocks, stops, prompt, least) == expected
    assert min(reasons[why] for why in ("eos", "stop", "length")) > 20


def test_the_engine_ends_where_the_oracle_does() -> None:
    """Block by block, by the state it carries, which never holds more text than a stop string could begin in."""
    rng, reasons, across = random.Random(2), Counter[str | None](), 0
    for _ in range(5000):
        stops, prompt, least = draw_stops(rng)
        vocab = len(stops.pieces) or 3
        case = Case(
            Seeded(replace(GALLERY[0], vocab_size=vocab), 0) if vocab != 5 else TINY_LLAMA,
            (0,) * prompt,
            stops=replace(stops, eos=(), stop_tokens=()),
            sampling=Sampling(min_tokens=least),
        )
        limits = replace(engine.limits(case), eos=frozenset(stops.eos), stop=frozenset(stops.stop_tokens))
        written, why = engine.OutputTail(), None
        output: Block = ()
        while why is None:
            block = tuple(rng.choices(range(vocab), k=rng.randint(1, 6)))
            expected = clip(block, output, stops, prompt, least)
            engine_block, why = engine.clip(list(block), written, limits)
            assert (tuple(engine_block), why) == expected
            if why == "stop" and output and engine_block[-1] not in stops.stop_tokens:
                across += not completes(tuple(engine_block), stops)
            written = engine.follow(written, engine_block, limits)
            output += expected[0]
            longest = max(map(len, stops.stop_strings), default=1)
            assert len(written.tail) < longest
            assert written.tokens == len(output)
        reasons[why] += 1
    assert min(reasons[why] for why in ("eos", "stop", "length")) > 300
    assert across > 50


PIECES = ("", "a", "b", "ab", "xab")


@pytest.mark.parametrize(
    ("strings", "text", "num_kept"),
    [
        (("ab",), (1, 2, 3), 2),  # over two tokens
        (("ab",), (1, 0, 2, 3), 3),  # a token without text between them
        (("ba",), (3, 3, 1), 2),  # from the middle of one to the middle of the next
        (("xa",), (1, 4, 1), 2),  # inside one token, which is emitted whole
        (("b", "abab"), (1, 1, 2), 3),
        (("aab", "ab"), (1, 1, 2), 3),
        (("abab",), (3, 1, 1), None),
    ],
)
def test_stop_strings(strings: tuple[str, ...], text: Block, num_kept: int | None) -> None:
    stops = Stops(9, stop_strings=strings, pieces=PIECES)
    expected = (text, None) if num_kept is None else (text[:num_kept], "stop")
    for blocks in splits(text):
        assert in_blocks(blocks, stops, 1, 0) == expected


def test_min_tokens_passes_over_what_completes_before_it() -> None:
    stops = Stops(9, stop_strings=("ab",), pieces=PIECES)
    assert clip((3, 1, 1, 2, 1), (), stops, 1, 2) == ((3, 1, 1, 2), "stop")
    assert clip((1, 2, 1), (), stops, 1, 1) == ((1, 2), "stop")  # begun before it, completed after it
    assert clip((1, 2, 1), (), stops, 1, 2) == ((1, 2, 1), None)
    assert finish_reason((2,), Stops(1, eos=(2,)), 1, 1) == "length"
    assert finish_reason((0, 2), Stops(9, eos=(2,), stop_tokens=(2,)), 1, 1) == "eos"


def test_length_is_the_shorter_of_both_limits() -> None:
    assert clip((0, 0, 0), (0,), Stops(9, max_length=6), 3) == ((0, 0), "length")
    assert clip((0, 0, 0), (0,), Stops(2, max_length=6), 3) == ((0,), "length")
    assert clip((0, 5, 0), (0,), Stops(9, eos=(5,), max_length=6), 3) == ((0, 5), "eos")


def run(case: Case) -> Trace:
    """The engine's run; the oracle's must be the same, and every invariant of it hold."""
    subject = subject_of(open_cpu())
    names = {"lossless.stops", "lossless.draft-independent", "cache.commit-equivalence", "lossless.logprobs"}
    verdict = judge(case, [invariant for invariant in ALL if invariant.name in names], Oracle(), subject)
    assert verdict.findings == ()
    trace, expected = subject(case), Oracle()(case)
    assert (trace.output, trace.finish) == (expected.output, expected.finish)
    return trace


def letters(position: int) -> tuple[str, ...]:
    """Pieces of which that of `AHEAD[at]` alone completes `yz`; the token before it begins it."""
    pieces = ["x"] * VOCABULARY
    pieces[AHEAD[position]] = "z."
    if position:
        pieces[AHEAD[position - 1]] = "xy"
    return tuple(pieces)


@pytest.mark.parametrize("position", range(5))
def test_every_stop_on_every_position_of_a_block(position: int) -> None:
    """What was accepted beyond is neither emitted nor kept, and the block reaches beyond but for the bonus."""
    assert len(set(AHEAD[:5])) == 5
    string = "yz" if position else "z."
    kinds = {
        "eos": Stops(8, eos=(AHEAD[position],)),
        "stop": Stops(8, stop_tokens=(AHEAD[position],)),
        "string": Stops(8, stop_strings=(string,), pieces=letters(position)),
        "budget": Stops(position + 1),
        "length": Stops(8, max_length=len(PROMPT) + position + 1),
    }
    for kind, stops in kinds.items():
        trace = run(Case(MODEL, PROMPT, LINE, stops=stops))
        assert trace.output == AHEAD[: position + 1]
        assert trace.finish == {"string": "stop", "budget": "length"}.get(kind, kind)
        (step,) = trace.steps
        assert step.accepted is not None
        assert step.emitted is not None
        assert step.committed is not None
        assert len(step.accepted.path) == 5
        assert step.emitted.logprobs is not None
        assert len(step.emitted.logprobs) == position + 1
        assert step.committed.length == len(PROMPT) + position


@pytest.mark.parametrize("position", range(4))
def test_min_tokens_on_every_position_of_a_block(position: int) -> None:
    """A stop string is passed over, an end token banned, and the text goes on inside the block."""
    least = Sampling(min_tokens=position + 1)
    string = "yz" if position else "z."
    passed = run(
        Case(MODEL, PROMPT, LINE, stops=Stops(6, stop_strings=(string,), pieces=letters(position)), sampling=least)
    )
    assert (passed.output, passed.finish) == (AHEAD[:6], "length")
    stops = Stops(8, eos=(AHEAD[position],))
    other_output = run(Case(MODEL, PROMPT, sampling=least, stops=stops)).output
    assert AHEAD[position] not in other_output[: position + 1]
    banned = steer_again(LINE.trees, (PROMPT[-1], *AHEAD), (PROMPT[-1], *other_output), VOCABULARY)
    if len(other_output) > position + 1:
        trace = run(Case(MODEL, PROMPT, Scripted(banned), sampling=least, stops=stops))
        assert trace.output == other_output
        accepted = trace.steps[0].accepted
        assert accepted is not None
        assert len(accepted.path) > position


def test_a_draft_with_its_own_cache_keeps_nothing_beyond() -> None:
    shape = RankTree((0, 0, 1, 2, 3), (0, 0, 0, 0, 0))
    for position in range(5):
        stops = Stops(8, stop_strings=("yz" if position else "z.",), pieces=letters(position))
        trace = run(Case(MODEL, PROMPT, LanguageModel(MODEL, shape), stops=stops))
        assert trace.output == AHEAD[: position + 1]


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda: Stops(stop_strings=("",), pieces=("a",)), "stop_strings[0]: an empty text"),
        (lambda: Stops(stop_strings=("a",)), "pieces: missing"),
        (lambda: Stops(pieces=("a",)), "pieces: there is no stop string"),
        (lambda: Stops(stop_strings=("\ud83d",), pieces=("a",)), "stop_strings[0]: holds half a surrogate pair"),
        (lambda: Stops(stop_strings=("a",), pieces=("a", "\ude00")), "pieces[1]: holds half a surrogate pair"),
        (lambda: Stops(max_length=-1), "max_length: -1 is negative"),
        (lambda: Case(MODEL, PROMPT, stops=Stops(stop_strings=("a",), pieces=("a",))), "stops.pieces: 1 texts for a"),
        (lambda: Case(MODEL, PROMPT, stops=Stops(max_length=3)), "stops.max_length: 3 leaves nothing to emit"),
        (lambda: Case(MODEL, PROMPT, stops=Stops(max_length=9999)), "stops.max_length: 9999 is more than the model's"),
    ],
)
def test_bad_input_is_one_line(make: Any, line: str) -> None:
    with pytest.raises(Malformed) as complaint:
        make()
    assert str(complaint.value).startswith(line)
    assert "\n" not in str(complaint.value)


def test_a_tree_may_not_reach_beyond_the_context_and_max_length_bounds_it() -> None:
    context = MODEL.architecture.max_positions
    long = (1,) * (context - 6)
    tree = Scripted((Tree((0, 0, 1, 2), (1, 1, 1, 1)),))
    with pytest.raises(Malformed, match="prompt: needs up to"):
        Case(MODEL, long, tree, stops=Stops(8))
    assert Case(MODEL, long, tree, stops=Stops(8, max_length=context - 3)).longest == context
    with pytest.raises(Malformed, match="prompt: needs up to"):
        Case(MODEL, long, tree, stops=Stops(8, max_length=context - 2))


def test_a_case_file_holds_all_of_it_and_older_ones_are_as_they_were() -> None:
    stops = Stops(4, (1,), (2,), ("é\n", '"'), tuple(f"piece {token}" for token in range(VOCABULARY)), 7)
    case = Case(MODEL, PROMPT, LINE, stops=stops)
    assert case_from_json(json.loads(json.dumps(case_to_json(case)))) == case
    plain = case_to_json(Case(MODEL, PROMPT, stops=Stops(4)))
    assert set(plain["stops"]) == {"max_new_tokens", "eos", "stop_tokens"}
    for name, value, line in (
        ("stop_strings", [1], "stops.stop_strings[0]: 1 is not of type 'string'"),
        ("stop_strings", [""], "stops.stop_strings[0]: an empty text is complete before it starts"),
        ("pieces", ["a"], "stops.pieces: there is no stop string to look for in them"),
        ("max_length", 2.0, "stops.max_length: 2.0 is not of type 'integer'"),
        ("stop_words", [], "stops: Additional properties"),
    ):
        with pytest.raises(Malformed) as complaint:
            case_from_json({**plain, "stops": {**plain["stops"], name: value}})
        assert str(complaint.value).startswith(line)


class Modest:
    """A backend that knows what backends knew before there were stop strings."""

    declaration = Declaration(
        name="modest", device="cpu", reveals=frozenset(), dtypes=("float32",), drafts=("scripted",)
    )

    def run(self, case: Case) -> Trace:
        raise AssertionError("it was asked for what it does not declare")


@pytest.mark.parametrize(
    ("stops", "name"),
    [(Stops(stop_strings=("a",), pieces=("a",) * VOCABULARY), "stop_strings"), (Stops(max_length=9), "max_length")],
)
def test_a_backend_without_them_declines(stops: Stops, name: str) -> None:
    verdict = judge(Case(MODEL, PROMPT, stops=stops), ALL, Oracle(), subject_of(Modest()))
    assert verdict.unsupported == f"modest declares no {name}"


def subject_with_fault(name: str) -> Subject:
    backend = open_cpu()
    faults.plant(backend, faults.fault_named(name))
    return subject_of(backend)


def early(text: str, position: int, budget: int = 8) -> Stops:
    """Ends that `AHEAD[at]` completes."""
    return Stops(budget, stop_strings=(text,), pieces=letters(position))


THIRD = Stops(8, AHEAD[2:3])
SHORT = Scripted((Tree((0, 0), (PROMPT[-1], AHEAD[0])),))
BAD_STOPS = {
    "stop-string-cuts-text-only": Case(MODEL, PROMPT, LINE, stops=early("z.", 0)),
    "stop-string-outside-window": Case(MODEL, PROMPT, LINE, stops=early("z.", 0)),
    "stop-string-tail-forgotten": Case(MODEL, PROMPT, SHORT, stops=early("yz", 2)),
    "budget-masks-stops": Case(MODEL, PROMPT, LINE, stops=early("z.", 0, budget=4)),
    "context-clip-by-what-is-left": Case(MODEL, PROMPT, LINE, stops=Stops(8, max_length=len(PROMPT) + 4)),
    "stop-string-before-min-tokens": Case(MODEL, PROMPT, LINE, stops=early("yz", 2), sampling=Sampling(min_tokens=3)),
    "min-tokens-one-row-too-many": Case(MODEL, PROMPT, LINE, stops=THIRD, sampling=Sampling(min_tokens=2)),
    "min-tokens-for-first-row-only": Case(MODEL, PROMPT, LINE, stops=THIRD, sampling=Sampling(min_tokens=4)),
}
"""A case for each fault of stopping."""


def test_every_fault_of_stopping_has_its_case() -> None:
    assert {fault.name for fault in faults_in(stop_conditions)} == set(BAD_STOPS)


@pytest.mark.parametrize("name", BAD_STOPS)
def test_faults_of_stopping_are_found_where_they_strike(name: str) -> None:
    case = BAD_STOPS[name]
    assert judge(case, ALL, Oracle(), subject_of(open_cpu())).findings == ()
    first = judge(case, ALL, Oracle(), subject_with_fault(name)).first
    assert first is not None
    assert first.stage is faults.fault_named(name).stage


def always(trace: Trace, case: Case) -> Trace:
    return trace


def test_kept_beyond_the_cut_is_found() -> None:
    """KV of the block's rest in the committed cache, and log-probabilities of tokens that were not emitted."""
    invariant = [invariant for invariant in ALL if invariant.name == "lossless.stops"]
    case = Case(MODEL, PROMPT, LINE, stops=early("z.", 0))
    trace = open_cpu().run(case)
    (step,) = trace.steps
    assert step.committed is not None
    assert step.emitted is not None
    assert step.emitted.logprobs is not None
    longer = replace(step.committed, length=step.committed.length + 1)
    more = replace(step.emitted, logprobs=(*step.emitted.logprobs, -1.0))
    for broken, stage in (
        (replace(step, committed=longer), Stage.COMMITTED),
        (replace(step, emitted=more), Stage.EMITTED),
    ):
        broken_trace = replace(trace, steps=(broken,))
        subject = Subject("broken", partial(always, broken_trace), frozenset(Stage))
        (finding,) = judge(case, invariant, Oracle(), subject).findings
        assert finding.stage is stage


def test_an_output_without_the_tokens_of_its_last_step_is_judged_up_to_its_end() -> None:
    """The output is told to be cut; the log-probabilities of the tokens that it lacks are passed over."""
    case = Case(MODEL, PROMPT, LINE, stops=Stops(8))
    trace = subject_of(open_cpu())(case)
    names = {"lossless.stops", "lossless.logprobs"}
    cut = Subject("cut", partial(always, replace(trace, output=trace.output[:-1])), frozenset(Stage))
    verdict = judge(case, [invariant for invariant in ALL if invariant.name in names], Oracle(), cut)
    assert {finding.invariant for finding in verdict.findings} == {"lossless.stops"}
    assert verdict.outcomes["lossless.logprobs"] == "checked"
