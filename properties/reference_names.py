"""The names of what computes the oracle's formulas, as `--reference` takes them."""

NUMPY = "numpy"
"""NumPy itself, which certifies every other one."""

REFERENCES = (NUMPY, "torch:cpu", "torch:cuda", "torch:npu")
"""Every value of `--reference`: NumPy, or torch in float64 on a device."""
