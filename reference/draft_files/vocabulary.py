"""The reduced vocabulary of an EAGLE-3 head: `d2t` and `t2d`.

`d2t` holds offsets: draft id d means target id d + d2t[d].
"""

import numpy as np

from specverify.reference.draft_files.target_sizes import TargetSizes
from specverify.reference.draft_files.tensors import HeadTensors
from specverify.reference.files.fields import Fields, UnreadableCheckpoint
from specverify.reference.trace import Array


def vocabulary(tensors: HeadTensors, fields: Fields, target: TargetSizes) -> tuple[int, ...]:
    """The target ids that the head can name, ascending, by draft id; empty for all ids of the target.

    Raises:
        UnreadableCheckpoint: `d2t` is missing for a reduced vocabulary, leaves the target's ids, does not ascend, or
            disagrees with `t2d`.
    """
    size = target.vocab_size if fields.get("draft_vocab_size") is None else fields.size("draft_vocab_size")
    if size > target.vocab_size:
        raise fields.refuse(f"draft_vocab_size is {size}, more than the {target.vocab_size} of {target.name}")
    is_named = tensors.take_whole("t2d", (target.vocab_size,)) if "t2d" in tensors else None
    if "d2t" not in tensors:
        if size < target.vocab_size:
            raise UnreadableCheckpoint(
                f"{tensors.root}: tensor d2t is missing, and draft_vocab_size is {size} of {target.vocab_size}: "
                "without it draft ids would be read as the first target ids"
            )
        if is_named is not None and not is_named.all():
            raise UnreadableCheckpoint(f"{tensors.root}: t2d leaves ids out, and d2t is missing; save both")
        return ()
    target_ids = tensors.take_whole("d2t", (size,)) + np.arange(size)
    _check_ids(tensors, target_ids, is_named, target)
    return () if size == target.vocab_size else tuple(target_ids.tolist())


def _check_ids(tensors: HeadTensors, target_ids: Array, is_named: Array | None, target: TargetSizes) -> None:
    """Refuse target ids that are out of range, out of order, or other than those that `t2d` marks."""
    outside_ids = np.flatnonzero((target_ids < 0) | (target_ids >= target.vocab_size))
    if len(outside_ids):
        draft_id = int(outside_ids[0])
        target_id = int(target_ids[draft_id])
        raise UnreadableCheckpoint(
            f"{tensors.root}: d2t is out of range: draft id {draft_id} means target id {target_id}, and {target.name} "
            f"has ids 0 to {target.vocab_size - 1} (d2t holds offsets: target id less draft id)"
        )
    descents = np.flatnonzero(np.diff(target_ids) <= 0)
    if len(descents):
        draft_id = int(descents[0])
        target_id, next_id = int(target_ids[draft_id]), int(target_ids[draft_id + 1])
        raise UnreadableCheckpoint(
            f"{tensors.root}: d2t gives target id {target_id} to draft id {draft_id} and {next_id} to the next: target "
            "ids must ascend (d2t holds offsets: target id less draft id)"
        )
    if is_named is not None and not np.array_equal(np.flatnonzero(is_named), target_ids):
        raise UnreadableCheckpoint(
            f"{tensors.root}: d2t names {len(target_ids)} target ids and t2d marks {int((is_named != 0).sum())} "
            "others; the two belong to different vocabularies"
        )
    if is_named is None and len(target_ids) < target.vocab_size and int(target_ids[-1]) == len(target_ids) - 1:
        raise UnreadableCheckpoint(
            f"{tensors.root}: d2t holds zeros alone, which would name the first {len(target_ids)} target ids, and no "
            "t2d confirms it: the map was never filled"
        )
