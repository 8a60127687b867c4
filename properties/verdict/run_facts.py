"""The facts of a run that its record holds: tokens, trees, accepted paths."""

from dataclasses import dataclass

from specverify.reference.trace import Trace


@dataclass(frozen=True)
class RunFacts:
    """Facts of a run without its numbers.

    Attributes:
        tokens: The output; of a session, that of request 0.
        nodes: Drafted nodes of each tree, without its root; empty where the run does not show its trees.
        height: Levels below the root of each tree.
        emitted: Tokens that each step brought.
        paths: Accepted rows of each tree, from the root on.
        draft_calls: Forwards of the draft; None where the run does not count them.
    """

    tokens: tuple[int, ...]
    nodes: tuple[int, ...] = ()
    height: tuple[int, ...] = ()
    emitted: tuple[int, ...] = ()
    paths: tuple[tuple[int, ...], ...] = ()
    draft_calls: int | None = None


def run_facts(trace: Trace) -> RunFacts:
    """The facts of the run that `trace` shows."""
    trees = [step.drafted.tree for step in trace.steps if step.drafted is not None]
    return RunFacts(
        tuple(trace.output),
        tuple(len(tree) - 1 for tree in trees),
        tuple(tree.height for tree in trees),
        tuple(len(step.emitted.tokens) for step in trace.steps if step.emitted is not None),
        tuple(tuple(step.accepted.path) for step in trace.steps if step.accepted is not None),
        None if trace.accounting is None else trace.accounting.draft_calls,
    )
