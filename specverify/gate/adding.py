"""Replays for the ledger: what fails on a bundle now, and what is fixed."""

from pathlib import Path
from typing import Any

from specverify.campaign.replay import ReplayResult, replay
from specverify.gate.ledger import NARROW, Entry
from specverify.properties.known import KnownFailure, signature, without_known_findings
from specverify.reports import bundle
from specverify.reports.writing import Unwritable, write_whole
from specverify.setup.errors import MissingInput, UnusableInput

FIXED, FAILS, UNJUDGED = "fixed", "fails", "could not judge"
"""The fate of a known failure that was added."""


def entry_from(
    file: Path,
    ledger: Path,
    *,
    backend: str | None,
    allowed: tuple[str, ...],
    narrow: tuple[str, ...],
    facts: dict[str, Any],
) -> Entry:
    """The entry for the failure in `file`, whose case is run again; the bundle is copied beside the ledger.

    Args:
        file: The bundle.
        ledger: The file of the ledger.
        backend: The backend that fails; None for that of the bundle.
        allowed: Backends whose code may be run because the profile names them.
        narrow: Fields of NARROW in which another case must equal this one to be known.
        facts: Reason, issue and last day.

    Raises:
        UnusableInput: The case agrees, or the bundle is none of a failure of the engine's own.
        MissingInput: The case could not be judged here.
        Unreadable, Unavailable, UnknownBackend: The bundle or the backend cannot be opened.
    """
    saved = bundle.load(file)
    if saved.fault is not None:
        raise UnusableInput(f"{file}: its fault {saved.fault} was planted: a ledger holds failures of the engine's own")
    name = backend or saved.backend
    if saved.invariant is None or name is None:
        raise UnusableInput(f"{file}: holds a case and no finding: give a bundle that `specverify gate` wrote")
    again = replay(str(file), _allowed_backend(name, backend, allowed), None)
    if again.word == "UNJUDGED":
        raise MissingInput(f"{file}: {again.why}: a failure that cannot be seen cannot be known")
    if again.failure is None:
        raise UnusableInput(f"{file}: {again.why} now: there is no failure to know")
    main = signature(again.failure.finding)
    signatures = dict.fromkeys(signature(finding) for finding in again.failure.verdict.findings)
    case = saved.case
    as_here = {"layout": case.layout.kind, "draft": case.draft.TAG, "dtype": case.dtype}
    only = {field: as_here[field] for field in NARROW if field in narrow}
    known_failure = KnownFailure(
        file.stem, main, tuple(other_signature for other_signature in signatures if other_signature != main), **only
    )
    copy = ledger.parent / ledger.stem / file.name
    try:
        copy.parent.mkdir(parents=True, exist_ok=True)
        write_whole(copy, file.read_bytes())
    except OSError as why:
        raise Unwritable.from_os_error(copy, why) from None
    return Entry(name, known_failure, bundle=f"{ledger.stem}/{file.name}", **facts)


def try_entry(file: Path, entry: Entry, allowed: tuple[str, ...]) -> tuple[str, str]:
    """FIXED, FAILS or UNJUDGED for a known failure, whose bundle is `file`, with the reason."""
    again: ReplayResult = replay(str(file), _allowed_backend(entry.backend, None, allowed), None)
    if again.word == "UNJUDGED":
        return UNJUDGED, again.why
    if again.failure is None:
        return FIXED, again.why
    known_names = without_known_findings(again.failure.verdict, (entry.known_failure,)).known
    return FAILS, "it fails as before" if known_names else f"its bundle fails otherwise now: {again.why}"


def _allowed_backend(name: str, option_backend: str | None, allowed: tuple[str, ...]) -> str:
    """The backend `name`, if the user named it: by an option, by the profile, or as one that is ours.

    Raises:
        UnusableInput: It is code that only a file names.
    """
    if ":" in name and option_backend is None and name not in allowed:
        raise UnusableInput(f"{name} is code that a file names: give it with --backend, or in the profile")
    return name
