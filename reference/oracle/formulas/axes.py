"""Rotary tables of positions on three axes (M-RoPE), in float64."""

from collections.abc import Iterable

import numpy as np

from specverify.reference.architecture import Architecture
from specverify.reference.family.vision_text import SECTIONS
from specverify.reference.images.spans import Images
from specverify.reference.oracle.formulas import rotary
from specverify.reference.trace import Array


def positions(images: Images, columns: Iterable[int]) -> Array:
    """The positions of the tokens at `columns` on the axes time, height and width: int64 [3, T].

    >>> from specverify.reference.images.spans import Image
    >>> positions((Image(1, 1, 2, 2),), range(7)).tolist()
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


def table(arch: Architecture, places: Array, inv_freq: Array, scaling: float) -> tuple[Array, Array]:
    """As `rotary.table`, of `places` [3, T]: each pair's angle is that of the axis to which the pair belongs."""
    axis = np.repeat(np.arange(3), [int(arch.setting(name)) for name in SECTIONS])
    by_axis = [rotary.table(place, inv_freq, scaling) for place in places]
    pairs = np.arange(len(inv_freq))
    cos, sin = (np.stack([tables[kind] for tables in by_axis])[axis, :, pairs].T for kind in range(2))
    return cos, sin
