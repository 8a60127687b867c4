"""A case in a few words, and the differences between two cases, field by field."""

from itertools import zip_longest
from typing import Any

from reference.architecture import Checkpoint, Model
from reference.case import Case
from reference.files.json_words import plain
from reference.layout import KvLayout
from reference.sampling import Sampling
from reference.tree import Tree
from reports.format import plural, show

NAMES = {
    "layout.commit": "commit by",
    "layout.padded_nodes": "padded to",
    "layout.prefill_chunk": "prefill chunk",
    "layout.kind": "KV layout",
    "layout.page_size": "page size",
    "layout.pages": "free list",
    "layout.overhang": "overhang",
    "layout.draft_sync": "draft cache by",
    "layout.poison": "poison",
    "sampling.temperature": "temperature",
    "sampling.tape": "tape",
    "sampling.rule.name": "rule",
    "sampling.draws": "draws",
    "sampling.seed": "seed",
    "sampling.bad_words": "bad words",
    "sampling.min_tokens": "min_tokens",
    "sampling.top_k": "top-k",
    "sampling.top_p": "top-p",
    "sampling.min_p": "min-p",
    "sampling.repetition_penalty": "repetition penalty",
    "sampling.presence_penalty": "presence penalty",
    "sampling.frequency_penalty": "frequency penalty",
    "stops.max_new_tokens": "max_new_tokens",
    "stops.eos": "eos tokens",
    "stops.stop_tokens": "stop tokens",
    "stops.stop_strings": "stop strings",
    "stops.max_length": "max_length",
    "model.architecture.windows": "sliding windows",
    "model.architecture.family": "family",
    "model.seed": "model seed",
    "steps": "steps at most",
}
"""The names of fields that a reader meets often; another field is named by its path in the case file."""


def case_summary(case: Case) -> str:
    """The size and the settings of a case: `3 nodes, prompt of 2 tokens, 2 layers, greedy, float32, commit by path`."""
    words = [case.draft.told, f"prompt of {plural(len(case.prompt), 'token')}", _model_words(case.model)]
    words.append("greedy" if case.sampling.greedy else _sampling_words(case.sampling))
    if case.sampling.processes:
        words.append("logits processed")
    words += [case.dtype, _layout_words(case.layout)]
    if case.layout.padded_nodes:
        words.append(f"padded to {case.layout.padded_nodes}")
    if case.layout.prefill_chunk:
        words.append(f"prefill in chunks of {case.layout.prefill_chunk}")
    if case.session is not None:
        beside = plural(len(case.session.mates), "request")
        words.append(f"{beside} beside it, {plural(len(case.session.actions), 'action')}")
    return ", ".join(words)


def _layout_words(layout: KvLayout) -> str:
    """The commit's way or the layout's kind, the page size, the draft's synchronisation and the poison."""
    words = f"commit by {layout.commit}" if len(layout.traits.commits) > 1 else f"KV {layout.kind}"
    if layout.page_size:
        words += f", pages of {layout.page_size}"
    if layout.draft_sync != "keep":
        words += f", draft {layout.draft_sync}"
    return f"{words}, poison {layout.poison}" if layout.poison else words


def _sampling_words(sampling: Sampling) -> str:
    """Temperature, acceptance rule, and how siblings are drawn."""
    drawn = "" if sampling.draws == "top-k" else f" {sampling.draws.replace('-', ' ')}"
    return f"temperature {show(sampling.temperature)}, {sampling.rule.name} acceptance{drawn}"


def _model_words(model: Model) -> str:
    """The model in words."""
    if isinstance(model, Checkpoint):
        return f"checkpoint {show(model.source)}"
    return f"{model.architecture.family} of {plural(model.architecture.layers, 'layer')}"


def differences(near: Case, case: Case) -> list[str]:
    """The differences of `near` from `case`, one phrase per field with both values."""
    phrases = []
    left, right = plain(near), plain(case)
    if near.draft.trees is not None and case.draft.trees is not None:
        phrases += _tree_differences(near.draft.trees, case.draft.trees)
        # Scripted trees are compared node by node, not as lists.
        del left["draft"], right["draft"]
    flat_left, flat_right = _flatten(left), _flatten(right)
    for name in dict.fromkeys((*flat_left, *flat_right)):
        mine, other = flat_left.get(name), flat_right.get(name)
        if mine != other:
            phrases.append(_phrase(NAMES.get(name, name), mine, other))
    return phrases


def differing_fields(near: Case, case: Case) -> list[tuple[str, Any, Any]]:
    """The fields in which two cases differ, each with the value of `near` and that of `case`; None where one has none.

    Scripted trees are told by their parents and tokens, step by step.
    """
    left, right = _flatten(plain(near)), _flatten(plain(case))
    for flat, one in ((left, near), (right, case)):
        if near.draft.trees is not None and case.draft.trees is not None:
            for name in [name for name in flat if name.startswith("draft.")]:
                del flat[name]
            for at, tree in enumerate(one.draft.trees or ()):
                flat[f"tree of step {at}: parents"] = list(tree.parent)
                flat[f"tree of step {at}: tokens"] = list(tree.token)
    names = dict.fromkeys((*left, *right))
    pairs = ((NAMES.get(name, name), left.get(name), right.get(name)) for name in names)
    return [one for one in pairs if one[1] != one[2]]


def _flatten(content: dict[str, Any], path: str = "") -> dict[str, Any]:
    """The leaves of nested dicts, by their path with dots."""
    leaves: dict[str, Any] = {}
    for key, value in content.items():
        if isinstance(value, dict):
            leaves.update(_flatten(value, f"{path}{key}."))
        else:
            leaves[f"{path}{key}"] = value
    return leaves


def _phrase(name: str, mine: Any, other: Any) -> str:
    """One difference in words; lists of equal length name the entries that differ."""
    if isinstance(mine, list) and isinstance(other, list):
        if len(mine) != len(other):
            return f"{name} of {len(mine)} (not {len(other)})"
        changed = [at for at, (a, b) in enumerate(zip(mine, other, strict=True)) if a != b]
        if len(changed) == 1:
            return f"{name}[{changed[0]}] {show(mine[changed[0]])} (not {show(other[changed[0]])})"
        return f"{name} different in {len(changed)} of {len(mine)} entries"
    return f"{name} {show(mine)} (not {show(other)})"


def _tree_differences(near: tuple[Tree, ...], case: tuple[Tree, ...]) -> list[str]:
    """The differences of scripted trees, step by step: size, parents, tokens."""
    phrases = []
    if len(near) != len(case):
        phrases.append(f"{plural(len(near), 'tree')} (not {len(case)})")
    several = max(len(near), len(case)) > 1
    for at, (mine, other) in enumerate(zip_longest(near, case)):
        if mine is None or other is None or mine == other:
            continue
        name = f"tree of step {at}" if several else "a tree"
        if len(mine) != len(other):
            phrases.append(f"{name} with {plural(len(mine), 'node')} (not {len(other)})")
            continue
        moved = [node for node in range(len(mine)) if mine.parent[node] != other.parent[node]]
        if moved:
            phrases.append(
                f"{name} with node {moved[0]} below node {mine.parent[moved[0]]} (not {other.parent[moved[0]]})"
            )
        renamed = [node for node in range(len(mine)) if mine.token[node] != other.token[node]]
        if renamed:
            node = renamed[0]
            more = f", and {len(renamed) - 1} more" if len(renamed) > 1 else ""
            phrases.append(f"{name} with token {mine.token[node]} at node {node} (not {other.token[node]}){more}")
    return phrases
