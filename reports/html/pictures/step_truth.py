"""The step of a failure beside the oracle's numbers for it.

The verdict is made already: nothing here changes it. The oracle runs once more, on the backend's own context and tree.
"""

from dataclasses import dataclass

from specverify.properties.tally import Failure
from specverify.properties.tolerance.closeness import kv_case
from specverify.properties.verdict.finding import Finding
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.malformed import Malformed
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.oracle.model import Inputs
from specverify.reference.trace import Kv, Step
from specverify.reference.tree import Tree
from specverify.reports.tree_scene import Scene, request_of, scene_of

MOST_COLUMNS = 2048
"""The longest context with its tree, in columns, for which the oracle runs again."""


@dataclass(frozen=True)
class StepTruth:
    """A step of the backend, and the same step by the oracle.

    Attributes:
        case: The request as a case of its own.
        scene: The tree, the accepted path and the node of the finding.
        step: The backend's step; None where its trace shows none.
        true: The oracle's step after the same context and tree, or None.
        inputs: The inputs of attention at each column by the oracle, or None.
        after: The keys and values that must be committed after the step, or None.
        why: Why the oracle's numbers are missing; empty where they are there.
    """

    case: Case
    finding: Finding
    scene: Scene
    step: Step | None
    oracle_step: Step | None = None
    inputs: Inputs | None = None
    after: Kv | None = None
    why: str = ""

    @property
    def tree(self) -> Tree | None:
        """The tree of the step."""
        return self.scene.tree

    @property
    def committed_tokens(self) -> tuple[int, ...]:
        """The tokens whose keys and values must be committed after the step; empty where the trace does not say."""
        if self.step is None or self.step.emitted is None or self.tree is None:
            return ()
        return (*self.step.context, self.tree.token[0], *self.step.emitted.tokens)[:-1]


def step_truth(failure: Failure) -> StepTruth:
    """The step of a failure's finding, with the oracle's numbers where the oracle was the run's reference."""
    finding = failure.finding
    case, steps = request_of(failure.verdict, finding)
    scene = scene_of(failure.verdict, finding)
    step = steps[finding.step] if 0 <= finding.step < len(steps) else None
    truth = StepTruth(case, finding, scene, step)
    if step is None or step.drafted is None:
        return _without_oracle(truth, "the backend's trace does not show this step's tree")
    if failure.against is not None:
        return _without_oracle(truth, "another reference stood in the oracle's place")
    if not isinstance(case.model, Seeded):
        return _without_oracle(truth, "the numbers of a checkpoint are not computed again for a page")
    if len(step.context) + len(step.drafted.tree) > MOST_COLUMNS:
        return _without_oracle(truth, "the context is too long to compute its numbers again for a page")
    oracle, tree = Oracle(), step.drafted.tree
    try:
        true = oracle(case.rebased(step.context, tree)).steps[0]
        inputs = oracle.inputs(case, step.context, tree)
        commit = oracle(kv_case(case, truth.committed_tokens)).steps[0].committed if truth.committed_tokens else None
    except Malformed as problem:
        return _without_oracle(truth, f"the oracle does not take this step: {problem}")
    committed_kv = commit.before if commit is not None else None
    return StepTruth(case, finding, scene, step, true, inputs, committed_kv)


def _without_oracle(truth: StepTruth, reason: str) -> StepTruth:
    return StepTruth(truth.case, truth.finding, truth.scene, truth.step, why=reason)
