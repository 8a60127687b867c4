"""Faults of emission: stops inside a block, budgets, padding."""

from dataclasses import replace

from backends.engine.seams import Seams
from backends.engine.stops import Limits, Written
from backends.faults.fault import Fault
from reference.trace import Stage

Clipped = tuple[list[int], str | None]


def stop_seen_at_the_end(seams: Seams) -> Seams:
    """The whole block is emitted, and its last token alone is looked at for an end of text."""

    def clip(block: list[int], written: Written, ends: Limits) -> Clipped:
        kept, why = seams.clip(block, written, replace(ends, eos=frozenset(), stop=frozenset()))
        if kept[-1] in ends.eos:
            return kept, "eos"
        return (kept, "stop") if kept[-1] in ends.stop else (kept, why)

    return replace(seams, clip=clip)


def budget_checked_per_block(seams: Seams) -> Seams:
    """The token budget is looked at after a block and does not cut it."""

    def clip(block: list[int], written: Written, ends: Limits) -> Clipped:
        kept, why = seams.clip(block, written, replace(ends, most=written.tokens + len(block) + 1))
        return kept, why or ("length" if written.tokens + len(kept) >= ends.most else None)

    return replace(seams, clip=clip)


def placeholder_zeros(seams: Seams) -> Seams:
    """The padded row of the block is returned: rejected placeholder slots come out as token 0."""

    def clip(block: list[int], written: Written, ends: Limits) -> Clipped:
        kept, why = seams.clip(block, written, ends)
        return ([*kept, 0], why) if len(block) == 1 and why is None else (kept, why)

    return replace(seams, clip=clip)


FAULTS = (
    Fault(
        "stop-inside-block-ignored",
        "BZ-128",
        Stage.EMITTED,
        "An end of text inside an accepted block does not stop the output.",
        "catalogue BZ-128: EOS inside the draft block does not stop output",
        "an end token before the last token of a block",
        stop_seen_at_the_end,
    ),
    Fault(
        "block-past-max-new-tokens",
        "BZ-107",
        Stage.EMITTED,
        "An accepted block runs past max_new_tokens.",
        "catalogue BZ-107: candidates exceed max_new_tokens",
        "an accepted block longer than what is left of the budget",
        budget_checked_per_block,
    ),
    Fault(
        "rejected-slots-emitted-as-zero",
        "BZ-027",
        Stage.EMITTED,
        "Placeholder slots of rejected drafts are emitted as token 0.",
        "catalogue BZ-027: rejected placeholder slots emitted as token 0",
        "a step that accepts nothing",
        placeholder_zeros,
    ),
)
