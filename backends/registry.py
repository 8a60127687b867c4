"""Name to backend, or the reason there is none; a stranger's engine comes in as `pkg.module:factory`."""

import importlib
import os
import sys

from backends.admission import Misshapen, check_declaration
from backends.base import Backend, Declaration, Unavailable, WrongFlag
from backends.shipped import ROWS


class UnknownBackend(ValueError):
    """No backend has that name, or its `pkg.module:factory` cannot be used."""


def search_current_folder() -> None:
    """Let modules of the current folder be imported, after those of every other entry of `sys.path`.

    As the last entry the folder hides nothing. Every process that imports a module by a name that the user typed
    (`pkg.module:name`) calls this first: each has a `sys.path` of its own.
    """
    try:
        here = os.getcwd()
    except OSError:  # the folder was removed: it holds no module
        return
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)


def open_backend(name: str) -> Backend:
    """Open a backend by name or by `pkg.module:factory`, whose module may lie in the current folder.

    Raises:
        UnknownBackend: for a name that means nothing, a module or factory that cannot be imported or called,
            a declaration that names what there is not.
        Unavailable: where its device or package is missing.
        WrongFlag: where the environment asks for a mode that there is not.
    """
    known = {row.name: row for row in ROWS}
    if name in known:
        try:
            from backends.compositions import compose  # brings torch
        except ImportError as why:
            raise Unavailable(f"{name} cannot be imported: {why}") from why
        return compose(known[name])
    module_name, colon, attribute = name.partition(":")
    if not colon:
        raise UnknownBackend(f"no backend is called {name!r}: known are {', '.join(known)}, or give pkg.module:factory")
    search_current_folder()
    try:
        module = importlib.import_module(module_name)
    except ImportError as why:
        raise UnknownBackend(f"backend {name!r}: cannot import {module_name!r} ({why})") from why
    except (Exception, SystemExit) as why:  # a stranger's code: whatever it raises becomes one line
        raise UnknownBackend(f"backend {name!r}: importing {module_name!r} raised {_brief(why)}") from why
    factory = getattr(module, attribute, None)
    if not callable(factory):
        raise UnknownBackend(f"backend {name!r}: {module_name!r} has no factory called {attribute!r}")
    try:
        backend = factory()
    except (Unavailable, WrongFlag):
        raise
    except (Exception, SystemExit) as why:
        raise UnknownBackend(f"backend {name!r}: {attribute!r} raised {_brief(why)}") from why
    if not isinstance(backend, Backend) or not isinstance(backend.declaration, Declaration):
        raise UnknownBackend(f"backend {name!r}: what {attribute!r} returns has no run() and declaration")
    try:
        check_declaration(backend.declaration)
    except Misshapen as why:
        raise UnknownBackend(f"backend {name!r}: {why}") from None
    return backend


def eager_beside(name: str) -> str | None:
    """The backend with eager attention on the device of a backend of ours; None for that one, and for a stranger's."""
    of = {row.name: row for row in ROWS}
    if name not in of:
        return None
    suffix = "-emulated" if of[name].emulated else ""
    twins = (f"{name.split('-')[0]}-eager{suffix}", f"{of[name].device}-eager")
    found = next((one for one in twins if one in of), None)
    return None if found == name else found


def _brief(why: BaseException) -> str:
    return f"{type(why).__name__}: {' '.join(str(why).split())[:200]}"


def why_unavailable(name: str) -> str | None:
    """Why a backend cannot be opened here, or None if it can."""
    try:
        open_backend(name)
    except Unavailable as why:
        return str(why)
    return None
