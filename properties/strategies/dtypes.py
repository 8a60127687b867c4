"""The working dtypes that cases draw: 16 bits get a fixed share beside wider dtypes."""

from functools import cache

from hypothesis import strategies as st

HALVES = ("bfloat16", "float16")
"""Dtypes of 16 bits."""

SHARE = 8
"""One case in this many is in 16 bits, on an engine that also computes in float64.

Wrong logic shows in float32 and float64 at a tenth of a per mille of what 16 bits need; code that runs in 16 bits
alone shows there alone.
"""


@cache
def working_dtypes(dtypes: tuple[str, ...]) -> st.SearchStrategy[str]:
    """One of `dtypes`: 16 bits in one case of SHARE if float64 is among them, otherwise each as often as the others."""
    wide = tuple(dtype for dtype in dtypes if dtype not in HALVES)
    halves = tuple(dtype for dtype in dtypes if dtype in HALVES)
    if "float64" not in wide or not halves:
        return st.sampled_from(dtypes)
    # Both parts are repeated so often that their sizes stand as SHARE - 1 to 1.
    return st.sampled_from(wide * (len(halves) * (SHARE - 1)) + halves * len(wide))
