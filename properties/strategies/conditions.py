"""Conditions under which reported faults show: named predicates on cases."""

from collections.abc import Callable, Iterator

from properties.strategies.far_conditions import FAR
from properties.strategies.seen import Condition, Seen
from reference.architecture import Seeded
from reference.case import Case
from reference.draft import largest_tree_size
from reference.tree import Shape


def _paged(of: Seen) -> int:
    """Columns of a page; 0 in a layout without pages."""
    return of.case.layout.page_size if of.case.layout.traits.pages else 0


def _shape(of: Seen) -> Shape | None:
    draft = of.case.draft
    return None if draft.model is None else draft.shapes[0]


def _branches_below(shape: Shape, levels: int) -> bool:
    """Whether two nodes of one depth, `levels` or deeper, have children."""
    inner = [shape.depth[node] for node in range(len(shape)) if shape.children[node]]
    # Two inner nodes of one depth are two parents in one forward of the draft.
    return any(inner.count(depth) > 1 for depth in range(levels, shape.height + 1))


def _siblings(of: Seen) -> bool:
    shape = _shape(of)
    return shape is not None and shape.branches


def _drawn(of: Seen, draws: str) -> bool:
    return not of.case.sampling.greedy and of.case.sampling.draws == draws and _shape(of) is not None


def _ended_inside(of: Seen) -> bool:
    return any(
        step.emitted is not None and step.accepted is not None and step.emitted.finish in ("eos", "stop")
        and len(step.emitted.tokens) < len(step.accepted.path)
        for step in of.steps
    )  # fmt: skip


def _crossing(of: Seen) -> bool:
    chunk = of.chunk
    return bool(chunk) and any(
        step.drafted is not None
        and 0 < chunk - len(step.context) % chunk <= step.drafted.tree.height
        for step in of.steps
    )  # fmt: skip


def _cut(of: Seen) -> bool:
    """A step's tree has fewer nodes than the draft proposed."""
    draft = of.case.draft
    # A trie may find no token for a node, and a table gives other trees to other batches: neither is a cut.
    if (draft.trees is None and draft.model is None) or draft.dispatch is not None:
        return False
    trees = draft.shapes if draft.trees is not None else draft.shapes * len(of.walks)
    return any(len(tree) < len(told) for (tree, _), told in zip(of.walks, trees, strict=False))


def _unlike(of: Seen) -> bool:
    """Two steps have trees of the same size and of different shapes."""
    shapes = [tree.parent for tree, _ in of.walks if len(tree) > 1]
    return any(len(one) == len(other) and one != other for one in shapes for other in shapes)


def _hit(of: Seen) -> bool:
    """A request's prompt begins with a whole page of the prompt of a request that entered before."""
    size = of.case.layout.page_size
    entered: list[tuple[int, ...]] = []
    if not of.case.layout.traits.keeps_prefixes:
        return False
    for action in of.actions:
        if action.kind == "add":
            prompt = of.requests[action.requests[0]].prefix
            if any(len(prompt) >= size and prompt[:size] == other[:size] for other in entered):
                return True
            entered.append(prompt)
    return False


def _after(of: Seen, *kinds: str) -> Iterator[tuple[int, ...]]:
    """Requests on which actions of these kinds act in this order."""
    for number in range(len(of.requests)):
        happened = [one.kind for one in of.actions if number in one.requests]
        # One iterator for all kinds: each search goes on where the last ended, so that order counts.
        wanted = iter(happened)
        if all(any(kind == one for one in wanted) for kind in kinds):
            yield (number,)


def _kept(of: Seen) -> Iterator[tuple[int, int]]:
    """Pairs over a prefix cache: a request that enters, and a request whose pages were given back before."""
    entered, left = set(), []
    for action in of.actions if of.case.layout.traits.keeps_prefixes else ():
        who = action.requests[0]
        if action.kind in ("cancel", "evict") and who in entered:
            left.append(who)
        if action.kind == "restore" or (action.kind == "add" and who not in entered):
            yield from ((who, other) for other in left)
            entered.add(who)


def _shared(of: Seen, one: int, other: int) -> int:
    """Length of the common prefix of two requests' prompts, without the pending root."""
    mine, theirs = of.requests[one].prefix, of.requests[other].prefix
    return next(
        (at for at, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), min(len(mine), len(theirs))
    )


def _reuses(of: Seen) -> Iterator[tuple[int, int]]:
    """The pairs of `_kept` whose prompts share at least the first page."""
    return (pair for pair in _kept(of) if _shared(of, *pair) >= of.case.layout.page_size)


def _parted_at_edge(of: Seen) -> bool:
    """Over a prefix cache, prompts of two requests with one draft model first differ at an edge of a page."""
    size = of.case.layout.page_size
    return any(
        of.drafts(one) is not None and of.drafts(one) == of.drafts(other)
        and 0 < (shared := _shared(of, one, other)) < len(of.requests[one].prefix) and shared % size in (0, size - 1)
        for one, other in _kept(of)
    )  # fmt: skip


def _tight(of: Seen) -> bool:
    """The pool has fewer columns than all requests need at their longest."""
    return bool(of.case.layout.pages) and len(of.case.layout.pages) * _paged(of) < sum(
        one.longest for one in of.requests
    )


def _inner_rejected(of: Seen) -> bool:
    """A node with children is rejected although a later row is accepted."""
    return _shape(of) is not None and any(
        any(tree.children[node] and node not in path for node in range(max(path))) for tree, path in of.walks
    )


def _crosses(of: Seen) -> bool:
    """All nodes of a tree are accepted, and the path crosses into another page."""
    size = _paged(of)
    return bool(size) and any(
        len(tree) == len(path) > 1 and len(step.context) // size < (len(step.context) + len(path)) // size
        for step, (tree, path) in zip(of.steps, of.walks, strict=False)
    )


def _unequal(of: Seen, measure: Callable[[Case], int]) -> bool:
    return any(len({measure(of.requests[one]) for one in batch}) > 1 for batch in of.batches)


def _forked(of: Seen) -> tuple[int, ...]:
    """Requests that have entered and are then forked."""
    entered: set[int] = set()
    met = []
    for action in of.actions:
        if action.kind == "add":
            entered |= set(action.requests)
        elif action.kind == "fork" and action.requests[0] in entered and action.requests[1] not in entered:
            met.append(action.requests[0])
    return tuple(met)


def _rejects_then_steps(of: Seen) -> bool:
    return any(len(path) < len(tree) for tree, path in of.walks[:-1])


CONDITIONS = (
    Condition("more than a page", "The prompt is longer than a page.", lambda of: 0 < _paged(of) < len(of.case.prefix)),
    Condition("page in part", "The prompt ends inside a page.",
              lambda of: bool(_paged(of)) and len(of.case.prefix) % _paged(of) > 0),
    Condition("page full", "The prompt ends where a page ends.",
              lambda of: bool(_paged(of)) and len(of.case.prefix) > 0 and len(of.case.prefix) % _paged(of) == 0),
    Condition("pages out of order", "The free list is no ascending one, and a page holds several columns.",
              lambda of: _paged(of) > 1 and list(of.case.layout.pages) != sorted(of.case.layout.pages)),
    Condition("session", "There are other requests.", lambda of: of.case.session is not None),
    Condition("batch", "One step of two requests.", lambda of: bool(of.batches)),
    Condition("ragged trees", "One step of two requests with trees of unequal size.",
              lambda of: _unequal(of, lambda one: largest_tree_size(one.draft))),
    Condition("ragged prefixes", "One step of two requests with prompts of unequal length.",
              lambda of: _unequal(of, lambda one: len(one.prompt))),
    Condition("ragged batch on pages", "One step of unequal trees over pages.",
              lambda of: bool(_paged(of)) and _unequal(of, lambda one: largest_tree_size(one.draft))),
    Condition("batch that samples", "One step of two requests that sample.",
              lambda of: any(sum(not of.requests[one].sampling.greedy for one in batch) > 1 for batch in of.batches)),
    Condition("prefix hit", "A request enters whose first page another brought before it.", _hit),
    Condition("kept pages met again", "Over a prefix cache, a request enters that begins like one that left.",
              lambda of: any(_reuses(of))),
    Condition("kept pages met again, model drafts", "The same, and both are drafted for by one model.",
              lambda of: any(of.drafts(one) and of.drafts(one) == of.drafts(other) and one != other
                             for one, other in _reuses(of))),
    Condition("parted at a page's edge", "Their prompts part at a page's first or last token, and one model drafts.",
              _parted_at_edge),
    Condition("pool that runs out", "Not all requests have room at once.", _tight),
    Condition("accepts all into the next page", "All rows are accepted, and the path crosses into another page.",
              _crosses),
    Condition("interruption", "A request that entered is thrown back, evicted or cancelled.",
              lambda of: any(any(_after(of, "add", kind)) for kind in ("preempt", "evict", "cancel"))),
    Condition("thrown back, then steps", "A draft is thrown back before verification, and the request goes on.",
              lambda of: any(_after(of, "add", "preempt", "step"))),
    Condition("evicted, then steps", "A request with a model draft steps, is evicted, restored, and steps again.",
              lambda of: any(of.drafts(one[0]) for one in _after(of, "step", "evict", "restore", "step"))),
    Condition("leaves, then another joins", "A request leaves after a step, and another enters and steps.",
              lambda of: any(
                  action.kind == "cancel" and any(later.kind == "add" for later in of.actions[at:])
                  for at, action in enumerate(of.actions)
              )),
    Condition("fork", "A request that entered is forked.", lambda of: bool(_forked(of))),
    Condition("fork on pages with a model draft", "A forked request on pages is drafted for by a model.",
              lambda of: bool(_paged(of)) and any(of.drafts(one) for one in _forked(of))),
    Condition("target drafts on pages", "The target drafts for itself, and lies on pages.",
              lambda of: bool(_paged(of)) and any(
                  (draft := of.drafts(one)) is not None and draft.model == of.case.model
                  for one in range(len(of.requests))
              )),
    Condition("more than 16 rows", "A tree of more than 16 nodes.",
              lambda of: any(len(tree) > 16 for tree, _ in of.walks)),
    Condition("more than 32 rows", "A tree of more than 32 nodes.",
              lambda of: any(len(tree) > 32 for tree, _ in of.walks)),
    Condition("branches", "Two children of one node.",
              lambda of: any(tree.branches for tree, _ in of.walks)),
    Condition("accepts nothing", "A tree of which nothing is accepted.",
              lambda of: any(len(tree) > 1 and len(path) == 1 for tree, path in of.walks)),
    Condition("accepts all", "A path accepted down to a deepest leaf.",
              lambda of: any(tree.height > 0 and len(path) == tree.height + 1 for tree, path in of.walks)),
    Condition("accepts three", "At least three drafted tokens accepted in one step.",
              lambda of: any(len(path) > 3 for _, path in of.walks)),
    Condition("path out of row order", "The accepted path is not the first rows.",
              lambda of: any(path != tuple(range(len(path))) for _, path in of.walks)),
    Condition("accepts token 0", "A token with id 0 is accepted.",
              lambda of: any(tree.token[node] == 0 for tree, path in of.walks for node in path[1:])),
    Condition("step after a rejection", "A step follows one with a rejected row.", _rejects_then_steps),
    Condition("unlike trees of one size", "Two steps have trees of one size and unlike shapes.", _unlike),
    Condition("window shorter than prompt", "A layer's window does not reach the prompt's beginning.",
              lambda of: any(window < len(of.case.prompt) for window in of.windows)),
    Condition("soft cap", "Attention of the target has a soft cap of its scores.",
              lambda of: isinstance(of.case.model, Seeded) and of.case.model.architecture.score_cap > 0),
    Condition("chunk ends inside a tree", "The end of a chunk of attention lies between a root and its leaves.",
              _crossing),
    Condition("chunk ends inside a tree, cut", "The same, and the tree is cut there.",
              lambda of: of.case.layout.stay_in_chunk and of.chunk > 0 and _cut(of)),
    Condition("ring full, then a rejection", "Layout sliding, a full window, a rejected row, and another step.",
              lambda of: of.case.layout.traits.ring and any(window < len(of.case.prompt) for window in of.windows)
              and _rejects_then_steps(of)),
    Condition("static after a rejection", "Layout static, and a step after a rejected row.",
              lambda of: of.case.layout.kind == "static" and _rejects_then_steps(of)),
    Condition("scratch after a rejection", "Layout scratch, and a step after a rejected row.",
              lambda of: of.case.layout.kind == "scratch" and _rejects_then_steps(of)),
    Condition("stop inside a block", "An end token or string before the last token of an accepted block.",
              _ended_inside),
    Condition("stop string", "A stop string ends the output.",
              lambda of: bool(of.case.stops.stop_strings) and bool(of.steps) and of.steps[-1].emitted is not None
              and of.steps[-1].emitted.finish == "stop"),
    Condition("stop string among min_tokens", "A stop string, and min_tokens that it may fall among.",
              lambda of: bool(of.case.stops.stop_strings) and of.case.sampling.min_tokens > 0),
    Condition("min_tokens and an end", "min_tokens, and an end token that they ban.",
              lambda of: of.case.sampling.min_tokens > 0 and bool(of.case.stops.eos or of.case.stops.stop_tokens)),
    Condition("model draft", "A model drafts.", lambda of: _shape(of) is not None),
    Condition("model draft, two parents", "A model drafts a tree with two inner nodes at one depth below the root.",
              lambda of: (shape := _shape(of)) is not None and _branches_below(shape, 1)),
    Condition("inner node rejected before an accepted row", "A model drafts, and a row with children is not accepted "
              "although one behind it is.", _inner_rejected),
    Condition("rule block, two levels", "Block verification of at least two levels.",
              lambda of: not of.case.sampling.greedy and of.case.sampling.rule.name == "block"
              and any(tree.height > 1 for tree, _ in of.walks)),
    Condition("rule block, drawn tokens", "Block verification of two levels, their tokens drawn.",
              lambda of: of.case.sampling.rule.name == "block" and (_drawn(of, "with-replacement")
              or _drawn(of, "without-replacement")) and any(tree.height > 1 for tree, _ in of.walks)),
    Condition("reduced vocabulary", "A model drafts with a vocabulary of its own.",
              lambda of: (draft := of.drafts(0)) is not None and bool(draft.vocabulary)),
    Condition("samples", "The request samples.", lambda of: not of.case.sampling.greedy),
    Condition("samples, without replacement, siblings", "Siblings are drawn without replacement.",
              lambda of: _drawn(of, "without-replacement") and _siblings(of)),
    Condition("samples, with replacement", "A drawn draft, with replacement.",
              lambda of: _drawn(of, "with-replacement")),
    Condition("samples under top-p", "A sampling request with top-p.",
              lambda of: not of.case.sampling.greedy and of.case.sampling.top_p < 1.0),
    Condition("samples under min-p", "A sampling request with min-p.",
              lambda of: not of.case.sampling.greedy and of.case.sampling.min_p > 0.0),
    Condition("samples under penalties", "A sampling request with a penalty.",
              lambda of: not of.case.sampling.greedy and of.case.sampling.repetition_penalty != 1.0),
    Condition("drawn draft under top-k, top-p or min-p", "A drawn draft, its law truncated.",
              lambda of: (_drawn(of, "with-replacement") or _drawn(of, "without-replacement"))
              and (of.case.sampling.top_k > 0 or of.case.sampling.top_p < 1.0 or of.case.sampling.min_p > 0.0)),
    *FAR,
)  # fmt: skip
"""Conditions that faults need in order to show; `python -m tests.measure search` counts cases until each appears."""
