"""Switching a tap on: in this process by a context manager, in others by their environment."""

import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from specverify.setup.errors import UnusableInput
from specverify.traces.taps.recorder import VARIABLE, Recorder, TapSettings, settings_in_environment

ENGINES = {
    "vllm": "specverify.traces.taps.vllm:VllmTap",
    "transformers": "specverify.traces.taps.transformers:TransformersTap",
    "llama.cpp": "specverify.traces.taps.llama_cpp:LlamaCppTap",
}
"""The engines that have a tap, and its class."""

PLUGIN = """\
[vllm.general_plugins]
specverify_tap = specverify.traces.taps.tapping:tap_inherited
"""
"""The entry point by which vLLM's processes load the tap; it is found on their path alone, never installed."""

_open: list[Any] = []
"""The tap of this process, if there is one: plug-ins are loaded several times."""


@contextmanager
def tap(engine: str, file: str | Path, *, stages: bool = False, share: float = 1.0) -> Iterator[Recorder]:
    """Inside the `with`, the engine's requests are appended to `file` as a trace when they end.

    Processes that the engine starts inside the `with` record as well.

    Args:
        engine: One of ENGINES.
        file: The trace, which `specverify trace check` reads.
        stages: Whether the target's logits and the proposals of drafts are written too.
        share: The share of the requests that is recorded, above 0 and at most 1.

    Raises:
        UnusableInput: Another engine or share, a file that cannot be written, or a tap inside another.
        MissingInput: The engine is not installed, or lacks a name that is wrapped.
    """
    settings = settings_for(engine, file, stages, share)
    if _open:
        raise UnusableInput(f"tap({engine!r}): this process is tapped already: close the first tap")
    with tempfile.TemporaryDirectory(prefix="specverify-tap-") as folder, variables(environment_of(settings, folder)):
        recorder = open_tap(settings)
        try:
            yield recorder
        finally:
            _open.pop().close()


def settings_for(engine: str, file: str | Path, stages: bool, share: float) -> TapSettings:
    """The settings of a tap, checked.

    Raises:
        UnusableInput: Another engine or share, or a file that cannot be written.
    """
    if engine not in ENGINES:
        raise UnusableInput(f"tap: {engine!r} has no tap; those are {', '.join(ENGINES)}")
    if not 0.0 < share <= 1.0:
        raise UnusableInput(f"tap: a share of {share} is none: give one above 0 and at most 1")
    path = Path(file).absolute()
    try:
        path.open("a").close()
    except OSError as why:
        raise UnusableInput(f"{file}: cannot be written ({why.strerror or why})") from None
    return TapSettings(engine, str(path), stages, share)


def environment_of(settings: TapSettings, folder: str) -> dict[str, str]:
    """The variables with which a process records: what to record, and a path with SpecVerify and the plug-in.

    `folder` is an empty folder that lives as long as the processes.
    """
    about = Path(folder) / "specverify_tap-0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: specverify-tap\nVersion: 0\n")
    (about / "entry_points.txt").write_text(PLUGIN)
    spec = importlib.util.find_spec("specverify")
    assert spec is not None
    assert spec.origin is not None
    paths = [folder, str(Path(spec.origin).parent.parent)]
    with suppress(KeyError):
        paths.append(os.environ["PYTHONPATH"])
    return {VARIABLE: settings.to_environment(), "PYTHONPATH": os.pathsep.join(paths)}


def open_tap(settings: TapSettings) -> Recorder:
    """Tap this process until it ends, or until the tap is closed; a second call finds it tapped."""
    if not _open:
        module, _, name = ENGINES[settings.engine].partition(":")
        kind: Callable[[Recorder], Any] = getattr(import_module(module), name)
        _open.append(kind(Recorder(settings)))
    recorder: Recorder = _open[0].recorder
    return recorder


def tap_inherited() -> None:
    """Tap this process as its environment says; nothing where it says nothing."""
    settings = settings_in_environment()
    if settings is not None:
        open_tap(settings)


@contextmanager
def variables(values: dict[str, str]) -> Iterator[None]:
    """Inside the `with`, environment variables have these values, and the first path of PYTHONPATH is importable."""
    originals = {name: os.environ.get(name) for name in values}
    folder = values["PYTHONPATH"].partition(os.pathsep)[0]
    os.environ.update(values)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
        for name, value in originals.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
