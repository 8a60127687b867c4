"""Draft vocabularies of several sizes: a draft with the tokens that texts use most, and no others.

A second model is told which tokens it may name. A head scores its own rows: a copy of it with fewer rows is written to
`.specverify/heads`, so that its product over the vocabulary is as small as its vocabulary.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save

from specverify.checkpoints.given_draft import MODEL, given_draft, with_own_tree
from specverify.checkpoints.opening import directory_of
from specverify.reference.abilities import Abilities
from specverify.reference.architecture import Checkpoint
from specverify.reference.draft import Draft
from specverify.reference.draft.eagle3 import Eagle3
from specverify.reference.tree import RankTree
from specverify.reports.writing import write_whole
from specverify.setup.errors import UnusableInput

FOLDER = Path(".specverify") / "heads"
"""The folder of heads with fewer rows, by digest."""

ROWS = ("lm_head.weight", "model.lm_head.weight")
"""The names of the matrix with a row for each draft id."""

MAPS = ("d2t", "t2d", "draft_id_to_target_id", "model.d2t", "model.t2d")
"""The names of the maps between draft ids and target ids."""


def with_vocabulary(
    draft_name: str,
    draft: Draft | None,
    size: int,
    *,
    counts: Counter[int],
    checkpoint: Checkpoint,
    within: Abilities | None,
    weights: str = "",
) -> Draft:
    """The draft that `--draft` names with its `size` most frequent tokens.

    Args:
        draft_name: The argument of `--draft`.
        draft: The draft with all of its tokens.
        size: The number of tokens.
        counts: How often texts use each token.
        checkpoint: The target.
        within: The abilities of the backend, where they are known.
        weights: The kind of quantised weights; empty for the stored ones.

    Raises:
        UnusableInput: The draft names every token, or fewer than `size`.
    """
    every_id = range(checkpoint.vocab_size)
    if draft is not None and draft.naming(tuple(every_id)) is not None:
        # A tree of few tokens has few children: the draft is named as the bare root, and then given its tree.
        bare = draft.with_shapes((RankTree((0,), (0,)),))
        named_draft = bare.naming(_most_frequent(draft_name, every_id, counts, size))
        return with_own_tree(named_draft, within is None or "dynamic" in within.tree_kinds)  # type: ignore[arg-type]
    if not isinstance(draft, Eagle3):
        kinds = f"{MODEL}DIR and EAGLE-3 heads"
        raise UnusableInput(f"bench decode --draft-vocabulary: {draft_name} has no vocabulary of its own ({kinds} do)")
    named = draft.vocabulary or tuple(every_id)
    kept_ids = _most_frequent(draft_name, named, counts, size)
    folder = reduce_head(Path(directory_of(draft_name, "--draft")), named, kept_ids, checkpoint.vocab_size)
    reduced = given_draft(str(folder), checkpoint, within, weights)
    assert reduced is not None
    return reduced


def _most_frequent(draft_name: str, named: Sequence[int], counts: Counter[int], size: int) -> tuple[int, ...]:
    """The `size` most frequent of the ids `named`, ascending; of equal counts the lower id."""
    if size > len(named):
        raise UnusableInput(
            f"bench decode --draft-vocabulary {size}: {draft_name} names {len(named)} tokens, and no more"
        )
    return tuple(sorted(sorted(named, key=lambda token: (-counts[token], token))[:size]))


def reduce_head(head: Path, named: Sequence[int], kept_ids: Sequence[int], total: int) -> Path:
    """The directory of a copy of an EAGLE-3 head that names `kept_ids` alone; written where it is not there yet.

    Args:
        head: The directory of the head, whose files have been checked.
        named: The target id of each draft id.
        kept_ids: The target ids that stay, ascending.
        total: The number of the target's ids.

    Raises:
        UnusableInput: The head scores with the target's matrix, of which it has no rows.
        Unwritable: The copy cannot be written.
    """
    tensors = _tensors_of(head)
    rows_name = next((name for name in ROWS if name in tensors), None)
    if rows_name is None:
        raise UnusableInput(f"bench decode --draft-vocabulary: {head} scores with the target's matrix, and has no own")
    draft_id_of = {target_id: draft_id for draft_id, target_id in enumerate(named)}
    rows = torch.tensor([draft_id_of[target_id] for target_id in kept_ids])
    tensors = {name: tensor for name, tensor in tensors.items() if name not in MAPS}
    tensors[rows_name] = tensors[rows_name][rows].contiguous()
    ids = np.array(kept_ids, dtype=np.int64)
    tensors["d2t"] = torch.from_numpy(ids - np.arange(len(ids)))
    tensors["t2d"] = torch.from_numpy(np.isin(np.arange(total), ids))
    config: dict[str, Any] = json.loads((head / "config.json").read_text())
    config["draft_vocab_size"] = len(kept_ids)
    content, weights = json.dumps(config, indent=1).encode(), save(tensors)
    folder = FOLDER / hashlib.sha256(content + weights).hexdigest()[:16]
    if not (folder / "config.json").exists():
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as why:
            raise UnusableInput(f"{folder}: {why.strerror}") from None
        # config.json last: a folder without it is begun again.
        write_whole(folder / "model.safetensors", weights)
        write_whole(folder / "config.json", content)
    return folder


def _tensors_of(head: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(head.glob("*.safetensors")):
        with safe_open(file, "pt") as content:
            tensors |= {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118 - no mapping
    return tensors
