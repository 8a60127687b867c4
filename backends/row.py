"""A row of the table of shipped backends.

A row describes a backend without opening it, so that lists and searches need neither torch nor a device.
"""

from dataclasses import dataclass, field
from functools import partial

from specverify.reference.layout import KINDS

ALL_DTYPES = ("float32", "float64", "bfloat16", "float16")
MATRIX_DTYPES, HALF_DTYPES = ("float32", "bfloat16", "float16"), ("bfloat16", "float16")
"""MATRIX_DTYPES: of products on Ascend and in our Triton kernel. HALF_DTYPES: of kernels for 16 bits alone."""


WRITTEN_OUT = ("eager", "ascend-eager", "captured-sampling", "captured-drafts")
"""Compositions whose attention is written out, and which are there for something else."""


@dataclass(frozen=True)
class Row:
    """A backend that we ship.

    Attributes:
        name: The name as users type it.
        composition: The key of its entry in `specverify.backends.compositions.COMPOSITIONS`.
        device: The device that it needs: cpu, cuda, npu.
        sentence: Its description.
        slow: Whether its conformance tests run only with -m slow, or if the backend is named.
        layouts: KvLayout.kind values that it declares, listed here so that nobody must open it to ask.
        dtypes: Working dtypes that it declares, listed here for the same reason.
        emulated: Whether it stands in for an absent device; its runs never count as runs of that device.
        cases: The default number of cases that a search draws on a backend with slow forwards; None for the usual.
        variant_interval: See `specverify.backends.base.Declaration`.
        twin: The backend that runs the same attention where the device is missing.
        package: The package that its attention needs beside torch, and how to install it.
        imports: Names of the modules of that package.
        soft_caps: Models with a soft cap that its attention computes (`specverify.reference.abilities.Abilities`).
        sinks: Whether its attention computes sinks.
        unequal_widths: Whether its attention computes values of another width than keys.
        graphs: Whether acceptance, levels of drafts and verify forwards are recorded and replayed, on the CPU emulated.
        ranks: Numbers of ranks over which it shards a target.
        processes: Whether its ranks are processes; otherwise they are threads that take turns.
        handed_over: Whether prefill and decode are two processes.
    """

    name: str
    composition: str
    device: str
    sentence: str
    slow: bool = field(default=False, kw_only=True)
    layouts: tuple[str, ...] = tuple(KINDS)
    dtypes: tuple[str, ...] = ALL_DTYPES
    emulated: bool = False
    cases: int | None = None
    variant_interval: int = 1
    twin: str = ""
    package: str = ""
    imports: tuple[str, ...] = ()
    graphs: bool = False
    soft_caps: str = "none"
    sinks: bool = False
    unequal_widths: bool = False
    ranks: tuple[int, ...] = (1,)
    processes: bool = False
    handed_over: bool = False

    @property
    def own_kernel(self) -> bool:
        """Whether it is there for attention of its own, so that a run in which every call fell back judged nothing."""
        return self.composition not in WRITTEN_OUT


DEVICE_WORDS = {"cuda": "an NVIDIA device", "npu": "an Ascend device"}
"""The name of each device in messages."""


def deviceless(row: Row, why: str) -> str:
    """The refusal of a backend whose device cannot be used, for the reason `why`."""
    hint = f"; on the CPU, {row.twin} runs the same attention" if row.twin else ""
    return f"{row.name} needs {DEVICE_WORDS[row.device]}: {why}{hint}"


widest = partial(Row, soft_caps="any", sinks=True, unequal_widths=True)
"""A row whose attention computes every soft cap, sinks, and values of another width than keys."""
