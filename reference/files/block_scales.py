"""The words of weights in 8-bit floats with block scales, as DeepSeek ships them.

A matrix W.weight [out, in] is stored in 8-bit floats e4m3. W.weight_scale_inv [ceil(out / rows), ceil(in / columns)]
holds a factor for each block of `weight_block_size`, [rows, columns]; the last blocks of an axis may be cut off. The
weight at (i, j) is number (i, j) times factor (i // rows, j // columns): exact in float64, then rounded to the working
dtype. Which matrices are stored so, their own dtypes say; `modules_to_not_convert` repeats it. Activations stay in the
working dtype: engines that round them to 8 bits (`activation_scheme` dynamic) compute another model.
"""

from pathlib import Path
from typing import Any

from specverify.reference.files import mxfp4
from specverify.reference.files.fields import Fields, UnreadableCheckpoint, quote_value

NUMBERS = "F8_E4M3"
"""The dtype of such matrices in safetensors files."""

FACTORS = "_scale_inv"
"""The end that the name of the factors has, behind that of the matrix."""

UNREAD = {
    "gptq": "whole numbers of a few bits in qweight and qzeros",
    "awq": "whole numbers of a few bits in qweight and qzeros",
    "bitsandbytes": "tables of its own",
    "compressed-tensors": "packed weights and scales",
}
"""Other values of `quant_method`, each with what such weights are stored as."""


def block_size(file: Path, content: dict[str, Any]) -> tuple[int, int] | None:
    """The rows and columns of a block, from a config.json; None for a checkpoint without such weights.

    Args:
        file: The file.
        content: What it holds.

    Raises:
        UnreadableCheckpoint: The file asks for weights that are stored in another way.
    """
    quantisation = content.get("quantization_config")
    if quantisation is None:
        return None
    fields = Fields(file, quantisation if isinstance(quantisation, dict) else {}, {})
    method = fields.get("quant_method")
    if method == mxfp4.METHOD:
        return None
    complaint = f"{file}: quantization_config asks for quantized weights"
    if method != "fp8":
        unread_format = UNREAD.get(method) if isinstance(method, str) else None
        format_words = f" ({unread_format})" if unread_format else ""
        raise UnreadableCheckpoint(
            f"{complaint} of quant_method {quote_value(method)}{format_words}, not of fp8; "
            "save the checkpoint dequantized"
        )
    size = fields.get("weight_block_size")
    if not isinstance(size, list) or len(size) != 2 or any(type(length) is not int or length < 1 for length in size):
        raise UnreadableCheckpoint(
            f"{complaint} whose weight_block_size is {quote_value(size)}, not two sizes; "
            "save the checkpoint dequantized"
        )
    for name, expected in (("fmt", "e4m3"), ("activation_scheme", "dynamic")):
        if fields.get(name) not in (None, expected):
            raise UnreadableCheckpoint(
                f"{complaint} whose {name} is {quote_value(fields.get(name))}, not {expected!r}; "
                "save the checkpoint dequantized"
            )
    return size[0], size[1]
