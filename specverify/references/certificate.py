"""Certificate: rows of a reference on a device, computed again by NumPy, which stays the truth.

Of each judged case some rows are certified: those whose two best tokens lie nearest together, and others by the run's
seed; of a case with a finding, many more. NumPy runs all rows of a case in one tree below the prompt, by its own code
and from its own reading of the weights, of which a checkpoint's lie in memory a layer at a time.

A row agrees within AGREES of its largest number. The bound has a source: a sum of n products in floating point is the
exact sum of factors changed by at most gamma(n) = n u / (1 - n u), in whatever order it is taken, where u = 2**-53
(Higham, Accuracy and Stability of Numerical Algorithms, 2nd edition, eq. 3.4). So two orders lie within 2 gamma(n) of
each other, which exceeds AGREES where n exceeds some 4,500. And a row may be further off only as far as a change of all
weights by 2 gamma(n) moves it, which NumPy measures where a row is beyond the bound (`amplification`).
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from specverify.properties.verdict.finding import CertifiedRows, Verdict
from specverify.reference.architecture import Checkpoint, Model
from specverify.reference.case import Case
from specverify.reference.malformed import Malformed
from specverify.reference.oracle.amplification import RowMovements, amplification
from specverify.reference.oracle.choices import KINDS, RowChoices
from specverify.reference.oracle.decoder import Oracle as NumpyOracle
from specverify.reference.oracle.evaluator import Evaluator
from specverify.reference.oracle.model import Nodes
from specverify.reference.oracle.parameters import Parameters, load, parameters_by_layer
from specverify.reference.oracle.scored_choices import with_choices
from specverify.reference.oracle.shared_prefix import SharedPrefix
from specverify.reference.trace import Array, Trace
from specverify.reference.tree import Tree

AGREES = 1e-12
"""The most by which a number of a row may differ, over the row's largest number."""

ROWS = 8
"""Rows of a case that are certified, half of them those nearest to a tie."""

ROWS_ON_CHECKPOINT = 24
"""The same of a case on a checkpoint: reading the weights costs more than so many rows."""

CASES_PER_CERTIFICATE = 3
"""Of the cases on a checkpoint one in so many is certified, by the seed, so that as many rows are as of drawn cases."""

ROWS_IN_DOUBT = 64
"""The same of a case with a finding, where it has as many."""

CASES_IN_DOUBT = 4
"""Runs of such a case that are certified: its own, and those of requests and variants beside it."""

UNIT_ROUNDOFF = 2.0**-53

LEAST = 1e-300
"""What stands for the largest number of a row of zeros."""


class ReferenceDisagrees(Exception):
    """The reference and NumPy differ beyond the bound: no verdict of the run counts."""


@dataclass(frozen=True)
class Row:
    """A row of a run.

    Attributes:
        text: The tokens from the prompt's last one to the row's own.
        logits: The reference's logits, [vocabulary].
        attended: The reference's attention outputs, [layers, heads, value_dim].
    """

    text: tuple[int, ...]
    logits: Array
    attended: Array

    @property
    def doubt(self) -> float:
        """How near the two best tokens lie, over the largest logit."""
        if len(self.logits) < 2:
            return float("inf")
        second, best = np.partition(self.logits, -2)[-2:]
        return float((best - second) / max(LEAST, np.abs(self.logits).max()))

    def difference(self, computed: Nodes, node: int) -> float:
        """The largest difference from the numbers that NumPy computed at `node`, over the largest of its row.

        Attention outputs of a layer are one row.
        """
        pairs = [(self.logits, computed.logits[node])]
        pairs += zip(self.attended, computed.attended[:, :, node], strict=True)
        ratios = [np.abs(ours - numpys).max() / max(LEAST, np.abs(numpys).max()) for ours, numpys in pairs if ours.size]
        return float(max(ratios, default=0.0))

    def is_explained(self, computed: Nodes, moved: RowMovements, node: int, change: float) -> bool:
        """Whether a relative change of all weights by `change` moves the row as far as the two differ, in rms."""
        logits_off = _rms(self.logits - computed.logits[node])
        attended_off = np.sqrt(np.mean(np.square(self.attended - computed.attended[:, :, node]), axis=-1))
        limits = change * moved.attended[:, :, node]
        return bool(logits_off <= change * moved.logits[node] and (attended_off <= limits).all())


def _rms(numbers: Array) -> float:
    return float(np.sqrt(np.mean(np.square(numbers))))


class Runs:
    """The runs that a reference made since its rows were last certified.

    Attributes:
        num_rows: The rows of all of them.
        latest: The cases of the latest ones.
    """

    def __init__(self, keep: int = 16) -> None:
        self.num_rows = 0
        self.latest: deque[Case] = deque(maxlen=keep)

    def add(self, case: Case, trace: Trace) -> None:
        """Note a run."""
        self.num_rows += sum(len(step.drafted.tree) for step in trace.steps if step.drafted is not None)
        self.latest.append(case)

    def clear(self) -> None:
        """Forget the runs."""
        self.num_rows = 0
        self.latest.clear()


class RecordingOracle(NumpyOracle):
    """An oracle that records its runs."""

    def __init__(self, evaluator: Callable[[Parameters], Evaluator], keep: int = 64) -> None:
        super().__init__(evaluator, keep)
        self.runs = Runs()

    def _run(self, case: Case) -> Trace:
        trace = super()._run(case)
        self.runs.add(case, trace)
        return trace


class _OracleByLayer(NumpyOracle):
    """The NumPy oracle, which reads the weights of a checkpoint a layer at a time."""

    def _load(self, model: Model, dtype: str) -> Parameters:
        return parameters_by_layer(model, dtype) if isinstance(model, Checkpoint) else load(model, dtype)


class Certificate:
    """NumPy's certificate for the rows of a run's reference.

    Args:
        name: The reference, as `--reference` names it.
        oracle: The reference.
        seed: The run's seed, by which rows are chosen.
        runs: Runs of a case without a finding that are certified; with more than one, the case's own is among them.
    """

    def __init__(self, name: str, oracle: RecordingOracle, seed: int, runs: int = 1) -> None:
        self._name = name
        self._oracle = oracle
        self._runs = runs
        self._choice = np.random.default_rng(seed)
        self._numpy = _OracleByLayer()
        self._num_certified = 0

    def certify(self, verdict: Verdict) -> Verdict:
        """`verdict` with the counts of the reference's rows, after some of them were certified.

        Raises:
            ReferenceDisagrees: NumPy computes other numbers.
        """
        recorded = self._oracle.runs
        counts = CertifiedRows(judged=recorded.num_rows)
        if not verdict.findings and not self._takes_turn(verdict.case):
            recorded.clear()
            return replace(verdict, reference_rows=counts)
        # The case itself if it ran alone, before requests and variants that were asked beside it.
        others = [case for case in recorded.latest if case != verdict.case]
        shuffled = [others[int(place)] for place in self._choice.permutation(len(others))]
        is_remembered = (bool(verdict.findings) or self._runs > 1) and verdict.case.session is None
        own = [verdict.case] if is_remembered or verdict.case in recorded.latest else []
        for case in [*own, *shuffled][: CASES_IN_DOUBT if verdict.findings else self._runs]:
            try:
                trace = self._oracle(case)
            except Malformed:  # a case that no reference runs, such as one on which the engine broke
                continue
            most = ROWS_ON_CHECKPOINT if isinstance(case.model, Checkpoint) else ROWS
            chosen = self._choose(rows_of(trace), ROWS_IN_DOUBT if verdict.findings else most)
            if chosen:
                counts = counts + CertifiedRows(0, len(chosen), self._widest_difference(case, chosen))
        recorded.clear()
        self._num_certified += counts.certified
        return replace(verdict, reference_rows=counts)

    def _takes_turn(self, case: Case) -> bool:
        """Whether a case without a finding is certified: on a checkpoint the first ones, and others by the seed."""
        if not isinstance(case.model, Checkpoint) or self._num_certified < ROWS_ON_CHECKPOINT:
            return True
        return int(self._choice.integers(CASES_PER_CERTIFICATE)) == 0

    def _choose(self, rows: list[Row], most: int) -> list[Row]:
        """At most `most` of the rows: half of them those nearest to a tie, the others by the seed."""
        doubtful = sorted(rows, key=lambda row: row.doubt)
        near, others = doubtful[: most // 2], doubtful[most // 2 :]
        order = self._choice.permutation(len(others))[: most - most // 2]
        return near + [others[int(place)] for place in order]

    def _widest_difference(self, case: Case, rows: list[Row]) -> float:
        """The largest difference of the rows from NumPy's, over a row's largest number.

        Raises:
            ReferenceDisagrees: It is beyond the bound.
        """
        context = case.prefix
        tree, nodes_of_rows = tree_of([row.text for row in rows])
        parameters = self._numpy.model(case.model, case.dtype).parameters
        computed = self._numpy.model(case.model, case.dtype).nodes(context, tree)
        differences = np.array([row.difference(computed, node) for row, node in zip(rows, nodes_of_rows, strict=True)])
        gamma = dot_bound(longest_sum(parameters, len(context) + len(tree)))
        bound = max(AGREES, 2 * gamma)
        if differences.max() <= bound:
            return float(differences.max())
        choices = self._tied_choices(case, context, tree, bound)
        if choices.present:
            # NumPy computes the rows with what the reference chose.
            parameters = with_choices(parameters, context, tree, choices)
            computed = SharedPrefix(parameters).nodes(context, tree)
        moved = amplification(SharedPrefix, parameters, context, tree)
        assert moved is not None
        pairs = list(zip(rows, nodes_of_rows, strict=True))
        differences = np.array([row.difference(computed, node) for row, node in pairs])
        is_beyond = ~(differences <= bound)  # a number that is none lies beyond
        for place in np.flatnonzero(is_beyond):
            row, node = pairs[int(place)]
            is_beyond[place] = not row.is_explained(computed, moved, node, 2 * gamma)
        if is_beyond.any():
            worst = int(np.argmax(np.where(is_beyond, differences, 0.0)))
            raise ReferenceDisagrees(
                f"--reference {self._name}: NumPy computes other numbers in {int(is_beyond.sum())} of {len(rows)} "
                f"certified rows of case {case.id}: row {rows[worst].text} differs by {differences[worst]:.2g} of its "
                f"largest number, beyond {bound:.2g}; no verdict of this run counts"
            )
        return float(differences.max())

    def _tied_choices(self, case: Case, context: tuple[int, ...], tree: Tree, bound: float) -> RowChoices:
        """The experts and columns that the reference chose, where NumPy's scores tie with its own within `bound`."""
        tied = {}
        for kind in KINDS:
            ours = self._oracle.scored_choices(kind, case, context, tree)
            theirs = self._numpy.scored_choices(kind, case, context, tree)
            if ours is not None and theirs is not None and theirs.gaps(ours.chosen).max() <= bound:
                tied[kind] = ours.chosen
        return RowChoices(**tied)


def rows_of(trace: Trace) -> list[Row]:
    """The rows of a run, each text once."""
    rows: dict[tuple[int, ...], Row] = {}
    prefix = len(trace.steps[0].context) if trace.steps else 0
    for step in trace.steps:
        assert step.drafted is not None
        assert step.scored is not None
        assert step.attended is not None
        for node in range(len(step.drafted.tree)):
            text = (*step.context[prefix:], *step.drafted.tree.tokens_to(node))
            rows[text] = Row(text, step.scored.logits[node], step.attended.output[:, :, node])
    return list(rows.values())


def tree_of(texts: list[tuple[int, ...]]) -> tuple[Tree, list[int]]:
    """A tree that holds every text as a path from its root, and the node at the end of each; all begin alike.

    >>> tree_of([(5, 1), (5, 2, 1), (5, 2)])
    (Tree(parent=(0, 0, 0, 2), token=(5, 1, 2, 1)), [1, 3, 2])
    """
    nodes: dict[tuple[int, ...], int] = {}
    parents: list[int] = []
    for text in texts:
        for length in range(1, len(text) + 1):
            if text[:length] not in nodes:
                nodes[text[:length]] = len(parents)
                parents.append(nodes.get(text[: length - 1], 0))
    return Tree(tuple(parents), tuple(text[-1] for text in nodes)), [nodes[text] for text in texts]


def dot_bound(length: int) -> float:
    """gamma(n): how far factors of a sum of `length` products are changed at most by the roundings of the sum."""
    return length * UNIT_ROUNDOFF / (1 - length * UNIT_ROUNDOFF)


def longest_sum(parameters: Parameters, columns: int) -> int:
    """The most terms of a sum in the model: of a matrix product, or over the columns of attention."""
    arch = parameters.architecture
    joined_heads = arch.heads * max(arch.widest.value_dim, arch.widest.head_dim)
    return max(arch.hidden_size, arch.intermediate_size, joined_heads, columns)
