"""Amplification: a row that shows more of the roundings than others.

Rule N takes the backend's error in plain decode as its unit, an average over a few rows. One row can be many times
worse conditioned than those. In a model whose norms stand behind blocks (EXAONE 4, OLMo 2) a block's sum may nearly
vanish at one node: the norm then enlarges what rounding left of it. The oracle says by how much. It changes all weights
by one part in 2**24 and looks how far each row of logits and of attention outputs moves
(`specverify.reference.oracle.amplification`). Queries and keys that are normed behind such a sum move with
it, and the attention outputs of that layer with them.

A row that moves r times as far as the rows of plain decode move may lie r times as far off. So may a row of logits that
moves r sigmas for a change of weights by the unit roundoff: plain decode may have ill-conditioned rows of its own that
move far and yet were rounded well. The factor comes from the oracle alone, so that no fault of a backend widens it, and
it is asked for only where a row would be a finding.

Plain decode itself has an a-priori ceiling, which counts layers and knows nothing of conditioning. It may lie CONTROL
times as far off as its rows move for a change of weights by the unit roundoff. Two cases of some 800 on hybrids came to
need that: they lay 3.5 and 2.6 times their ceilings off, and 0.98 and 0.94 times that movement. On checkpoints it is
the rule: a Qwen3-Next with weights of usual scale lay 6.1 times its ceiling off, and 1.5 times that movement.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np

from specverify.properties.tolerance.bounds import UNIT, largest
from specverify.properties.verdict.finding import ControlError
from specverify.properties.verdict.invariant import Oracle
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.malformed import Malformed
from specverify.reference.oracle.amplification import PERTURBED, sizes_of_change
from specverify.reference.trace import Array, Step
from specverify.reference.tree import Tree

MAX_AMPLIFICATION = 64.0
"""A row beyond its limit by more than this factor is a finding, however ill-conditioned it may be.

Two of some 25,000 drawn cases came to need a factor for logits: 1.2 and 1.8, where the oracle grants 9.8 and 2.9.
The row of a draft's head begins with its parent's output, and its factor is that above its parent's
(`specverify.properties.invariants.draft.scores.row_excused`).
"""

CONTROL = {"float32": (8.0, 2.89), "bfloat16": (4.0, 1.43), "float16": (4.0, 1.51)}
"""How far plain decode may be off, over the movement of its rows for a change of weights by the unit roundoff; and the
most that clean models were off: built-in ones, and checkpoints of published configs (`python -m tests.measure
checkpoints`). The usual ratio is 1 in float32 and .5 in 16 bits, 1.6 and .6 on checkpoints; the factor lies six of its
deviations above it. An earlier factor of 1.5 in 16 bits, measured on built-in models alone, called a right Qwen3-Next
wrong. That plain decode is less exact than its dtype throughout is told by the whole run
(`specverify.properties.run_statistics`).
"""

ROWS = 6.0
"""How far a row of keys or values, of hidden states, of a draft's scores, or a recurrent state, may be off.

It is counted in the movement of the row for a change of weights by the unit roundoff. Five of 10,000 cases on hybrids
came to need it: keys lay 3.9 times their bound off, and a state 1.004 times, each 0.9 to 0.95 times that movement. The
other states were at most 2.05 times theirs off.
"""

ENTRIES = {"float32": (2.0, 0.8), "bfloat16": (1.0, 0.4), "float16": (1.0, 0.4)}
"""How far a single entry may be off, over the movement of its row or of the control's rows if that is larger, in bounds
of the largest of so many normal numbers (`bounds.largest`); and the most of some 300 to 900 clean rows of logits."""

TREES = 8
"""Number of trees of which a control's oracle remembers what it said."""


class Movement(Protocol):
    """How far rows move when all weights change a little, over the relative change of weights."""

    @property
    def logits(self) -> Array:
        """Of logits, [nodes]."""
        ...

    @property
    def attended(self) -> Array:
        """Of attention outputs, [layers, heads, nodes]."""
        ...


@runtime_checkable
class Amplifies(Protocol):
    """An oracle that knows how rows amplify roundings; plain transformers in its place does not."""

    def amplification(self, case: Case, context: tuple[int, ...], tree: Tree) -> Movement | None:
        """Rms changes of the rows at each node over the relative change of weights; None without weights."""
        ...


@runtime_checkable
class HasNeighbours(Protocol):
    """An oracle that knows others whose weights differ a little; plain transformers in its place does not."""

    def neighbours(self, size: float = PERTURBED) -> tuple[Oracle, ...]:
        """See `specverify.reference.oracle.decoder.Oracle.neighbours`."""
        ...


def excuses_row(
    oracle: Oracle,
    ask: Callable[[Oracle], Array | None],
    place: tuple[int, ...],
    distance: float,
    case: Case,
    of_draft: bool = False,
) -> bool:
    """Whether a row of `case` may be as far off as `distance` (rms): the models' conditioning explains it.

    `ask` gives an oracle's array with the row along its last axis, at index `place`. A row `of_draft` is made by the
    draft, others by the target alone.
    """
    return bool(distance <= explained_distance(oracle, ask, place, case, of_draft))


def explained_distance(
    oracle: Oracle,
    ask: Callable[[Oracle], Array | None],
    place: tuple[int, ...],
    case: Case,
    of_draft: bool = False,
) -> float:
    """How far off a row of `case` may be by the models' conditioning, rms.

    It may be ROWS times as far off as a change of all weights by the unit roundoff moves it, by the oracle; see
    `excuses_row`. 0 of an oracle without neighbours, and in float64, whose one bound counts no roundings.
    """
    if case.dtype == "float64" or not isinstance(oracle, HasNeighbours):
        return 0.0
    try:
        rows = ask(oracle)
        moved = [
            _row_movement(rows, [ask(neighbour) for neighbour in oracle.neighbours(size)], place, size)
            for size in _sizes_of_change(case, of_draft)
        ]
    except Malformed:
        return 0.0
    return ROWS * UNIT[case.dtype] * max(moved)


def _sizes_of_change(case: Case, of_draft: bool) -> tuple[float, ...]:
    """The sizes of changes of weights by which rows of `case` are asked.

    A large change would move a row to other experts or columns, whose numbers jump.
    """
    chooses = case.model.chooses
    if of_draft:
        draft = case.draft
        chooses |= (draft.model is not None and draft.model.chooses) or bool(getattr(draft, "experts", False))
    sizes = sizes_of_change(case.model, case.dtype)
    return sizes[:1] if chooses else sizes


def _row_movement(
    rows: Array | None, neighbour_rows: Sequence[Array | None], place: tuple[int, ...], size: float
) -> float:
    """How far the row at `place` moves in neighbours that differ by `size`, over that size, rms.

    0 where an oracle has no such rows.
    """
    if rows is None or any(moved is None or moved.shape != rows.shape for moved in neighbour_rows):
        return 0.0
    movement = [(moved[place] - rows[place]) / size for moved in neighbour_rows if moved is not None]
    return float(np.sqrt(np.mean(np.square(movement))))


def excuses_channel_of_rows(
    oracle: Oracle, ask: Callable[[Oracle], Array | None], errors: Array, channel: int, dtype: str
) -> bool:
    """Whether a row's error in one channel is as large as the others'; see `Amplification.excuses_channel`.

    `ask` gives an oracle's rows [rows, channels], among which the row is.
    """
    if dtype not in CONTROL or not isinstance(oracle, HasNeighbours):
        return False
    try:
        return is_of_its_channel([ask(other) for other in (oracle, *oracle.neighbours())], errors, channel)
    except Malformed:
        return False


def is_of_its_channel(rows_of_oracles: Sequence[Array | None], errors: Array, channel: int) -> bool:
    """Whether a row's errors [channels] are alike once each is divided by the movement of its channel.

    Args:
        rows_of_oracles: Rows [rows, channels] of an oracle and of its neighbours; the movement is over all of them.
        errors: The errors of one row.
        channel: The channel that is asked: its quotient may be the largest of so many numbers whose rms is that of the
            other channels.
    """
    known = [rows for rows in rows_of_oracles if rows is not None]
    if len(known) < len(rows_of_oracles) or any(rows.shape != known[0].shape for rows in known):
        return False
    movement = np.sqrt(np.mean(np.square([rows - known[0] for rows in known[1:]]), axis=(0, 1)))
    if movement.shape != errors.shape or not (movement > 0).all():
        return False
    quotients = np.abs(errors) / movement
    return bool(quotients[channel] <= largest(errors.size) * _rms(np.delete(quotients, channel)))


def attended_of(oracle: Oracle, case: Case, place: tuple[int, int, int]) -> Array | None:
    """An oracle's attention outputs [nodes, head_dim] in the layer and head of `place`, at the first step of `case`."""
    attended = oracle(case).steps[0].attended
    return None if attended is None else attended.output[place[0], place[1]]


@dataclass(frozen=True)
class Amplification:
    """How rows of a case's target amplify roundings, against the rows of plain decode.

    Attributes:
        control: The plain decode, as a case.
        tree: The tokens of that plain decode, as a tree without branches.
        oracle: The oracle; one that knows no amplification excuses nothing.
        movements: What the oracle said of the last few trees: a wrong run asks for each of its rows.
    """

    control: Case
    tree: Tree
    oracle: Oracle
    movements: dict[tuple[tuple[int, ...], Tree], Movement | None] = field(
        default_factory=dict, compare=False, repr=False
    )

    def excuses(self, step: Step, node: int, measure: float, sigma: float = np.inf) -> bool:
        """Whether the logits of row `node` of `step` may lie `measure` times as far off as rows in general.

        `sigma` is rule N's sigma of logits over the unit roundoff: the movement of a row that is rounded by one sigma.
        """
        pair = self._movement_pair(step, measure)
        if pair is None:
            return False
        row = pair[0].logits[node]
        return _moves_as_far(row, pair[1].logits, measure) or bool(row >= measure * sigma)

    def excuses_attended(
        self, step: Step, place: tuple[int, int, int], measure: float, distance: float = np.inf
    ) -> bool:
        """Whether the attention output at `place` (layer, head, node) of `step` may lie `measure` times as far off.

        It is held against the rows of plain decode in that layer, whose noise is the layer's bound. Or its `distance`
        is at most ROWS times what a change of weights by the unit roundoff moves it, or moves those rows.
        """
        pair = self._movement_pair(step, measure)
        if pair is None:
            return False
        row = float(pair[0].attended[place])
        usual = pair[1].attended[place[0]]
        unit = UNIT.get(self.control.dtype, 0.0)
        return _moves_as_far(row, usual, measure) or distance <= ROWS * unit * max(row, _rms(usual))

    def excuses_entry(self, step: Step, place: tuple[int, ...], distance: float, count: int) -> bool:
        """Whether one entry of `step` may lie `distance` off, beyond the bound that the others of its row set.

        It may lie as far off as the largest of `count` numbers whose rms is ENTRIES times the movement of the row, or
        of the control's rows if that is larger. `place` is (node,) for logits, (layer, head, node) for attention.
        """
        dtype = self.control.dtype
        if dtype not in CONTROL or step.drafted is None or not np.isfinite(distance):
            return False
        rows = self._movement(step.context, step.drafted.tree)
        usual = self.control_movement()
        if rows is None or usual is None:
            return False
        if len(place) == 1:
            movement = max(float(rows.logits[place]), _rms(usual.logits))
        else:
            movement = max(float(rows.attended[place]), _rms(usual.attended[place[0]]))
        return distance <= largest(count) * ENTRIES[dtype][0] * UNIT[dtype] * movement

    def excuses_channel(self, step: Step, place: tuple[int, int, int], errors: Array, channel: int) -> bool:
        """Whether an attention output's error in one channel is as large as the others', by how far channels move.

        A channel of a checkpoint may be several times worse conditioned than the others of its head: in a row of
        SmolLM2 one moved 2.6 times as far as the rest and lay 7.7 times as far off. So each error of the row at `place`
        (layer, head, node) is divided by the movement of its channel, over all nodes and neighbours; the quotient may
        be the largest of so many numbers whose rms is that of the other channels.
        """
        if self.control.dtype not in CONTROL or step.drafted is None or not isinstance(self.oracle, HasNeighbours):
            return False
        case = self.control.rebased(step.context, step.drafted.tree)
        outputs = [attended_of(oracle, case, place) for oracle in (self.oracle, *self.oracle.neighbours())]
        return is_of_its_channel(outputs, errors, channel)

    def control_movement(self) -> Movement | None:
        """How far the rows of plain decode move; None where the oracle knows nothing of it."""
        return self._movement(self.control.prefix, self.tree)

    def control_errors(self, logits: float, attended: Array, dtype: str) -> Iterator[ControlError]:
        """The errors of plain decode, of logits and of each layer's attention, over the movement of its rows.

        Nothing in float64, for a checkpoint, or where nothing could be measured. Nor for choices of experts or columns
        in 16 bits, where the rows of a prompt may take others than the oracle's.
        """
        model = self.control.model
        if dtype not in CONTROL or not isinstance(model, Seeded):
            return
        if model.chooses and dtype in ("bfloat16", "float16"):
            return
        movement = self.control_movement()
        if movement is None:
            return
        target = hashlib.sha256(repr(model.architecture).encode()).hexdigest()[:8]
        unit = UNIT[dtype] * _rms(movement.logits)
        if logits > 0 and unit > 0:
            yield ControlError(dtype, target, "logits", logits / unit)
        units = UNIT[dtype] * np.sqrt(np.mean(np.square(movement.attended), axis=(1, 2)))
        ratios = attended[(attended > 0) & (units > 0)] / units[(attended > 0) & (units > 0)]
        if len(ratios):
            yield ControlError(dtype, target, "attended", _rms(ratios))

    def excuses_control(self, error: float, ceiling: float, dtype: str) -> bool:
        """Whether plain decode in `dtype` may have this `error` beyond its `ceiling`."""
        return error <= MAX_AMPLIFICATION * ceiling and error <= self.control_cap(dtype)

    def control_cap(self, dtype: str, layer: int | None = None) -> float:
        """The largest error that the movement of plain decode's rows explains: of logits, or of attention in `layer`.

        0 where the oracle knows nothing of it.
        """
        usual = self.control_movement() if dtype in CONTROL else None
        if usual is None:
            return 0.0
        return CONTROL[dtype][0] * UNIT[dtype] * _rms(usual.logits if layer is None else usual.attended[layer])

    def _movement_pair(self, step: Step, measure: float) -> tuple[Movement, Movement] | None:
        """How far the rows of `step` move, and those of plain decode; None where nothing is excused."""
        # NaN is compared so that it is excused by nothing.
        if step.drafted is None or not measure <= MAX_AMPLIFICATION:
            return None
        rows = self._movement(step.context, step.drafted.tree)
        usual = self._movement(self.control.prefix, self.tree)
        return None if rows is None or usual is None else (rows, usual)

    def _movement(self, context: tuple[int, ...], tree: Tree) -> Movement | None:
        """What the oracle says of the rows of `tree` behind `context`; None where it knows nothing."""
        if not isinstance(self.oracle, Amplifies):
            return None
        if (context, tree) not in self.movements:
            if len(self.movements) >= TREES:
                self.movements.clear()
            try:
                self.movements[context, tree] = self.oracle.amplification(self.control, context, tree)
            except Malformed:
                self.movements[context, tree] = None
        return self.movements[context, tree]


def _moves_as_far(row: float, usual: Array, measure: float) -> bool:
    """Whether a row that moves by `row` moves at least `measure` times as far as `usual` rows move."""
    return bool(row >= measure * _rms(usual))


def _rms(rows: Array) -> float:
    return float(np.sqrt(np.mean(np.square(rows))))
