"""A failure for a page: sentences, then pictures of its step, then the rest."""

from collections.abc import Mapping
from typing import Any

from specverify.properties.invariants import EVERY_INVARIANT
from specverify.properties.tally import EagerOutcome, Failure
from specverify.properties.verdict.finding import STAGE_UNKNOWN
from specverify.reference.case import Case
from specverify.reference.trace import Stage
from specverify.reports.bundle import bundle_content, replay_call, replay_command
from specverify.reports.case_diff import action_words, case_summary, differing_fields
from specverify.reports.counts import fallback_counts
from specverify.reports.format import address, clean, cut, excess, expected_and_observed, number, plural, show
from specverify.reports.hints import HINTS
from specverify.reports.html.document import Downloads
from specverify.reports.html.pictures.bars import Bar, Bars
from specverify.reports.html.pictures.heat import heat_maps
from specverify.reports.html.pictures.mask import mask_picture
from specverify.reports.html.pictures.slots import slots_picture
from specverify.reports.html.pictures.step_truth import StepTruth, step_truth
from specverify.reports.html.pictures.tokens import TokensPicture, tokens_picture
from specverify.reports.html.pictures.tree import MOST_WHOLE, tree_picture
from specverify.reports.html.plain_words import STAGES, steps_of
from specverify.reports.pages.token_rows import shown_texts
from specverify.reports.tree_scene import Scene, revealed_stages, scene_of
from specverify.reports.vocabulary import account, reference_name

STATEMENTS = {invariant.name: invariant.statement for invariant in EVERY_INVARIANT}
"""The sentence that each invariant holds."""

SAID_LINES = 40
"""Most last lines of a broken run."""

PROBABILITIES = frozenset(
    {
        "acceptance.law-exact",
        "acceptance.law-joint",
        "acceptance.renamed-law",
        "acceptance.proposal-consistent",
        "lossless.processors-per-node",
    }
)
"""Invariants whose findings compare two probabilities, as far as both are numbers from 0 to 1."""

WALKS = ("acceptance.greedy-walk", "acceptance.sampled-walk")
"""Invariants whose findings with side `path` name the nodes that must be accepted."""

MASKED = (Stage.ATTENDED, Stage.SCORED)
"""Stages at which a reader asks first whether the mask was right."""


def failure_facts(
    failure: Failure, number_: int, downloads: Downloads, environment: Mapping[str, str]
) -> dict[str, Any]:
    """The facts of failure `number_` of a page, by the names that the templates use."""
    verdict, finding = failure.verdict, failure.finding
    truth = step_truth(failure)
    stage_known = finding.where.get("side") != STAGE_UNKNOWN
    expected, observed = expected_and_observed(finding)
    command = replay_command(failure) or replay_call(failure)
    statement = STATEMENTS.get(finding.invariant, "")
    return {
        "anchor": f"failure-{number_}",
        "backend": cut(verdict.backend, 120),
        "invariant": cut(finding.invariant, 120),
        "statement": statement,
        "sentence": cut(account(finding, truth.scene, complete=False), 900),
        "stage": finding.stage.word if stage_known else "not known",
        "happens": STAGES[finding.stage][0] if stage_known else "",
        "address": cut(address(finding), 300),
        "case": verdict.case.id,
        "described": cut(case_summary(verdict.case, finding), 400),
        "drawn": cut(failure.drawn, 60) if failure.drawn != verdict.case.id else "",
        "tried": failure.tried,
        "expected": expected,
        "observed": observed,
        "beyond": excess(finding),
        "said": [cut(line, 300) for line in finding.said[-SAID_LINES:]],
        "replay": command,
        "file": failure.file,
        "bundle": downloads.embed(bundle_content(failure, environment)),
        "todo": steps_of(finding.stage, stage_known),
        "fault": failure.fault,
        "rows": _fact_rows(failure),
        "stages": _stages(failure, stage_known),
        "nearest": _nearest_facts(failure, truth.scene),
        **_pictures(truth),
        "tokens": _tokens(failure),
        "hint": HINTS[failure.mistake] if failure.mistake is not None else "",
        "known": [cut(sentence, 400) for sentence in failure.known],
        "law": _law_bars(failure, expected, observed),
    }


def _pictures(truth: StepTruth) -> dict[str, Any]:
    """The pictures of the step: those of the finding's stage first, the others to be opened."""
    stage, variant = truth.finding.stage, "variant" in truth.finding.where
    mask, slots, maps = mask_picture(truth), slots_picture(truth), heat_maps(truth)
    wrong_cell = mask.cell if mask is not None and stage in (Stage.LOWERED, Stage.ATTENDED) else None
    # A bare root that the engine did not show tells nothing.
    is_shown = truth.step is not None and truth.step.drafted is not None
    scene = truth.scene if is_shown or (truth.tree and len(truth.tree) > 1) else Scene()
    tree = tree_picture(scene, f"The tree of step {truth.finding.step}", wrong_cell, _due_path(truth))
    first_pictures = {
        "mask": mask if mask is not None and (stage is Stage.LOWERED or mask.wrong) else None,
        "slots": slots if stage is Stage.COMMITTED else None,
        "maps": [heat_map for heat_map in maps if heat_map.stage == stage.word],
    }
    return {
        "tree": tree,
        "more_tree": tree_picture(truth.scene, "The tree", wrong_cell, _due_path(truth), MOST_WHOLE)
        if tree and tree.left_out
        else None,
        **first_pictures,
        "masked": stage in MASKED and mask is not None and mask.expected and mask.observed and not mask.wrong,
        "more_mask": mask if first_pictures["mask"] is None else None,
        "more_slots": slots if first_pictures["slots"] is None else None,
        "more_maps": [heat_map for heat_map in maps if heat_map.stage != stage.word],
        # The pictures are those of the case's own run; the difference may show in a run beside it.
        "beside": f"The pictures show the case's own run; the difference shows beside it, {_variant_words(truth)}."
        if variant
        else "",
        "why": f"Pictures that need the reference's numbers are missing: {cut(truth.why, 300)}." if truth.why else "",
    }


def _tokens(failure: Failure) -> TokensPicture | None:
    """The texts of a failure that is about its output."""
    texts = shown_texts(failure)
    return None if texts is None else tokens_picture(texts)


def _law_bars(failure: Failure, expected: str, observed: str) -> Bars | None:
    """The probability that a law must have, and the one that it has, where the finding is about one."""
    finding = failure.finding
    expected_p, observed_p = finding.expected, finding.observed
    if finding.invariant not in PROBABILITIES or not isinstance(expected_p, float) or not isinstance(observed_p, float):
        return None
    if not (0.0 <= expected_p <= 1.0 and 0.0 <= observed_p <= 1.0):
        return None
    where = ", ".join(f"{name} {cut(str(value), 60)}" for name, value in finding.where.items())
    pair = (
        Bar("must be", expected_p, expected, expected_p, expected_p, "due"),
        Bar("is", observed_p, observed, observed_p, observed_p, "off"),
    )
    return Bars("Probability", ((where, pair),), "Exact: nothing was sampled.")


def _due_path(truth: StepTruth) -> tuple[int, ...] | None:
    """The nodes that must be accepted, where the finding says so."""
    finding = truth.finding
    path = finding.expected
    if finding.invariant not in WALKS or finding.where.get("side") != "path" or not isinstance(path, (tuple, list)):
        return None
    return tuple(path) if all(isinstance(node, int) for node in path) else None


def _variant_words(truth: StepTruth) -> str:
    return f"in the variant “{cut(str(truth.finding.where['variant']), 80)}”"


def _stages(failure: Failure, stage_known: bool) -> list[tuple[str, str, str]]:
    """Every stage with its state on this case, and what happens in it."""
    finding, revealed = failure.finding, revealed_stages(failure.verdict)
    failing_stages = {
        other_finding.stage for other_finding in failure.verdict.findings if other_finding.step == finding.step
    }
    rows = []
    for stage in Stage:
        if stage_known and stage is finding.stage:
            state = "differs first"
        elif stage not in revealed:
            state = "not shown by the engine"
        elif stage in failing_stages:
            state = "differs too"
        elif stage_known and stage < finding.stage:
            state = "agrees"
        else:
            state = "later"
        rows.append((stage.word, state, STAGES[stage][0]))
    return rows


def _fact_rows(failure: Failure) -> list[tuple[str, str]]:
    """Labelled facts beside the sentences."""
    verdict, finding = failure.verdict, failure.finding
    rows = []
    if verdict.case.session is not None:
        rows.append(("actions", cut(action_words(verdict.case), 600)))
    other_invariants = list(
        dict.fromkeys(
            other_finding.invariant
            for other_finding in verdict.findings
            if other_finding.invariant != finding.invariant
        )
    )
    if other_invariants:
        suffix = f" and {len(other_invariants) - 12} more" if len(other_invariants) > 12 else ""
        rows.append(("also failed", ", ".join(cut(name, 80) for name in other_invariants[:12]) + suffix))
    for sighting in failure.also[:6]:
        stage = sighting.stage.word
        sentence = f"by {cut(sighting.invariant, 80)} at stage {stage}, case {cut(sighting.case, 40)}: one cause"
        rows.append(("also seen", sentence))
    if verdict.trace is not None:
        rows += [
            ("fell back", f"{number(count)} times: {cut(reason)}")
            for reason, count in fallback_counts(verdict.trace.fallbacks)[:6]
        ]
    if failure.beside is not None:
        rows.append(("other backend", _twin_words(failure.beside)))
    if failure.against is not None:
        rows.append(("reference", f"{cut(reference_name(failure.against), 120)}: the NumPy oracle did not run"))
    return rows


def _twin_words(twin: EagerOutcome) -> str:
    """The outcome of the same case on the eager backend of the device."""
    name = cut(twin.backend, 80)
    if twin.finding is None:
        return f"the same case on {name}: {cut(twin.outcome)}"
    return f"the same case on {name} differs too: {cut(twin.finding.invariant, 80)} at {cut(address(twin.finding))}"


def _nearest_facts(failure: Failure, scene: Scene) -> dict[str, Any] | None:
    """The nearest case that agrees, its tree, and the fields in which the two differ."""
    near_case = failure.nearest
    if near_case is None:
        return None
    fields = differing_fields(near_case, failure.verdict.case)
    return {
        "case": near_case.id,
        "described": cut(case_summary(near_case), 400),
        "tree": tree_picture(Scene(_case_tree(near_case, failure.finding.step)), "The tree of the case that agrees"),
        "fields": [
            (cut(name, 80), show(near_value), show(failing_value)) for name, near_value, failing_value in fields[:20]
        ],
        "more": plural(len(fields) - 20, "further field") if len(fields) > 20 else "",
    }


def _case_tree(case: Case, step: int) -> Any:
    trees = case.draft.trees
    return None if not trees else trees[min(max(step, 0), len(trees) - 1)]


def headline(failures: list[Failure]) -> str:
    """The first failure in one sentence, and how many others there are."""
    if not failures:
        return ""
    first = failures[0]
    suffix = f" ({plural(len(failures) - 1, 'further failure')} below)" if len(failures) > 1 else ""
    return cut(clean(account(first.finding, scene_of(first.verdict, first.finding), complete=False)), 900) + suffix
