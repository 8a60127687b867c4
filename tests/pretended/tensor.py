"""Tensors of the pretended device: they report `cuda:0`, hold their numbers on the CPU, and keep the device's rules.

Every operator that torch would launch comes through `run_operator`. Refused are: operands on two devices; a host read
of numbers that no synchronisation has brought; work that reads or writes memory which another stream may still be
using; and, while a graph is captured, all that CUDA does not record: waits, copies from and to pageable memory, work of
another stream.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.pretended.ledger import LEDGER, line_of_the_engine
from tests.pretended.streams import HOST, Stream, current_stream

aten = torch.ops.aten

DEVICE = torch.device("cuda", 0)


class MixedDevices(RuntimeError):
    """Operands of one operator lie on two devices."""


class NotCapturable(RuntimeError):
    """A capturing stream was asked for something that no graph records."""


class Race(RuntimeError):
    """Work uses memory that work of another stream may still be using."""


class Unsynchronised(RuntimeError):
    """The host reads memory before the copy into it has certainly ended."""


class NoFloat64(RuntimeError):
    """The device was asked for float64, which it does not compute."""


class Abilities:
    """What the device computes.

    Attributes:
        float64: Whether it computes float64, as GPUs do; not every NPU need.
    """

    float64 = True


class Allocated:
    """The bytes of all memory of the device, now and at most."""

    now = 0
    peak = 0

    @classmethod
    def add(cls, size: int) -> None:
        """Count an allocation, or with a negative size one that was freed."""
        cls.now += size
        cls.peak = max(cls.peak, cls.now)

    @classmethod
    def begin_peak(cls, device: Any = None) -> None:
        """Let the peak begin anew."""
        cls.peak = cls.now


class Memory:
    """An allocation of the device, which views share.

    Attributes:
        storage: The storage that holds its numbers on the CPU.
        writer: The stream that wrote it last, and the number of that launch.
        readers: The last launch of each stream that read it since.
        owner: The graph in whose pool it lies; None for memory that was allocated outside a capture.
    """

    __slots__ = ("__weakref__", "identity", "owner", "readers", "storage", "writer")

    def __init__(self, host_tensor: Tensor, owner: Any = None) -> None:
        self.storage = host_tensor.untyped_storage()
        Allocated.add(self.storage.nbytes())
        weakref.finalize(self, Allocated.add, -self.storage.nbytes()).atexit = False
        self.identity = self.storage._cdata
        self.writer: tuple[int, int] = (0, 0)
        self.readers: dict[int, int] = {}
        self.owner = owner


class Capture:
    """A capture that is under way: the operators in their order, and what will be undone at its end.

    Attributes:
        stream: The stream that captures.
        graph: The graph that is being made.
        operations: Each a function that computes its part again, in place.
        outside: Memory that the graph reads or writes and that was allocated outside it, by the name of its storage.
        pool: Memory that was allocated in this capture.
        saved: The numbers of outside memory that operators of this capture wrote: a capture runs nothing.
        inside: Tensors that were allocated in this capture; their numbers mean nothing before the first replay.
        broken: The first refusal; a capture that was refused something ends in an error.
    """

    def __init__(self, graph: Any, stream: Stream) -> None:
        self.graph = graph
        self.stream = stream
        self.operations: list[Callable[[], None]] = []
        self.outside: dict[int, Memory] = {}
        self.pool: list[Memory] = []
        self.saved: dict[int, Tensor] = {}
        self.inside: list[Tensor] = []
        self.broken: str | None = None

    def use(self, memory: Memory) -> None:
        """Note memory that a replay will read or write."""
        if memory.owner is not self.graph:
            self.outside.setdefault(memory.identity, memory)

    def save(self, memory: Memory) -> None:
        """Remember the numbers of outside memory that is about to be written."""
        if memory.owner is not self.graph and memory.identity not in self.saved:
            self.saved[memory.identity] = torch.empty(0, dtype=torch.uint8).set_(memory.storage).clone()

    def undo(self) -> None:
        """Give outside memory its numbers back, and poison the pool."""
        for identity, numbers in self.saved.items():
            torch.empty(0, dtype=torch.uint8).set_(self.outside[identity].storage).copy_(numbers)
        for tensor in self.inside:
            poison(tensor)


class Underway:
    """The capture that is under way, if there is one."""

    capture: Capture | None = None


def poison(tensor: Tensor) -> None:
    """Fill `tensor` with what memory may hold that nothing has written."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(float("nan"))
    elif tensor.dtype == torch.bool:
        tensor.fill_(True)
    else:
        tensor.fill_(torch.iinfo(tensor.dtype).max // 2)


class DeviceTensor(Tensor):
    """A tensor on `cuda:0`.

    Attributes:
        values_on_host: Its numbers, a tensor on the CPU.
        memory: The allocation in which it lies.
    """

    values_on_host: Tensor
    memory: Memory

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls: type[DeviceTensor], host_tensor: Tensor, memory: Memory) -> DeviceTensor:
        if host_tensor.dtype == torch.float64 and not Abilities.float64:
            raise NoFloat64(f"not implemented for DT_DOUBLE, at {line_of_the_engine()}")
        tensor: DeviceTensor = Tensor._make_wrapper_subclass(
            cls,
            host_tensor.size(),
            strides=host_tensor.stride(),
            storage_offset=host_tensor.storage_offset(),
            dtype=host_tensor.dtype,
            layout=host_tensor.layout,
            device=DEVICE,
        )
        tensor.values_on_host = host_tensor
        tensor.memory = memory
        return tensor

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{self.values_on_host!r}, on the pretended device"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return run_operator(func, args, kwargs or {})

    def data_ptr(self) -> int:
        return self.values_on_host.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.values_on_host.untyped_storage()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        if force:
            return self.cpu().numpy()
        raise TypeError(
            "can't convert cuda:0 device type tensor to numpy. "
            "Use Tensor.cpu() to copy the tensor to host memory first."
        )

    def __array__(self, dtype: Any = None) -> Any:
        return self.numpy()

    def __deepcopy__(self, memo: Any) -> DeviceTensor:
        return self.clone()  # type: ignore[return-value]


class ArrivingTensor(Tensor):
    """A host tensor into which the device still copies: `tensor.to("cpu", non_blocking=True)`."""

    values_on_host: Tensor
    launched: tuple[int, int]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls: type[ArrivingTensor], host_tensor: Tensor, launched: tuple[int, int]) -> ArrivingTensor:
        tensor: ArrivingTensor = Tensor._make_wrapper_subclass(
            cls, host_tensor.size(), strides=host_tensor.stride(), dtype=host_tensor.dtype, device=torch.device("cpu")
        )
        tensor.values_on_host = host_tensor
        tensor.launched = launched
        return tensor

    def arrived(self) -> Tensor:
        """The tensor after the copy; raises Unsynchronised if the host has not waited for it."""
        number, tick = self.launched
        if HOST.clock.get(number, 0) < tick:
            raise Unsynchronised(f"the host reads a tensor into which a copy is under way, at {line_of_the_engine()}")
        return self.values_on_host

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return "a host tensor, perhaps arriving"

    def tolist(self) -> Any:
        return self.arrived().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        return self.arrived().numpy()

    def __array__(self, dtype: Any = None) -> Any:
        return self.arrived().numpy()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return run_operator(func, args, kwargs or {})


def forbid(what: str) -> None:
    """Refuse `what` while a graph is captured."""
    capture = Underway.capture
    if capture is not None:
        capture.broken = f"{what} at {line_of_the_engine()}"
        raise NotCapturable(f"operation not permitted when stream is capturing: {capture.broken}")


def wait_for_host(kind: str) -> None:
    """Let the host wait for the current stream, and note it."""
    forbid(f"the host waits ({kind})")
    current_stream().synchronize()
    LEDGER.note(kind)


def touch(read: Sequence[Memory], written: Sequence[Memory], what: str) -> None:
    """Launch work on the current stream that reads and writes these memories.

    Raises:
        Race: Work of another stream may still be using one of them.
        NotCapturable: A capture is under way, on another stream.
    """
    stream = current_stream()
    capture = Underway.capture
    if capture is not None:  # nothing runs: memory is as before, and a replay will be the launch
        if stream is not capture.stream:
            forbid(f"work of stream {stream.number}, which does not capture ({what})")
        for memory in (*read, *written):
            capture.use(memory)
        for memory in written:
            capture.save(memory)
        return
    tick = stream.launch()
    for memory in read:
        if not stream.knows(*memory.writer):
            raise Race(race_text(what, "reads", memory.writer[0], "writes", stream))
        memory.readers[stream.number] = tick
    for memory in written:
        for number, last in (memory.writer, *memory.readers.items()):
            if not stream.knows(number, last):
                raise Race(race_text(what, "writes", number, "uses", stream))
        memory.writer = (stream.number, tick)
        memory.readers = {}


def race_text(what: str, does: str, number: int, other_access: str, stream: Stream) -> str:
    """The message of a Race."""
    return (
        f"{what} on stream {stream.number} {does} memory that stream {number} {other_access}, "
        f"and no wait stands between them, at {line_of_the_engine()}"
    )


READS_NUMBERS = {aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default}
READS_SHAPES = {aten.bincount.default, aten.repeat_interleave.Tensor, aten._unique2.default}
INDEXED = {
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._unsafe_index.Tensor,
    aten._index_put_impl_.default,
}
TAKES_HOST_SCALAR = {
    aten.masked_fill.Tensor,
    aten.masked_fill_.Tensor,
    aten.where.self,
    aten.fill_.Tensor,
    aten.index_fill_.int_Tensor,
    aten.lerp.Scalar,
}
"""Operators that are not pointwise to torch and take a CPU tensor without dimensions beside device tensors."""


def is_device(place: Any) -> bool:
    """Whether an argument `device` means this device."""
    return torch.device(place).type == "cuda"


def unwrap(value: Any) -> Any:
    """`value` with the numbers of each tensor in place of the tensor."""
    if isinstance(value, DeviceTensor):
        return value.values_on_host
    if isinstance(value, ArrivingTensor):
        return value.arrived()
    if isinstance(value, (list, tuple)):
        return type(value)(unwrap(entry) for entry in value) if type(value) in (list, tuple) else value
    if isinstance(value, dict):
        return {key: unwrap(entry) for key, entry in value.items()}
    return value


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among arguments, and in lists among them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)


class Results:
    """Turns results of an operator on the CPU into results on the device.

    A result that lies in the storage of an operand shares its memory.
    """

    def __init__(self, operands: Sequence[DeviceTensor]) -> None:
        self._operands = {id(operand.values_on_host): operand for operand in operands}
        self._memories = {operand.memory.identity: operand.memory for operand in operands}
        self.fresh: list[Memory] = []

    def wrap(self, result: Any) -> Any:
        """`result`, a tensor or a sequence, on the device."""
        if isinstance(result, Tensor):
            if id(result) in self._operands:
                return self._operands[id(result)]
            return DeviceTensor(result, self._memory(result))
        if isinstance(result, (list, tuple)):
            return type(result)(self.wrap(entry) for entry in result)
        return result

    def _memory(self, result: Tensor) -> Memory:
        memory = self._memories.get(result.untyped_storage()._cdata)
        if memory is None:
            capture = Underway.capture
            memory = Memory(result, None if capture is None else capture.graph)
            if capture is not None:
                capture.inside.append(result)
                capture.pool.append(memory)
            self._memories[memory.identity] = memory
            self.fresh.append(memory)
        return memory


def run_operator(operator: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operator that torch dispatched, wherever its operands lie."""
    operands: list[DeviceTensor] = []
    host_operands: list[Tensor] = []
    for tensor in tensors_in((*args, *kwargs.values())):
        if isinstance(tensor, DeviceTensor):
            operands.append(tensor)
        else:
            host_operands.append(tensor)
    place = kwargs.get("device")
    to_device = bool(operands) if place is None else is_device(place)
    if place is not None and (to_device or operands):
        kwargs = {**kwargs, "device": torch.device("cpu")}
    if not operands and not to_device:
        return operator(*unwrap(args), **unwrap(kwargs))
    if operator is aten._to_copy.default:
        return copy_tensor(args[0], kwargs, to_device)
    if operator is aten.copy_.default:
        return copied_into(*args, **kwargs)
    if operands:
        refuse_mixture(operator, args, operands, host_operands)
        if operator in READS_NUMBERS or torch.Tag.data_dependent_output in operator.tags:
            wait_for_host("read")
        # The indices of a subscript say whether its shape depends on numbers.
        elif operator not in INDEXED and (operator in READS_SHAPES or torch.Tag.dynamic_output_shape in operator.tags):
            wait_for_host("shape")
    return launch(operator, args, kwargs, operands)


def launch(operator: Any, args: Any, kwargs: dict[str, Any], operands: Sequence[DeviceTensor]) -> Any:
    """Launch `operator` on the current stream; its results lie on the device."""
    written = [operand.memory for operand in written_operands(operator, args, kwargs)]
    name = str(operator)
    if not operator.is_view:
        touch([operand.memory for operand in operands], written, name)
    host_args = unwrap(args)
    host_kwargs = unwrap(kwargs)
    compute = as_on_the_host(operator, host_args)
    result = compute(*host_args, **host_kwargs)
    results = Results(operands)
    wrapped = results.wrap(result)
    if Underway.capture is None:
        for memory in results.fresh:
            memory.writer = (current_stream().number, current_stream().launches)
    if Underway.capture is not None and not operator.is_view:
        Underway.capture.operations.append(again(compute, host_args, host_kwargs, result, bool(written)))
    return wrapped


def as_on_the_host(operator: Any, host_args: Any) -> Callable[..., Any]:
    """The operator, or a function in place of a form of it that torch has on CUDA alone."""
    if operator in (aten._softmax.default, aten._log_softmax.default) and host_args[2]:
        # From float16 to float32 at once.
        return lambda numbers, dim, _: operator(numbers.float(), dim, False)
    return operator  # type: ignore[no-any-return]


def again(operator: Any, args: Any, kwargs: Any, result: Any, in_place: bool) -> Callable[[], None]:
    """A function that runs the operator on the same operands and writes its results where they were."""
    places = [] if in_place else list(tensors_in([result]))

    def compute() -> None:
        outcome = operator(*args, **kwargs)
        for place, fresh in zip(places, tensors_in([outcome]), strict=False):
            place.copy_(fresh)

    return compute


def written_operands(operator: Any, args: Any, kwargs: dict[str, Any]) -> list[DeviceTensor]:
    """The operands that the operator's schema says it writes."""
    schema = operator._schema
    if not schema.is_mutable:
        return []
    operands: list[DeviceTensor] = []
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        operands += [tensor for tensor in tensors_in([value]) if isinstance(tensor, DeviceTensor)]
    return operands


def refuse_mixture(operator: Any, args: Any, operands: Sequence[DeviceTensor], host_operands: Sequence[Tensor]) -> None:
    """Raise MixedDevices where CUDA takes no operands of two devices; note the waits of indices."""
    if operator in INDEXED:
        refuse_indices(operator, args)
        return
    if not host_operands:
        return
    sized = [tuple(tensor.shape) for tensor in host_operands if tensor.dim()]
    scalar = torch.Tag.pointwise in operator.tags or operator in TAKES_HOST_SCALAR
    writes_host = operator._schema.is_mutable and not isinstance(args[0], DeviceTensor)
    if sized or not scalar or writes_host:
        raise MixedDevices(
            "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! "
            f"({operator}, shapes on the CPU {sized or 'without dimensions'}, at {line_of_the_engine()})"
        )


def refuse_indices(operator: Any, args: Any) -> None:
    """The rules for subscripts: an index may lie on the CPU beside device numbers, and is uploaded then."""
    on_device = isinstance(args[0], DeviceTensor)
    for index in args[1]:
        if index is None:
            continue
        if not on_device and isinstance(index, DeviceTensor):
            raise MixedDevices(
                "indices should be either on cpu or on the same device as the indexed tensor (cpu), "
                f"at {line_of_the_engine()}"
            )
        if on_device and not isinstance(index, DeviceTensor):
            wait_for_host("upload")
        if index.dtype in (torch.bool, torch.uint8) and not _fills(operator, args):
            wait_for_host("shape")
    if len(args) > 2:
        value = args[2]
        if isinstance(value, DeviceTensor) != on_device and value.dim():
            raise MixedDevices(f"a subscript assigns numbers of another device, at {line_of_the_engine()}")


def _fills(operator: Any, args: Any) -> bool:
    """Whether a subscript under a mask assigns one number, for which torch needs no number of the mask."""
    return operator not in (aten.index.Tensor, aten._unsafe_index.Tensor) and args[2].numel() == 1


def copy_tensor(source: Tensor, kwargs: dict[str, Any], to_device: bool) -> Tensor:
    """`source.to(...)`, between devices or in place of a dtype."""
    from_device = isinstance(source, DeviceTensor)
    non_blocking = bool(kwargs.get("non_blocking"))
    if from_device == to_device:
        assert isinstance(source, DeviceTensor)
        fresh: Tensor = launch(aten._to_copy.default, (source,), kwargs, [source])
        return fresh
    host_tensor = unwrap(source)
    if from_device:
        assert isinstance(source, DeviceTensor)
        forbid("a copy to the host")
        touch([source.memory], [], "a copy to the host")
        numbers: Tensor = aten._to_copy.default(host_tensor, **kwargs)
        if non_blocking:
            LEDGER.note("download without a wait")
            return ArrivingTensor(numbers, (current_stream().number, current_stream().launches))
        wait_for_host("download")
        return numbers
    forbid("a copy from pageable memory")
    if non_blocking:
        LEDGER.note("upload without a wait")
    else:
        wait_for_host("upload")
    numbers = aten._to_copy.default(host_tensor, **kwargs)
    memory = Memory(numbers)
    touch([], [memory], "a copy from the host")
    return DeviceTensor(numbers, memory)


def copied_into(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """`target.copy_(source)`."""
    operands = [tensor for tensor in (target, source) if isinstance(tensor, DeviceTensor)]
    if len(operands) == 2:
        copied_tensor: Tensor = launch(aten.copy_.default, (target, source), {}, operands)
        return copied_tensor
    if isinstance(target, DeviceTensor):
        forbid("a copy from pageable memory")
        touch([], [target.memory], "a copy from the host")
        if non_blocking:
            LEDGER.note("upload without a wait")
        else:
            wait_for_host("upload")
        target.values_on_host.copy_(unwrap(source))
        return target
    assert isinstance(source, DeviceTensor)
    forbid("a copy to the host")
    touch([source.memory], [], "a copy to the host")
    wait_for_host("download")
    unwrap(target).copy_(source.values_on_host)
    return target
