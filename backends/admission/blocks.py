"""Admission of blocks: the answer of a backend that samples on tables.

`specverify.backends.base.ExactLaw` returns the accepted path and the emitted tokens of each request of a batch as
`Blocks`.
"""

from specverify.backends.admission.arrays import Axis, admit_array
from specverify.backends.admission.misshapen import Misshapen, refusal
from specverify.backends.admission.stages import require_type
from specverify.reference.probability_world import Blocks
from specverify.reference.trace import Array, Stage
from specverify.reference.tree import Shape


def admit_blocks(blocks: object, requests: int, shape: Shape, vocabulary: int, coins: int) -> Blocks:
    """The blocks that `ExactLaw.verify`, `rounds` or `samples` returned, as NumPy arrays.

    Args:
        blocks: The returned value, of any type.
        requests: B, the number of rows of the tape or of seeds that were given.
        shape: The tree; paths and blocks have room for its height + 1 entries.
        vocabulary: The size of the vocabulary; token ids are smaller.
        coins: The number of coins on one request's tape.

    Raises:
        Misshapen: at stage accepted, for a field of another type or shape, for a node outside the tree, and for a token
            outside the vocabulary.
    """
    try:
        answer = require_type("the tables' answer", blocks, Blocks)
        row_axes: tuple[Axis, ...] = (("requests", requests), ("height + 1", shape.height + 1))
        coin_axes: tuple[Axis, ...] = (("requests", requests), ("coins", coins))
        return Blocks(
            path=_admit_indices("path", answer.path, row_axes, len(shape), "a node"),
            tokens=_admit_indices("tokens", answer.tokens, row_axes, vocabulary, "a token"),
            low=None if answer.low is None else admit_array("low", answer.low, "float", coin_axes, read_only=False),
            high=None if answer.high is None else admit_array("high", answer.high, "float", coin_axes, read_only=False),
        )
    # The arrays know no stage; all of this answer belongs to acceptance.
    except Misshapen as wrong:
        raise Misshapen(Stage.ACCEPTED, wrong.why) from None


def _admit_indices(field: str, value: object, axes: tuple[Axis, ...], below: int, noun: str) -> Array:
    """`value` as integers from -1 to `below` - 1, where -1 marks an unused place."""
    indices = admit_array(field, value, "int", axes, read_only=False)
    if indices.size and not -1 <= indices.min() <= indices.max() < below:
        worst = int(indices.min() if indices.min() < -1 else indices.max())
        raise refusal(field, value, f"{noun} from 0 to {below - 1}, or -1 for nothing", str(worst))
    return indices
