"""Settings that an engine refuses although its declaration takes them.

Such a run breaks with a message that names the setting, and the same case with a plainer value does not break. The hint
is the field of the declaration that leaves the setting out.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from specverify.properties.verdict.finding import FINISHED, Finding
from specverify.properties.verdict.subject import Crash, Subject
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.malformed import Malformed
from specverify.reference.sampling import Stops

SHORT_PROMPT, SHORT_TEXT = 4, 2
"""Tokens of a prompt and of a text that are short for any engine."""


def _sampling(**fields: Any) -> Callable[[Case], Case]:
    return lambda case: replace(case, sampling=replace(case.sampling, **fields))


def _short(case: Case) -> Case:
    return replace(case, prompt=case.prompt[-SHORT_PROMPT:], stops=Stops(SHORT_TEXT), session=None)


def _architecture(case: Case) -> Any:
    assert isinstance(case.model, Seeded)
    return case.model.architecture


def _has_windows(case: Case) -> bool:
    architecture = _architecture(case)
    return any(architecture.windows) or any(architecture.chunks)


@dataclass(frozen=True)
class Setting:
    """A setting that an engine may refuse.

    Attributes:
        hint: Its name in JSON, under which `reports/hints.py` has its sentence.
        words: What a message about it says.
        is_used: Whether a case has another value than the plainest.
        plain: The case with the plainest value; None where another model would be needed, so that the message decides.
    """

    hint: str
    words: str
    is_used: Callable[[Case], bool]
    plain: Callable[[Case], Case] | None = None


SETTINGS = (
    Setting("refused-top-k", r"top[ _-]?k", lambda case: case.sampling.top_k > 0, _sampling(top_k=0)),
    Setting("refused-top-p", r"top[ _-]?p", lambda case: case.sampling.top_p < 1.0, _sampling(top_p=1.0)),
    Setting("refused-min-p", r"min[ _-]?p", lambda case: case.sampling.min_p > 0, _sampling(min_p=0.0)),
    Setting(
        "refused-temperature", r"temperature", lambda case: case.sampling.temperature > 1.0, _sampling(temperature=1.0)
    ),
    Setting("refused-stops", r"stop|eos", lambda case: bool(case.stops.eos or case.stops.stop_tokens), _short),
    Setting(
        "refused-prompt", r"prompt.*(empty|short|least)|(empty|short).*prompt", lambda case: len(case.prompt) < 4,
        lambda case: replace(case, prompt=case.prompt * SHORT_PROMPT, session=None),
    ),
    Setting("refused-length", r"length|position|context|too long|exceed", lambda case: case.longest > 6, _short),
    Setting("refused-window", r"window|chunk", _has_windows),
    Setting("refused-head", r"head[ _]?(dim|size|width)", lambda case: True),
    Setting("refused-rope", r"\brope|rotary", lambda case: _architecture(case).rope.kind != "default"),
    Setting("refused-family", r"architecture|model[ _]type|not supported|unsupported model", lambda case: True),
)  # fmt: skip
"""The settings, those with the surest words first."""


def refused_setting(case: Case, finding: Finding, subject: Subject) -> str | None:
    """The hint on the setting of `case` that the engine refuses; None where its run did not break, or nobody knows."""
    if finding.expected != FINISHED or not isinstance(case.model, Seeded):
        return None
    message = str(finding.observed)
    for setting in SETTINGS:
        if not re.search(setting.words, message, re.IGNORECASE) or not setting.is_used(case):
            continue
        if setting.plain is None or _runs(setting.plain, case, subject):
            return setting.hint
    return None


def _runs(plain: Callable[[Case], Case], case: Case, subject: Subject) -> bool:
    """Whether the plainer case does not break."""
    try:
        return not isinstance(subject.outcome(plain(case)), Crash)
    except Malformed:
        return False
