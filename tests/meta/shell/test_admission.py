"""The door: whatever an adapter's `run` returns is accepted in our own types, or refused as one finding in one line."""

import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from specverify.backends.admission import Misshapen, admit_trace
from specverify.backends.base import Declaration
from specverify.backends.compositions import open_cpu
from specverify.properties.invariants import ALL
from specverify.properties.strategies.models import GALLERY
from specverify.properties.verdict.judge import judge
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.draft import LanguageModel
from specverify.reference.layout import KvLayout
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.rules import Rule
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.session import Action, Mate, Session
from specverify.reference.trace import Array, Scored, Shared, Stage, Trace
from specverify.reference.tree import RankTree, Shape, Tree
from specverify.setup.subjects import subject_of
from tests.models import LLAMA

DRAFT = LanguageModel(Seeded(GALLERY[1], 3), RankTree((0, 0, 0, 1), (0, 1, 0, 0)))
SAMPLED = Sampling(1.0, rule=Rule("multi-round"), draws="without-replacement")
CASE = Case(LLAMA, (3, 1, 4), DRAFT, sampling=SAMPLED, stops=Stops(6))
"""17 tokens, 2 layers, 2 heads on 1 KV head of width 4, trees of 4 nodes: every field of a trace is there."""

OTHER = replace(CASE, prompt=(9, 2, 6, 5))
SESSION = replace(
    CASE,
    layout=KvLayout(kind="paged", page_size=2),
    session=Session(
        (Mate((5, 5)), Mate((7,))),
        (
            Action("add", (0,)),
            Action("step", (0,)),
            Action("add", (1,)),
            Action("fork", (0, 2)),
            Action("step", (2, 1)),
        ),
    ),
)
LOOKING = tuple(one for one in ALL if one.every == 1)
DECLARED = open_cpu().declaration


@cache
def clean(case: Case = CASE) -> Trace:
    return open_cpu().run(case)


Change = Callable[[Any], Any]


def put(path: str, change: Change, whole: Any = None) -> Any:
    """The clean trace, or `whole`, with one field changed; unchanged where there is no such step."""
    whole = clean() if whole is None else whole
    name, _, rest = path.partition(".")
    if not path:
        return change(whole)
    if isinstance(whole, tuple) and int(name) >= len(whole):
        return whole
    part = whole[int(name)] if isinstance(whole, tuple) else getattr(whole, name)
    part = put(rest, change, part) if rest else change(part)
    if isinstance(whole, tuple):
        return (*whole[: int(name)], part, *whole[int(name) + 1 :])
    return replace(whole, **{name: part})


def logits() -> Array:
    """Of the first step of the clean trace, [4, 17]."""
    scored = clean().steps[0].scored
    assert scored is not None
    return scored.logits


def constant(value: Any) -> Change:
    """The change that puts `value` in the place of whatever was there."""
    return lambda _: value


class Adapter:
    """Our engine, whose answers to every case with the prompt of CASE are changed."""

    def __init__(self, change: Change, declaration: Declaration = DECLARED) -> None:
        self.declaration = declaration
        self._change = change

    def run(self, case: Case) -> Any:
        trace = clean(case)
        return self._change(trace) if case.prompt == CASE.prompt else trace


def place_of(path: str) -> str:
    """The beginning of the line: step 0, scored.logits."""
    at, _, rest = path.removeprefix("steps.").partition(".")
    if not path.startswith("steps."):
        return path or "what run returned"
    return f"step {at}, {rest}" if rest else f"step {at}"


TOKEN = "a token id from 0 to 16"
TOKENS = "a tuple of token ids from 0 to 16"
PER_TOKEN = "float [nodes=4, vocabulary=17]"
CACHE = "float [layers=2, kv_heads=1, length, head_dim=4]"
HEADS = "float [layers=2, heads=2, nodes=4, head_dim=4]"
NODE = "a node from 0 to 3"
ROWS = "int [rows=4]"

# fmt: off
WRONG: tuple[tuple[str, str, Change, str, str], ...] = (
    ("None", "", lambda _: None, ": None", "specverify.reference.trace.Trace"),
    ("a dict", "", lambda one: {"output": one.output}, ": dict", "specverify.reference.trace.Trace"),
    ("a list of tokens", "", lambda one: [*one.output], ": list of 6 (int)", "specverify.reference.trace.Trace"),
    ("a tuple of trace and time", "", lambda one: (one, 0.5),
     ": tuple of 2 (Trace, float)", "specverify.reference.trace.Trace"),
    ("a generator", "", lambda one: (step for step in one.steps), ": generator", "specverify.reference.trace.Trace"),
    ("a namespace", "", lambda one: SimpleNamespace(**vars(one)),
     ": SimpleNamespace", "specverify.reference.trace.Trace"),
    ("a step", "", lambda one: one.steps[0], ": Step", "specverify.reference.trace.Trace"),
    ("output of floats", "output", lambda one: [float(x) for x in one], "[0]: 7.0", TOKEN),
    ("output of bools", "output", lambda _: [True, False], "[0]: True", TOKEN),
    ("output of words", "output", lambda _: ["the", "cat"], "[0]: 'the'", TOKEN),
    ("output as text", "output", lambda _: "the cat", ": 'the cat'", TOKENS),
    ("output None", "output", lambda _: None, ": None", TOKENS),
    ("output one number", "output", lambda _: 5, ": 5", TOKENS),
    ("output with batch axis", "output", lambda one: torch.tensor([one]), ": torch.int64 tensor [1, 6]", TOKENS),
    ("output a float tensor", "output", lambda one: torch.tensor(one).float(), ": torch.float32 tensor [6]", TOKENS),
    ("output beyond the vocabulary", "output", lambda one: (*one[:-1], 17), "[5]: 17", TOKEN),
    ("output of 80 digits", "output", lambda one: (*one[:-1], 10**80), "[5]: an int of 266 bits", TOKEN),
    ("a finish of its own", "finish", lambda _: "max_tokens", ": 'max_tokens'", "eos, stop, grammar, length or None"),
    ("finish a bool", "finish", lambda _: True, ": True", "a str"),
    ("steps a dict", "steps", lambda one: dict(enumerate(one)), ": dict", "a tuple of specverify.reference.trace.Step"),
    ("steps a generator", "steps", lambda one: (step for step in one),
     ": generator", "a tuple of specverify.reference.trace.Step"),
    ("a step that is a dict", "steps.1", vars, ": dict", "specverify.reference.trace.Step"),
    ("counters a dict", "accounting", vars, ": dict", "specverify.reference.trace.Accounting"),
    ("counters of floats", "accounting.proposed", float, ": 12.0", "an int"),
    ("calls a dict", "accounting.target_calls", vars, ": dict", "specverify.reference.trace.TargetCalls"),
    ("calls below zero", "accounting.target_calls.prefill", lambda _: -1, ": -1", "an int of at least 0"),
    ("seconds not finite", "forward_s", lambda _: float("nan"), ": nan", "a finite number"),
    ("seconds before zero", "forward_s", lambda _: -1.0, ": -1.0", "seconds of at least 0"),
    ("fallbacks a list", "fallbacks", lambda _: ["too long"], ": list of 1 (str)", "a dict of counts by reason"),
    ("layers of forwards None", "attention_calls", lambda _: None, ": None", "an int of at least 0"),
    ("a session where none is", "shared", lambda _: Shared((clean(),), ((3, 1, 4),)),
     ": Shared", "None: the case has no session"),
    ("context None", "steps.0.context", lambda _: None, ": None", TOKENS),
    ("context beyond the vocabulary", "steps.0.context", lambda _: (3, 99), "[1]: 99", TOKEN),
    ("context nested", "steps.0.context", lambda one: [one], "[0]: tuple of 2 (int)", TOKEN),
    ("stages swapped", "steps.0", lambda one: replace(one, scored=one.attended, attended=one.scored),
     ", attended: Scored", "specverify.reference.trace.Attended"),
    ("a stage that is its array", "steps.0.scored", lambda one: one.logits,
     ": float32 array [4, 17]", "specverify.reference.trace.Scored"),
    ("tree as lists", "steps.0.drafted.tree", lambda one: [[*one.parent], [*one.token]],
     ": list of 2 (list)", "specverify.reference.tree.Tree"),
    ("tree without tokens", "steps.0.drafted.tree", lambda one: Shape(one.parent),
     ": Shape", "specverify.reference.tree.Tree"),
    ("drafted beyond the vocabulary", "steps.0.drafted.tree", lambda one: Tree(one.parent, (*one.token[:-1], 17)),
     ".token[3]: 17", TOKEN),
    ("draft logits without leaves", "steps.0.drafted.logits", lambda one: one[:2],
     ": float32 array [2, 17]", "float [nodes=4, draft vocabulary=17]"),
    ("draft ids without the root", "steps.0.drafted.draft_ids", lambda one: one[1:],
     ": 3 ids", "one id for each of 4 nodes"),
    ("the proposal of one node", "steps.0.drafted.proposal", lambda one: one[0], ": float32 array [17]", PER_TOKEN),
    ("logits None", "steps.0.scored.logits", lambda _: None, ": None", PER_TOKEN),
    ("logits transposed", "steps.0.scored.logits", lambda one: one.T, ": float32 array [17, 4]", PER_TOKEN),
    ("logits of the last node", "steps.0.scored.logits", lambda one: one[-1], ": float32 array [17]", PER_TOKEN),
    ("logits with batch axis", "steps.0.scored.logits", lambda one: torch.tensor(one)[None],
     ": torch.float32 tensor [1, 4, 17]", PER_TOKEN),
    ("logits of vocabulary + 1", "steps.0.scored.logits", lambda one: np.pad(one, ((0, 0), (0, 1))),
     ": float32 array [4, 18]", PER_TOKEN),
    ("logits of a node too few", "steps.0.scored.logits", lambda one: one[:-1].tolist(),
     ": list of float64 [3, 17]", PER_TOKEN),
    ("logits ragged", "steps.0.scored.logits", lambda _: [[1.0, 2.0], [1.0]],
     ": list of 2 rows of unequal length", PER_TOKEN),
    ("logits of unlike tensors", "steps.0.scored.logits", lambda _: [torch.zeros(17), torch.zeros(18)],
     ": list of 2 arrays of unequal shapes [17], [18]", PER_TOKEN),
    ("logits of objects", "steps.0.scored.logits", lambda one: one.astype(object), ": object array [4, 17]", PER_TOKEN),
    ("logits complex", "steps.0.scored.logits", lambda one: one.astype(complex),
     ": complex128 array [4, 17]", PER_TOKEN),
    ("logits of words", "steps.0.scored.logits", lambda _: [["a"] * 17] * 4, ": list of <U1 [4, 17]", PER_TOKEN),
    ("logits of bools", "steps.0.scored.logits", lambda one: one > 0, ": bool array [4, 17]", PER_TOKEN),
    ("logits of another step", "steps.1.scored.logits", lambda one: one[:-1], ": float32 array [3, 17]", PER_TOKEN),
    ("a law of vocabulary - 1", "steps.0.scored.law", lambda one: one[:, :-1], ": float32 array [4, 16]", PER_TOKEN),
    ("attention rows before heads", "steps.0.attended.output", lambda one: one.swapaxes(1, 2),
     ": float32 array [2, 4, 2, 4]", HEADS),
    ("attention heads joined", "steps.0.attended.output", lambda one: one.reshape(2, 4, 8),
     ": float32 array [2, 4, 8]", HEADS),
    ("fewer rows than nodes", "steps.0.lowered.parent", lambda one: one[:3],
     ": int64 array [3]", "int [rows], a row for each of 4 nodes at least"),
    ("flags for fewer rows", "steps.0.lowered.valid", lambda one: one[:3], ": bool array [3]", "bool [rows=4]"),
    ("positions of floats", "steps.0.lowered.position", lambda one: one * 1.0, ": float64 array [4]", ROWS),
    ("ancestors without depth", "steps.0.lowered.ancestor", lambda one: one[:, 0],
     ": int64 array [4]", "int [rows=4, height + 1]"),
    ("one mask for all layers", "steps.0.lowered.visible", lambda one: one[:1],
     ": 1 masks", "a mask for each of 2 layers"),
    ("an additive mask", "steps.0.lowered.visible", lambda one: [np.where(mask, 0, -np.inf) for mask in one],
     "[0]: float64 array [4, 6]", "bool [rows, columns]"),
    ("a mask of other whole numbers", "steps.0.lowered.visible", lambda one: [mask * 2 for mask in one],
     "[0]: int64 array [4, 6] with other values than 0 and 1", "bool [rows, columns]"),
    ("a path of bools", "steps.0.accepted.path", lambda _: (False,), "[0]: False", NODE),
    ("a path without its root", "steps.0.accepted.path", lambda _: (),
     ": an empty tuple", "nodes from the root (0) downwards, the root included"),
    ("a path past the tree", "steps.0.accepted.path", lambda _: (0, 4), "[1]: 4", NODE),
    ("a path filled up with -1", "steps.0.accepted.path", lambda _: (0, -1), "[1]: -1", NODE),
    ("no bonus", "steps.0.accepted.bonus", lambda _: None, ": None", TOKEN),
    ("a bonus in a list", "steps.0.accepted.bonus", lambda one: [one], ": list of 1 (int)", TOKEN),
    ("a coin off the tape", "steps.0.accepted.coins", lambda _: (13,),
     "[0]: 13", "a place on the step's tape from 0 to 12"),
    ("emitted -1", "steps.0.emitted.tokens", lambda _: (-1,), "[0]: -1", TOKEN),
    ("no log-probability", "steps.0.emitted.logprobs", lambda _: (None,), "[0]: None", "a number"),
    ("a committed length in words", "steps.0.committed.length", str, ": '3'", "an int"),
    ("keys and values as a pair", "steps.0.committed.after", lambda one: (one.keys, one.values),
     ": tuple of 2 (ndarray)", "specverify.reference.trace.Kv"),
    ("keys with batch axis", "steps.0.committed.after.keys", lambda one: one[:, None],
     ": float32 array [2, 1, 1, 3, 4]", CACHE),
    ("keys for every query head", "steps.0.committed.after.keys", lambda one: np.repeat(one, 2, axis=1),
     ": float32 array [2, 2, 3, 4]", CACHE),
    ("values of another width", "steps.0.committed.after.values", lambda one: one[..., :3],
     ": float32 array [2, 1, 3, 3]", CACHE),
    ("a first column for one layer", "steps.0.committed.after.first", lambda _: (0,),
     ": 1 columns", "one column for each of 2 layers, or none"),
    ("a draft cache of three layers", "steps.0.committed.draft.keys", lambda one: np.concatenate([one, one[:1]]),
     ": float32 array [3, 1, 3, 4]", CACHE),
    ("a fallback flag", "steps.0.committed.fallback", lambda _: True, ": True", "a str"),
)
# fmt: on
"""What is wrong, the field that is changed, how, and what the line says was found there and is expected."""

STAGES = {"output": Stage.EMITTED, "finish": Stage.EMITTED, **{stage.word: stage for stage in Stage}}
ORACLE = Oracle()


@pytest.mark.parametrize(("path", "change", "found", "expected"), [pytest.param(*row, id=id) for id, *row in WRONG])
def test_a_misshapen_answer_is_one_finding_that_names_the_field(
    path: str, change: Change, found: str, expected: str
) -> None:
    subject = subject_of(Adapter(lambda one: put(path, change, one)))
    verdict = judge(CASE, LOOKING, ORACLE, subject)
    (finding,) = verdict.findings
    assert finding.invariant == "lossless.completes"
    assert finding.observed == f"{place_of(path)}{found}, expected {expected}"
    named = (place_of(path) + found).removeprefix("step 0, ").partition(".")[0].partition(":")[0].partition("[")[0]
    stage = STAGES.get(named.removeprefix("step 1, "))
    assert (finding.stage, "side" in finding.where) == (stage or Stage.DRAFTED, stage is None)
    assert set(verdict.outcomes.values()) <= {"failed", "unobserved", "not_applicable", "checked"}
    assert type(subject(OTHER)) is Trace  # the same backend's next case is unharmed


# What is simply accepted: the field, and the same numbers in another form.
ACCEPTED: tuple[tuple[str, str, Change], ...] = (
    ("steps a list", "steps", list),
    ("output a list", "output", list),
    ("output a tensor", "output", torch.tensor),
    ("output an int32 array", "output", lambda one: np.array(one, np.int32)),
    ("output of uint8 numbers", "output", lambda one: [np.uint8(token) for token in one]),
    ("output of tensors", "output", lambda one: [torch.tensor(token) for token in one]),
    ("finish an enumeration of words", "finish", lambda one: Finish(one)),
    ("counters from NumPy", "accounting.proposed", np.int64),
    ("accept lengths a list", "accounting.accept_lengths", list),
    ("fallbacks a Counter", "fallbacks", Counter),
    ("seconds from NumPy", "forward_s", np.float64),
    ("context an array", "steps.1.context", np.array),
    ("tree of lists", "steps.0.drafted.tree", lambda one: Tree([*one.parent], [*one.token])),  # type: ignore[arg-type]
    ("tree of NumPy numbers", "steps.0.drafted.tree", lambda one: Tree(tuple(np.array(one.parent)), one.token)),
    ("draft ids a tensor", "steps.0.drafted.draft_ids", torch.tensor),
    ("logits lists", "steps.0.scored.logits", lambda one: one.tolist()),
    ("logits a tuple of lists", "steps.0.scored.logits", lambda one: tuple(one.tolist())),
    ("logits a tensor", "steps.0.scored.logits", torch.tensor),
    ("logits with gradient", "steps.0.scored.logits", lambda one: torch.tensor(one, requires_grad=True)),
    ("logits a list of tensors", "steps.0.scored.logits", lambda one: [torch.tensor(row) for row in one]),
    ("logits a list of arrays", "steps.0.scored.logits", list),
    ("logits of 64 bits", "steps.0.scored.logits", lambda one: one.astype(np.float64)),
    ("logits of 80 bits", "steps.0.scored.logits", lambda one: one.astype(np.longdouble)),
    ("logits of the other endianness", "steps.0.scored.logits", lambda one: one.astype(">f4")),
    ("logits by column", "steps.0.scored.logits", np.asfortranarray),
    ("logits a writeable array", "steps.0.scored.logits", np.array),
    ("logits every second number", "steps.0.scored.logits", lambda one: np.repeat(one, 2, axis=1)[:, ::2]),
    ("logits a masked array", "steps.0.scored.logits", np.ma.array),
    ("attention a list of layers", "steps.0.attended.output", lambda one: [torch.tensor(layer) for layer in one]),
    ("parents of 32 bits", "steps.0.lowered.parent", lambda one: one.astype(np.int32)),
    ("parents without sign", "steps.0.lowered.parent", lambda one: one.astype(np.uint64)),
    ("parents a list", "steps.0.lowered.parent", lambda one: one.tolist()),
    ("flags of 0 and 1", "steps.0.lowered.valid", lambda one: one.astype(np.uint8)),
    ("masks a list", "steps.0.lowered.visible", list),
    ("masks one tensor", "steps.0.lowered.visible", lambda one: torch.tensor(np.stack(one))),
    ("path a tensor", "steps.0.accepted.path", torch.tensor),
    ("bonus a tensor", "steps.0.accepted.bonus", torch.tensor),
    ("bonus an item of an array", "steps.0.accepted.bonus", np.int32),
    ("coins a list", "steps.0.accepted.coins", list),
    ("log-probabilities a tensor", "steps.0.emitted.logprobs", lambda one: torch.tensor(one, dtype=torch.float64)),
    ("log-probabilities a list", "steps.0.emitted.logprobs", list),
    ("committed length a tensor", "steps.0.committed.length", torch.tensor),
    ("keys a list of layers", "steps.0.committed.after.keys", list),
    ("values a tensor", "steps.0.committed.after.values", torch.tensor),
    ("first columns a list", "steps.0.committed.after.first", list),
)


class Finish(str, Enum):
    """Why a run ended, as engines number it."""

    LENGTH = "length"


@pytest.mark.parametrize(("path", "change"), [pytest.param(*row, id=id) for id, *row in ACCEPTED])
def test_the_same_numbers_in_another_form_are_accepted(path: str, change: Change) -> None:
    made = admit_trace(put(path, change), CASE, DECLARED)
    assert_same(made, clean())
    assert pickle.loads(pickle.dumps(made)).output == clean().output


def assert_same(made: Any, true: Any) -> None:
    """Exactly our types, the same numbers, and arrays that nobody can change."""
    assert type(made) is type(true)
    if isinstance(true, np.ndarray):
        np.testing.assert_array_equal(made, true)
        assert made.dtype.kind == true.dtype.kind
        assert made.dtype.isnative
        assert made.flags.c_contiguous
        assert not made.flags.writeable
    elif isinstance(true, tuple):
        assert len(made) == len(true)
        for one, other in zip(made, true, strict=True):
            assert_same(one, other)
    elif is_dataclass(true):
        for field in fields(true):
            assert_same(getattr(made, field.name), getattr(true, field.name))
    else:
        assert made == true


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_floats_of_every_width_are_accepted_as_they_are(dtype: torch.dtype) -> None:
    told = torch.tensor(logits()).to(dtype)
    made = admit_trace(put("steps.0.scored.logits", lambda _: told), CASE, DECLARED)
    assert made.steps[0].scored is not None
    np.testing.assert_array_equal(made.steps[0].scored.logits, told.double().numpy())
    wide = "float32" if dtype is torch.bfloat16 else str(dtype).removeprefix("torch.")
    assert made.steps[0].scored.logits.dtype == wide


def test_arrays_that_are_right_already_are_not_copied_and_shared_masks_stay_shared() -> None:
    trace = clean()
    made = admit_trace(trace, CASE, DECLARED)
    for one, step in zip(made.steps, trace.steps, strict=True):
        for stage, name in (("scored", "logits"), ("drafted", "logits"), ("attended", "output"), ("lowered", "parent")):
            assert getattr(getattr(one, stage), name) is getattr(getattr(step, stage), name)
        assert one.lowered is not None
        assert one.lowered.visible is not None
        assert one.lowered.visible[0] is one.lowered.visible[1]
    mask = [[True] * 6] * 4
    copied = admit_trace(put("steps.0.lowered.visible", lambda _: [mask, mask]), CASE, DECLARED).steps[0].lowered
    assert copied is not None
    assert copied.visible is not None
    assert copied.visible[0] is copied.visible[1]


def test_an_array_that_the_engine_writes_to_later_is_copied() -> None:
    held = np.array(logits())
    for told in (held, torch.from_numpy(held)):
        made = admit_trace(put("steps.0.scored.logits", constant(told)), CASE, DECLARED).steps[0].scored
        assert made is not None
        before = float(made.logits[0, 0])
        held[0, 0] += 1
        assert made.logits[0, 0] == before


def test_what_a_library_cannot_hand_over_is_told_with_its_reason() -> None:
    with pytest.raises(
        Misshapen, match=r"^step 0, scored.logits: torch.float32 tensor \[4, 17\] that cannot be read \("
    ):
        admit_trace(put("steps.0.scored.logits", lambda _: torch.zeros(4, 17, device="meta")), CASE, DECLARED)


def test_a_stranger_type_never_passes_under_one_of_our_names() -> None:
    class Mine(Scored):
        pass

    class Number(int):
        pass

    class Row(np.ndarray):
        pass

    told = put("steps.0.scored", lambda one: Mine(one.logits.view(Row), one.law))
    told = put("output", lambda one: tuple(map(Number, one)), told)
    assert_same(admit_trace(told, CASE, DECLARED), clean())


def test_a_tree_whose_parents_were_changed_by_force_is_refused() -> None:
    for parent, line in (
        ((0, 9, 0, 1), "drafted.tree.parent[1]: 9 is not a node of this 4-node tree, expected one tree below node 0"),
        ((0, 3, 0, 1), "drafted.tree.parent[1]: the parents form a circle that never reaches the root, expected "),
        ((0, 0), "drafted.tree.token: 4 tokens for 2 nodes, expected one tree below node 0"),
        ((), "drafted.tree.parent: a tree has at least its root, expected one tree below node 0"),
    ):
        tree = Tree((0, 0, 0, 1), (4, 8, 11, 2))
        object.__setattr__(tree, "parent", parent)
        assert str(told_of(put("steps.0.drafted.tree", constant(tree)))).startswith(f"step 0, {line}")


def test_values_are_the_invariants_matter() -> None:
    for path, change, name in (
        ("steps.0.accepted.path", lambda _: (0, 3), "acceptance.sampled-walk"),
        ("steps.0.scored.logits", lambda one: one * np.nan, "attention.context-exact"),
        ("steps.0.lowered.visible", lambda one: tuple(mask[:, 1:] for mask in one), "structure.mask-is-ancestry"),
        ("steps.0.lowered.parent", lambda one: one - 5, "structure.parent-range"),
        ("steps.0.committed.after", lambda kv: replace(kv, values=kv.values[:, :, 1:]), "cache.commit-equivalence"),
        ("steps.0.emitted.tokens", lambda one: (*one, 1, 1, 1), "acceptance.support"),
        ("steps.0.emitted.logprobs", lambda one: (*one, 0.0), "lossless.logprobs"),
        ("accounting.proposed", lambda one: -one, "lossless.accounting"),
        ("accounting.target_calls.verify", lambda one: one + 1, "lossless.accounting"),
        ("accounting.target_calls.decode", lambda one: one + 1, "lossless.accounting"),
        ("finish", lambda _: "eos", "lossless.stops"),
    ):
        asked = [one for one in LOOKING if one.name == name]
        verdict = judge(CASE, asked, ORACLE, subject_of(Adapter(partial(put, path, change))))
        assert {one.invariant for one in verdict.findings} == {name}, path


def test_a_stage_that_the_declaration_does_not_name_is_admitted_and_its_shape_checked() -> None:
    terse = replace(DECLARED, reveals=frozenset({Stage.EMITTED}))
    assert_same(admit_trace(clean(), CASE, terse), clean())
    with pytest.raises(Misshapen, match=r"attended\.output"):
        admit_trace(put("steps.0.attended.output", lambda one: one[0]), CASE, terse)


def test_steps_before_a_misshapen_one_are_judged() -> None:
    subject = subject_of(Adapter(lambda one: put("steps.1.scored.logits", lambda logits: logits[:-1], one)))
    verdict = judge(CASE, LOOKING, ORACLE, subject)
    assert verdict.outcomes["attention.context-exact"] == "checked"
    assert [one.step for one in verdict.findings] == [1]


class Hostile:
    """Refuses every question."""

    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)

    def __array__(self, *_: Any) -> Any:
        raise KeyError("array")

    def __len__(self) -> int:
        raise KeyError("len")

    def __repr__(self) -> str:
        raise KeyError("repr")


# fmt: off
JUNK: tuple[Any, ...] = (
    None, True, 3, -7, 10**30, 2.5, float("nan"), "eos", b"x", [], [[]], {}, (1, "a"), [None], [1, [2]], object(),
    Hostile(), [Hostile()], np.zeros(0), np.zeros((1,) * 5), np.array(4), np.array(["a"]), torch.zeros(3),
    torch.zeros(0).long(), Shape((0,)), Tree((0,), (1,)), clean, int, range(3), {0: 1}.keys(),
    np.ma.array([1, 2]),
)
# fmt: on


def paths(part: Any, path: str) -> Iterator[str]:
    """Every field of a trace, those of its first step alone."""
    yield path
    # A Tree checks its own parents: no adapter can hand one over that is none, but by force.
    for field in fields(part) if is_dataclass(part) and not isinstance(part, Tree) else ():
        held, at = getattr(part, field.name), f"{path}.{field.name}"
        yield from paths(held[0], f"{at}.0") if field.name == "steps" else paths(held, at)


def told_of(trace: Any) -> Trace | str:
    """The trace as the door makes it, or the line of its refusal."""
    try:
        return admit_trace(trace, CASE, DECLARED)
    except Misshapen as why:
        return why.why


def test_junk_in_any_field_is_refused_in_one_line_or_judged_like_any_answer() -> None:
    looking = [one for one in LOOKING if one.needs]
    lines, judged = Counter[str](), 0
    for path in dict.fromkeys(one.lstrip(".") for one in paths(clean(), "")):
        for junk in JUNK:
            told = put(path, constant(junk))
            made = told_of(told)
            if isinstance(made, str):
                lines[made] += 1
                continue
            judged += 1
            assert pickle.dumps(made)
            judge(CASE, looking, ORACLE, subject_of(Adapter(constant(told))))
    assert [line for line in lines if "\n" in line or len(line) > 300 or ", expected " not in line] == []
    assert lines.total() > 1000
    assert judged > 30
