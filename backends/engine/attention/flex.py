"""Flex: torch's FlexAttention under a mask function over the dense mask, compiled where that is asked for and works."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from backends.engine.columns import AttentionInputs

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(batch, head, query, key) to visible, as FlexAttention calls it."""

STEPWISE = "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"
"""torch's switch for running uncompiled FlexAttention step by step."""


def indexed(visible: Tensor) -> MaskMod:
    """The mask function of `visible`, bool [B, T, C].

    One subscript with all indices: chained ones (`visible[b][q][k]`, as transformers 5.23 writes it) make Inductor
    emit CPU code that writes out of bounds, with a crash or silently wrong numbers (torch 2.13; pytorch#153145).
    """

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return visible[batch, query, key]

    return sees


def blocks(mask_mod: MaskMod, columns: AttentionInputs) -> BlockMask:
    """Which tiles of 128 x 128 hold a visible cell; the others are skipped."""
    batch, _, rows, width = columns.visible.shape
    return create_block_mask(mask_mod, batch, None, rows, width, device=columns.visible.device)


@dataclass(frozen=True)
class Flex:
    """`torch.nn.attention.flex_attention` as an `Attend`; see `columns.Attend`.

    Uncompiled it materialises the scores: right in every dtype, and no faster than written-out attention. Compiled, it
    is a fused kernel of float32 and 16 bits; a compilation takes seconds for each family of shapes, and what does not
    compile is announced and runs uncompiled. Measured (torch 2.13, 2 CPU cores): 10 to 20 ms a call uncompiled; 4 to
    14 s a compilation, and a C++ compile error whenever the batch size is dynamic. So on the CPU it is compiled only
    where asked.

    Attributes:
        compiled: Whether to compile.
        sees: The dense mask to a mask function.
        tiles: The mask function to the tiles that are looked at.
    """

    compiled: bool = False
    sees: Callable[[Tensor], MaskMod] = indexed
    tiles: Callable[[MaskMod, AttentionInputs], BlockMask] = blocks

    def __call__(self, query: Tensor, columns: AttentionInputs, scaling: float) -> Tensor:
        """[B, H, T, D] in the query's dtype."""
        columns.refuse_cap("FlexAttention")
        mask = self.tiles(self.sees(columns.visible[:, 0]), columns)
        arguments = {"block_mask": mask, "scale": scaling, "enable_gqa": query.shape[1] != columns.key.shape[1]}
        called = (query, columns.key, columns.value)
        if not self.compiled:
            return _stepwise(called, arguments)
        family = (query.dtype, query.device.type, *query.shape, *columns.key.shape[1:3])
        if query.dtype is torch.float64:
            columns.announce("FlexAttention does not compile for float64")
        elif family in _refused:
            columns.announce(_refused[family])
        else:
            try:
                return _compiled()(*called, **arguments)  # type: ignore[no-any-return]
            except TorchDynamoException as why:
                _refused[family] = _because(why)
                columns.announce(_refused[family])
        return _stepwise(called, arguments)


_refused: dict[tuple[Any, ...], str] = {}
"""Families of shapes that did not compile in this process, and why; asking again would cost the same seconds."""

_made: list[Callable[..., Any]] = []


def _compiled() -> Callable[..., Any]:
    """FlexAttention, compiled for each family of shapes it is called with.

    Whole (`fullgraph`), so that reaching the limit of recompilations raises instead of running uncompiled unseen, and
    with dynamic shapes as torch chooses them: forced ones (`dynamic=True`) fail in C++.
    """
    if not _made:
        _made.append(torch.compile(flex.flex_attention, dynamic=None, fullgraph=True))
    return _made[0]


def _because(why: Exception) -> str:
    if isinstance(why, FailOnRecompileLimitHit):
        return "FlexAttention was recompiled as often as torch allows"
    told = [" ".join(line.split()) for line in str(why).splitlines() if line.strip()]
    said = next((line for line in told if not line.endswith("raised:")), type(why).__name__)
    return f"FlexAttention did not compile: {said[:120]}"


def _stepwise(called: tuple[Tensor, Tensor, Tensor], arguments: dict[str, Any]) -> Tensor:
    with _steps():
        mixed: Tensor = flex.flex_attention(*called, **arguments)
    return mixed


@contextmanager
def _steps() -> Iterator[None]:
    """Run uncompiled FlexAttention as its plain operations.

    Without it, torch traces it anew for every shape (0.3 to 0.6 s), gives up after its limit of recompilations, and
    warns that nothing is fused, which is known here.
    """
    before = getattr(flex, STEPWISE, None)
    if before is not None:
        setattr(flex, STEPWISE, True)
    try:
        yield
    finally:
        if before is not None:
            setattr(flex, STEPWISE, before)
