"""The ledger of known failures: a reviewed TOML file.

An entry, a table `[[known]]`, holds the signature of a finding (`specverify.properties.known`), why the failure is
accepted, until when, and the bundle that shows it. A later run recognises the failure by its signature, and tries the
bundle to see whether it still fails.
"""

from dataclasses import dataclass
from datetime import date, datetime, timezone
from pathlib import Path
from typing import Any

from specverify.gate.profile import nearest
from specverify.gate.toml_file import quote, read_toml
from specverify.properties.known import KINDS, KnownFailure, Signature
from specverify.reference.trace import Stage
from specverify.reports.format import cut
from specverify.reports.writing import write_whole
from specverify.setup.errors import UnusableInput

HEAD = """\
# Known failures of `specverify gate`: reviewed by people, written by `specverify ledger add BUNDLE`.
# A failure that is no longer there, or whose date has passed, makes the gate red.
"""

TEXTS = ("backend", "invariant", "stage", "reason", "bundle")
"""The texts that every entry has."""

NARROW = ("layout", "draft", "dtype")
"""The fields that narrow an entry to some cases."""

FIELDS = (*TEXTS, "issue", "until", "where", "broke", "also", *NARROW)
"""The fields of an entry."""


@dataclass(frozen=True)
class Entry:
    """One known failure.

    Attributes:
        backend: The backend that shows it.
        known: Its signature, under the name by which verdicts tell that they met it.
        reason: Why the failure is accepted.
        bundle: The path of the bundle, relative to the ledger.
        issue: The address of its issue, or empty.
        until: The last day on which it is accepted, or None.
    """

    backend: str
    known_failure: KnownFailure
    reason: str
    bundle: str
    issue: str = ""
    until: date | None = None

    @property
    def name(self) -> str:
        """The name of the entry: its bundle's file name without the ending."""
        return self.known_failure.name

    def is_expired(self, today: date | None = None) -> bool:
        """Whether the entry's last day has passed, in UTC."""
        return self.until is not None and (today or datetime.now(timezone.utc).date()) > self.until


def load(file: Path) -> list[Entry]:
    """The entries of a ledger; none if there is no file.

    Raises:
        UnusableInput: The file is no ledger; the line names the entry and the field.
    """
    if not file.exists():
        return []
    content = read_toml(file)
    unknown = next((key for key in content if key != "known"), None)
    if unknown is not None or not isinstance(content.get("known", []), list):
        raise UnusableInput(f"{file}: {cut(unknown or 'known', 60)}: a ledger holds tables [[known]] and nothing else")
    entries = [_entry(f"{file}: entry {number}", table) for number, table in enumerate(content.get("known", []), 1)]
    names = [entry.name for entry in entries]
    twice = next((name for index, name in enumerate(names) if name in names[:index]), None)
    if twice is not None:
        raise UnusableInput(f"{file}: two entries have a bundle called {cut(twice, 60)}: give each its own")
    return entries


def save(file: Path, entries: list[Entry]) -> None:
    """Write a ledger, whole or not at all.

    Raises:
        Unwritable: The system refuses.
    """
    write_whole(file, "\n".join([HEAD, *map(_table, entries)]).encode())


def bundle_file(file: Path, entry: Entry) -> Path:
    """The path of an entry's bundle."""
    return file.parent / entry.bundle


def _entry(place: str, table: Any) -> Entry:
    if not isinstance(table, dict):
        raise UnusableInput(f"{place}: a table stands here")
    unknown = next((key for key in table if key not in FIELDS), None)
    if unknown is not None:
        raise UnusableInput(f"{place}: {cut(unknown, 60)}: no such field; {nearest(unknown, list(FIELDS))}")
    for name in TEXTS:
        if not isinstance(table.get(name), str) or not table[name].strip():
            raise UnusableInput(f"{place}: {name}: a text must stand here")
    for name in ("issue", *NARROW):
        if not isinstance(table.get(name, ""), str):
            raise UnusableInput(f"{place}: {name}: a text stands here, not {type(table[name]).__name__}")
    until = table.get("until")
    if until is not None and (not isinstance(until, date) or isinstance(until, datetime)):
        raise UnusableInput(f"{place}: until: a date stands here, such as 2027-01-31 without quotes")
    also_tables = table.get("also", [])
    if not isinstance(also_tables, list) or not all(isinstance(also_table, dict) for also_table in also_tables):
        raise UnusableInput(f"{place}: also: a list of tables stands here")
    also = tuple(_signature(f"{place}: also", also_table) for also_table in also_tables)
    only = {name: table.get(name) for name in NARROW}
    known_failure = KnownFailure(Path(table["bundle"]).stem, _signature(place, table), also, **only)
    return Entry(table["backend"], known_failure, table["reason"], table["bundle"], table.get("issue", ""), until)


def _signature(place: str, table: dict[str, Any]) -> Signature:
    where, words = table.get("where", {}), [stage.word for stage in Stage]
    if table.get("stage") not in words:
        raise UnusableInput(f"{place}: stage: {nearest(str(table.get('stage')), words)}")
    if not isinstance(where, dict) or not all(isinstance(value, str) for value in where.values()):
        raise UnusableInput(f"{place}: where: texts by name stand here, as a table")
    strange = next((name for name in where if name not in KINDS), None)
    if strange is not None:
        raise UnusableInput(f"{place}: where.{cut(strange, 60)}: no such coordinate; {nearest(strange, list(KINDS))}")
    if not isinstance(table.get("broke", ""), str) or not isinstance(table.get("invariant"), str):
        raise UnusableInput(f"{place}: invariant and broke are texts")
    places = tuple((name, where[name]) for name in KINDS if name in where)
    return Signature(table["invariant"], table["stage"], places, table.get("broke", ""))


def _table(entry: Entry) -> str:
    """An entry as a table of TOML."""
    main = entry.known_failure.main
    rows: dict[str, str] = {"backend": quote(entry.backend), **_signature_rows(main)}
    rows |= {name: quote(value) for name in NARROW if (value := getattr(entry.known_failure, name)) is not None}
    rows["reason"] = quote(entry.reason)
    rows |= {"issue": quote(entry.issue)} if entry.issue else {}
    rows |= {"until": entry.until.isoformat()} if entry.until is not None else {}
    rows["bundle"] = quote(entry.bundle)
    text = "[[known]]\n" + "".join(f"{name} = {value}\n" for name, value in rows.items())
    if entry.known_failure.also:
        text += "also = [  # further findings on the case of the bundle\n"
        text += (
            "".join(f"  {{ {_inline(_signature_rows(signature))} }},\n" for signature in entry.known_failure.also)
            + "]\n"
        )
    return text


def _signature_rows(signature: Signature) -> dict[str, str]:
    rows = {"invariant": quote(signature.invariant), "stage": quote(signature.stage)}
    if signature.where:
        rows["where"] = f"{{ {_inline({name: quote(value) for name, value in signature.where})} }}"
    return rows | ({"broke": quote(signature.broke)} if signature.broke else {})


def _inline(rows: dict[str, str]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in rows.items())
