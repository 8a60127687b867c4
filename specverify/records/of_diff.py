"""The record of a `diff`: a turn for each case, and a dump for each failure."""

from collections.abc import Mapping

from specverify.plan import Plan
from specverify.properties.tally import Failure
from specverify.properties.verdict.finding import Verdict
from specverify.records.dump import step_fact
from specverify.records.read import DIFF, Fact
from specverify.records.write import manifest_of
from specverify.reports.record import finding_fact, verdict_line


def manifest_for(plan: Plan) -> Fact:
    """The manifest of a `diff`."""
    options: Fact = {
        "backend": plan.backend, "against": plan.against, "model": plan.model, "draft": plan.draft,
        "prompts": plan.prompts, "invariants": plan.invariants, "cases": plan.cases, "new_tokens": plan.new_tokens,
        "dtypes": plan.dtypes, "seed": plan.seed, "jobs": plan.jobs, "fault": plan.fault, "layout": plan.layout,
        "mode": plan.mode, "focus": plan.focus, "batch": plan.batch, "processors": plan.processors,
    }  # fmt: skip
    return manifest_of(DIFF, options, {}, seed=plan.seed)


def turn_for(verdict: Verdict) -> Fact:
    """The turn of a judged case; its run is empty where the backend declined it or broke."""
    run, line = verdict.run, verdict_line(verdict)
    fact: Fact = {
        "prompt": verdict.case.id,
        "way": verdict.backend,
        "tokens": () if run is None else run.tokens,
        "seconds": verdict.forward_s,
        "stages": {"forwards": verdict.forward_s},
        "accepted": () if run is None else tuple(len(path) - 1 for path in run.paths),
        "fallbacks": dict(verdict.fallbacks),
        "outcome": line["outcome"],
    }
    if run is not None:
        fact |= {"nodes": run.nodes, "height": run.height, "emitted": run.emitted, "paths": run.paths}
        fact |= {} if run.draft_calls is None else {"draft_calls": run.draft_calls}
    return fact


def failure_for(failure: Failure, environment: Mapping[str, str]) -> Fact:
    """The dump of a failure: its finding, the tree of its step as it was lowered, and the environment of the run."""
    verdict, finding = failure.verdict, failure.finding
    steps = () if verdict.trace is None else verdict.trace.steps
    shown_step = step_fact(steps[finding.step]) if 0 <= finding.step < len(steps) else {}
    return {
        "prompt": verdict.case.id,
        "way": failure.backend,
        "finding": finding_fact(finding),
        "step": finding.step,
        **shown_step,
        "environment": dict(environment),
    }
