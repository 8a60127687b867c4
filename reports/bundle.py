"""Bundles: a failing case as one JSON file that replays it on another machine.

A bundle holds the case, the finding, and the names of backend, model, fault and reference. `specverify replay` reads
bundles, and files with a bare case.
"""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specverify.properties.reference_names import NUMPY
from specverify.properties.tally import HERE, Failure
from specverify.properties.verdict.internal import ANSWER
from specverify.reference.architecture import Checkpoint
from specverify.reference.case import Case
from specverify.reference.case_json import case_from_json, case_to_json, short_json
from specverify.reference.files.regular import read_whole
from specverify.reference.malformed import Malformed
from specverify.reference.trace import Stage
from specverify.reports.format import clean, cut, escape
from specverify.reports.writing import Unwritable, flat_json, jsonable, write_whole

VERSION = 1
"""Version of the bundle format; a reader refuses later ones."""

LARGEST = 16 * 2**20
"""The largest file that is read, in bytes; no case comes near it."""

FIELDS = ("bundle", "case", "finding", "fault", "backend", "model", "dtype", "environment", "against")
"""The fields of a bundle; a file with another field is refused."""
SAID_KEY = "said"
"""The key in `environment` of the last lines that a broken run printed, as one text.

They stand there because earlier readers refuse a field of a finding that they do not know.
"""

FINDING_FIELDS = ("invariant", "stage", "step", "where", "expected", "observed", "measure")
"""The fields of a bundle's finding; they are names of the fields of `Finding`."""


class Unreadable(ValueError):
    """A file that holds neither a bundle nor a case.

    Attributes:
        path: The file as it was given.
        why: The reason and, where there is one, the remedy, on one line.
    """

    def __init__(self, path: str | Path, reason: str) -> None:
        self.path = str(path)
        self.why = cut(reason, 400)
        super().__init__(f"cannot read {clean(self.path)}: {self.why}")


@dataclass(frozen=True)
class Bundle:
    """The facts that a replay needs; a bare case file gives only the case.

    Attributes:
        stage: The stage at which the difference began; None where the invariant raised an exception instead.
        backend: The argument of `--backend`.
        model: The argument of `--model`.
        against: The argument of `--against`; None for the NumPy oracle.
    """

    case: Case
    invariant: str | None = None
    stage: Stage | None = None
    fault: str | None = None
    backend: str | None = None
    model: str | None = None
    against: str | None = None


def replay_command(failure: Failure) -> str | None:
    """The command that runs the case again, quoted for a shell; None without a bundle, or for a Python object."""
    if failure.file is None or failure.backend.startswith(HERE):
        return None
    case = failure.verdict.case
    # A file name that starts with a dash would read as an option.
    file = f"./{failure.file}" if failure.file.startswith("-") else failure.file
    words = ["specverify", "replay", file, "--backend", failure.backend]
    words += ["--fault", failure.fault] if failure.fault is not None else []
    for number, checkpoint in enumerate(case.checkpoints):
        # A replay opens no path that stands in the file alone: each checkpoint is named here.
        model_path = failure.model if number == 0 and isinstance(case.model, Checkpoint) else None
        words += ["--model", model_path or checkpoint.source]
    model_digests = {checkpoint.digest for checkpoint in case.checkpoints}
    for files in (head.files for head in case.heads):
        if files is not None and files.digest not in model_digests:  # MTP modules lie in the target's own directory
            words += ["--draft", files.source]
    words += ["--against", failure.against] if failure.against is not None else []
    words += ["--reference", failure.reference] if failure.reference != NUMPY else []
    for name in case.sampling.processors:
        words += ["--processor", name]
    return shlex.join(words)


def ledger_command(failure: Failure) -> str | None:
    """The command that enters a failure into the ledger, with every bundle that shows its cause; None without bundles.

    A cause may show under several invariants, each with a bundle of its own: one entry alone would leave the gate red.
    """
    files = [file for file in (failure.file, *(sighting.file for sighting in failure.also)) if file is not None]
    if not files or failure.fault is not None:
        return None
    return shlex.join(["specverify", "ledger", "add", *dict.fromkeys(files), "--reason", "WHY"])


def replay_call(failure: Failure) -> str | None:
    """The call in Python that runs the failing case again; None for a backend that a command can open."""
    if failure.file is None or not failure.backend.startswith(HERE):
        return None
    return f"specverify.replay({failure.file!r}, {clean(failure.backend.removeprefix(HERE))})"


def bundle_content(failure: Failure, environment: Mapping[str, str]) -> dict[str, Any]:
    """The bundle as a JSON object."""
    finding = failure.finding
    finding_fact = {name: getattr(finding, name) for name in FINDING_FIELDS}
    if finding.expected == ANSWER:  # an exception inside the judge, which belongs to no stage
        finding_fact["stage"] = None
    last_lines = {SAID_KEY: "\n".join(map(escape, finding.said))} if finding.said else {}
    return {
        "bundle": VERSION,
        "case": case_to_json(failure.verdict.case),
        "finding": jsonable(finding_fact),
        "fault": failure.fault,
        "backend": failure.backend,
        "model": failure.model,
        "dtype": failure.verdict.case.dtype,
        "environment": {**environment, **last_lines},
        **({} if failure.against is None else {"against": failure.against}),
    }


def save(folder: str | Path, failure: Failure, environment: Mapping[str, str], name: str = "") -> Path:
    """Write `<case id>.json`, or the file `name`, into `folder`, which is made if need be; whole or not at all.

    The file leaves out the fields of the case that hold their default, and the facts of the bundle that are absent.

    Raises:
        Unwritable: when the system refuses.
    """
    path = Path(folder) / (name or f"{failure.verdict.case.id}.json")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Unwritable.from_os_error(folder, error) from None
    content = {**bundle_content(failure, environment), "case": short_json(failure.verdict.case)}
    facts = {name: fact for name, fact in content.items() if fact is not None}
    write_whole(path, flat_json(facts).encode())
    return path


def save_case(path: str | Path, case: Case) -> None:
    """Write a file with a bare case, whole or not at all; it leaves out the fields that hold their default.

    Raises:
        Unwritable: when the system refuses.
    """
    write_whole(path, flat_json(short_json(case)).encode())


def load(path: str | Path) -> Bundle:
    """The bundle, or the bare case, in the file at `path`.

    Raises:
        Unreadable: whatever is wrong with the file.
    """
    try:
        content = _decode(_text(Path(path)))
        if isinstance(content, dict) and ("bundle" in content or "finding" in content):
            return _bundle(content)
        return Bundle(_case(content))
    except Malformed as complaint:
        raise Unreadable(path, str(complaint)) from None
    except RecursionError:
        raise Unreadable(path, "nested too deeply for a case") from None
    except MemoryError:
        raise Unreadable(path, "too large for the memory of this machine") from None


def _text(path: Path) -> str:
    """The text of a file; Malformed where it is absent, unreadable, empty or not UTF-8."""
    try:
        raw = read_whole(path, LARGEST)
    except FileNotFoundError:
        raise Malformed("", "no such file; `specverify diff` names the bundles that it writes") from None
    except IsADirectoryError:
        raise Malformed("", "a directory; give one of the .json files in it") from None
    except OSError as error:
        raise Malformed("", error.strerror or str(error)) from None
    try:
        # Editors on Windows put a byte order mark in front.
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Malformed("", f"not UTF-8 text (byte {error.start}); not a case file, or damaged") from None
    if not text.strip():
        raise Malformed("", "empty; writing it was interrupted?")
    return text


def _decode(text: str) -> Any:
    """The JSON value of `text`; Malformed for anything that strict JSON does not admit."""
    try:
        return json.loads(
            text,
            parse_constant=_refuse_constant,
            parse_float=_finite_float,
            parse_int=_bounded_integer,
            object_pairs_hook=_unique_fields,
        )
    except json.JSONDecodeError as error:
        # An error at the very end of the text points to a file that was written in part.
        cut_off = error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated")
        problem = "ends too early, cut off?" if cut_off else "not JSON:"
        raise Malformed("", f"{problem} {error.msg} at line {error.lineno}, column {error.colno}") from None


def _refuse_constant(word: str) -> float:
    """Refuse NaN and Infinity, which Python's reader would otherwise accept."""
    raise Malformed("", f"{word} is not a number that JSON knows")


def _finite_float(digits: str) -> float:
    """A finite float; a number that overflows to infinity is refused."""
    value = float(digits)
    if value in (float("inf"), float("-inf")):
        raise Malformed("", f"the number {digits[:40]} is too large")
    return value


def _bounded_integer(digits: str) -> int:
    """An int of at most 19 digits."""
    # 2^63 has 19 digits, and Python refuses to read an integer of several thousand digits.
    if len(digits) > 19:
        raise Malformed("", f"the number {digits[:12]}… of {len(digits)} digits is too large")
    return int(digits)


def _unique_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object as a dict; a field that appears twice is refused, since a dict would keep only the last."""
    content = dict(pairs)
    if len(content) < len(pairs):
        seen_names: set[str] = set()
        repeated_name = next(key for key, _ in pairs if key in seen_names or seen_names.add(key))  # type: ignore[func-returns-value]
        raise Malformed("", f"the field {repeated_name!r} appears twice in one object")
    return content


def _case(content: Any) -> Case:
    """The case of a JSON value; every failure of its fields is told as Malformed."""
    try:
        return case_from_json(content)
    except Malformed:
        raise
    # A file may hold any JSON, so a field may fail in ways that its reader does not foresee.
    except (TypeError, ValueError, ArithmeticError, LookupError) as error:
        raise Malformed("", f"a field holds what no case can hold ({error})") from None


def _bundle(content: dict[str, Any]) -> Bundle:
    """The bundle of a JSON object, checked field by field."""
    version = content.get("bundle")
    # A bool is an int in Python.
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise Malformed("bundle", f"the version of the format must stand here, a number up to {VERSION}")
    if version > VERSION:
        raise Malformed("bundle", f"version {version} is newer than the {VERSION} known here: update specverify")
    unknown = [name for name in content if name not in FIELDS]
    if unknown:
        raise Malformed(cut(unknown[0], 60), f"no field of a bundle; those are {', '.join(FIELDS)}")
    if "case" not in content:
        raise Malformed("case", "missing; a bundle carries its case")
    try:
        case = _case(content["case"])
    except Malformed as complaint:
        raise complaint.under("case") from None
    dtype = _string_field(content, "dtype")
    if dtype is not None and dtype != case.dtype:
        raise Malformed("dtype", f"{dtype!r} is not the {case.dtype!r} of the case: the file was edited or damaged")
    environment = content.get("environment")
    if environment is not None and not _has_only_strings(environment):
        raise Malformed("environment", "names and versions stand here, as an object of strings")
    invariant, stage = _finding(content.get("finding"))
    return Bundle(
        case=case,
        invariant=invariant,
        stage=stage,
        fault=_string_field(content, "fault"),
        backend=_string_field(content, "backend"),
        model=_string_field(content, "model"),
        against=_string_field(content, "against"),
    )


def _has_only_strings(value: Any) -> bool:
    """Whether `value` is a dict of strings."""
    return isinstance(value, dict) and all(isinstance(item, str) for item in value.values())


def _string_field(content: dict[str, Any], name: str, path: str = "") -> str | None:
    """The string or None in the field `name` of `content`."""
    value = content.get(name)
    if value is not None and not isinstance(value, str):
        raise Malformed(f"{path}{name}", f"a string or null stands here, not {type(value).__name__}")
    return value


def _finding(content: Any) -> tuple[str | None, Stage | None]:
    """Invariant and stage of a bundle's finding."""
    if content is None:
        return None, None
    if not isinstance(content, dict):
        raise Malformed("finding", f"an object or null stands here, not {type(content).__name__}")
    unknown = [name for name in content if name not in FINDING_FIELDS]
    if unknown:
        raise Malformed(
            cut(f"finding.{unknown[0]}", 60), f"no field of a finding; those are {', '.join(FINDING_FIELDS)}"
        )
    if not isinstance(content.get("step", 0), int) or isinstance(content.get("step"), bool):
        raise Malformed("finding.step", "the index of a step stands here")
    if not isinstance(content.get("where", {}), dict):
        raise Malformed("finding.where", "coordinates by name stand here, as an object")
    word = _string_field(content, "stage", "finding.")
    words = [stage.word for stage in Stage]
    if word is not None and word not in words:
        raise Malformed("finding.stage", f"{cut(word, 40)!r} is none of {', '.join(words)}")
    return _string_field(content, "invariant", "finding."), None if word is None else Stage(words.index(word))
