"""The invariant of trees by batch size: each step has its batch's tree."""

from collections.abc import Iterator

from specverify.properties.invariants.rows import with_place
from specverify.properties.verdict.finding import Comparisons, Finding
from specverify.properties.verdict.invariant import Fact, Invariant, NotApplicable, Oracle, Unobserved, needing
from specverify.properties.verdict.session_members import members
from specverify.properties.verdict.subject import Subject
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.draft_trees import tree_description
from specverify.reference.oracle.draft.level_by_level import tree_of_step
from specverify.reference.oracle.lowering import cut_to_chunk
from specverify.reference.trace import Drafted, Stage, Trace
from specverify.reference.tree import RankTree, Shape, Tree

NAME = "draft.dispatch"


def trees_by_batch(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """The tree of each step is the one that the table gives for the number of requests that took the step.

    A request of a session is judged as the case that it would be alone, whose draft is told the sizes of its batches
    (`properties/verdict/session_members.py`): they follow from the session's actions, and not from the engine's count.
    """
    if case.session is None:
        yield from _compare_trees(case, subject(case))
        return
    trace = subject(case)
    if trace.shared is None or not trace.shared.accounts:
        raise Unobserved("the trace does not say which requests took a step together")
    for member in members(case, trace):
        if member.alone.draft.dispatch is not None:
            for fact in _compare_trees(member.alone, member.trace):
                yield with_place(fact, request=member.number)
                if isinstance(fact, Finding):
                    return


def _compare_trees(case: Case, trace: Trace) -> Iterator[Fact]:
    table = case.draft.dispatch
    assert table is not None
    for number, step in enumerate(trace.steps):
        if step.drafted is None:
            continue
        # A head has no row before the first state, and proposes the bare root, which draft.fidelity judges.
        if case.draft.reads is not None and not step.context:
            yield Comparisons(0)
            continue
        shape = tree_of_step(table, number)
        tree = step.drafted.tree
        expected: Shape = _cut_to_chunk(case, shape, len(step.context))
        yield Comparisons(len(expected))
        if tree.parent != expected.parent:
            size = table.batches[min(number, len(table.batches) - 1)] if table.batches else 1
            where: dict[str, int | str] = {"side": f"batch of {size}"}
            yield Finding(
                NAME,
                Stage.DRAFTED,
                number,
                where,
                f"{_parents_line(expected)}, of {tree_description(shape)}",
                _parents_line(tree),
            )
            return


def _cut_to_chunk(case: Case, shape: RankTree, position: int) -> Shape:
    """The part of `shape`, whose root is at `position`, that stays where trees are cut to the root's chunk."""
    if not case.layout.stay_in_chunk:
        return shape
    if not isinstance(case.model, Seeded):
        raise NotApplicable("where the tree was cut is known of built-in models alone")
    drafted = Drafted(Tree(shape.parent, (0,) * len(shape)))
    return cut_to_chunk(drafted, position, case.model.architecture).tree


def _parents_line(shape: Shape) -> str:
    return f"parents {' '.join(map(str, shape.parent))}"


def _has_table(case: Case) -> bool:
    mates = () if case.session is None else case.session.mates
    return any(draft.dispatch is not None for draft in (case.draft, *(mate.draft for mate in mates)))


INVARIANTS = (
    Invariant(
        NAME,
        "Where a table gives trees by batch size, each step has the tree of the number of requests that took it.",
        needing(Stage.DRAFTED),
        trees_by_batch,
        _has_table,
        speaks_of="both",
    ),
)
