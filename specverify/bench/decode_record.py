"""A `bench decode` as a record, and the bench that a record holds."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from specverify.bench.agreement import Agreement
from specverify.bench.turn import Turn, Way
from specverify.records.read import BENCH, Fact, Record
from specverify.records.write import digest_of, manifest_of, step_fact
from specverify.reference.case import Case
from specverify.reference.case_json import case_to_json
from specverify.reference.draft import Draft
from specverify.reference.trace import Step


@dataclass
class Measurements:
    """The measurements of a bench.

    Attributes:
        ways: Names of the ways, the target alone first.
        draft_names: Those of the ways that our engine runs with a draft.
        turns: All timed generations.
        agreements: Comparisons of the texts with those of the target alone.
        facts: Device, dtype, sizes and versions.
        draft_ways: The same ways, each with its tree.
        resumed: Number of prompts that an earlier run of the same record had finished.
        missing: One line for each shard that is not whole.
    """

    ways: list[str]
    draft_names: list[str]
    turns: list[Turn]
    agreements: list[Agreement]
    facts: dict[str, Any]
    draft_ways: list[Way] = field(default_factory=list)
    resumed: int = 0
    missing: list[str] = field(default_factory=list)


def manifest_for(
    options: Fact,
    base: Case,
    *,
    texts: Sequence[Any],
    drafts: dict[str, tuple[Way, Draft]],
    ways: list[str],
    facts: Fact,
    shard: tuple[int, int],
) -> Fact:
    """The manifest of a bench.

    Args:
        options: The options.
        base: The case of the target alone for the first prompt.
        texts: The tokens of each prompt, or of each dialogue turn by turn.
        drafts: The ways of our engine with a draft.
        ways: Names of all ways, the target alone first.
        facts: Device, dtype and sizes.
        shard: Rank and number of ranks.
    """
    model = base.model
    digests = {name: _draft_digest(base, draft) for name, (_, draft) in drafts.items()}
    digests_of_prompts = [digest_of(prompt) for prompt in texts]
    named = [asdict(drafts[way][0]) if way in drafts else {"name": way} for way in ways]
    checkpoint = {"name": str(getattr(model, "source", model.TAG)), "digest": str(getattr(model, "digest", ""))}
    deciding = {
        "model": checkpoint["digest"],
        "drafts": digests,
        "prompts": digests_of_prompts,
        "device": facts["device"],
    }
    return manifest_of(
        BENCH, options, deciding, model=checkpoint, device=facts["device"], seed=options["seed"],
        drafts=[{"name": name, "digest": digest} for name, digest in digests.items()],
        prompts=digests_of_prompts, ways=named, facts=facts, **({} if shard == (0, 1) else {"shard": shard}),
    )  # fmt: skip


def _draft_digest(base: Case, draft: Draft) -> str:
    """The digest of a draft as a case file describes it: its tree, and the digests of its files."""
    return digest_of(case_to_json(replace(base, draft=draft))["draft"])


def turn_of(line: Fact) -> Turn:
    """The turn of a line of a record."""
    values: dict[str, Any] = {
        turn_field.name: line[turn_field.name] for turn_field in fields(Turn) if turn_field.name in line
    }
    for name, value in values.items():
        if isinstance(value, list):
            values[name] = tuple(tuple(item) if isinstance(item, list) else item for item in value)
    steps = values.get("stage_steps", {})
    return Turn(**values | {"stage_steps": {name: tuple(seconds) for name, seconds in steps.items()}})


def agreements_of(line: Fact) -> list[Agreement]:
    """The comparisons that a line of a finished prompt holds."""
    return [Agreement(**agreement) for agreement in line["agreements"]]


def stray_of(turn: Turn, agreement: Agreement, number: int, step: Step) -> Fact:
    """The dump of a text of ours that is not the target's: the step where it left it, the tree as it was lowered."""
    return {
        "prompt": turn.prompt,
        **({"place": turn.place} if turn.place else {}),
        "way": turn.way,
        "finding": asdict(agreement),
        "step": number,
        **step_fact(step),
    }


def ways_in(record: Record) -> tuple[list[str], list[Way]]:
    """The names of all ways of a record, and those of our engine with a draft."""
    ways = record.manifest.get("ways", [])
    drafted = [Way(**way) for way in ways if "given" in way]
    return [way["name"] for way in ways], drafted


def measurements_of(record: Record) -> Measurements:
    """The bench that a record holds."""
    ways, drafted = ways_in(record)
    measured = Measurements(
        ways, [way.name for way in drafted], [], [], dict(record.manifest.get("facts", {})), drafted
    )
    add_record(measured, record)
    measured.resumed = 0
    measured.missing = list(record.manifest.get("missing", []))
    return measured


def add_record(measured: Measurements, record: Record) -> None:
    """Add the finished prompts of a record."""
    measured.turns += [turn_of(line) for line in record.finished_turns]
    measured.agreements += [agreement for line in record.prompts.values() for agreement in agreements_of(line)]
    measured.resumed += len(record.prompts)
