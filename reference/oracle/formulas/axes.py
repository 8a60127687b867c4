"""Rotary tables of positions on three axes (M-RoPE), in float64."""

from collections.abc import Iterable

import numpy as np

from reference.architecture import Architecture
from reference.family.vision_text import SECTIONS
from reference.images.spans import Images
from reference.oracle.formulas import rotary
from reference.trace import Array


def positions(images: Images, columns: Iterable[int]) -> Array:
    """The positions of the tokens at `columns` on the axes time, height and width: int64 [3, T].

    >>> from reference.images.spans import Image
    >>> positions((Image(1, 1, 2, 2),), range(7)).tolist()
    [[0, 1, 1, 1, 1, 3, 4], [0, 1, 1, 2, 2, 3, 4], [0, 1, 2, 1, 2, 3, 4]]
    """
    wanted = [int(column) for column in columns]
    found: list[tuple[int, int, int]] = []
    begins = {one.start: one for one in images}
    last, here = max(wanted, default=-1), 0
    while len(found) <= last:
        image = begins.get(len(found))
        if image is None:
            found.append((here, here, here))
            here += 1
        else:
            grid = np.ndindex(image.frames, image.height, image.width)
            found += [(here + frame, here + row, here + column) for frame, row, column in grid]
            here += max(image.frames, image.height, image.width)
    places: Array = np.array([found[column] for column in wanted], dtype=np.int64).reshape(len(wanted), 3).T
    return places


def table(arch: Architecture, places: Array, inv_freq: Array, scaling: float) -> tuple[Array, Array]:
    """As `rotary.table`, of `places` [3, T]: each pair's angle is that of the axis to which the pair belongs."""
    axis = np.repeat(np.arange(3), [int(arch.setting(name)) for name in SECTIONS])
    by_axis = [rotary.table(place, inv_freq, scaling) for place in places]
    pairs = np.arange(len(inv_freq))
    cos, sin = (np.stack([one[kind] for one in by_axis])[axis, :, pairs].T for kind in range(2))
    return cos, sin
