"""Closeness (rule N): how far a row may lie from the float64 oracle.

The unit is the backend's own error in plain decode of the same prompt, the control.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import takewhile

import numpy as np

from specverify.properties.tolerance.amplification import Amplification
from specverify.properties.tolerance.bounds import INNER, LOGITS, PAIR, UNIT
from specverify.properties.tolerance.ties import is_decided
from specverify.properties.verdict.finding import ControlError
from specverify.properties.verdict.followed import follow, follow_step, kv_shift, shift
from specverify.properties.verdict.invariant import Oracle, Unobserved
from specverify.properties.verdict.subject import NoTrace, Subject
from specverify.reference.architecture import Checkpoint
from specverify.reference.case import Case
from specverify.reference.sampling import Sampling
from specverify.reference.trace import Array, Drafted, Kv, Step, Trace
from specverify.reference.tree import Tree

EXACT = 1e-9
"""The bound of float64 runs, relative to the larger of 1 and the rms of the quantity."""

PRIOR = {"float64": (5.0, 9.0), "float32": (5.0, 9.0), "bfloat16": (1.65, 1.65), "float16": (1.65, 1.65)}
"""A-priori control error in units of sqrt(layers) * unit roundoff * rms: lower and upper end."""

SANITY = 3.0
"""The control is a finding of its own where it exceeds its a-priori size by more than this factor."""

CONTROL_TOKENS, FEWEST_CONTROL_TOKENS = 12, 4
"""Tokens of plain decode that the control compares: fewer on a slow backend, by its `Subject.variant_interval`.

In float64, whose limits are no multiples of what the control measures, it compares the fewest.
"""


ASSUMED = ("float32", "float64")
"""Dtypes in which noise may be taken at its a-priori size: the bounds leave room there for what a control would add.

In float32 the control of 165 requests was at most 1.5 times that size, and the bound is 3 times the worst row.
"""

ASSUMED_POSITIONS = 64
"""Most positions of a float32 run whose noise may be taken at its a-priori size, which knows of no rounded angles.

The angle of rotary embedding at position p is off by up to 2 p unit roundoffs (`bounds.rotation_error`): at position 64
by 128 of them. By the a-priori size a row of keys may lie 150 unit roundoffs of its layer's rms off; at position 2,017
a row of a right engine lay 220 off. For longer runs a control runs, whose keys have the same angles. In float64 no
limit follows from the control.
"""


@dataclass(frozen=True)
class Noise:
    """The backend's own error on this request, from plain decode of the same prompt (the control).

    Attributes:
        assumed: Whether no control ran: `measured` is its a-priori size then, and says nothing about plain decode.
        logits: Sigma of logits: measured, or the a-priori floor if that is larger.
        measured: The error of logits that the control measured; 0 where nothing could be measured.
        ceiling: The largest error of logits that the control may have.
        scale: Rms of the oracle's logits.
        attended: Sigma of each layer's attention outputs.
        measured_attended: The error of each layer's attention outputs that the control measured; 0 likewise.
        keys: Sigma of each layer's keys.
        values: Sigma of each layer's values.
        inner_scale: Rms of (attended, keys, values) over all layers.
        control_ties: Tokens of the control other than the oracle's choice.
        amplification: How much more of the roundings a row of logits may show than the control's rows do.
    """

    dtype: str
    assumed: bool
    logits: float
    measured: float
    ceiling: float
    scale: float
    attended: Array
    measured_attended: Array
    keys: Array
    values: Array
    inner_scale: tuple[float, float, float]
    control_ties: int
    amplification: Amplification

    def logits_limit(self, pair: bool = False) -> float:
        """The largest rms distance that a row of logits may have; `pair` for two runs of the backend."""
        if self.dtype == "float64":
            return EXACT * max(1.0, self.scale)
        return (PAIR if pair else LOGITS)[self.dtype].sigmas * self.logits

    def sigma_of(self, kind: str, layer: int = -1) -> float:
        """The noise of one entry of a row of `logits`, or of `attended`, `keys` or `values` of `layer`."""
        if kind == "logits":
            return EXACT * max(1.0, self.scale) if self.dtype == "float64" else self.logits
        if self.dtype == "float64":
            return EXACT * max(1.0, self.inner_scale[("attended", "keys", "values").index(kind)])
        return float(getattr(self, kind)[layer])

    def excuses(self, step: Step, node: int, measure: float) -> bool:
        """Whether row `node` of the logits of `step` may lie `measure` times as far off as its limit."""
        # Rows of float64 have one limit, which counts no sigmas.
        sigma = np.inf if self.dtype == "float64" else self.logits / UNIT[self.dtype]
        return self.amplification.excuses(step, node, measure, sigma)

    @property
    def choosing(self) -> bool:
        """Whether rows of the target choose experts or columns."""
        return self.amplification.control.model.chooses

    @property
    def control_at_fault(self) -> bool:
        """Whether plain decode is further from the oracle than its dtype and the target's conditioning explain."""
        exceeds = not self.assumed and not self.measured <= self.ceiling
        return exceeds and not self.amplification.excuses_control(self.measured, self.ceiling, self.dtype)

    @property
    def control_errors(self) -> Iterator[ControlError]:
        """How far plain decode lies off, for the test of a whole run."""
        if not self.assumed:
            yield from self.amplification.control_errors(self.measured, self.measured_attended, self.dtype)

    def inner_limit(self, kind: str, layer: int) -> float:
        """The largest rms distance that a row of `attended`, `keys` or `values` of `layer` may have."""
        if self.dtype == "float64":
            return EXACT * max(1.0, self.inner_scale[("attended", "keys", "values").index(kind)])
        return float(INNER[self.dtype].sigmas * getattr(self, kind)[layer])

    def expected(
        self, base: Step, variant: Step, rows: list[int], variant_rows: list[int]
    ) -> tuple[Array | None, Array]:
        """The attention outputs and logits that rows `variant_rows` of `variant` must have, by rows `rows` of `base`.

        Two runs of a backend may take other experts or columns in a row: by so much as the oracle moves with them, the
        numbers must move.
        """
        assert base.scored is not None
        attended = None if base.attended is None else base.attended.output[:, :, rows]
        logits = base.scored.logits[rows]
        pair = shift(self.amplification.control, self.amplification.oracle, base, variant)
        if pair is None:
            return attended, logits
        movement = pair[1].attended[:, :, variant_rows] - pair[0].attended[:, :, rows]
        fits = attended is not None and attended.shape == movement.shape
        return attended + movement if fits else attended, logits + pair[1].logits[variant_rows] - pair[0].logits[rows]

    def chooses_alike(
        self,
        base: Step,
        variant: Step,
        rows: list[int],
        variant_rows: list[int],
        scores_of: Callable[[int, Array], Array],
        sigma: float,
    ) -> bool:
        """Whether greedy choices at `rows` of `base` must be those at `variant_rows` of `variant`.

        They need not where other experts or columns move the arg-max, or move it near a tie. `scores_of` makes of a row
        of `base` and its logits the scores that are compared, whose noise is `sigma`.
        """
        assert base.scored is not None
        _, logits = self.expected(base, variant, rows, variant_rows)
        moved = [scores_of(row, shifted) for row, shifted in zip(rows, logits, strict=True)]
        own_scores = [scores_of(row, base.scored.logits[row]) for row in rows]
        same_choices = all(int(a.argmax()) == int(b.argmax()) for a, b in zip(moved, own_scores, strict=True))
        return same_choices and all(is_decided(row, sigma) for row in moved)

    def expected_kv(self, base: Step, variant: Step) -> Kv | None:
        """The committed columns that `variant` must leave, by the columns that `base` leaves; see `expected`."""
        assert base.committed is not None
        columns = base.committed.after
        pair = kv_shift(self.amplification.control, self.amplification.oracle, base, variant)
        if columns is None or pair is None or columns.keys.shape != pair[0].keys.shape:
            return columns
        movement = [getattr(pair[1], kind) - getattr(pair[0], kind) for kind in ("keys", "values")]
        return replace(columns, keys=columns.keys + movement[0], values=columns.values + movement[1])


def rms(array: Array) -> Array:
    """Root mean square over the last axis; NaN or infinite entries give infinity, so that the row passes no bound."""
    with np.errstate(over="ignore", invalid="ignore"):
        size = np.sqrt(np.mean(np.square(array.astype(np.float64)), axis=-1))
    return np.where(np.isfinite(size), size, np.inf)


def rows_beyond(observed: Array, expected: Array, limit: float) -> Iterator[tuple[tuple[int, ...], float]]:
    """Rows of `observed` whose rms distance to `expected` exceeds `limit`: (index, distance / limit), worst first."""
    if observed.shape != expected.shape:
        raise ValueError(f"shapes {observed.shape} and {expected.shape} cannot be compared")
    if not observed.size:
        return
    distance = rms(observed - expected)
    # A limit of zero comes from a control without any error: only equal rows pass it.
    distance = np.divide(distance, limit, out=np.where(distance > 0, np.inf, 0.0), where=limit > 0)
    for flat in np.argsort(-distance, axis=None):
        index = np.unravel_index(int(flat), distance.shape)
        if distance[index] <= 1:
            return
        yield tuple(int(part) for part in index), float(distance[index])


def chain(tokens: tuple[int, ...]) -> Tree:
    """The tree without branches that holds `tokens`, the first token as its root."""
    return Tree((0, *range(len(tokens) - 1)), tokens)


def chain_step(context: tuple[int, ...], tokens: tuple[int, ...]) -> Step:
    """A step that scores `tokens` one by one behind `context`, for `Noise.excuses`: row i is that of token i."""
    return Step(context, Drafted(chain(tokens)))


def forced_logits(case: Case, oracle: Oracle, output: tuple[int, ...]) -> Array:
    """The oracle's logits [len(output), V] before each token of `output`, with the tokens before it given."""
    tree = chain((case.prompt[-1], *output[:-1]))
    step = oracle(case.rebased(case.prefix, tree)).steps[0]
    assert step.scored is not None
    return step.scored.logits


def true_step(case: Case, oracle: Oracle, step: Step, number: int) -> Step:
    """The oracle's step from the state in which the backend began `step`, so that each step is judged by itself."""
    if step.drafted is None:
        raise Unobserved("the backend does not reveal its trees")
    oracle = follow_step(case, oracle, step)
    oracle_run = oracle(case)
    if number < len(oracle_run.steps):
        own_step = oracle_run.steps[number]
        # The oracle's own run went the same way: its step is the answer and costs nothing.
        if (
            own_step.context == step.context
            and own_step.drafted is not None
            and own_step.drafted.tree == step.drafted.tree
        ):
            return own_step
    return oracle(case.rebased(step.context, step.drafted.tree)).steps[0]


def noise(case: Case, oracle: Oracle, subject: Subject) -> Noise:
    """Measure the control: plain decode against the oracle on the same tokens, once per prompt, model and dtype.

    Where the subject `assumes_noise`, it is the a-priori size on the tokens of the case's own run, but for long runs of
    float32 (`ASSUMED_POSITIONS`).
    """
    plain = replace(case.plain_decode(), sampling=Sampling())
    if isinstance(case.model, Checkpoint):  # so that it is the run without padding, which is dear and asked anyway
        plain = replace(plain, layout=replace(plain.layout, padded_nodes=0))
    wanted = 0 if case.dtype == "float64" else CONTROL_TOKENS // subject.variant_interval
    tokens = max(FEWEST_CONTROL_TOKENS, wanted)
    stops = replace(plain.stops, max_new_tokens=min(plain.stops.max_new_tokens, tokens))
    control = plain if plain.stops == stops else replace(plain, stops=stops)
    has_exact_angles = case.dtype == "float64" or case.longest <= ASSUMED_POSITIONS
    assumes_noise = subject.assumes_noise and case.dtype in ASSUMED and has_exact_angles
    own_run = subject.remembered(case) if assumes_noise else None
    if own_run is not None:
        # A token outside the vocabulary, which only a wrong engine emits, has no row.
        output = tuple(takewhile(lambda token: 0 <= token < case.model.vocab_size, own_run.output[:tokens]))
        run = Trace((), output, None)
        measured = subject.compute_once(
            ("assumed noise", control, output), lambda: _measure(control, run, oracle, assumed=True)
        )
    else:
        measured = subject.compute_once(
            ("noise", control), lambda: _measure(control, _control_run(control, plain, subject), oracle)
        )
    assert isinstance(measured, Noise)
    return measured


def _control_run(control: Case, plain: Case, subject: Subject) -> Trace:
    """The run of `control`: the first tokens of a run of `plain` that is remembered, or a run of its own.

    Without steps where the run broke: another invariant reports that, and only the a-priori floors remain.
    """
    whole, tokens = subject.remembered(plain), control.stops.max_new_tokens
    # A step of plain decode emits one token; where steps are not shown, nothing could be cut.
    if whole is not None and control != plain and len(whole.steps) == len(whole.output):
        return replace(whole, steps=whole.steps[:tokens], output=whole.output[:tokens])
    try:
        return subject(control)
    except NoTrace:
        return Trace((), (), None)


def _measure(control: Case, run: Trace, oracle: Oracle, assumed: bool = False) -> Noise:
    """The noise by `run`, that of `control`; if it is `assumed`, by the a-priori size on the tokens of `run`."""
    oracle = follow(control, oracle, run.steps)
    output = run.output or (control.prompt[-1],)
    tree = chain((control.prompt[-1], *output[:-1]))
    step = oracle(control.rebased(control.prefix, tree)).steps[0]
    assert step.scored is not None
    expected = step.scored.logits
    scale = float(np.sqrt(np.mean(np.square(expected))))
    rows = [decode_step.scored.logits[0] for decode_step in run.steps if decode_step.scored is not None]
    measured = 0.0
    # Arrays of other shapes cannot be measured; the invariant that compares them reports the shape.
    if len(rows) == len(expected) and all(row.shape == expected[0].shape for row in rows):
        measured = float(np.sqrt(np.mean(np.square(rms(np.stack(rows) - expected)))))
    choices = () if assumed else run.output
    ties = sum(int(token) != int(row.argmax()) for token, row in zip(choices, expected, strict=False))
    inner = _inner(control, oracle, run, step)
    layers = len(inner["attended"][0])
    low, high = (factor * np.sqrt(layers) * UNIT[control.dtype] for factor in PRIOR[control.dtype])
    measured = low * scale if assumed else measured
    # Rotary tables are float32 in 16-bit models too. Their angles are off by up to one float32 unit roundoff per
    # position, in the control as in the tree.
    rotary_error = control.longest * min(UNIT[control.dtype], UNIT["float32"])
    amplification = Amplification(control, tree, oracle)
    ceilings = {kind: np.full(layers, (SANITY * high + rotary_error) * size.max()) for kind, (_, size) in inner.items()}
    # Where vocabulary and prompt are small, both rms come from few numbers: grant three deviations of their ratio.
    small_sample = 1.0 + 3.0 / np.sqrt(expected.size)
    ceiling = SANITY * high * scale * small_sample if control.dtype != "float64" else EXACT * max(1.0, scale)
    excused = measured > ceiling and amplification.excuses_control(measured, ceiling, control.dtype)
    # Conditioning explains attention outputs only where it explains the logits behind them too.
    if excused or measured <= ceiling:
        for layer, error in enumerate(inner["attended"][0]):
            if error > ceilings["attended"][layer]:
                explained = amplification.control_cap(control.dtype, layer)
                ceilings["attended"][layer] = max(ceilings["attended"][layer], min(error, explained))
    floors = {
        kind: np.clip(error, low * np.maximum(size, 1e-3 * size.max()), ceilings[kind])
        for kind, (error, size) in inner.items()
    }
    sizes = [float(np.sqrt(np.mean(np.square(inner[kind][1])))) for kind in ("attended", "keys", "values")]
    return Noise(
        dtype=control.dtype,
        assumed=assumed,
        # Capped: a fault that control and tree share would otherwise widen its own tolerance.
        # What the target's conditioning explains is no fault.
        logits=min(max(measured, low * scale), max(measured if excused else ceiling, low * scale)),
        measured=measured,
        ceiling=ceiling,
        scale=scale,
        attended=floors["attended"],
        measured_attended=inner["attended"][0],
        keys=floors["keys"],
        values=floors["values"],
        inner_scale=(sizes[0], sizes[1], sizes[2]),
        control_ties=ties,
        amplification=amplification,
    )


def _inner(control: Case, oracle: Oracle, run: Trace, step: Step) -> dict[str, tuple[Array, Array]]:
    """For attended, keys and values: the control's rms error and the oracle's rms, each per layer."""
    assert step.attended is not None
    expected = step.attended.output
    rows = [decode_step.attended.output for decode_step in run.steps if decode_step.attended is not None]
    table = {"attended": (np.zeros(len(expected)), _per_layer(expected))}
    fit = all(row.shape[:2] + row.shape[3:] == expected.shape[:2] + expected.shape[3:] for row in rows)
    if fit and sum(row.shape[2] for row in rows) == expected.shape[2]:
        table["attended"] = (_per_layer(np.concatenate(rows, axis=2) - expected), _per_layer(expected))
    committed_tokens = (control.prompt + run.output)[:-1]
    last_commit = run.steps[-1].committed if run.steps else None
    oracle_commit = oracle(kv_case(control, committed_tokens)).steps[0].committed
    assert oracle_commit is not None
    for kind in ("keys", "values"):
        if oracle_commit.before is None or not committed_tokens:
            table[kind] = (np.zeros(len(expected)), np.ones(len(expected)))
            continue
        columns = getattr(oracle_commit.before, kind)
        error = np.zeros(len(columns))
        if (
            last_commit is not None
            and last_commit.after is not None
            and getattr(last_commit.after, kind).shape == columns.shape
        ):
            error = _per_layer(getattr(last_commit.after, kind) - columns, last_commit.after.first)
        table[kind] = (error, _per_layer(columns))
    return table


def _per_layer(array: Array, first: tuple[int, ...] = ()) -> Array:
    """Rms of each layer, [layers]; for KV, without the columns before `first`, which the layer no longer holds."""
    if first:
        layers = [layer[:, begin:].reshape(-1) for layer, begin in zip(array, first, strict=True)]
        return np.array([float(rms(layer)) if layer.size else 0.0 for layer in layers])
    return np.asarray(rms(array.reshape(len(array), -1)))


def kv_case(case: Case, tokens: tuple[int, ...]) -> Case:
    """The case whose first step begins with the KV of exactly `tokens` committed; read `before` in its trace."""
    return case.rebased(tokens, Tree((0,), (case.prompt[-1],)))


def kv_behind(case: Case, oracle: Oracle, tokens: tuple[int, ...], number: int) -> Kv | None:
    """The oracle's KV of `tokens`: that of its own step `number`, if this begins behind them, or of `kv_case`."""
    for step in oracle(case).steps[number : number + 1]:
        if step.context == tokens and step.committed is not None and step.committed.before is not None:
            return step.committed.before
    record = oracle(kv_case(case, tokens)).steps[0].committed
    return None if record is None else record.before


def draft_kv_case(case: Case, tokens: tuple[int, ...]) -> Case:
    """`kv_case` for the draft model of `case`, which then runs as a target."""
    assert case.draft.model is not None
    return kv_case(case.drafting_case, tokens)
