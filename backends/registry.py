"""Name to backend, or the reason there is none; a stranger's engine comes in as `pkg.module:factory`."""

import importlib
import os
import sys
from dataclasses import dataclass, field

from backends.admission import Misshapen, check_declaration
from backends.base import Backend, Declaration, Unavailable, WrongFlag
from reference.layout import KINDS


@dataclass(frozen=True)
class Row:
    """One backend we ship.

    Attributes:
        name: As users type it.
        factory: `module:function` that opens it, imported on use.
        device: What it needs: cpu, cuda, npu.
        sentence: What it is.
        slow: Whether its conformance tests run only with -m slow, or where it is named.
        layouts: KvLayout.kind values that it declares, known here so that nobody must open it to ask.
        dtypes: Working dtypes that it declares, likewise.
        emulated: Whether it stands in for a device that is not there; it never counts as that device.
        cases: How many cases a search draws unless told otherwise, where a forward takes long; None for the usual.
    """

    name: str
    factory: str
    device: str
    sentence: str
    slow: bool = field(default=False, kw_only=True)
    layouts: tuple[str, ...] = tuple(KINDS)
    dtypes: tuple[str, ...] = ("float32", "float64", "bfloat16", "float16")
    emulated: bool = False
    cases: int | None = None


THREE, HALVES = ("float32", "bfloat16", "float16"), ("bfloat16", "float16")

ROWS: tuple[Row, ...] = (
    Row(
        "cpu-eager", "backends.compositions.eager:open_cpu", "cpu", "the engine with written-out attention, on the CPU"
    ),
    Row(
        "cpu-fused",
        "backends.compositions.fused:cpu_sdpa",
        "cpu",
        "the engine with torch's SDPA under the tree's mask, on the CPU",
        slow=True,
    ),
    Row(
        "cpu-fused-flex",
        "backends.compositions.fused:cpu_flex",
        "cpu",
        "the engine with FlexAttention, uncompiled, on the CPU",
        slow=True,
    ),
    Row(
        "cpu-fused-flex-compiled",
        "backends.compositions.fused:cpu_flex_compiled",
        "cpu",
        "the engine with FlexAttention, compiled where it compiles (seconds for each shape), on the CPU",
        slow=True,
    ),
    Row(
        "cuda-fused-sdpa",
        "backends.compositions.fused:cuda_sdpa",
        "cuda",
        "the engine with torch's SDPA under the tree's mask, on an NVIDIA device",
    ),
    Row(
        "cuda-fused-flashinfer",
        "backends.compositions.fused:cuda_flashinfer",
        "cuda",
        "the engine with FlashInfer's paged kernel under a custom mask, on an NVIDIA device",
        dtypes=HALVES,
    ),
    Row(
        "cuda-fused-graphs",
        "backends.compositions.fused:cuda_graphs",
        "cuda",
        "cuda-fused-sdpa with whole verify forwards as CUDA graphs, where the KV layout is static",
    ),
    Row(
        "cuda-fused-flex",
        "backends.compositions.fused:cuda_flex",
        "cuda",
        "the engine with FlexAttention, compiled, on an NVIDIA device",
    ),
    Row(
        "cpu-split",
        "backends.compositions.split:open_torch",
        "cpu",
        "the engine with attention split at the end of the prefix and merged, in torch, on the CPU",
        slow=True,
    ),
    Row(
        "triton-interpreted",
        "backends.compositions.split:open_interpreted",
        "cpu",
        "EMULATED: the engine with our Triton kernel, under Triton's interpreter on the CPU",
        slow=True,
        dtypes=THREE,
        emulated=True,
        cases=200,
    ),
    Row(
        "cuda-fused",
        "backends.compositions.split:open_cuda",
        "cuda",
        "the engine with our Triton kernel, on an NVIDIA device",
        dtypes=THREE,
    ),
    Row(
        "cuda-eager",
        "backends.compositions.eager:open_cuda",
        "cuda",
        "the engine with written-out attention, on an NVIDIA device",
    ),
    Row(
        "ascend-eager",
        "backends.compositions.ascend:open_eager",
        "npu",
        "the engine with written-out attention, on an Ascend device",
        dtypes=THREE,
    ),
    Row(
        "ascend-eager-emulated",
        "backends.compositions.ascend:emulate_eager",
        "cpu",
        "EMULATED: the engine with written-out attention, on an Ascend device, by its contract on the CPU",
        dtypes=THREE,
        emulated=True,
    ),
    Row(
        "ascend-fused",
        "backends.compositions.ascend:open_fused",
        "npu",
        "the engine with Ascend's fused-infer attention",
        dtypes=THREE,
    ),
    Row(
        "ascend-fused-emulated",
        "backends.compositions.ascend:emulate_fused",
        "cpu",
        "EMULATED: the engine with Ascend's fused-infer attention, by its contract on the CPU",
        dtypes=THREE,
        emulated=True,
    ),
    Row(
        "ascend-fused-atb",
        "backends.compositions.ascend:open_atb",
        "npu",
        "the engine with ATB's paged splitfuse attention",
        dtypes=HALVES,
    ),
    Row(
        "ascend-fused-atb-emulated",
        "backends.compositions.ascend:emulate_atb",
        "cpu",
        "EMULATED: the engine with ATB's paged splitfuse attention, by its contract on the CPU",
        dtypes=HALVES,
        emulated=True,
    ),
)


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
    known = {row.name: row.factory for row in ROWS}
    target = known.get(name, name)
    module_name, colon, attribute = target.partition(":")
    if not colon:
        raise UnknownBackend(f"no backend is called {name!r}: known are {', '.join(known)}, or give pkg.module:factory")
    if name not in known:
        search_current_folder()
    try:
        module = importlib.import_module(module_name)
    except ImportError as why:
        if name in known:
            raise Unavailable(f"{name} cannot be imported: {why}") from why
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
