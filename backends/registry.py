"""The registry, which opens a backend by its name or by `pkg.module:factory`.

A name stands for a backend that we ship (`backends/shipped.py`) or for a ready adapter (`backends/adapters.py`).
`openai:URL` is a server (`backends/servers`), `command:PROGRAM` a program in any language (`backends/programs`).
`pkg.module:factory` names a function of a user's own module that returns a backend. Where no backend can be opened, the
exception gives the reason in one line.
"""

import ast
import difflib
import importlib
import os
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from specverify.backends.adapters import ADAPTERS, SHIPPED_BACKENDS, Adapter
from specverify.backends.admission import Misshapen, check_declaration
from specverify.backends.base import Backend, Declaration, Unavailable, WrongFlag
from specverify.backends.devices import why_no_device
from specverify.backends.places import definition_place, error_place
from specverify.backends.servers import address
from specverify.backends.shipped import ROWS, Row, deviceless

FACTORY = "a function without arguments that returns a backend, such as open_ = blackbox(generate)"
"""The attribute that a user's module must have under the name behind the colon, in words."""

PROGRAM = "command:"
"""The beginning of the names of programs; `specverify.backends.programs.command` opens them."""

FORMS = (
    ("openai:URL", "elsewhere", "A server with OpenAI's completions: vLLM, SGLang, llama.cpp, and others alike."),
    ("command:PROGRAM", "", "A program in any language, asked in lines of JSON over stdin and stdout."),
    ("pkg.module:factory", "", "A function of your own that returns a backend, such as blackbox(generate)."),
)
"""The forms of names that stand for a user's own engine: the form, where such an engine computes, a sentence."""


class UnknownBackend(ValueError):
    """No backend has that name, or its `pkg.module:factory` cannot be used."""


def search_current_folder() -> None:
    """Append the current folder to `sys.path`, so that modules in it can be imported.

    As the last entry the folder shadows no other module. Every process that imports a module by a name that the user
    typed (`pkg.module:name`) calls this function first, because each process has its own `sys.path`.
    """
    try:
        here = os.getcwd()
    except OSError:  # the folder was removed: it holds no module
        return
    if here not in sys.path and "" not in sys.path:  # the empty entry means the current folder
        sys.path.append(here)


def open_backend(name: str) -> Backend:
    """Open a backend by name or by `pkg.module:factory`; the module may lie in the current folder.

    Raises:
        UnknownBackend: if the name is unknown, the module or factory cannot be imported or called, or the declaration
            names an unknown value.
        Unavailable: if the device or a package of the backend is missing.
        WrongFlag: if an environment flag has a value that is not defined.
    """
    rows = {row.name: row for row in ROWS}
    if name in rows:
        try:
            from specverify.backends.compositions import compose  # imports torch, which listing names does not need
        except ImportError as why:
            raise Unavailable(f"{name} cannot be imported: {why}") from why
        return compose(rows[name])
    ready = {adapter.name: adapter for adapter in ADAPTERS}
    if name in ready:
        return _open_adapter(ready[name])
    if is_remote(name):
        return _open_remote(name)
    module_name, colon, attribute = name.partition(":")
    if not colon:
        raise UnknownBackend(unknown(name))
    search_current_folder()
    try:
        module = importlib.import_module(module_name)
    except ImportError as why:
        search_hint = "; it is searched on Python's path and in the current folder" if why.name == module_name else ""
        raise UnknownBackend(
            f"backend {name!r}: cannot import {module_name!r} ({why}){error_place(why)}{search_hint}"
        ) from why
    except (Exception, SystemExit) as why:  # a user's module may raise anything; it becomes one line
        raise UnknownBackend(
            f"backend {name!r}: importing {module_name!r} raised {_brief(why)}{error_place(why)}"
        ) from why
    return _open_by_factory(name, module, module_name, attribute)


def is_remote(name: str) -> bool:
    """Whether a name stands for a server (`openai:URL`) or a program (`command:PROGRAM`)."""
    return name.startswith((address.PREFIX, PROGRAM))


def check_address(name: str) -> None:
    """Check the URL and the options of a server's name, without asking the server; other names pass.

    Raises:
        UnknownBackend: The name cannot be used. The message does not show the name, which may hold a key.
    """
    if name.startswith(address.PREFIX):
        try:
            address.address_of(name)
        except address.WrongAddress as why:
            raise UnknownBackend(f"{address.PREFIX} {why}") from None


def _open_remote(name: str) -> Backend:
    """Open a server or a program."""
    check_address(name)
    if name.startswith(address.PREFIX):
        from specverify.backends.servers.opening import open_server

        return open_server(name)
    from specverify.backends.programs.command import WrongProgram, open_program

    try:
        backend = open_program(name)
        check_declaration(backend.declaration)
    except (WrongProgram, Misshapen) as why:
        raise UnknownBackend(str(why)) from None
    return backend


def shipped_names() -> tuple[str, ...]:
    """The names of all backends that we ship, ready adapters last."""
    return tuple(row.name for row in SHIPPED_BACKENDS)


def unknown(name: str) -> str:
    """The refusal of a name that stands for no backend, with what the user may have meant."""
    refusal = f"no backend is called {name!r}"
    module_name = name.removesuffix(".py")
    file = Path(f"{module_name.replace('.', '/')}.py")
    if factories := _factories_in(file):
        return f"{refusal}: {file} is here and has {factories[0]}; did you mean {module_name}:{factories[0]}?"
    if similar_names := difflib.get_close_matches(name, shipped_names(), n=3):
        return f"{refusal}: did you mean {' or '.join(similar_names)}? `specverify list backends` names all"
    other_forms = ", ".join(form for form, *_ in FORMS)
    return f"{refusal}: `specverify list backends` names those that there are; others are {other_forms}"


def _factories_in(file: Path) -> list[str]:
    """The names in a user's file that may be factories, `open_` first; the file is read and not run."""
    try:
        module = ast.parse(file.read_text())
    except (OSError, SyntaxError, ValueError):
        return []
    names = [
        target.id
        for node in module.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    ]
    names += [node.name for node in module.body if isinstance(node, ast.FunctionDef) and not node.args.args]
    return sorted((name for name in names if name.startswith("open")), key=lambda name: name != "open_")


def _open_adapter(adapter: Adapter) -> Backend:
    """Open a ready adapter; its engine is imported here.

    Raises:
        Unavailable: if the engine is not installed, or cannot be imported.
    """
    absent = adapter.why_not_installed()
    if absent is not None:
        raise Unavailable(absent)
    try:
        module = importlib.import_module(adapter.module)
    except Exception as why:  # a package of others may raise anything when it is imported
        raise Unavailable(f"{adapter.name} cannot be imported: {_brief(why)}") from why
    backend = _open_by_factory(adapter.name, module, adapter.module, adapter.attribute)
    # The table is read where the engine is not installed, so that the faults stand there and not in the adapter's file.
    backend.declaration = replace(backend.declaration, excluded=adapter.excluded)
    return backend


def _open_by_factory(name: str, module: ModuleType, module_name: str, attribute: str) -> Backend:
    """The backend that the factory `attribute` of a module returns, if its declaration is admitted."""
    factory = getattr(module, attribute, None)
    place = definition_place(module, attribute)
    if not callable(factory):
        raise UnknownBackend(
            f"backend {name!r}: {module_name!r} has no factory called {attribute!r} ({place}): expected {FACTORY}"
        )
    try:
        backend = factory()
    except (Unavailable, WrongFlag):  # part of the contract: callers tell them apart from a broken factory
        raise
    except (Exception, SystemExit) as why:
        where = error_place(why) or f" ({place})"
        raise UnknownBackend(
            f"backend {name!r}: {attribute!r} raised {_brief(why)}{where}; expected {FACTORY}"
        ) from why
    if not isinstance(backend, Backend) or not isinstance(backend.declaration, Declaration):
        raise UnknownBackend(
            f"backend {name!r}: what {attribute!r} returns has no run() and declaration ({place}): "
            f"{type(backend).__name__}, expected {FACTORY}"
        )
    try:
        check_declaration(backend.declaration)
    except Misshapen as why:
        raise UnknownBackend(f"backend {name!r}: {why} ({place})") from None
    return backend


def eager_beside(name: str) -> str | None:
    """The name of the backend with eager attention on the same device as the backend `name`.

    None if `name` is that eager backend itself, or is not a backend that we ship.
    """
    rows = {row.name: row for row in ROWS}
    if name not in rows:
        return None
    suffix = "-emulated" if rows[name].emulated else ""
    # By the name's family first: an emulated Ascend backend computes on the CPU, and its twin is not cpu-eager.
    twins = (f"{name.split('-')[0]}-eager{suffix}", f"{rows[name].device}-eager")
    twin = next((candidate for candidate in twins if candidate in rows), None)
    return None if twin == name else twin


def _brief(why: BaseException) -> str:
    return f"{type(why).__name__}: {' '.join(str(why).split())[:200]}"


def why_unavailable(name: str) -> str | None:
    """Why the backend `name` cannot be opened on this machine, or None if it can."""
    try:
        open_backend(name)
    except Unavailable as why:
        return str(why)
    return None


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
