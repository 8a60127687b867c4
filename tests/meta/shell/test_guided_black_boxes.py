"""Black boxes that take grammars: what is drawn for them, the tokenizer that they get, and masks that are wrong."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from specverify.adapt import blackbox
from specverify.backends.adapt.models import bytes_tokenizer, checkpoint_of
from specverify.backends.adapt.pool import shape_of
from specverify.checkpoints.cases import prepare
from specverify.commands.sampling_options import grammar_of
from specverify.plan import Plan
from specverify.properties.strategies import cases
from specverify.properties.strategies.grammars import LANGUAGES
from specverify.properties.strategies.models import GALLERY, wide
from specverify.properties.strategies.settings import explore
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.grammar import Grammar
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.session import Action, Mate, Session
from specverify.reference.spelling import Spelling, spelling_of, usual_spelling
from specverify.setup.errors import UnusableInput
from specverify.setup.selection import invariants_matching
from specverify.setup.subjects import subject_of
from tests.judging import verdict_of
from tests.meta.shell.test_guided_prompts import checkpoint
from tests.strangers.guided_boxes import guided

__all__ = ["checkpoint"]

SIZE = 31
SPELLING = usual_spelling(SIZE)
MODEL = Seeded(replace(GALLERY[6], vocab_size=SIZE), 0)
GRAMMAR = Grammar("regex", "(0|1[01]*)([.][01]{1,2})?", SPELLING.words)
CASE = Case(MODEL, (3, 1, 4), sampling=Sampling(grammar=GRAMMAR), stops=Stops(8, (SPELLING.end,)))
WARM = replace(CASE, sampling=replace(CASE.sampling, temperature=1.5, seed=4))


def unguided(prompt_ids: list[int], max_new_tokens: int, model: Any) -> list[int]:
    return prompt_ids[:max_new_tokens]


def test_whoever_takes_a_grammar_gets_grammars_over_the_usual_words_and_nobody_else() -> None:
    drawn: list[Case] = []

    def take(case: Case) -> None:
        drawn.append(case)

    for factory, wants in ((guided(generate_many=answers), True), (blackbox(unguided), False)):
        within = factory().declaration
        drawn.clear()
        explore(3, 150, cases(within.dtypes, within=within), take)
        requests = [
            case.alone(number)
            for case in drawn
            for number in range(1 if case.session is None else 1 + len(case.session.mates))
        ]
        guided_requests = [request for request in requests if request.sampling.grammar is not None]
        assert bool(guided_requests) == wants
        for request in guided_requests:
            spelling = usual_spelling(request.model.vocab_size)
            assert spelling_of(request) == spelling
            assert (request.stops.eos, request.stops.stop_tokens) == ((spelling.end,), ())


def answers(requests: list[Any], model: Any) -> list[list[int]]:
    raise NotImplementedError


@pytest.mark.parametrize("vocab", [3, 17, 31, 64, 127, 2049])
def test_words_of_a_tokenizer_are_distinct_and_read_back_as_bytes(vocab: int, tmp_path: Path) -> None:
    spelling = usual_spelling(vocab)
    assert len({*spelling.words}) == len(spelling.words) == vocab
    assert spelling.words.index("") == spelling.end
    bytes_tokenizer(spelling).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.eos_token_id == spelling.end
    for token, word in enumerate(spelling.words):
        text = bytes.fromhex(word).decode(errors="replace")
        if token != spelling.end and "�" not in text:
            assert tokenizer.decode([token]) == text
            assert tokenizer.encode(text, add_special_tokens=False) == [token]


def test_libraries_of_grammars_see_the_bytes_of_words_that_are_no_text() -> None:
    xgrammar = pytest.importorskip("xgrammar")
    spelling = usual_spelling(127)
    assert "ff" in spelling.words
    info = xgrammar.TokenizerInfo.from_huggingface(bytes_tokenizer(spelling), vocab_size=127)
    words = [word.hex() for word in info.decoded_vocab]
    assert words[: spelling.end] == list(spelling.words[: spelling.end])
    assert words[spelling.end + 1 :] == list(spelling.words[spelling.end + 1 :])
    assert info.stop_token_ids == [spelling.end]


def test_every_language_is_spelt_by_some_vocabulary_that_is_drawn() -> None:
    sizes = {architecture.vocab_size for architecture in wide(guided()().declaration)}
    words = {word for size in sizes for word in usual_spelling(size).words}
    for _, _, spelling in LANGUAGES:
        assert {(word.encode() if isinstance(word, str) else word).hex() for word in spelling} <= words


def test_the_words_belong_to_the_shape_of_an_engine() -> None:
    turned = Spelling(SPELLING.words[::-1], SIZE - 1 - SPELLING.end)
    folders = [
        checkpoint_of(replace(MODEL, seed=seed), "float32", spelling)
        for seed, spelling in ((0, SPELLING), (1, SPELLING), (0, turned))
    ]
    first, reseeded, reversed_words = (shape_of(str(folder)) for folder in folders)
    assert first == reseeded != reversed_words


OUTSIDE = {
    "grammar with two words alike": replace(
        CASE, sampling=replace(CASE.sampling, grammar=replace(GRAMMAR, words=(*GRAMMAR.words[:-1], GRAMMAR.words[0])))
    ),
    "grammar without an end token": replace(CASE, stops=Stops(8)),
    "grammar beside stop tokens": replace(CASE, stops=replace(CASE.stops, stop_tokens=(2,))),
    "grammars over several tokenizers": replace(
        CASE,
        session=Session(
            (
                Mate(
                    (3, 1),
                    sampling=Sampling(grammar=replace(GRAMMAR, words=GRAMMAR.words[::-1])),
                    stops=Stops(8, (SIZE - 1 - SPELLING.end,)),
                ),
            ),
            (Action("add", (0,)), Action("add", (1,))),
            continuous=True,
        ),
    ),
}


@pytest.mark.parametrize("line", OUTSIDE)
def test_a_grammar_that_no_tokenizer_can_carry_is_outside(line: str) -> None:
    declaration = guided(generate_many=answers)().declaration
    assert declaration.outside(CASE) is None
    assert (declaration.outside(OUTSIDE[line]) or "").endswith(f" declares no {line}")


@pytest.mark.parametrize("case", [CASE, WARM], ids=["greedy", "sampled"])
def test_a_mask_that_is_not_read_on_and_a_grammar_that_is_ignored_are_found(case: Case) -> None:
    for fault in ("", "unread", "refused"):
        verdict = verdict_of(guided(fault)(), case)
        assert verdict.outcomes["lossless.grammar-per-node"] == ("failed" if fault else "checked"), fault
        assert verdict.agreed == (not fault), verdict.first


def test_log_probabilities_behind_the_mask_are_none_of_the_models_own() -> None:
    for declared, outcome in (("masked", "checked"), ("raw", "failed")):
        backend: Any = guided()()
        backend.declaration = replace(backend.declaration, logprobs=declared)
        assert verdict_of(backend, CASE, "lossless.logprobs").outcomes["lossless.logprobs"] == outcome


def plan_under(checkpoint: str, folder: Path) -> Plan:
    file = folder / "digits.regex"
    file.write_text("[0-9]{2,4}")
    plan = Plan(
        "box", model=checkpoint, cases=1, new_tokens=6, sampling=Sampling(),
        grammar=grammar_of(checkpoint, str(file), None, (), None),
    )  # fmt: skip
    return plan


def test_a_given_grammar_holds_the_text_of_a_box_that_takes_one(checkpoint: str, tmp_path: Path) -> None:
    names = ("lossless.grammar-per-node", "lossless.greedy-match")
    for fault, outcome in (("", "checked"), ("refused", "failed")):
        subject = subject_of(guided(fault)())
        prepared = prepare(plan_under(checkpoint, tmp_path), subject, invariants_matching(names))
        assert prepared.first.sampling.grammar is not None
        assert verdict_of(guided(fault)(), prepared.first, *names).outcomes[names[0]] == outcome


def test_a_checkpoint_that_names_no_end_is_refused_in_one_line(checkpoint: str, tmp_path: Path) -> None:
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "eos_token_id": None}))
    with pytest.raises(UnusableInput, match=r"^--grammar: the checkpoint names no end token, with which the backend"):
        prepare(plan_under(checkpoint, tmp_path), subject_of(guided()()), invariants_matching(("lossless.stops",)))


def test_a_box_without_grammars_is_refused_in_one_line(checkpoint: str, tmp_path: Path) -> None:
    subject = subject_of(blackbox(unguided)())
    with pytest.raises(UnusableInput, match=r"^--grammar: the backend declares no grammars"):
        prepare(plan_under(checkpoint, tmp_path), subject, invariants_matching(("lossless.greedy-match",)))
