"""The check of a case against a backend's declaration, with a reason in one line."""

from dataclasses import replace

from backends.base import Declaration
from reference.case import Case


def outside(declared: Declaration, case: Case) -> str | None:
    """The reason why the declaration does not admit the case, or None; in a session every request is checked.

    A request that switches drafts is also checked with each later draft.
    """
    if case.session is not None:
        if not declared.sessions:
            return f"{declared.name} declares no sessions"
        requests = [case.alone(number) for number in range(1 + len(case.session.mates))]
        switched = [
            replace(requests[one.requests[0]], draft=one.draft) for one in case.session.actions if one.draft is not None
        ]
        return next((why for why in (outside(declared, one) for one in (*requests, *switched)) if why), None)
    kind = case.draft.TAG
    if case.dtype not in declared.dtypes:
        return f"{declared.name} declares no dtype {case.dtype}"
    if kind not in declared.drafts:
        return f"{declared.name} declares no {kind} draft"
    if case.layout.kind not in declared.layouts:
        return f"{declared.name} declares no KV layout {case.layout.kind}"
    if case.layout.commit not in declared.commits:
        return f"{declared.name} declares no commit by {case.layout.commit}"
    # A backend that decodes greedily alone declares a maximum of 0.
    if case.sampling.temperature > declared.max_temperature:
        return f"{declared.name} declares no sampling at temperature {case.sampling.temperature:g}"
    if not case.sampling.greedy and case.sampling.rule.name not in declared.rules:
        return f"{declared.name} declares no acceptance rule {case.sampling.rule.name}"
    if case.sampling.processes and not declared.processes:
        return f"{declared.name} declares no processing of logits"
    for name in ("stop_strings", "max_length"):
        if getattr(case.stops, name) and name not in declared.stops:
            return f"{declared.name} declares no {name}"
    return None
