"""The ways of attention that are measured, each with the inputs that it takes."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from specverify.backends.engine.attention.eager import eager
from specverify.backends.engine.attention.flex import Flex
from specverify.backends.engine.attention.sdpa import Sdpa
from specverify.backends.engine.attention.split import Split
from specverify.backends.engine.columns import Attend, AttentionInputs

EAGER, SDPA, SPLIT, FLEX, TRITON = "eager", "sdpa", "split", "flex", "triton"
"""The names of the ways in tables."""


@dataclass(frozen=True)
class Way:
    """A way to compute attention.

    Attributes:
        name: Its name in tables.
        attend: The attention.
        in_pages: Whether it reads pages in place; columns are gathered for any other way.
        caps: Whether it computes soft caps.
        sinks: Whether it computes sinks.
        unequal: Whether it takes values of another width than keys.
        float64: Whether it computes in float64.
    """

    name: str
    attend: Attend
    in_pages: bool = False
    caps: bool = False
    sinks: bool = True
    unequal: bool = True
    float64: bool = True

    def lacks(self, query: Tensor, columns: AttentionInputs) -> str | None:
        """The property of the inputs that this way does not take, in words; None if it takes them."""
        if columns.cap and not self.caps:
            return "soft caps"
        if columns.sinks is not None and not self.sinks:
            return "sinks"
        if columns.key.shape[-1] != columns.value.shape[-1] and not self.unequal:
            return "values of another width than keys"
        if query.element_size() == 8 and not self.float64:
            return "float64"
        return None


def _triton() -> Attend:
    from specverify.backends.engine.attention.triton_launch import compiled_kernel

    return compiled_kernel()


ON_CPU: dict[str, Callable[[], Way]] = {
    EAGER: lambda: Way(EAGER, eager, caps=True),
    SDPA: lambda: Way(SDPA, Sdpa(), sinks=False),
    SPLIT: lambda: Way(SPLIT, Split(), in_pages=True),
    FLEX: lambda: Way(FLEX, Flex()),
}
"""The ways on a CPU; a kernel that is only interpreted there has no time that means anything."""

ON_CUDA: dict[str, Callable[[], Way]] = {
    **ON_CPU,
    FLEX: lambda: Way(FLEX, Flex(compiled=True)),
    TRITON: lambda: Way(TRITON, _triton(), in_pages=True, unequal=False, float64=False),
}
"""The ways on an NVIDIA device."""


def ways_on(device: str) -> tuple[Way, ...]:
    """The ways of `device`, cpu or cuda.

    Raises:
        ImportError: if a package that a way needs is missing.
    """
    return tuple(make() for make in (ON_CUDA if device == "cuda" else ON_CPU).values())
