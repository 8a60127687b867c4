"""The table of the backends that we ship, one row each."""

from dataclasses import dataclass, field
from functools import partial

from specverify.reference.layout import KINDS
from specverify.reference.parallel import RANKS

ALL_DTYPES = ("float32", "float64", "bfloat16", "float16")
MATRIX_DTYPES, HALF_DTYPES = ("float32", "bfloat16", "float16"), ("bfloat16", "float16")
"""MATRIX_DTYPES: of products on Ascend and in our Triton kernel. HALF_DTYPES: of kernels for 16 bits alone."""


WRITTEN_OUT = ("eager", "ascend-eager", "captured-sampling", "captured-drafts", "ranks-by-requests")
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
        indexed: Whether its attention takes columns that an indexer chose for each row.
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
    indexed: bool = False
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


ROWS: tuple[Row, ...] = (
    widest("cpu-eager", "eager", "cpu", "the engine with written-out attention, on the CPU", ranks=RANKS, indexed=True),
    widest(
        "cpu-ranks",
        "eager",
        "cpu",
        "cpu-eager with the target over two or four processes that talk by gloo",
        slow=True,
        cases=100,
        ranks=RANKS[1:],
        processes=True,
    ),
    widest(
        "cpu-ranks-by-requests",
        "ranks-by-requests",
        "cpu",
        "cpu-eager with the target over two or four ranks, each of which samples for its own slice of the batch",
        slow=True,
        cases=100,
        ranks=RANKS[1:],
    ),
    widest(
        "cpu-handed-over",
        "eager",
        "cpu",
        "cpu-eager with prefill in one process and decode in another",
        slow=True,
        cases=200,
        handed_over=True,
        indexed=True,
    ),
    Row(
        "cpu-fused",
        "sdpa",
        "cpu",
        "the engine with torch's SDPA under the tree's mask, on the CPU",
        slow=True,
        unequal_widths=True,
    ),
    Row(
        "cpu-fused-flex",
        "flex",
        "cpu",
        "the engine with FlexAttention, uncompiled, on the CPU",
        slow=True,
        sinks=True,
        unequal_widths=True,
    ),
    Row(
        "cpu-fused-flex-compiled",
        "flex-compiled",
        "cpu",
        "the engine with FlexAttention, compiled where it compiles (seconds for each shape), on the CPU",
        slow=True,
        sinks=True,
        unequal_widths=True,
    ),
    Row(
        "cuda-fused-sdpa",
        "sdpa",
        "cuda",
        "the engine with torch's SDPA under the tree's mask, on an NVIDIA device",
        twin="cpu-fused",
        unequal_widths=True,
    ),
    Row(
        "cuda-fused-flashinfer",
        "flashinfer",
        "cuda",
        "the engine with FlashInfer's paged kernel under a custom mask, on an NVIDIA device",
        dtypes=HALF_DTYPES,
        twin="cpu-fused",
        package="FlashInfer (pip install flashinfer-python)",
        imports=("flashinfer",),
    ),
    Row(
        "cuda-fused-graphs",
        "sdpa",
        "cuda",
        "cuda-fused-sdpa with acceptance, and forwards over static buffers or pages, as CUDA graphs",
        twin="cpu-fused",
        graphs=True,
        unequal_widths=True,
    ),
    Row(
        "cuda-fused-flex",
        "flex-compiled",
        "cuda",
        "the engine with FlexAttention, compiled, on an NVIDIA device",
        twin="cpu-fused-flex",
        sinks=True,
        unequal_widths=True,
    ),
    Row(
        "cpu-split",
        "split",
        "cpu",
        "the engine with attention split at the end of the prefix and merged, in torch, on the CPU",
        slow=True,
        sinks=True,
        unequal_widths=True,
    ),
    Row(
        "cpu-split-words",
        "split-words",
        "cpu",
        "cpu-split with each tree lowered by tensor operations, to words of bits in place of a mask",
        slow=True,
        sinks=True,
        unequal_widths=True,
    ),
    widest(
        "cpu-measured",
        "measured",
        "cpu",
        "the engine with the way of attention chosen by measured times (SPECVERIFY_ATTENTION_TABLE), on the CPU",
        slow=True,
    ),
    widest(
        "cuda-measured",
        "measured-cuda",
        "cuda",
        "the engine with the way of attention chosen by measured times (SPECVERIFY_ATTENTION_TABLE)",
        twin="cpu-measured",
        package="Triton (pip install 'triton>=3.0')",
        imports=("triton",),
    ),
    widest(
        "cpu-captured-sampling",
        "captured-sampling",
        "cpu",
        "cpu-eager with the acceptance of a whole batch in one call, captured by torch.compile and run eagerly",
        slow=True,
    ),
    widest(
        "cpu-captured-drafts",
        "captured-drafts",
        "cpu",
        "EMULATED: cpu-eager with drafts of a batch in one forward over persistent buffers, as graphs would run them",
        slow=True,
        emulated=True,
    ),
    widest(
        "cpu-recorded",
        "eager",
        "cpu",
        "EMULATED: cpu-eager with acceptance, and forwards over static buffers or pages, replayed as CUDA graphs",
        slow=True,
        emulated=True,
        graphs=True,
    ),
    Row(
        "triton-interpreted",
        "triton-interpreted",
        "cpu",
        "EMULATED: the engine with our Triton kernel, under Triton's interpreter on the CPU",
        slow=True,
        dtypes=MATRIX_DTYPES,
        emulated=True,
        # A program costs the interpreter 10 ms; with these two the default run stays under three minutes.
        cases=200,
        variant_interval=4,
        package="Triton (pip install 'triton>=3.0', on Linux)",
        imports=("triton",),
        sinks=True,
    ),
    Row(
        "cuda-fused",
        "triton",
        "cuda",
        "the engine with our Triton kernel, on an NVIDIA device",
        dtypes=MATRIX_DTYPES,
        twin="triton-interpreted",
        package="Triton (pip install 'triton>=3.0')",
        imports=("triton",),
        sinks=True,
    ),
    Row(
        "triton-interpreted-words",
        "triton-interpreted-words",
        "cpu",
        "EMULATED: triton-interpreted with each tree lowered by tensor operations, to the words that the kernel reads",
        slow=True,
        dtypes=MATRIX_DTYPES,
        emulated=True,
        cases=200,
        variant_interval=4,
        package="Triton (pip install 'triton>=3.0', on Linux)",
        imports=("triton",),
        sinks=True,
    ),
    Row(
        "cuda-fused-words",
        "triton-words",
        "cuda",
        "cuda-fused with each tree lowered on the device, to the words that the kernel reads: no mask is made",
        dtypes=MATRIX_DTYPES,
        twin="triton-interpreted-words",
        package="Triton (pip install 'triton>=3.0')",
        imports=("triton",),
        sinks=True,
    ),
    widest(
        "cuda-eager",
        "eager",
        "cuda",
        "the engine with written-out attention, on an NVIDIA device",
        twin="cpu-eager",
        indexed=True,
    ),
    Row(
        "ascend-eager",
        "ascend-eager",
        "npu",
        "the engine with written-out attention, on an Ascend device",
        dtypes=MATRIX_DTYPES,
        twin="ascend-eager-emulated",
    ),
    Row(
        "ascend-eager-emulated",
        "ascend-eager",
        "cpu",
        "EMULATED: the engine with written-out attention, on an Ascend device, by its contract on the CPU",
        dtypes=MATRIX_DTYPES,
        emulated=True,
    ),
    Row(
        "ascend-fused",
        "ascend-fused",
        "npu",
        "the engine with Ascend's fused-infer attention",
        dtypes=MATRIX_DTYPES,
        twin="ascend-fused-emulated",
        unequal_widths=True,
    ),
    Row(
        "ascend-fused-emulated",
        "ascend-fused",
        "cpu",
        "EMULATED: the engine with Ascend's fused-infer attention, by its contract on the CPU",
        dtypes=MATRIX_DTYPES,
        emulated=True,
        unequal_widths=True,
    ),
    Row(
        "ascend-fused-atb",
        "ascend-atb",
        "npu",
        "the engine with ATB's paged splitfuse attention",
        dtypes=HALF_DTYPES,
        twin="ascend-fused-atb-emulated",
    ),
    Row(
        "ascend-fused-atb-emulated",
        "ascend-atb",
        "cpu",
        "EMULATED: the engine with ATB's paged splitfuse attention, by its contract on the CPU",
        dtypes=HALF_DTYPES,
        emulated=True,
    ),
)
