"""Smaller sessions and plainer layouts in the neighbourhood of a given case."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import fields, replace
from functools import partial
from itertools import combinations
from typing import Any

from specverify.reference.architecture import Model, Seeded
from specverify.reference.case import Case
from specverify.reference.draft import Draft, Scripted, largest_tree_size
from specverify.reference.images import Images
from specverify.reference.layout import PLAIN, KvLayout
from specverify.reference.malformed import Malformed
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.session import BATCHES, Action, Mate
from specverify.reference.tree import Shape

Attempt = Callable[[], Case]
"""Makes a smaller case, or raises Malformed if the smaller case is not valid."""

SETTINGS = (
    "padded_nodes",
    "prefill_chunk",
    "stay_in_chunk",
    "commit",
    "pages",
    "overhang",
    "draft_sync",
    "poison",
    "latent",
    "first_tier",
    "second_tier",
    "branches",
    "left_pad",
    "page_states",
    "mixed_prefill",
    "draft_page_size",
    "state_slots",
    "kv_dtype",
    "kv_scales",
    "kv_scale",
)
"""Settings of a layout that are put to their defaults one by one."""


def session_size(case: Case) -> tuple[int, int, int]:
    """The session's part of a case's size: nodes of its largest tree, weight of its actions, weight of its mates."""
    if case.session is None:
        return 1, 0, 0
    drafts = [mate.draft for mate in case.session.mates]
    drafts += [action.draft for action in case.session.actions if action.draft is not None]
    actions = sum(1 + len(action.requests) + len(action.bare) for action in case.session.actions)
    mates_weight = sum(_weight(mate) for mate in case.session.mates)
    return max(map(largest_tree_size, drafts), default=1), actions, mates_weight


def _weight(mate: Mate) -> int:
    # Fixed weights make one mate less, and a greedy mate, count as smaller than a few tokens less.
    sampled = 0 if mate.sampling.greedy else 8
    extras = (mate.adapter is not None) + weight_of(mate.images)
    extras += num_changed(mate.sampling, Sampling()) + num_changed(mate.stops, Stops(mate.stops.max_new_tokens))
    return 16 + len(mate.prompt) + mate.stops.max_new_tokens + sampled + largest_tree_size(mate.draft) + extras


def num_changed(settings: Any, plain: Any) -> int:
    """The number of fields of `settings` that are not those of `plain`."""
    return sum(getattr(settings, name) != getattr(plain, name) for name in _names(settings))


def _names(settings: Any) -> list[str]:
    return [settings_field.name for settings_field in fields(settings)]


def one_by_one(settings: Any, plain: Any) -> Iterator[Any]:
    """`settings` with one field as in `plain`, for each field that is not; only those that are valid."""
    for name in _names(settings):
        if getattr(settings, name) != getattr(plain, name):
            with suppress(Malformed):  # such as stop strings without the texts of tokens
                yield replace(settings, **{name: getattr(plain, name)})


def layout_weight(layout: KvLayout) -> int:
    """The number of settings of `layout` that are not at their defaults, plus page size and length of the free list.

    A kind other than the plain layout counts 4.
    """
    plain = KvLayout()
    num_settings = sum(1 for name in SETTINGS if name != "pages" and getattr(layout, name) != getattr(plain, name))
    # Another layout weighs as much as four settings.
    kind_weight = 0 if layout.kind == PLAIN else 4
    return num_settings + kind_weight + layout.page_size + len(layout.pages)


def single_requests(case: Case) -> Iterator[Attempt]:
    """Each request of the session as a case of its own, without a session."""
    for number in range(len(case.session.mates) + 1 if case.session is not None else 0):
        yield partial(_single_request, case, number)


def fewer_actions(case: Case) -> Iterator[Attempt]:
    """The session without half of its actions, without a quarter, without one; last actions are removed first."""
    actions = case.session.actions if case.session is not None else ()
    count = len(actions)
    for width in dict.fromkeys((count // 2, count // 4, 1)):
        for begin in range(count - width, -1, -max(width, 1)):
            if width:
                yield partial(with_fields, case, "session", actions=actions[:begin] + actions[begin + width :])


def fewer_mates(case: Case) -> Iterator[Attempt]:
    """The session without one mate, or with one request removed from a step or a preemption."""
    session = case.session
    if session is None:
        return
    for number in range(1, len(session.mates) + 1):
        yield partial(_without_mate, case, number)
    for number in range(1, len(session.mates) + 1):
        yield partial(_without_own, case, number)
    for index, action in enumerate(session.actions):
        if action.kind in BATCHES and len(action.requests) > 1:
            for dropped in action.requests:
                remaining = action.among({request: request for request in action.requests if request != dropped})
                assert remaining is not None, "the batch has another request"
                yield partial(_with_action, case, index, remaining)
        if action.bare:
            yield partial(_with_action, case, index, replace(action, bare=()))


def plainer_mates(case: Case) -> Iterator[Attempt]:
    """The session with one mate made plainer: no draft, smaller trees, greedy, shorter prompt, fewer tokens."""
    session = case.session
    if session is None:
        return
    if session.setting:
        yield partial(with_fields, case, "session", setting="")
    if session.continuous:
        for draft in (Scripted(), *_smaller_drafts(case.draft)) if case.draft != Scripted() else ():
            yield partial(_with_shared_draft, case, draft)
    for number, mate in enumerate(session.mates):
        for plainer in _plainer_mates(mate):
            mates = (*session.mates[:number], plainer, *session.mates[number + 1 :])
            yield partial(with_fields, case, "session", mates=mates)


def smaller_batches(case: Case, request: int | None) -> Iterator[Case]:
    """The batch of an engine that batches by itself with fewer requests: one, two, then the halves of them all.

    Requests that pass cost little, and a request that hangs costs a time limit: so most tries leave it out.

    Args:
        case: A case with a continuous session.
        request: The request that differs, which is in every pair; None where nobody knows it.
    """
    assert case.session is not None
    numbers = range(1 + len(case.session.mates))
    singles = [(number,) for number in numbers if request in (None, number)]
    pairs = [pair for pair in combinations(numbers, 2) if request is None or request in pair]
    middle = len(numbers) // 2
    halves = [tuple(numbers[:middle]), tuple(numbers[middle:])]
    for subset in (*singles, *pairs, *halves):
        if 0 < len(subset) < len(numbers):
            with suppress(Malformed):
                yield _with_requests(case, subset)


def _with_requests(case: Case, numbers: tuple[int, ...]) -> Case:
    """The session with these requests alone, in their order."""
    session = case.session
    assert session is not None
    place = {number: index for index, number in enumerate(numbers)}
    actions = []
    for action in session.actions:
        remaining = action.among(place)
        if remaining is not None:
            actions.append(remaining)
    mates = tuple(
        Mate(alone.prompt, alone.draft, alone.sampling, alone.stops) for alone in map(case.alone, numbers[1:])
    )
    return replace(case.alone(numbers[0]), session=replace(session, mates=mates, actions=tuple(actions)))


def _with_shared_draft(case: Case, draft: Draft) -> Case:
    """The session with `draft` in all requests, which an engine that batches by itself wants."""
    assert case.session is not None
    mates = tuple(replace(mate, draft=draft) for mate in case.session.mates)
    return replace(case, draft=draft, session=replace(case.session, mates=mates))


def _single_request(case: Case, number: int) -> Case:
    # The free list was drawn for all requests of the session.
    return replace(case.alone(number), layout=replace(case.layout, pages=()))


def with_fields(case: Case, part: str, **fields: Any) -> Case:
    """`case` with other values of some fields of its session, layout, sampling or stops."""
    return replace(case, **{part: replace(getattr(case, part), **fields)})


def without_nodes(draft: Draft, index: int, nodes: tuple[int, ...]) -> Draft:
    """`draft` without the subtrees at `nodes` of one of its trees."""
    shapes = draft.shapes
    return draft.with_shapes((*shapes[:index], without_subtrees(shapes[index], *nodes), *shapes[index + 1 :]))


def _with_action(case: Case, index: int, action: Action) -> Case:
    assert case.session is not None
    actions = case.session.actions
    return with_fields(case, "session", actions=(*actions[:index], action, *actions[index + 1 :]))


def _without_mate(case: Case, number: int) -> Case:
    """The session without mate `number` and its actions; the mates after it are renumbered."""
    assert case.session is not None
    kept_actions = []
    for action in case.session.actions:
        # Steps and preemptions take any number of requests, and only lose this one.
        if number in action.requests and action.kind not in BATCHES:
            continue
        remaining = action.among(
            {request: request - (request > number) for request in action.requests if request != number}
        )
        if remaining is not None:
            kept_actions.append(remaining)
    mates = case.session.mates
    return with_fields(case, "session", mates=(*mates[: number - 1], *mates[number:]), actions=tuple(kept_actions))


def _without_own(case: Case, number: int) -> Case:
    """The session without the case's own request, whose place mate `number` takes; the others follow in their order."""
    session = case.session
    assert session is not None
    order = (number, *(mate for mate in range(1, len(session.mates) + 1) if mate != number))
    new_number = {request: place for place, request in enumerate(order)}
    actions = []
    for action in session.actions:
        if 0 in action.requests and action.kind not in BATCHES:
            continue
        remaining = action.among({request: new_number[request] for request in action.requests if request != 0})
        if remaining is not None:
            actions.append(remaining)
    mates = tuple(session.mates[request - 1] for request in order[1:])
    return replace(case.alone(number), session=replace(session, mates=mates, actions=tuple(actions)))


def lengths_below(length: int) -> list[int]:
    """Lengths below `length` to try, the shortest first.

    A half, three quarters, seven eighths and so on bring a prompt of 2048 tokens down to any length in some 40 tries.
    """
    return sorted({1, 2, 3, *(length - (length >> halvings) for halvings in range(1, 12))} & {*range(1, length)})


def _plainer_mates(mate: Mate) -> Iterator[Mate]:
    if mate.draft != Scripted():
        yield replace(mate, draft=Scripted())
        for draft in _smaller_drafts(mate.draft):
            yield replace(mate, draft=draft)
    if mate.sampling != Sampling():
        yield replace(mate, sampling=Sampling())
        yield from (replace(mate, sampling=sampling) for sampling in one_by_one(mate.sampling, Sampling()))
    if mate.adapter is not None:
        yield replace(mate, adapter=None)
    yield from (replace(mate, images=images) for images in fewer_images(mate.images))
    for keep in lengths_below(len(mate.prompt)):
        yield replace(mate, prompt=mate.prompt[-keep:])
    if mate.stops.max_new_tokens > 1:
        yield replace(mate, stops=replace(mate.stops, max_new_tokens=mate.stops.max_new_tokens // 2))
    plain = Stops(mate.stops.max_new_tokens)
    if mate.stops != plain:
        yield replace(mate, stops=plain)
        yield from (replace(mate, stops=stops) for stops in one_by_one(mate.stops, plain))


def _smaller_drafts(draft: Draft) -> Iterator[Draft]:
    """The draft with one node less in one tree, or one tree less."""
    shapes = draft.shapes
    if len(shapes) > 1:
        yield draft.with_shapes(shapes[:-1])
    for index, shape in enumerate(shapes):
        for nodes in prunings(shape):
            yield without_nodes(draft, index, nodes)


CUTS = ((2, 1), (1, 2), (2, 2), (3, 2), (2, 3), (3, 3), (4, 2), (2, 4), (5, 3), (3, 5), (5, 5))
"""Pairs of tree sizes: the trees of the case's own request are cut to the first, those of its mates to the second."""


def cuts(case: Case) -> Iterator[Attempt]:
    """The case with the trees of all requests cut to their first nodes at once.

    A fault may need two lanes of certain sizes side by side, so that cutting one request alone would hide it.
    """
    for own_nodes, mate_nodes in CUTS if case.session is not None else ((own_nodes, 0) for own_nodes in (2, 3, 5)):
        yield partial(_cut_all, case, own_nodes, mate_nodes)


def _cut_all(case: Case, own_nodes: int, mate_nodes: int) -> Case:
    session = case.session
    if session is not None:
        session = replace(
            session, mates=tuple(replace(mate, draft=cut_trees(mate.draft, mate_nodes)) for mate in session.mates)
        )
    return replace(case, draft=cut_trees(case.draft, own_nodes), session=session)


def cut_trees(draft: Draft, nodes: int) -> Draft:
    """The draft with the first `nodes` nodes of each tree, level by level."""
    return draft.with_shapes(tuple(without_subtrees(shape, *_nodes_beyond(shape, nodes)) for shape in draft.shapes))


def _nodes_beyond(shape: Shape, nodes: int) -> list[int]:
    return sorted(range(len(shape)), key=lambda node: (shape.depth[node], node))[nodes:]


def prunings(shape: Shape) -> Iterator[tuple[int, ...]]:
    """Sets of nodes whose subtrees are removed together: half of the nodes, a quarter, an eighth, then single nodes.

    Of single nodes, the root of the largest subtree comes first.
    """
    paths = [frozenset(shape.path(node)) for node in range(len(shape))]
    weight = [sum(node in path for path in paths) for node in range(len(shape))]
    order = sorted(range(1, len(shape)), key=lambda node: (-shape.depth[node], node))
    for width in dict.fromkeys((len(order) // 2, len(order) // 4, len(order) // 8)):
        for begin in range(0, len(order), width) if width > 1 else ():
            yield tuple(order[begin : begin + width])
    yield from ((node,) for node in sorted(order, key=lambda node: -weight[node]))


def without_subtrees(shape: Shape, *roots: int) -> Shape:
    """`shape` without the subtrees at `roots`."""
    return shape.subtree([node for node in range(len(shape)) if not set(roots) & set(shape.path(node))])


def layouts(case: Case) -> Iterator[Attempt]:
    """The case in the plain layout, then with settings at their defaults one by one, then with smaller pages."""
    layout = case.layout
    plain = KvLayout()
    if layout.kind != PLAIN:
        # Padding is kept here, and tried apart below, since it matters in every layout.
        yield partial(replace, case, layout=replace(layout.as_plain, padded_nodes=layout.padded_nodes))
    for name in SETTINGS:
        if getattr(layout, name) != getattr(plain, name):
            yield partial(with_fields, case, "layout", **{name: getattr(plain, name)})
    simpler = layout.traits.simpler
    if simpler is not None:
        yield lambda: replace(case, layout=layout.of_kind(simpler))
    if layout.traits.pages:
        for size in (1, 2, 4, layout.page_size // 2):
            if 0 < size < layout.page_size:
                yield partial(with_fields, case, "layout", page_size=size, pages=())


SIDES = ("frames", "height", "width")
"""The sizes of a block."""


def weight_of(images: Images) -> int:
    """The weight of `images`: 1 for each block, for each token of it, and for embeddings of its own."""
    return sum(1 + image.end - image.start + (image.seed > 0) for image in images)


def fewer_images(images: Images) -> Iterator[Images]:
    """`images` without one block, with one side of one block cut by one, and with the embeddings of its tokens."""
    for index, image in enumerate(images):
        yield (*images[:index], *images[index + 1 :])
        for side in SIDES:
            if getattr(image, side) > 1:
                yield (*images[:index], replace(image, **{side: getattr(image, side) - 1}), *images[index + 1 :])
        if image.seed:
            yield (*images[:index], replace(image, seed=0), *images[index + 1 :])


def plainer_models(model: Model) -> Iterator[Seeded]:
    """`model` without its adapter, and with fewer images."""
    if isinstance(model, Seeded) and model.adapter is not None:
        yield replace(model, adapter=None)
    if isinstance(model, Seeded):
        yield from (replace(model, images=images) for images in fewer_images(model.images))
