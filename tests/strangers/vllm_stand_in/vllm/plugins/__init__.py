"""Plug-ins: functions of other packages, which every process of the engine calls once."""

from importlib.metadata import entry_points


def load_general_plugins() -> None:
    for entry in entry_points(group="vllm.general_plugins"):
        entry.load()()
