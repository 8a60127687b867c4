"""The ledger of known failures: a reviewed TOML file.

An entry, a table `[[known]]`, holds the signature of a finding (`properties.known`), why the failure is accepted, until
when, and the bundle that shows it. A later run recognises the failure by its signature, and tries the bundle to see
whether it still fails.
"""

from dataclasses import dataclass
from datetime import date, datetime, timezone
from pathlib import Path
from typing import Any

from properties.known import KINDS, KnownFailure, Signature
from reference.trace import Stage
from reports.format import cut
from reports.writing import write_whole
from specverify.gate.profile import nearest
from specverify.gate.toml_file import quoted, read_toml
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
    known: KnownFailure
    reason: str
    bundle: str
    issue: str = ""
    until: date | None = None

    @property
    def name(self) -> str:
        """The name of the entry: its bundle's file name without the ending."""
        return self.known.name

    def expired(self, today: date | None = None) -> bool:
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
    entries = [_entry(f"{file}: entry {at}", table) for at, table in enumerate(content.get("known", []), 1)]
    names = [entry.name for entry in entries]
    twice = next((name for at, name in enumerate(names) if name in names[:at]), None)
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


def _entry(at: str, table: Any) -> Entry:
    if not isinstance(table, dict):
        raise UnusableInput(f"{at}: a table stands here")
    unknown = next((key for key in table if key not in FIELDS), None)
    if unknown is not None:
        raise UnusableInput(f"{at}: {cut(unknown, 60)}: no such field; {nearest(unknown, list(FIELDS))}")
    for name in TEXTS:
        if not isinstance(table.get(name), str) or not table[name].strip():
            raise UnusableInput(f"{at}: {name}: a text must stand here")
    for name in ("issue", *NARROW):
        if not isinstance(table.get(name, ""), str):
            raise UnusableInput(f"{at}: {name}: a text stands here, not {type(table[name]).__name__}")
    until = table.get("until")
    if until is not None and (not isinstance(until, date) or isinstance(until, datetime)):
        raise UnusableInput(f"{at}: until: a date stands here, such as 2027-01-31 without quotes")
    others = table.get("also", [])
    if not isinstance(others, list) or not all(isinstance(one, dict) for one in others):
        raise UnusableInput(f"{at}: also: a list of tables stands here")
    also = tuple(_signature(f"{at}: also", one) for one in others)
    only = {name: table.get(name) for name in NARROW}
    known = KnownFailure(Path(table["bundle"]).stem, _signature(at, table), also, **only)
    return Entry(table["backend"], known, table["reason"], table["bundle"], table.get("issue", ""), until)


def _signature(at: str, table: dict[str, Any]) -> Signature:
    where, words = table.get("where", {}), [stage.word for stage in Stage]
    if table.get("stage") not in words:
        raise UnusableInput(f"{at}: stage: {nearest(str(table.get('stage')), words)}")
    if not isinstance(where, dict) or not all(isinstance(value, str) for value in where.values()):
        raise UnusableInput(f"{at}: where: texts by name stand here, as a table")
    strange = next((name for name in where if name not in KINDS), None)
    if strange is not None:
        raise UnusableInput(f"{at}: where.{cut(strange, 60)}: no such coordinate; {nearest(strange, list(KINDS))}")
    if not isinstance(table.get("broke", ""), str) or not isinstance(table.get("invariant"), str):
        raise UnusableInput(f"{at}: invariant and broke are texts")
    places = tuple((name, where[name]) for name in KINDS if name in where)
    return Signature(table["invariant"], table["stage"], places, table.get("broke", ""))


def _table(entry: Entry) -> str:
    """An entry as a table of TOML."""
    main = entry.known.main
    rows: dict[str, str] = {"backend": quoted(entry.backend), **_signed(main)}
    rows |= {name: quoted(value) for name in NARROW if (value := getattr(entry.known, name)) is not None}
    rows["reason"] = quoted(entry.reason)
    rows |= {"issue": quoted(entry.issue)} if entry.issue else {}
    rows |= {"until": entry.until.isoformat()} if entry.until is not None else {}
    rows["bundle"] = quoted(entry.bundle)
    text = "[[known]]\n" + "".join(f"{name} = {value}\n" for name, value in rows.items())
    if entry.known.also:
        text += "also = [  # further findings on the case of the bundle\n"
        text += "".join(f"  {{ {_inline(_signed(one))} }},\n" for one in entry.known.also) + "]\n"
    return text


def _signed(one: Signature) -> dict[str, str]:
    rows = {"invariant": quoted(one.invariant), "stage": quoted(one.stage)}
    if one.where:
        rows["where"] = f"{{ {_inline({name: quoted(value) for name, value in one.where})} }}"
    return rows | ({"broke": quoted(one.broke)} if one.broke else {})


def _inline(rows: dict[str, str]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in rows.items())
