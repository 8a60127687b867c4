"""Two results of `gate` or `diff` side by side: failing, fixed, judged less."""

from dataclasses import dataclass, field
from typing import Any

from specverify.properties.paired_acceptance import ALPHA, AcceptCounts, compare_acceptance
from specverify.reports.acceptance import position_lines, test_fact, verdict_words
from specverify.reports.format import cut, number, plural

SLOWER = 1.25
"""The factor beyond which a run counts as slower, in the ratio of its time to that inside the backend's forwards."""

LEAST_S = 5.0
"""Fewest seconds inside the backend's forwards whose ratio is compared: start-up weighs too much on shorter runs."""

LESS = 0.02
"""The difference of two shares of judged cases that is told."""


@dataclass
class Comparison:
    """The differences of two results; each line begins with the run that it is about.

    Attributes:
        failing: Failures of the second result that the first has not.
        fixed: Failures of the first that the second has not, although it judged their invariant.
        known: Failures of the first that the second shows too, and takes for known.
        gone: Failures of the first whose invariant the second did not judge.
        less: Runs, invariants and cases that the second judged less.
        acceptance: Runs of the second that accept drafted tokens otherwise than the first on the same cases.
        slower: Runs of the second whose checks cost more, in units of the backend's own time.
        otherwise: Differences in what was drawn, or how.
        unjudged: Whether the second result says that it could not judge.
    """

    failing: list[str] = field(default_factory=list)
    fixed: list[str] = field(default_factory=list)
    known: list[str] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)
    less: list[str] = field(default_factory=list)
    acceptance: list[str] = field(default_factory=list)
    slower: list[str] = field(default_factory=list)
    otherwise: list[str] = field(default_factory=list)
    unjudged: bool = False

    @property
    def exit_code(self) -> int:
        """1 for a new failure or another acceptance, 3 where the second could not judge or lacks a run, else 0."""
        return 1 if self.failing or self.acceptance else 3 if self.unjudged else 0

    def sections(self) -> list[tuple[str, list[str]]]:
        """Every kind of difference with its lines, the gravest first."""
        sections = {
            "newly failing": self.failing,
            "accepts otherwise": self.acceptance,
            "no longer judged": self.gone,
            "judged less": self.less,
            "slower": self.slower,
            "drawn otherwise": self.otherwise,
            "now known": self.known,
            "fixed": self.fixed,
        }
        return [(name, lines) for name, lines in sections.items() if lines]


def runs_of(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The runs of a result by backend and checkpoint; the result of `diff` is one run.

    Raises:
        ValueError: The object is no result of either.
    """
    if result.get("kind") == "gate":
        return {_title(run): run for run in result["runs"]}
    if not isinstance(result.get("invariants"), dict) or "outcome" not in result:
        raise ValueError("it is no result of `specverify gate` or `specverify diff --json`")
    return {str(result.get("backend")): result}


def compare_results(before: dict[str, Any], after: dict[str, Any], alpha: float = ALPHA) -> Comparison:
    """The differences between two results; accepted tokens are compared at the error rate `alpha`.

    Raises:
        ValueError: One of them is no result.
    """
    comparison = Comparison(unjudged=after.get("outcome") == "unjudged")
    runs_before, runs_after = runs_of(before), runs_of(after)
    for name, run in runs_after.items():
        _compare(cut(name, 100), runs_before.get(name, {}), run, _known_signatures(after, run), comparison)
    missing_runs = [name for name in runs_before if name not in runs_after]
    comparison.unjudged |= bool(missing_runs)
    comparison.less += [f"{cut(name, 100)}: did not run" for name in missing_runs]
    _compare_acceptance(runs_before, runs_after, alpha, comparison)
    comparison.otherwise += _setting_differences(before, after)
    stale_names = {
        known_failure["name"]
        for known_failure in before.get("known", [])
        if known_failure["state"] in ("stale", "expired")
    }
    for known_failure in after.get("known", []):
        name, state = known_failure["name"], known_failure["state"]
        if state in ("stale", "expired") and name not in stale_names:
            comparison.failing.append(f"{cut(known_failure['backend'], 100)}: known failure {cut(name, 60)} is {state}")
    return comparison


def _compare_acceptance(
    before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]], alpha: float, comparison: Comparison
) -> None:
    """Test accepted tokens case by case: an id says model, draft, prompt and seeds.

    Runs are paired by name. Two results of one run each are compared whatever their backends.
    """
    pairs = {name: (before[name], after[name]) for name in after if name in before}
    if len(before) == len(after) == 1:
        pairs = {name: (next(iter(before.values())), run) for name, run in after.items()}
    for name, runs in pairs.items():
        first, second = (_accept_counts(run) for run in runs)
        test = test_fact(compare_acceptance(first, second, alpha / len(pairs)))
        line = f"{cut(name, 100)}: {verdict_words(test, is_same_run=True)}"
        if test["verdict"] == "differs":
            comparison.acceptance += [line, *(f"{cut(name, 100)}: {words}" for words in position_lines(test))]
        elif test["differing"]:
            comparison.otherwise.append(line)


def _accept_counts(run: dict[str, Any]) -> dict[str, AcceptCounts]:
    """The counts of a run by case; none in a result that was written before they were."""
    return {
        case_id: AcceptCounts(tuple(counts["accepted"]), counts["offered"])
        for case_id, counts in run.get("acceptance", {}).items()
    }


def _title(run: dict[str, Any]) -> str:
    return str(run["name"]) if run.get("model") is None else f"{run['name']} on {run['model']}"


def failures_of(run: dict[str, Any]) -> dict[str, str]:
    """The failures of a run by signature, each with its invariant."""
    findings = run.get("findings", [])
    signatures = run.get("signatures") or [f"{finding['invariant']} at {finding['stage']}" for finding in findings]
    return {str(signature): str(finding["invariant"]) for signature, finding in zip(signatures, findings, strict=False)}


def _known_signatures(result: dict[str, Any], run: dict[str, Any]) -> set[str]:
    """The signatures of the known failures that a run of `result` showed, with those that belong to them."""
    known_failures = [
        known_failure
        for known_failure in result.get("known", [])
        if known_failure["name"] in run.get("known", {}) and known_failure["backend"] == run.get("name")
    ]
    return {
        signature
        for known_failure in known_failures
        for signature in (known_failure["signature"], *known_failure.get("also", []))
    }


def _compare(
    name: str, before: dict[str, Any], after: dict[str, Any], known_signatures: set[str], comparison: Comparison
) -> None:
    failures_before, failures_after = failures_of(before), failures_of(after)
    comparison.failing += [
        f"{name}: {cut(signature, 200)}" for signature in failures_after if signature not in failures_before
    ]
    if after.get("outcome") == "differ" and not failures_after and before.get("outcome") != "differ":
        comparison.failing.append(f"{name}: the run differs, and no single case shows where")
    if not before:
        comparison.otherwise.append(f"{name}: is new in the second result")
        return
    for signature, invariant in failures_before.items():
        line = f"{name}: {cut(signature, 200)}"
        if signature in failures_after:
            continue
        if signature in known_signatures:
            comparison.known.append(line)
        else:
            is_checked = after["invariants"].get(invariant, {}).get("checked", 0) > 0
            (comparison.fixed if is_checked else comparison.gone).append(line)
    comparison.less += [f"{name}: {line}" for line in _judged_less(before, after)]
    ratios = [_time_ratio(run) for run in (before, after)]
    if ratios[0] is not None and ratios[1] is not None and ratios[1] > SLOWER * ratios[0]:
        ratio_words = (
            f"the run took {number(ratios[1])} times the time inside the backend, and {number(ratios[0])} before"
        )
        comparison.slower.append(f"{name}: {ratio_words}")
    comparison.otherwise += [f"{name}: {line}" for line in _draw_differences(before, after)]


def _judged_less(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    shares = [run["judged"] / run["cases"] if run.get("cases") else 0.0 for run in (before, after)]
    lines = []
    if after["judged"] < before["judged"] and shares[1] < shares[0] - LESS:
        lines.append(
            f"{after['judged']} of {after['cases']} cases judged, {before['judged']} of {before['cases']} before"
        )
    for invariant, counts in before["invariants"].items():
        num_checked = after["invariants"].get(invariant, {}).get("checked", 0)
        if counts["checked"] and not num_checked:
            lines.append(
                f"{cut(invariant, 80)} compared nothing, and was judged on {plural(counts['checked'], 'case')}"
            )
    return lines


def _time_ratio(run: dict[str, Any]) -> float | None:
    """Times that the run took its backend's own time, shrinking left out; None for a run too short to say."""
    backend_s = run.get("backend_seconds") or 0.0
    seconds: float = run.get("seconds", 0.0) - run.get("shrink_seconds", 0.0)
    return seconds / backend_s if backend_s >= LEAST_S else None


def _draw_differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    lines = []
    if before.get("cases") != after.get("cases"):
        lines.append(f"{after.get('cases')} cases, {before.get('cases')} before")
    elif before.get("drawn") and after.get("drawn") and before["drawn"] != after["drawn"]:
        lines.append(f"as many cases, and others: digest {after['drawn']}, {before['drawn']} before")
    if before.get("reference") != after.get("reference"):
        lines.append(
            f"reference {cut(str(after.get('reference')), 60)}, {cut(str(before.get('reference')), 60)} before"
        )
    environment_before, environment_after = before.get("environment", {}), after.get("environment", {})
    names = [
        name
        for name in (*environment_before, *(name for name in environment_after if name not in environment_before))
        if environment_before.get(name) != environment_after.get(name)
    ]
    for name in names:
        value_before = cut(str(environment_before.get(name)), 60)
        value_after = cut(str(environment_after.get(name)), 60)
        lines.append(f"{cut(name, 40)} {value_after}, {value_before} before")
    return lines


def _setting_differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    lines = []
    for name in ("seeds", "shard"):
        if name in before and name in after and before[name] != after[name]:
            before_words, after_words = (", ".join(map(str, result[name])) for result in (before, after))
            lines.append(f"{name} {after_words}; {before_words} before")
    return lines
