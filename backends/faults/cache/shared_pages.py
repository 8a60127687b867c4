"""Faults of pages that requests share, by a common prefix or by a fork."""

from dataclasses import replace

from specverify.backends.engine.kv.arena import Arena, CacheLease, CacheNeeds
from specverify.backends.engine.kv.base import OutOfPages
from specverify.backends.engine.kv.pages import Blocks
from specverify.backends.engine.kv.prefix import Key, PrefixCache
from specverify.backends.engine.seams import Seams
from specverify.backends.faults.fault import attended_fault, committed_fault, drafted_fault, in_place_of


@attended_fault(
    "pages-published-unwritten",
    "catalogue BZ-021: prefix blocks published before the forward pass wrote their KV",
    "layout prefix, and two prompts that begin with the same page, or one that is evicted and restored",
)
@in_place_of("arena")
class Early(Arena):
    """Pages of a prompt are published before a forward has written them, and the next request reads nothing."""

    def lease(self, needs: CacheNeeds) -> CacheLease:
        lease = super().lease(needs)
        if self.prefix is not None and lease.blocks is not None:
            try:
                lease.blocks.reserve(len(needs.tokens))
            # An exhausted pool publishes nothing.
            except OutOfPages:
                return lease
            self.prefix.insert(needs.draft, needs.tokens, lease.blocks.table)
        return lease


@attended_fault(
    "reused-prefix-one-too-long",
    "catalogue BZ-126: n_past computed with off-by-one from position",
    "layout prefix, and a hit that is shorter than the prompt",
)
@in_place_of("arena")
class OneMore(Arena):
    """The committed length of a reused prefix counts the position after it, whose KV nobody wrote."""

    def lease(self, needs: CacheNeeds) -> CacheLease:
        lease = super().lease(needs)
        if 0 < lease.reused < len(needs.tokens):
            lease.target.length += 1
        return lease


@attended_fault(
    "pages-handed-over-from-the-tail",
    "catalogue BZ-054: P/D transfer misaligns blocks if prompt is a multiple of the block size",
    "a fork whose prefix is a multiple of the page size",
)
@in_place_of("arena")
class MisalignedArena(Arena):
    """Where the last page is full, one side has a page more for drafts, and tables are aligned at their ends."""

    def fork(self, source: CacheLease, needs: CacheNeeds) -> CacheLease:
        blocks = source.blocks
        columns = source.target.length
        # The report needs a full last page and one more page behind it.
        if blocks is None or not columns or columns % blocks.size or blocks.allocated <= columns:
            return super().fork(source, needs)
        table = blocks.table
        blocks.table = table[1:]
        lease = super().fork(source, needs)
        blocks.table = table
        return lease


@committed_fault(
    "shared-page-written",
    "family of catalogue BZ-068: pages shared by prefix corrupt unrelated requests",
    "a fork whose prefix ends inside a page, both stepped in one batch",
)
@in_place_of("kv.blocks")
class WritesSharedPages(Blocks):
    """A partly filled page that two requests share is written by both: copy on write is missed."""

    def copy_on_write(self, begin: int, end: int) -> None:
        """Copy no page."""


@drafted_fault(
    "copy-on-write-forgets-draft",
    "family of catalogue BZ-061: a buffer beside keys and values is left out of the move",
    "a fork with a draft model whose prefix ends inside a page",
)
@in_place_of("kv.blocks")
class TargetOnly(Blocks):
    """A shared page is copied in the target's pool, and not in the draft's, which shares the block table."""

    def copy_on_write(self, begin: int, end: int) -> None:
        """Copy pages in the target's pool only."""
        # The draft's pool registers its copy function first, the target's last.
        every = self.copy
        self.copy = self.copy[-1:]
        super().copy_on_write(begin, end)
        self.copy = every


@attended_fault(
    "page-known-by-own-tokens",
    "family of catalogue BZ-126: what is reused is told by too little",
    "layout prefix, and a page of tokens met again in another place",
)
@in_place_of("kv.prefix")
class ByPage(PrefixCache):
    """A kept page is found by the tokens in it, whatever came before them."""

    def _key(self, owner: object, tokens: tuple[int, ...], end: int) -> Key:
        return owner, tokens[end - self.page_size : end]

    def match(self, owner: object, tokens: tuple[int, ...]) -> list[int]:
        pages: list[int] = []
        for end in range(self.page_size, len(tokens) + 1, self.page_size):
            page = self.entries.get(self._key(owner, tokens, end))
            # A block table must not name one page twice.
            if page is None or page in pages:
                break
            pages.append(page)
        return pages

    def insert(
        self, owner: object, tokens: tuple[int, ...], table: list[int], text: tuple[int, ...] | None = None
    ) -> None:
        for place in range(len(tokens) // self.page_size):
            key = self._key(owner, tokens, (place + 1) * self.page_size)
            if key not in self.entries:
                self.pages.share(table[place])
                self.entries[key] = table[place]


class AnyDraft(Arena):
    """An arena that counts one draft model's columns as written for another draft model, on a fork.

    Each draft model has a pool of its own, so the shared pages hold no keys and values of the request's own draft
    model.
    """

    def fork(self, source: CacheLease, needs: CacheNeeds) -> CacheLease:
        lease = super().fork(source, needs)
        if lease.blocks is not None and lease.draft is not None and source.draft is not None:
            lease.draft.length = min(source.draft.length, source.target.length)
        return lease


class AnyOwner(PrefixCache):
    """A prefix cache that does not tell one draft model from another.

    It still tells requests with a draft model from requests without.
    """

    def match(self, owner: object, tokens: tuple[int, ...]) -> list[int]:
        return super().match(owner is not None, tokens)

    def insert(
        self, owner: object, tokens: tuple[int, ...], table: list[int], text: tuple[int, ...] | None = None
    ) -> None:
        super().insert(owner is not None, tokens, table, text)


@drafted_fault(
    "draft-page-forked-across-models",
    "family of catalogue BZ-170: draft cache not synchronised when a prefix is reused",
    "pages; a fork, or a prefix met again, between requests with two draft models, and a step after it",
)
def shared_across_drafts(seams: Seams) -> Seams:
    """A fork, or a hit of the prefix cache, shares the draft's pages although another model drafts there.

    The request then counts draft columns as filled that its own draft model never wrote.
    """
    return replace(seams, arena=AnyDraft, kv=replace(seams.kv, prefix=AnyOwner))


class AnyFollower(PrefixCache):
    """A prefix cache in which a page leads on to any other that continues its tokens."""

    def insert(
        self, owner: object, tokens: tuple[int, ...], table: list[int], text: tuple[int, ...] | None = None
    ) -> None:
        super().insert(owner, tokens, table)


@drafted_fault(
    "head-page-followed-by-another-text",
    "found in our engine: a page is known by its own tokens, and the last row of an EAGLE head holds the next one",
    "layout prefix, a head without a row for the first token, and two of three texts that go on alike behind a page",
)
def followed_by_any(seams: Seams) -> Seams:
    """A page of a head's rows is used in the middle of a text although it was written for a text that parts there.

    Its last row holds the token behind the page, which is another one.
    """
    return replace(seams, kv=replace(seams.kv, prefix=AnyFollower))
