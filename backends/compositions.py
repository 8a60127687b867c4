"""The compositions of the engine, one per attention implementation.

A composition is the engine's seams with another attention function, and with the caches that this attention reads. A
row of `backends/shipped.py` says which backend uses which composition, on which device and in which dtypes; `compose`
turns such a row into a backend. A new attention is a line of COMPOSITIONS here and a row there.
"""

from collections.abc import Callable
from dataclasses import replace

from specverify.backends.ascend.atb import AscendAtb
from specverify.backends.ascend.device import without_nnal
from specverify.backends.ascend.eager import ascend_eager
from specverify.backends.ascend.fused import AscendFused
from specverify.backends.ascend.operators.install import install
from specverify.backends.ascend.writes import AtbPaged, CheckedPaged, ScatterPaged
from specverify.backends.base import Unavailable
from specverify.backends.devices import why_no_device
from specverify.backends.engine.attention.flashinfer import installed_kernel
from specverify.backends.engine.attention.flex import Flex
from specverify.backends.engine.attention.measured.choosing import measured_attention
from specverify.backends.engine.attention.sdpa import Sdpa
from specverify.backends.engine.attention.split import Split
from specverify.backends.engine.attention.triton_launch import compiled_kernel, interpreted_kernel
from specverify.backends.engine.backend import EngineBackend
from specverify.backends.engine.captured.runner import CapturedDrafts
from specverify.backends.engine.columns import Attend
from specverify.backends.engine.composition import SEAMS
from specverify.backends.engine.kv.lanes import PagedLanes
from specverify.backends.engine.kv.paged import Paged
from specverify.backends.engine.kv.seams import KvSeams
from specverify.backends.engine.lowering.device import DeviceLowering
from specverify.backends.engine.lowering.lanes import PagedWordLanes, WordLanes, dense_lanes_within, lanes_within
from specverify.backends.engine.model.graphs import CudaRecorder
from specverify.backends.engine.model.recording.operators import OperatorRecorder
from specverify.backends.engine.ranks.by_requests import REQUEST_RANKS
from specverify.backends.engine.sampling.batched import BatchedVerify
from specverify.backends.engine.sampling.recorded import RecordedVerify
from specverify.backends.engine.seams import Seams
from specverify.backends.flags import attention_table, dense_mask_bytes
from specverify.backends.handed_over import HandedOverBackend
from specverify.backends.ranked import RankedBackend
from specverify.backends.shipped import DEVICE_WORDS, ROWS, Row, deviceless


def everywhere(attend: Attend) -> Seams:
    """The engine with `attend` in every forward: verification, prefill and draft."""
    return replace(SEAMS, attend=attend, draft_attend=attend)


def engine_over_pages(attend: Attend, prefill_attend: Attend | None = None) -> Seams:
    """The engine with `attend`, which reads pages in place; drafts and prefills use `prefill_attend` if it is given."""
    # `single` is PagedLanes too: prefills and drafts then hand over pages, as verify forwards do.
    pages = KvSeams(lanes=PagedLanes, single=PagedLanes)
    return replace(SEAMS, attend=attend, prefill_attend=prefill_attend, draft_attend=prefill_attend or attend, kv=pages)


def engine_with_mask_words(seams: Seams, device: str, kind: type[WordLanes] = PagedWordLanes) -> Seams:
    """The engine with trees lowered on `device`, to words that its attention reads in place of a dense mask."""
    lanes = lanes_within(dense_mask_bytes() or 0, kind)
    return replace(seams, lower_tree=DeviceLowering(device), kv=replace(seams.kv, lanes=lanes))


READ_WORDS: dict[str, type[WordLanes]] = {
    "split": PagedWordLanes,
    "triton": PagedWordLanes,
    "triton-interpreted": PagedWordLanes,
    "flex": WordLanes,
    "flex-compiled": WordLanes,
}
"""The compositions whose attention reads words as well as dense masks, with the lanes that hold the words."""


def within_mask_budget(seams: Seams, row: Row) -> Seams:
    """`seams` with masks dense or compact by the budget that the environment gives them; unchanged without one."""
    budget = dense_mask_bytes()
    if budget is None or isinstance(seams.lower_tree, DeviceLowering):
        return seams
    if row.composition in READ_WORDS:
        return engine_with_mask_words(seams, row.device, READ_WORDS[row.composition])
    lanes, left_padded = (dense_lanes_within(budget, kind) for kind in (seams.kv.lanes, seams.kv.left_padded))
    return replace(seams, kv=replace(seams.kv, lanes=lanes, left_padded=left_padded))


def engine_by_measured_times(device: str) -> Seams:
    """The engine with attention chosen by measured times; the shape of a draft that was not measured runs eager."""
    attend = measured_attention(device, attention_table())
    return replace(engine_over_pages(attend), draft_attend=replace(attend, strict=False))


def engine_on_ascend(attend: Attend, paged: type[Paged]) -> Seams:
    """The engine with an attention of Ascend's operators, and with the paged cache that their cache writes fill."""
    return replace(everywhere(attend), kv=replace(SEAMS.kv, paged=paged))


def splitfuse() -> Seams:
    """The engine with ATB's paged attention; raises Unavailable where torch_npu has no ATB operators."""
    why = without_nnal()
    if why is not None:
        raise Unavailable(why)
    return engine_on_ascend(AscendAtb(), AtbPaged)


# The values are functions, so that a package of one attention is imported only if its backend is opened.
COMPOSITIONS: dict[str, Callable[[], Seams]] = {
    "eager": lambda: SEAMS,
    "ranks-by-requests": lambda: replace(SEAMS, sampling=replace(SEAMS.sampling, ranks=REQUEST_RANKS)),
    "captured-sampling": lambda: replace(SEAMS, sampling=replace(SEAMS.sampling, batched=BatchedVerify())),
    "captured-drafts": lambda: replace(SEAMS, captured_drafts=CapturedDrafts()),
    "sdpa": lambda: everywhere(Sdpa()),
    "flex": lambda: everywhere(Flex()),
    "flex-compiled": lambda: everywhere(Flex(compiled=True)),
    "flashinfer": lambda: engine_over_pages(installed_kernel("cuda")),
    "split": lambda: engine_over_pages(Split()),
    "split-words": lambda: engine_with_mask_words(engine_over_pages(Split()), "cpu"),
    "measured": lambda: engine_by_measured_times("cpu"),
    "measured-cuda": lambda: engine_by_measured_times("cuda"),
    "triton": lambda: engine_over_pages(compiled_kernel()),
    # Drafts and prefills take the split in torch: to the interpreter a tile costs milliseconds whatever its size, and
    # two thirds of all attention of a small case is prefill.
    "triton-interpreted": lambda: engine_over_pages(interpreted_kernel(), prefill_attend=Split()),
    "triton-words": lambda: engine_with_mask_words(engine_over_pages(compiled_kernel()), "cuda"),
    "triton-interpreted-words": lambda: engine_with_mask_words(
        engine_over_pages(interpreted_kernel(), prefill_attend=Split()), "cpu"
    ),
    "ascend-eager": lambda: engine_on_ascend(ascend_eager, CheckedPaged),
    "ascend-fused": lambda: engine_on_ascend(AscendFused(), ScatterPaged),
    "ascend-atb": splitfuse,
}
"""For each attention, a function that makes the engine's seams when a backend is opened."""


def compose(row: Row) -> EngineBackend:
    """Open the backend of `row`.

    Raises:
        Unavailable: if its device, or a package that its attention needs, is missing.
    """
    why = why_no_device(row.device)
    if why is not None:
        raise Unavailable(deviceless(row, why))
    if row.emulated and row.composition.startswith("ascend"):
        # The emulated operators must be registered before a composition looks for them (`without_nnal`).
        install()
    try:
        seams = COMPOSITIONS[row.composition]()
    except ImportError as missing_package:
        raise Unavailable(f"{row.name} needs {row.package}: {missing_package}") from missing_package
    except Unavailable as absent:
        raise Unavailable(f"{row.name} needs {DEVICE_WORDS[row.device]}: {absent}") from absent
    seams = within_mask_budget(seams, row)
    recorder = None
    if row.graphs:
        recorder = CudaRecorder() if row.device == "cuda" else OperatorRecorder()
        seams = replace(seams, sampling=replace(seams.sampling, batched=RecordedVerify(recorder=recorder)))
    backend_class = EngineBackend
    if row.handed_over:
        backend_class = HandedOverBackend
    elif row.processes:
        backend_class = RankedBackend
    return backend_class(
        row.name,
        row.device,
        seams,
        row.dtypes,
        emulated=row.emulated,
        recorder=recorder,
        variant_interval=row.variant_interval,
        soft_caps=row.soft_caps,
        sinks=row.sinks,
        indexed=row.indexed,
        unequal_widths=row.unequal_widths,
        ranks=row.ranks,
    )


def open_engine(name: str) -> EngineBackend:
    """Open a backend of `backends/shipped.py` by its name; raises as `compose`."""
    return compose(next(row for row in ROWS if row.name == name))


def open_cpu() -> EngineBackend:
    """Open `cpu-eager`."""
    return open_engine("cpu-eager")
