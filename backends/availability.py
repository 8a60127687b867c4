"""Which shipped backends this machine can open, told without opening them.

To open a backend imports torch, transformers and the engine's packages, which takes seconds. Whether a device is
there and whether a package is installed can mostly be told without an import, and lists need no more.
"""

from importlib.util import find_spec

from specverify.backends.adapters import ADAPTERS
from specverify.backends.devices import why_no_device
from specverify.backends.registry import why_unavailable
from specverify.backends.row import Row, deviceless
from specverify.backends.shipped import ROWS


def why_absent(name: str) -> str | None:
    """Why the shipped backend `name` cannot be opened, as far as devices and packages tell; None if they are there.

    `specverify.backends.registry.why_unavailable` gives the same reason. An installed package that breaks when it is
    imported is found by that function alone.
    """
    row = {row.name: row for row in ROWS}.get(name)
    if row is None:
        adapter = next(adapter for adapter in ADAPTERS if adapter.name == name)
        return adapter.why_not_installed()
    if find_spec("torch") is None:
        return f"{name} cannot be imported: No module named 'torch'"
    why = why_no_device(row.device)
    if why is not None:
        return deviceless(row, why)
    # Ascend's operators beyond torch_npu are looked up in the loaded package.
    return why_unavailable(name) if row.device == "npu" else _without_package(row)


def _without_package(row: Row) -> str | None:
    """The refusal of a row whose package is not installed, or None."""
    absent = next((module for module in row.imports if find_spec(module) is None), None)
    return None if absent is None else f"{row.name} needs {row.package}: No module named {absent!r}"
