"""Invariants of attention numbers: each node computes its own path, nothing else.

A node's numbers are its attention outputs and its logits. `context_exact` compares them with the oracle's. The other
invariants run a variant that must keep the numbers: renumbered nodes, a removed subtree, padding rows, another cut of
the prefill, a path decoded as a chain.
"""

from collections.abc import Iterator
from dataclasses import replace

from specverify.properties.invariants.rows import (
    attended_beyond,
    committed_reads,
    compare_kv,
    compare_rows,
    logits_beyond,
)
from specverify.properties.tolerance.closeness import Noise, noise, true_step
from specverify.properties.tolerance.mask_column import mask_column
from specverify.properties.verdict.finding import CONTROL, Comparisons, Finding, Reads
from specverify.properties.verdict.invariant import TURNS, Fact, Invariant, NotApplicable, Oracle, needing
from specverify.properties.verdict.subject import Subject
from specverify.properties.verdict.variants import dice, focus, run_first_step, shuffled_order, tree_of, without_subtree
from specverify.reference.case import Case
from specverify.reference.trace import Array, Stage, Step
from specverify.reference.tree import Tree

NEEDS = needing(Stage.DRAFTED, Stage.SCORED)

CHAIN_NODES = 3
"""Number of nodes, from the end of a path, that `tree_equals_chain` decodes alone."""


def context_exact(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """Attention outputs and logits of each node are the oracle's, within rule N.

    The error of the control (plain decode by the same backend) is bounded too.
    """
    name = "attention.context-exact"
    error = noise(case, oracle, subject)
    yield from error.control_errors
    has_finding = False
    for number, step in enumerate(subject(case).steps):
        if step.scored is None:
            continue
        true = true_step(case, oracle, step, number)
        if step.attended is not None and true.attended is not None:
            for fact in attended_beyond(name, number, step, true.attended.output, error):
                if isinstance(fact, Finding):
                    has_finding = True
                    fact = _with_column(case, oracle, true, step.attended.output, fact, error)
                yield fact
        assert true.scored is not None
        for fact in logits_beyond(name, number, step, true.scored.logits, error):
            has_finding = has_finding or isinstance(fact, Finding)
            yield fact
    if not has_finding and error.control_at_fault:
        # Reported only where no tree step is wrong: a wrong tree step locates a fault better than the control does.
        yield _control_finding(name, error)


def _control_finding(name: str, error: Noise) -> Finding:
    """The finding that plain decode is at fault; where experts are not shown, with the rows that tied ones may move."""
    finding = Finding(name, Stage.SCORED, 0, {"side": CONTROL}, error.ceiling, error.measured)
    if not error.choosing:
        return finding
    control, tree = error.amplification.control, error.amplification.tree
    rebased = control.rebased(control.prefix, tree)

    def rows(oracle: Oracle) -> Array | None:
        scored = oracle(rebased).steps[0].scored
        return None if scored is None else scored.logits.reshape(-1)

    reads = Reads(control, control.prefix, tree, None, None, error.ceiling, rows)
    return replace(finding, measure=error.measured / error.ceiling, reads=reads)


def _with_column(case: Case, oracle: Oracle, true: Step, attended: Array, finding: Finding, error: Noise) -> Finding:
    """The finding, with the KV column that explains it among its coordinates, if a single column does."""
    if finding.where.get("side") == "shape":
        return finding
    layer, head, node = (int(finding.where[name]) for name in ("layer", "head", "node"))
    # A column explains the finding only if it moves the row by more than the noise of this layer.
    limit = error.inner_limit("attended", layer)
    cause = mask_column(case, oracle, true, attended[layer, head, node], (layer, head, node), limit)
    return replace(finding, where={**finding.where, **cause})


def order_equivariant(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """After the tree's rows are put in another order, each node keeps its numbers."""
    step_case = focus(case, subject)
    order = shuffled_order(step_case)
    reordered = step_case.rebased(step_case.prefix, tree_of(step_case).renumber(order))
    error = noise(case, oracle, subject)
    yield from compare_rows(
        "attention.order-equivariant",
        run_first_step(step_case, subject),
        run_first_step(reordered, subject),
        list(order),
        list(range(len(order))),
        error,
        f"rows in order {list(order)}",
    )


def subtree_removal(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """After a subtree is removed, the remaining nodes keep their numbers."""
    step_case = focus(case, subject)
    smaller, kept_nodes = without_subtree(step_case)
    yield from compare_rows(
        "attention.subtree-removal",
        run_first_step(step_case, subject),
        run_first_step(smaller, subject),
        list(kept_nodes),
        list(range(len(kept_nodes))),
        noise(case, oracle, subject),
        f"without nodes {[node for node in range(len(tree_of(step_case))) if node not in kept_nodes]}",
    )


def padding_inert(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """With padding rows behind the tree, numbers and committed KV stay: padding is neither read nor committed."""
    step_case = focus(case, subject)
    extra = int(dice(step_case, "padding").integers(1, 9))
    padded = replace(step_case, layout=replace(step_case.layout, padded_nodes=len(tree_of(step_case)) + extra))
    # The case itself may be padded; the comparison is with a tree without any padding.
    bare = replace(step_case, layout=replace(step_case.layout, padded_nodes=0))
    yield from _same_step("attention.padding-inert", case, oracle, subject, bare, padded, f"{extra} padding rows")


def prefix_split(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """With the prefix prefilled in pieces instead of at once, the tree's numbers and the committed KV stay."""
    step_case = focus(case, subject)
    if len(step_case.prefix) < 2:
        raise NotApplicable("a prefix of one token has one way to be prefilled")
    width = int(dice(step_case, "split").integers(1, len(step_case.prefix)))
    # 0 prefills the prefix at once.
    at_once = replace(step_case, layout=replace(step_case.layout, prefill_chunk=0))
    in_pieces = replace(step_case, layout=replace(step_case.layout, prefill_chunk=width))
    yield from _same_step("attention.prefix-split", case, oracle, subject, at_once, in_pieces, f"prefill by {width}")


def tree_equals_chain(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """Rule D: a node decoded alone, after the tokens of its path, has the numbers that it has in the tree.

    The two runs may differ by the noise of a pair of runs. In 16 bits that bound is wide: a difference between half
    the bound and the bound is suspect, but it is left to rule N and to the invariants that compare bits.
    """
    step_case = focus(case, subject)
    tree = tree_of(step_case)
    if len(tree) < 2:
        raise NotApplicable("the bare root is decoded alone already")
    error = noise(case, oracle, subject)
    step = run_first_step(step_case, subject)
    for node in tree.path(int(dice(step_case, "chain").integers(1, len(tree))))[-CHAIN_NODES:]:
        path_tokens = tuple(tree.token[ancestor] for ancestor in tree.path(node)[:-1])
        alone = step_case.rebased((*step_case.prefix, *path_tokens), Tree((0,), (tree.token[node],)))
        alone_step = run_first_step(alone, subject, extends=True)
        yield from compare_rows("attention.tree-equals-chain", step, alone_step, [node], [0], error, "decoded alone")


def _same_step(
    name: str, case: Case, oracle: Oracle, subject: Subject, base_case: Case, variant_case: Case, variant: str
) -> Iterator[Finding | Comparisons]:
    """Findings where two one-step cases with the same tree differ in numbers or in committed KV."""
    error = noise(case, oracle, subject)
    base, variant_step = run_first_step(base_case, subject), run_first_step(variant_case, subject)
    rows = list(range(len(tree_of(base_case))))
    if base_case == variant_case:
        raise NotApplicable("the variant is the case itself")
    facts = list(compare_rows(name, base, variant_step, rows, rows, error, variant))
    yield from facts
    differs = any(isinstance(fact, Finding) for fact in facts)
    # Wrong KV after wrong numbers, or after another accepted path, is a consequence and no finding of its own.
    if differs or base.committed is None or variant_step.committed is None or base.accepted != variant_step.accepted:
        return
    # Slack 2: each of the two runs has an error of its own.
    true = error.expected_kv(base, variant_step)
    reads = committed_reads(error, base)
    yield from compare_kv(name, 0, true, variant_step.committed.after, error, {"variant": variant}, 2.0, reads=reads)


INVARIANTS = (
    Invariant(
        "attention.context-exact",
        "Each node's attention outputs and logits are those of running its context and path from scratch.",
        NEEDS,
        context_exact,
    ),
    Invariant(
        "attention.order-equivariant",
        "Renumbering the tree's rows moves each node's numbers with it.",
        NEEDS,
        order_equivariant,
        every=TURNS,
    ),
    Invariant(
        "attention.subtree-removal",
        "Removing a subtree leaves the numbers of every other node.",
        NEEDS,
        subtree_removal,
        every=TURNS,
    ),
    Invariant(
        "attention.padding-inert",
        "Padding rows are neither read by any node nor committed.",
        NEEDS,
        padding_inert,
        every=TURNS,
    ),
    Invariant(
        "attention.prefix-split",
        "How the prefix is cut for prefill changes neither numbers nor committed KV.",
        NEEDS,
        prefix_split,
        every=TURNS,
    ),
    Invariant(
        "attention.tree-equals-chain",
        "Decoding a node alone, after the tokens of its path, gives the same numbers.",
        NEEDS,
        tree_equals_chain,
        every=TURNS,
    ),
)
