"""Attention by torch's FlexAttention, uncompiled or compiled.

Its mask function reads the dense mask, or the words of a compact one. It runs compiled only if compilation is asked for
and succeeds.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from specverify.backends.engine.attention.compact import Compact, words_of
from specverify.backends.engine.columns import WORD, AttentionInputs

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(batch, head, query, key) to visible, as FlexAttention calls it."""

STEPWISE = "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"
"""The name of torch's internal switch that makes uncompiled FlexAttention run as its plain operations."""


COMPILATIONS = 64
"""Families of shapes for which it is compiled, before a call runs uncompiled; torch's own limit is 8."""


def index_mask(visible: Tensor) -> MaskMod:
    """The mask function of `visible`, bool [B, T, C].

    The function uses one subscript with all indices. Chained subscripts (`visible[b][q][k]`, as in transformers 5.23)
    make Inductor emit CPU code that writes out of bounds, with a crash or silently wrong numbers (torch 2.13;
    pytorch#153145).
    """

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return visible[batch, query, key]

    return sees


def word_mask(packed: Compact) -> MaskMod:
    """The mask function of the compact form `packed`."""
    first, prefix, widths, bits = packed.first, packed.prefix, packed.widths, packed.bits
    last_word = bits.shape[-1] - 1

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        place = key - prefix[batch]
        word = bits[batch, query, (place // WORD).clamp(0, last_word)]
        in_block = (place >= 0) & (place < widths[batch]) & ((word >> place.clamp(min=0) % WORD & 1) > 0)
        return ((place < 0) & (key >= first[batch, query])) | in_block

    return sees


def visible_tiles(mask_mod: MaskMod, columns: AttentionInputs) -> BlockMask:
    """The tiles of 128 x 128 cells that hold a visible cell; FlexAttention skips the others."""
    batch, _, rows, width = columns.visible.shape
    return create_block_mask(mask_mod, batch, None, rows, width, device=columns.visible.device)


@dataclass(frozen=True)
class Flex:
    """`torch.nn.attention.flex_attention` as an `Attend`; see `columns.Attend`.

    Uncompiled, FlexAttention materialises the scores: it is correct in every dtype, and no faster than eager attention.
    Compiled, it is a fused kernel for float32 and 16 bits. A compilation takes seconds for each family of shapes. If a
    compilation fails, the failure is announced and the call runs uncompiled. Measured (torch 2.13, 2 CPU cores): 10 to
    20 ms a call uncompiled; 4 to 14 s a compilation, and a C++ compile error whenever the batch size is dynamic. So on
    the CPU it is compiled only if `compiled` asks for it.

    Attributes:
        compiled: Whether to compile.
        sees: From the dense mask to a mask function.
        sees_words: From the compact mask to a mask function.
        tiles: From the mask function to the tiles that are computed.
    """

    compiled: bool = False
    sees: Callable[[Tensor], MaskMod] = index_mask
    sees_words: Callable[[Compact], MaskMod] = word_mask
    tiles: Callable[[MaskMod, AttentionInputs], BlockMask] = visible_tiles

    def __call__(self, query: Tensor, columns: AttentionInputs, scaling: float) -> Tensor:
        """Attention of `query` [B, H, T, D] over `columns`, [B, H, T, D] in the dtype of the query."""
        columns.refuse_cap("FlexAttention")
        columns.refuse_indexed("FlexAttention")
        packed = words_of(columns.visible)
        mask_mod = self.sees(columns.visible[:, 0]) if packed is None else self.sees_words(packed)
        mask = self.tiles(mask_mod, columns)
        arguments = {"block_mask": mask, "scale": scaling, "enable_gqa": query.shape[1] != columns.key.shape[1]}
        tensors = (query, columns.key, columns.value)
        if columns.sinks is not None:
            if self.compiled:
                columns.announce("compiled FlexAttention is not asked for the log-sum-exps that sinks need")
            output, sums = _with_sums(tensors, arguments)
            return shared_with_sinks(output, sums, columns.sinks)
        if not self.compiled:
            return _stepwise(tensors, arguments)
        family = (query.dtype, query.device.type, *query.shape, *columns.key.shape[1:3])
        if query.dtype is torch.float64:
            columns.announce("FlexAttention does not compile for float64")
        elif family in _failures:
            columns.announce(_failures[family])
        else:
            try:
                with torch._dynamo.config.patch(
                    recompile_limit=COMPILATIONS, accumulated_recompile_limit=16 * COMPILATIONS
                ):
                    return _compiled()(*tensors, **arguments)  # type: ignore[no-any-return]
            # In torch 2.13 the limit of recompilations is no TorchDynamoException.
            except (TorchDynamoException, FailOnRecompileLimitHit) as error:
                _failures[family] = _failure_text(error)
                columns.announce(_failures[family])
        return _stepwise(tensors, arguments)


_failures: dict[tuple[Any, ...], str] = {}
"""Families of shapes that did not compile in this process, and why; another attempt would cost the same seconds."""

_compiled_functions: list[Callable[..., Any]] = []
"""The compiled function, once it is made; empty before, so that importing this module compiles nothing."""


def _compiled() -> Callable[..., Any]:
    """FlexAttention, compiled anew for each family of shapes with which it is called.

    With `fullgraph`, reaching the limit of recompilations raises an exception; without, the call would run uncompiled
    unnoticed. torch decides which shapes are dynamic, because `dynamic=True` fails in the C++ compiler.
    """
    if not _compiled_functions:
        _compiled_functions.append(torch.compile(flex.flex_attention, dynamic=None, fullgraph=True))
    return _compiled_functions[0]


def _failure_text(error: Exception) -> str:
    if isinstance(error, FailOnRecompileLimitHit):
        return "FlexAttention was recompiled as often as torch allows"
    lines = [" ".join(line.split()) for line in str(error).splitlines() if line.strip()]
    # torch's message begins with "backend='inductor' raised:", and the cause is on the line after it.
    cause = next((line for line in lines if not line.endswith("raised:")), type(error).__name__)
    return f"FlexAttention did not compile: {cause[:120]}"


def shared_with_sinks(output: Tensor, sums: Tensor, sinks: Tensor) -> Tensor:
    """Attention [B, H, T, D] after each head's sink has taken its share of the softmax.

    The columns keep exp(lse) / (exp(lse) + exp(sink)) of it.

    Args:
        output: The attention without sinks, [B, H, T, D].
        sums: The log-sum-exp of each row's scores, [B, H, T].
        sinks: [H].
    """
    share = torch.sigmoid(sums - sinks.to(sums.dtype)[:, None])[..., None]
    return (output.to(sums.dtype) * share).to(output.dtype)


def _with_sums(tensors: tuple[Tensor, Tensor, Tensor], arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Attention, and the log-sum-exps of its scores, float32 or float64."""
    with _plain_operations():
        if hasattr(flex, "AuxRequest"):
            output, auxiliary = flex.flex_attention(*tensors, **arguments, return_aux=flex.AuxRequest(lse=True))
            return output, auxiliary.lse
        # torch 2.6 to 2.8 know `return_lse` alone, which later versions warn about.
        output, sums = flex.flex_attention(*tensors, **arguments, return_lse=True)
        return output, sums


def _stepwise(tensors: tuple[Tensor, Tensor, Tensor], arguments: dict[str, Any]) -> Tensor:
    with _plain_operations():
        output: Tensor = flex.flex_attention(*tensors, **arguments)
    return output


@contextmanager
def _plain_operations() -> Iterator[None]:
    """Inside the `with`, run uncompiled FlexAttention as its plain operations.

    Without this switch, torch traces FlexAttention anew for every shape (0.3 to 0.6 s), gives up after its limit of
    recompilations, and warns that nothing is fused, which is known here.
    """
    switch_before = getattr(flex, STEPWISE, None)
    if switch_before is not None:  # a torch without the switch runs as it is
        setattr(flex, STEPWISE, True)
    try:
        yield
    finally:
        if switch_before is not None:
            setattr(flex, STEPWISE, switch_before)
