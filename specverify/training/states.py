"""The cache of the target's states on disk, in shards.

A folder is named by the digest of all that its states follow from. A shard is one safetensors file, written whole, of
texts laid end to end. A run that was killed goes on after its last whole shard.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from specverify.reference.draft.hidden import HiddenStates
from specverify.reports.writing import write_whole
from specverify.setup.errors import UnusableInput
from specverify.training.acceptance import HeldOutText
from specverify.training.heads.base import Batch
from specverify.training.target import NORMED, ContinuedText

ABOUT = "about.json"
"""The file that says what a folder of states was made from."""


class StateCache:
    """A folder of shards.

    Args:
        folder: The folder; it is made if it does not exist.
        digest: The digest of all that the states follow from: target, texts, lengths, states.
        reads: The states that are kept; those of the last norm are kept beside them.

    Raises:
        UnusableInput: The folder holds something else, or states of another digest.
    """

    def __init__(self, folder: Path, digest: str, reads: HiddenStates) -> None:
        self.folder = folder
        self.reads = reads
        about = folder / ABOUT
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if about.exists():
                held_digest = json.loads(about.read_text(encoding="utf-8")).get("digest")
                if held_digest != digest:
                    raise UnusableInput(
                        f"--cache {folder}: holds the states of another target or text "
                        f"(digest {str(held_digest)[:12]}, not {digest[:12]}); name another folder"
                    )
            elif any(folder.iterdir()):
                raise UnusableInput(f"--cache {folder}: holds other files; name an empty folder")
            else:
                content = {"digest": digest, "reads": str(reads), "format": "specverify-states-1"}
                write_whole(about, json.dumps(content).encode())
        except (OSError, ValueError, AttributeError) as why:
            if isinstance(why, UnusableInput):
                raise
            raise UnusableInput(f"--cache {folder}: {' '.join(str(why).split())[:120]}") from None

    def file(self, number: int) -> Path:
        """The file of shard `number`."""
        return self.folder / f"{number:05d}.safetensors"

    def has_shard(self, number: int) -> bool:
        """Whether shard `number` was written."""
        return self.file(number).exists()

    @property
    def shards(self) -> int:
        """The number of shards, from 0 on without a gap."""
        number = 0
        while self.has_shard(number):
            number += 1
        return number

    @property
    def texts(self) -> int:
        """The number of texts in all shards."""
        count = 0
        for number in range(self.shards):
            with _shard(self.file(number)), safe_open(self.file(number), "pt") as content:
                count += len(content.get_tensor("lengths"))
        return count

    def write_shard(self, number: int, texts: list[ContinuedText]) -> None:
        """Write shard `number`, whole or not at all."""
        write_whole(self.file(number), _pack_texts(texts, self.reads))

    def load(self, number: int) -> list[ContinuedText]:
        """The texts of shard `number`."""
        return _unpack_texts(self.file(number), self.reads)

    def held_out(self, name: str) -> list[HeldOutText] | None:
        """The held-out texts under `name`, or None if they were not written."""
        file = self.folder / f"{name}.safetensors"
        if not file.exists():
            return None
        return [HeldOutText(text.tokens, text.prompt, text.states.float()) for text in _unpack_texts(file, self.reads)]

    def hold_out(self, name: str, texts: list[ContinuedText]) -> None:
        """Write held-out texts under `name`."""
        write_whole(self.folder / f"{name}.safetensors", _pack_texts(texts, self.reads))


def _pack_texts(texts: list[ContinuedText], reads: HiddenStates) -> bytes:
    tensors = {
        "tokens": torch.cat([text.tokens for text in texts]).int(),
        "lengths": torch.tensor([len(text.tokens) for text in texts]),
        "prompts": torch.tensor([text.prompt for text in texts]),
        "last": torch.cat([text.last for text in texts]),
    }
    if reads.place != NORMED.place:
        tensors["states"] = torch.cat([text.states for text in texts])
    return save(tensors)


@contextmanager
def _shard(file: Path) -> Iterator[None]:
    """Refuse a file that is no shard, by its name."""
    try:
        yield
    except (OSError, SafetensorError, KeyError, RuntimeError) as why:
        raise UnusableInput(f"{file}: no shard of states ({' '.join(str(why).split())[:80]}); delete it") from None


def _unpack_texts(file: Path, reads: HiddenStates) -> list[ContinuedText]:
    with _shard(file):
        tensors = load_file(file)
        lengths = tensors["lengths"].tolist()
        tokens, last = (torch.split(tensors[name], lengths) for name in ("tokens", "last"))
        states = last if reads.place == NORMED.place else torch.split(tensors["states"], lengths)
        prompts = tensors["prompts"].tolist()
    return [
        ContinuedText(text_tokens.long(), prompts[number], states[number], last[number])
        for number, text_tokens in enumerate(tokens)
    ]


@dataclass(frozen=True)
class Order:
    """The endless order of batches of a cache, the same for one seed.

    Attributes:
        cache: The cache.
        shards: The number of shards that are read.
        per_batch: The texts of a batch.
        generated: Whether the target continued the prompts; then rows are learned from the middle of the prompt on.
        seed: The seed of the order.
        rank, world: This process and the number of processes, which share the texts of each shard.
    """

    cache: StateCache
    shards: int
    per_batch: int
    generated: bool
    seed: int
    rank: int = 0
    world: int = 1

    def batches(self, skip: int = 0, device: str = "cpu") -> Iterator[Batch]:
        """Batches from number `skip` on, for ever."""
        epoch = 0
        while True:
            order = torch.Generator().manual_seed(self.seed + epoch)
            for shard in torch.randperm(self.shards, generator=order).tolist():
                within = torch.Generator().manual_seed(self.seed + 1000 * epoch + shard)
                texts = self.cache.load(shard)[self.rank :: self.world]
                shuffled = torch.randperm(len(texts), generator=within).tolist()
                for first in range(0, len(texts), self.per_batch):
                    if skip:
                        skip -= 1
                        continue
                    chosen = [texts[number] for number in shuffled[first : first + self.per_batch]]
                    yield batch_of(chosen, self.generated, device)
            epoch += 1


def batch_of(texts: list[ContinuedText], generated: bool, device: str = "cpu") -> Batch:
    """Texts side by side, in float32; `generated` as in `Order`."""
    lengths = torch.tensor([len(text.tokens) for text in texts])
    # The first half of a prompt costs as much to learn, and says less of the target's own tokens.
    firsts = torch.tensor([text.prompt // 2 if generated else 0 for text in texts])

    def side_by_side(parts: list[Tensor]) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)

    return Batch(
        side_by_side([text.tokens for text in texts]).to(device),
        side_by_side([text.states for text in texts]).to(device, torch.float32),
        side_by_side([text.last for text in texts]).to(device, torch.float32),
        lengths.to(device),
        firsts.to(device),
    )
