"""The engines that a black box keeps open: one for each shape of models, with weights loaded in place.

An engine that takes a minute to open is opened once for all drawn models of one shape. A shape is what two checkpoints
must share so that the weights of one fit where those of the other are: every field of their config.json but names. An
engine that reads grammars has its tokenizer from its opening, so that the target's words belong to the shape too.
"""

import hashlib
import inspect
import json
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MOST_SHAPES = 4
"""Engines that are open at once, by default; the one that was used least recently is closed for another."""

NAMES = ("_name_or_path", "transformers_version")
"""Fields of config.json that say nothing of a model's shape."""

TOKENIZER = "tokenizer.json"
"""The file of a checkpoint's tokenizer."""

OPENING_PARAMETERS = ("checkpoint", "draft_checkpoint", "dtype", "setting")
"""The parameters that `open` may take; `reload` may take `engine` and the first two."""


def shape_of(checkpoint: str | None) -> str:
    """The fields of a checkpoint's config.json as sorted JSON, without NAMES, and its tokenizer's; empty for None."""
    if checkpoint is None:
        return ""
    folder = Path(checkpoint)
    fields = json.loads((folder / "config.json").read_text())
    tokenizer = folder / TOKENIZER
    words = hashlib.sha256(tokenizer.read_bytes()).hexdigest() if tokenizer.is_file() else ""
    return json.dumps(
        {name: value for name, value in fields.items() if name not in NAMES} | {TOKENIZER: words}, sort_keys=True
    )


@dataclass
class OpenEngine:
    """An open engine and the directories of the models that it has loaded; `draft_checkpoint` is None without one."""

    engine: Any
    checkpoint: str
    draft_checkpoint: str | None


class EnginePool:
    """Open engines by shape of target and draft, by dtype and by setting.

    Args:
        open_engine: Opens an engine; takes some of OPENING_PARAMETERS by name.
        reload: Loads other weights of the same shape into an open engine; None for an engine that cannot: it is then
            closed, and another opened.
        close: Closes an engine; None where dropping the last reference is enough.
        most_shapes: Most engines that are open at once.

    Raises:
        TypeError: `open_engine` or `reload` needs a parameter that it is not given.
    """

    def __init__(
        self,
        open_engine: Callable[..., Any],
        reload: Callable[..., Any] | None = None,
        close: Callable[[Any], Any] | None = None,
        most_shapes: int = MOST_SHAPES,
    ) -> None:
        self._opening = _parameters_of(open_engine, "open", OPENING_PARAMETERS)
        self._reloading = (
            () if reload is None else _parameters_of(reload, "reload", ("engine", *OPENING_PARAMETERS[:2]))
        )
        self._open_engine = open_engine
        self._reload = reload
        self._close = close
        self._most_shapes = most_shapes
        self._engines: OrderedDict[tuple[str, str, str, str], OpenEngine] = OrderedDict()

    def engine_for(self, checkpoint: str, draft_checkpoint: str | None, dtype: str, setting: str = "") -> Any:
        """The engine with these models loaded: open already, with other weights loaded in place, or opened now."""
        key = (shape_of(checkpoint), shape_of(draft_checkpoint), dtype, setting)
        models = {
            "checkpoint": checkpoint, "draft_checkpoint": draft_checkpoint, "dtype": dtype, "setting": setting
        }  # fmt: skip
        entry = self._engines.pop(key, None)
        if entry is not None and (entry.checkpoint, entry.draft_checkpoint) != (checkpoint, draft_checkpoint):
            entry = self._with_other_weights(entry, models)
        if entry is None:
            while len(self._engines) >= self._most_shapes:
                self._close_engine(self._engines.popitem(last=False)[1])
            engine = self._open_engine(**{name: models[name] for name in self._opening})
            entry = OpenEngine(engine, checkpoint, draft_checkpoint)
        self._engines[key] = entry
        return entry.engine

    def close_all(self) -> None:
        """Close every engine: a call failed, and no engine of this process is in a known state.

        Engines of a process may share what the end of one takes from the others, as vLLM's do their process groups.
        """
        while self._engines:
            self._close_engine(self._engines.popitem()[1])

    def _with_other_weights(self, entry: OpenEngine, models: dict[str, Any]) -> OpenEngine | None:
        """The same engine with the weights of `models`, or None where it had to be closed."""
        if self._reload is None:
            self._close_engine(entry)
            return None
        arguments = {"engine": entry.engine, **models}
        # An engine whose reload fails is in no known state: it is not kept.
        if self._reload(**{name: arguments[name] for name in self._reloading}) is False:
            self._close_engine(entry)
            return None
        return OpenEngine(entry.engine, models["checkpoint"], models["draft_checkpoint"])

    def _close_engine(self, entry: OpenEngine) -> None:
        if self._close is not None:
            self._close(entry.engine)


def _parameters_of(function: Callable[..., Any], role: str, known: tuple[str, ...]) -> tuple[str, ...]:
    """The names of `known` that the function takes.

    Raises:
        TypeError: It needs another.
    """
    parameters = inspect.signature(function).parameters
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    for parameter in parameters.values():
        if parameter.name not in known and parameter.default is parameter.empty and parameter.kind not in variable:
            name = getattr(function, "__name__", function)
            raise TypeError(f"{role}={name} needs {parameter.name}, which is none of {', '.join(known)}")
    return tuple(name for name in known if name in parameters)
