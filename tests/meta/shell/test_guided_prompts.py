"""`diff --model --grammar FILE`: every prompt is guided and judged, and a grammar that cannot be used is one line."""

import json
from pathlib import Path

import click
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from specverify.checkpoints.cases import prepare
from specverify.checkpoints.guided import check_guides
from specverify.commands.sampling_options import grammar_of
from specverify.plan import Plan
from specverify.properties.verdict.finding import Verdict
from specverify.properties.verdict.judge import judge
from specverify.reference.abilities import Abilities
from specverify.reference.architecture import Architecture
from specverify.reference.draft import Scripted
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.sampling import Sampling
from specverify.reference.spelling import byte_letters
from specverify.reference.weights import shapes
from specverify.setup import given_grammar
from specverify.setup.errors import MissingInput, UnusableInput
from specverify.setup.selection import invariants_matching
from specverify.setup.subjects import open_planted, subject_of

SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["list", "lists", "text"]}, "pure": {"type": "boolean"}},
    "required": ["kind", "pure"],
    "additionalProperties": False,
}
END = 256
JUDGED = ("lossless.grammar-per-node", "serving.matcher-in-step", "lossless.greedy-match", "lossless.stops")


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    """A tiny model over bytes and an end token, with its tokenizer, as a checkpoint directory."""
    signs = byte_letters()
    arch = Architecture("llama", END + 1, 8, 12, 2, 1, 4, (0, 0), max_positions=256)
    rng = np.random.default_rng(5)
    state = {name: torch.tensor(rng.normal(size=shape), dtype=torch.float32) for name, shape in shapes(arch).items()}
    config = {
        "model_type": "llama",
        "vocab_size": END + 1,
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "eos_token_id": END,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    inner = Tokenizer(models.BPE(vocab={**signs, "</s>": END}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>").save_pretrained(tmp_path)
    return str(tmp_path)


def verdicts_of(
    checkpoint: str,
    file: Path,
    sampling: Sampling,
    fault: str | None = None,
    after: tuple[str, ...] = (),
    budget: int | None = None,
) -> list[Verdict]:
    """One prompt of drawn tokens under the grammar of `file`, in every way that a prompt is drafted."""
    grammar = grammar_of(checkpoint, str(file), None, after, budget)
    plan = Plan(
        model=checkpoint, cases=1, new_tokens=40, sampling=sampling, dtypes=("float32",), seed=4, grammar=grammar
    )
    subject, oracle = subject_of(open_planted("cpu-eager", fault)), Oracle()
    agenda = prepare(plan, subject, invariants_matching(JUDGED))
    return [judge(case, invariants, oracle, subject) for case, invariants in agenda.cases(oracle)]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.5)], ids=["greedy", "sampled"])
def test_every_output_is_of_the_language(tmp_path: Path, checkpoint: str, sampling: Sampling) -> None:
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA) + "\n")
    verdicts = verdicts_of(checkpoint, tmp_path / "schema.json", sampling)
    assert all(verdict.agreed for verdict in verdicts)
    checked_names = {name for verdict in verdicts for name, outcome in verdict.outcomes.items() if outcome == "checked"}
    assert checked_names == {name for name in JUDGED if sampling.greedy or name != "lossless.greedy-match"}
    for verdict in verdicts:
        assert verdict.case.sampling.grammar is not None
        assert len(verdict.case.sampling.grammar.words) == END + 1
    scripted = next(verdict for verdict in verdicts if isinstance(verdict.case.draft, Scripted))
    assert max(scripted.accept_lengths) > 1, "the scripted trees follow the guided text"


def test_a_grammar_holds_behind_a_text_that_a_budget_forces(tmp_path: Path, checkpoint: str) -> None:
    """No drawn model writes the marker by itself; its five tokens are forced from the eighth on."""
    (tmp_path / "a.regex").write_text("(ab|ba)(ab|cd){2,9}")
    verdicts = verdicts_of(checkpoint, tmp_path / "a.regex", Sampling(), None, ("</th>", "<end>"), 8)
    assert all(verdict.agreed for verdict in verdicts)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    texts = []
    for verdict in verdicts:
        grammar = verdict.case.sampling.grammar
        assert grammar is not None
        assert [tokenizer.decode(list(marker)) for marker in grammar.markers] == ["</th>", "<end>"]
        texts.append(tokenizer.decode(list(Oracle()(verdict.case).output[8:])))
    # Some cases end after a few steps.
    assert all("</th>ab".startswith(text[:7]) or "</th>ba".startswith(text[:7]) for text in texts)
    assert max(map(len, texts)) > 10
    faulty_verdicts = verdicts_of(
        checkpoint, tmp_path / "a.regex", Sampling(), "grammar-asleep-inside-a-block", ("</th>",), 8
    )
    assert any(verdict.outcomes.get("lossless.grammar-per-node") == "failed" for verdict in faulty_verdicts)


def test_a_fault_of_the_mask_is_found(tmp_path: Path, checkpoint: str) -> None:
    (tmp_path / "a.regex").write_text("(ab|ba)(ab|cd){2,9}")
    verdicts = verdicts_of(checkpoint, tmp_path / "a.regex", Sampling(), "grammar-mask-of-parent")
    assert any(verdict.outcomes.get("lossless.grammar-per-node") == "failed" for verdict in verdicts)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.txt", "a+", r"a\.txt: the suffix says how a grammar is written: \.json"),
        ("gone.regex", None, r"gone\.regex: No such file or directory$"),
        ("open.regex", "(a", r"open\.regex: text: the group is not closed"),
        ("both.json", '{"type": "string"}', r"both\.json: .*xgrammar takes .*, llguidance does not; add a pattern"),
        ("wide.regex", "\udcff", r"wide\.regex: not UTF-8 text$"),
        ("long.regex", "a" * 4 * 65537, r"long\.regex: longer than 65536 characters$"),
    ],
)
def test_a_file_that_cannot_be_used(tmp_path: Path, name: str, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / name).write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(UnusableInput, match=message):
        grammar_of("m", str(tmp_path / name), None)


def test_options_that_make_no_sense(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert grammar_of("m", None, None) is None
    with pytest.raises(click.UsageError, match=r"^--grammar needs --model"):
        grammar_of(None, "a.regex", None)
    with pytest.raises(click.UsageError, match=r"^--grammar-library needs --grammar$"):
        grammar_of("m", None, "xgrammar")
    (tmp_path / "a.regex").write_text("a+")
    monkeypatch.setattr(given_grammar, "find_spec", lambda name: None)
    with pytest.raises(MissingInput, match=r"^--grammar-library xgrammar is not installed: pip install"):
        grammar_of("m", str(tmp_path / "a.regex"), "xgrammar")
    for words, complaint in (
        ({"after": ("</think>",)}, "--grammar-after needs --grammar"),
        ({"budget": 3}, "--thinking-budget needs --grammar"),
    ):
        with pytest.raises(click.UsageError, match=f"^{complaint}$"):
            grammar_of("m", None, None, **words)
    with pytest.raises(click.UsageError, match=r"^--thinking-budget needs --grammar-after, the text that it forces$"):
        grammar_of("m", str(tmp_path / "a.regex"), None, budget=3)
    check_guides(None)
    check_guides(Abilities(dtypes=("float32",), processes=("grammar",)))
    with pytest.raises(UnusableInput, match="declares no grammars"):
        check_guides(Abilities(dtypes=("float32",)))
    with pytest.raises(UnusableInput, match="declares no grammars that begin behind a text"):
        check_guides(Abilities(dtypes=("float32",), processes=("grammar",)), ("</think>",))
