"""Conditions under which reported faults show: named predicates on cases.

Some need long prompts, since attention kernels split a long prefix into parts (split-K), or pages shared across draft
models: requests with unlike draft models may share pages of the target, but not pages of their drafts.
"""

from collections.abc import Callable, Iterator

from specverify.properties.strategies.case_run import CaseRun, Condition
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.draft import largest_tree_size
from specverify.reference.session import Action
from specverify.reference.tree import Shape

SPLIT = {"float32": 512, "float64": 512, "bfloat16": 1024, "float16": 1024}
"""Least columns of a prefix that our kernel splits on a GPU, by working dtype (`triton_launch.plan_for_gpu`).

No kernel takes float64; such a case counts as one in float32.
"""

INTERPRETED = 128
"""Least columns of a prefix that our kernel splits under Triton's interpreter (`triton_launch.plan_for_cpu`)."""


def _columns(run: CaseRun) -> int:
    """Columns of the longest prompt of any request, without the pending root."""
    return max(len(request.prefix) for request in run.requests)


def _lanes(run: CaseRun) -> Iterator[tuple[int, int]]:
    """For each step of several requests: how many have a prefix that a GPU splits, how many a shorter one."""
    least = SPLIT[run.case.dtype]
    far = {number for number, request in enumerate(run.requests) if len(request.prefix) >= least}
    return ((len(far.intersection(batch)), len(set(batch) - far)) for batch in run.batches)


def _drafts_unlike(run: CaseRun, first: int, second: int) -> bool:
    """Whether both requests have a model draft, and the draft models differ."""
    first_draft, second_draft = run.requests[first].draft, run.requests[second].draft
    return first_draft.model is not None and second_draft.model is not None and first_draft.model != second_draft.model


def _steps(later: tuple[Action, ...], request: int) -> bool:
    """Whether `request` takes a step among the actions."""
    return any(action.kind == "step" and request in action.requests for action in later)


def _forks(run: CaseRun) -> Iterator[int]:
    """Requests over pages that are forked from a request with another draft model, and step later."""
    entered: set[int] = set()
    for index, action in enumerate(run.actions if run.case.layout.traits.pages else ()):
        if action.kind == "add":
            entered |= set(action.requests)
        elif action.kind == "fork" and action.requests[0] in entered and action.requests[1] not in entered:
            source, twin = action.requests
            entered.add(twin)
            if _drafts_unlike(run, source, twin) and _steps(run.actions[index + 1 :], twin):
                yield twin


def _meets(run: CaseRun) -> Iterator[int]:
    """Requests that share the first page with a cancelled one of another draft model, and step later."""
    entered: set[int] = set()
    departed: list[int] = []
    size = run.case.layout.page_size
    for index, action in enumerate(run.actions if run.case.layout.traits.keeps_prefixes else ()):
        request = action.requests[0]
        if action.kind == "cancel" and request in entered:
            departed.append(request)
        elif action.kind == "add" and request not in entered:
            entered.add(request)
            first_page = run.requests[request].prefix[:size]
            alike = [
                earlier
                for earlier in departed
                if len(first_page) == size and run.requests[earlier].prefix[:size] == first_page
            ]
            # Wrong pages of the draft show only in a later step.
            if any(_drafts_unlike(run, request, earlier) for earlier in alike) and _steps(
                run.actions[index + 1 :], request
            ):
                yield request


FAR = (
    *(
        Condition(f"prefix of {least} columns", f"A prompt's prefix has {least} columns or more.",
                  lambda run, least=least: _columns(run) >= least)  # type: ignore[misc]
        for least in (512, 1024, 2048)
    ),
    Condition("split-K under the interpreter", "A prefix so long that the interpreted kernel splits it.",
              lambda run: _columns(run) >= INTERPRETED),
    Condition("split-K on a GPU", "A prefix so long that the kernel on a GPU splits it in the case's dtype.",
              lambda run: _columns(run) >= SPLIT[run.case.dtype]),
    Condition("two lanes split", "One step of two requests whose prefixes are all split on a GPU.",
              lambda run: any(split > 1 for split, _ in _lanes(run))),
    Condition("two lanes split beside a short one", "The same, and a request in that step whose prefix is shorter.",
              lambda run: any(split > 1 and short for split, short in _lanes(run))),
    Condition("fork across draft models", "On pages, a fork that another model drafts for takes a step.",
              lambda run: any(_forks(run))),
    Condition("prefix hit across draft models", "Over a prefix cache, a request begins like one that left and that "
              "another model drafted for, and takes a step.", lambda run: any(_meets(run))),
)  # fmt: skip
"""The conditions that need long prompts or unlike draft models; `python -m tests.measure search` counts the cases."""


def _page_size(run: CaseRun) -> int:
    """Columns of a page; 0 in a layout without pages."""
    return run.case.layout.page_size if run.case.layout.traits.pages else 0


def _shape(run: CaseRun) -> Shape | None:
    draft = run.case.draft
    return None if draft.model is None else draft.shapes[0]


def _branches_below(shape: Shape, levels: int) -> bool:
    """Whether two nodes of one depth, `levels` or deeper, have children."""
    inner = [shape.depth[node] for node in range(len(shape)) if shape.children[node]]
    # Two inner nodes of one depth are two parents in one forward of the draft.
    return any(inner.count(depth) > 1 for depth in range(levels, shape.height + 1))


def _siblings(run: CaseRun) -> bool:
    shape = _shape(run)
    return shape is not None and shape.branches


def _is_drawn(run: CaseRun, draws: str) -> bool:
    return not run.case.sampling.greedy and run.case.sampling.draws == draws and _shape(run) is not None


def _ended_inside(run: CaseRun) -> bool:
    return any(
        step.emitted is not None and step.accepted is not None and step.emitted.finish in ("eos", "stop")
        and len(step.emitted.tokens) < len(step.accepted.path)
        for step in run.steps
    )  # fmt: skip


def _crossing(run: CaseRun) -> bool:
    chunk = run.chunk
    return bool(chunk) and any(
        step.drafted is not None
        and 0 < chunk - len(step.context) % chunk <= step.drafted.tree.height
        for step in run.steps
    )  # fmt: skip


def _is_cut(run: CaseRun) -> bool:
    """A step's tree has fewer nodes than the draft proposed."""
    draft = run.case.draft
    # A trie may find no token for a node, and a table gives other trees to other batches: neither is a cut.
    if (draft.trees is None and draft.model is None) or draft.dispatch is not None:
        return False
    trees = draft.shapes if draft.trees is not None else draft.shapes * len(run.walks)
    return any(len(tree) < len(full_tree) for (tree, _), full_tree in zip(run.walks, trees, strict=False))


def _unlike_trees(run: CaseRun) -> bool:
    """Two steps have trees of the same size and of different shapes."""
    shapes = [tree.parent for tree, _ in run.walks if len(tree) > 1]
    return any(len(first) == len(second) and first != second for first in shapes for second in shapes)


def _prefix_hit(run: CaseRun) -> bool:
    """A request's prompt begins with a whole page of the prompt of a request that entered before."""
    size = run.case.layout.page_size
    entered: list[tuple[int, ...]] = []
    if not run.case.layout.traits.keeps_prefixes:
        return False
    for action in run.actions:
        if action.kind == "add":
            prompt = run.requests[action.requests[0]].prefix
            if any(len(prompt) >= size and prompt[:size] == earlier[:size] for earlier in entered):
                return True
            entered.append(prompt)
    return False


def _requests_after(run: CaseRun, *kinds: str) -> Iterator[tuple[int, ...]]:
    """Requests on which actions of these kinds act in this order."""
    for number in range(len(run.requests)):
        action_kinds = [action.kind for action in run.actions if number in action.requests]
        # One iterator for all kinds: each search goes on where the last ended, so that order counts.
        remaining_kinds = iter(action_kinds)
        if all(any(kind == action_kind for action_kind in remaining_kinds) for kind in kinds):
            yield (number,)


def _entries_after_departures(run: CaseRun) -> Iterator[tuple[int, int]]:
    """Pairs over a prefix cache: a request that enters, and a request whose pages were given back before."""
    entered = set()
    departed = []
    for action in run.actions if run.case.layout.traits.keeps_prefixes else ():
        request = action.requests[0]
        if action.kind in ("cancel", "evict") and request in entered:
            departed.append(request)
        if action.kind == "restore" or (action.kind == "add" and request not in entered):
            yield from ((request, earlier) for earlier in departed)
            entered.add(request)


def _common_prefix(run: CaseRun, first: int, second: int) -> int:
    """Length of the common prefix of two requests' prompts, without the pending root."""
    first_prefix, second_prefix = run.requests[first].prefix, run.requests[second].prefix
    return next(
        (index for index, (a, b) in enumerate(zip(first_prefix, second_prefix, strict=False)) if a != b),
        min(len(first_prefix), len(second_prefix)),
    )


def _reuses(run: CaseRun) -> Iterator[tuple[int, int]]:
    """The pairs of `_entries_after_departures` whose prompts share at least the first page."""
    return (pair for pair in _entries_after_departures(run) if _common_prefix(run, *pair) >= run.case.layout.page_size)


def _parted_at_edge(run: CaseRun) -> bool:
    """Over a prefix cache, prompts of two requests with one draft model first differ at an edge of a page."""
    return any(
        run.drafts(first) is not None and run.drafts(first) == run.drafts(second) and _parts_at_edge(run, first, second)
        for first, second in _entries_after_departures(run)
    )


def _parts_at_edge(run: CaseRun, first: int, second: int) -> bool:
    size = run.case.layout.page_size
    length = _common_prefix(run, first, second)
    return 0 < length < len(run.requests[first].prefix) and length % size in (0, size - 1)


def _pool_too_small(run: CaseRun) -> bool:
    """The pool has fewer columns than all requests need at their longest."""
    return bool(run.case.layout.pages) and len(run.case.layout.pages) * _page_size(run) < sum(
        request.longest for request in run.requests
    )


def _inner_rejected(run: CaseRun) -> bool:
    """A node with children is rejected although a later row is accepted."""
    return _shape(run) is not None and any(
        any(tree.children[node] and node not in path for node in range(max(path))) for tree, path in run.walks
    )


def _crosses(run: CaseRun) -> bool:
    """All nodes of a tree are accepted, and the path crosses into another page."""
    size = _page_size(run)
    return bool(size) and any(
        len(tree) == len(path) > 1 and len(step.context) // size < (len(step.context) + len(path)) // size
        for step, (tree, path) in zip(run.steps, run.walks, strict=False)
    )


def _unequal_in_batch(run: CaseRun, measure: Callable[[Case], int]) -> bool:
    return any(len({measure(run.requests[request]) for request in batch}) > 1 for batch in run.batches)


def _forked_requests(run: CaseRun) -> tuple[int, ...]:
    """Requests that have entered and are then forked."""
    entered: set[int] = set()
    forked = []
    for action in run.actions:
        if action.kind == "add":
            entered |= set(action.requests)
        elif action.kind == "fork" and action.requests[0] in entered and action.requests[1] not in entered:
            forked.append(action.requests[0])
    return tuple(forked)


def _rejects_then_steps(run: CaseRun) -> bool:
    return any(len(path) < len(tree) for tree, path in run.walks[:-1])


CONDITIONS = (
    Condition("more than a page", "The prompt is longer than a page.",
              lambda run: 0 < _page_size(run) < len(run.case.prefix)),
    Condition("page in part", "The prompt ends inside a page.",
              lambda run: bool(_page_size(run)) and len(run.case.prefix) % _page_size(run) > 0),
    Condition("page full", "The prompt ends where a page ends.",
              lambda run: bool(_page_size(run)) and len(run.case.prefix) > 0
              and len(run.case.prefix) % _page_size(run) == 0),
    Condition("pages out of order", "The free list is no ascending one, and a page holds several columns.",
              lambda run: _page_size(run) > 1 and list(run.case.layout.pages) != sorted(run.case.layout.pages)),
    Condition("session", "There are other requests.", lambda run: run.case.session is not None),
    Condition("batch", "One step of two requests.", lambda run: bool(run.batches)),
    Condition("ragged trees", "One step of two requests with trees of unequal size.",
              lambda run: _unequal_in_batch(run, lambda request: largest_tree_size(request.draft))),
    Condition("ragged prefixes", "One step of two requests with prompts of unequal length.",
              lambda run: _unequal_in_batch(run, lambda request: len(request.prompt))),
    Condition("ragged batch on pages", "One step of unequal trees over pages.",
              lambda run: bool(_page_size(run))
              and _unequal_in_batch(run, lambda request: largest_tree_size(request.draft))),
    Condition("batch that samples", "One step of two requests that sample.",
              lambda run: any(
                  sum(not run.requests[request].sampling.greedy for request in batch) > 1 for batch in run.batches
              )),
    Condition("prefix hit", "A request enters whose first page another brought before it.", _prefix_hit),
    Condition("kept pages met again", "Over a prefix cache, a request enters that begins like one that left.",
              lambda run: any(_reuses(run))),
    Condition("kept pages met again, model drafts", "The same, and both are drafted for by one model.",
              lambda run: any(run.drafts(first) and run.drafts(first) == run.drafts(second) and first != second
                             for first, second in _reuses(run))),
    Condition("parted at a page's edge", "Their prompts part at a page's first or last token, and one model drafts.",
              _parted_at_edge),
    Condition("pool that runs out", "Not all requests have room at once.", _pool_too_small),
    Condition("accepts all into the next page", "All rows are accepted, and the path crosses into another page.",
              _crosses),
    Condition("interruption", "A request that entered is thrown back, evicted or cancelled.",
              lambda run: any(any(_requests_after(run, "add", kind)) for kind in ("preempt", "evict", "cancel"))),
    Condition("thrown back, then steps", "A draft is thrown back before verification, and the request goes on.",
              lambda run: any(_requests_after(run, "add", "preempt", "step"))),
    Condition("evicted, then steps", "A request with a model draft steps, is evicted, restored, and steps again.",
              lambda run: any(
                  run.drafts(numbers[0]) for numbers in _requests_after(run, "step", "evict", "restore", "step")
              )),
    Condition("leaves, then another joins", "A request leaves after a step, and another enters and steps.",
              lambda run: any(
                  action.kind == "cancel" and any(later.kind == "add" for later in run.actions[index:])
                  for index, action in enumerate(run.actions)
              )),
    Condition("fork", "A request that entered is forked.", lambda run: bool(_forked_requests(run))),
    Condition("fork on pages with a model draft", "A forked request on pages is drafted for by a model.",
              lambda run: bool(_page_size(run)) and any(run.drafts(request) for request in _forked_requests(run))),
    Condition("target drafts on pages", "The target drafts for itself, and lies on pages.",
              lambda run: bool(_page_size(run)) and any(
                  (draft := run.drafts(request)) is not None and draft.model == run.case.model
                  for request in range(len(run.requests))
              )),
    Condition("more than 16 rows", "A tree of more than 16 nodes.",
              lambda run: any(len(tree) > 16 for tree, _ in run.walks)),
    Condition("more than 32 rows", "A tree of more than 32 nodes.",
              lambda run: any(len(tree) > 32 for tree, _ in run.walks)),
    Condition("branches", "Two children of one node.",
              lambda run: any(tree.branches for tree, _ in run.walks)),
    Condition("accepts nothing", "A tree of which nothing is accepted.",
              lambda run: any(len(tree) > 1 and len(path) == 1 for tree, path in run.walks)),
    Condition("accepts all", "A path accepted down to a deepest leaf.",
              lambda run: any(tree.height > 0 and len(path) == tree.height + 1 for tree, path in run.walks)),
    Condition("accepts three", "At least three drafted tokens accepted in one step.",
              lambda run: any(len(path) > 3 for _, path in run.walks)),
    Condition("path out of row order", "The accepted path is not the first rows.",
              lambda run: any(path != tuple(range(len(path))) for _, path in run.walks)),
    Condition("accepts token 0", "A token with id 0 is accepted.",
              lambda run: any(tree.token[node] == 0 for tree, path in run.walks for node in path[1:])),
    Condition("step after a rejection", "A step follows one with a rejected row.", _rejects_then_steps),
    Condition("unlike trees of one size", "Two steps have trees of one size and unlike shapes.", _unlike_trees),
    Condition("window shorter than prompt", "A layer's window does not reach the prompt's beginning.",
              lambda run: any(window < len(run.case.prompt) for window in run.windows)),
    Condition("soft cap", "Attention of the target has a soft cap of its scores.",
              lambda run: isinstance(run.case.model, Seeded) and run.case.model.architecture.score_cap > 0),
    Condition("chunk ends inside a tree", "The end of a chunk of attention lies between a root and its leaves.",
              _crossing),
    Condition("chunk ends inside a tree, cut", "The same, and the tree is cut there.",
              lambda run: run.case.layout.stay_in_chunk and run.chunk > 0 and _is_cut(run)),
    Condition("ring full, then a rejection", "Layout sliding, a full window, a rejected row, and another step.",
              lambda run: run.case.layout.traits.ring and any(window < len(run.case.prompt) for window in run.windows)
              and _rejects_then_steps(run)),
    Condition("static after a rejection", "Layout static, and a step after a rejected row.",
              lambda run: run.case.layout.kind == "static" and _rejects_then_steps(run)),
    Condition("scratch after a rejection", "Layout scratch, and a step after a rejected row.",
              lambda run: run.case.layout.kind == "scratch" and _rejects_then_steps(run)),
    Condition("stop inside a block", "An end token or string before the last token of an accepted block.",
              _ended_inside),
    Condition("stop string", "A stop string ends the output.",
              lambda run: bool(run.case.stops.stop_strings) and bool(run.steps) and run.steps[-1].emitted is not None
              and run.steps[-1].emitted.finish == "stop"),
    Condition("stop string among min_tokens", "A stop string, and min_tokens that it may fall among.",
              lambda run: bool(run.case.stops.stop_strings) and run.case.sampling.min_tokens > 0),
    Condition("min_tokens and an end", "min_tokens, and an end token that they ban.",
              lambda run: run.case.sampling.min_tokens > 0 and bool(run.case.stops.eos or run.case.stops.stop_tokens)),
    Condition("model draft", "A model drafts.", lambda run: _shape(run) is not None),
    Condition("model draft, two parents", "A model drafts a tree with two inner nodes at one depth below the root.",
              lambda run: (shape := _shape(run)) is not None and _branches_below(shape, 1)),
    Condition("inner node rejected before an accepted row", "A model drafts, and a row with children is not accepted "
              "although one behind it is.", _inner_rejected),
    Condition("rule block, two levels", "Block verification of at least two levels.",
              lambda run: not run.case.sampling.greedy and run.case.sampling.rule.name == "block"
              and any(tree.height > 1 for tree, _ in run.walks)),
    Condition("rule block, drawn tokens", "Block verification of two levels, their tokens drawn.",
              lambda run: run.case.sampling.rule.name == "block" and (_is_drawn(run, "with-replacement")
              or _is_drawn(run, "without-replacement")) and any(tree.height > 1 for tree, _ in run.walks)),
    Condition("reduced vocabulary", "A model drafts with a vocabulary of its own.",
              lambda run: (draft := run.drafts(0)) is not None and bool(draft.vocabulary)),
    Condition("samples", "The request samples.", lambda run: not run.case.sampling.greedy),
    Condition("samples, without replacement, siblings", "Siblings are drawn without replacement.",
              lambda run: _is_drawn(run, "without-replacement") and _siblings(run)),
    Condition("samples, with replacement", "A drawn draft, with replacement.",
              lambda run: _is_drawn(run, "with-replacement")),
    Condition("samples under top-p", "A sampling request with top-p.",
              lambda run: not run.case.sampling.greedy and run.case.sampling.top_p < 1.0),
    Condition("samples under min-p", "A sampling request with min-p.",
              lambda run: not run.case.sampling.greedy and run.case.sampling.min_p > 0.0),
    Condition("samples under penalties", "A sampling request with a penalty.",
              lambda run: not run.case.sampling.greedy and run.case.sampling.repetition_penalty != 1.0),
    Condition("drawn draft under top-k, top-p or min-p", "A drawn draft, its law truncated.",
              lambda run: (_is_drawn(run, "with-replacement") or _is_drawn(run, "without-replacement"))
              and (run.case.sampling.top_k > 0 or run.case.sampling.top_p < 1.0 or run.case.sampling.min_p > 0.0)),
    Condition("dynamic tree", "A draft grows its tree by its own scores.",
              lambda run: any(request.draft.expansion is not None for request in run.requests)),
    Condition("table of trees", "A draft has a tree for each batch size.",
              lambda run: any(request.draft.dispatch is not None for request in run.requests)),
    Condition("16 bits", "The working dtype is bfloat16 or float16.",
              lambda run: run.case.dtype in ("bfloat16", "float16")),
    *FAR,
)  # fmt: skip
"""Conditions that faults need in order to show; `python -m tests.measure search` counts cases until each appears."""
