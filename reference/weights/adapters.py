"""The seeded weights of low-rank adapters."""

from functools import lru_cache

import numpy as np

from specverify.reference.architecture import Seeded
from specverify.reference.trace import Array
from specverify.reference.weights.models import representable, shapes

ADAPTER_GAIN = 0.5
"""Standard deviation of the entries of B A beside those of W; alpha / rank multiplies it."""


@lru_cache(maxsize=128)
def low_rank(model: Seeded) -> dict[str, tuple[Array, Array]]:
    """The matrices A [rank, in] and B [out, rank] of the model's adapter for each weight that it changes.

    They are read-only float64, and exact in every working dtype. A model without an adapter has none.
    """
    adapter = model.adapter
    if adapter is None:
        return {}
    # The seed of the model enters as well, so that two models have unlike adapters.
    draw = np.random.default_rng((adapter.seed, model.seed, adapter.rank))
    matrices = {}
    for name, (rows, columns) in ((n, s) for n, s in shapes(model.architecture).items() if adapter.names(n)):
        down = representable(draw.normal(size=(adapter.rank, columns)) / np.sqrt(columns))
        up = representable(draw.normal(size=(rows, adapter.rank)) * ADAPTER_GAIN / np.sqrt(adapter.rank))
        for array in (down, up):
            array.flags.writeable = False
        matrices[name] = down, up
    return matrices
