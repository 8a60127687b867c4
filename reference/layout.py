"""KvLayout: how the engine holds keys and values while it speculates, and how it commits them."""

from dataclasses import dataclass, field

from reference.malformed import Malformed
from reference.rules import LATER

COMMITS = ("path", "fast", "length")


@dataclass(frozen=True)
class KvLayout:
    """One contiguous branch / commit cache.

    Attributes:
        commit: `path` gathers the whole cache by accepted rows; `fast` keeps the shared prefix and gathers the tail,
            falling back to `path` on any inconsistency; `length` crops, which only suits an accepted path that is a
            prefix of the row order, and falls back to `path` elsewhere (EAGLE-Pangu, branch/commit cache).
        padded_nodes: Rows the tree is padded to before the forward; 0 leaves it as it is.
        prefill_chunk: Tokens per prefill forward; 0 prefills in one.
        stay_in_chunk: Whether drafted nodes beyond the chunk of their root are cut before verification, the chunk being
            the target's shortest (Llama 4 with EAGLE); says nothing of a target without chunks.
    """

    commit: str = "path"
    padded_nodes: int = 0
    prefill_chunk: int = 0
    stay_in_chunk: bool = field(default=False, metadata=LATER)

    def __post_init__(self) -> None:
        if self.commit not in COMMITS:
            raise Malformed("commit", f"{self.commit!r} is none of {', '.join(COMMITS)}")
        for name in ("padded_nodes", "prefill_chunk"):
            if getattr(self, name) < 0:
                raise Malformed(name, f"{getattr(self, name)} is negative")
