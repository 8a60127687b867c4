"""The arena, which makes the KV caches of all requests and takes them back.

It serves every layout. For layouts with pages it owns the pools, the allocator and the prefix cache; where drafts have
pages of a size of their own, it has an allocator and a prefix cache for these too.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from specverify.backends.base import Unsupported
from specverify.backends.engine.kv.base import CacheSpec, KvCache, Poison, held_columns
from specverify.backends.engine.kv.choices import RowChoice, choices_beside
from specverify.backends.engine.kv.layouts import CACHES
from specverify.backends.engine.kv.paged import Cells, Pool
from specverify.backends.engine.kv.pages import Blocks
from specverify.backends.engine.kv.prefix import Border, PrefixCache
from specverify.backends.engine.kv.recurrent import put_states_beside, states_of
from specverify.backends.engine.kv.seams import KvSeams
from specverify.backends.engine.kv.state_pages import StatePages, StatePool
from specverify.backends.engine.kv.state_slots import RecurrentPool
from specverify.reference.draft import Draft, step_columns
from specverify.reference.draft.hidden import HiddenStates
from specverify.reference.layout import KvLayout

LARGE = 3e4
"""A poison value: finite in every working dtype (float16 ends at 65504), and far from any key or value."""


class Model(Protocol):
    """A model that needs KV caches; in the engine, `CausalLm`."""

    def room(self, capacity: int, rows: int) -> CacheSpec:
        """The sizes of a cache of this model, for `capacity` columns and blocks of at most `rows` rows."""
        ...


@dataclass(frozen=True)
class StateNeeds:
    """The hidden states of the target that a draft reads, and what becomes of them at a hit of the prefix cache.

    Attributes:
        reads: Which hidden states.
        width: Their width.
        fuses_first: Whether the draft has a row for the first token, and so one for each column of the target. A row of
            another head holds the token behind its column, so that the last one of known pages is not known.
        starts_behind_rows: Whether the draft can go on behind rows of known pages without states before their end.
        own_state_alone: Whether a row holds the state of its own column and nothing else: known pages then hold the
            rows of all their columns, and the next row needs none of their states.
    """

    reads: HiddenStates
    width: int
    fuses_first: bool = False
    starts_behind_rows: bool = True
    own_state_alone: bool = False


@dataclass(frozen=True)
class CacheNeeds:
    """The needs of a request for its caches.

    Attributes:
        target: The model that verifies.
        draft: The draft's model; None for a draft without one.
        capacity: The largest number of columns of each cache, speculative rows included.
        rows: The largest number of rows that one forward opens.
        tokens: The tokens that the request will prefill.
        adapter: What beside tokens its keys and values depend on: adapter and images of the request; None for neither.
        states: The hidden states that the draft reads; None for a draft that reads none.
    """

    target: Model
    draft: Model | None
    capacity: int
    rows: int
    tokens: tuple[int, ...] = ()
    adapter: object = None
    states: StateNeeds | None = None

    @property
    def rows_lead(self) -> bool:
        """Whether a row of the draft holds the token behind the row's column."""
        return self.states is not None and not self.states.fuses_first and not self.states.own_state_alone


@dataclass
class CacheLease:
    """The caches of one request: target, draft (if it has a model), and their block tables.

    Attributes:
        target: The cache of the target.
        draft: The cache of the draft's model; None for a draft without a model.
        blocks: The block table, which both caches share where the draft has none of its own; None for layouts without
            pages.
        draft_blocks: The block table of the draft's own pages; None where its columns lie in the target's.
        owner: The draft's model or None. Prefix pages are shared only between requests with the same owner, because a
            block holds the KV of target and draft.
        reused: Number of columns that came from the prefix cache, or from a fork.
        adapter: As in `CacheNeeds`.
        states: The hidden states of its columns, where pages carry them.
        reads: Which hidden states these are; None where pages carry none.
        rows_lead: Whether a row of its draft holds the token behind the row's column, as those of most heads do.
        slot: The slot of its recurrent states; None where the layout has none, or none was free.
    """

    target: KvCache
    draft: KvCache | None = None
    blocks: Blocks | None = None
    owner: object = None
    reused: int = 0
    adapter: object = None
    states: StatePages | None = None
    reads: HiddenStates | None = None
    rows_lead: bool = False
    draft_blocks: Blocks | None = None
    slot: int | None = None

    @property
    def key(self) -> object:
        """The owner of its pages in the prefix cache; see `page_owner`."""
        return page_owner(self.owner if self.draft_blocks is None else None, self.adapter, self.reads)

    @property
    def tables(self) -> list[tuple[Blocks, int]]:
        """Each of its block tables, with the number of columns that every cache on it has committed."""
        if self.blocks is None:
            return []
        if self.draft_blocks is None or self.draft is None:
            return [(self.blocks, min(cache.length for cache in self.caches))]
        return [(self.blocks, self.target.length), (self.draft_blocks, self.draft.length)]

    @property
    def caches(self) -> list[KvCache]:
        """The target's cache and, if there is one, the draft's."""
        return [self.target] if self.draft is None else [self.target, self.draft]


def page_owner(draft: object, adapter: object, reads: HiddenStates | None = None) -> object:
    """The owner of pages in the prefix cache: tokens under another draft model, or another adapter, have other KV.

    Pages that carry states which a draft without a model `reads` are known by these.
    """
    owner = reads if draft is None else draft
    return owner if adapter is None else (owner, adapter)


class Arena:
    """Makes caches of one layout; with pages, it has one pool per model and role, and one allocator for all pools.

    Where drafts have pages of their own (`KvLayout.draft_page_size`), their pools have another allocator and another
    prefix cache. A page of the target then holds no draft's columns: requests with unlike drafts share it, and the two
    prefix caches may know beginnings of unlike lengths.

    Attributes:
        layout: The layout of targets.
        draft_layout: The layout of drafts (`KvLayout.of_draft`).
        pages: The allocator of the target's pools.
        draft_pages: The allocator of the drafts' pools, `pages` where these are not apart.
        prefix: The prefix cache of pages of `pages`; None for a layout that keeps none.
        draft_prefix: The prefix cache of pages of drafts of their own; None where there are none.
    """

    def __init__(self, layout: KvLayout, pages: int = 0, seams: KvSeams | None = None, draft_pages: int = 0) -> None:
        self.layout = layout
        self.draft_layout = layout.of_draft
        self._seams = seams or KvSeams()
        self._choices: dict[object, dict[int, RowChoice]] = {}  # of the rows of the prefix cache's pages
        self._pools: dict[tuple[Model, str], Pool] = {}
        self._state_pools: dict[HiddenStates, StatePool] = {}
        self._recurrent_pools: dict[tuple[Model, str], RecurrentPool] = {}
        self.slots = self._seams.slots(layout.state_slots)
        self.pages = self._seams.pages(layout.pages or range(pages))
        self.prefix = self._seams.prefix(self.pages, layout.page_size) if layout.traits.keeps_prefixes else None
        if self.prefix is not None:
            self.prefix.most = layout.first_tier
            if layout.second_tier:
                self.prefix.tier = self._seams.tier(layout.second_tier, layout.page_size, self._pools_of)
        self.draft_pages = self.pages
        self.draft_prefix: PrefixCache | None = None
        if layout.draft_page_size:
            self.set_drafts_apart(self.draft_layout, draft_pages)

    def set_drafts_apart(self, layout: KvLayout, pages: int) -> None:
        """Give drafts an allocator of so many `pages`, or of those that `layout` lists, and a prefix cache."""
        self.draft_pages = self._seams.pages(layout.pages or tuple(reversed(range(pages))))
        if self.prefix is not None:
            self.draft_prefix = self._seams.prefix(self.draft_pages, layout.page_size)
            self.draft_prefix.most = layout.first_tier
            if layout.second_tier:
                self.draft_prefix.tier = self._seams.tier(layout.second_tier, layout.page_size, self._draft_pools_of)

    def has_own_pages(self, needs: CacheNeeds) -> bool:
        """Whether the draft of a request has pages apart from those of the target."""
        return self.draft_pages is not self.pages and needs.draft is not None

    def target_owner(self, needs: CacheNeeds) -> object:
        """The owner of the target's pages of a request; see `page_owner`."""
        draft = None if self.has_own_pages(needs) else needs.draft
        return page_owner(draft, needs.adapter, self.carried_reads(needs))

    def carried_reads(self, needs: CacheNeeds) -> HiddenStates | None:
        """The hidden states that pages of a request carry; None where they carry none."""
        carries = self.prefix is not None and self.layout.page_states == "carried"
        return needs.states.reads if carries and needs.states is not None else None

    def lease(self, needs: CacheNeeds) -> CacheLease:
        """Caches for a request; they are empty, or begin with pages of the prefix cache."""
        if self.layout.traits.pages:
            return self.paged(needs)
        target_cache = self._plain(needs.target, needs, "target")
        draft_cache = None if needs.draft is None else self._plain(needs.draft, needs, "draft")
        lease = CacheLease(target_cache, draft_cache, owner=needs.draft, adapter=needs.adapter, slot=self.slots.take())
        self._with_states(lease, needs, ("target", "draft"))
        return lease

    def _with_states(self, lease: CacheLease, needs: CacheNeeds, roles: tuple[str, ...]) -> None:
        """Put recurrent states beside the caches of `roles`, where the models have any, and into the slot of `lease`.

        Without a slot they are tensors of their own: the layout has none, or the request waits for one.
        """
        border = self.layout.page_size if self.prefix is not None else 0
        for role, model, cache in (("target", needs.target, lease.target), ("draft", needs.draft, lease.draft)):
            if role in roles and model is not None and cache is not None and model.room(0, 0).recurrent:
                states = put_states_beside(cache, self._seams.states(border))
                if lease.slot is not None:
                    states.lie_in(self._seams.checkpoints(self.recurrent_pool(model, role, needs.rows), lease.slot))

    def recurrent_pool(self, model: Model, role: str, rows: int) -> RecurrentPool:
        """The recurrent states of all requests for a model in one role, with checkpoints for `rows` rows of each."""
        if (model, role) not in self._recurrent_pools:
            self._recurrent_pools[model, role] = self._seams.recurrent_pool(self.layout.state_slots, rows)
        return self._recurrent_pools[model, role]

    def has_slot(self, lease: CacheLease) -> bool:
        """Whether `lease` has a slot for its recurrent states, if the layout keeps them in slots."""
        return not self.layout.state_slots or lease.slot is not None

    def reserved_columns(self, draft: Draft) -> int:
        """The columns that a launch needs beyond those that the host knows to be committed.

        Those of two steps with `draft`, as SGLang reserves: of the step in flight and of the one that is launched.
        """
        return 2 * max(step_columns(draft), self.layout.padded_nodes)

    def room(self, model: Model, capacity: int, rows: int, role: str = "target") -> CacheSpec:
        """The sizes of a cache of `model` in this layout; in the role `target` with the codec of a stored dtype."""
        room = model.room(capacity, rows)
        if self.layout.rounding is not None and role == "target":
            return replace(room, codec=self._seams.codec(self.layout.rounding, room))
        return room.as_latent() if self.layout.latent else room

    def _plain(self, model: Model, needs: CacheNeeds, role: str) -> KvCache:
        """A cache of `model` in a layout without pages."""
        return CACHES[self.layout.kind](self._seams, self.room(model, needs.capacity, needs.rows, role), self.layout)

    def paged(self, needs: CacheNeeds) -> CacheLease:
        """Caches in pages, which begin with the pages of the prefix cache that hold a beginning of the tokens."""
        blocks = self._seams.blocks(self.pages, self.layout.page_size, self.layout.overhang)
        reads = self.carried_reads(needs)
        owner = self.target_owner(needs)
        pages = [] if self.prefix is None else self.prefix.match(owner, needs.tokens)
        draft_blocks: Blocks | None = None
        states_by_role: Border = (None, None)
        if self.has_own_pages(needs):
            draft_blocks, draft_columns = self.draft_table(needs)
            pages = self.pages_before_rows(pages, draft_columns, needs)
            reused = target_columns = len(pages) * self.layout.page_size
        else:
            pages, states_by_role = self._with_known_states(self.usable_pages(pages, needs), needs)
            reused = len(pages) * self.layout.page_size
            target_columns, draft_columns = self.known_columns(reused, needs)
        blocks.adopt(pages)
        draft_cache = None
        if needs.draft is not None:
            draft_cache = self._seams.paged(
                self.pool(needs.draft, "draft", needs), draft_blocks or blocks, draft_columns
            )
        states = None
        if reads is not None and needs.states is not None:
            states = self._seams.state_pages(self.state_pool(needs.target, needs.states), blocks)
        target_cache = self._seams.paged(self.pool(needs.target, "target", needs), blocks, target_columns)
        lease = CacheLease(
            target_cache,
            draft_cache,
            blocks,
            needs.draft,
            reused,
            needs.adapter,
            states,
            reads,
            needs.rows_lead,
            draft_blocks,
        )
        lease.slot = self.slots.take()
        self._with_states(lease, needs, ("target", "draft"))
        for end in range(self.layout.page_size, reused + 1, self.layout.page_size):
            choices_beside(lease.target).rows |= self._choices.get((owner, needs.tokens[:end]), {})
        for cache, border_states in zip((lease.target, lease.draft), states_by_role, strict=True):
            cache_states = None if cache is None else states_of(cache)
            if cache_states is not None and border_states is not None:
                cache_states.begin(reused, border_states)
        return lease

    def draft_table(self, needs: CacheNeeds) -> tuple[Blocks, int]:
        """A block table of the draft's own pages, which begins with known ones, and the number of its known columns.

        Raises:
            Unsupported: beside a prefix cache with models that have recurrent states, which are kept by the pages that
                target and draft share.
        """
        models = (needs.target, needs.draft)
        if self.prefix is not None and any(model.room(0, 0).recurrent for model in models if model is not None):
            raise Unsupported("a prefix cache with recurrent states, and pages of drafts of another size")
        layout = self.draft_layout
        blocks = self._seams.blocks(self.draft_pages, layout.page_size, layout.overhang)
        # Later modules of a head follow from states before the rows, which no page carries.
        starts_anew = (
            needs.states is not None and not needs.states.starts_behind_rows and self.carried_reads(needs) is None
        )
        if self.draft_prefix is None or starts_anew:
            return blocks, 0
        blocks.adopt(self.draft_prefix.match(page_owner(needs.draft, needs.adapter), needs.tokens))
        # The last known row holds the token behind the pages where rows lead.
        return blocks, max(blocks.allocated - needs.rows_lead, 0)

    def pages_before_rows(self, pages: list[int], rows: int, needs: CacheNeeds) -> list[int]:
        """The known `pages` of the target behind which the draft can go on that has so many known `rows` of its own.

        Where pages carry no states, the target runs the tokens again whose states the next row and later ones read.
        """
        if needs.states is None or self.carried_reads(needs) is not None:
            return pages
        first_state = rows - 1 if needs.states.fuses_first else rows
        return pages[: max(first_state, 0) // self.layout.page_size]

    def usable_pages(self, pages: list[int], needs: CacheNeeds) -> list[int]:
        """The known `pages` of a request behind which its draft can go on.

        Where pages carry no states, the target runs the tokens of the last one again, to have its states.
        """
        if needs.states is None or needs.states.own_state_alone or self.carried_reads(needs) is not None:
            return pages
        # A recurrent target goes on from the end of a page alone, and a fused row needs the state before that.
        is_behind_end = needs.states.fuses_first and bool(needs.target.room(0, 0).recurrent)
        return pages[:-1] if needs.states.starts_behind_rows and not is_behind_end else []

    def known_columns(self, reused: int, needs: CacheNeeds) -> tuple[int, int]:
        """The columns of target and draft with which a request begins that takes `reused` columns of known pages."""
        if needs.states is None or needs.states.own_state_alone or not reused:
            return reused, reused
        if self.carried_reads(needs) is not None:
            return reused, reused if needs.states.fuses_first else reused - 1
        # The state at the last known column stands in the next row of a head that has one for the first token.
        return (reused - 1 if needs.states.fuses_first else reused), reused

    def _with_known_states(self, pages: list[int], needs: CacheNeeds) -> tuple[list[int], Border]:
        """The first of `pages` behind which the recurrent states are known too, and those states.

        All of `pages` for models without such states.
        """
        if not any(model.room(0, 0).recurrent for model in (needs.target, needs.draft) if model is not None):
            return pages, (None, None)
        owner = page_owner(needs.draft, needs.adapter, self.carried_reads(needs))
        for count in range(len(pages), 0, -1):
            assert self.prefix is not None, "pages are known from the prefix cache alone"
            states_by_role = self.prefix.borders.get((owner, needs.tokens[: count * self.layout.page_size]))
            if states_by_role is not None:
                return pages[:count], states_by_role
        return [], (None, None)

    def pool(self, model: Model, role: str, needs: CacheNeeds) -> Pool:
        """The pool of a model in one role.

        Target and draft of a request may share a block table, so a target that drafts for itself needs two pools.
        """
        if (model, role) not in self._pools:
            room = self.room(model, needs.capacity, needs.rows, role)
            is_draft = role == "draft"
            pages, layout = (self.draft_pages, self.draft_layout) if is_draft else (self.pages, self.layout)
            self._pools[model, role] = Pool(room, pages.total, layout.page_size)
        return self._pools[model, role]

    def state_pool(self, target: Model, needs: StateNeeds) -> StatePool:
        """The pool of the hidden states that drafts read so."""
        if needs.reads not in self._state_pools:
            room = target.room(0, 0)
            size = self.layout.page_size
            self._state_pools[needs.reads] = StatePool(needs.width, self.pages.total, size, room.dtype, room.device)
        return self._state_pools[needs.reads]

    def shares(self, source: CacheLease, adapter: object) -> bool:
        """Whether a fork of `source` under `adapter` may begin with its columns: only if they are of that adapter."""
        return source.adapter == adapter

    @property
    def draft_pools(self) -> dict[Model, Pool]:
        """The pool in which each draft model has its columns."""
        return {model: pool for (model, role), pool in self._pools.items() if role == "draft"}

    def _pools_of(self, owner: object) -> list[Cells]:
        """The pools in which a page of `owner` holds columns: those of draft model and states, the target's last."""
        draft = owner[0] if isinstance(owner, tuple) else owner  # of `page_owner`
        reads = getattr(draft, "reads", draft)
        carries = self.layout.page_states == "carried"
        states = [pool for state, pool in self._state_pools.items() if carries and state == reads]
        drafts = [pool for model, pool in self.draft_pools.items() if model is draft]
        targets = [pool for (_, role), pool in self._pools.items() if role == "target"]
        return [*drafts, *states, *targets]

    def _draft_pools_of(self, owner: object) -> list[Cells]:
        """The pool in which a draft's own page holds columns, by the owner of the page."""
        draft = owner[0] if isinstance(owner, tuple) else owner  # of `page_owner`
        return [pool for model, pool in self.draft_pools.items() if model is draft]

    def fork(self, source: CacheLease, needs: CacheNeeds) -> CacheLease:
        """Caches that begin with all columns that `source` has committed, in shared pages or as copies.

        The draft's columns are taken over if the draft model is the same. In pages, only as many of them are taken over
        as the target has. A draft that has proposed is one column ahead of the target, and that column may lie in the
        next page, which is not shared.
        """
        columns = source.target.length
        same_draft = needs.draft is not None and source.draft is not None and source.owner is needs.draft
        if source.blocks is not None:
            lease = self.paged(needs)
            assert lease.blocks is not None
            lease.blocks.adopt(source.blocks.table[: -(-columns // source.blocks.size)])
            lease.target.length = columns
            if same_draft and lease.draft is not None and source.draft is not None:
                lease.draft.length = min(source.draft.length, columns)
                if lease.draft_blocks is not None and source.draft_blocks is not None:
                    count = -(-lease.draft.length // source.draft_blocks.size)
                    lease.draft_blocks.adopt(source.draft_blocks.table[:count])
        else:
            lease = self.lease(needs)
            lease.target.begin_as(source.target)
            if same_draft and lease.draft is not None and source.draft is not None:
                lease.draft.begin_as(source.draft)
        self.fork_states(source.target, lease.target)
        if same_draft and lease.draft is not None and source.draft is not None:
            self.fork_states(source.draft, lease.draft)
        lease.owner = needs.draft
        lease.reused = columns
        lease.adapter = source.adapter
        return lease

    def fork_states(self, source: KvCache, twin: KvCache) -> None:
        """Let the recurrent states beside `twin` begin as those beside `source`, at the length of `twin`.

        So do the choices of its rows, which are shown in traces alone.
        """
        choices_beside(twin).rows = dict(choices_beside(source).rows)
        source_states, twin_states = states_of(source), states_of(twin)
        if source_states is not None and twin_states is not None:
            twin_states.begin_as(source_states, twin.length)

    def with_draft(self, lease: CacheLease, needs: CacheNeeds) -> CacheLease:
        """`lease` with the same target cache and an empty cache for another draft model.

        It lies in the same blocks, or where drafts have pages of their own in none yet: those of the draft before go
        back.
        """
        draft = needs.draft
        draft_cache: KvCache | None = None
        draft_blocks: Blocks | None = None
        if lease.draft_blocks is not None:
            lease.draft_blocks.release()
        if draft is not None and lease.blocks is not None:
            draft_blocks = self.draft_table(replace(needs, tokens=()))[0] if self.has_own_pages(needs) else None
            draft_cache = self._seams.paged(self.pool(draft, "draft", needs), draft_blocks or lease.blocks)
        elif draft is not None:
            draft_cache = self._plain(draft, needs, "draft")
        stays = self.carried_reads(needs) == lease.reads
        states, reads = (lease.states, lease.reads) if stays else (None, None)
        switched = replace(
            lease,
            draft=draft_cache,
            owner=draft,
            states=states,
            reads=reads,
            rows_lead=needs.rows_lead,
            draft_blocks=draft_blocks,
        )
        self._with_states(switched, needs, ("draft",))
        return switched

    def give_back(self, lease: CacheLease, tokens: tuple[int, ...] = ()) -> None:
        """Take back the caches of a request that is over or evicted.

        Full pages of `tokens`, the tokens of the request, are offered to the prefix cache. A page counts only if target
        and draft have both committed all of its columns, so that a hit leaves neither cache uninitialised.
        """
        self.release_slot(lease)
        if lease.blocks is not None and self.prefix is not None and tokens:
            # Before the release: a page without a holder would be free at once.
            text = tokens if lease.rows_lead else None
            if lease.draft_blocks is not None and self.draft_prefix is not None and lease.draft is not None:
                own_tokens = tokens[: lease.draft.length]
                owner = page_owner(lease.owner, lease.adapter)
                self.draft_prefix.insert(owner, own_tokens, lease.draft_blocks.table, text)
                num_columns, text = lease.target.length, None
            else:
                num_columns = min(lease.target.length, lease.draft.length if lease.draft is not None else len(tokens))
            self.prefix.insert(lease.key, tokens[:num_columns], lease.blocks.table, text)
            self.keep_states(lease, tokens[:num_columns])
            self._keep_choices(lease, tokens[:num_columns])
        if lease.blocks is not None:
            lease.blocks.release_reserve(lease.target.length)
        if lease.draft_blocks is not None and lease.draft is not None:
            lease.draft_blocks.release_reserve(lease.draft.length)
        # In shared pages, both caches release the same block table; the second time it is empty.
        if lease.draft is not None:
            lease.draft.release()
        lease.target.release()
        for prefix in (self.prefix, self.draft_prefix):
            if prefix is not None:
                prefix.trim()

    def release_slot(self, lease: CacheLease) -> None:
        """Give back the slot of `lease`, if it has one."""
        if lease.slot is not None:
            self.slots.give_back(lease.slot)
            lease.slot = None

    def keep_states(self, lease: CacheLease, tokens: tuple[int, ...]) -> None:
        """Keep the recurrent states of `lease` behind each full page of `tokens`; forget those of pages let go."""
        assert self.prefix is not None
        borders = self.prefix.borders
        states_by_role = [None if cache is None else states_of(cache) for cache in (lease.target, lease.draft)]
        size = self.layout.page_size
        for end in range(size, len(tokens) + 1, size) if any(states_by_role) else ():
            border_states = [None if states is None else states.outside(end) for states in states_by_role]
            if all(
                border_state is not None
                for border_state, states in zip(border_states, states_by_role, strict=True)
                if states is not None
            ):
                borders.setdefault((lease.key, tokens[:end]), (border_states[0], border_states[1]))
        self.prefix.borders = {key: border for key, border in borders.items() if key in self.prefix.entries}

    def _keep_choices(self, lease: CacheLease, tokens: tuple[int, ...]) -> None:
        """Keep the choices of the rows of each full page of `tokens`, which a trace shows where the page is met."""
        assert self.prefix is not None
        rows = choices_beside(lease.target).rows
        size = self.layout.page_size
        if rows:
            for end in range(size, len(tokens) + 1, size):
                page = {column: rows[column] for column in range(end - size, end) if column in rows}
                self._choices.setdefault((lease.key, tokens[:end]), page)
        self._choices = {key: page for key, page in self._choices.items() if key in self.prefix.entries}

    def poison(self, leases: Sequence[CacheLease] = ()) -> None:
        """Fill every free page, and the free and stale cells of `leases`, with the poison of `layout.poison`.

        Poison stands in cells that no row may see, so that an attention that sees one of them changes the logits. The
        cells of recurrent states that hold none are filled too.
        """
        if not self.layout.poison:
            return
        self._poison_slots(leases)
        for state_pool in self._state_pools.values() if self.pages.free else ():
            state_pool.fill(list(self.pages.free), self._filling([]))
        for (_, role), pool in self._pools.items():
            free = (self.draft_pages if role == "draft" else self.pages).free
            caches = [cache for lease in leases for cache in lease.caches if getattr(cache, "pool", None) is pool]
            if free:
                pool.fill(list(free), self._filling(caches))
        for lease in leases:
            other_leases = [other_lease for other_lease in leases if other_lease is not lease]
            lease.target.poison(self._filling([other_lease.target for other_lease in other_leases]))
            if lease.draft is not None:
                draft_caches = [
                    other_lease.draft
                    for other_lease in other_leases
                    if other_lease.draft is not None and other_lease.owner is lease.owner
                ]
                lease.draft.poison(self._filling(draft_caches))

    def _poison_slots(self, leases: Sequence[CacheLease]) -> None:
        """Fill the cells that hold no committed state of `leases`; none of their rows are open."""
        states_of_leases = [states_of(cache) for lease in leases for cache in lease.caches]
        slots = [states.slot for states in states_of_leases if states is not None and states.slot is not None]
        for pool in self._recurrent_pools.values():
            used = {cell for slot in slots if slot.pool is pool for cell in slot.committed.values()}
            number = float("nan") if self.layout.poison == "nan" else LARGE
            pool.fill([cell for cell in range(pool.slots * pool.cells) if cell not in used], number)

    def _filling(self, other_caches: Sequence[KvCache]) -> Poison:
        """The poison of a cell; `other_caches` are caches of the same model, from which `other_caches` takes a key.

        NaN only if attention never reads such a cell: a masked NaN would still spoil the output, as 0 * NaN is NaN.
        """
        if self.layout.poison == "others":
            keys = (held_columns(cache, 0)[1] for cache in other_caches)
            # A layer with a window of one column holds no column between steps.
            return next((keys_of_cache[0, -1] for keys_of_cache in keys if keys_of_cache.shape[1]), LARGE)
        return float("nan") if self.layout.poison == "nan" and not self.layout.traits.reads_stale else LARGE

    @property
    def filler(self) -> float:
        """The number in padding columns of a batch; attention reads them under its mask, so the number is finite."""
        return LARGE if self.layout.poison else 0.0


def refuse_small_pool(layout: KvLayout, columns: int) -> None:
    """Refuse a free list that cannot hold one request of `columns` columns, before anything runs.

    Raises:
        Unsupported: if the pool has too few pages.
    """
    if layout.pages and layout.pages_for(columns) > len(layout.pages):
        raise Unsupported(
            f"out of pages: the request and its block may need {layout.pages_for(columns)} pages of "
            f"{layout.page_size} columns, the pool has {len(layout.pages)}"
        )
