"""Attention: each node's numbers are those of its own path, and of nothing else."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from properties.closeness import Noise, beyond, noise, truth
from properties.finding import Finding
from properties.invariant import TURNS, Fact, Invariant, NotApplicable, Oracle, Unobserved, needing
from properties.subject import Subject
from properties.variants import changed_outside, dice, first, focus, leak_designs, probes, pruned, shuffled, tree_of
from reference.architecture import Seeded
from reference.case import Case
from reference.trace import Array, Kv, Stage, Step

NEEDS = needing(Stage.DRAFTED, Stage.SCORED)


def context_exact(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """Attention outputs and logits of each node against the oracle, by rule N; the control itself is bounded too."""
    name = "attention.context-exact"
    error = noise(case, oracle, subject)
    met = False
    for number, step in enumerate(subject(case).steps):
        if step.scored is None:
            continue
        true = truth(case, oracle, step, number)
        if step.attended is not None and true.attended is not None:
            for finding in attended_beyond(name, number, step.attended.output, true.attended.output, error):
                met = True
                yield finding
        assert true.scored is not None
        for finding in logits_beyond(name, number, step.scored.logits, true.scored.logits, error.of_logits()):
            met = True
            yield finding
    if not met and not error.measured <= error.ceiling:
        # Last, and only alone: a wrong tree step says better where a fault lies than plain decoding gone wrong.
        yield Finding(name, Stage.SCORED, 0, {"side": "control"}, error.ceiling, error.measured)


def attended_beyond(name: str, step: int, seen: Array, true: Array, error: Noise) -> Iterator[Finding]:
    """The first layer whose attention outputs [layers, heads, nodes, D] leave the oracle's, by its worst row."""
    if seen.shape != true.shape:
        yield Finding(name, Stage.ATTENDED, step, {"side": "shape"}, str(true.shape), str(seen.shape))
        return
    for layer in range(len(true)):
        worst = next(beyond(seen[layer], true[layer], error.of_inner("attended", layer)), None)
        if worst is not None:
            (head, node), measure = worst
            where: dict[str, int | str] = {"layer": layer, "head": head, "node": node}
            yield Finding(
                name,
                Stage.ATTENDED,
                step,
                where,
                _brief(true[layer, head, node]),
                _brief(seen[layer, head, node]),
                measure,
            )
            return


def logits_beyond(name: str, step: int, seen: Array, true: Array, limit: float) -> Iterator[Finding]:
    """Nodes whose logits [nodes, V] lie more than `limit` (rms) from `true`, worst first."""
    if seen.shape != true.shape:
        yield Finding(name, Stage.SCORED, step, {"side": "shape"}, str(true.shape), str(seen.shape))
        return
    for (node,), measure in beyond(seen, true, limit):
        token = int(np.nan_to_num(np.abs(seen[node] - true[node]), nan=np.inf).argmax())
        where: dict[str, int | str] = {"node": node, "token": token}
        yield Finding(name, Stage.SCORED, step, where, float(true[node, token]), float(seen[node, token]), measure)


def _brief(vector: Array) -> list[float]:
    return [float(value) for value in vector[:4]]


def visibility_exact(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """Transparent weights: which rows each node sees in each layer and head, read off the logits, zero tolerance."""
    one = focus(case, subject)
    assert isinstance(case.model, Seeded)
    context = len(one.prefix)
    for layer in range(case.model.architecture.layers):
        for blank, columns in probes(one, layer):
            seen, true = first(blank, subject), oracle(blank).steps[0]
            for stage, read in ((Stage.ATTENDED, _attended_codes), (Stage.SCORED, _scored_codes)):
                observed, expected = read(seen, blank, layer, len(columns)), read(true, blank, layer, len(columns))
                if observed is None or expected is None:
                    continue
                differ = np.argwhere(observed != expected).tolist()
                for head, node, code in differ:
                    column = columns[code]
                    what: dict[str, int | str] = (
                        {"position": column} if column < context else {"node": column - context}
                    )
                    yield Finding(
                        "attention.visibility-exact",
                        stage,
                        0,
                        {"layer": layer, "head": head, "row": node, "column": column, **what},
                        "visible" if expected[head, node, code] else "hidden",
                        "visible" if observed[head, node, code] else "hidden",
                    )
                if differ:
                    break  # the logits can only repeat what the attention outputs already say


def _attended_codes(step: Step, blank: Case, layer: int, codes: int) -> Array | None:
    """Bool [heads, nodes, codes]: which probed columns the attention outputs of `layer` show, if they are revealed."""
    return None if step.attended is None else np.asarray(step.attended.output[layer][:, :, :codes] != 0)


def _scored_codes(step: Step, blank: Case, layer: int, codes: int) -> Array | None:
    """The same, read off the logits; what is not a number counts as seen."""
    if step.scored is None:
        return None
    assert isinstance(blank.model, Seeded)
    heads, wide = blank.model.architecture.heads, blank.model.architecture.head_dim
    logits = step.scored.logits[:, : heads * wide].reshape(-1, heads, wide)[:, :, :codes]
    return np.asarray(np.moveaxis(logits != 0, 0, 1))


def no_leakage(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """Change what a node may not see: its row stays bit-identical, whatever the dtype and the length of the context.

    The null control comes first: where the same input twice is not bit-identical, the design proves nothing.
    """
    one = focus(case, subject)
    base, control = first(one, subject), subject.again(one).steps[0]
    if not _same_bits(base, control, range(len(tree_of(one)))):
        raise Unobserved("the backend's rows are not bit-stable under repetition")
    designs = leak_designs(tree_of(one))
    if not designs:
        raise NotApplicable("every node sees every other")
    for kept in designs:
        changed = first(changed_outside(one, kept), subject)
        for stage, layer, node in _changed_bits(base, changed, sorted(kept)):
            deeper = [other for other in range(len(tree_of(one))) if other not in kept]
            where: dict[str, int | str] = {"node": node, **({"layer": layer} if layer >= 0 else {})}
            yield Finding(
                "attention.no-leakage",
                stage,
                0,
                where,
                "bit-identical",
                f"follows one of nodes {deeper}, not on its path",
            )
            break


def _changed_bits(base: Step, changed: Step, kept: list[int]) -> Iterator[tuple[Stage, int, int]]:
    """Kept nodes whose attention outputs, else logits, are not bit-identical: (stage, layer or -1, node)."""
    if base.attended is not None and changed.attended is not None:
        differ = (base.attended.output != changed.attended.output).any(axis=(1, 3))
        for layer, node in np.argwhere(differ).tolist():
            if node in kept:
                yield Stage.ATTENDED, layer, node
    assert base.scored is not None
    assert changed.scored is not None
    differ = (base.scored.logits != changed.scored.logits).any(axis=1)
    for node in np.flatnonzero(differ).tolist():
        if node in kept:
            yield Stage.SCORED, -1, node


def _same_bits(base: Step, other: Step, nodes: range) -> bool:
    return next(_changed_bits(base, other, list(nodes)), None) is None


def compared(
    name: str, base: Step, other: Step, rows: list[int], others: list[int], error: Noise, variant: str
) -> Iterator[Finding]:
    """Findings where node `others[i]` of the variant is not, within a pair's noise, node `rows[i]` of the base."""
    where: dict[str, int | str] = {"variant": variant}
    if base.attended is not None and other.attended is not None:
        for layer in range(len(base.attended.output)):
            seen, true = other.attended.output[layer][:, others], base.attended.output[layer][:, rows]
            worst = next(beyond(seen, true, 2 * error.of_inner("attended", layer)), None)
            if worst is not None:
                (head, at), measure = worst
                place: dict[str, int | str] = {"layer": layer, "head": head, "node": rows[at], **where}
                values = _brief(true[head, at]), _brief(seen[head, at])
                yield Finding(name, Stage.ATTENDED, 0, place, *values, measure)
                return
    assert base.scored is not None
    assert other.scored is not None
    for (at,), measure in beyond(other.scored.logits[others], base.scored.logits[rows], error.of_logits(pair=True)):
        token = int(np.abs(other.scored.logits[others[at]] - base.scored.logits[rows[at]]).argmax())
        values_at = float(base.scored.logits[rows[at], token]), float(other.scored.logits[others[at], token])
        yield Finding(name, Stage.SCORED, 0, {"node": rows[at], "token": token, **where}, *values_at, measure)


def order_equivariant(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """Renumber the nodes: each keeps its numbers."""
    one = focus(case, subject)
    order = shuffled(one)
    moved = one.rebased(one.prefix, tree_of(one).renumbered(order))
    error = noise(case, oracle, subject)
    yield from compared(
        "attention.order-equivariant",
        first(one, subject),
        first(moved, subject),
        list(order),
        list(range(len(order))),
        error,
        f"rows in order {list(order)}",
    )


def subtree_removal(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """Take a subtree away: the nodes that stay keep their numbers."""
    one = focus(case, subject)
    smaller, kept = pruned(one)
    yield from compared(
        "attention.subtree-removal",
        first(one, subject),
        first(smaller, subject),
        list(kept),
        list(range(len(kept))),
        noise(case, oracle, subject),
        f"without nodes {[node for node in range(len(tree_of(one))) if node not in kept]}",
    )


def padding_inert(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """Pad the tree with more rows: nothing is read from them, and nothing of them is committed."""
    one = focus(case, subject)
    extra = int(dice(one, "padding").integers(1, 9))
    wide = replace(one, layout=replace(one.layout, padded_nodes=len(tree_of(one)) + extra))
    bare = replace(one, layout=replace(one.layout, padded_nodes=0))
    yield from _same_step("attention.padding-inert", case, oracle, subject, bare, wide, f"{extra} padding rows")


def prefix_split(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """Prefill in smaller or larger pieces: the tree's numbers and the committed KV stay."""
    one = focus(case, subject)
    if len(one.prefix) < 2:
        raise NotApplicable("a prefix of one token has one way to be prefilled")
    width = int(dice(one, "split").integers(1, len(one.prefix)))
    whole = replace(one, layout=replace(one.layout, prefill_chunk=0))
    parts = replace(one, layout=replace(one.layout, prefill_chunk=width))
    yield from _same_step("attention.prefix-split", case, oracle, subject, whole, parts, f"prefill by {width}")


def _same_step(
    name: str, case: Case, oracle: Oracle, subject: Subject, one: Case, other: Case, variant: str
) -> Iterator[Finding]:
    """Numbers and committed KV of two one-step cases with the same tree."""
    error = noise(case, oracle, subject)
    base, changed = first(one, subject), first(other, subject)
    rows = list(range(len(tree_of(one))))
    met = list(compared(name, base, changed, rows, rows, error, variant))
    yield from met
    if met or base.committed is None or changed.committed is None or base.accepted != changed.accepted:
        return
    yield from kv_differs(name, 0, base.committed.after, changed.committed.after, error, {"variant": variant}, 2.0)


def kv_differs(
    name: str,
    step: int,
    true: Kv | None,
    seen: Kv | None,
    error: Noise,
    where: dict[str, int | str],
    slack: float = 1.0,
) -> Iterator[Finding]:
    """The first layer and kind whose committed rows are not `true` within noise, by its worst slot."""
    if true is None or seen is None:
        return
    if true.keys.shape != seen.keys.shape:
        yield Finding(
            name, Stage.COMMITTED, step, {"side": "shape", **where}, str(true.keys.shape), str(seen.keys.shape)
        )
        return
    for layer in range(len(true.keys)):
        for kind in ("keys", "values"):
            limit = slack * error.of_inner(kind, layer)
            worst = next(beyond(getattr(seen, kind)[layer], getattr(true, kind)[layer], limit), None)
            if worst is not None:
                (head, slot), measure = worst
                place: dict[str, int | str] = {"layer": layer, "head": head, "slot": slot, "kind": kind[:-1], **where}
                values = _brief(getattr(true, kind)[layer, head, slot]), _brief(getattr(seen, kind)[layer, head, slot])
                yield Finding(name, Stage.COMMITTED, step, place, *values, measure)
                return


def _built_in(case: Case) -> bool:
    return isinstance(case.model, Seeded)


INVARIANTS = (
    Invariant(
        "attention.context-exact",
        "Each node's attention outputs and logits are those of running its context and path from scratch.",
        NEEDS,
        context_exact,
    ),
    Invariant(
        "attention.visibility-exact",
        "In every layer and head each node sees exactly its context and its own path, read off transparent weights.",
        NEEDS,
        visibility_exact,
        _built_in,
        every=TURNS,
    ),
    Invariant(
        "attention.no-leakage",
        "Changing tokens that a node may not see leaves its row bit-identical.",
        NEEDS,
        no_leakage,
        every=TURNS,
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
)
