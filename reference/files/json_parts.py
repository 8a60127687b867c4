"""The parts of a case file: dataclasses as plain values, and trees and models made from these.

A dataclass becomes an object; a member of a union gets the key `kind`.
"""

from collections.abc import Callable
from dataclasses import Field, fields, is_dataclass
from typing import Any

from specverify.reference.adapters import Adapter
from specverify.reference.architecture import Architecture, Checkpoint, Model, Rope, Seeded
from specverify.reference.family import FAMILIES
from specverify.reference.family.settings import Settings
from specverify.reference.images import images_from_json
from specverify.reference.malformed import under
from specverify.reference.tree import RankTree, Tree


def is_younger(owner: type, field: "Field[Any]") -> bool:
    """Whether the metadata of a field of the dataclass `owner` says `omit_default`."""
    return bool(field.metadata.get("omit_default"))


def _written(value: Any) -> Any:
    """`value`, or the pairs of settings: the default of the field is no family's."""
    return value.pairs if isinstance(value, Settings) else value


def plain(value: Any, may_omit: Callable[[type, "Field[Any]"], bool] = is_younger) -> Any:
    """`value` as JSON holds it: objects, lists, numbers, strings; tuples become lists, NumPy numbers become numbers.

    A field that holds its default is left out where `may_omit` agrees. Without another word those are the fields whose
    metadata says `omit_default`, so that a field added later changes neither older files nor their ids.
    """
    if is_dataclass(value) and not isinstance(value, type):
        owner = type(value)
        content = {}
        for field in fields(value):
            part, default = _written(getattr(value, field.name)), _written(field.default)
            if not (part == default and may_omit(owner, field)):
                content[field.name] = plain(part, may_omit)
        tag = getattr(owner, "TAG", None)  # only classes that share a field with other classes have a tag
        return {"kind": tag, **content} if tag else content
    if isinstance(value, (tuple, list)):
        return [plain(item, may_omit) for item in value]
    if isinstance(value, dict):
        return {str(key): plain(item, may_omit) for key, item in value.items()}
    return value.item() if hasattr(value, "item") else value


def tree_from_json(content: dict[str, Any]) -> Tree:
    """A tree with its tokens; raises Malformed with the path below the tree."""
    return Tree(tuple(content["parent"]), tuple(content["token"]))


def rank_tree_from_json(content: dict[str, Any]) -> RankTree:
    """A tree of ranks; raises Malformed with the path below the tree."""
    return RankTree(tuple(content["parent"]), tuple(content["rank"]))


def rope_from_json(content: dict[str, Any]) -> Rope:
    """A rotary embedding; raises Malformed with the path below it."""
    rope: dict[str, Any] = {}
    for key, value in content.items():
        # The default's type says which fields are fractions; JSON has one kind of number.
        rope[key] = float(value) if isinstance(getattr(Rope, key), float) else value
    for name in ("short_factor", "long_factor"):
        rope[name] = tuple(map(float, rope.get(name, ())))
    return Rope(**rope)


def adapter_from_json(content: dict[str, Any]) -> Adapter | None:
    """The adapter under the key `adapter` of a model or a mate; raises Malformed with the path below `content`."""
    if "adapter" not in content:
        return None
    fields = content["adapter"]
    with under("adapter"):
        return Adapter(fields["rank"], float(fields["alpha"]), tuple(fields["projections"]), fields.get("seed", 0))


def model_from_json(content: dict[str, Any]) -> Model:
    """A model; raises Malformed with the path below the model."""
    fields = {key: value for key, value in content.items() if key != "kind"}
    if content["kind"] == "checkpoint":
        return Checkpoint(**fields)
    if "noise" in fields:
        fields["noise"] = float(fields["noise"])
    fields["adapter"] = adapter_from_json(fields)
    fields["images"] = images_from_json(fields)
    architecture_fields = dict(fields.pop("architecture"))
    # JSON has one kind of number: 2 may stand where a fraction is meant.
    with under("architecture.rope"):
        rope = rope_from_json(architecture_fields.pop("rope", {}))
    for name in ("windows", "chunks", "unrotated"):
        if name in architecture_fields:
            architecture_fields[name] = tuple(architecture_fields[name])
    for name in ("norm_eps", "attn_scale", "score_cap"):
        if name in architecture_fields:
            architecture_fields[name] = float(architecture_fields[name])
    with under("architecture"):
        if "settings" in architecture_fields:
            pairs = [(name, float(value)) for name, value in architecture_fields["settings"]]
            architecture_fields["settings"] = FAMILIES[architecture_fields["family"]].read_settings(pairs)
        architecture = Architecture(**architecture_fields, rope=rope)
    return Seeded(architecture=architecture, **fields)
