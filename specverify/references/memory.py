"""The memory that a reference takes on a checkpoint, and the memory that is free.

What it takes follows from the headers of the files. NumPy holds all weights in float64; where they are changed a little
(`amplification`), those of a small checkpoint are held once more, and of a large one a layer at a time. Torch holds the
checkpoint as it is stored and one layer in float64, beside the layer of NumPy's certificate. Embedding and head count
as layers. A second model that drafts is held likewise; a draft head is read whole, in float64. The engine's own weights
count too: they are the pages of the files where it computes on the CPU in the dtype in which they are stored, which
torch on the CPU maps as well, and a copy elsewhere.
"""

import os
import resource
from collections import Counter
from collections.abc import Container, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from safetensors import SafetensorError, safe_open

from specverify.isolation.control_groups import own_groups
from specverify.isolation.limits import size_words
from specverify.isolation.run_memory import run_bytes
from specverify.properties.reference_names import NUMPY
from specverify.reference.files.fields import UnreadableCheckpoint
from specverify.reference.oracle.checkpoint import EXPERTS, StoredWeights, open_weights
from specverify.reference.oracle.parameters import COPIED_BYTES, LAYER
from specverify.reference.trace_memory import MOST_BYTES
from specverify.setup.errors import MissingInput

WIDE = 8
"""Bytes of a number in float64."""

BYTES_OF = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a number in each working dtype."""

WORKING_DTYPE = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""The working dtype of each stored dtype of floats."""

ROOM = 7 * 2**27
"""Bytes for everything else: three processes, two of them with torch, keys and values, logits, the traces that are
remembered in little memory, and the blocks in which weights are read."""

TOLD = 2**30
"""Least bytes of which a run tells; a small checkpoint leaves nobody in doubt."""

MEMINFO = Path("/proc/meminfo")

MOST_TRACES = 2**31
"""Most bytes of traces that a run on a checkpoint remembers of each side; a run that was forgotten is made again."""

LEAST_TRACES = 2**26
"""The same where memory is as little as the run needs."""

PART_OF_FREE = 8
"""A side's traces take one part in this many of the memory that is free beyond the reference's."""


@dataclass(frozen=True)
class EnginePlace:
    """Where an engine computes, and in which dtype it holds weights."""

    device: str
    dtype: str


ELSEWHERE = EnginePlace("", "float64")
"""An engine whose weights lie neither in this machine's memory nor on a device of it."""


@dataclass(frozen=True)
class WeightSizes:
    """The sizes of a checkpoint's weights in bytes.

    Attributes:
        stored: As they are stored.
        wide: All of them in float64.
        wide_layer: The largest layer in float64; embedding and head count as layers.
        wide_head: A draft head in float64; 0 without one.
        mapped_dtype: The working dtype in which an engine maps all weights from their files; empty where there is none.
    """

    stored: int
    wide: int
    wide_layer: int
    wide_head: int = 0
    mapped_dtype: str = ""

    def beside(self, draft: "WeightSizes") -> "WeightSizes":
        """The sizes of this checkpoint and of a second one that drafts for it."""
        return WeightSizes(
            self.stored + draft.stored,
            self.wide + draft.wide,
            max(self.wide_layer, draft.wide_layer),
            mapped_dtype=self.mapped_dtype if self.mapped_dtype == draft.mapped_dtype else "",
        )

    def taken_by(self, reference: str, engine: EnginePlace = ELSEWHERE) -> int:
        """The bytes of this machine's memory that a run with `--reference reference` takes."""
        layer = self.wide_layer + self.wide_head
        whole = self.wide + 2 * self.wide_head + self.changed
        taken = {NUMPY: whole, "torch:cpu": self.stored + 2 * layer}.get(reference, layer)
        return taken + self.of_engine(reference, engine) + ROOM

    @property
    def changed(self) -> int:
        """The bytes of the checkpoint's weights that NumPy holds once more, changed a little."""
        return self.wide_layer if self.wide > COPIED_BYTES else self.wide

    def of_engine(self, reference: str, engine: EnginePlace) -> int:
        """The bytes of this machine's memory that the engine's weights take beside the reference's."""
        if engine.device != "cpu":
            return 0
        head = self._in_dtype(self.wide_head, engine.dtype)
        if engine.dtype == self.mapped_dtype:
            return head + (0 if reference == "torch:cpu" else self.stored)
        return head + self._in_dtype(self.wide, engine.dtype)

    def on_device(self, engine: EnginePlace = ELSEWHERE) -> int:
        """The bytes of an accelerator's memory that torch takes there, with those of an engine on that accelerator."""
        copied = 0 if engine.device in ("", "cpu") else self._in_dtype(self.wide + self.wide_head, engine.dtype)
        return self.stored + self.wide_layer + self.wide_head + copied + ROOM

    @staticmethod
    def _in_dtype(wide: int, dtype: str) -> int:
        """The bytes in `dtype` of numbers that take `wide` bytes in float64."""
        return wide // WIDE * BYTES_OF[dtype]


def drafted_sizes(directory: str | Path, second_model: str | Path | None, head: str | Path | None) -> WeightSizes:
    """The sizes of the checkpoint in `directory` with those of its draft: a second model, a head, or neither.

    Raises:
        UnreadableCheckpoint: with one line that says what is wrong.
    """
    sizes = weight_sizes(directory)
    if second_model is not None:
        return sizes.beside(weight_sizes(second_model))
    if head is None:
        return sizes
    own_names = open_weights(directory)[1].shapes if Path(head) == Path(directory) else {}
    return replace(sizes, wide_head=WIDE * _count_of_others(Path(head), own_names))


def _count_of_others(directory: Path, names: Container[str]) -> int:
    """The number of values in the safetensors files of `directory`, without the tensors called `names`."""
    count = 0
    for file in sorted(directory.glob("*.safetensors")):
        try:
            with safe_open(file, "np") as tensors:
                shapes = {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118 - no dict
        except (OSError, SafetensorError) as why:
            raise UnreadableCheckpoint(f"{file}: {' '.join(str(why).split())[:160]}") from None
        count += sum(_count(shape) for name, shape in shapes.items() if name not in names)
    return count


def layer_sizes(directory: str | Path) -> dict[int, int]:
    """The bytes in float64 of each layer of the checkpoint in `directory`; no weight is read.

    Raises:
        UnreadableCheckpoint: with one line that says what is wrong.
    """
    _, weights = open_weights(directory)
    sizes: Counter[int] = Counter()
    for name, shape in weights.shapes.items():
        match = LAYER.match(name)
        if match is not None:
            sizes[int(match[1])] += WIDE * _count(shape)
    return dict(sizes)


def weight_sizes(directory: str | Path) -> WeightSizes:
    """The sizes of the weights of the checkpoint in `directory`; no weight is read.

    Raises:
        UnreadableCheckpoint: with one line that says what is wrong.
    """
    _, weights = open_weights(directory)
    layers: Counter[str] = Counter()
    for name, shape in weights.shapes.items():
        match = LAYER.match(name)
        layers[name if match is None else match[1]] += WIDE * _count(shape)
    return WeightSizes(
        sum(file.stat().st_size for file in weights.files),
        layers.total(),
        max(layers.values()),
        mapped_dtype=_mapped_dtype(weights),
    )


def _mapped_dtype(weights: StoredWeights) -> str:
    """The dtype in which every weight is stored by itself; empty where they differ, or where engines join experts."""
    tensors = [weights.whole_tensor(name) for name in weights]
    dtypes = {"" if tensor is None else tensor.dtype for tensor in tensors}
    has_experts = any(EXPERTS.search(name) for name in weights)
    return "" if has_experts or len(dtypes) != 1 else WORKING_DTYPE.get(dtypes.pop(), "")


def _count(shape: Iterable[int]) -> int:
    count = 1
    for length in shape:
        count *= length
    return count


def free_bytes() -> int | None:
    """The bytes that this run may still take: by the machine, its control groups and its own limit; None if unknown.

    What the run's processes hold already is free to it up to ROOM, which counts it.
    """
    own_bytes = min(ROOM, run_bytes())
    sizes = [_free_of_machine(), *map(_free_of_group, own_groups("memory"))]
    shared = min((size + own_bytes for size in sizes if size is not None), default=None)
    of_process = _free_of_limit()
    return min((size for size in (shared, of_process) if size is not None), default=None)


def _free_of_machine() -> int | None:
    with suppress(OSError, ValueError, IndexError):
        for line in MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024 * int(line.split()[1])
    return None


def _free_of_group(group: Path) -> int | None:
    """The limit of a control group less what it uses; pages of files can be given back and read again."""
    for limit_name, use_name in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
        with suppress(OSError, ValueError):
            limit, used = (int((group / name).read_text()) for name in (limit_name, use_name))
            counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            # Version 1 counts the files of the groups inside apart.
            whole = "total_" if "total_inactive_file" in counts else ""
            files = sum(int(counts.get(f"{whole}{kind}_file", 0)) for kind in ("active", "inactive"))
            return max(0, limit - used + files)
    return None


def _free_of_limit() -> int | None:
    """The process's limit of address space less what it has of it."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    with suppress(OSError, ValueError, IndexError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        return max(0, limit - pages * os.sysconf("SC_PAGE_SIZE"))
    return None


def trace_bytes(free: int | None, taken: int, reference: str = NUMPY) -> int:
    """The bytes of traces that each side of a run remembers, where the run takes `taken` of `free` bytes.

    Who chooses another reference than NumPy lacks memory: its runs remember little.

    >>> trace_bytes(None, 0) == MOST_BYTES, trace_bytes(2**40, 2**30) == MOST_TRACES
    (True, True)
    >>> trace_bytes(2**30, 2**30) == LEAST_TRACES == trace_bytes(2**40, 2**30, "torch:cpu")
    True
    """
    if reference != NUMPY:
        return LEAST_TRACES
    if free is None:
        return MOST_BYTES
    return min(MOST_TRACES, max(LEAST_TRACES, (free - taken) // PART_OF_FREE))


def check_memory(
    model: str,
    sizes: WeightSizes,
    reference: str,
    engine: EnginePlace = ELSEWHERE,
    device_bytes: int | None = None,
) -> str:
    """The memory of a run with `--reference reference` on the checkpoint `model`, to tell before it is read.

    The line is empty for a run that takes less than TOLD.

    Args:
        model: The checkpoint as the command line names it.
        sizes: The sizes of its weights, those of its draft included (`drafted_sizes`).
        reference: The value of `--reference`.
        engine: Where the engine computes, and its dtype.
        device_bytes: The free bytes of the reference's accelerator, if it is on one.

    Raises:
        MissingInput: The memory is not free, with the reference that would fit.
    """
    free = free_bytes()
    taken = sizes.taken_by(reference, engine)
    words = f"--reference {reference} takes {size_words(taken)} of memory: {_parts(sizes, reference, engine)}"
    on_device = sizes.on_device(engine if reference == f"torch:{engine.device}" else ELSEWHERE)
    if device_bytes is not None and on_device > device_bytes:
        need = f"takes {size_words(on_device)} of the device's memory"
        raise MissingInput(
            f"{model}: --reference {reference} {need}, of which {size_words(device_bytes)} are free; "
            f"{_fitting(sizes, reference, engine, free)}"
        )
    if free is not None and taken > free:
        raise MissingInput(f"{model}: {words}; {size_words(free)} are free; {_fitting(sizes, reference, engine, free)}")
    if taken < TOLD:
        return ""
    return words if free is None else f"{words}; {size_words(free)} are free"


def _parts(sizes: WeightSizes, reference: str, engine: EnginePlace) -> str:
    room = f", and {size_words(ROOM)} for all else"
    own = sizes.of_engine(reference, engine)
    copy = f", the engine's weights in {engine.dtype} ({size_words(own)})" if own else ""
    if reference == NUMPY:
        wide = size_words(sizes.wide + sizes.wide_head)
        parts = "" if sizes.changed == sizes.wide else f" a layer at a time ({size_words(sizes.changed)})"
        return f"all weights in float64 ({wide}), and once more changed a little{parts}{copy}{room}"
    layer = f"a layer in float64 ({size_words(sizes.wide_layer)})"
    if reference == "torch:cpu":
        head = f", a head in float64 ({size_words(sizes.wide_head)})" if sizes.wide_head else ""
        checkpoint = f"the checkpoint ({size_words(sizes.stored)})"
        return f"{checkpoint}, {layer}{head}, and another for NumPy's certificate{copy}{room}"
    return f"{layer} for NumPy's certificate{copy}{room}; and {size_words(sizes.on_device(engine))} on the device"


def _fitting(sizes: WeightSizes, reference: str, engine: EnginePlace, free: int | None) -> str:
    """What would fit in place of `reference`."""
    taken = sizes.taken_by("torch:cpu", engine)
    if reference != "torch:cpu" and (free is None or taken <= free):
        return f"--reference torch:cpu takes {size_words(taken)}"
    if sizes.mapped_dtype and engine.device == "cpu" and engine.dtype != sizes.mapped_dtype:
        stored_in = EnginePlace("cpu", sizes.mapped_dtype)
        taken = sizes.taken_by("torch:cpu", stored_in)
        if free is None or taken <= free:
            return f"--reference torch:cpu --dtype {sizes.mapped_dtype} takes {size_words(taken)}"
    smallest = sizes.taken_by("torch:cuda", engine)
    if free is None or smallest <= free:
        on_device = size_words(sizes.on_device(engine))
        return f"--reference torch:cuda takes {size_words(smallest)}, and {on_device} on a device"
    return f"no reference fits: the smallest, torch:cuda, takes {size_words(smallest)}"
