"""HeadTensors: the tensors of a head's files, each of which must be accounted for."""

from collections.abc import Callable, Mapping
from pathlib import Path

from specverify.reference.files.fields import UnreadableCheckpoint
from specverify.reference.files.stored import INTEGERS, StoredTensor, cut
from specverify.reference.trace import Array


class HeadTensors:
    """The tensors of a directory under the names of our formulas; each is taken once, and none may be left over.

    Attributes:
        root: The directory.
    """

    def __init__(self, root: Path, stored: Mapping[str, StoredTensor], rename: Callable[[str], str] = str) -> None:
        """Rename each tensor by `rename`.

        Raises:
            UnreadableCheckpoint: two tensors have the same place.
        """
        self.root = root
        self._stored: dict[str, tuple[str, StoredTensor]] = {}
        for name, tensor in stored.items():
            place = rename(name)
            if place in self._stored:
                first_name = self._stored[place][0]
                raise UnreadableCheckpoint(
                    f"{root}: tensors {cut(first_name)} and {cut(name)} are the same weight; remove one"
                )
            self._stored[place] = (name, tensor)

    def __contains__(self, name: str) -> bool:
        """Whether a tensor of this name is left."""
        return name in self._stored

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the tensors that are left."""
        return tuple(self._stored)

    def take(self, name: str, shape: tuple[int, ...], reason: str = "") -> Array:
        """The values of a weight, float64 of `shape`.

        Args:
            name: The weight.
            shape: Its shape; -1 for any length of an axis.
            reason: Why the head must have it, for the message.

        Raises:
            UnreadableCheckpoint: it is missing, has another shape, or holds NaN, infinity or whole numbers.
        """
        return self._take(name, shape, reason, integers=False)

    def take_any(self, name: str) -> Array:
        """The values of a weight of any shape, which another reader must check; raises as `take`."""
        _, tensor = self._stored[name]
        return self._take(name, (-1,) * len(tensor.shape), "", integers=False)

    def take_whole(self, name: str, shape: tuple[int, ...]) -> Array:
        """The values of a map of the vocabulary, int64 of `shape`; raises as `take`, for fractions."""
        return self._take(name, shape, "", integers=True)

    def _take(self, name: str, shape: tuple[int, ...], reason: str, integers: bool) -> Array:
        if name not in self._stored:
            raise UnreadableCheckpoint(f"{self.root}: tensor {name} is missing{f' ({reason})' if reason else ''}")
        original, tensor = self._stored.pop(name)
        if not _fits(tensor.shape, shape):
            shape_words = ", ".join("any" if size < 0 else str(size) for size in shape)
            raise UnreadableCheckpoint(
                f"{tensor.file}: tensor {cut(original)} has shape {list(tensor.shape)}, where config.json and the "
                f"target ask for [{shape_words}]{f' ({reason})' if reason else ''}: the head of another target, or "
                "another layout"
            )
        if (tensor.dtype in INTEGERS) != integers:
            kind = "whole numbers" if integers else "fractions"
            raise UnreadableCheckpoint(f"{tensor.file}: tensor {cut(original)} is {tensor.dtype}, and must hold {kind}")
        return tensor.values(original)

    def linear(self, name: str, out: int, into: int, bias: bool, field: str) -> dict[str, Array]:
        """The weight [out, into] of a projection, and its bias [out] where config.json asks for one.

        Args:
            name: The projection.
            out: Rows of the weight.
            into: Columns of the weight.
            bias: Whether there must be a bias.
            field: What config.json says about the bias, for messages: `bias true`.

        Raises:
            UnreadableCheckpoint: as `take`; also for a bias that config.json does not ask for.
        """
        state = {f"{name}.weight": self.take(f"{name}.weight", (out, into))}
        if bias:
            state[f"{name}.bias"] = self.take(f"{name}.bias", (out,), f"config.json has {field}")
        elif f"{name}.bias" in self:
            raise UnreadableCheckpoint(
                f"{self.root}: tensor {name}.bias is stored, and config.json has {field}; correct one of them"
            )
        return state

    def check_empty(self, kind: str) -> None:
        """Refuse a tensor that was not taken.

        Raises:
            UnreadableCheckpoint: with the first name, and the number of such tensors.
        """
        if self._stored:
            name, tensor = next(iter(self._stored.values()))
            num_further = len(self._stored) - 1
            more = f" (and {num_further} more)" if num_further else ""
            raise UnreadableCheckpoint(
                f"{tensor.file}: tensor {cut(name)}{more} has no place in the {kind} head that config.json describes; "
                "nothing was loaded"
            )


def _fits(shape: tuple[int, ...], expected_shape: tuple[int, ...]) -> bool:
    """Whether `shape` is `expected_shape`, in which -1 stands for any length of an axis."""
    if len(shape) != len(expected_shape):
        return False
    return all(expected in (-1, size) for expected, size in zip(expected_shape, shape, strict=True))
