"""Three rows of tokens: aligned, with the first difference marked, on terminal, HTML page and JSON."""

from dataclasses import replace

from specverify import __version__
from specverify.properties.adapter_mistakes import MISTAKES
from specverify.properties.refused_settings import SETTINGS
from specverify.properties.tally import Failure, Tally
from specverify.properties.texts import Texts, greedy_text, texts_of
from specverify.properties.verdict.finding import Finding, Verdict
from specverify.reference.case import Case
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.trace import Stage, Trace
from specverify.reports.hints import HINTS
from specverify.reports.html.pages import diff_page
from specverify.reports.pages.terminal import failure_page
from specverify.reports.pages.token_rows import token_rows
from specverify.reports.record import failure_fact
from tests.models import LLAMA

CASE = Case(LLAMA, (3, 1, 4), stops=Stops(5))
FINDING = Finding("lossless.greedy-match", Stage.EMITTED, 0, {"position": 1}, 7, 9, 80.0)


def failure(texts: Texts | None, mistake: str | None = None) -> Failure:
    verdict = Verdict(CASE, "generate", {FINDING.invariant: "failed"}, (FINDING,), trace=Trace((), (2, 9), None))
    return Failure(verdict, FINDING, CASE.id, texts=texts, mistake=mistake)


def test_the_first_difference_is_marked_below_its_token() -> None:
    rows = token_rows(Texts((3, 1, 4), (2, 17, 5), (2, 9)))
    assert rows == [
        ("prompt", "3 1 4"),
        ("must be", " 2 17  5"),
        ("is", " 2  9  –"),
        ("", "    ▲ token 1 of the output, counted from 0"),
    ]


def test_of_long_texts_the_part_around_the_difference_is_shown() -> None:
    due = tuple(range(100, 300))
    rows = dict(token_rows(Texts(due, due, (*due[:150], 7, *due[151:])), width=80))
    assert rows["prompt"].startswith("… ")
    assert rows["prompt"].endswith(" 299")
    assert rows["must be"].startswith("… ")
    assert rows["must be"].endswith(" …")
    assert " 250 " in rows["must be"]
    assert max(map(len, rows.values())) <= 64
    assert rows["is"][rows[""].index("▲")] == "7"


def test_text_stands_beside_ids_where_a_tokenizer_is_known() -> None:
    words = ("Once upon a", " time", " thyme")
    rows = token_rows(Texts((3, 1, 4), (2,), (9,), words))
    assert [row for row in rows if "“" in row[1]] == [("", "“Once upon a”"), ("", "“time”"), ("", "“thyme”")]
    assert rows.index(("", "▲ token 0 of the output, counted from 0")) == rows.index(("is", "9")) + 1


def test_terminal_page_and_json_show_prompt_right_text_and_hint() -> None:
    full_failure = failure(Texts((3, 1, 4), (2, 7, 5), (2, 9)), "token-too-few")
    for page in (
        failure_page(full_failure),
        diff_page(Tally("generate", failures=[full_failure]), __version__).decode(),
    ):
        words = " ".join(page.split())
        assert "must be" in words
        assert "prompt" in words
        assert HINTS["token-too-few"].split("`")[0] in words
    fact = failure_fact(full_failure)
    assert fact["texts"] == {
        "prompt": (3, 1, 4), "must_be": (2, 7, 5), "is": (2, 9), "first_difference": 1, "words": None,
    }  # fmt: skip
    assert fact["hint"] == {"mistake": "token-too-few", "words": HINTS["token-too-few"]}
    assert "must be" not in failure_page(failure(None)), "without texts the page shows expected and observed"
    assert failure_fact(failure(None))["texts"] is None


def test_a_known_fault_of_the_engine_is_named_on_every_page() -> None:
    full_failure = replace(failure(None), known=("sampling: temperature is not read (engine 1.0)",))
    for page in (
        failure_page(full_failure),
        diff_page(Tally("generate", failures=[full_failure]), __version__).decode(),
    ):
        assert "sampling: temperature is not read (engine 1.0)" in " ".join(page.split())
    assert failure_fact(full_failure)["known"] == ["sampling: temperature is not read (engine 1.0)"]
    assert "known" not in failure_page(failure(None))


def test_the_right_text_is_the_oracles() -> None:
    oracle = Oracle()
    due = oracle(CASE).output
    wrong = (*due[:1], (due[1] + 1) % LLAMA.vocab_size, *due[2:])
    verdict = failure(None).verdict
    texts = texts_of(replace(verdict, trace=Trace((), wrong, None)), FINDING, oracle)
    assert texts == Texts(CASE.prompt, due, wrong)
    assert texts.first_difference == 1
    assert texts_of(replace(verdict, trace=None), FINDING, oracle) is None
    drawn = replace(CASE, sampling=Sampling(1.0))
    assert greedy_text(drawn, wrong, 1, oracle) is None, "what coins of the engine's own draw is not known"


def test_behind_an_excused_tie_the_right_text_follows_the_observed_one() -> None:
    oracle = Oracle()
    due = oracle(CASE).output
    tied = (due[0] + 1) % LLAMA.vocab_size
    continuation = oracle(replace(CASE, prompt=(*CASE.prompt, tied), stops=Stops(4))).output
    wrong = (tied, continuation[0], (continuation[1] + 1) % LLAMA.vocab_size)
    assert greedy_text(CASE, wrong, 2, oracle) == (tied, *continuation)


def test_every_mistake_has_its_sentence() -> None:
    assert [*(mistake.name for mistake in MISTAKES), *(setting.hint for setting in SETTINGS)] == list(HINTS)
