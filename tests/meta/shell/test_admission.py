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

OTHER_CASE = replace(CASE, prompt=(9, 2, 6, 5))
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
LOOKING = tuple(invariant for invariant in ALL if invariant.every == 1)
DECLARED = open_cpu().declaration


@cache
def clean(case: Case = CASE) -> Trace:
    return open_cpu().run(case)


Change = Callable[[Any], Any]


def put(path: str, change: Change, owner: Any = None) -> Any:
    """The clean trace, or `owner`, with one field changed; unchanged where there is no such step."""
    owner = clean() if owner is None else owner
    name, _, inner_path = path.partition(".")
    if not path:
        return change(owner)
    if isinstance(owner, tuple) and int(name) >= len(owner):
        return owner
    part = owner[int(name)] if isinstance(owner, tuple) else getattr(owner, name)
    part = put(inner_path, change, part) if inner_path else change(part)
    if isinstance(owner, tuple):
        return (*owner[: int(name)], part, *owner[int(name) + 1 :])
    return replace(owner, **{name: part})


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
    step, _, field = path.removeprefix("steps.").partition(".")
    if not path.startswith("steps."):
        return path or "what run returned"
    return f"step {step}, {field}" if field else f"step {step}"


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
    ("a dict", "", lambda trace: {"output": trace.output}, ": dict", "specverify.reference.trace.Trace"),
    ("a list of tokens", "", lambda trace: [*trace.output], ": list of 6 (int)", "specverify.reference.trace.Trace"),
    ("a tuple of trace and time", "", lambda trace: (trace, 0.5),
     ": tuple of 2 (Trace, float)", "specverify.reference.trace.Trace"),
    ("a generator", "", lambda trace: (step for step in trace.steps), ": generator",
     "specverify.reference.trace.Trace"),
    ("a namespace", "", lambda trace: SimpleNamespace(**vars(trace)),
     ": SimpleNamespace", "specverify.reference.trace.Trace"),
    ("a step", "", lambda trace: trace.steps[0], ": Step", "specverify.reference.trace.Trace"),
    ("output of floats", "output", lambda output: [float(x) for x in output], "[0]: 7.0", TOKEN),
    ("output of bools", "output", lambda _: [True, False], "[0]: True", TOKEN),
    ("output of words", "output", lambda _: ["the", "cat"], "[0]: 'the'", TOKEN),
    ("output as text", "output", lambda _: "the cat", ": 'the cat'", TOKENS),
    ("output None", "output", lambda _: None, ": None", TOKENS),
    ("output one number", "output", lambda _: 5, ": 5", TOKENS),
    ("output with batch axis", "output", lambda output: torch.tensor([output]), ": torch.int64 tensor [1, 6]", TOKENS),
    ("output a float tensor", "output", lambda output: torch.tensor(output).float(), ": torch.float32 tensor [6]",
     TOKENS),
    ("output beyond the vocabulary", "output", lambda output: (*output[:-1], 17), "[5]: 17", TOKEN),
    ("output of 80 digits", "output", lambda output: (*output[:-1], 10**80), "[5]: an int of 266 bits", TOKEN),
    ("a finish of its own", "finish", lambda _: "max_tokens", ": 'max_tokens'", "eos, stop, grammar, length or None"),
    ("finish a bool", "finish", lambda _: True, ": True", "a str"),
    ("steps a dict", "steps", lambda steps: dict(enumerate(steps)), ": dict",
     "a tuple of specverify.reference.trace.Step"),
    ("steps a generator", "steps", lambda steps: (step for step in steps),
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
    ("context nested", "steps.0.context", lambda context: [context], "[0]: tuple of 2 (int)", TOKEN),
    ("stages swapped", "steps.0", lambda step: replace(step, scored=step.attended, attended=step.scored),
     ", attended: Scored", "specverify.reference.trace.Attended"),
    ("a stage that is its array", "steps.0.scored", lambda scored: scored.logits,
     ": float32 array [4, 17]", "specverify.reference.trace.Scored"),
    ("tree as lists", "steps.0.drafted.tree", lambda tree: [[*tree.parent], [*tree.token]],
     ": list of 2 (list)", "specverify.reference.tree.Tree"),
    ("tree without tokens", "steps.0.drafted.tree", lambda tree: Shape(tree.parent),
     ": Shape", "specverify.reference.tree.Tree"),
    ("drafted beyond the vocabulary", "steps.0.drafted.tree", lambda tree: Tree(tree.parent, (*tree.token[:-1], 17)),
     ".token[3]: 17", TOKEN),
    ("draft logits without leaves", "steps.0.drafted.logits", lambda logit_rows: logit_rows[:2],
     ": float32 array [2, 17]", "float [nodes=4, draft vocabulary=17]"),
    ("draft ids without the root", "steps.0.drafted.draft_ids", lambda draft_ids: draft_ids[1:],
     ": 3 ids", "one id for each of 4 nodes"),
    ("the proposal of one node", "steps.0.drafted.proposal", lambda proposal: proposal[0], ": float32 array [17]",
     PER_TOKEN),
    ("logits None", "steps.0.scored.logits", lambda _: None, ": None", PER_TOKEN),
    ("logits transposed", "steps.0.scored.logits", lambda logit_rows: logit_rows.T, ": float32 array [17, 4]",
     PER_TOKEN),
    ("logits of the last node", "steps.0.scored.logits", lambda logit_rows: logit_rows[-1], ": float32 array [17]",
     PER_TOKEN),
    ("logits with batch axis", "steps.0.scored.logits", lambda logit_rows: torch.tensor(logit_rows)[None],
     ": torch.float32 tensor [1, 4, 17]", PER_TOKEN),
    ("logits of vocabulary + 1", "steps.0.scored.logits", lambda logit_rows: np.pad(logit_rows, ((0, 0), (0, 1))),
     ": float32 array [4, 18]", PER_TOKEN),
    ("logits of a node too few", "steps.0.scored.logits", lambda logit_rows: logit_rows[:-1].tolist(),
     ": list of float64 [3, 17]", PER_TOKEN),
    ("logits ragged", "steps.0.scored.logits", lambda _: [[1.0, 2.0], [1.0]],
     ": list of 2 rows of unequal length", PER_TOKEN),
    ("logits of unlike tensors", "steps.0.scored.logits", lambda _: [torch.zeros(17), torch.zeros(18)],
     ": list of 2 arrays of unequal shapes [17], [18]", PER_TOKEN),
    ("logits of objects", "steps.0.scored.logits", lambda logit_rows: logit_rows.astype(object),
     ": object array [4, 17]", PER_TOKEN),
    ("logits complex", "steps.0.scored.logits", lambda logit_rows: logit_rows.astype(complex),
     ": complex128 array [4, 17]", PER_TOKEN),
    ("logits of words", "steps.0.scored.logits", lambda _: [["a"] * 17] * 4, ": list of <U1 [4, 17]", PER_TOKEN),
    ("logits of bools", "steps.0.scored.logits", lambda logit_rows: logit_rows > 0, ": bool array [4, 17]", PER_TOKEN),
    ("logits of another step", "steps.1.scored.logits", lambda logit_rows: logit_rows[:-1], ": float32 array [3, 17]",
     PER_TOKEN),
    ("a law of vocabulary - 1", "steps.0.scored.law", lambda law: law[:, :-1], ": float32 array [4, 16]", PER_TOKEN),
    ("attention rows before heads", "steps.0.attended.output", lambda output: output.swapaxes(1, 2),
     ": float32 array [2, 4, 2, 4]", HEADS),
    ("attention heads joined", "steps.0.attended.output", lambda output: output.reshape(2, 4, 8),
     ": float32 array [2, 4, 8]", HEADS),
    ("fewer rows than nodes", "steps.0.lowered.parent", lambda parent: parent[:3],
     ": int64 array [3]", "int [rows], a row for each of 4 nodes at least"),
    ("flags for fewer rows", "steps.0.lowered.valid", lambda valid: valid[:3], ": bool array [3]", "bool [rows=4]"),
    ("positions of floats", "steps.0.lowered.position", lambda position: position * 1.0, ": float64 array [4]", ROWS),
    ("ancestors without depth", "steps.0.lowered.ancestor", lambda ancestor: ancestor[:, 0],
     ": int64 array [4]", "int [rows=4, height + 1]"),
    ("one mask for all layers", "steps.0.lowered.visible", lambda masks: masks[:1],
     ": 1 masks", "a mask for each of 2 layers"),
    ("an additive mask", "steps.0.lowered.visible", lambda masks: [np.where(mask, 0, -np.inf) for mask in masks],
     "[0]: float64 array [4, 6]", "bool [rows, columns]"),
    ("a mask of other whole numbers", "steps.0.lowered.visible", lambda masks: [mask * 2 for mask in masks],
     "[0]: int64 array [4, 6] with other values than 0 and 1", "bool [rows, columns]"),
    ("a path of bools", "steps.0.accepted.path", lambda _: (False,), "[0]: False", NODE),
    ("a path without its root", "steps.0.accepted.path", lambda _: (),
     ": an empty tuple", "nodes from the root (0) downwards, the root included"),
    ("a path past the tree", "steps.0.accepted.path", lambda _: (0, 4), "[1]: 4", NODE),
    ("a path filled up with -1", "steps.0.accepted.path", lambda _: (0, -1), "[1]: -1", NODE),
    ("no bonus", "steps.0.accepted.bonus", lambda _: None, ": None", TOKEN),
    ("a bonus in a list", "steps.0.accepted.bonus", lambda bonus: [bonus], ": list of 1 (int)", TOKEN),
    ("a coin off the tape", "steps.0.accepted.coins", lambda _: (13,),
     "[0]: 13", "a place on the step's tape from 0 to 12"),
    ("emitted -1", "steps.0.emitted.tokens", lambda _: (-1,), "[0]: -1", TOKEN),
    ("no log-probability", "steps.0.emitted.logprobs", lambda _: (None,), "[0]: None", "a number"),
    ("a committed length in words", "steps.0.committed.length", str, ": '3'", "an int"),
    ("keys and values as a pair", "steps.0.committed.after", lambda kv: (kv.keys, kv.values),
     ": tuple of 2 (ndarray)", "specverify.reference.trace.Kv"),
    ("keys with batch axis", "steps.0.committed.after.keys", lambda keys: keys[:, None],
     ": float32 array [2, 1, 1, 3, 4]", CACHE),
    ("keys for every query head", "steps.0.committed.after.keys", lambda keys: np.repeat(keys, 2, axis=1),
     ": float32 array [2, 2, 3, 4]", CACHE),
    ("values of another width", "steps.0.committed.after.values", lambda values: values[..., :3],
     ": float32 array [2, 1, 3, 3]", CACHE),
    ("a first column for one layer", "steps.0.committed.after.first", lambda _: (0,),
     ": 1 columns", "one column for each of 2 layers, or none"),
    ("a draft cache of three layers", "steps.0.committed.draft.keys", lambda keys: np.concatenate([keys, keys[:1]]),
     ": float32 array [3, 1, 3, 4]", CACHE),
    ("a fallback flag", "steps.0.committed.fallback", lambda _: True, ": True", "a str"),
)
# fmt: on
"""What is wrong, the field that is changed, how, and what the line says was found there and is expected."""

STAGES = {"output": Stage.EMITTED, "finish": Stage.EMITTED, **{stage.word: stage for stage in Stage}}
ORACLE = Oracle()


@pytest.mark.parametrize(("path", "change", "observed", "expected"), [pytest.param(*row, id=id) for id, *row in WRONG])
def test_a_misshapen_answer_is_one_finding_that_names_the_field(
    path: str, change: Change, observed: str, expected: str
) -> None:
    subject = subject_of(Adapter(lambda trace: put(path, change, trace)))
    verdict = judge(CASE, LOOKING, ORACLE, subject)
    (finding,) = verdict.findings
    assert finding.invariant == "lossless.completes"
    assert finding.observed == f"{place_of(path)}{observed}, expected {expected}"
    named = (place_of(path) + observed).removeprefix("step 0, ").partition(".")[0].partition(":")[0].partition("[")[0]
    stage = STAGES.get(named.removeprefix("step 1, "))
    assert (finding.stage, "side" in finding.where) == (stage or Stage.DRAFTED, stage is None)
    assert set(verdict.outcomes.values()) <= {"failed", "unobserved", "not_applicable", "checked"}
    assert type(subject(OTHER_CASE)) is Trace  # the same backend's next case is unharmed


# What is simply accepted: the field, and the same numbers in another form.
ACCEPTED: tuple[tuple[str, str, Change], ...] = (
    ("steps a list", "steps", list),
    ("output a list", "output", list),
    ("output a tensor", "output", torch.tensor),
    ("output an int32 array", "output", lambda output: np.array(output, np.int32)),
    ("output of uint8 numbers", "output", lambda output: [np.uint8(token) for token in output]),
    ("output of tensors", "output", lambda output: [torch.tensor(token) for token in output]),
    ("finish an enumeration of words", "finish", lambda word: Finish(word)),
    ("counters from NumPy", "accounting.proposed", np.int64),
    ("accept lengths a list", "accounting.accept_lengths", list),
    ("fallbacks a Counter", "fallbacks", Counter),
    ("seconds from NumPy", "forward_s", np.float64),
    ("context an array", "steps.1.context", np.array),
    ("tree of lists", "steps.0.drafted.tree", lambda tree: Tree([*tree.parent], [*tree.token])),  # type: ignore[arg-type]
    ("tree of NumPy numbers", "steps.0.drafted.tree", lambda tree: Tree(tuple(np.array(tree.parent)), tree.token)),
    ("draft ids a tensor", "steps.0.drafted.draft_ids", torch.tensor),
    ("logits lists", "steps.0.scored.logits", lambda logit_rows: logit_rows.tolist()),
    ("logits a tuple of lists", "steps.0.scored.logits", lambda logit_rows: tuple(logit_rows.tolist())),
    ("logits a tensor", "steps.0.scored.logits", torch.tensor),
    ("logits with gradient", "steps.0.scored.logits", lambda logit_rows: torch.tensor(logit_rows, requires_grad=True)),
    ("logits a list of tensors", "steps.0.scored.logits", lambda logit_rows: [torch.tensor(row) for row in logit_rows]),
    ("logits a list of arrays", "steps.0.scored.logits", list),
    ("logits of 64 bits", "steps.0.scored.logits", lambda logit_rows: logit_rows.astype(np.float64)),
    ("logits of 80 bits", "steps.0.scored.logits", lambda logit_rows: logit_rows.astype(np.longdouble)),
    ("logits of the other endianness", "steps.0.scored.logits", lambda logit_rows: logit_rows.astype(">f4")),
    ("logits by column", "steps.0.scored.logits", np.asfortranarray),
    ("logits a writeable array", "steps.0.scored.logits", np.array),
    (
        "logits every second number",
        "steps.0.scored.logits",
        lambda logit_rows: np.repeat(logit_rows, 2, axis=1)[:, ::2],
    ),
    ("logits a masked array", "steps.0.scored.logits", np.ma.array),
    ("attention a list of layers", "steps.0.attended.output", lambda layers: [torch.tensor(layer) for layer in layers]),
    ("parents of 32 bits", "steps.0.lowered.parent", lambda parent: parent.astype(np.int32)),
    ("parents without sign", "steps.0.lowered.parent", lambda parent: parent.astype(np.uint64)),
    ("parents a list", "steps.0.lowered.parent", lambda parent: parent.tolist()),
    ("flags of 0 and 1", "steps.0.lowered.valid", lambda valid: valid.astype(np.uint8)),
    ("masks a list", "steps.0.lowered.visible", list),
    ("masks one tensor", "steps.0.lowered.visible", lambda masks: torch.tensor(np.stack(masks))),
    ("path a tensor", "steps.0.accepted.path", torch.tensor),
    ("bonus a tensor", "steps.0.accepted.bonus", torch.tensor),
    ("bonus an item of an array", "steps.0.accepted.bonus", np.int32),
    ("coins a list", "steps.0.accepted.coins", list),
    (
        "log-probabilities a tensor",
        "steps.0.emitted.logprobs",
        lambda logprobs: torch.tensor(logprobs, dtype=torch.float64),
    ),
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
    trace = admit_trace(put(path, change), CASE, DECLARED)
    assert_same(trace, clean())
    assert pickle.loads(pickle.dumps(trace)).output == clean().output


def assert_same(actual: Any, true: Any) -> None:
    """Exactly our types, the same numbers, and arrays that nobody can change."""
    assert type(actual) is type(true)
    if isinstance(true, np.ndarray):
        np.testing.assert_array_equal(actual, true)
        assert actual.dtype.kind == true.dtype.kind
        assert actual.dtype.isnative
        assert actual.flags.c_contiguous
        assert not actual.flags.writeable
    elif isinstance(true, tuple):
        assert len(actual) == len(true)
        for part, true_part in zip(actual, true, strict=True):
            assert_same(part, true_part)
    elif is_dataclass(true):
        for field in fields(true):
            assert_same(getattr(actual, field.name), getattr(true, field.name))
    else:
        assert actual == true


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_floats_of_every_width_are_accepted_as_they_are(dtype: torch.dtype) -> None:
    tensor = torch.tensor(logits()).to(dtype)
    trace = admit_trace(put("steps.0.scored.logits", lambda _: tensor), CASE, DECLARED)
    assert trace.steps[0].scored is not None
    np.testing.assert_array_equal(trace.steps[0].scored.logits, tensor.double().numpy())
    wide = "float32" if dtype is torch.bfloat16 else str(dtype).removeprefix("torch.")
    assert trace.steps[0].scored.logits.dtype == wide


def test_arrays_that_are_right_already_are_not_copied_and_shared_masks_stay_shared() -> None:
    trace = clean()
    admitted_trace = admit_trace(trace, CASE, DECLARED)
    for admitted_step, step in zip(admitted_trace.steps, trace.steps, strict=True):
        for stage, name in (("scored", "logits"), ("drafted", "logits"), ("attended", "output"), ("lowered", "parent")):
            assert getattr(getattr(admitted_step, stage), name) is getattr(getattr(step, stage), name)
        assert admitted_step.lowered is not None
        assert admitted_step.lowered.visible is not None
        assert admitted_step.lowered.visible[0] is admitted_step.lowered.visible[1]
    mask = [[True] * 6] * 4
    copied = admit_trace(put("steps.0.lowered.visible", lambda _: [mask, mask]), CASE, DECLARED).steps[0].lowered
    assert copied is not None
    assert copied.visible is not None
    assert copied.visible[0] is copied.visible[1]


def test_an_array_that_the_engine_writes_to_later_is_copied() -> None:
    buffer = np.array(logits())
    for view in (buffer, torch.from_numpy(buffer)):
        scored = admit_trace(put("steps.0.scored.logits", constant(view)), CASE, DECLARED).steps[0].scored
        assert scored is not None
        before = float(scored.logits[0, 0])
        buffer[0, 0] += 1
        assert scored.logits[0, 0] == before


def test_what_a_library_cannot_hand_over_is_told_with_its_reason() -> None:
    with pytest.raises(
        Misshapen, match=r"^step 0, scored.logits: torch.float32 tensor \[4, 17\] that cannot be read \("
    ):
        admit_trace(put("steps.0.scored.logits", lambda _: torch.zeros(4, 17, device="meta")), CASE, DECLARED)


def test_a_stranger_type_never_passes_under_one_of_our_names() -> None:
    class StrangerScored(Scored):
        pass

    class Number(int):
        pass

    class Row(np.ndarray):
        pass

    trace = put("steps.0.scored", lambda scored: StrangerScored(scored.logits.view(Row), scored.law))
    trace = put("output", lambda output: tuple(map(Number, output)), trace)
    assert_same(admit_trace(trace, CASE, DECLARED), clean())


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
        ("steps.0.scored.logits", lambda logit_rows: logit_rows * np.nan, "attention.context-exact"),
        ("steps.0.lowered.visible", lambda masks: tuple(mask[:, 1:] for mask in masks), "structure.mask-is-ancestry"),
        ("steps.0.lowered.parent", lambda parent: parent - 5, "structure.parent-range"),
        ("steps.0.committed.after", lambda kv: replace(kv, values=kv.values[:, :, 1:]), "cache.commit-equivalence"),
        ("steps.0.emitted.tokens", lambda tokens: (*tokens, 1, 1, 1), "acceptance.support"),
        ("steps.0.emitted.logprobs", lambda logprobs: (*logprobs, 0.0), "lossless.logprobs"),
        ("accounting.proposed", lambda count: -count, "lossless.accounting"),
        ("accounting.target_calls.verify", lambda count: count + 1, "lossless.accounting"),
        ("accounting.target_calls.decode", lambda count: count + 1, "lossless.accounting"),
        ("finish", lambda _: "eos", "lossless.stops"),
    ):
        invariants = [invariant for invariant in LOOKING if invariant.name == name]
        verdict = judge(CASE, invariants, ORACLE, subject_of(Adapter(partial(put, path, change))))
        assert {finding.invariant for finding in verdict.findings} == {name}, path


def test_a_stage_that_the_declaration_does_not_name_is_admitted_and_its_shape_checked() -> None:
    terse = replace(DECLARED, reveals=frozenset({Stage.EMITTED}))
    assert_same(admit_trace(clean(), CASE, terse), clean())
    with pytest.raises(Misshapen, match=r"attended\.output"):
        admit_trace(put("steps.0.attended.output", lambda output: output[0]), CASE, terse)


def test_steps_before_a_misshapen_one_are_judged() -> None:
    subject = subject_of(Adapter(lambda trace: put("steps.1.scored.logits", lambda logits: logits[:-1], trace)))
    verdict = judge(CASE, LOOKING, ORACLE, subject)
    assert verdict.outcomes["attention.context-exact"] == "checked"
    assert [finding.step for finding in verdict.findings] == [1]


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
        value, field_path = getattr(part, field.name), f"{path}.{field.name}"
        yield from paths(value[0], f"{field_path}.0") if field.name == "steps" else paths(value, field_path)


def told_of(trace: Any) -> Trace | str:
    """The trace as the door makes it, or the line of its refusal."""
    try:
        return admit_trace(trace, CASE, DECLARED)
    except Misshapen as why:
        return why.why


def test_junk_in_any_field_is_refused_in_one_line_or_judged_like_any_answer() -> None:
    looking = [invariant for invariant in LOOKING if invariant.needs]
    lines, judged = Counter[str](), 0
    for path in dict.fromkeys(field_path.lstrip(".") for field_path in paths(clean(), "")):
        for junk in JUNK:
            trace = put(path, constant(junk))
            answer = told_of(trace)
            if isinstance(answer, str):
                lines[answer] += 1
                continue
            judged += 1
            assert pickle.dumps(answer)
            judge(CASE, looking, ORACLE, subject_of(Adapter(constant(trace))))
    assert [line for line in lines if "\n" in line or len(line) > 300 or ", expected " not in line] == []
    assert lines.total() > 1000
    assert judged > 30
