"""The words of weights in 8-bit floats with block scales, as DeepSeek ships them.

A matrix W.weight [out, in] is stored in 8-bit floats e4m3. W.weight_scale_inv [ceil(out / rows), ceil(in / columns)]
holds a factor for each block of `weight_block_size`, [rows, columns]; the last blocks of an axis may be cut off. The
weight at (i, j) is number (i, j) times factor (i // rows, j // columns): exact in float64, then rounded to the working
dtype. Which matrices are stored so, their own dtypes say; `modules_to_not_convert` repeats it. Activations stay in the
working dtype: engines that round them to 8 bits (`activation_scheme` dynamic) compute another model.
"""

from pathlib import Path
from typing import Any

from reference.files.fields import Fields, UnreadableCheckpoint, quote_value

NUMBERS = "F8_E4M3"
"""The dtype of such matrices in safetensors files."""

FACTORS = "_scale_inv"
"""The end that the name of the factors has, behind that of the matrix."""

UNREAD = {
    "gptq": "whole numbers of a few bits in qweight and qzeros",
    "awq": "whole numbers of a few bits in qweight and qzeros",
    "bitsandbytes": "tables of its own",
    "compressed-tensors": "packed weights and scales",
    "mxfp4": "4-bit floats in blocks and scales",
}
"""Other values of `quant_method`, each with what such weights are stored as."""


def block_size(where: Path, content: dict[str, Any]) -> tuple[int, int] | None:
    """The rows and columns of a block, from a config.json; None for a checkpoint that is not quantised.

    Args:
        where: The file.
        content: What it holds.

    Raises:
        UnreadableCheckpoint: The file asks for weights that are stored in another way.
    """
    given = content.get("quantization_config")
    if given is None:
        return None
    own = Fields(where, given if isinstance(given, dict) else {}, {})
    method, asks = own.get("quant_method"), f"{where}: quantization_config asks for quantized weights"
    if method != "fp8":
        held = UNREAD.get(method) if isinstance(method, str) else None
        stored = f" ({held})" if held else ""
        raise UnreadableCheckpoint(
            f"{asks} of quant_method {quote_value(method)}{stored}, not of fp8; save the checkpoint dequantized"
        )
    size = own.get("weight_block_size")
    if not isinstance(size, list) or len(size) != 2 or any(type(one) is not int or one < 1 for one in size):
        raise UnreadableCheckpoint(
            f"{asks} whose weight_block_size is {quote_value(size)}, not two sizes; save the checkpoint dequantized"
        )
    for name, computed in (("fmt", "e4m3"), ("activation_scheme", "dynamic")):
        if own.get(name) not in (None, computed):
            raise UnreadableCheckpoint(
                f"{asks} whose {name} is {quote_value(own.get(name))}, not {computed!r}; "
                "save the checkpoint dequantized"
            )
    return size[0], size[1]
