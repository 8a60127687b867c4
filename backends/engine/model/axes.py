"""The positions of one request's rows on the axes time, height and width.

A cache knows rows by their columns. Behind an image a row's position is its column plus the rope delta of the prompt.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from specverify.reference.architecture import Model


@dataclass(frozen=True)
class Axes:
    """The positions of a request whose prompt has images.

    Attributes:
        image_positions: int64 [3, n], the positions of the first n tokens, up to the end of the last image.
        delta: The position of any later token, on every axis, less its column.
    """

    image_positions: Tensor
    delta: int

    def of_text(self, columns: Tensor) -> Tensor:
        """The positions int64 [3, R] of rows behind all images, as the nodes of trees are."""
        return (columns + self.delta).expand(3, -1)

    def of_prompt(self, columns: Tensor) -> Tensor:
        """The positions int64 [3, R] of any rows."""
        last = self.image_positions.shape[1]
        image_positions = self.image_positions.to(columns.device)[:, columns.clamp(max=last - 1)]
        return torch.where(columns < last, image_positions, self.of_text(columns))


def axes_of(model: Model) -> Axes | None:
    """The positions of a request on `model`; None where every token has the number of its column on all axes."""
    if not model.images:
        return None
    parts = []
    end = 0
    following = 0
    for image in model.images:
        text = torch.arange(following, following + image.start - end)
        parts.append(text.expand(3, -1))
        sizes = (image.frames, image.height, image.width)
        begin = following + len(text)
        grid = torch.cartesian_prod(*(torch.arange(size) for size in sizes)).view(-1, 3)
        parts.append(grid.T + begin)
        end = image.end
        following = begin + max(sizes)
    return Axes(torch.cat(parts, dim=1), following - end)


def side_by_side(rows: list[Tensor]) -> Tensor:
    """Stack 1-D tensors to [B, longest], padded with zeros."""
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def positions_of(rows: list[Tensor], axes: list[Tensor | None]) -> Tensor:
    """The positions of a batch, [B, longest], or [3, B, longest] where one of its requests has three axes.

    Args:
        rows: For each request its positions on one axis, [R].
        axes: For each request its positions on three, [3, R], or None.
    """
    if all(axes_of_request is None for axes_of_request in axes):
        return side_by_side(rows)
    three_axes = [
        positions.expand(3, -1) if request_axes is None else request_axes
        for positions, request_axes in zip(rows, axes, strict=True)
    ]
    return torch.stack([side_by_side([positions[axis] for positions in three_axes]) for axis in range(3)])


def whole_inputs(axes: Axes | None, tokens: tuple[int, ...]) -> dict[str, Tensor]:
    """The inputs of a model that runs a whole text of one request without a cache.

    With images the mask says that the row is no pack of several texts, which transformers would guess from positions.
    """
    ids = torch.tensor([tokens])
    if axes is None:
        return {"input_ids": ids}
    places = axes.of_prompt(torch.arange(len(tokens)))[:, None]
    return {"input_ids": ids, "position_ids": places, "attention_mask": torch.ones_like(ids)}
