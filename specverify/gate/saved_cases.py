"""The cases that a gate judges before any draw."""

from dataclasses import dataclass, field
from pathlib import Path

from specverify.agenda import Saved
from specverify.gate.ledger import Entry, bundle_file
from specverify.gate.memory import RememberedBundles
from specverify.gate.profile import Profile
from specverify.reference.architecture import Checkpoint
from specverify.reports import bundle
from specverify.setup.errors import UnusableInput


@dataclass
class SavedCases:
    """Saved cases in the order in which they are judged.

    Attributes:
        shared: Cases that every backend judges: memory, then corpus.
        entries: Case of each ledger entry by its name.
    """

    shared: list[Saved] = field(default_factory=list)
    entries: dict[str, Saved] = field(default_factory=dict)

    def cases_of(self, backend: str, ledger: list[Entry]) -> tuple[Saved, ...]:
        """The cases of `backend`, each once: its known failures first."""
        known_cases = [self.entries[entry.name] for entry in ledger if entry.backend == backend]
        first: dict[str, Saved] = {}
        for saved in (*known_cases, *self.shared):
            first.setdefault(saved.case.id, saved)
        return tuple(first.values())


def saved_cases(profile: Profile, ledger: list[Entry], remembered: RememberedBundles) -> SavedCases:
    """Read every saved case of a profile.

    Raises:
        UnusableInput: A bundle of the ledger or a file of the corpus cannot be read or judged, or a folder is absent.
    """
    cases = SavedCases()
    for entry in ledger:
        assert profile.ledger_file is not None
        saved = _read(bundle_file(profile.ledger_file, entry))
        if isinstance(saved.case.model, Checkpoint):
            raise UnusableInput(f"known failure {entry.name}: its bundle stands on a checkpoint; built-in models only")
        cases.entries[entry.name] = Saved(saved.case, entry.known_failure.main.invariant)
    cases.shared += [Saved(saved.case, saved.invariant) for _, saved in remembered.saved_bundles]
    for name in profile.corpus:
        cases.shared += [Saved(saved.case, saved.invariant) for saved in map(_read, _files(profile, name))]
    return cases


def _read(file: Path) -> bundle.Bundle:
    try:
        return bundle.load(file)
    except bundle.Unreadable as why:
        raise UnusableInput(str(why)) from None


def _files(profile: Profile, name: str) -> list[Path]:
    """The case files below a path of the corpus, in the order of their names."""
    place = profile.folder / name
    if place.is_file():
        return [place]
    files = sorted(place.rglob("*.json")) if place.is_dir() else []
    if not files:
        raise UnusableInput(f"{profile.file}: corpus: {name} holds no case file (*.json)")
    return files
