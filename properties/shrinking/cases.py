"""Smaller cases in the neighbourhood of a given case.

A kind of step is a function from a case to attempts at simpler cases. `STEPS` lists all kinds, and `nearer` yields the
valid results. The greedy shrinking of `specverify/campaign/shrinking.py` and of live sessions uses them.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from specverify.properties.shrinking.sessions import (
    Attempt,
    cuts,
    fewer_actions,
    fewer_mates,
    layout_weight,
    layouts,
    lengths_below,
    plainer_mates,
    plainer_models,
    prunings,
    session_size,
    single_requests,
    weight_of,
    with_fields,
    without_nodes,
)
from specverify.properties.strategies.acceptance import ORACLE, continuation, steer_again
from specverify.properties.strategies.draft.conventions import in_conventions
from specverify.properties.strategies.models import GALLERY
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.draft import Draft, Scripted
from specverify.reference.draft.layer_head import ALIGNMENTS, FIRST_TOKENS, HeadLayer, LayerHead
from specverify.reference.files.json_types import plain
from specverify.reference.malformed import Malformed
from specverify.reference.parallel import RANKS
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.tree import Tree


def size(case: Case) -> tuple[float, ...]:
    """The size of a case as a reader feels it, compared lexicographically.

    The largest tree comes first, then actions, mates, prompt, draft, trees, output, model and settings.
    """
    draft = case.draft
    trees = draft.shapes
    nodes = [len(tree) for tree in trees]
    arch = case.model.architecture if isinstance(case.model, Seeded) else None
    # Rows whose parent comes later are harder to read.
    disorder = sum(parent > node for tree in trees for node, parent in enumerate(tree.parent))
    settings = layout_weight(case.layout)
    mate_nodes, actions, mates = session_size(case)
    stops = len(case.stops.eos) + len(case.stops.stop_tokens) + (case.stops.max_length > 0)
    # Each distinct piece counts once: a vocabulary may repeat a piece many times.
    letters = sum(map(len, (*case.stops.stop_strings, *set(case.stops.pieces))))
    # The gallery is ordered from simple to complex models.
    weight = 0
    if arch is not None:
        weight = GALLERY.index(arch) if arch in GALLERY else len(GALLERY)
    tokens = sum(sum(tree.token) for tree in trees if isinstance(tree, Tree)) + sum(case.prompt)
    learning = draft.trees is None
    return (
        max((mate_nodes, *nodes)),
        actions,
        mates,
        len(case.prompt),
        learning,
        sum(nodes),
        case.stops.max_new_tokens,
        weight,
        settings
        + stops
        + len(case.stops.stop_strings)
        + _sampling_weight(case)
        + _draft_weight(case.draft)
        + case.ranks
        + case.draft_ranks
        - (case.model.adapter is None)
        + weight_of(case.model.images),
        letters,
        disorder,
        tokens,
    )


def _sampling_weight(case: Case) -> int:
    """The number of sampling settings that are not at their defaults."""
    sampling = case.sampling
    defaults = Sampling()
    return sum(getattr(sampling, name) != getattr(defaults, name) for name in Sampling.__dataclass_fields__)


def _draft_weight(draft: Draft) -> int:
    """The settings of a dynamic tree, of a table or of an early end, and the rarer conventions or settings of a head.

    0 for a tree of a fixed shape, which is plainer.
    """
    plan, table = draft.expansion, draft.dispatch
    conventions = draft.settings_weight + draft.sees_images
    if isinstance(draft, LayerHead):
        sizes: HeadLayer | None = draft.layer
        conventions += sizes is not None and bool(sizes.sections)
        conventions += (draft.first_token != FIRST_TOKENS[0]) + (draft.alignment != ALIGNMENTS[0])
    if draft.stopped is not None:
        return conventions + 1 + draft.stopped.cumulated
    if table is not None:
        return conventions + 1 + len(table.up_to) + sum(table.batches)
    return conventions + (0 if plan is None else 1 + plan.top_k + plan.depth)


Steps = Callable[[Case], Iterator[Attempt]]
"""One kind of step towards simpler cases; it yields its biggest steps first."""


def attempts(steps: Steps, case: Case) -> Iterator[Case]:
    """The valid cases to which `steps` leads."""
    for attempt in steps(case):
        with suppress(Malformed):  # the step leads to a case that is not valid
            yield attempt()


def nearer(case: Case) -> Iterator[Case]:
    """Cases one step simpler than `case`, biggest steps first; each is a valid case."""
    for steps in STEPS:
        yield from attempts(steps, case)


def distance(first: Case, second: Case) -> int:
    """The number of differences between two cases: settings, and entries of lists, with unequal values."""
    first_leaves, second_leaves = _leaves(plain(first)), _leaves(plain(second))
    return sum(first_leaves.get(key) != second_leaves.get(key) for key in first_leaves.keys() | second_leaves.keys())


def _leaves(content: Any, path: str = "") -> dict[str, Any]:
    """Every scalar in `content`, by its path."""
    if isinstance(content, dict):
        return {key: value for name in content for key, value in _leaves(content[name], f"{path}.{name}").items()}
    if isinstance(content, (list, tuple)):
        return {
            key: value for index, item in enumerate(content) for key, value in _leaves(item, f"{path}[{index}]").items()
        }
    return {path: content}


def _scripts(case: Case) -> Iterator[Attempt]:
    """A script in place of a draft that makes its own tokens: the trees that it proposes by the oracle."""
    if case.draft.trees is None and isinstance(case.model, Seeded):
        yield partial(_with_script, case)


def _with_script(case: Case) -> Case:
    trees = [step.drafted.tree for step in ORACLE(case).steps if step.drafted is not None]
    return replace(case, draft=Scripted(tuple(trees)))


def _prompts(case: Case) -> Iterator[Attempt]:
    prompt = case.prompt
    for keep in lengths_below(len(prompt)):
        if 0 < keep < len(prompt):
            yield partial(_shorten_prompt, case, keep)
            # Another prompt has another continuation; steering keeps the accepted nodes.
            if isinstance(case.model, Seeded):
                yield partial(steer_case, case, case.model, prompt[-keep:])


def _models(case: Case) -> Iterator[Attempt]:
    if not isinstance(case.model, Seeded) or case.draft.trees is None:
        return
    for arch in GALLERY:
        # Models after the case's own in the gallery are not simpler.
        if arch == case.model.architecture:
            return
        if arch.vocab_size >= 2:
            plainer = Seeded(arch, 0)
            yield partial(steer_case, case, plainer, tuple(token % arch.vocab_size for token in case.prompt))


def steer_case(case: Case, model: Seeded, prompt: tuple[int, ...]) -> Case:
    """`case` on another model or prompt, with scripted trees of which the same nodes are accepted as before.

    Raises:
        Malformed: The draft is not a script, or the result is not a valid case.
    """
    if case.draft.trees is None or not isinstance(case.model, Seeded):
        raise Malformed("draft", "only scripted trees can be steered")
    old_tokens = continuation(case.model, case.prompt)
    new_tokens = continuation(model, prompt)
    trees = steer_again(case.draft.trees, (case.prompt[-1], *old_tokens), (prompt[-1], *new_tokens), model.vocab_size)
    # Reversed: where a token occurs twice, its first occurrence decides its new name.
    stops = _translate_stops(case.stops, dict(reversed([*zip(old_tokens, new_tokens, strict=False)])), model.vocab_size)
    if stops.max_length:
        stops = replace(stops, max_length=stops.max_length - len(case.prompt) + len(prompt))
    return replace(case, model=model, prompt=prompt, draft=Scripted(trees), stops=stops)


def _translate_stops(stops: Stops, translation: dict[int, int], vocab: int) -> Stops:
    """`stops` in another vocabulary of `vocab` ids; `translation` maps old tokens of greedy decoding to new ones."""

    def translate(tokens: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(translation.get(token, token % vocab) for token in tokens)

    pieces = [stops.pieces[token % len(stops.pieces)] for token in range(vocab)] if stops.pieces else []
    for token, name in translation.items() if pieces else ():
        pieces[name] = stops.pieces[token]
    return replace(stops, eos=translate(stops.eos), stop_tokens=translate(stops.stop_tokens), pieces=tuple(pieces))


def _shorten_prompt(case: Case, keep: int) -> Case:
    """`case` with the last `keep` tokens of its prompt; the room for output stays the same."""
    stops = case.stops
    if stops.max_length:
        stops = replace(stops, max_length=stops.max_length - len(case.prompt) + keep)
    return replace(case, prompt=case.prompt[-keep:], stops=stops)


def _trees(case: Case) -> Iterator[Attempt]:
    trees = case.draft.trees
    if trees is None:
        return
    for index in reversed(range(len(trees))):
        # Only the last tree can be dropped: the roots of later trees depend on the earlier ones.
        if index == len(trees) - 1 and index > 0:
            yield partial(replace, case, draft=Scripted(trees[:-1]))
        for nodes in prunings(trees[index]):
            yield partial(_prune, case, index, nodes)


def _shapes(case: Case) -> Iterator[Attempt]:
    draft = case.draft
    if draft.trees is not None:
        return
    for index, shape in enumerate(draft.shapes):
        for nodes in prunings(shape):
            yield partial(_prune, case, index, nodes)
    for simpler in draft.simpler():
        yield partial(replace, case, draft=simpler)
    # Heads of one case have the same conventions, or they would share no pages.
    if isinstance(draft, LayerHead):
        yield partial(in_conventions, case, FIRST_TOKENS[0], draft.alignment)
        yield partial(in_conventions, case, draft.first_token, ALIGNMENTS[0])


def _prune(case: Case, index: int, nodes: tuple[int, ...]) -> Case:
    return replace(case, draft=without_nodes(case.draft, index, nodes))


def _sampling(case: Case) -> Iterator[Attempt]:
    """Sampling settings put to their defaults one by one; the temperature last, since 0 means greedy decoding."""
    defaults = Sampling()
    for name in (*(name for name in Sampling.__dataclass_fields__ if name != "temperature"), "temperature"):
        if getattr(case.sampling, name) != getattr(defaults, name):
            yield partial(with_fields, case, "sampling", **{name: getattr(defaults, name)})
    # 1 is the plainest temperature of a sampled case.
    if case.sampling.temperature not in (0.0, 1.0):
        yield partial(with_fields, case, "sampling", temperature=1.0)


def _target(case: Case) -> Iterator[Attempt]:
    for ranks in (num_ranks for num_ranks in RANKS if num_ranks < case.ranks):
        draft_ranks = min(case.draft_ranks, ranks) if ranks > 1 else 0
        yield partial(replace, case, ranks=ranks, spread=case.spread and ranks > 1, draft_ranks=draft_ranks)
    for draft_ranks in (num_ranks for num_ranks in (0, *RANKS) if num_ranks < case.draft_ranks):
        yield partial(replace, case, draft_ranks=draft_ranks)
    for model in plainer_models(case.model):
        yield from (partial(steer_case, case, model, case.prompt), partial(replace, case, model=model))


def _budgets(case: Case) -> Iterator[Attempt]:
    stops = case.stops
    for tokens in sorted({1, 2, stops.max_new_tokens // 2, stops.max_new_tokens - 1}):
        if 0 < tokens < stops.max_new_tokens:
            yield partial(with_fields, case, "stops", max_new_tokens=tokens)


def _stops(case: Case) -> Iterator[Attempt]:
    stops = case.stops
    defaults = Stops(stops.max_new_tokens)
    if stops != defaults:
        yield partial(replace, case, stops=defaults)
    for defaults_of_group in ({"eos": ()}, {"stop_tokens": ()}, {"stop_strings": (), "pieces": ()}, {"max_length": 0}):
        if any(getattr(stops, name) != value for name, value in defaults_of_group.items()):
            yield partial(with_fields, case, "stops", **defaults_of_group)
    room = stops.room(len(case.prompt))
    if stops.max_length and room > 1:
        yield partial(with_fields, case, "stops", max_length=stops.max_length - 1)
    if stops.stop_strings:
        yield from _texts(case)


def _texts(case: Case) -> Iterator[Attempt]:
    """Fewer and shorter stop strings, and shorter text pieces of the tokens."""
    strings, pieces = case.stops.stop_strings, case.stops.pieces
    for index, string in enumerate(strings):
        if len(strings) > 1:
            yield partial(with_fields, case, "stops", stop_strings=strings[:index] + strings[index + 1 :])
        for shorter in (string[1:], string[:-1]):
            yield partial(with_fields, case, "stops", stop_strings=(*strings[:index], shorter, *strings[index + 1 :]))
    for length in (1, 2):
        if max(map(len, pieces)) > length:
            yield partial(with_fields, case, "stops", pieces=tuple(piece[:length] for piece in pieces))
    for piece in sorted(set(pieces)):
        for shorter in (piece[1:], piece[:-1]):
            if piece:
                changed = tuple(shorter if old_piece == piece else old_piece for old_piece in pieces)
                yield partial(with_fields, case, "stops", pieces=changed)


STEPS: tuple[Steps, ...] = (
    single_requests, fewer_actions, fewer_mates, _budgets, cuts, _trees, _shapes, plainer_mates,
    _scripts, _prompts, _models, _trees, layouts, _target, _sampling, _stops,
)  # fmt: skip
"""Every kind of step; the kinds that remove most come first."""
