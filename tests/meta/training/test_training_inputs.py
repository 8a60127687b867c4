"""Draft vocabularies, texts and folders of a training: what they hold, and one line for each bad input."""

import json
from collections import Counter
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from specverify.cli import main
from specverify.reference.draft.hidden import HiddenStates
from specverify.setup.errors import UnusableInput
from specverify.training import vocabulary as vocabularies
from specverify.training.data import JUDGED_TOKENS, prepare_data
from specverify.training.plan import KINDS
from specverify.training.published import HeadFolder, RunState
from specverify.training.states import Order, StateCache
from specverify.training.target import ContinuedText, Stopped, states_of
from specverify.training.texts import Texts, python_functions, read_texts
from specverify.training.watch import plot
from tests.meta.training import targets

COUNTS = Counter({7: 5, 3: 5, 9: 1, 0: 2})


def test_a_vocabulary_holds_the_most_frequent_tokens(tmp_path: Path) -> None:
    vocabulary, file = vocabularies.load_or_build(COUNTS, 3, 12, tmp_path)
    assert vocabulary.named.tolist() == [0, 3, 7]
    assert vocabulary.offsets.tolist() == [0, 2, 5]
    assert np.flatnonzero(vocabulary.mask).tolist() == [0, 3, 7]
    assert vocabulary.covered == pytest.approx(12 / 13)
    assert vocabularies.build(COUNTS, 6, 12).named.tolist() == [0, 1, 2, 3, 7, 9]
    written = file.stat().st_mtime_ns
    again, same_file = vocabularies.load_or_build(COUNTS, 3, 12, tmp_path)
    assert (same_file, again.covered, file.stat().st_mtime_ns) == (file, vocabulary.covered, written)
    other_file = vocabularies.load_or_build(COUNTS, 2, 12, tmp_path)[1]
    assert other_file != file
    assert sorted(tmp_path.iterdir()) == sorted([file, other_file])


@pytest.mark.parametrize(
    ("d2t", "t2d", "why"),
    [
        ([0, 3, 7], [0, 3, 7], "d2t holds target ids, and offsets"),
        ([0, 2, 4], [0, 3, 7], "d2t and t2d name different ids"),
        ([0, 2], [0, 3, 7], "for 3 named ids"),
    ],
)
def test_offsets_and_ids_are_told_apart(d2t: list[int], t2d: list[int], why: str, tmp_path: Path) -> None:
    file = tmp_path / "v.safetensors"
    save_file({"d2t": np.array(d2t), "t2d": np.isin(np.arange(12), t2d)}, file)
    with pytest.raises(UnusableInput, match=why):
        vocabularies.read(file, 12)


def test_a_vocabulary_of_another_target_is_refused(tmp_path: Path) -> None:
    _, file = vocabularies.load_or_build(COUNTS, 3, 12, tmp_path)
    with pytest.raises(UnusableInput, match="the target has 13 ids"):
        vocabularies.read(file, 13)
    (tmp_path / "no").write_text("no tensors")
    with pytest.raises(UnusableInput, match="no draft vocabulary"):
        vocabularies.read(tmp_path / "no", 12)


def test_held_out_prompts_are_not_learned(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps(f"prompt {number}") + "\n" for number in range(200)))
    texts = read_texts((str(file),))
    assert (len(texts.watched), len(texts.judged)) == (8, 20)
    assert not set(texts.learned) & {*texts.watched, *texts.judged}
    assert len(texts.learned) == 172


def test_python_functions_come_with_their_docstrings(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        'class A:\n    def one(self):\n        """Return one thing, and say so in a docstring that is long enough to'
        ' be taken."""\n        return 1\n\n\ndef bare(x):\n    return x\n'
    )
    (tmp_path / "b.py").write_text("this is no Python")
    (source,) = python_functions(tmp_path)
    assert source.startswith('def one(self):\n    """Return one thing')
    assert source.endswith('taken."""\n')


def test_the_states_of_a_small_target_are_three() -> None:
    assert states_of("eagle3", 30) == HiddenStates((1, 14, 26), shift=1)
    assert states_of("eagle3", 2) == HiddenStates((-1, 0, 1), shift=1)
    assert states_of("eagle3", 3, 2) == HiddenStates((-1, 0, 1), shift=1)
    assert states_of("medusa", 1) == HiddenStates(place="normed")
    with pytest.raises(UnusableInput, match="an EAGLE-3 head of 2 layers reads three layers"):
        states_of("eagle3", 2, 2)
    with pytest.raises(UnusableInput, match="reads three layers"):
        states_of("eagle3", 1)


def continued_text(length: int) -> ContinuedText:
    return ContinuedText(torch.arange(length), 2, torch.ones(length, 6), torch.ones(length, 2))


def test_a_cache_goes_on_and_refuses_another_digest(tmp_path: Path) -> None:
    reads = HiddenStates((0, 1, 2), shift=1)
    cache = StateCache(tmp_path / "c", "a" * 64, reads)
    cache.write_shard(0, [continued_text(4), continued_text(7)])
    again = StateCache(tmp_path / "c", "a" * 64, reads)
    assert again.shards == 1
    assert [len(text.tokens) for text in again.load(0)] == [4, 7]
    with pytest.raises(UnusableInput, match="states of another target or text"):
        StateCache(tmp_path / "c", "b" * 64, reads)
    with pytest.raises(UnusableInput, match="holds other files"):
        StateCache(Path(__file__).parent, "a" * 64, reads)


class Echo:
    """A target that adds nothing to a prompt."""

    device = torch.device("cpu")

    def encode(self, texts: tuple[str, ...], most: int) -> list[list[int]]:
        return [[int(part) for part in text.split()] for text in texts]

    def narrow(self, dtype: torch.dtype) -> None: ...

    def continue_prompts(
        self, prompts: list[list[int]], added: int, reads: Any, stopped: Any, tell_tokens: Any
    ) -> list[ContinuedText]:
        if stopped():
            raise Stopped
        tell_tokens(1)
        tensors = [torch.tensor(prompt) for prompt in prompts]
        return [ContinuedText(tensor, 2, torch.ones(len(tensor), 6), torch.ones(len(tensor), 2)) for tensor in tensors]


def test_data_that_was_cut_off_goes_on_where_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the shards were cut to, every prompt is continued once."""
    learned = tuple(f"{number} {number + 1}" for number in range(90))
    texts, reads = Texts(learned, ("1 2",), ("3 4",), ()), HiddenStates((0, 1, 2), shift=1)
    plan, target = targets.plan(tmp_path, "eagle3", tmp_path / "out"), cast("Any", Echo())
    answers = iter([True, False])
    cache = StateCache(tmp_path / "c", "a" * 64, reads)
    notes = list[str]()
    prepare_data(
        cache,
        plan,
        target,
        texts,
        goes_on=lambda: next(answers),
        stopped=lambda: False,
        say=print,
        advance=notes.append,
    )
    assert notes == [
        f"held-out prompts: 1 of {JUDGED_TOKENS} tokens each",
        *(f"shard {shard}: 1 of {plan.generated} tokens each" for shard in range(2)),
    ]
    assert (cache.shards, cache.texts) == (2, 80)
    with pytest.raises(Stopped):
        prepare_data(cache, plan, target, texts, goes_on=lambda: True, stopped=lambda: True, say=print)
    prepare_data(cache, plan, target, texts, goes_on=lambda: True, stopped=lambda: False, say=print)
    token_lists = [text.tokens.tolist() for shard in range(cache.shards) for text in cache.load(shard)]
    assert sorted(token_lists) == [[number, number + 1] for number in range(90)]
    cache.file(0).write_bytes(b"cut off")
    with pytest.raises(UnusableInput, match="no shard of states"):
        cache.load(0)


def test_the_order_of_batches_can_be_entered_anywhere_and_shared(tmp_path: Path) -> None:
    cache = StateCache(tmp_path / "c", "a" * 64, HiddenStates((0, 1, 2), shift=1))
    for shard in range(2):
        cache.write_shard(shard, [continued_text(3 + number + 10 * shard) for number in range(5)])
    order = Order(cache, 2, 2, True, 0)

    def lengths(batch_order: Order, skip: int, count: int) -> list[list[int]]:
        batches = batch_order.batches(skip)
        return [next(batches).lengths.tolist() for _ in range(count)]

    all_lengths = lengths(order, 0, 12)
    assert sorted(length for batch in all_lengths[:6] for length in batch) == [3, 4, 5, 6, 7, 13, 14, 15, 16, 17]
    assert lengths(order, 7, 5) == all_lengths[7:]
    shares = [lengths(Order(cache, 2, 5, True, 0, rank, 2), 0, 2) for rank in range(2)]
    assert sorted(length for share in shares for batch in share for length in batch) == [
        3,
        4,
        5,
        6,
        7,
        13,
        14,
        15,
        16,
        17,
    ]


def test_a_folder_with_another_head_is_refused(tmp_path: Path) -> None:
    folder = HeadFolder(tmp_path / "h", "a" * 64)
    folder.save_state(RunState({"x": torch.ones(2)}, {"step": 3}))
    saved = HeadFolder(tmp_path / "h", "a" * 64).load_state()
    assert saved is not None
    assert saved.facts == {"step": 3}
    with pytest.raises(UnusableInput, match="name another folder"):
        HeadFolder(tmp_path / "h", "b" * 64)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "model.safetensors").write_bytes(b"")
    with pytest.raises(UnusableInput, match="holds another head"):
        HeadFolder(tmp_path / "other", "a" * 64)


def test_the_plot_shows_both_lines() -> None:
    curve = [{"seconds": seconds, "chain": seconds / 10, "tree": seconds / 5} for seconds in range(0, 11, 5)]
    drawn = plot(curve)
    assert drawn.count("T") == 4
    assert "2.00 |" in drawn
    assert max(map(len, drawn.splitlines())) <= 72
    assert plot(curve[:1]) == ""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return targets.make_folder(tmp_path_factory.mktemp("inputs"))


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--minutes", "0"], "--minutes 0: a training needs more than 0 minutes"),
        (["--minutes", "nan"], "--minutes nan: a training needs more than 0 minutes"),
        (["--text", "missing.txt"], "--text missing.txt: No such file or directory"),
        (["--text", "builtin:bible"], "no such built-in text (known: builtin:humaneval, builtin:python)"),
        (["--text", "few.jsonl"], "3 prompts are too few"),
        (["--text", "short.jsonl"], "tokens to learn from are too few"),
        (["--model", "absent"], "no such directory"),
        (["--model", "builtin:absent"], "no such built-in checkpoint"),
        (["--out", "taken"], "--out taken: holds other files; name another folder"),
        (["--cache", "taken"], "--cache taken: holds other files"),
        (["--layers", "2", "medusa"], "--layers 2: Medusa heads have no decoder layers"),
        (["--experts", "2"], "--experts: eagle3 heads are trained without it; eagle1 has it"),
        (["--irope", "eagle3"], "--irope: eagle3 heads are trained without it; eagle1 has it"),
        (["--irope", "eagle1"], "--irope: leaves out every second layer's rotary embedding; ask for --layers 2 or 3"),
        (["--experts-per-token", "2", "eagle1"], "--experts-per-token 2: the head has 0 experts"),
        (["--vocabulary-file", "few.jsonl"], "no draft vocabulary"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], why: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("few.jsonl").write_text('"1 2 3"\n"4 5 6"\n"7 8"\n')
    Path("short.jsonl").write_text("".join(f'"{number} {number + 1}"\n' for number in range(12)))
    Path("taken").mkdir()
    Path("taken/notes").write_text("mine")
    options = {"--model": str(folder / "model"), "--text": str(folder / "prompts.jsonl"), "--minutes": "1"}
    options |= {"--out": "head", "--generate": "1", "--cache": str(folder / "states"), "--most-steps": "1"}
    named_kinds = [argument for argument in arguments if argument in KINDS]
    flags = [argument for argument in arguments if argument == "--irope"]
    pairs = [argument for argument in arguments if argument not in (*named_kinds, *flags)]
    options |= dict(zip(pairs[::2], pairs[1::2], strict=True))
    if "short" in options["--text"]:
        options["--cache"] = "cache"
    (kind,) = named_kinds or ["eagle3"]
    with pytest.raises(SystemExit) as ended:
        main(["train", kind, *flags, *(part for pair in options.items() for part in pair)])
    assert ended.value.code == 2
    error_lines = capsys.readouterr().err.splitlines()
    assert why in error_lines[-1]
    assert sum(line.startswith("specverify: ") for line in error_lines) == 1
    assert Path("taken/notes").read_text() == "mine"


def test_the_command_writes_a_vocabulary(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options = {"--model": str(folder / "model"), "--text": str(folder / "prompts.jsonl")}
    options |= {"--size": "50", "--json": "facts.json"}
    with pytest.raises(SystemExit) as ended:
        main(["vocabulary", *(part for pair in options.items() for part in pair)])
    assert ended.value.code == 0
    facts = json.loads(Path("facts.json").read_text())
    vocabulary = vocabularies.read(Path(facts["file"]), targets.MODEL.vocab_size)
    assert len(vocabulary.named) == facts["size"] == 50
    assert 0.5 < facts["held_out"] <= facts["covered"] <= 1
