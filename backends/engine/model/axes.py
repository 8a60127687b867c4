"""The positions of a request's rows on three axes, and the embeddings of its images.

A cache knows rows by their columns. Behind an image a row's position is its column plus the rope delta of the prompt.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specverify.backends.engine.uploads import upload
from specverify.reference.architecture import Model, Seeded
from specverify.reference.images import Images
from specverify.reference.weights import image_embeddings


@dataclass(frozen=True)
class ImageRows:
    """The rows among R whose tokens have an image's embedding.

    Attributes:
        rows: int64 [k], their numbers, ascending.
        embeddings: float64 [k, hidden].
    """

    rows: Tensor
    embeddings: Tensor

    def put_into(self, embedded: Tensor) -> Tensor:
        """The embeddings `embedded` [R, hidden] of all rows with those of these rows in their places."""
        changed = embedded.clone()
        changed[upload(self.rows, embedded.device)] = upload(self.embeddings.to(embedded.dtype), embedded.device)
        return changed


@dataclass(frozen=True)
class ImageEmbeddings:
    """The embeddings of the images of a prompt, as wide as the rows of the model that reads them.

    Attributes:
        columns: int64 [n], the columns that have one, ascending.
        embeddings: float64 [n, hidden].
    """

    columns: Tensor
    embeddings: Tensor

    def of_columns(self, columns: Tensor) -> ImageRows | None:
        """The embeddings of those of R rows whose tokens stand at `columns` int64 [R]; None where no row has one."""
        is_image = torch.isin(columns, self.columns)
        if not bool(is_image.any()):
            return None
        places = torch.searchsorted(self.columns, columns[is_image])
        return ImageRows(is_image.nonzero()[:, 0], self.embeddings[places])


def embeddings_of(images: Images, width: int) -> ImageEmbeddings | None:
    """The embeddings of `images` for rows of `width`; None where all have those of their tokens."""
    embedded_images = [image for image in images if image.seed]
    if not embedded_images:
        return None
    return ImageEmbeddings(
        torch.cat([torch.arange(image.start, image.end) for image in embedded_images]),
        torch.cat([torch.tensor(image_embeddings(image, width)) for image in embedded_images]),
    )


@contextmanager
def image_hook(network: Any, lanes: list[ImageRows | None]) -> Iterator[None]:
    """Inside the `with`, the embedding of `network` gives the rows of each lane the embeddings of images in `lanes`."""
    if not any(lanes):
        yield
        return

    def put_images(_: Any, __: Any, output: Tensor) -> Tensor:
        return torch.stack(
            [
                embedded if rows is None else rows.put_into(embedded)
                for embedded, rows in zip(output, lanes, strict=True)
            ]
        )

    handle = network.get_input_embeddings().register_forward_hook(put_images)
    try:
        yield
    finally:
        handle.remove()


@dataclass(frozen=True)
class Axes:
    """The positions of a request whose prompt has images.

    Attributes:
        image_positions: int64 [3, n], the positions of the first n tokens, up to the end of the last image.
        delta: The position of any later token, on every axis, less its column.
        embeddings: What stands in place of the embeddings of the tokens of images; None for these.
    """

    image_positions: Tensor
    delta: int
    embeddings: ImageEmbeddings | None = None

    def of_text(self, columns: Tensor) -> Tensor:
        """The positions int64 [3, R] of rows behind all images, as the nodes of trees are."""
        return (columns + self.delta).expand(3, -1)

    def of_prompt(self, columns: Tensor) -> Tensor:
        """The positions int64 [3, R] of any rows."""
        last = self.image_positions.shape[1]
        image_positions = self.image_positions.to(columns.device)[:, columns.clamp(max=last - 1)]
        return torch.where(columns < last, image_positions, self.of_text(columns))

    def images_at(self, columns: Tensor) -> ImageRows | None:
        """The embeddings of the images whose tokens stand at `columns` int64 [R]; None where no row has one."""
        return None if self.embeddings is None else self.embeddings.of_columns(columns)


def axes_of(model: Model) -> Axes | None:
    """The positions of a request on `model`; None where every token has the number of its column on all axes."""
    if not isinstance(model, Seeded) or not model.images:
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
    embeddings = embeddings_of(model.images, model.architecture.hidden_size)
    return Axes(torch.cat(parts, dim=1), following - end, embeddings)


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
