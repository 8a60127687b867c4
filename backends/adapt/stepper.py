"""The stepper: a generator of steps, as a backend that shows some of its stages.

The function is a generator. It yields a dict for each speculative step, with any of the parts that its adapter says it
shows; the trace holds these parts and no others.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from backends.adapt.blackbox import BlackBox, blackbox
from backends.adapt.generated import tokens_of
from backends.admission.arrays import read_array
from backends.base import Declaration
from reference.architecture import Seeded
from reference.case import Case
from reference.trace import (
    Accepted,
    Attended,
    Committed,
    Drafted,
    Emitted,
    Kv,
    Lowered,
    Scored,
    Stage,
    Step,
    Trace,
)
from reference.tree import Tree

PARTS = {
    "tokens": (Stage.EMITTED, "the tokens that the step emits; every step has them"),
    "tree": (Stage.DRAFTED, "a pair: parents and tokens of the nodes that were verified, the pending root first"),
    "draft_logits": (Stage.DRAFTED, "float [nodes, draft vocabulary]: the draft's scores; NaN for nodes without any"),
    "proposal": (Stage.DRAFTED, "float [nodes, vocabulary]: the law from which each node's token was drawn"),
    "mask": (
        Stage.LOWERED,
        "bool [rows, committed + rows] or [rows, rows]; one for all layers, or a list of one each",
    ),
    "position": (Stage.LOWERED, "int [rows]"),
    "depth": (Stage.LOWERED, "int [rows]"),
    "parent": (Stage.LOWERED, "int [rows]; the root is its own parent"),
    "slot": (Stage.LOWERED, "int [rows]: the column of KV that each row writes"),
    "next_token": (Stage.LOWERED, "int [rows]: the first child, 0 for none"),
    "next_sibling": (Stage.LOWERED, "int [rows]: the next sibling in row order, 0 for none"),
    "ancestor": (Stage.LOWERED, "int [rows, height + 1]"),
    "retrieve_index": (Stage.LOWERED, "int [nodes]: the row that scores each node"),
    "attended": (Stage.ATTENDED, "float [layers, heads, nodes, head_dim], before the output projection"),
    "logits": (Stage.SCORED, "float [nodes, vocabulary]: the target's, before any processing"),
    "law": (Stage.SCORED, "float [nodes, vocabulary]: the target's law, where it samples; needs logits"),
    "routed": (
        Stage.SCORED,
        "int [layers, committed + nodes, experts of a row]: the experts that each row took, -1 where not known; None "
        "for a model without; needs logits",
    ),
    "path": (Stage.ACCEPTED, "the accepted nodes from the root (0) downwards; needs bonus"),
    "bonus": (Stage.ACCEPTED, "the token after the path; needs path"),
    "logprobs": (Stage.EMITTED, "the log-probability of each emitted token, before any processing"),
    "keys": (Stage.COMMITTED, "float [layers, kv_heads, length, head_dim]: the cache after the step; needs values"),
    "values": (Stage.COMMITTED, "likewise; needs keys"),
}
"""The parts of a step, each with its stage and its form."""

TOGETHER = {"law": "logits", "routed": "logits", "draft_logits": "tree", "proposal": "tree", "path": "bonus",
            "bonus": "path", "keys": "values", "values": "keys"}  # fmt: skip
"""Parts that mean nothing without another part."""

LOWERED = tuple(name for name, (stage, _) in PARTS.items() if stage is Stage.LOWERED and name != "mask")
"""The parts that are arrays of `reference.trace.Lowered` by name."""


def stepper(
    steps: Callable[..., Iterator[Mapping[str, Any]]],
    *,
    shows: tuple[str, ...],
    trees: str = "any",
    **options: Any,
) -> Callable[[], "Stepper"]:
    """A backend's factory, from a generator function that yields one dict for each speculative step.

    Args:
        steps: Takes any of `blackbox.PARAMETERS` by name, at least `prompt_ids` and `max_new_tokens`. If it takes
            `trees`, it is given the trees of the case to verify, a list of (parents, tokens), one for each step, and
            proposes the bare root when they run out; otherwise it drafts in its own way.
        shows: The names of PARTS that its dicts hold; `tokens` need not be named. The invariants of a stage are asked
            where one of its parts is shown, and what needs an absent part is unobserved.
        trees: The case's trees that it can verify, one of `reference.abilities.TREES`.
        options: Those of `blackbox`.

    Raises:
        TypeError: `steps` cannot be called so, or a part is unknown or lacks the part that it needs.
    """
    unknown = next((one for one in shows if one not in PARTS), None)
    if unknown is not None:
        raise TypeError(f"stepper: shows {unknown!r}, which is none of {', '.join(PARTS)}")
    alone = next((one for one in shows if TOGETHER.get(one, one) not in shows), None)
    if alone is not None:
        raise TypeError(f"stepper: shows {alone} without {TOGETHER[alone]}")
    scripted = "trees" in inspect.signature(steps).parameters
    told = _Told(steps, scripted)
    open_box = blackbox(told, **{"name": getattr(steps, "__name__", "stepper"), **options})
    stages = frozenset({Stage.EMITTED, *(PARTS[one][0] for one in shows)})

    def opened() -> Stepper:
        box = open_box()
        drafts = ("scripted", *box.declaration.drafts) if scripted else box.declaration.drafts
        declared = replace(box.declaration, reveals=stages, drafts=drafts, trees=trees)
        return Stepper(box, told, frozenset({"tokens", *shows}), declared)

    return opened


class _Told:
    """The generator as a function that returns tokens, which keeps the dicts that were yielded."""

    def __init__(self, steps: Callable[..., Iterator[Mapping[str, Any]]], scripted: bool) -> None:
        self._steps, self._scripted = steps, scripted
        signature = inspect.signature(steps)
        kept = [one for one in signature.parameters.values() if one.name != "trees"]
        self.__name__ = getattr(steps, "__name__", "stepper")
        self.__signature__ = signature.replace(parameters=kept)
        self.trees: list[tuple[list[int], list[int]]] = []
        self.seen: list[Mapping[str, Any]] = []

    def __call__(self, **given: Any) -> list[int]:
        self.seen = []
        emitted: list[int] = []
        for step in self._steps(**given, **({"trees": self.trees} if self._scripted else {})):
            if not isinstance(step, Mapping) or "tokens" not in step:
                raise TypeError(f"{self.__name__} yielded {type(step).__name__}, expected a dict with tokens")
            self.seen.append(dict(step))
            emitted += tokens_of(step["tokens"])
        return emitted


class Stepper:
    """A generator of steps, as a backend.

    Attributes:
        declaration: What its parameters and `shows` say that it can do.
    """

    def __init__(self, box: BlackBox, told: _Told, shows: frozenset[str], declaration: Declaration) -> None:
        self.declaration = declaration
        self._box, self._told, self._shows = box, told, shows

    def run(self, case: Case) -> Trace:
        """Run the generator to its end; each dict is one step of the trace."""
        self._told.trees = [(list(one.parent), list(one.token)) for one in case.draft.trees or ()]
        whole = self._box.run(case)
        context, steps = list(case.prompt[:-1]), []
        pending = case.prompt[-1]
        # A checkpoint does not say how many layers it has: there a mask for each layer must be given.
        layers = case.model.architecture.layers if isinstance(case.model, Seeded) else 1
        for number, parts in enumerate(self._told.seen):
            strange = set(parts) ^ self._shows
            if strange:
                held = ", ".join(sorted(strange & set(parts))) or "nothing more"
                lacks = ", ".join(sorted(strange - set(parts))) or "nothing"
                raise TypeError(f"step {number} holds {held} beside what the adapter shows, and lacks {lacks}")
            tokens = tokens_of(parts["tokens"])
            last = number == len(self._told.seen) - 1
            steps.append(_step(tuple(context), parts, tokens, whole.finish if last else None, layers))
            if tokens:
                context += [pending, *tokens[:-1]]
                pending = tokens[-1]
        return replace(whole, steps=tuple(steps))


def _masks(mask: Any, committed: int, layers: int) -> tuple[Any, ...]:
    """A mask for each layer, each with the committed columns, which every row sees where the mask lacks them."""
    listed = list(mask) if isinstance(mask, (tuple, list)) and np.ndim(read_array(mask[0])) == 2 else None
    held = [read_array(one) for one in (listed or [mask])]
    wide = []
    for one in held:
        if not isinstance(one, np.ndarray) or one.ndim != 2:
            raise TypeError("mask: expected bool [rows, columns], or a list of one for each layer")
        ahead = committed if one.shape[1] == one.shape[0] else 0
        wide.append(np.concatenate([np.ones((len(one), ahead), dtype=bool), one.astype(bool)], 1) if ahead else one)
    return tuple(wide) if listed else (wide[0],) * layers


def _step(
    context: tuple[int, ...], parts: Mapping[str, Any], tokens: tuple[int, ...], finish: str | None, layers: int
) -> Step:
    """A step of a trace; the door checks the shapes of its arrays."""
    lowered = {name: parts[name] for name in LOWERED if name in parts}
    if "mask" in parts:
        lowered["visible"] = _masks(parts["mask"], len(context), layers)
    drafted = None
    if "tree" in parts:
        parent, token = parts["tree"]
        tree = Tree(tuple(map(int, parent)), tuple(map(int, token)))
        drafted = Drafted(tree, parts.get("draft_logits"), None, parts.get("proposal"))
    return Step(
        context,
        drafted,
        Lowered(**lowered) if lowered else None,
        Attended(parts["attended"]) if "attended" in parts else None,
        Scored(parts["logits"], parts.get("law"), routed=parts.get("routed")) if "logits" in parts else None,
        Accepted(parts["path"], parts["bonus"]) if "path" in parts else None,
        Emitted(tokens, finish, parts.get("logprobs")),
        _committed(parts) if "keys" in parts else None,
    )


def _committed(parts: Mapping[str, Any]) -> Committed:
    """The cache after the step; its length is that of the keys."""
    return Committed(int(parts["keys"].shape[2]), after=Kv(parts["keys"], parts["values"]))
