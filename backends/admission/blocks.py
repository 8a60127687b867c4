"""Admission of blocks: the answer of a backend that samples on tables.

`backends.base.ExactLaw` returns the accepted path and the emitted tokens of each request of a batch as `Blocks`.
"""

from backends.admission.arrays import Axis, array
from backends.admission.misshapen import Misshapen, refusal
from backends.admission.stages import ours
from reference.probability_world import Blocks
from reference.trace import Array, Stage
from reference.tree import Shape


def admitted_blocks(blocks: object, requests: int, shape: Shape, vocabulary: int, coins: int) -> Blocks:
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
        one = ours("the tables' answer", blocks, Blocks)
        wide: tuple[Axis, ...] = (("requests", requests), ("height + 1", shape.height + 1))
        ends: tuple[Axis, ...] = (("requests", requests), ("coins", coins))
        return Blocks(
            path=_indices("path", one.path, wide, len(shape), "a node"),
            tokens=_indices("tokens", one.tokens, wide, vocabulary, "a token"),
            low=None if one.low is None else array("low", one.low, "float", ends, read_only=False),
            high=None if one.high is None else array("high", one.high, "float", ends, read_only=False),
        )
    # The arrays know no stage; all of this answer belongs to acceptance.
    except Misshapen as wrong:
        raise Misshapen(Stage.ACCEPTED, wrong.why) from None


def _indices(field: str, value: object, axes: tuple[Axis, ...], below: int, what: str) -> Array:
    """`value` as integers from -1 to `below` - 1, where -1 marks an unused place."""
    held = array(field, value, "int", axes, read_only=False)
    if held.size and not -1 <= held.min() <= held.max() < below:
        worst = int(held.min() if held.min() < -1 else held.max())
        raise refusal(field, value, f"{what} from 0 to {below - 1}, or -1 for nothing", str(worst))
    return held
