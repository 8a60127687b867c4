"""Pages of `trace`: a record of `diff`, two records side by side, the findings of `trace check`.

A line of a finding begins with the file and the number of its line, as compilers write it, so that editors can follow
it.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from rich.table import Table

from specverify.properties.tally import Tally
from specverify.properties.verdict.finding import Finding
from specverify.reference.trace import (
    Accepted,
    Accounting,
    Attended,
    Committed,
    Drafted,
    Emitted,
    Lowered,
    Scored,
    Stage,
)
from specverify.reports.acceptance import acceptance_page
from specverify.reports.counts import NEEDS, short_count
from specverify.reports.format import (
    HEADLINES,
    clean,
    coordinate_words,
    cut,
    excess,
    expected_and_observed,
    number,
    plural,
)
from specverify.reports.layout80 import label_rows, plain_text
from specverify.reports.pages.sampling import evidence_rows

MOST_TURNS = 10
"""Most turns that are named."""


def record_head(folder: str, manifest: Mapping[str, Any], turns: int, torn: int, failures: Sequence[str]) -> str:
    """The first lines on a record: what ran, when and where, and what is missing in it."""
    headline = f"{clean(folder)}: {clean(manifest['kind'])}, {plural(turns, 'turn')}"
    lines = [headline, f"settings {clean(manifest['settings'])}, started {clean(manifest.get('started', '-'))}"]
    model = manifest.get("model")
    if model is not None:
        lines.append(f"model {clean(cut(model['name'], 120))} {clean(cut(model['digest'], 80))}")
    lines += [
        f"draft {clean(cut(draft['name'], 120))} {clean(draft['digest'])}" for draft in manifest.get("drafts", ())
    ]
    environment = manifest["environment"]
    lines.append(", ".join(f"{clean(name)} {clean(str(value))}" for name, value in environment.items()))
    lines += [clean(text) for text in manifest.get("missing", ())]
    if torn:
        lines.append(f"{plural(torn, 'line')} left unfinished by a killed run: left out")
    lines += [f"failure {clean(failure)}" for failure in failures[:MOST_TURNS]]
    if len(failures) > MOST_TURNS:
        lines.append(f"and {plural(len(failures) - MOST_TURNS, 'further failure')}")
    return "\n".join(lines) + "\n"


def diff_turns(turns: Sequence[Mapping[str, Any]]) -> str:
    """The turns of a `diff` by backend: outcomes, tokens, accepted tokens per step, seconds in forwards."""
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("backend", overflow="fold")
    for name in ("turns", "tokens", "accepted", "forward s"):
        table.add_column(name, justify="right")
    table.add_column("outcomes")
    for way in dict.fromkeys(turn["way"] for turn in turns):
        way_turns = [turn for turn in turns if turn["way"] == way]
        accepted = [length for turn in way_turns for length in turn.get("accepted", ())]
        outcomes = Counter(turn.get("outcome", "-") for turn in way_turns)
        table.add_row(
            clean(way), str(len(way_turns)), str(sum(len(turn["tokens"]) for turn in way_turns)),
            f"{sum(accepted) / len(accepted):.2f}" if accepted else "-",
            number(sum(turn["seconds"] for turn in way_turns)),
            ", ".join(f"{clean(name)} {count}" for name, count in outcomes.items()),
        )  # fmt: skip
    return plain_text(table)


def comparison_page(figures: Mapping[str, Any]) -> str:
    """Two records side by side, from the figures of `specverify.traces.command.compare`."""
    differing_turns = figures["differ"]
    lines = [
        f"{plural(figures['same'], 'turn')} equal in {', '.join(figures['compared'])}; {len(differing_turns)} differ"
    ]
    lines += [
        f"{_turn_place(turn)}, {clean(turn['way'])}: {', '.join(turn['fields'])} differ"
        for turn in differing_turns[:MOST_TURNS]
    ]
    if len(differing_turns) > MOST_TURNS:
        lines.append(f"and {plural(len(differing_turns) - MOST_TURNS, 'further turn')}")
    for side, count in zip(("first", "second"), figures["only"], strict=True):
        if count:
            lines.append(f"{plural(count, 'turn')} in the {side} record alone")
    for name, (first_s, second_s) in figures["settings"].items():
        lines.append(f"{clean(name)}: {clean(cut(str(first_s), 60))} and {clean(cut(str(second_s), 60))}")
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("way", overflow="fold")
    for name in ("first s", "second s", "ratio"):
        table.add_column(name, justify="right")
    for way, (first_s, second_s) in figures["seconds"].items():
        table.add_row(clean(way), number(first_s), number(second_s), f"{second_s / first_s:.2f}" if first_s else "-")
    seconds = plain_text(table) if figures["seconds"] else ""
    acceptance = acceptance_page(figures.get("acceptance", {}), figures.get("is_same_run", False))
    return "\n".join(lines) + "\n" + acceptance + seconds


def _turn_place(turn: Mapping[str, Any]) -> str:
    """The prompt of a turn, or its dialogue and its number there."""
    name = clean(str(turn["prompt"]))
    return f"dialogue {name}, turn {turn['place']}" if turn.get("place") else f"prompt {name}"


PARTS = {
    Stage.DRAFTED: Drafted,
    Stage.LOWERED: Lowered,
    Stage.ATTENDED: Attended,
    Stage.SCORED: Scored,
    Stage.ACCEPTED: Accepted,
    Stage.EMITTED: Emitted,
    Stage.COMMITTED: Committed,
}
"""The dataclass of each stage, whose fields a finding may name."""

FIELDS = {
    "structure.validity-closed": "lowered.valid",
    "structure.ancestor-table": "lowered.ancestor",
    "structure.mask-is-ancestry": "lowered.visible",
    "structure.positions-are-depth": "lowered.slot",
    "structure.positions-on-axes": "lowered.axes",
    "attention.context-exact": "scored.logits",
    "acceptance.support": "emitted.tokens",
    "acceptance.sampled-walk": "accepted.path",
    "acceptance.proposal-consistent": "drafted.proposal",
    "cache.isolation": "committed.verified",
    "cache.untouched-slots": "committed.after",
    "cache.commit-equivalence": "committed.after",
    "draft.fidelity": "drafted.tree",
    "lossless.greedy-match": "emitted.tokens",
    "lossless.logprobs": "emitted.logprobs",
    "lossless.processors-per-node": "scored.law",
    "lossless.stops": "emitted.tokens",
    "lossless.grammar-per-node": "scored.legal",
    "serving.matcher-in-step": "committed.matched",
    "cache.recurrent-rows": "committed.recurrent_root",
    "cache.recurrent-equivalence": "committed.recurrent",
}
"""The field that an invariant compares, where its finding does not name one."""

REASONS = {
    "internal": "raised an exception, which is told below",
    "stages": "the trace shows no {stages}",
    "model": "needs the model: name its checkpoint with --model",
    "runs": "needs further runs of the engine: `specverify diff` asks for them",
    "evidence": "the trace holds too little for it",
    "nothing": "has nothing to say of these runs",
}
"""The words of each kind of reason for which an invariant was not asked."""


def field_of(finding: Finding) -> str:
    """The field of the trace that a finding is about, as it stands in the file: `accepted.path`, `lowered.parent`."""
    side = str(finding.where.get("side", ""))
    if side == "context":
        return side
    if finding.invariant == "lossless.accounting" and side in [part.name for part in fields(Accounting)]:
        return f"accounting.{side}"
    if finding.invariant == "lossless.accounting" and side.startswith("fallback"):
        return "fallbacks"
    if side in [part.name for part in fields(PARTS[finding.stage])]:
        return f"{finding.stage.word}.{side}"
    if finding.invariant == "attention.context-exact" and finding.stage is Stage.ATTENDED:
        return "attended.output"
    if finding.invariant == "cache.recurrent-rows" and side == "prefill":
        return "committed.recurrent_before"
    return FIELDS.get(finding.invariant, finding.stage.word)


def finding_line(file: str, line: int, run: int, finding: Finding) -> str:
    """One finding on one line: file, line, run, step, field, coordinates, expected, observed, invariant."""
    field_name = field_of(finding)
    side = str(finding.where.get("side", ""))
    # A side that the field repeats is not said twice.
    coordinates = coordinate_words(
        finding.where, without=frozenset({"side"} if side and field_name.endswith(side) else ())
    )
    address = f"{field_name}, {coordinates}" if coordinates else field_name
    excess_words = f", {excess(finding)}" if excess(finding) else ""
    expected, observed = expected_and_observed(finding)
    return (
        f"{clean(file)}:{line}: run {run}, step {finding.step}, {address}: "
        f"expected {expected}, observed {observed}{excess_words} ({clean(finding.invariant)})"
    )


def tap_page(file: str, runs: int, left_out: Counter[str]) -> str:
    """What a tap wrote, and the requests that it did not record, by reason."""
    page = f"{file}: {plural(runs, 'run')} recorded"
    rows = [("left out", f"{plural(count, 'request')}: {reason}") for reason, count in left_out.most_common()]
    return page + ("\n" + label_rows(rows) if rows else "")


def audit_page(
    file: str,
    tally: Tally,
    lines: Sequence[str],
    unasked: Mapping[str, Counter[tuple[str, str]]],
    doubts: Sequence[str],
    verbose: bool = False,
    steps: tuple[int, int] | None = None,
    same_seed: int = 0,
) -> str:
    """The page of an audit: the findings, the outcome, and a line for each stage.

    Each run counts as one case. `unasked` invariants compared nothing in some run, for the reasons given (a key of
    REASONS, and stages); `doubts` say why the audit is no pass. With `verbose` the invariants are named, in place of
    the stages. `steps` are those that the model judged, and all; None without a model.
    `same_seed` runs were left out of the tests of laws, since an earlier run names their seed.
    """
    headline = f"{HEADLINES[tally.outcome]}  {clean(file)}: {plural(tally.cases, 'run')}, {tally.judged} judged"
    rows = _invariant_rows(tally, unasked) if verbose else _stage_rows(tally, unasked)
    if steps is not None:
        rows.insert(0, ("by model", f"{steps[0]} of {plural(steps[1], 'step')}"))
    if tally.ties:
        rows.append(("ties", f"{plural(len(tally.ties), 'token')} within the noise of the logits (rule T)"))
    if tally.evidence:
        rows += evidence_rows(tally)
    if same_seed:
        runs = plural(same_seed, "run")
        rows.append(("left out", f"{runs} in the tests of laws: an earlier run has the same `sampling.seed`"))
    rows += [("no pass", doubt) for doubt in doubts]
    if tally.excess_ties:
        rows.append(("too many", tally.excess_ties))
    if not verbose:
        rows.append(("more", "--verbose names the invariants, and why others were not asked"))
    return "\n".join([*lines, *([""] if lines else []), headline, label_rows(rows)])


def _stage_rows(tally: Tally, unasked: Mapping[str, Counter[tuple[str, str]]]) -> list[tuple[str, str]]:
    """A line for each stage: how much was compared there, what failed, or why nothing was compared."""
    rows = []
    for stage in Stage:
        names = [name for name in {**tally.invariants, **unasked} if _stage_of(name) is stage]
        counts_of = {name: tally.invariants[name] for name in names if name in tally.invariants}
        judged = [counts for counts in counts_of.values() if counts.checked]
        failed = [name for name, counts in counts_of.items() if counts.failed]
        if not judged:
            reasons = Counter(_first_reason(unasked[name]) for name in names if name in unasked)
            kind, stages = reasons.most_common(1)[0][0] if reasons else ("nothing", "")
            rows.append((stage.word, f"not judged: {REASONS[kind].format(stages=stages)}"))
            continue
        num_compared = sum(counts.compared for counts in judged)
        text = f"{short_count(num_compared)} compared by {plural(len(judged), 'invariant')}"
        rows.append((stage.word, f"{text}; {len(failed)} failed: {failed[0]}" if failed else text))
    return rows


def _stage_of(name: str) -> Stage:
    """The last stage that an invariant needs: where it looks; EMITTED for one that needs none."""
    return max(NEEDS.get(name, frozenset()), default=Stage.EMITTED)


def _first_reason(reasons: Counter[tuple[str, str]]) -> tuple[str, str]:
    """Of the reasons that runs give, the one that somebody can do something about."""
    return min(reasons, key=lambda reason: list(REASONS).index(reason[0]))


def _invariant_rows(tally: Tally, unasked: Mapping[str, Counter[tuple[str, str]]]) -> list[tuple[str, str]]:
    """The invariants that compared something, and the others by their reasons."""
    judged = {name: counts for name, counts in tally.invariants.items() if counts.checked}
    comparisons = [f"{name} ({short_count(counts.compared)})" for name, counts in judged.items()]
    rows = [("compared", ", ".join(comparisons) or "nothing")]
    by_reason: dict[tuple[str, str], list[str]] = {}
    for name, reasons in unasked.items():
        if name not in judged:
            by_reason.setdefault(_first_reason(reasons), []).append(name)
    for kind, words in REASONS.items():
        for (reason, stages), names in sorted(by_reason.items()):
            if reason == kind:
                rows.append(("not asked", f"{words.format(stages=stages)}: {', '.join(names)}"))
    partly = [f"{name} ({sum(reasons.values())})" for name, reasons in unasked.items() if name in judged]
    if partly:
        rows.append(("in part", f"compared nothing in so many runs: {', '.join(partly)}"))
    return rows
