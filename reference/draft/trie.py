"""Trie: an n-gram trie of bounded size over the tokens so far."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from specverify.reference.draft.ngram import Ngram
from specverify.reference.malformed import Malformed


@dataclass(frozen=True)
class Trie(Ngram):
    """A trie of n-grams of at most `order` tokens, of which at most `capacity` are held.

    A text enters token by token. With each token enter the windows that end with it: its last `order` tokens, then the
    last `order - 1`, and so on to the token alone.

    - **Insert.** A window adds one to the count of its own n-gram. N-grams that begin the window and that the trie
      does not hold are added, with a count of 1. A rejected token never enters.
    - **Use.** A window uses its n-gram and every n-gram that begins it, the longest first and the shortest last. A
      look-up is no use, so that the trie depends on the texts alone.
    - **Prune.** After each token, n-grams are removed until `capacity` are left: the least recently used first. An
      n-gram is used after every n-gram that it begins, so that the removed one is a leaf. Its count is lost.

    A node of the drafted tree takes the longest suffix of its sequence, of `order - 1` tokens at most and one at least,
    that begins a longer n-gram of the trie. The last tokens of those n-grams rank by count, then by how recently the
    n-gram was used. A rank that does not exist leaves its node, and the nodes below, out of the tree.

    Attributes:
        capacity: The most n-grams that the trie holds, which are its nodes beside the root.
        shared: Whether the requests of a session whose drafts are equal to this one share a trie. The prompt of each
            enters it with the request, and the output when it is emitted, in the order of the batch; a request that
            switches to another draft enters no more. False keeps a trie for each request.
    """

    TAG = "trie"
    WORD = "trie"
    SCHEMA = {  # noqa: RUF012 - read-only
        "type": "object",
        "additionalProperties": False,
        "required": ["kind", "shape", "order", "capacity", "shared"],
        "properties": {
            "kind": {},
            "shape": {"$ref": "#/$defs/rankTree"},
            "order": {"type": "integer", "minimum": 0, "maximum": 64},
            "capacity": {"type": "integer", "minimum": 0, "maximum": 1048576},
            "shared": {"type": "boolean"},
        },
    }

    capacity: int = 1024
    shared: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.capacity < 1:
            raise Malformed("capacity", f"{self.capacity}: a trie holds at least one n-gram")

    def simpler(self) -> Iterator["Trie"]:
        """The trie of each request alone, and a trie with shorter n-grams."""
        yield from super().simpler()
        yield from self.with_defaults("shared")
        if self.order > 2:
            yield replace(self, order=self.order - 1)

    @property
    def as_shared(self) -> "Trie":
        """See `Draft`."""
        return replace(self, shared=True)

    def refuses_draws(self, draws: str) -> str | None:
        """See `Draft`; the coins of a step have places by the sizes of trees, which then depend on other requests."""
        if self.shared:
            return f"draws {draws}: a request that samples shares no trie with others (shared: false)"
        return super().refuses_draws(draws)
