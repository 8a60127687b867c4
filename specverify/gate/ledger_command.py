"""The command `ledger`: add a known failure, list them, prune the fixed."""

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from specverify.gate.ledger import Entry
    from specverify.gate.profile import Profile

LEDGER = click.option(
    "--ledger", "file", type=click.Path(path_type=Path), help="The ledger (default: the one that the profile names)."
)
"""The option that names a ledger."""


@click.group()
def ledger() -> None:
    """Known failures of `specverify gate`: a reviewed file that says why each is accepted, and until when."""


@ledger.command()
@click.argument("bundles", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--reason", required=True, help="Why the failure is accepted.")
@click.option("--issue", default="", help="The address of its issue.")
@click.option("--until", type=click.DateTime(["%Y-%m-%d"]), help="The last day on which it is accepted.")
@click.option(
    "--only",
    "narrow",
    multiple=True,
    type=click.Choice(["layout", "draft", "dtype"]),
    help="Known only as on this case.",
)
@click.option("--backend", help="The backend that fails (default: the one of the bundle, if the profile names it).")
@LEDGER
def add(
    *,
    bundles: tuple[Path, ...],
    reason: str,
    issue: str,
    until: datetime | None,
    narrow: tuple[str, ...],
    backend: str | None,
    file: Path | None,
) -> int:
    """Run the case of each BUNDLE again, and write what fails there into the ledger; the bundle is copied beside it."""
    from specverify.gate import ledger as ledgers
    from specverify.gate.adding import entry_from

    profile, place = _places(file)
    entries = ledgers.load(place)
    for bundle in bundles:
        facts: dict[str, Any] = {"reason": reason, "issue": issue, "until": until.date() if until else None}
        allowed = profile.backends if profile is not None else ()
        entry = entry_from(bundle, place, backend=backend, allowed=allowed, narrow=narrow, facts=facts)
        entries = [other_entry for other_entry in entries if other_entry.name != entry.name] + [entry]
        ledgers.save(place, entries)
        click.echo(f"{place}: {_line(entry)}")
    return 0


@ledger.command(name="list")
@LEDGER
def list_(file: Path | None) -> int:
    """Print the known failures."""
    from specverify.gate import ledger as ledgers
    from specverify.reports.format import plural

    _, place = _places(file)
    entries = ledgers.load(place)
    for entry in entries:
        expired = "  EXPIRED" if entry.is_expired() else ""
        click.echo(f"{_line(entry)}{expired}")
    click.echo(f"{plural(len(entries), 'known failure')} in {place}")
    return 0


@ledger.command()
@click.option("--dry-run", is_flag=True, help="Say what would be removed, and remove nothing.")
@LEDGER
def prune(dry_run: bool, file: Path | None) -> int:
    """Run the bundle of every known failure, and remove those that agree now."""
    from specverify.gate import ledger as ledgers
    from specverify.gate.adding import FIXED, UNJUDGED, try_entry

    profile, place = _places(file)
    kept_entries = []
    unknown = False
    for entry in ledgers.load(place):
        bundle = ledgers.bundle_file(place, entry)
        word, why = try_entry(bundle, entry, profile.backends if profile is not None else ())
        unknown |= word == UNJUDGED
        if word != FIXED:
            kept_entries.append(entry)
            click.echo(f"kept     {_line(entry)}: {why}")
            continue
        click.echo(f"{'fixed' if dry_run else 'removed':8} {_line(entry)}")
        if not dry_run:
            bundle.unlink(missing_ok=True)
    if not dry_run:
        ledgers.save(place, kept_entries)
    return 3 if unknown else 0


def _places(file: Path | None) -> "tuple[Profile | None, Path]":
    """The profile of this folder, if there is one, and the ledger.

    Raises:
        UnusableInput: No ledger is named, neither here nor in the profile.
    """
    from specverify.gate.profile import find, load
    from specverify.setup.errors import UnusableInput

    try:
        profile = load(find(Path()))
    except UnusableInput:
        if file is None:
            raise
        return None, file
    place = file if file is not None else profile.ledger_file
    if place is None:
        raise UnusableInput(f'{profile.file}: ledger is not set: add ledger = "known-failures.toml", or give --ledger')
    return profile, place


def _line(entry: "Entry") -> str:
    from specverify.reports.format import cut

    until = f", until {entry.until}" if entry.until else ""
    issue = f", {cut(entry.issue, 120)}" if entry.issue else ""
    main = cut(str(entry.known_failure.main), 160)
    return f"{cut(entry.name, 40)}  {cut(entry.backend, 80)}  {main}  ({cut(entry.reason, 120)}{issue}{until})"
