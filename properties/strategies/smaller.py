"""Smaller cases next to a given one: what a person would try to take away, simplest first."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial

from properties.strategies.models import GALLERY
from reference.architecture import Seeded
from reference.case import Case
from reference.draft import LanguageModel, Ngram, Scripted
from reference.layout import KvLayout
from reference.malformed import Malformed
from reference.sampling import Stops
from reference.tree import RankTree, Tree

Attempt = Callable[[], Case]
"""Makes a smaller case, or raises Malformed where there is no such case."""


def size(case: Case) -> tuple[float, ...]:
    """How much there is to hold in the head: nodes first, then trees, prompt, output, model, settings."""
    draft = case.draft
    trees = draft.trees if isinstance(draft, Scripted) else (draft.shape,)
    nodes = [len(tree) for tree in trees]
    arch = case.model.architecture if isinstance(case.model, Seeded) else None
    disorder = sum(up > node for tree in trees for node, up in enumerate(tree.parent))
    settings = (case.layout.commit != "path") + (case.layout.padded_nodes > 0) + (case.layout.prefill_chunk > 0)
    stops = len(case.stops.eos) + len(case.stops.stop_tokens)
    weight = 0 if arch is None else GALLERY.index(arch) if arch in GALLERY else len(GALLERY)
    tokens = sum(sum(tree.token) for tree in trees if isinstance(tree, Tree)) + sum(case.prompt)
    return (
        max(nodes, default=1),
        sum(nodes),
        len(case.prompt),
        case.stops.max_new_tokens,
        weight,
        settings + stops,
        disorder,
        tokens,
    )


def nearer(case: Case) -> Iterator[Case]:
    """Cases one step simpler than `case`, biggest steps first; each is a valid case."""
    for change in (_prompts, _trees, _shapes, _settings, _stops):
        for attempt in change(case):
            with suppress(Malformed):  # that step leads out of what a case may be
                yield attempt()


def _prompts(case: Case) -> Iterator[Attempt]:
    prompt = case.prompt
    for keep in sorted({1, 2, 3, len(prompt) // 2, len(prompt) - 1}):
        if 0 < keep < len(prompt):
            yield partial(_shortened, case, keep)


def _shortened(case: Case, keep: int) -> Case:
    return replace(case, prompt=case.prompt[-keep:])


def _without(tree: Tree, gone: int) -> Tree:
    kept = [node for node in range(len(tree)) if gone not in tree.path(node)]
    row = {node: at for at, node in enumerate(kept)}
    return Tree(tuple(row[tree.parent[node]] for node in kept), tuple(tree.token[node] for node in kept))


def _trees(case: Case) -> Iterator[Attempt]:
    if not isinstance(case.draft, Scripted):
        return
    trees = case.draft.trees
    for at in reversed(range(len(trees))):
        if at == len(trees) - 1 and at > 0:
            yield partial(replace, case, draft=Scripted(trees[:-1]))
        for node in range(1, len(trees[at])):
            yield partial(_pruned, case, trees, at, node)


def _pruned(case: Case, trees: tuple[Tree, ...], at: int, node: int) -> Case:
    return replace(case, draft=Scripted((*trees[:at], _without(trees[at], node), *trees[at + 1 :])))


def _shapes(case: Case) -> Iterator[Attempt]:
    if not isinstance(case.draft, (Ngram, LanguageModel)):
        return
    draft = case.draft
    for node in range(1, len(draft.shape)):
        yield partial(_reshaped, case, draft, node)
    if isinstance(draft, LanguageModel) and draft.vocabulary:
        yield partial(replace, case, draft=replace(draft, vocabulary=()))


def _reshaped(case: Case, draft: Ngram | LanguageModel, node: int) -> Case:
    smaller = _without(Tree(draft.shape.parent, draft.shape.rank), node)
    return replace(case, draft=replace(draft, shape=RankTree(smaller.parent, smaller.token)))


def _settings(case: Case) -> Iterator[Attempt]:
    plain = KvLayout()
    for name in ("padded_nodes", "prefill_chunk", "commit"):
        if getattr(case.layout, name) != getattr(plain, name):
            yield partial(_plainer, case, name)


def _plainer(case: Case, name: str) -> Case:
    return replace(case, layout=replace(case.layout, **{name: getattr(KvLayout(), name)}))


def _stops(case: Case) -> Iterator[Attempt]:
    stops = case.stops
    for tokens in sorted({1, 2, stops.max_new_tokens - 1}):
        if 0 < tokens < stops.max_new_tokens:
            yield partial(replace, case, stops=replace(stops, max_new_tokens=tokens))
    if stops.eos or stops.stop_tokens:
        yield partial(replace, case, stops=Stops(stops.max_new_tokens))
