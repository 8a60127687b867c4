"""Rotary position embedding, its seven variants, and positions on three axes, in float64.

The variants mean what they mean in Hugging Face's configs. Sources: RoFormer (arXiv 2104.09864); position interpolation
(2306.15595) for `linear`; YaRN (2309.00071); LongRoPE (2402.13753); Llama 3.1's reference code for `llama3`. Field
names and corner cases are those of transformers' `modeling_rope_utils.py`, which computes the same tables in float32.
"""

import math
from collections.abc import Iterable

import numpy as np

from specverify.reference.architecture import Rope
from specverify.reference.images import Images
from specverify.reference.malformed import Malformed
from specverify.reference.trace import Array


def frequencies(rope: Rope, head_dim: int, max_positions: int, length: int) -> tuple[Array, float]:
    """Inverse frequencies, float64 [head_dim / 2], and the factor on cosine and sine (1.0 where a variant has none).

    Args:
        rope: The variant.
        head_dim: Width of one head, even.
        max_positions: Longest sequence the model admits.
        length: Tokens of the whole sequence; `longrope` chooses by it one table for all positions.

    Raises:
        Malformed: `dynamic` beyond max_positions (see `check_span`).
    """
    check_span(rope, max_positions, length, length)
    plain_frequencies = rope.theta ** -(np.arange(0, head_dim, 2) / head_dim)
    if rope.kind == "proportional":
        # Frequencies of the whole head; the pairs behind the share keep still.
        turning = np.arange(head_dim // 2) < int(rope.share * head_dim // 2)
        return np.where(turning, plain_frequencies / rope.factor, 0.0), 1.0
    if rope.kind == "linear":
        return plain_frequencies / rope.factor, 1.0
    if rope.kind == "yarn":
        return _yarn(rope, plain_frequencies, head_dim), _yarn_scaling(rope)
    if rope.kind == "llama3":
        return _llama3(rope, plain_frequencies), 1.0
    if rope.kind == "longrope":
        stretch = rope.long_factor if is_long(rope, length) else rope.short_factor
        return plain_frequencies / np.array(stretch, dtype=np.float64), _longrope_scaling(rope)
    # `dynamic` raises theta only beyond max_positions, where no case goes.
    return plain_frequencies, 1.0


def is_long(rope: Rope, length: int) -> bool:
    """Whether a sequence of `length` tokens takes longrope's long factors."""
    return rope.kind == "longrope" and length > rope.original


def check_span(rope: Rope, max_positions: int, shortest: int, longest: int) -> None:
    """Refuse a run from `shortest` to `longest` tokens during which the frequencies change.

    Keys cached under the old frequencies differ from those of the longer sequence from scratch, so no decoding with a
    cache can equal the definition.

    Raises:
        Malformed: `longrope` across `original`, or `dynamic` beyond `max_positions`.
    """
    if is_long(rope, longest) and not is_long(rope, shortest):
        raise Malformed(
            "rope.original",
            f"a run from {shortest} to {longest} tokens crosses {rope.original}, where longrope changes its factors: "
            "keys cached before are not those of the sequence from scratch",
        )
    if rope.kind == "dynamic" and longest > max_positions:
        raise Malformed(
            "rope.kind",
            f"{longest} tokens are beyond the {max_positions} positions up to which dynamic keeps its base: "
            "keys cached before are not those of the sequence from scratch",
        )


def table(positions: Array, inv_freq: Array, scaling: float) -> tuple[Array, Array]:
    """Cosine and sine of every pair's angle at `positions` [T], scaled: float64 [T, head_dim / 2] each."""
    angle = np.multiply.outer(positions, inv_freq)
    return np.cos(angle) * scaling, np.sin(angle) * scaling


def grid_positions(images: Images, columns: Iterable[int]) -> Array:
    """The positions of the tokens at `columns` on the axes time, height and width: int64 [3, T].

    >>> from specverify.reference.images import Image
    >>> grid_positions((Image(1, 1, 2, 2),), range(7)).tolist()
    [[0, 1, 1, 1, 1, 3, 4], [0, 1, 1, 2, 2, 3, 4], [0, 1, 2, 1, 2, 3, 4]]
    """
    column_list = [int(column) for column in columns]
    token_positions: list[tuple[int, int, int]] = []
    image_at = {image.start: image for image in images}
    last, position = max(column_list, default=-1), 0
    while len(token_positions) <= last:
        image = image_at.get(len(token_positions))
        if image is None:
            token_positions.append((position, position, position))
            position += 1
        else:
            grid = np.ndindex(image.frames, image.height, image.width)
            token_positions += [(position + frame, position + row, position + column) for frame, row, column in grid]
            position += max(image.frames, image.height, image.width)
    places = [token_positions[column] for column in column_list]
    by_axis: Array = np.array(places, dtype=np.int64).reshape(len(places), 3).T
    return by_axis


def grid_table(sections: tuple[int, ...], places: Array, inv_freq: Array, scaling: float) -> tuple[Array, Array]:
    """As `table`, of `places` [3, T]: each pair's angle is that of the axis to which the pair belongs.

    The first `sections[0]` pairs belong to time, the next `sections[1]` to height, the others to width.
    """
    axis = np.repeat(np.arange(3), sections)
    by_axis = [table(place, inv_freq, scaling) for place in places]
    pairs = np.arange(len(inv_freq))
    cos, sin = (np.stack([tables[kind] for tables in by_axis])[axis, :, pairs].T for kind in range(2))
    return cos, sin


def turn(x: Array, cos: Array, sin: Array) -> Array:
    """`x` [..., T, head_dim] turned by `table`: Llama's half split, where dimension i pairs with i + width / 2.

    The width is twice that of the table. Dimensions beyond it stay as they are (partial rotary embedding).
    """
    half = cos.shape[-1]
    first_half, second_half = x[..., :half], x[..., half : 2 * half]
    turned: Array = x.copy()
    turned[..., :half] = first_half * cos - second_half * sin
    turned[..., half : 2 * half] = second_half * cos + first_half * sin
    return turned


def turn_neighbours(x: Array, cos: Array, sin: Array) -> Array:
    """`x` [..., T, head_dim] turned by `table`: Llama 4's pairs, where dimension 2i pairs with 2i + 1; see `turn`."""
    width = 2 * cos.shape[-1]
    turned: Array = x.copy()
    turned[..., 0:width:2] = x[..., 0:width:2] * cos - x[..., 1:width:2] * sin
    turned[..., 1:width:2] = x[..., 1:width:2] * cos + x[..., 0:width:2] * sin
    return turned


def _yarn(rope: Rope, plain_frequencies: Array, head_dim: int) -> Array:
    """Keep fast pairs, interpolate slow pairs, and blend by a ramp over the pair index between (YaRN, eq. 23)."""

    def pair_turning(rotations: float) -> float:
        """The pair, as a real number, that turns `rotations` times over the original context."""
        return head_dim * math.log(rope.original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    # A zero means "not given" in Hugging Face's configs.
    low, high = pair_turning(rope.beta_fast or 32.0), pair_turning(rope.beta_slow or 1.0)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    # Equal ends would divide by 0; transformers widens the ramp by the same 0.001.
    width = high - low if high != low else 0.001
    interpolated = np.clip((np.arange(head_dim // 2) - low) / width, 0, 1)
    ramped: Array = plain_frequencies / rope.factor * interpolated + plain_frequencies * (1 - interpolated)
    return ramped


def _yarn_scaling(rope: Rope) -> float:
    def temperature(mscale: float) -> float:
        return 0.1 * mscale * math.log(rope.factor) + 1.0

    if rope.attention_factor:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return temperature(rope.mscale) / temperature(rope.mscale_all_dim)
    return temperature(1.0)


def _llama3(rope: Rope, plain_frequencies: Array) -> Array:
    """Stretch wavelengths beyond the original context, keep those well within it, and blend between."""
    turns = rope.original * plain_frequencies / (2 * np.pi)
    span = rope.high_freq_factor - rope.low_freq_factor
    with np.errstate(divide="ignore", invalid="ignore"):
        # Equal factors leave no band to blend; the division then decides nothing.
        blend = (turns - rope.low_freq_factor) / span
        blended = (1 - blend) * plain_frequencies / rope.factor + blend * plain_frequencies
    stretched = np.where(turns > rope.high_freq_factor, plain_frequencies, blended)
    return np.where(turns < rope.low_freq_factor, plain_frequencies / rope.factor, stretched)


def _longrope_scaling(rope: Rope) -> float:
    if rope.attention_factor:
        return rope.attention_factor
    if rope.factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original))
