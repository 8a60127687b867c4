"""Faults of the second tier of the prefix cache.

They concern what is copied out, the name under which it is kept, and the page to which it comes back.
"""

from collections.abc import Hashable

from specverify.backends.engine.kv.paged import Cells
from specverify.backends.engine.kv.pages import Pages
from specverify.backends.engine.kv.prefix import Key, SecondTier
from specverify.backends.faults.fault import attended_fault, committed_fault, drafted_fault, in_place_of


@drafted_fault(
    "tier-forgets-draft",
    "https://github.com/sgl-project/sglang/pull/17338",
    "a second tier, and a request with a model draft that begins with a page from there",
)
@in_place_of("kv.tier")
class TargetAlone(SecondTier):
    """A page comes back from the second tier with the target's columns, and the draft reads whatever lay there.

    The second tier keeps the target's columns alone, but a hit counts for target and draft.
    """

    def pools(self, owner: object) -> list[Cells]:
        # The draft's pool is made first, the target's last.
        return super().pools(owner)[-1:]


@committed_fault(
    "tier-page-known-by-own-tokens",
    "https://github.com/openvinotoolkit/openvino.genai/issues/3722",
    "a second tier, and two prompts with the same page of tokens behind unlike tokens",
)
@in_place_of("kv.tier")
class ByOwnTokens(SecondTier):
    """The second tier names a page by its place and the tokens in it, and not by the tokens before it."""

    def name(self, key: Key) -> Hashable:
        owner, tokens = key
        return owner, len(tokens), tokens[-self.page_size :]


@attended_fault(
    "tier-copied-before-written",
    "https://github.com/vllm-project/vllm/pull/46278",
    "a second tier, and a request that begins with a page from there",
)
@in_place_of("kv.tier")
class TooSoon(SecondTier):
    """A page is copied out before its last column is written: the copy holds there what the slot held before."""

    def copy_out(self, pool: Cells, page: int, slot: int) -> None:
        """Copy the page as it was before its last column was written."""
        for cells, copies in self.cells(pool):
            copies[slot, :-1] = cells[page, :-1].to(copies.device)


@attended_fault(
    "tier-brought-into-held-page",
    "https://github.com/vllm-project/vllm/issues/46951",
    "a second tier, and a request that begins with a page from there while another holds pages",
)
@in_place_of("kv.tier")
class IntoHeldPage(SecondTier):
    """A page is brought back into a page of the pool that somebody else holds, and overwrites the columns there."""

    def destination(self, pages: Pages) -> int:
        """A page with a holder where there is any; it becomes shared."""
        for page in sorted(pages.holder_counts):
            pages.share(page)
            return page
        return super().destination(pages)


@committed_fault(
    "tier-slot-keeps-old-name",
    "https://github.com/ovg-project/kvcached/issues/362",
    "a second tier that is full, and a prompt whose page gave its slot to another",
)
@in_place_of("kv.tier")
class StaleNames(SecondTier):
    """A slot of the second tier is given to another page, and the old page's name still leads to it."""

    def free_slot(self) -> int:
        """A slot; the name of the copy that it held stays known."""
        slots_before = dict(self.slots)
        slot = super().free_slot()
        for name, taken_slot in slots_before.items():
            if taken_slot == slot:
                self.slots[name] = slot
                self.slots.move_to_end(name)
        return slot
