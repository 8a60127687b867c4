"""The words of weights in 4-bit floats with a scale for each 32 (MXFP4), as gpt-oss ships its experts.

The format is that of the OCP Microscaling specification 1.0, section 6.3. A stack of matrices W [experts, in, out] is
stored as W_blocks, bytes [experts, out, in / 32, 16], and W_scales, bytes [experts, out, in / 32]. A byte holds two
numbers e2m1, the earlier in its lower half; a scale byte s stands for 2 ** (s - 127), 255 for NaN. The products are
exact in float64 and in bfloat16.
"""

from typing import Any

METHOD = "mxfp4"
"""The `quant_method` of such checkpoints."""

BLOCKS, SCALES = "_blocks", "_scales"
"""The ends of the names of numbers and scales, behind that of the stack."""

BYTES = "U8"
"""The dtype of both in safetensors files."""

BLOCK = 32
"""Numbers with one scale."""

BIAS = 127
"""What a scale byte exceeds its exponent by."""

NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The number for which each 4 bits stand."""


def is_mxfp4(content: dict[str, Any]) -> bool:
    """Whether the content of a config.json says that weights are stored so."""
    quantisation = content.get("quantization_config")
    return isinstance(quantisation, dict) and quantisation.get("quant_method") == METHOD
