"""An emulated recorder: a list of operators, replayed on fixed tensors.

The list stands for a CUDA graph on a machine without a device. As in a graph, every result has one address, no Python
of the model runs in a replay, and a number that the host read while the forward was recorded is frozen. As under a
capture, an operator that hands a number or a shape back to the host is refused.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class Operation:
    """An operator with its arguments, and the tensors that held its results when it was recorded."""

    operator: Any
    arguments: tuple[Any, ...]
    named: dict[str, Any]
    results: list[Tensor]

    def recompute(self) -> None:
        """Compute the results again from what the arguments hold now, at the addresses of the recording."""
        fresh = tensors(self.operator(*self.arguments, **self.named))
        if not self.operator._schema.is_mutable:
            for result, fresh_result in zip(self.results, fresh, strict=True):
                result.copy_(fresh_result)


class OperatorList(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's class is untyped here
    """While open, every operator runs as usual and is added to `operations`, unless its result is a view."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[Operation] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator `func` and list it.

        Raises:
            RuntimeError: if the host would read a number or a shape from its results.
        """
        named_arguments = kwargs or {}
        if reads_back(func, args):
            raise RuntimeError(f"{func} hands numbers back to the host, which no replay can do")
        results = func(*args, **named_arguments)
        if not func.is_view:  # a view shows what its base holds, then as now
            self.operations.append(Operation(func, args, named_arguments, tensors(results)))
        return results


def tensors(results: Any) -> list[Tensor]:
    """The tensors among the results of an operator; some, as SDPA's, also tell sizes, which never change."""
    return [leaf for leaf in tree_leaves(results) if isinstance(leaf, Tensor)]


def reads_back(operator: Any, arguments: tuple[Any, ...]) -> bool:
    """Whether the results of an operator give the host a number, or a shape that depends on numbers."""
    if operator in (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default):
        return any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in arguments[1])
    return torch.Tag.data_dependent_output in operator.tags or torch.Tag.dynamic_output_shape in operator.tags


class OperatorRecorder:
    """A recorder that lists operators, for tensors on any device."""

    def record(self, run: Callable[[], list[Tensor]]) -> tuple[list[Tensor], Callable[[], None]]:
        """See `specverify.backends.engine.model.graphs.Recorder`."""
        with OperatorList() as listing:
            results = run()

        def replay() -> None:
            for operation in listing.operations:
                operation.recompute()

        return results, replay
