"""Opening of a head's directory: kind, words, weights and digest."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from specverify.reference.architecture import Model
from specverify.reference.draft.block import Block
from specverify.reference.draft.eagle1 import Eagle1
from specverify.reference.draft.eagle3 import LAYER_PREFIX, Eagle3
from specverify.reference.draft.head import Head, HeadFiles
from specverify.reference.draft.medusa import Medusa
from specverify.reference.draft.mtp import Mtp
from specverify.reference.draft.peagle import PEagle
from specverify.reference.draft_files import block, eagle1, eagle3, medusa, mtp
from specverify.reference.draft_files.known_fields import check_known, check_known_block
from specverify.reference.draft_files.target_sizes import TargetSizes, target_sizes
from specverify.reference.draft_files.tensors import HeadTensors
from specverify.reference.files.fields import Fields, UnreadableCheckpoint, quote_value, read_json
from specverify.reference.files.stored import EIGHT_BITS, FLOATS, INTEGERS, StoredTensor
from specverify.reference.files.weight_files import digest, weight_files
from specverify.reference.malformed import Malformed
from specverify.reference.trace import Array
from specverify.reference.tree import RankTree

Parts: TypeAlias = tuple[type[Head], dict[str, Any], dict[str, Array], HeadTensors]

FILES = ("model.safetensors", "medusa_lm_head.safetensors")
"""Names of a single weight file; the second is that of Medusa."""

NESTED = ("transformer_layer_config", "model", "eagle_config", block.OPTIONS)
"""Objects inside config.json whose fields count as its own: of speculators, vLLM, SpecForge and z-lab."""

CONVERT = " with torch's load(file, weights_only=True) and safetensors.torch.save_file(weights, 'model.safetensors')"
"""How pickled heads are converted."""

SPECULATORS = {
    "eagle": Eagle1.TAG,
    "eagle3": Eagle3.TAG,
    PEagle.TAG: PEagle.TAG,
    **dict.fromkeys(block.SPECULATORS, Block.TAG),
}
"""The kinds of head of speculators that are read, by `speculators_model_type`."""


@dataclass(frozen=True)
class OpenedHead:
    """A head that was read.

    Attributes:
        words: The head with the bare root as its tree.
        weights: float64, read-only, under the names of `specverify.reference.draft`; d2t int64 and t2d bool if reduced.
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
    opened_head = open_head(head.files.source, target)
    assert opened_head.words.files is not None
    if opened_head.words.files.digest != head.files.digest:
        raise UnreadableCheckpoint(
            f"{head.files.source}: its digest is {opened_head.words.files.digest}, the case was made with "
            f"{head.files.digest}; point it to the original head"
        )
    if opened_head.words != head.stored_words:
        raise UnreadableCheckpoint(f"{head.files.source}: the case describes another {head.WORD} head than its files")
    return opened_head.weights


def _open(root: Path, target: TargetSizes) -> OpenedHead:
    if not root.is_dir():
        problem = "not a directory" if root.exists() else "no such directory"
        raise UnreadableCheckpoint(f"{root}: {problem}; give the directory of a draft head")
    fields = _fields(root)
    eight_bits = EIGHT_BITS if mtp.is_block_scaled(fields) else {}
    stored, files = weight_files(root, {**FLOATS, **INTEGERS, **eight_bits}, FILES, CONVERT)
    files_of_head = HeadFiles(str(root), digest([root / "config.json", *files]))
    try:
        kind, fields_of_kind, state, tensors = _read_parts(root, fields, stored, target, files_of_head.digest)
        tensors.check_empty(kind.WORD)
        words = kind(shape=RankTree((0,), (0,)), files=files_of_head, **fields_of_kind)
    except Malformed as complaint:
        raise fields.refuse(f"{complaint}; correct it") from None
    except MemoryError:
        raise UnreadableCheckpoint(f"{root}: its weights in float64 exceed the memory of this machine") from None
    if words.vocabulary:
        vocabulary = np.array(words.vocabulary)
        state |= {
            "d2t": vocabulary - np.arange(len(vocabulary)),
            "t2d": np.isin(np.arange(target.vocab_size), vocabulary),
        }
    for array in state.values():
        array.flags.writeable = False
    return OpenedHead(words, state)


def _fields(root: Path) -> Fields:
    """config.json, with the fields of its nested objects beside the outer ones, which win."""
    file = root / "config.json"
    content = read_json(file)
    merged: dict[str, Any] = {}
    for name in NESTED:
        inner = content.get(name)
        if isinstance(inner, dict):
            for key, value in inner.items():
                if key in content and key == eagle3.IDS and content[key] != value:
                    raise UnreadableCheckpoint(f"{file}: {key} is stated twice, and differently; correct it")
                merged[key] = value
    return Fields(file, content, merged)


def _read_parts(
    root: Path, fields: Fields, stored: dict[str, StoredTensor], target: TargetSizes, head_digest: str
) -> Parts:
    """The kind of the head, the fields of its words, its weights, and the tensors that are left."""
    bare_names = {name.removeprefix("model.") for name in stored}
    is_parallel = eagle3.is_parallel(fields, bare_names)

    def reading(kind: type[Head], place: Callable[[str], str], read: Callable[..., Any], *arguments: Any) -> Parts:
        check_known(fields, is_parallel)
        tensors = HeadTensors(root, stored, place)
        return kind, *read(fields, tensors, target, *arguments), tensors

    speculators_kind = fields.get("speculators_model_type")
    if speculators_kind is not None and (not isinstance(speculators_kind, str) or speculators_kind not in SPECULATORS):
        raise fields.refuse(
            f"speculators_model_type is {quote_value(speculators_kind)}; {', '.join(SPECULATORS)} are read"
        )
    if any(name.endswith("eh_proj.weight") for name in stored) or mtp.is_beside(stored) or mtp.count(fields):
        if head_digest != target.digest:
            raise fields.refuse(
                f"MTP modules are read from the target's own checkpoint, and {target.name} is another one"
            )
        fields = mtp.text_fields(fields)
        modules, target_tensors = mtp.modules_in(fields, stored, target)
        tensors = HeadTensors(root, modules)
        read_modules = mtp.read_target_layers if fields.get("model_type") in mtp.TARGET_LAYERS else mtp.read
        return Mtp, *read_modules(fields, tensors, target, target_tensors), tensors
    if block.is_block(fields):
        check_known_block(fields)
        tensors = HeadTensors(root, stored, block.place)
        return Block, *block.read(fields, tensors, target), tensors
    if any(medusa.MEDUSA_NAME.match(name) for name in stored):
        return reading(Medusa, medusa.place, medusa.read)
    has_midlayer, is_vllm = (
        any(name.startswith(prefix) for name in bare_names) for prefix in (f"{LAYER_PREFIX}.", eagle3.VLLM_PREFIX)
    )
    if (
        has_midlayer
        or f"{eagle3.VLLM_PREFIX}hidden_norm.weight" in bare_names
        or is_parallel
        or speculators_kind == "eagle3"
    ):
        if has_midlayer and is_vllm:
            raise UnreadableCheckpoint(f"{root}: layers named midlayer and layers.0 in one head; keep one")
        kind = PEagle if is_parallel else Eagle3
        return reading(kind, eagle3.place, eagle3.read, has_midlayer, is_parallel)
    if {"fc.weight", "fusion_fc.weight"} & bare_names:
        return reading(Eagle1, eagle1.place, eagle1.read)
    raise UnreadableCheckpoint(
        f"{root}: its tensors are those of no draft head that is read here (EAGLE-1, EAGLE-3, P-EAGLE, DFlash, DSpark, "
        "Medusa, MTP); for a second model use --draft model:DIR"
    )
