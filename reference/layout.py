"""KvLayout: where the engine holds keys and values, and how it commits them."""

from dataclasses import dataclass, field, replace

from specverify.reference.kv_rounding import DYNAMIC, LARGEST, STATIC, KvRounding
from specverify.reference.malformed import Malformed
from specverify.reference.rules import OMIT_DEFAULT

COMMITS = ("path", "fast", "length")

NO_PREFIX = "there is no committed prefix to share"
"""Why a commit that asked for `fast` went by `path`: nothing was committed before the step."""

NOT_IN_ORDER = "the accepted path is not a prefix of the row order"
"""Why a commit that asked for `length` went by `path`."""

FAST_SWITCH = "EA_FAST_CACHE_REORDER"
"""Environment switch of the fast reorder, as EAGLE-Pangu names it: 0 never, 1 also where a case asks for `path`."""


@dataclass(frozen=True)
class LayoutKind:
    """The traits of one layout, read wherever a layout is declared, drawn, judged or reported.

    Attributes:
        sentence: One line on the layout, for lists.
        commits: The ways in which it can commit; a layout with one way has `path`.
        pages: Whether its columns lie in pages of a pool that requests share.
        keeps_prefixes: Whether full pages of finished requests are kept for later requests with the same prefix.
        bitwise: Whether attention runs the same operations as over a `branch` cache, so that every bit is the same. The
            numbers of other layouts are compared within the bound of rule N.
        reads_stale: Whether attention reads free and stale cells under its mask, so that they must be finite.
        ring: Whether a layer with a window keeps only the columns that it can still see; its prefills then run in
            blocks of a tree's size.
        in_place: Whether rows are written where they are to stay. The cache must then be updated before attention reads
            it, and accepted rows must come in row order.
        simpler: The layout that shrinking tries in its place, besides `branch`.
    """

    sentence: str
    commits: tuple[str, ...] = ("path",)
    pages: bool = False
    keeps_prefixes: bool = False
    bitwise: bool = True
    reads_stale: bool = False
    ring: bool = False
    in_place: bool = False
    simpler: str | None = None


KINDS: dict[str, LayoutKind] = {
    "branch": LayoutKind(
        "a replica of the committed cache takes the rows; the commit brings accepted rows home", commits=COMMITS
    ),
    "overwrite": LayoutKind(
        "verify writes [pos, pos + rows) in place; then the logical position moves on", in_place=True
    ),
    "scratch": LayoutKind("rows live in a buffer of their own; the commit copies accepted rows over"),
    "static": LayoutKind(
        "one pre-allocated buffer, attended from end to end under the mask", bitwise=False, reads_stale=True
    ),
    "sliding": LayoutKind("layers with a window keep a ring of what they can still see", bitwise=False, ring=True),
    "paged": LayoutKind("pages of a shared pool, found through a block table, over-allocated", pages=True),
    "prefix": LayoutKind(
        "paged, and full pages of finished requests are kept for requests that begin alike",
        pages=True,
        keeps_prefixes=True,
        bitwise=False,
        simpler="paged",
    ),
}
"""Every layout by name. `specverify.backends.engine.kv.layouts` makes the cache of each."""

PLAIN = "branch"
"""The layout with which every other layout is compared."""

SYNCS = ("keep", "refeed")

POISONS = ("", "large", "nan", "others")
PAGE_STATES = ("carried", "recomputed")
"""How a draft that reads hidden states of the target comes by those before the end of known pages."""

KV_DTYPES = ("", *LARGEST)
KV_SCALES = (*STATIC, *DYNAMIC)
SCALES = (2.0**-10, 2.0**4)
"""The bounds of `kv_scale`."""

LARGEST_PAGE = 128
MOST_PAGES = 2**16
MOST_SLOTS = 2**10

COUNTS = (
    "padded_nodes", "prefill_chunk", "overhang", "first_tier", "second_tier", "branches", "left_pad", "state_slots",
)  # fmt: skip
"""The fields of `KvLayout` that count something."""


@dataclass(frozen=True)
class KvLayout:
    """How keys and values are held.

    Attributes:
        commit: For `branch`: `path` gathers the whole cache by accepted rows. `fast` keeps the shared prefix and
            gathers the tail, and falls back to `path` on any inconsistency. `length` crops the cache, which only suits
            an accepted path that is a prefix of the row order, and falls back to `path` elsewhere (EAGLE-Pangu,
            branch/commit).
        padded_nodes: Rows to which the tree is padded before the forward; 0 adds no padding.
        prefill_chunk: Tokens per prefill forward; 0 prefills in one forward.
        kind: One of KINDS.
        page_size: Columns of a page, 1 to 128; 0 for layouts without pages.
        pages: The free list: page ids in the order in which they are handed out. Empty: as many pages as are needed, by
            ascending id.
        overhang: Columns allocated beyond those in use.
        draft_sync: How the draft's cache follows a commit: `keep` keeps the KV of accepted rows, `refeed` drops the KV
            of the whole block and feeds the accepted tokens anew.
        stay_in_chunk: Whether drafted nodes beyond the chunk of their root are cut before verification (Llama 4 with
            EAGLE). The chunk is the target's shortest; without effect on a target without chunks.
        poison: The value that fills free, padded and stale cells before each step: none, a `large` finite number, `nan`
            where no attention reads the cell and `large` elsewhere, or a key of one of the `others`, the session's
            living requests (`large` where there is no other). With `nan`, rows of padding of a verify forward have no
            finite number from their embedding on, but on models with experts.
        latent: Whether a model with latent attention (DeepSeek) caches latent vectors and rotated parts, one of each
            for a row, in place of the keys and values of all heads. Attention then absorbs the projections that would
            expand them. Without effect on other models.
        first_tier: The most pages that the prefix cache keeps in the pool while no request holds them; the least
            recently used leave first. 0 for as many as there is room for.
        second_tier: The number of pages that left the pool and are kept elsewhere, to be brought back when a prompt
            begins with their tokens; 0 for none. An evicted request then leaves its full pages to the prefix cache.
        page_states: Where pages are kept for later requests, how a draft that reads hidden states of the target comes
            by those before the end of known pages: `carried`, where a page holds those of its columns; `recomputed`,
            where the target runs the tokens of the last known page again (vLLM), so that one page less is taken.
        branches: For `branch`: the most branch caches that a request has at once, each with the rows of one path of the
            tree; the last one takes what is left. 0 for one branch with all rows.
        left_pad: Dead columns in front of the longest request of a forward, which pads shorter ones on the left to the
            same end; 0 pads them on the right.
        mixed_prefill: Whether the prompts of a session are prefilled in the forwards of its steps: a request that a
            step names runs the next chunk of its prompt there (`prefill_chunk` tokens; 0 for all), beside the trees of
            the others, and takes steps of its own once its prompt has its columns. Without effect without a session.
        draft_page_size: Columns of a page of the draft's cache, which then has pages, a block table and a prefix cache
            of its own (`of_draft`); 0 where its columns lie in the pages of the target. Without effect on a draft
            without a cache.
        state_slots: Slots of the pool in which requests keep their recurrent states, each with a checkpoint for every
            row of a block; a request without a slot waits. 0 for states in tensors of each request's own.
        kv_dtype: The dtype in which the target's keys and values are stored, `fp8_e4m3` or `int8`; empty for the
            working dtype. Every row is rounded as it is written, and read back by its own forward too. The draft's
            cache is not.
        kv_scales: The scale of such a number: the case's for a layer's keys and for its values (`tensor`), or for
            those of each KV head (`head`); or by the largest number of a row's head (`row`), or of each four numbers of
            it (`block`). Without effect without `kv_dtype`.
        kv_scale: The least scale of the case (`KvRounding.static_scales`).
    """

    commit: str = "path"
    padded_nodes: int = 0
    prefill_chunk: int = 0
    kind: str = field(default="branch", metadata=OMIT_DEFAULT)
    page_size: int = field(default=0, metadata=OMIT_DEFAULT)
    pages: tuple[int, ...] = field(default=(), metadata=OMIT_DEFAULT)
    overhang: int = field(default=0, metadata=OMIT_DEFAULT)
    draft_sync: str = field(default="keep", metadata=OMIT_DEFAULT)
    stay_in_chunk: bool = field(default=False, metadata=OMIT_DEFAULT)
    poison: str = field(default="", metadata=OMIT_DEFAULT)
    latent: bool = field(default=False, metadata=OMIT_DEFAULT)
    first_tier: int = field(default=0, metadata=OMIT_DEFAULT)
    second_tier: int = field(default=0, metadata=OMIT_DEFAULT)
    branches: int = field(default=0, metadata=OMIT_DEFAULT)
    left_pad: int = field(default=0, metadata=OMIT_DEFAULT)
    page_states: str = field(default=PAGE_STATES[0], metadata=OMIT_DEFAULT)
    mixed_prefill: bool = field(default=False, metadata=OMIT_DEFAULT)
    draft_page_size: int = field(default=0, metadata=OMIT_DEFAULT)
    state_slots: int = field(default=0, metadata=OMIT_DEFAULT)
    kv_dtype: str = field(default="", metadata=OMIT_DEFAULT)
    kv_scales: str = field(default=KV_SCALES[0], metadata=OMIT_DEFAULT)
    kv_scale: float = field(default=1.0, metadata=OMIT_DEFAULT)

    def __post_init__(self) -> None:
        self._one_of("commit", COMMITS)
        # `kind` is checked before `traits`, which looks it up.
        self._one_of("kind", tuple(KINDS))
        self._one_of("draft_sync", SYNCS)
        self._one_of("poison", POISONS)
        self._one_of("page_states", PAGE_STATES)
        if self.page_states != PAGE_STATES[0] and not self.traits.keeps_prefixes:
            raise Malformed("page_states", f"{self.kind} keeps no prefixes")
        for name in COUNTS:
            if getattr(self, name) < 0:
                raise Malformed(name, f"{getattr(self, name)} is negative")
        if self.state_slots > MOST_SLOTS:
            raise Malformed("state_slots", f"{self.state_slots} slots; at most {MOST_SLOTS}")
        for name in ("first_tier", "second_tier"):
            if getattr(self, name) and not self.traits.keeps_prefixes:
                raise Malformed(name, f"{self.kind} keeps no prefixes")
            if getattr(self, name) > MOST_PAGES:
                raise Malformed(name, f"{getattr(self, name)} pages; at most {MOST_PAGES}")
        if self.branches and self.kind != PLAIN:
            raise Malformed("branches", f"{self.branches} branches of {self.kind}, which has none")
        self._check_rounding()
        if self.commit not in self.traits.commits:
            raise Malformed("commit", f"{self.commit!r} is a way of branch, not of {self.kind}")
        if self.traits.pages:
            self._check_pages()
        elif self.page_size or self.pages or self.overhang or self.draft_page_size:
            paged = [kind for kind, traits in KINDS.items() if traits.pages]
            name = next(name for name in ("page_size", "pages", "overhang", "draft_page_size") if getattr(self, name))
            raise Malformed(name, f"{self.kind} has no pages (layouts with pages: {', '.join(paged)})")

    def _one_of(self, name: str, options: tuple[str, ...]) -> None:
        if getattr(self, name) not in options:
            raise Malformed(name, f"{getattr(self, name)!r} is none of {', '.join(map(repr, options))}")

    def _check_rounding(self) -> None:
        self._one_of("kv_dtype", KV_DTYPES)
        self._one_of("kv_scales", KV_SCALES)
        if not SCALES[0] <= self.kv_scale <= SCALES[1]:
            raise Malformed("kv_scale", f"{self.kv_scale} is not {SCALES[0]} to {SCALES[1]:g}")
        if self.kv_dtype and self.latent:
            raise Malformed("kv_dtype", f"{self.kv_dtype} of latent rows, which are no keys and values of heads")
        if self.kv_dtype and self.traits.ring:
            raise Malformed("kv_dtype", f"{self.kv_dtype} in {self.kind}, which lets columns go that no trace shows")

    def _check_pages(self) -> None:
        if not 1 <= self.page_size <= LARGEST_PAGE:
            raise Malformed("page_size", f"{self.page_size} is not 1 to {LARGEST_PAGE} columns")
        if not 0 <= self.draft_page_size <= LARGEST_PAGE:
            raise Malformed("draft_page_size", f"{self.draft_page_size} is not 0 to {LARGEST_PAGE} columns")
        if len(self.pages) > MOST_PAGES:
            raise Malformed("pages", f"{len(self.pages)} pages; at most {MOST_PAGES}")
        seen_pages: set[int] = set()
        for i, page in enumerate(self.pages):
            if not 0 <= page < len(self.pages):
                raise Malformed(f"pages[{i}]", f"page {page} is outside the pool of {len(self.pages)}")
            if page in seen_pages:
                raise Malformed(f"pages[{i}]", f"page {page} is owned twice: it stands in the free list before")
            seen_pages.add(page)

    def of_kind(self, kind: str) -> "KvLayout":
        """This layout with another kind, without what that kind has not: a prefix cache, branches, a stored dtype."""
        tiers = (self.first_tier, self.second_tier) if KINDS[kind].keeps_prefixes else (0, 0)
        states = self.page_states if KINDS[kind].keeps_prefixes else PAGE_STATES[0]
        branches = self.branches if kind == PLAIN else 0
        return replace(
            self,
            kind=kind,
            first_tier=tiers[0],
            second_tier=tiers[1],
            branches=branches,
            page_states=states,
            kv_dtype="" if KINDS[kind].ring else self.kv_dtype,
        )

    @property
    def traits(self) -> LayoutKind:
        """The traits of the layout's kind."""
        return KINDS[self.kind]

    def pages_for(self, columns: int) -> int:
        """Number of pages that hold `columns` columns and the overhang."""
        # Integer division rounded up.
        return -(-(columns + self.overhang) // self.page_size)

    @property
    def as_plain(self) -> "KvLayout":
        """The plain layout, with the stored dtype of this one."""
        return KvLayout(kv_dtype=self.kv_dtype, kv_scales=self.kv_scales, kv_scale=self.kv_scale)

    @property
    def rounding(self) -> KvRounding | None:
        """The rounding of the target's keys and values; None where they are stored in the working dtype."""
        return KvRounding(self.kv_dtype, self.kv_scales, self.kv_scale) if self.kv_dtype else None

    @property
    def of_draft(self) -> "KvLayout":
        """The layout of the draft's own pages; this layout where `draft_page_size` is 0.

        Free list and tiers have room for as many columns as those of the target, rounded up to whole pages. Pages are
        handed out by descending id.
        """
        size = self.draft_page_size
        if not size:
            return self
        counts = (-(-count * self.page_size // size) for count in (len(self.pages), self.first_tier, self.second_tier))
        count, first_tier, second_tier = counts
        return replace(
            self,
            page_size=size,
            pages=tuple(reversed(range(count))),
            first_tier=first_tier,
            second_tier=second_tier,
            draft_page_size=0,
        )
