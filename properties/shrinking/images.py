"""Smaller images of a prompt, and their weight in the size of a case."""

from collections.abc import Iterator
from dataclasses import replace

from specverify.reference.architecture import Model, Seeded
from specverify.reference.images import Images

SIDES = ("frames", "height", "width")
"""The sizes of a block."""


def weight_of(images: Images) -> int:
    """The weight of `images`: 1 for each block and 1 for each token of it."""
    return sum(1 + image.end - image.start for image in images)


def fewer_images(images: Images) -> Iterator[Images]:
    """`images` without one block, and with one side of one block cut by one."""
    for index, image in enumerate(images):
        yield (*images[:index], *images[index + 1 :])
        for side in SIDES:
            if getattr(image, side) > 1:
                yield (*images[:index], replace(image, **{side: getattr(image, side) - 1}), *images[index + 1 :])


def plainer_models(model: Model) -> Iterator[Seeded]:
    """`model` without its adapter, and with fewer images."""
    if isinstance(model, Seeded) and model.adapter is not None:
        yield replace(model, adapter=None)
    if isinstance(model, Seeded):
        yield from (replace(model, images=images) for images in fewer_images(model.images))
