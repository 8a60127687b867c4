"""The first position that a row of a layer with a window or a chunk may attend to."""


def first_visible(reach: tuple[int, int], position: int) -> int:
    """The first position that `position` may attend to, in a layer of this window and chunk (`Architecture.reaches`).

    >>> [first_visible(reach, 9) for reach in ((0, 0), (3, 0), (0, 4))]
    [0, 7, 8]
    """
    window, chunk = reach
    if chunk:
        return position - position % chunk
    return max(0, position + 1 - window) if window else 0
