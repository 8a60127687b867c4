"""The page of a whole run on the terminal."""

from collections import Counter

from specverify.properties.run_statistics import exactness
from specverify.properties.speculation import by_own_count, was_seen
from specverify.properties.tally import Failure, InternalFailure, Tally
from specverify.properties.verdict.finding import FINISHED, STAGE_UNKNOWN, Finding
from specverify.reference.trace import Stage
from specverify.reports.bundle import replay_command
from specverify.reports.case_diff import case_summary
from specverify.reports.counts import (
    best_stages,
    commit_rows,
    fallback_counts,
    hidden_invariants,
    invariant_table,
    judged_rows,
    native_rows,
    reference_rows,
    residue_rows,
    short_count,
    speculation_rows,
    unjudged_rows,
    unrevealed_rows,
    varied_rows,
    way_rows,
)
from specverify.reports.coverage_words import coverage_rows
from specverify.reports.format import HEADLINES, TEXT_ALONE, clean, cut, number, outside, plural
from specverify.reports.layout80 import MARGIN, WIDTH, indent, label_rows, last_lines, plain_text, wrapping_text
from specverify.reports.pages.sampling import evidence_rows
from specverify.reports.pages.terminal import labelled_lines, wrapped_command
from specverify.reports.record import mean_accepted
from specverify.reports.vocabulary import reference_name

EXIT = {
    "agree": "everything that could be compared agrees with {reference}",
    "differ": "the backend does not do what the target alone would do",
    "unjudged": "this is no pass: exit code 3",
}
"""The sentence below the headline of each outcome."""

WRONG = {
    Stage.DRAFTED: "drafted other tokens than its draft proposes",
    Stage.LOWERED: "gave the forward pass a wrong form of the tree: its mask, positions or links",
    Stage.ATTENDED: "computed wrong attention",
    Stage.SCORED: "computed wrong scores for the next token",
    Stage.ACCEPTED: "accepted drafted tokens wrongly",
    Stage.EMITTED: "gave a wrong output",
    Stage.COMMITTED: "left a wrong KV cache behind a step",
}
"""The stage at which a difference began, in words for a reader who knows no stages."""

WRONG_BY_INVARIANT = {
    "cache.allocator-conserves": "lost or doubled pages of its KV cache",
    "cache.recurrent-rows": "computed a wrong recurrent state",
    "cache.recurrent-equivalence": "left a wrong recurrent state behind a step",
    "lossless.accounting": "counted its own work wrongly",
    "lossless.logprobs": "reported wrong log-probabilities",
    "lossless.takes-part": "did not do what an action on a request asked for",
    "serving.matcher-in-step": "left the matcher of a grammar behind its text",
}
"""The error in words where an invariant compares something else than what its stage is known for."""

REPLAYED = 3
"""Most failures whose replay command stands at the end of a page; each failure's own page has it too."""


def opening(tally: Tally, width: int = WIDTH) -> str:
    """The first sentences of a run that differs, before the pages of its failures; empty without failures."""
    if not tally.failures:
        return ""
    name, count, judged = clean(tally.backend), len(tally.failures), _judged_words(tally)
    error = _error_words(tally.failures[0].finding)
    if count > 1:
        sentence = (
            f"{judged}, and {name} went wrong in {count} ways. These are the smallest cases found that show them:"
        )
    elif tally.cases >= tally.wanted > 1 or not tally.judged:
        sentence = (
            f"{judged}. {name} {error} in {tally.differed} of them. This is the smallest case found that shows it:"
        )
    else:
        sentence = f"{judged}, then {name} {error}. This is the smallest case found that shows it:"
    return plain_text(wrapping_text(sentence), width=width)


def _error_words(finding: Finding) -> str:
    """The error of a backend, for a reader who knows none of the project's words."""
    if finding.where.get("side") == STAGE_UNKNOWN or finding.expected == FINISHED:
        return "did not finish a case"
    return WRONG_BY_INVARIANT.get(finding.invariant, WRONG[finding.stage])


def _judged_words(tally: Tally) -> str:
    """The judged cases out of those that the run was to judge."""
    verb = "was" if tally.judged == 1 else "were"
    return f"{_judged_count(tally)} {verb} judged{' in the time budget' if _is_open(tally) else ''}"


def _breadth_words(tally: Tally) -> str:
    """How many invariants had a turn, and how much ran in the backend's own attention."""
    words = f", {tally.num_asked} of {plural(len(tally.invariants), 'invariant')} had a turn"
    if tally.native_share is not None:
        words += f", {100 * tally.native_share:.3g} % of attention calls were native"
    return words


def summary_page(tally: Tally, width: int = WIDTH, verbose: bool = False) -> str:
    """The whole run in a few lines: six where it agrees, three after the pages of its failures.

    With `verbose` every invariant has a row of counts, and every fact of the run a line.
    """
    if verbose:
        return _whole_page(tally, width)
    parts = [plain_text(wrapping_text(f"{run_headline(tally)}\n"), width=width).rstrip("\n") + "\n"]
    parts[0] += labelled_lines(_outcome_sentence(tally), width)
    if tally.errors:
        parts[0] += label_rows([("error", cut(error, 400)) for error in tally.errors], width)
    parts[0] += "".join(_internal_lines(unanswered, width) for unanswered in tally.internal[:REPLAYED])
    parts[0] += label_rows(_short_facts(tally), width)
    return parts[0]


def run_headline(tally: Tally) -> str:
    """The outcome and the backend; an agreement in which no drafted token was seen to be accepted says so."""
    emulated = "  EMULATED, no hardware was judged" if tally.emulated else ""
    regions = outside(tally.excluded)
    excluded = f"  NOT JUDGED: {regions}" if regions else ""
    word = TEXT_ALONE if is_of_text_alone(tally) else HEADLINES[tally.outcome]
    return f"{word}  {clean(tally.backend)}{emulated}{excluded}"


def is_of_text_alone(tally: Tally) -> bool:
    """Whether a run agrees on an engine that shows its text, and that it accepted a drafted token nowhere."""
    shows_text_alone = tally.opened and by_own_count(tally.declared)
    return tally.outcome == "agree" and shows_text_alone and not was_seen(tally.speculation, tally.accept_lengths)


def _outcome_sentence(tally: Tally) -> str:
    """What came out, in a sentence for a reader who knows none of the project's words."""
    reference = reference_name(tally.against) if tally.against else "the target model run alone"
    num_declined = sum(tally.unsupported.values())
    declined = f"; {num_declined} declined" if num_declined else ""
    if tally.outcome == "differ":
        verb = "differs" if tally.differed == 1 else "differ"
        num_judged = plural(tally.judged, "judged case")
        return f"{tally.differed} of {num_judged} {verb} from {reference}, in {number(tally.seconds)} s{declined}."
    stopped = f"; stopped early: {clean(tally.stopped)}" if tally.stopped is not None else ""
    if tally.outcome == "agree":
        verb = "agrees" if tally.judged == 1 else "agree"
        budget = " in the time budget" if _is_open(tally) else ""
        agreeing = f"{_judged_count(tally)} {verb} with {reference}{budget}"
        return f"{agreeing}, in {number(tally.seconds)} s{declined}{stopped}."
    judged = f"{_judged_words(tally)}, in {number(tally.seconds)} s" if tally.cases else "No case was run"
    return f"{judged}: this is no pass, exit code 3{declined}{stopped}."


def _is_open(tally: Tally) -> bool:
    """Whether time ended the run, as it was meant to."""
    return tally.open_ended and tally.cases < tally.wanted


def _judged_count(tally: Tally) -> str:
    """The judged cases, out of those that the run was to judge."""
    if _is_open(tally):
        return plural(tally.judged, "case")
    return f"{tally.judged} of {plural(max(tally.wanted, tally.cases), 'case')}"


def _short_facts(tally: Tally) -> list[tuple[str, str]]:
    """The labelled facts that every run prints; `_run_facts` has them all."""
    facts: list[tuple[str, str]] = []
    if tally.outcome == "differ":
        if len(tally.failures) != 1:  # the page of a single failure has just been printed
            facts += _failure_rows(tally)
        if not tally.failures:
            facts += evidence_rows(tally)
    elif tally.cases:
        facts.append(("compared", _compared_words(tally)))
        facts += reference_rows(tally)
        facts += varied_rows(tally)
        facts += _speculation_row(tally)
        facts += native_rows(tally)
        facts += _unjudged_row(tally)
        facts += _declined_row(tally)
    facts += [("left out", cut(sentence, 300)) for sentence in tally.excluded]
    return [*facts, ("more", _more_words(tally))]


def _compared_words(tally: Tally) -> str:
    """How many comparisons were made, by how many invariants, and at which stages."""
    judged = [counts for counts in tally.invariants.values() if counts.checked]
    num_compared = sum(counts.compared for counts in judged)
    stage_words = [stage.word for stage in Stage if stage in tally.declared]
    stages = " and ".join(stage_words) if len(stage_words) < 3 else f"{len(stage_words)} of {len(Stage)} stages"
    where = f", at {stages}" if stage_words else ""
    values = f"{short_count(num_compared)} value{'' if num_compared == 1 else 's'}"
    return f"{values} by {len(judged)} of {plural(len(tally.invariants), 'invariant')}{where}"


def _speculation_row(tally: Tally) -> list[tuple[str, str]]:
    """How many drafted tokens were accepted, or that nothing says so."""
    mean = mean_accepted(tally)
    if mean is not None:
        steps = plural(sum(tally.accept_lengths.values()), "step")
        return [("speculation", f"{mean:.2f} drafted tokens accepted per step, over {steps}")]
    if is_of_text_alone(tally):
        return [("speculation", "none was seen; return `Generated` with its counts to show it")]
    return [(label, text) for label, text in speculation_rows(tally) if label == "speculation"]


def _unjudged_row(tally: Tally) -> list[tuple[str, str]]:
    """How many invariants compared nothing, and what the engine would have to show for them."""
    silent = [name for name, counts in tally.invariants.items() if not counts.checked]
    if not tally.invariants:
        return [("not judged", "everything: no invariant was selected")]
    hidden = hidden_invariants(tally)
    if not silent:
        return []
    needs = ""
    if hidden:
        best = best_stages(list(hidden.values()), tally.declared)[0][0]
        needs = f"; {len(hidden)} need hidden stages, most of all {best.word}"
    return [("not judged", f"{plural(len(silent), 'invariant')}{needs}")]


def _declined_row(tally: Tally) -> list[tuple[str, str]]:
    """The most frequent reason for which cases were declined, in a run that could not be judged."""
    if tally.outcome != "unjudged" or not tally.unsupported:
        return []
    reason, count = max(tally.unsupported.items(), key=lambda item: item[1])
    return [("declined", f"{plural(count, 'case')}: {cut(reason)}")]


def _more_words(tally: Tally) -> str:
    """Where the rest stands, and how much of it is worth a look."""
    fallbacks = len(fallback_counts(tally.fallbacks)) + len(commit_rows(tally))
    remarks = ["all counts", *([plural(fallbacks, "fallback")] if fallbacks else [])]
    remarks += [plural(len(tally.residue), "leftover")] if tally.residue else []
    judge_rest = "--keep-going; " if tally.failures and tally.cases < tally.wanted else ""
    return f"{judge_rest}--verbose ({', '.join(remarks)}); --html FILE"


def _failure_rows(tally: Tally) -> list[tuple[str, str]]:
    """A row for each failure; for a run that differs without one, the reason."""
    rows = [("failure", _failure_line(failure)) for failure in tally.failures]
    if tally.outcome == "differ" and not rows:
        reason = (
            tally.excess_ties
            or tally.excess_evidence
            or tally.excess_error
            or f"{plural(tally.differed, 'case')} differ"
        )
        rows.append(("failure", cut(reason, 400)))
    return rows


def _whole_page(tally: Tally, width: int) -> str:
    """The outcome, every count and every fact of the run, then every failure again and what to do next."""
    head = f"{run_headline(tally)}\n"
    reference = reference_name(tally.against) if tally.against else "the target model, run alone by the oracle"
    sentence = EXIT[tally.outcome].format(reference=reference)
    if tally.cases:
        sentence = f"{_judged_words(tally)}{_breadth_words(tally)}: {sentence}"
    parts = [plain_text(wrapping_text(head), width=width) + labelled_lines(sentence, width)]
    if tally.errors:
        parts.append(label_rows([("error", cut(error, 400)) for error in tally.errors], width))
    parts += [_internal_lines(unanswered, width) for unanswered in tally.internal[:REPLAYED]]
    if tally.invariants:
        parts.append(indent(invariant_table(tally, width)))
    parts.append(label_rows(_run_facts(tally), width))
    parts += _ending_lines(tally, width)
    return "\n".join(part.strip("\n") + "\n" for part in parts)


def _internal_lines(unanswered: InternalFailure, width: int) -> str:
    """An exception inside the judge: the invariant, the last lines of the traceback, the case, and how to run it."""
    facts = [("internal", cut(unanswered.line, 600))]
    if unanswered.error.said:
        facts.append(("said", last_lines(unanswered.error.said, width)))
    command = None if unanswered.saved is None else replay_command(unanswered.saved)
    replay_lines = "" if command is None else wrapped_command(command, " " * MARGIN + "replay  ", width)
    return label_rows(facts, width) + replay_lines


def _ending_lines(tally: Tally, width: int) -> list[str]:
    """The last lines: each failure again, and what to do next."""
    failure_rows = _failure_rows(tally)
    commands = "".join(
        wrapped_command(command, " " * MARGIN + "next    ", width)
        for command in map(replay_command, tally.failures[:REPLAYED])
        if command is not None
    )
    return [label_rows(failure_rows, width) + commands] if failure_rows else []


def _failure_line(failure: Failure) -> str:
    """One failure on one line: invariant, stage, case and bundle."""
    file = f" ({clean(failure.file)})" if failure.file else ""
    finding = failure.finding
    return f"{clean(finding.invariant)} at stage {finding.stage.word}, case {failure.verdict.case.id}{file}"


def _run_facts(tally: Tally) -> list[tuple[str, str]]:
    """The labelled facts of a run, in the order in which they are printed."""
    facts = [("cases", _pace(tally)), ("time", _time(tally))]
    facts += [("left out", cut(sentence, 300)) for sentence in tally.excluded]
    facts += speculation_rows(tally)
    stage_rows = unrevealed_rows(tally)
    if not tally.invariants:
        stage_rows = [("not judged", "everything: no invariant was selected")]
    facts += judged_rows(tally)
    facts += stage_rows or unjudged_rows(tally)
    mean = mean_accepted(tally)
    if mean is not None:
        steps = plural(sum(tally.accept_lengths.values()), "step")
        means = ", ".join(
            f"{kind} {accepted / count:.2f}" for kind, (count, accepted) in tally.accepted_by_draft.items()
        )
        by_draft = f" ({means})" if means else ""
        facts.append(("accepted", f"{mean:.2f} drafted tokens per step on average, over {steps}{by_draft}"))
    facts += coverage_rows(tally.pairs)
    facts += [
        ("" if rank else "dearest", f"{number(seconds)} s, case {case.id}: {case_summary(case)}")
        for rank, (seconds, case) in enumerate(tally.dearest)
    ]
    facts += _ties(tally) + _exactness(tally)
    if tally.routing_ties:
        kinds = " or ".join(sorted({tie.kind for tie in tally.routing_ties}, reverse=True))
        facts.append(("routing", f"{plural(len(tally.routing_ties), 'difference')} at a tie between {kinds} (rule T)"))
    for kind, counts in (("experts", tally.routed), ("columns", tally.indexed)):
        if counts.ties:
            ties = f"{plural(counts.ties, 'row')} of {counts.judged} took other {kind} at a tie (rule T)"
            facts.append((kind, f"{ties}; {counts.predicted:.3g} predicted"))
    facts += evidence_rows(tally)
    facts += native_rows(tally)
    facts += way_rows(tally.fallbacks)
    facts += [
        ("fell back", f"{count} of {tally.attention_calls} attention calls: {clean(reason)}")
        for reason, count in fallback_counts(tally.fallbacks)
    ]
    facts += commit_rows(tally)
    facts += [("declined", f"{plural(count, 'case')}: {clean(reason)}") for reason, count in tally.unsupported.items()]
    facts += residue_rows(tally.residue.values())
    if tally.stopped is not None:
        facts.append(("stopped", f"early: {clean(tally.stopped)}"))
    facts += reference_rows(tally)
    facts += varied_rows(tally)
    if tally.against is not None:
        addition = ", and no oracle in its place; tokens are compared with its tokens" if tally.tokens_alone else ""
        facts.append(("reference", f"{reference_name(tally.against)}: the NumPy oracle did not run{addition}"))
    if tally.environment:
        facts.append(("ran on", cut(", ".join(f"{name} {value}" for name, value in tally.environment.items()), 400)))
    return facts


def _pace(tally: Tally) -> str:
    """The number of judged cases and the cases per second."""
    if not tally.cases:
        return "none was run"
    pace = f", {number(tally.cases / tally.seconds)} per second" if tally.seconds > 0 else ""
    num_drawn = tally.cases - sum(tally.unsupported.values())
    shortfall = f" ({tally.wanted} wanted)" if tally.wanted and tally.wanted != num_drawn else ""
    return f"{tally.judged} judged / {num_drawn} drawn{shortfall}, in {number(tally.seconds)} s{pace}"


def _time(tally: Tally) -> str:
    """The time inside the backend's forwards, and how many times as long the run took."""
    shrinking = f", and {number(tally.shrink_seconds)} s of shrinking" if tally.shrink_seconds else ""
    if tally.backend_seconds <= 0:
        return f"no time was measured inside the backend's forwards{shrinking}"
    ratio = (tally.seconds - tally.shrink_seconds) / tally.backend_seconds
    backend_words = f"{number(tally.backend_seconds)} s in the backend's forwards"
    return f"{backend_words}; the run took {number(ratio)} times that{shrinking}"


def _exactness(tally: Tally) -> list[tuple[str, str]]:
    """The errors of plain decode over the run, beside the usual ones of the dtype."""
    if tally.excess_error is not None:
        return [("EXACTNESS", clean(tally.excess_error))]
    errors = exactness(tally.control_errors)
    if not errors:
        return []
    ratios = ", ".join(
        f"{error.times:.2f} in {error.dtype}{' attention' if error.quantity == 'attended' else ''}" for error in errors
    )
    prompts = plural(sum(error.prompts for error in errors if error.quantity == "logits"), "prompt")
    return [("exactness", f"errors of plain decode over the usual ones: {ratios} ({prompts})")]


def _ties(tally: Tally) -> list[tuple[str, str]]:
    """The number of near-ties, compared with the number that the control run predicts."""
    counts = tally.positions
    if tally.excess_ties is not None:
        return [("TIES", f"{clean(tally.excess_ties)}: that many cannot be chance")]
    facts = []
    drafted_ties = Counter(tie.invariant for tie in tally.ties if tie.invariant.startswith("draft."))
    num_greedy = len(tally.ties) - drafted_ties.total()
    if counts.judged:
        control = f"{number(counts.predicted)} predicted by the control, which had {counts.control_ties} itself"
        spread = f"{plural(counts.judged, 'position')} judged, {counts.near} near a tie"
        facts.append(("ties", f"{num_greedy}; {control} ({spread})"))
    elif num_greedy:
        facts.append(("ties", f"{num_greedy}, without a control to compare with"))
    for invariant, count in drafted_ties.items():
        predicted = number(tally.predicted_ties.get(invariant, 0.0))
        facts.append(
            ("ties", f"{count} of drafted nodes; {predicted} predicted by the draft's control ({clean(invariant)})")
        )
    return facts
