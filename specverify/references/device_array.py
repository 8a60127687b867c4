"""DeviceArray: a tensor of torch's that NumPy's functions and operators compute with on its device.

The oracle's formulas are written for NumPy. NumPy hands `np.exp(x)`, `x @ y` and `np.concatenate([x, y])` to an operand
that asks for them (NEP 13 and NEP 18), and `np.zeros(shape, like=x)` likewise (NEP 35). So the formulas stand once, and
compute by torch where their weights are DeviceArrays.

Numbers are float64 wherever they are computed with. A weight may lie on the device in a narrower dtype, which holds its
numbers exactly; it is widened when an operation reads it. NumPy arrays beside a DeviceArray are copied to its device.
Nothing is copied back by itself: `on_host` does so, and `np.argsort`, whose indices lie on the host as all indices do.
An operation that is not here raises `NoTorchForm`, which names it.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.lib.mixins import NDArrayOperatorsMixin

from specverify.reference.trace import Array

BLOCK = 2**24
"""Most numbers of a narrow matrix that a product widens at a time on a device: 128 MiB in float64."""

CACHED = 2**18
"""The same on the CPU: 2 MiB in float64, which stay in its cache. Wider blocks are written to memory and read again."""


class NoTorchForm(TypeError):
    """The formulas used an operation that DeviceArray has not; a silent copy to the host would hide the lack."""

    def __init__(self, operation: str) -> None:
        super().__init__(f"the torch reference has no form of {operation} (specverify/references/device_array.py)")


class DeviceArray(NDArrayOperatorsMixin):
    """A tensor under NumPy's interface, as far as the oracle's formulas use that.

    Attributes:
        tensor: Numbers in float64, or in a narrower dtype that holds them exactly; or integers, or truth values.
    """

    __slots__ = ("tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    @property
    def wide(self) -> torch.Tensor:
        """The tensor, its numbers as float64."""
        return self.tensor.double() if self.tensor.is_floating_point() else self.tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """The length of each axis."""
        return tuple(self.tensor.shape)

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return self.tensor.ndim

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype in which operations read the array."""
        if self.tensor.is_floating_point():
            return np.dtype(np.float64)
        return np.dtype(bool if self.tensor.dtype == torch.bool else np.int64)

    @property
    def T(self) -> "DeviceArray":
        """The array with its axes in reversed order."""
        return DeviceArray(self.tensor.permute(*reversed(range(self.ndim))))

    def on_host(self) -> Array:
        """A copy as a NumPy array."""
        copied: Array = self.wide.cpu().numpy()
        return copied

    def __len__(self) -> int:
        return len(self.tensor)

    def __iter__(self) -> Iterator["DeviceArray"]:
        return (DeviceArray(row) for row in self.tensor)

    def __float__(self) -> float:
        return float(self.tensor)

    def __repr__(self) -> str:
        return f"DeviceArray(shape={self.shape}, device={self.tensor.device})"

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        raise NoTorchForm("a copy to the host by itself (np.asarray, or an assignment into a NumPy array)")

    def __getitem__(self, index: Any) -> "DeviceArray":
        return DeviceArray(self.tensor[self._index(index)])

    def __setitem__(self, index: Any, value: Any) -> None:
        self.tensor[self._index(index)] = self._operand(value)

    def _index(self, index: Any) -> Any:
        """An index of NumPy's as torch takes it, with arrays of indices on the device."""
        if isinstance(index, tuple):
            return tuple(self._index(part) for part in index)
        if isinstance(index, DeviceArray):
            return index.tensor
        if isinstance(index, (np.ndarray, list)):
            return torch.as_tensor(np.array(index), device=self.tensor.device)
        return int(index) if isinstance(index, np.integer) else index

    def _operand(self, value: Any) -> torch.Tensor:
        """An operand beside this array, as a tensor; a single number stays on the host, where torch takes it too."""
        if isinstance(value, DeviceArray):
            return value.wide
        if isinstance(value, (bool, int, float, np.generic)):
            return torch.tensor(value.item() if isinstance(value, np.generic) else value, dtype=_number_dtype(value))
        array = np.asarray(value)
        tensor = torch.from_numpy(array.copy())
        tensor = tensor.double() if tensor.is_floating_point() else tensor
        return tensor.to(self.tensor.device)

    def reshape(self, *shape: Any) -> "DeviceArray":
        """See `ndarray.reshape`."""
        sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple) else shape
        return DeviceArray(self.tensor.reshape(*map(int, sizes)))

    def ravel(self) -> "DeviceArray":
        """See `ndarray.ravel`."""
        return DeviceArray(self.tensor.reshape(-1))

    def swapaxes(self, first: int, second: int) -> "DeviceArray":
        """See `ndarray.swapaxes`."""
        return DeviceArray(self.tensor.transpose(first, second))

    def copy(self) -> "DeviceArray":
        """A copy of its own, in float64."""
        return DeviceArray(self.wide.clone(memory_format=torch.contiguous_format))

    def max(self, axis: int, keepdims: bool = False, initial: float | None = None) -> "DeviceArray":
        """See `ndarray.max`; an empty axis needs `initial`."""
        wide = self.wide
        if wide.shape[axis] == 0 and initial is not None:
            shape = list(wide.shape)
            shape[axis] = 1
            largest = wide.new_full(shape, initial)
            return DeviceArray(largest if keepdims else largest.squeeze(axis))
        largest = wide.amax(dim=axis, keepdim=keepdims)
        return DeviceArray(largest if initial is None else largest.clamp(min=initial))

    def sum(self, axis: int, keepdims: bool = False) -> "DeviceArray":
        """See `ndarray.sum`."""
        return DeviceArray(self.wide.sum(dim=axis, keepdim=keepdims))

    def mean(self, axis: int, keepdims: bool = False) -> "DeviceArray":
        """See `ndarray.mean`."""
        return DeviceArray(self.wide.mean(dim=axis, keepdim=keepdims))

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        """Compute `ufunc` by torch (NEP 13); `out` must be a DeviceArray."""
        out = options.pop("out", None)
        if method != "__call__" or options or ufunc not in UFUNCS:
            words = f"np.{ufunc.__name__}" + (f".{method}" if method != "__call__" else "")
            raise NoTorchForm(words + "".join(f" with {name}" for name in options))
        if ufunc is np.matmul:
            result = multiply_matrices(*(self._matrix(value) for value in inputs))
        else:
            result = UFUNCS[ufunc](*(self._operand(value) for value in inputs))
        if out is None:
            return DeviceArray(result)
        if not isinstance(out[0], DeviceArray):
            raise NoTorchForm(f"np.{ufunc.__name__} into a NumPy array")
        out[0].tensor.copy_(result)
        return out[0]

    def _matrix(self, value: Any) -> torch.Tensor:
        """A factor of a matrix product; a narrow one is widened there, in blocks."""
        return value.tensor if isinstance(value, DeviceArray) else self._operand(value)

    def __array_function__(
        self, function: Callable[..., Any], types: Sequence[type], inputs: tuple[Any, ...], options: dict[str, Any]
    ) -> Any:
        """Compute `function` by torch (NEP 18)."""
        if function not in FUNCTIONS:
            raise NoTorchForm(f"np.{function.__name__}")
        return FUNCTIONS[function](self, *inputs, **options)


def on_host(array: Any) -> Array:
    """`array` as a NumPy array, copied where it is a DeviceArray."""
    host: Array = array.on_host() if isinstance(array, DeviceArray) else array
    return host


def _number_dtype(value: Any) -> torch.dtype:
    if isinstance(value, (bool, np.bool_)):
        return torch.bool
    return torch.int64 if isinstance(value, (int, np.integer)) else torch.float64


def multiply_matrices(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """`left @ right` in float64; a narrow matrix is widened a block of its rows or columns at a time."""
    if _is_narrow_matrix(right):
        # A weight lies as [out, in] and comes transposed: its rows are the columns of the product.
        wide_left, weight = left.double(), right.T
        product = wide_left.new_empty((*wide_left.shape[:-1], len(weight)))
        for first, last, block in _wide_blocks(weight):
            product[..., first:last] = wide_left @ block.T
        return product
    if _is_narrow_matrix(left):
        wide_right = right.double()
        product = wide_right.new_empty((len(left), *wide_right.shape[1:]))
        for first, last, block in _wide_blocks(left):
            product[first:last] = block @ wide_right
        return product
    return left.double() @ right.double()


def _is_narrow_matrix(tensor: torch.Tensor) -> bool:
    return tensor.ndim == 2 and tensor.dtype != torch.float64


def _wide_blocks(matrix: torch.Tensor) -> Iterator[tuple[int, int, torch.Tensor]]:
    """The rows of `matrix` from first to last in float64, block by block, in one buffer."""
    most = CACHED if matrix.device.type == "cpu" else BLOCK
    rows = max(1, most // max(1, matrix.shape[1]))
    buffer = matrix.new_empty((min(rows, len(matrix)), matrix.shape[1]), dtype=torch.float64)
    for first in range(0, len(matrix), rows):
        last = min(first + rows, len(matrix))
        yield first, last, buffer[: last - first].copy_(matrix[first:last])


UFUNCS: dict[np.ufunc, Callable[..., torch.Tensor]] = {
    np.add: torch.add,
    np.subtract: torch.subtract,
    np.multiply: torch.multiply,
    np.true_divide: torch.true_divide,
    np.negative: torch.negative,
    np.power: torch.pow,
    np.square: torch.square,
    np.sqrt: torch.sqrt,
    np.exp: torch.exp,
    np.expm1: torch.expm1,
    np.log: torch.log,
    np.logaddexp: torch.logaddexp,
    np.tanh: torch.tanh,
    np.maximum: torch.maximum,
    np.minimum: torch.minimum,
    np.greater: torch.gt,
    np.matmul: multiply_matrices,
}
"""torch's function for each of NumPy's that goes through arrays number by number, and for the matrix product."""


def _zeros(like: DeviceArray, shape: Any, dtype: Any = np.float64, **options: Any) -> DeviceArray:
    return _full(like, shape, 0, dtype)


def _full(like: DeviceArray, shape: Any, value: Any, dtype: Any = np.float64, **options: Any) -> DeviceArray:
    sizes = (shape,) if isinstance(shape, (int, np.integer)) else tuple(shape)
    kinds = {"f": torch.float64, "i": torch.int64, "b": torch.bool}
    return DeviceArray(
        torch.full([int(size) for size in sizes], value, dtype=kinds[np.dtype(dtype).kind], device=like.tensor.device)
    )


def _tensors(like: DeviceArray, arrays: Any) -> list[torch.Tensor]:
    return [like._operand(array) for array in arrays]


def _argsort(like: DeviceArray, array: Any, axis: int = -1, kind: str | None = None) -> Array:
    """The order on the host, where indices lie; equal numbers keep their order."""
    order: Array = torch.argsort(like._operand(array), dim=axis, stable=True).cpu().numpy()
    return order


def _split(like: DeviceArray, array: DeviceArray, parts: Any, axis: int = 0) -> list[DeviceArray]:
    ends = parts if isinstance(parts, int) else [int(end) for end in parts]
    return [DeviceArray(part) for part in torch.tensor_split(array.tensor, ends, dim=axis)]


def _einsum(like: DeviceArray, sums: str, *arrays: Any) -> DeviceArray:
    return DeviceArray(torch.einsum(sums, *_tensors(like, arrays)))


def _where(like: DeviceArray, condition: Any, if_true: Any, if_false: Any) -> DeviceArray:
    true_side, false_side = (side.to(like.tensor.device) for side in _tensors(like, (if_true, if_false)))
    return DeviceArray(torch.where(like._operand(condition), true_side, false_side))


def _take_along_axis(like: DeviceArray, array: DeviceArray, indices: Any, axis: int = -1) -> DeviceArray:
    return DeviceArray(torch.take_along_dim(array.wide, array._index(indices), dim=axis))


FUNCTIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    np.zeros: _zeros,
    np.empty: _zeros,
    np.zeros_like: lambda like, array: DeviceArray(torch.zeros_like(array.wide)),
    np.empty_like: lambda like, array: DeviceArray(torch.zeros_like(array.wide)),
    np.concatenate: lambda like, arrays, axis=0: DeviceArray(torch.cat(_tensors(like, arrays), dim=axis)),
    np.stack: lambda like, arrays, axis=0: DeviceArray(torch.stack(_tensors(like, arrays), dim=axis)),
    np.vstack: lambda like, arrays: DeviceArray(torch.vstack(_tensors(like, arrays))),
    np.einsum: _einsum,
    np.repeat: lambda like, array, count, axis: DeviceArray(array.tensor.repeat_interleave(count, dim=axis)),
    np.swapaxes: lambda like, array, first, second: array.swapaxes(first, second),
    np.clip: lambda like, array, least, most: DeviceArray(torch.clamp(array.wide, least, most)),
    np.mean: lambda like, array, axis=None: DeviceArray(array.wide.mean() if axis is None else array.wide.mean(axis)),
    np.sort: lambda like, array, axis=-1: DeviceArray(torch.sort(array.wide, dim=axis).values),
    np.argsort: _argsort,
    np.split: _split,
    np.where: _where,
    np.take_along_axis: _take_along_axis,
}
"""The form by torch of each of NumPy's other functions that the formulas use; the first argument gives the device."""
