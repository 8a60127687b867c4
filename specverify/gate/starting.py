"""`gate --init`: the first profile, and the CI file; both lie beside this file."""

from importlib.resources import files
from pathlib import Path

from specverify.gate.profile import OWN_FILE, PROJECT_FILE, find, load
from specverify.reports.writing import write_whole
from specverify.setup.errors import UnusableInput

SOURCE = "git+https://github.com/OWNER/specverify@v0.1.0"
"""What CI files give to pip: a repository at a tag. OWNER stands for whoever publishes it."""

PLACES = {"github": Path(".github/workflows/speculation.yml"), "gitlab": Path(".gitlab-ci.yml")}
"""The CI file of each service."""

INCLUDED_FILE = Path("speculation.gitlab-ci.yml")
"""The file that is written where .gitlab-ci.yml stands already."""


def ci_file(service: str, shards: int = 1) -> str:
    """The CI file of a service: one job, or with several shards a job for each and one that merges their reports."""
    text = _template(f"ci-{service}{'' if shards == 1 else '-shards'}.yml")
    text = text.replace("SPECVERIFY: SOURCE", f"SPECVERIFY: {SOURCE}")
    return text.replace("NUMBERS", ", ".join(map(str, range(1, shards + 1)))).replace("COUNT", str(shards))


def _template(name: str) -> str:
    return (files("specverify.gate") / name).read_text("utf-8")


def start(folder: Path, service: str, shards: int = 1) -> list[str]:
    """Write profile and CI file into `folder`, and overwrite nothing; lines that say what was done and what is next.

    Raises:
        UnusableInput: The CI file is there already.
        Unwritable: The system refuses.
    """
    place = PLACES[service]
    if service == "gitlab" and (folder / place).exists():
        place = INCLUDED_FILE
    if (folder / place).exists():
        raise UnusableInput(f"{place} is there already: nothing was written")
    lines = []
    if (folder / OWN_FILE).exists() or _has_profile(folder):
        load(find(folder))  # a profile that cannot be read is told now, not in the first run
        lines.append("the profile that is here stays as it is")
    else:
        write_whole(folder / OWN_FILE, _template("first-profile.toml").encode())
        lines.append(f"wrote {OWN_FILE}: name your engine under backends")
    (folder / place).parent.mkdir(parents=True, exist_ok=True)
    write_whole(folder / place, ci_file(service, shards).encode())
    lines.append(f"wrote {place}: name in its variable SPECVERIFY what pip installs, a git URL at a tag or a path")
    if place == INCLUDED_FILE:
        lines.append(f"add to .gitlab-ci.yml: include: [{{local: {INCLUDED_FILE}}}]")
    return [*lines, "run it here first: specverify gate"]


def _has_profile(folder: Path) -> bool:
    if not (folder / PROJECT_FILE).exists():
        return False
    try:
        find(folder)
    except UnusableInput:
        return False
    return True
