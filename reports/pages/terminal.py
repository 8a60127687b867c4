"""The page of one failure on the terminal."""

import shlex

from rich.cells import cell_len

from specverify.properties.reference_names import NUMPY
from specverify.properties.tally import EagerOutcome, Failure
from specverify.properties.verdict.finding import STAGE_UNKNOWN
from specverify.properties.verdict.internal import InternalError
from specverify.reference.trace import Stage
from specverify.reports.bundle import replay_call, replay_command
from specverify.reports.case_diff import action_words, case_summary, differences
from specverify.reports.counts import fallback_counts
from specverify.reports.drawing import draw
from specverify.reports.format import address, clean, cut, escape, excess, expected_and_observed, number, plural
from specverify.reports.hints import HINTS
from specverify.reports.layout80 import (
    INDENT,
    MARGIN,
    WIDTH,
    indent,
    label_rows,
    last_lines,
    plain_text,
    side_by_side,
    wrapping_text,
)
from specverify.reports.pages.token_rows import shown_texts, token_rows
from specverify.reports.tree_scene import revealed_stages, scene_of
from specverify.reports.vocabulary import account, reference_name

TREE_INDENT = 6
"""The columns by which a failure's tree is indented."""

ACTIONS_LONGEST = 320
"""The most characters of the list of a session's actions."""


def failure_page(failure: Failure, revealed: frozenset[Stage] | None = None, width: int = WIDTH) -> str:
    """One failure on one page.

    `revealed` are the stages that the backend declares to reveal; None for those that its trace shows.
    """
    verdict, finding = failure.verdict, failure.finding
    if revealed is None:
        revealed = revealed_stages(verdict)
    scene = scene_of(verdict, finding)
    case = verdict.case
    head = f"DIFFER  {clean(verdict.backend)}  {clean(finding.invariant)}\n"
    drawn_words = f", first drawn as {clean(failure.drawn)}" if failure.drawn != case.id else ""
    tries = f", {plural(failure.tried, 'case')} run to shrink it" if failure.tried else ""
    described = case_summary(case, finding)
    where = f"case {case.id}{drawn_words}{tries}\nsmallest found: {described}\nbegan at {address(finding)}"
    # A bare root that the engine did not show tells nothing.
    drawn_tree = scene.tree if Stage.DRAFTED in revealed or (scene.tree and len(scene.tree) > 1) else None
    tree = draw(drawn_tree, scene.path, scene.node) if drawn_tree else ""
    sentence = account(finding, scene, complete=False)
    parts = [plain_text(wrapping_text(head), width=width) + labelled_lines(where, width)]
    parts.append(indent(side_by_side(tree, sentence, width=width - TREE_INDENT), TREE_INDENT))
    parts.append(label_rows(_facts(failure, revealed, width), width) + _replay_lines(failure, width))
    return "\n".join(part.strip("\n") + "\n" for part in parts)


def internal_lines(error: InternalError, width: int = WIDTH) -> str:
    """The invariant that raised an exception, and the last lines of its traceback."""
    facts = [("internal", f"{clean(error.invariant)}: {cut(error.why, 400)}")]
    if error.said:
        facts.append(("said", last_lines(error.said, width)))
    return label_rows(facts, width)


def labelled_lines(text: str, width: int = WIDTH) -> str:
    """The lines of a page's body, each wrapped separately."""
    return indent("".join(plain_text(wrapping_text(line), width=width - MARGIN) for line in text.split("\n")))


def _facts(failure: Failure, revealed: frozenset[Stage], width: int) -> list[tuple[str, str]]:
    """The labelled facts of a failure, in the order in which they are printed."""
    verdict, finding = failure.verdict, failure.finding
    excess_words = f" ({excess(finding)})" if excess(finding) else ""
    expected, observed = expected_and_observed(finding)
    facts = []
    if verdict.case.session is not None:
        facts.append(("actions", cut(action_words(verdict.case), ACTIONS_LONGEST) or "none"))
    texts = shown_texts(failure)
    if texts is not None:
        facts += token_rows(texts, width)
    if failure.mistake is not None:
        facts.append(("hint", HINTS[failure.mistake]))
    facts += [("known", cut(sentence, 400)) for sentence in failure.known]
    if texts is None or not isinstance(finding.expected, int):  # else the rows of tokens show both
        facts += [("expected", expected), ("observed", observed + excess_words)]
    if finding.said:
        facts.append(("said", last_lines(finding.said, width)))
    failing_stages = {other_finding.stage for other_finding in verdict.findings if other_finding.step == finding.step}
    # An earlier stage agreed only if it was revealed and no finding of this step names it.
    agreeing_stages = [
        stage for stage in Stage if stage < finding.stage and stage in revealed and stage not in failing_stages
    ]
    hidden_stages = [stage for stage in Stage if stage not in revealed]
    if finding.where.get("side") != STAGE_UNKNOWN:
        facts.append(("agreed", _stages(agreeing_stages) or "no stage before it"))
    if hidden_stages:
        facts.append(("not revealed", f"{_stages(hidden_stages)} (not judged)"))
    other_invariants = dict.fromkeys(
        other_finding.invariant for other_finding in verdict.findings if other_finding.invariant != finding.invariant
    )
    if other_invariants:
        facts.append(("also failed", _join_fitting([clean(name) for name in other_invariants], width - INDENT)))
    facts += [
        ("also seen", f"by {clean(sighting.invariant)} at stage {sighting.stage.word}, case {sighting.case}: one cause")
        for sighting in failure.also
    ]
    if verdict.trace is not None:
        facts += [
            ("fell back", f"{number(count)} times: {clean(reason)}")
            for reason, count in fallback_counts(verdict.trace.fallbacks)
        ]
    if failure.nearest is not None:
        changes = "; ".join(differences(failure.nearest, verdict.case)) or "no difference that the case file shows"
        facts.append(("nearest", f"case that agrees: {cut(changes)}"))
    if failure.beside is not None:
        facts.append(("beside", _twin_words(failure.beside)))
    if failure.against is not None:
        facts.append(("reference", f"{reference_name(failure.against)}: the NumPy oracle did not run"))
    if failure.reference != NUMPY:
        facts.append(("reference", f"{failure.reference}, by the oracle's formulas"))
    if failure.fault is not None:
        facts.append(("planted", f"fault {clean(failure.fault)}: put in on purpose"))
    return facts


def _twin_words(twin: EagerOutcome) -> str:
    """The outcome of the same case on the eager backend of the device."""
    if twin.finding is None:
        return f"the same case on {clean(twin.backend)}: {cut(twin.outcome)}"
    where = f"{clean(twin.finding.invariant)} at {address(twin.finding)}"
    return f"the same case on {clean(twin.backend)}: differs too, {where}"


def _stages(stages: list[Stage]) -> str:
    """Stage names, separated by commas."""
    return ", ".join(stage.word for stage in stages)


def _join_fitting(names: list[str], width: int) -> str:
    """As many names as fit into `width` columns, and the number of the others."""
    # The largest number of names that fits is found by trying from the longest line down.
    for num_names in range(len(names), 0, -1):
        suffix = f" and {len(names) - num_names} more" if num_names < len(names) else ""
        text = ", ".join(names[:num_names]) + suffix
        if len(text) <= width:
            return text
    return f"{len(names)} more invariants"


def _replay_lines(failure: Failure, width: int) -> str:
    """The command that replays the failure, or the reason why there is none."""
    command, call = replay_command(failure), replay_call(failure)
    if call is not None:
        return label_rows([("replay", f"in Python: {call}")], width)
    if command is None:
        return label_rows([("replay", "no bundle was written; the case is in the output of --json")], width)
    return wrapped_command(command, " " * MARGIN + "replay  ", width)


def wrapped_command(command: str, lead: str, width: int = WIDTH) -> str:
    r"""A shell command after `lead`, broken by `\` so that a copy of the lines still runs.

    An option stays on the line of its value. A word too long for a line continues at column 0, where the shell
    joins it.
    """
    words = [escape(word) for word in shlex.split(command)]
    line = lead + shlex.join(words)
    if cell_len(line) <= width:
        return line + "\n"
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
