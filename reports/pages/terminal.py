"""The pages on the terminal: one for each failure, and one for the whole run."""

import shlex

from rich.cells import cell_len

from properties.tally import Beside, Failure, Tally
from properties.verdict.finding import STAGE_UNKNOWN
from reference.trace import Stage
from reports.bundle import replay_command
from reports.case_diff import described, differences
from reports.counts import commits, fallen, not_judged, table
from reports.drawing import draw
from reports.format import address, both, clean, cut, escaped, excess, number, plural
from reports.layout80 import INDENT, MARGIN, WIDTH, beside, folded, indented, labelled, last_lines, printed
from reports.pages.sampling import evidence
from reports.record import mean_accepted
from reports.tree_scene import revealed_by, scene_of
from reports.unrevealed import rows, speculation
from reports.vocabulary import account, reference_of

OUTCOMES = {"agree": "AGREE", "differ": "DIFFER", "unjudged": "COULD NOT JUDGE"}
"""The headline of each outcome."""

EXIT = {
    "agree": "everything that could be judged agrees with {reference}",
    "differ": "the backend does not do what the target alone would do",
    "unjudged": "this is no pass: exit code 3",
}
"""The sentence below the headline of each outcome."""

TREE_INDENT = 6
"""The columns by which a failure's tree is indented."""


def failure_page(failure: Failure, revealed: frozenset[Stage] | None = None) -> str:
    """One failure on one page of 80 columns.

    Args:
        failure: The facts.
        revealed: The stages that the backend declares to reveal; None for those that its trace shows.
    """
    verdict, finding = failure.verdict, failure.finding
    if revealed is None:
        revealed = revealed_by(verdict)
    scene = scene_of(verdict, finding)
    case = verdict.case
    head = f"DIFFER  {clean(verdict.backend)}  {clean(finding.invariant)}\n"
    drawn = f", first drawn as {clean(failure.drawn)}" if failure.drawn != case.id else ""
    tries = f", {plural(failure.tried, 'case')} run to shrink it" if failure.tried else ""
    where = f"case {case.id}{drawn}{tries}\nsmallest found: {described(case)}\nbegan at {address(finding)}"
    tree = draw(scene.tree, scene.path, scene.node) if scene.tree else ""
    told = account(finding, scene, complete=False)
    parts = [printed(folded(head)) + labelled_lines(where)]
    parts.append(indented(beside(tree, told, width=WIDTH - TREE_INDENT), TREE_INDENT))
    parts.append(labelled(_facts(failure, revealed)) + _replay(failure))
    return "\n".join(part.strip("\n") + "\n" for part in parts)


def labelled_lines(text: str) -> str:
    """The lines of a page's body, each wrapped separately."""
    return indented("".join(printed(folded(line), width=WIDTH - MARGIN) for line in text.split("\n")))


def _facts(failure: Failure, revealed: frozenset[Stage]) -> list[tuple[str, str]]:
    """The labelled facts of a failure, in the order in which they are printed."""
    verdict, finding = failure.verdict, failure.finding
    beyond = f" ({excess(finding)})" if excess(finding) else ""
    expected, observed = both(finding)
    facts = [("expected", expected), ("observed", observed + beyond)]
    if finding.said:
        facts.append(("said", last_lines(finding.said)))
    failing = {other.stage for other in verdict.findings if other.step == finding.step}
    # An earlier stage agreed only if it was revealed and no finding of this step names it.
    agreed = [stage for stage in Stage if stage < finding.stage and stage in revealed and stage not in failing]
    hidden = [stage for stage in Stage if stage not in revealed]
    if finding.where.get("side") != STAGE_UNKNOWN:
        facts.append(("agreed", _stages(agreed) or "no stage before it"))
    if hidden:
        facts.append(("not revealed", f"{_stages(hidden)} (not judged)"))
    others = dict.fromkeys(other.invariant for other in verdict.findings if other.invariant != finding.invariant)
    if others:
        facts.append(("also failed", _one_line([clean(name) for name in others], WIDTH - INDENT)))
    facts += [
        ("also seen", f"by {clean(one.invariant)} at stage {one.stage.word}, case {one.case}: one cause")
        for one in failure.also
    ]
    if verdict.trace is not None:
        facts += [
            ("fell back", f"{number(count)} times: {clean(why)}") for why, count in fallen(verdict.trace.fallbacks)
        ]
    if failure.nearest is not None:
        changes = "; ".join(differences(failure.nearest, verdict.case)) or "no difference that the case file shows"
        facts.append(("nearest", f"case that agrees: {cut(changes)}"))
    if failure.beside is not None:
        facts.append(("beside", _beside(failure.beside)))
    if failure.against is not None:
        facts.append(("reference", f"{reference_of(failure.against)}: the NumPy oracle did not run"))
    if failure.fault is not None:
        facts.append(("planted", f"fault {clean(failure.fault)}: this failure is wanted"))
    return facts


def _beside(twin: Beside) -> str:
    """The outcome of the same case on the eager backend of the device."""
    if twin.finding is None:
        return f"the same case on {clean(twin.backend)}: {cut(twin.outcome)}"
    where = f"{clean(twin.finding.invariant)} at {address(twin.finding)}"
    return f"the same case on {clean(twin.backend)}: differs too, {where}"


def _stages(stages: list[Stage]) -> str:
    """Stage names, separated by commas."""
    return ", ".join(stage.word for stage in stages)


def _one_line(names: list[str], width: int) -> str:
    """As many names as fit into `width` columns, and the number of the others."""
    # The largest number of names that fits is found by trying from the longest line down.
    for kept in range(len(names), 0, -1):
        rest = f" and {len(names) - kept} more" if kept < len(names) else ""
        line = ", ".join(names[:kept]) + rest
        if len(line) <= width:
            return line
    return f"{len(names)} more invariants"


def _replay(failure: Failure) -> str:
    """The command that replays the failure, or the reason why there is none."""
    command = replay_command(failure)
    if command is None:
        return labelled([("replay", "no bundle was written; the case is in the output of --json")])
    return wrapped_command(command, " " * MARGIN + "replay  ")


def wrapped_command(command: str, lead: str, width: int = WIDTH) -> str:
    r"""A shell command after `lead`, broken by `\` so that a copy of the lines still runs.

    An option stays on the line of its value. A word too long for a line continues at column 0, where the shell
    joins it.
    """
    words = [escaped(word) for word in shlex.split(command)]
    whole = lead + shlex.join(words)
    if cell_len(whole) <= width:
        return whole + "\n"
    units: list[str] = []
    for word in words:
        if units and units[-1].startswith("--") and " " not in units[-1]:
            units[-1] += f" {shlex.quote(word)}"
        else:
            units.append(shlex.quote(word))
    # Two columns for the blank and the backslash at a line's end.
    room = width - 2
    lines = [lead]
    for unit in units:
        if lines[-1].strip() and lines[-1] != lead:
            if cell_len(lines[-1]) + 1 + cell_len(unit) <= room:
                lines[-1] += f" {unit}"
                continue
            lines[-1] += " \\"
            lines.append(" " * len(lead))
        pieces = [unit] if len(lead) + cell_len(unit) <= room else _pieces(unit, room, room - len(lead))
        lines[-1] += pieces[0]
        for piece in pieces[1:]:
            lines[-1] += "\\"
            lines.append(piece)
    return "\n".join(lines) + "\n"


def _pieces(unit: str, room: int, first: int) -> list[str]:
    """A word, or an option with its value, in quoted pieces: the first fits `first` columns, the others `room`."""
    words = shlex.split(unit)
    option, word = (f"{words[0]} " if len(words) == 2 else ""), words[-1]
    pieces = [option]
    start = 0
    for end in range(1, len(word) + 1):
        # The length is measured after quoting, because quotes and escapes take room too.
        text = shlex.quote(word[start:end])
        if len(pieces) == 1 and cell_len(option + text) <= first:
            pieces[0] = option + text
        elif len(pieces) > 1 and cell_len(text) <= room:
            pieces[-1] = text
        else:
            start = end - 1
            pieces.append(shlex.quote(word[start:end]))
    return pieces


def summary_page(tally: Tally) -> str:
    """The whole run: its outcome first, then the counts behind it, and the invariants that were not judged."""
    emulated = "  EMULATED, no hardware was judged" if tally.emulated else ""
    head = f"{OUTCOMES[tally.outcome]}  {clean(tally.backend)}{emulated}\n"
    parts = [printed(folded(head)) + labelled_lines(EXIT[tally.outcome].format(reference=reference_of(tally.against)))]
    if tally.failures:
        parts.append(labelled([("failures", _failure_line(failure)) for failure in tally.failures]))
    if tally.invariants:
        parts.append(indented(table(tally)))
    parts.append(labelled(_run_facts(tally)))
    return "\n".join(part.strip("\n") + "\n" for part in parts)


def _failure_line(failure: Failure) -> str:
    """One failure on one line: invariant, stage, case and bundle."""
    file = f" ({clean(failure.file)})" if failure.file else ""
    finding = failure.finding
    return f"{clean(finding.invariant)} at stage {finding.stage.word}, case {failure.verdict.case.id}{file}"


def _run_facts(tally: Tally) -> list[tuple[str, str]]:
    """The labelled facts of a run, in the order in which they are printed."""
    facts = [("cases", _pace(tally)), ("time", _time(tally)), *speculation(tally)]
    together = rows(tally)
    silent = [text for name, counts in tally.invariants.items() if (text := not_judged(name, counts)) and not together]
    partly = [
        f"{clean(name)} ({counts.unobserved} of {counts.unobserved + counts.checked} cases unobserved)"
        for name, counts in tally.invariants.items()
        if counts.checked and counts.unobserved
    ]
    if not tally.invariants:
        silent = ["everything: no invariant was selected"]
    facts += together + [("not judged", text) for text in silent]
    facts += [("partly", text) for text in partly]
    mean = mean_accepted(tally)
    if mean is not None:
        steps = plural(sum(tally.accept_lengths.values()), "step")
        each = ", ".join(f"{kind} {taken / count:.2f}" for kind, (count, taken) in tally.accepted_by_draft.items())
        by_draft = f" ({each})" if each else ""
        facts.append(("accepted", f"{mean:.2f} drafted tokens per step on average, over {steps}{by_draft}"))
    facts += _ties(tally)
    if tally.routing_ties:
        facts.append(("routing", f"{plural(len(tally.routing_ties), 'difference')} at a tie between experts (rule T)"))
    facts += evidence(tally)
    facts += [
        ("fell back", f"{count} of {tally.attention_calls} attention calls: {clean(why)}")
        for why, count in fallen(tally.fallbacks)
    ]
    facts += commits(tally)
    facts += [("declined", f"{plural(count, 'case')}: {clean(why)}") for why, count in tally.unsupported.items()]
    facts += [("error", cut(error, 400)) for error in tally.errors]
    if tally.stopped is not None:
        facts.append(("stopped", f"early: {clean(tally.stopped)}"))
    if tally.against is not None:
        alone = ", and no oracle in its place; tokens are compared with its tokens" if tally.tokens_alone else ""
        facts.append(("reference", f"{reference_of(tally.against)}: the NumPy oracle did not run{alone}"))
    ran = ", ".join(f"{name} {value}" for name, value in tally.environment.items())
    if ran:
        facts.append(("ran on", cut(ran, 400)))
    return facts


def _pace(tally: Tally) -> str:
    """The number of judged cases and the cases per second."""
    if not tally.cases:
        return "none was run"
    pace = f", {number(tally.cases / tally.seconds)} per second" if tally.seconds > 0 else ""
    drawn = tally.cases - sum(tally.unsupported.values())
    short = f" ({tally.wanted} wanted)" if tally.wanted and tally.wanted != drawn else ""
    return f"{tally.judged} judged / {drawn} drawn{short}, in {number(tally.seconds)} s{pace}"


def _time(tally: Tally) -> str:
    """The time inside the backend's forwards, and how many times as long the run took."""
    shrinking = f", and {number(tally.shrink_seconds)} s of shrinking" if tally.shrink_seconds else ""
    if tally.backend_seconds <= 0:
        return f"no time was measured inside the backend's forwards{shrinking}"
    ratio = (tally.seconds - tally.shrink_seconds) / tally.backend_seconds
    inside = f"{number(tally.backend_seconds)} s in the backend's forwards"
    return f"{inside}; the run took {number(ratio)} times that{shrinking}"


def _ties(tally: Tally) -> list[tuple[str, str]]:
    """The number of near-ties, compared with the number that the control run predicts."""
    counts = tally.positions
    if tally.excess_ties is not None:
        return [("TIES", f"{clean(tally.excess_ties)}: that many cannot be chance")]
    if not counts.judged:
        return [("ties", f"{len(tally.ties)}, without a control to compare with")] if tally.ties else []
    control = f"{number(counts.predicted)} predicted by the control, which had {counts.control_ties} itself"
    spread = f"{plural(counts.judged, 'position')} judged, {counts.near} near a tie"
    return [("ties", f"{len(tally.ties)}; {control} ({spread})")]
