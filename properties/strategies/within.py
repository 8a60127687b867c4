"""Choices within the abilities of the engine under test.

Strategies take `within`, the engine's abilities, or None for cases of any kind. With None, and with abilities that name
everything, the same values are drawn.
"""

from collections.abc import Iterable
from typing import Any, TypeVar

from specverify.reference.abilities import LAYOUT_SETTINGS, PROCESSING, Abilities
from specverify.reference.draft import Draft
from specverify.reference.draft.static import Static
from specverify.reference.sampling import Sampling
from specverify.reference.tree import Shape

Value = TypeVar("Value")
ShapeT = TypeVar("ShapeT", bound=Shape)

SPARE = 20
"""Tokens that a bounded length leaves free behind a prompt: for the output, and for a tree below its last token."""


def admitted_values(values: Iterable[Value], within: Abilities | None, field: str) -> tuple[Value, ...]:
    """The values that the abilities name in `field`; all `values` without abilities."""
    return tuple(value for value in values if within is None or value in getattr(within, field))


def fit_sampling(settings: Sampling, within: Abilities | None) -> Sampling:
    """`settings` without the processing that the engine does not apply."""
    if within is None:
        return settings
    fields: dict[str, Any] = {
        name: getattr(settings, name)
        for name in type(settings).__dataclass_fields__
        if name not in PROCESSING or name in within.processed
    }
    return Sampling(**fields)


def ignored_settings(within: Abilities | None) -> tuple[str, ...]:
    """The settings of a KV layout that the engine does not obey."""
    return () if within is None else tuple(name for name in LAYOUT_SETTINGS if name not in within.layout_settings)


def fit_draft(draft: Draft, within: Abilities | None) -> Draft:
    """The draft with its trees as the engine takes them: chains, or nodes in the order of their depth."""
    if within is None or within.trees == "any" or not draft.shapes:
        return draft
    if within.trees == "chains":
        draft = draft.as_chain()
    if draft.expansion is not None:
        return draft  # its nodes are in the order of their depth
    if isinstance(draft, Static) and draft.stopped is not None:
        return draft.with_widest_tree(_in_depth_order(draft.stopped.tree))
    return draft.with_shapes(tuple(_in_depth_order(shape) for shape in draft.shapes))


def _in_depth_order(shape: ShapeT) -> ShapeT:
    """The shape with its nodes in the order of their depth, if a parent comes after its child."""
    if shape.ordered:
        return shape
    return shape.subtree(sorted(range(len(shape)), key=lambda node: (shape.depth[node], node)))


def fit_prompt(prompt: tuple[int, ...], within: Abilities | None) -> tuple[int, ...]:
    """The prompt, repeated or cut to a length that the engine takes."""
    if within is None:
        return prompt
    longer = prompt * -(-within.least_prompt // len(prompt)) if len(prompt) < within.least_prompt else prompt
    most = max(within.longest - SPARE, within.least_prompt) if within.longest else len(longer)
    return longer[-most:]
