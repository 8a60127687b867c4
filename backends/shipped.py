"""The backends that we ship: one row each, which says what it is without opening it."""

from dataclasses import dataclass, field

from reference.layout import KINDS

ALL_DTYPES = ("float32", "float64", "bfloat16", "float16")
THREE, HALVES = ("float32", "bfloat16", "float16"), ("bfloat16", "float16")
"""The dtypes of matrix products of Ascend and of our Triton kernel, and those of kernels for 16 bits alone."""


@dataclass(frozen=True)
class Row:
    """One backend we ship.

    Attributes:
        name: As users type it.
        composition: Which line of `backends.compositions.COMPOSITIONS` it is.
        device: What it needs: cpu, cuda, npu.
        sentence: What it is.
        slow: Whether its conformance tests run only with -m slow, or where it is named.
        layouts: KvLayout.kind values that it declares, known here so that nobody must open it to ask.
        dtypes: Working dtypes that it declares, likewise.
        emulated: Whether it stands in for a device that is not there; it never counts as that device.
        cases: How many cases a search draws unless told otherwise, where a forward takes long; None for the usual.
        variant_interval: See `backends.base.Declaration`.
        twin: The backend that runs the same attention where the device is missing.
        package: The package that its attention needs beside torch, and how it is installed.
        graphs: Whether verify forwards are recorded as CUDA graphs.
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
    graphs: bool = False


ROWS: tuple[Row, ...] = (
    Row("cpu-eager", "eager", "cpu", "the engine with written-out attention, on the CPU"),
    Row("cpu-fused", "sdpa", "cpu", "the engine with torch's SDPA under the tree's mask, on the CPU", slow=True),
    Row("cpu-fused-flex", "flex", "cpu", "the engine with FlexAttention, uncompiled, on the CPU", slow=True),
    Row(
        "cpu-fused-flex-compiled",
        "flex-compiled",
        "cpu",
        "the engine with FlexAttention, compiled where it compiles (seconds for each shape), on the CPU",
        slow=True,
    ),
    Row(
        "cuda-fused-sdpa",
        "sdpa",
        "cuda",
        "the engine with torch's SDPA under the tree's mask, on an NVIDIA device",
        twin="cpu-fused",
    ),
    Row(
        "cuda-fused-flashinfer",
        "flashinfer",
        "cuda",
        "the engine with FlashInfer's paged kernel under a custom mask, on an NVIDIA device",
        dtypes=HALVES,
        twin="cpu-fused",
        package="FlashInfer (pip install flashinfer-python)",
    ),
    Row(
        "cuda-fused-graphs",
        "sdpa",
        "cuda",
        "cuda-fused-sdpa with whole verify forwards as CUDA graphs, where the KV layout is static",
        twin="cpu-fused",
        graphs=True,
    ),
    Row(
        "cuda-fused-flex",
        "flex-compiled",
        "cuda",
        "the engine with FlexAttention, compiled, on an NVIDIA device",
        twin="cpu-fused-flex",
    ),
    Row(
        "cpu-split",
        "split",
        "cpu",
        "the engine with attention split at the end of the prefix and merged, in torch, on the CPU",
        slow=True,
    ),
    Row(
        "triton-interpreted",
        "triton-interpreted",
        "cpu",
        "EMULATED: the engine with our Triton kernel, under Triton's interpreter on the CPU",
        slow=True,
        dtypes=THREE,
        emulated=True,
        cases=200,
        variant_interval=4,
        package="Triton (pip install 'triton>=3.0', on Linux)",
    ),
    Row(
        "cuda-fused",
        "triton",
        "cuda",
        "the engine with our Triton kernel, on an NVIDIA device",
        dtypes=THREE,
        twin="triton-interpreted",
        package="Triton (pip install 'triton>=3.0')",
    ),
    Row("cuda-eager", "eager", "cuda", "the engine with written-out attention, on an NVIDIA device", twin="cpu-eager"),
    Row(
        "ascend-eager",
        "ascend-eager",
        "npu",
        "the engine with written-out attention, on an Ascend device",
        dtypes=THREE,
        twin="ascend-eager-emulated",
    ),
    Row(
        "ascend-eager-emulated",
        "ascend-eager",
        "cpu",
        "EMULATED: the engine with written-out attention, on an Ascend device, by its contract on the CPU",
        dtypes=THREE,
        emulated=True,
    ),
    Row(
        "ascend-fused",
        "ascend-fused",
        "npu",
        "the engine with Ascend's fused-infer attention",
        dtypes=THREE,
        twin="ascend-fused-emulated",
    ),
    Row(
        "ascend-fused-emulated",
        "ascend-fused",
        "cpu",
        "EMULATED: the engine with Ascend's fused-infer attention, by its contract on the CPU",
        dtypes=THREE,
        emulated=True,
    ),
    Row(
        "ascend-fused-atb",
        "ascend-atb",
        "npu",
        "the engine with ATB's paged splitfuse attention",
        dtypes=HALVES,
        twin="ascend-fused-atb-emulated",
    ),
    Row(
        "ascend-fused-atb-emulated",
        "ascend-atb",
        "cpu",
        "EMULATED: the engine with ATB's paged splitfuse attention, by its contract on the CPU",
        dtypes=HALVES,
        emulated=True,
    ),
)
