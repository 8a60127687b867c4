"""Opening of a head's directory: kind, words, weights and digest."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from reference.architecture import Model
from reference.draft.eagle1 import Eagle1
from reference.draft.eagle3 import LAYER_PREFIX, Eagle3
from reference.draft.head import Head
from reference.draft.medusa import Medusa
from reference.draft.mtp import Mtp
from reference.draft_files import eagle1, eagle3, medusa, mtp
from reference.draft_files.target_sizes import TargetSizes, target_sizes
from reference.draft_files.tensors import HeadTensors
from reference.files.fields import Fields, UnreadableCheckpoint, quote_value, read_json
from reference.files.head_files import HeadFiles
from reference.files.stored import FLOATS, INTEGERS, StoredTensor
from reference.files.weight_files import digest, weight_files
from reference.malformed import Malformed
from reference.trace import Array
from reference.tree import RankTree

Parts: TypeAlias = tuple[type[Head], dict[str, Any], dict[str, Array], HeadTensors]

FILES = ("model.safetensors", "medusa_lm_head.safetensors")
"""Names of a single weight file; the second is that of Medusa."""

NESTED = ("transformer_layer_config", "model", "eagle_config")
"""Objects inside config.json whose fields count as its own: of speculators, vLLM and SpecForge."""

CONVERT = " with torch's load(file, weights_only=True) and safetensors.torch.save_file(weights, 'model.safetensors')"
"""How pickled heads are converted."""

SPECULATORS = {"eagle": Eagle1.TAG, "eagle3": Eagle3.TAG}
"""The kinds of head of speculators that are read, by `speculators_model_type`."""


@dataclass(frozen=True)
class OpenedHead:
    """A head that was read.

    Attributes:
        words: The head with the bare root as its tree.
        weights: float64, read-only, under the names of `reference.draft`; d2t int64 and t2d bool if reduced.
    """

    words: Head
    weights: dict[str, Array]


def open_head(directory: str | Path, target: Model) -> OpenedHead:
    """Read the head in `directory` for `target`; every weight is read and checked.

    Raises:
        UnreadableCheckpoint: with one line that says what is wrong; nothing was loaded.
    """
    return _open(Path(directory), target_sizes(target))


@lru_cache(maxsize=4)
def stored_head(head: Head, target: Model) -> dict[str, Array]:
    """The weights of a head whose words stand in a case, with the bare root as its tree; see `OpenedHead`.

    Raises:
        UnreadableCheckpoint: as `open_head`; also where the directory holds other weights than the case was made with,
            or a head that the case does not describe.
    """
    assert head.files is not None
    found = open_head(head.files.source, target)
    assert found.words.files is not None
    if found.words.files.digest != head.files.digest:
        raise UnreadableCheckpoint(
            f"{head.files.source}: its digest is {found.words.files.digest}, the case was made with "
            f"{head.files.digest}; point it to the original head"
        )
    if found.words != replace(head, quantised=""):
        raise UnreadableCheckpoint(f"{head.files.source}: the case describes another {head.WORD} head than its files")
    return found.weights


def _open(root: Path, target: TargetSizes) -> OpenedHead:
    if not root.is_dir():
        what = "not a directory" if root.exists() else "no such directory"
        raise UnreadableCheckpoint(f"{root}: {what}; give the directory of a draft head")
    fields = _fields(root)
    stored, files = weight_files(root, {**FLOATS, **INTEGERS}, FILES, CONVERT)
    known = HeadFiles(str(root), digest([root / "config.json", *files]))
    try:
        kind, given, state, tensors = _read_parts(root, fields, stored, target, known.digest)
        tensors.check_empty(kind.WORD)
        words = kind(shape=RankTree((0,), (0,)), files=known, **given)
    except Malformed as complaint:
        raise fields.refuse(f"{complaint}; correct it") from None
    except MemoryError:
        raise UnreadableCheckpoint(f"{root}: its weights in float64 exceed the memory of this machine") from None
    if words.vocabulary:
        named = np.array(words.vocabulary)
        state |= {"d2t": named - np.arange(len(named)), "t2d": np.isin(np.arange(target.vocab_size), named)}
    for array in state.values():
        array.flags.writeable = False
    return OpenedHead(words, state)


def _fields(root: Path) -> Fields:
    """config.json, with the fields of its nested objects beside the outer ones, which win."""
    where = root / "config.json"
    content = read_json(where)
    merged: dict[str, Any] = {}
    for name in NESTED:
        inner = content.get(name)
        if isinstance(inner, dict):
            for key, value in inner.items():
                if key in content and key == eagle3.IDS and content[key] != value:
                    raise UnreadableCheckpoint(f"{where}: {key} is stated twice, and differently; correct it")
                merged[key] = value
    return Fields(where, content, merged)


def _read_parts(root: Path, fields: Fields, stored: dict[str, StoredTensor], target: TargetSizes, known: str) -> Parts:
    """The kind of the head, the fields of its words, its weights, and the tensors that are left."""

    def reading(kind: type[Head], place: Callable[[str], str], read: Callable[..., Any], *further: Any) -> Parts:
        tensors = HeadTensors(root, stored, place)
        return kind, *read(fields, tensors, target, *further), tensors

    named = fields.get("speculators_model_type")
    if named is not None and (not isinstance(named, str) or named not in SPECULATORS):
        raise fields.refuse(f"speculators_model_type is {quote_value(named)}; {', '.join(SPECULATORS)} are read")
    if any(name.endswith("eh_proj.weight") for name in stored) or mtp.count(fields):
        if known != target.digest:
            raise fields.refuse(
                f"MTP modules are read from the target's own checkpoint, and {target.name} is another one"
            )
        if not mtp.count(fields):
            raise fields.refuse(f"tensors of MTP modules are stored, and {mtp.COUNT} is missing; add it")
        modules = {
            name: one for name, one in stored.items() if mtp.belongs_to_module(name, target.layers, mtp.count(fields))
        }
        beside = {name: one for name, one in stored.items() if name not in modules}
        tensors = HeadTensors(root, modules)
        return Mtp, *mtp.read(fields, tensors, target, beside), tensors
    if any(medusa.MEDUSA_NAME.match(name) for name in stored):
        return reading(Medusa, medusa.place, medusa.read)
    bare = {name.removeprefix("model.") for name in stored}
    midlayer, theirs = (any(name.startswith(at) for name in bare) for at in (f"{LAYER_PREFIX}.", eagle3.VLLM_PREFIX))
    if midlayer or f"{eagle3.VLLM_PREFIX}hidden_norm.weight" in bare or named == "eagle3":
        if midlayer and theirs:
            raise UnreadableCheckpoint(f"{root}: layers named midlayer and layers.0 in one head; keep one")
        return reading(Eagle3, eagle3.place, eagle3.read, midlayer)
    if {"fc.weight", "fusion_fc.weight"} & bare:
        return reading(Eagle1, eagle1.place, eagle1.read)
    raise UnreadableCheckpoint(
        f"{root}: its tensors are those of no draft head that is read here (EAGLE-1, EAGLE-3, Medusa, MTP); for a "
        "second model use --draft model:DIR"
    )
