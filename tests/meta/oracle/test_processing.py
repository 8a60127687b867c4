"""Processing against transformers' own processors and by hand; custom processors, admitted and refused."""

import math
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specverify.backends.engine.sampling import processing as engine
from specverify.reference import user_processors
from specverify.reference.malformed import Malformed
from specverify.reference.oracle.processing import law, logprob, margin, scores, softmax
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.trace import Array

VOCAB = 12
WORDS = ((4,), (1, 7), (2, 1, 9), (3, 3))
NEVER = Stops(eos=())

SETTINGS: dict[str, dict[str, Any]] = {
    "temperature": {},
    "cold": {"temperature": 0.05},
    "repetition": {"repetition_penalty": 1.7},
    "encouraged": {"repetition_penalty": 0.6},
    "bad-words": {"bad_words": WORDS},
    "min-tokens": {"min_tokens": 3},
    "top-k": {"top_k": 4},
    "top-k-1": {"top_k": 1},
    "top-k-all": {"top_k": 50},
    "top-p": {"top_p": 0.8},
    "narrow-top-p": {"top_p": 0.05},
    "min-p": {"min_p": 0.15},
    "all": {"repetition_penalty": 1.3, "bad_words": WORDS, "min_tokens": 2, "top_k": 7, "top_p": 0.9, "min_p": 0.05},
}


def by_transformers(logits: Array, sampling: Sampling, stops: Stops, prompt: Any, output: Any) -> tuple[Array, Array]:
    """Scores and law by transformers' processors, in the order in which its generate puts them."""
    before: LogitsProcessorList = LogitsProcessorList()
    if sampling.repetition_penalty != 1.0:
        before.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if sampling.bad_words:
        before.append(NoBadWordsLogitsProcessor([list(word) for word in sampling.bad_words]))
    if sampling.min_tokens:
        ends = [*stops.eos, *stops.stop_tokens]
        before.append(MinNewTokensLengthLogitsProcessor(len(prompt), sampling.min_tokens, ends))
    after: LogitsProcessorList = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    if sampling.top_k:
        after.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        after.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p > 0.0:
        after.append(MinPLogitsWarper(sampling.min_p))
    ids = torch.tensor([[*prompt, *output]])
    raw = before(ids, torch.tensor(logits, dtype=torch.float64)[None])
    return raw[0].numpy(), after(ids, raw)[0].softmax(-1).numpy()


@pytest.mark.parametrize("name", SETTINGS)
def test_transformers_agrees(name: str) -> None:
    sampling = replace(Sampling(temperature=0.8), **SETTINGS[name])
    stops = Stops(eos=(5,), stop_tokens=(0, 8))
    changed = skipped = 0
    rng = np.random.default_rng(7)
    for _ in range(200):
        logits = rng.normal(0, 2, VOCAB)
        prompt = tuple(int(token) for token in rng.integers(0, 4, rng.integers(1, 6)))
        output = tuple(int(token) for token in rng.integers(0, 4, rng.integers(0, 5)))
        if margin(logits, sampling, stops, prompt, output) < 1e-9:
            skipped += 1
            continue
        expected_scores, expected_law = by_transformers(logits, sampling, stops, prompt, output)
        np.testing.assert_allclose(scores(logits, sampling, stops, prompt, output), expected_scores, rtol=1e-14)
        actual_law = law(logits, sampling, stops, prompt, output)
        np.testing.assert_allclose(actual_law, expected_law, rtol=1e-12, atol=1e-15)
        assert ((actual_law > 0) == (expected_law > 0)).all()
        changed += not np.allclose(actual_law, softmax(logits / 0.8), atol=1e-6)
    assert skipped < 5
    assert changed > 60 or name in ("temperature", "top-k-all")


def test_presence_counts_once_and_frequency_each_time() -> None:
    """Only tokens of the output; the path below the root is output, the prompt is not."""
    sampling = Sampling(1.0, presence_penalty=0.5, frequency_penalty=0.25)
    row_scores = scores(np.zeros(5), sampling, NEVER, (0, 0, 1), (1, 2, 2, 2))
    assert row_scores.tolist() == [0.0, -0.75, -1.25, 0.0, 0.0]
    raised = replace(sampling, presence_penalty=-1.0, frequency_penalty=0.0)
    assert scores(np.zeros(3), raised, NEVER, (0,), (2,)).tolist() == [0.0, 0.0, 1.0]


def test_the_order_of_scores() -> None:
    """Repetition multiplies before presence subtracts; a ban stands whatever came before it."""
    sampling = Sampling(1.0, repetition_penalty=2.0, presence_penalty=1.0, bad_words=((2,),), min_tokens=9)
    row_scores = scores(np.array([4.0, -4.0, 8.0, 8.0]), sampling, Stops(eos=(3,)), (0,), (1,))
    assert row_scores.tolist() == [2.0, -9.0, -math.inf, -math.inf]
    bare = replace(sampling, bad_words=())
    assert scores(np.array([-math.inf, 1.0]), bare, NEVER, (0,), ()).tolist() == [-math.inf, 1.0]


def test_a_bad_word_may_span_prompt_and_output() -> None:
    sampling = Sampling(1.0, bad_words=((1, 2, 3), (0, 0, 0, 0, 4)))
    for prompt, output, banned in (((1,), (2,), [3]), ((1, 2), (), [3]), ((0, 2), (1,), []), ((2,), (), [])):
        assert np.flatnonzero(np.isinf(scores(np.zeros(5), sampling, NEVER, prompt, output))).tolist() == banned


def test_min_tokens_counts_the_output_alone() -> None:
    sampling = Sampling(1.0, min_tokens=2)
    for output, banned in (((), [1, 3]), ((0,), [1, 3]), ((0, 0), []), ((0, 0, 0), [])):
        row_scores = scores(np.zeros(4), sampling, Stops(eos=(3,), stop_tokens=(1,)), (0, 0, 0), output)
        assert np.flatnonzero(np.isinf(row_scores)).tolist() == banned


def law_of(p: Any, **settings: Any) -> list[float]:
    with np.errstate(divide="ignore"):
        actual_law = law(np.log(np.array(p)), Sampling(**{"temperature": 1.0, **settings}), NEVER, (0,), ())
    return [round(float(value), 12) for value in actual_law]


def test_ties_and_edges() -> None:
    """Equals of the k-th stay; equals at the nucleus' edge go by id; masses at an edge are exact here."""
    assert law_of([0.25, 0.5, 0.125, 0.125], top_k=3) == [0.25, 0.5, 0.125, 0.125]
    assert law_of([0.25, 0.5, 0.25, 0.0], top_k=2) == [0.25, 0.5, 0.25, 0.0]
    assert law_of([0.125, 0.5, 0.25, 0.125], top_p=0.5) == [0.0, 1.0, 0.0, 0.0]
    assert law_of([0.25, 0.5, 0.25, 0.0], top_p=0.6) == [round(1 / 3, 12), round(2 / 3, 12), 0.0, 0.0]
    assert law_of([0.25, 0.5, 0.25, 0.0], top_p=0.8) == [0.25, 0.5, 0.25, 0.0]
    assert law_of([0.25, 0.5, 0.25, 0.0], top_p=1e-9) == [0.0, 1.0, 0.0, 0.0]
    assert law_of([0.125, 0.5, 0.25, 0.125], min_p=0.5) == [0.0, round(2 / 3, 12), round(1 / 3, 12), 0.0]
    assert law_of([0.25, 0.25, 0.5, 0.0], min_p=1.0) == [0.0, 0.0, 1.0, 0.0]
    # min-p looks at what top-p has left, and at the temperature's law.
    assert law_of([0.5, 0.25, 0.25], temperature=0.5, min_p=0.3) == [1.0, 0.0, 0.0]


def test_a_row_of_little_is_kept_whole() -> None:
    """Without top-p nothing of a tail is dropped, however the masses round."""
    logits = np.linspace(0, -700, 200)
    assert (law(logits, Sampling(1.0), NEVER, (0,), ()) > 0).all()
    assert law(logits, Sampling(1e-308), NEVER, (0,), ())[0] == 1.0
    assert law(logits + 1e5, Sampling(1e-308), NEVER, (0,), ())[:2].tolist() == [1.0, 0.0]


def test_what_has_no_law() -> None:
    with pytest.raises(ValueError, match="temperature 0 has no law"):
        law(np.zeros(2), Sampling(), NEVER, (0,), ())
    with pytest.raises(Malformed, match="leaves no token"):
        law(np.zeros(2), Sampling(1.0, bad_words=((0,), (1,))), NEVER, (0,), ())


def test_logprobs_are_of_raw_logits() -> None:
    row = np.random.default_rng(3).normal(0, 5, 50) + 1000.0
    expected = torch.log_softmax(torch.tensor(row), -1)
    assert [logprob(row, token) for token in range(50)] == pytest.approx(expected.tolist(), rel=1e-12)
    assert logprob(np.array([0.0, -math.inf]), 1) == -math.inf


def margin_of(p: Any, **settings: Any) -> float:
    with np.errstate(divide="ignore"):
        return margin(np.log(np.array(p)), Sampling(**{"temperature": 1.0, **settings}), NEVER, (0,), ())


def test_margins() -> None:
    p = [0.4, 0.3, 0.2, 0.1]
    assert margin_of(p) == math.inf
    assert margin_of(p, top_k=2) == pytest.approx(math.log(1.5))
    assert margin_of(p, top_k=2, temperature=0.5) == pytest.approx(2 * math.log(1.5))
    assert margin_of([0.4, 0.3, 0.3], top_k=2) == 0.0
    assert margin_of([0.5, 0.5, 0.0], top_k=2) == math.inf
    assert margin_of(p, top_p=0.69) == pytest.approx(0.01 / 0.69)
    assert margin_of([0.34, 0.33, 0.33], top_p=0.5) == pytest.approx(0.0, abs=1e-12)
    assert margin_of(p, min_p=0.51) == pytest.approx(1 - 0.5 / 0.51)
    assert margin_of(p, min_p=1.0) == pytest.approx(0.25)
    assert margin_of(p, top_k=2, min_p=0.26) == pytest.approx(math.log(1.5))
    # What is impossible is near no threshold.
    assert margin_of([1.0, 0.0], min_p=0.5) == math.inf
    assert margin_of([0.5, 0.5, 0.0], top_p=0.25) == pytest.approx(0.0)
    assert margin_of([0.8, 0.2, 0.0], top_p=0.5) == pytest.approx(0.6)
    # All are kept: no pair stands at the edge.
    assert margin_of(p, top_p=0.95) == pytest.approx(0.05 / 0.95)
    # Presence is the output's alone, repetition prompt's and output's.
    penal = Sampling(1.0, repetition_penalty=2.0, presence_penalty=1.0, top_k=1)
    assert margin(np.array([8.0, 8.0, 1.0]), penal, NEVER, (0,), (1,)) == 1.0
    assert margin(np.array([8.0, 8.0, 1.0]), penal, NEVER, (0,), (1, 0)) == 0.0
    assert margin(np.array([8.0, 8.5, 1.0]), penal, NEVER, (0,), (1,)) == 0.75


def test_a_margin_is_how_far_the_kept_tokens_stand() -> None:
    """Moved by less than the margin, a row keeps the same tokens; many rows come near enough to be moved over it."""
    sampling = Sampling(0.7, top_k=6, top_p=0.85, min_p=0.1)
    rng = np.random.default_rng(11)
    crossed = 0
    for _ in range(400):
        row = rng.normal(0, 1.0, VOCAB)
        noise = rng.uniform(-1, 1, VOCAB)
        kept_mask = law(row, sampling, NEVER, (0,), ()) > 0
        near = margin(row, sampling, NEVER, (0,), ())
        # A change of every logit by d changes gaps by 2d/T, masses and ratios by no more than a factor exp(2d/T).
        moved = row + noise * near * 0.7 / 4.1
        assert ((law(moved, sampling, NEVER, (0,), ()) > 0) == kept_mask).all()
        moved = row + noise * near * 8
        crossed += not ((law(moved, sampling, NEVER, (0,), ()) > 0) == kept_mask).all()
    assert crossed > 100


# ------------------------------------------------------------------------------------------------ custom


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Makes a module of processors from source; its name comes back."""
    monkeypatch.setattr(user_processors, "_ADMITTED", {})

    def make(source: str) -> str:
        processors = types.ModuleType("processors_of_a_test")
        monkeypatch.setitem(sys.modules, processors.__name__, processors)
        exec("import numpy as np\n" + source, processors.__dict__)
        return processors.__name__

    return make


def test_an_admitted_processor_acts_after_all_else(module: Callable[[str], str]) -> None:
    name = module("def last(tokens, logits):\n    return np.where(np.arange(len(logits)) == tokens[-1], 9.0, logits)\n")
    sampling = Sampling(1.0, bad_words=((1,),), processors=(f"{name}:last",))
    with pytest.raises(Malformed, match=rf"^sampling.processors: {name}:last: not admitted; name it with --p"):
        scores(np.zeros(3), sampling, NEVER, (0,), (1,))
    user_processors.admit(f"{name}:last")
    assert scores(np.zeros(3), sampling, NEVER, (0,), (1,)).tolist() == [0.0, 9.0, 0.0]
    assert scores(np.zeros(3), sampling, NEVER, (2,), ()).tolist() == [0.0, -math.inf, 9.0]
    assert user_processors.admitted_processor(f"{name}:last")((1,), np.zeros(2)).tolist() == [0.0, 9.0]
    # One that feeds on the answer of another.
    twice = replace(sampling, processors=(f"{name}:last", f"{name}:last"))
    assert scores(np.zeros(3), twice, NEVER, (0,), ()).tolist() == [9.0, -math.inf, 0.0]


REFUSED = {
    "changing": ("def f(tokens, logits):\n    logits[0] = 1.0\n    return logits\n", "changes the logits it is given"),
    "short": ("def f(tokens, logits):\n    return logits[1:]\n", r"returns shape \(63,\) for logits of shape \(64,\)"),
    "nothing": ("def f(tokens, logits):\n    pass\n", r"returns shape \(\)"),
    "nan": ("def f(tokens, logits):\n    return logits * np.nan\n", "returns NaN or infinity"),
    "infinite": ("def f(tokens, logits):\n    return logits + np.inf\n", "returns NaN or infinity"),
    "banning": ("def f(tokens, logits):\n    return logits - np.inf\n", "leaves no token"),
    "random": ("def f(tokens, logits):\n    return logits + np.random.default_rng().random()\n", "answers differently"),
    "counting": ("n = [0]\ndef f(tokens, logits):\n    n[0] += 1\n    return logits + n[0]\n", "answers differently"),
    "raising": ("def f(tokens, logits):\n    return logits[9999]\n", "raised IndexError: .*, on 64 logits"),
    "text": ("def f(tokens, logits):\n    return 'many\\nlines'\n", "raised ValueError: .*, on 64 logits"),
    "lambda": ("f = lambda tokens, logits: logits\n", "is a lambda or closure.*cannot be replayed"),
    "closure": ("def g(a):\n  def f(t, l):\n    return l * a\n  return f\nf = g(2)\n", "is a lambda or closure"),
    "decorated": (
        "import functools\ndef d(g):\n  @functools.wraps(g)\n  def f(t, l):\n    return g(t, l)\n  return f\n"
        "@d\ndef f(t, l):\n  return l\n",
        "is a lambda or closure",
    ),
    "method": ("class A:\n  def f(self, t, l):\n    return l\nf = A().f\n", "is a bound method.*cannot be replayed"),
    "function-of-a-class": ("class A:\n  def f(t, l):\n    return l\nf = A.f\n", "is no function of a module's own"),
    "instance": ("class A:\n  def __call__(self, t, l):\n    return l\nf = A()\n", "is of type A, not a plain"),
    "builtin": ("f = np.add\n", "is of type ufunc, not a plain function"),
    "absent": ("g = 1\n", "module processors_of_a_test has no f"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_processor_that_cannot_be_replayed_is_refused_by_name(case: str, module: Callable[[str], str]) -> None:
    source, why = REFUSED[case]
    name = f"{module(source)}:f"
    with pytest.raises(Malformed, match=f"^sampling.processors: {name}: .*{why}") as raised:
        user_processors.admit(name)
    assert "\n" not in str(raised.value)
    with pytest.raises(Malformed, match="not admitted"):
        user_processors.admitted_processor(name)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("nowhere.at.all:f", r"cannot import nowhere.at.all \(ModuleNotFoundError"),
        ("math.floor", "is not of the form pkg.module:function"),
        (":f", "is not of the form"),
        ("math:", "is not of the form"),
        ("math:a.b", "is not of the form"),
        ("math:floor", "not a plain function"),
    ],
)
def test_a_name_that_names_nothing(name: str, why: str) -> None:
    with pytest.raises(Malformed, match=why):
        user_processors.admit(name)


def test_a_module_that_fails_to_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "falls_over.py").write_text("raise RuntimeError('two\\nlines')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(Malformed, match=r"cannot import falls_over \(RuntimeError: two lines\)"):
        user_processors.admit("falls_over:f")


def test_a_processor_is_tried_on_a_vocabulary_of_the_callers(module: Callable[[str], str]) -> None:
    name = (
        module("def f(tokens, logits):\n    changed = logits.copy()\n    changed[500] = 0.0\n    return changed\n")
        + ":f"
    )
    with pytest.raises(Malformed, match=r"raised IndexError: .*, on 64 logits$"):
        user_processors.admit(name)
    user_processors.admit(name, vocab=501)
    with pytest.raises(Malformed, match=r"raised IndexError: .*, on 3 logits$"):
        user_processors.apply(name, (0,), np.zeros(3))


def test_half_precision_logits_are_widened_before_penalties() -> None:
    """In bfloat16 a penalty would round two different logits to one, and greedy decoding would take the other token."""
    logits = torch.tensor([[[0.5, 0.50390625, -1.0]]], dtype=torch.bfloat16)
    past = engine.History(
        seen_tokens=torch.tensor([[[True, True, False]]]),
        counts=torch.tensor([[[1, 1, 0]]]),
        tail=torch.full((1, 1, 1), -1),
        emitted=torch.zeros(1, 1, dtype=torch.long),
        sequence=lambda request, node: (0, 1),
    )
    sampling = Sampling(presence_penalty=-2.0)
    wide = engine.scores(logits, sampling, NEVER, past)
    assert wide.dtype == torch.float32
    np.testing.assert_array_equal(wide[0, 0].numpy(), [2.5, 2.50390625, -1.0])
    assert (int(wide.argmax()), int(wide.bfloat16().argmax())) == (1, 0)
    assert engine.scores(logits.double(), sampling, NEVER, past).dtype == torch.float64
