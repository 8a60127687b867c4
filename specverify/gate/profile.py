"""The profile of a gate: [tool.specverify], or specverify.toml.

`profile.schema.json` beside this file says what a profile may hold.
"""

import difflib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError

from specverify.checkpoints.given_draft import check_options
from specverify.gate.memory import MOST_BUNDLES
from specverify.gate.toml_file import read_toml
from specverify.lanes import LANES
from specverify.plan import VARIED_PROMPTS
from specverify.properties.reference_names import NUMPY
from specverify.reports.format import cut
from specverify.setup.errors import UnusableInput
from specverify.setup.selection import check_layout

OWN_FILE = "specverify.toml"
"""The file that holds a profile and nothing else."""

PROJECT_FILE = "pyproject.toml"
"""The file of a Python project, whose table `[tool.specverify]` may hold a profile."""

REPORTS = ".specverify"
"""The folder of reports if the profile names none."""


@dataclass(frozen=True)
class Floors:
    """The least that a run must have compared.

    Attributes:
        judged: Share of the cases.
        invariants: Number of invariants that compared something.
        reached: Globs, each of which must match an invariant that compared something.
        speculation: Whether a drafted token must have been seen to be accepted.
        pairs: Share of the pairs of what a request may have and reach that judged requests had.
    """

    judged: float = 0.0
    invariants: int = 0
    reached: tuple[str, ...] = ()
    speculation: bool = False
    pairs: float = 0.0


@dataclass(frozen=True)
class OnModel:
    """A checkpoint on which every backend is run, with its prompts."""

    model: str
    prompts: str | None = None
    cases: int = 20
    new_tokens: int = 64
    variants: int = VARIED_PROMPTS
    temperature: float = 0.0
    draft: str | None = None
    draft_weights: str = ""
    draft_trees: str | None = None
    layout: str | None = None
    batch: int = 0


@dataclass(frozen=True)
class Profile:
    """The settings of a gate; the schema describes each.

    Attributes:
        file: The file of the profile, for messages; the others are the keys of the schema.
    """

    file: Path
    backends: tuple[str, ...]
    cases: int | None = None
    time_budget: float | None = None
    dtypes: tuple[str, ...] = ()
    layouts: tuple[str, ...] = ()
    invariants: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (0,)
    fresh_seed: bool = True
    devices: tuple[str, ...] = ()
    jobs: int | None = None
    threads: int | None = None
    lanes: int = LANES
    against: str | None = None
    reference: str = NUMPY
    case_timeout: float | None = None
    start_timeout: float | None = None
    processors: tuple[str, ...] = ()
    corpus: tuple[str, ...] = ()
    ledger: str | None = None
    memory: str | None = None
    memory_sources: tuple[str, ...] = ()
    memory_size: int = MOST_BUNDLES
    reports: str = REPORTS
    paths: tuple[str, ...] = ()
    floors: Floors = Floors()
    models: tuple[OnModel, ...] = ()

    @property
    def folder(self) -> Path:
        """The folder to which the profile's paths are relative."""
        return self.file.parent

    @property
    def ledger_file(self) -> Path | None:
        """The file of known failures, or None."""
        return None if self.ledger is None else self.folder / self.ledger


@dataclass(frozen=True)
class Wishes:
    """The wishes of the command line beside the profile.

    Attributes:
        backends: The only backends to run; empty for all of the profile.
        seed: The seed in place of a fresh one, or None.
        shard: The number of the shard, from 1, and the number of shards.
        changed_since: A commit: if no file of the profile's paths changed since, the run is shortened.
        fault: A catalogue fault to plant, or None.
        ray: The address of a Ray cluster that judges the cases, or None for this machine.
        slices: The slices of a run there, or None for as many as the cluster runs at once.
    """

    backends: tuple[str, ...] = ()
    seed: int | None = None
    shard: tuple[int, int] = (1, 1)
    changed_since: str | None = None
    fault: str | None = None
    ray: str | None = None
    slices: int | None = None


def chosen_backends(profile: Profile, wishes: Wishes) -> tuple[str, ...]:
    """The backends to run, in the order of the profile."""
    strange = next((name for name in wishes.backends if name not in profile.backends), None)
    if strange is not None:
        raise UnusableInput(f"--backend {strange}: the profile has {', '.join(profile.backends)}")
    return tuple(name for name in profile.backends if not wishes.backends or name in wishes.backends)


def check_models(profile: Profile, backends: tuple[str, ...]) -> None:
    """Refuse a layout or a draft of a checkpoint that cannot be used.

    Raises:
        Unknown, UnusableInput: There is one.
    """
    for model in profile.models:
        if model.layout is not None:
            check_layout(model.layout, backends, latent=True)
        check_options(model.draft, model.draft_weights, model.draft_trees)


@cache
def schema() -> dict[str, Any]:
    """The JSON Schema of a profile."""
    content: dict[str, Any] = json.loads((files("specverify.gate") / "profile.schema.json").read_text("utf-8"))
    return content


def find(folder: Path) -> Path:
    """The file of the profile in `folder`: specverify.toml, or a pyproject.toml that holds a profile.

    Raises:
        UnusableInput: There is none.
    """
    if (folder / OWN_FILE).is_file():
        return folder / OWN_FILE
    project = folder / PROJECT_FILE
    if project.is_file() and "specverify" in _tools(read_toml(project)):
        return project
    raise UnusableInput(
        f"no profile here: neither {OWN_FILE} nor [tool.specverify] in {PROJECT_FILE}; "
        "`specverify gate --init github` writes one"
    )


def load(file: Path) -> Profile:
    """The profile in `file`.

    Raises:
        UnusableInput: The file is no TOML, or holds what a profile does not; one line with file, key and reason.
    """
    content: Any = read_toml(file)
    if file.name == PROJECT_FILE:
        content = _tools(content).get("specverify")
        if content is None:
            raise UnusableInput(f"{file}: it has no table [tool.specverify]")
    complaint = next(
        iter(sorted(_complaints(content), key=lambda complaint: list(map(str, complaint.absolute_path)))), None
    )
    if complaint is not None:
        raise UnusableInput(f"{file}: {_complaint_line(complaint)}")
    settings = {_word(key): _freeze(value) for key, value in content.items()}
    settings["floors"] = Floors(**_settings(content.get("floors", {})))
    settings["models"] = tuple(OnModel(**_settings(table)) for table in content.get("models", []))
    profile = Profile(file=file, **settings)
    if not profile.seeds and not profile.fresh_seed:
        raise UnusableInput(f"{file}: seeds is empty and fresh-seed is false: there is nothing to draw from")
    return profile


def _tools(content: dict[str, Any]) -> dict[str, Any]:
    tools = content.get("tool", {})
    return tools if isinstance(tools, dict) else {}


def _complaints(content: Any) -> Iterable[ValidationError]:
    # JSON knows no dates: TOML's become texts here, which no key of a profile takes for a number.
    plain = json.loads(json.dumps(content, default=str))
    complaints: Iterable[ValidationError] = Draft202012Validator(schema()).iter_errors(plain)
    return complaints


def _complaint_line(complaint: ValidationError) -> str:
    """One complaint of the schema in words: the key, and the nearest name for an unknown one."""
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in complaint.absolute_path).lstrip(
        "."
    )
    if complaint.validator == "additionalProperties":
        known_keys = sorted(complaint.schema["properties"])
        unknown = next(key for key in complaint.instance if key not in known_keys)
        return f"{_key(place, unknown)}: no such key; {nearest(unknown, known_keys)}"
    if complaint.validator == "required":
        missing = next(key for key in complaint.validator_value if key not in complaint.instance)
        return f"{_key(place, missing)}: missing"
    if complaint.validator == "enum":
        value = str(complaint.instance)
        return f"{place}: {cut(value, 40)!r}: {nearest(value, [str(value) for value in complaint.validator_value])}"
    return f"{place or 'the profile'}: {cut(complaint.message, 160)}"


def _key(place: str, key: str) -> str:
    return cut(f"{place}.{key}" if place else key, 80)


def nearest(name: str, known_names: list[str]) -> str:
    """A remark that names the `known_names` name nearest to `name`, or all of them if none is near."""
    near = difflib.get_close_matches(name, known_names, 1, 0.6)
    return f"did you mean {near[0]}?" if near else f"known are {', '.join(known_names)}"


def _settings(table: dict[str, Any]) -> dict[str, Any]:
    return {_word(key): _freeze(value) for key, value in table.items()}


def _word(key: str) -> str:
    return key.replace("-", "_")


def _freeze(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
