"""A case in a few words, and the differences between two cases, field by field."""

from itertools import zip_longest
from typing import Any

from specverify.properties.verdict.finding import Finding
from specverify.reference.architecture import Checkpoint, Model
from specverify.reference.case import Case
from specverify.reference.files.json_types import plain
from specverify.reference.layout import KvLayout
from specverify.reference.sampling import Sampling
from specverify.reference.tree import Tree
from specverify.reports.format import plural, show
from specverify.reports.layer_words import special_words

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


def case_summary(case: Case, finding: Finding | None = None) -> str:
    """The size and the settings of a case: `3 nodes, prompt of 2 tokens, 2 layers, greedy, float32, commit by path`.

    Of a session it describes the request of the `finding`, and of a model what is special in the finding's layer.
    """
    number, layer = (None, None) if finding is None else (finding.where.get("request", 0), finding.where.get("layer"))
    session = case.session
    if session is not None and isinstance(number, int) and 0 < number <= len(session.mates):
        case = case.alone(number)
    words = [case.draft.description, f"prompt of {plural(len(case.prompt), 'token')}", _model_words(case.model)]
    words += special_words(case.model, layer if isinstance(layer, int) else None)
    words.append("greedy" if case.sampling.greedy else _sampling_words(case.sampling))
    if case.sampling.processes:
        words.append("logits processed")
    words += [case.dtype, _layout_words(case.layout)]
    if case.layout.padded_nodes:
        words.append(f"padded to {case.layout.padded_nodes}")
    if case.layout.prefill_chunk:
        words.append(f"prefill in chunks of {case.layout.prefill_chunk}")
    if case.draft_ranks:
        words.append(f"draft on {case.drafting_ranks} of {case.ranks} ranks")
    if session is not None:
        mates = plural(len(session.mates), "request")
        which = f"request {number}, " if isinstance(number, int) and session.mates else ""
        words.append(f"{which}{mates} beside it, {plural(len(session.actions), 'action')}")
        words += [session.setting] if session.setting else []
    return ", ".join(words)


def action_words(case: Case) -> str:
    """The actions of a session as a short list: `add 0, add 1, step 0+1, evict 0`; empty without a session."""
    actions = () if case.session is None else case.session.actions
    return ", ".join(f"{action.kind} {'+'.join(map(str, action.requests))}" for action in actions)


def _layout_words(layout: KvLayout) -> str:
    """The commit's way or the layout's kind, page size, the draft's synchronisation, slots, stored dtype and poison."""
    words = f"commit by {layout.commit}" if len(layout.traits.commits) > 1 else f"KV {layout.kind}"
    if layout.page_size:
        words += f", pages of {layout.page_size}"
    if layout.draft_sync != "keep":
        words += f", draft {layout.draft_sync}"
    if layout.state_slots:
        words += f", {layout.state_slots} slots of states"
    if layout.kv_dtype:
        words += f", columns in {layout.kv_dtype}, scales by {layout.kv_scales}"
    return f"{words}, poison {layout.poison}" if layout.poison else words


def _sampling_words(sampling: Sampling) -> str:
    """Temperature, acceptance rule, and how siblings are drawn."""
    draws = "" if sampling.draws == "top-k" else f" {sampling.draws.replace('-', ' ')}"
    return f"temperature {show(sampling.temperature)}, {sampling.rule.name} acceptance{draws}"


def _model_words(model: Model) -> str:
    """The model in words."""
    if isinstance(model, Checkpoint):
        return f"checkpoint {show(model.source)}"
    return f"{model.architecture.family} of {plural(model.architecture.layers, 'layer')}"


def differences(near_case: Case, case: Case) -> list[str]:
    """The differences of `near_case` from `case`, one phrase per field with both values."""
    phrases = []
    near_fields, case_fields = plain(near_case), plain(case)
    if near_case.draft.trees is not None and case.draft.trees is not None:
        phrases += _tree_differences(near_case.draft.trees, case.draft.trees)
        # Scripted trees are compared node by node, not as lists.
        del near_fields["draft"], case_fields["draft"]
    near_leaves, case_leaves = _flatten(near_fields), _flatten(case_fields)
    for name in dict.fromkeys((*near_leaves, *case_leaves)):
        near_value, case_value = near_leaves.get(name), case_leaves.get(name)
        if near_value != case_value:
            phrases.append(_phrase(NAMES.get(name, name), near_value, case_value))
    return phrases


def differing_fields(near_case: Case, case: Case) -> list[tuple[str, Any, Any]]:
    """The fields in which two cases differ, each with the values of `near_case` and of `case`; None where one has none.

    Scripted trees are told by their parents and tokens, step by step.
    """
    near_leaves, case_leaves = _flatten(plain(near_case)), _flatten(plain(case))
    for leaves, owner in ((near_leaves, near_case), (case_leaves, case)):
        if near_case.draft.trees is not None and case.draft.trees is not None:
            for name in [name for name in leaves if name.startswith("draft.")]:
                del leaves[name]
            for step, tree in enumerate(owner.draft.trees or ()):
                leaves[f"tree of step {step}: parents"] = list(tree.parent)
                leaves[f"tree of step {step}: tokens"] = list(tree.token)
    names = dict.fromkeys((*near_leaves, *case_leaves))
    pairs = ((NAMES.get(name, name), near_leaves.get(name), case_leaves.get(name)) for name in names)
    return [pair for pair in pairs if pair[1] != pair[2]]


def _flatten(content: dict[str, Any], path: str = "") -> dict[str, Any]:
    """The leaves of nested dicts, by their path with dots."""
    leaves: dict[str, Any] = {}
    for key, value in content.items():
        if isinstance(value, dict):
            leaves.update(_flatten(value, f"{path}{key}."))
        else:
            leaves[f"{path}{key}"] = value
    return leaves


def _phrase(name: str, near_value: Any, case_value: Any) -> str:
    """One difference in words; lists of equal length name the entries that differ."""
    if isinstance(near_value, list) and isinstance(case_value, list):
        if len(near_value) != len(case_value):
            return f"{name} of {len(near_value)} (not {len(case_value)})"
        changed_indices = [i for i, (a, b) in enumerate(zip(near_value, case_value, strict=True)) if a != b]
        if len(changed_indices) == 1:
            i = changed_indices[0]
            return f"{name}[{i}] {show(near_value[i])} (not {show(case_value[i])})"
        return f"{name} different in {len(changed_indices)} of {len(near_value)} entries"
    return f"{name} {show(near_value)} (not {show(case_value)})"


def _tree_differences(near_trees: tuple[Tree, ...], case_trees: tuple[Tree, ...]) -> list[str]:
    """The differences of scripted trees, step by step: size, parents, tokens."""
    phrases = []
    if len(near_trees) != len(case_trees):
        phrases.append(f"{plural(len(near_trees), 'tree')} (not {len(case_trees)})")
    several = max(len(near_trees), len(case_trees)) > 1
    for step, (near_tree, case_tree) in enumerate(zip_longest(near_trees, case_trees)):
        if near_tree is None or case_tree is None or near_tree == case_tree:
            continue
        name = f"tree of step {step}" if several else "a tree"
        if len(near_tree) != len(case_tree):
            phrases.append(f"{name} with {plural(len(near_tree), 'node')} (not {len(case_tree)})")
            continue
        moved_nodes = [node for node in range(len(near_tree)) if near_tree.parent[node] != case_tree.parent[node]]
        if moved_nodes:
            node = moved_nodes[0]
            parents = f"below node {near_tree.parent[node]} (not {case_tree.parent[node]})"
            phrases.append(f"{name} with node {node} {parents}")
        renamed_nodes = [node for node in range(len(near_tree)) if near_tree.token[node] != case_tree.token[node]]
        if renamed_nodes:
            node = renamed_nodes[0]
            suffix = f", and {len(renamed_nodes) - 1} more" if len(renamed_nodes) > 1 else ""
            phrases.append(
                f"{name} with token {near_tree.token[node]} at node {node} (not {case_tree.token[node]}){suffix}"
            )
    return phrases
