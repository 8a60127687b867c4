"""The merge of a gate's shards into the result of the whole."""

from pathlib import Path

from specverify.campaign.campaign import Campaign
from specverify.fleet.journal import FILE, Counted
from specverify.fleet.shards import COUNTED, ENDED, VERDICT, Shard, common_end
from specverify.gate.listener import Listener
from specverify.plan import Plan
from specverify.properties.tally import Tally
from specverify.properties.verdict.finding import Verdict
from specverify.properties.verdict.run_log import MAX_CASES
from specverify.reference.case import Case
from specverify.reference.files.regular import open_regular
from specverify.reports.record import RESULTS, Lines


def results_of(shard: Shard) -> Path | None:
    """The file with the lines of a shard's results, beside its journal; None where it was not brought along."""
    if shard.path.name != FILE:
        return None
    file = shard.path.with_name(RESULTS)
    return file if file.is_file() else None


def copy_results(shard: Shard, lines: Lines) -> None:
    """Append the lines of a shard's results to those of the whole."""
    file = results_of(shard)
    if file is None:
        return
    with open_regular(file) as source:
        for text in source:
            if text.endswith(b"\n"):
                lines.append_lines(text)


def places_of(shards: list[Shard], run: str) -> int:
    """The number of workers that the run of that name had, at least 1."""
    return max(1, sum(shard.outlines[run].places for shard in shards if run in shard.outlines))


def merge_run(shards: list[Shard], run: str, plan: Plan, listener: Listener) -> tuple[Tally, int | None]:
    """The tally and the exit code of the run of that name in all `shards`, each worker at a place of its own.

    The counts of a shard stand for its verdicts where its results are beside its journal; else every verdict is read.
    """
    campaign = Campaign(plan, listener)
    places = 0
    for shard in shards:
        outline = shard.outlines.get(run)
        if outline is None:
            continue
        by_counts = outline.has_counts and results_of(shard) is not None
        _hear_shard(campaign, listener, shard, run, places, by_counts)
        places += outline.places
    campaign.conclude(common_end(shards, run))
    # The workers' hours are those of their own machines.
    campaign.tally.log.events.clear()
    return campaign.tally, campaign.code


def _hear_shard(
    campaign: Campaign, listener: Listener, shard: Shard, run: str, first_place: int, by_counts: bool
) -> None:
    """Have the campaign hear a shard, whose workers stand from `first_place` on."""
    first_cases: list[Case] = []
    wanted = MAX_CASES - len(campaign.tally.log.cases)
    for line in shard.lines():
        if line.run != run or line.kind == ENDED:
            continue
        if line.kind == VERDICT and by_counts:
            is_watched = listener.case_counted(line.case_id)
            if is_watched or len(first_cases) < wanted:
                verdict = shard.message(line, Verdict)
                first_cases.append(verdict.case)
                listener.watched |= {verdict.case.id: verdict} if is_watched else {}
        elif line.kind == COUNTED:
            if by_counts:
                counted = shard.message(line, Counted)
                campaign.absorb(counted.tally, int(counted.met or "0", 16), first_cases)
        else:
            campaign.hear(first_place + line.place, shard.message(line, object))
