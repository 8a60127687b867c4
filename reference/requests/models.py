"""The model of one request of a session, with its adapter and its images."""

from dataclasses import replace

from specverify.reference.adapters.low_rank import Adapter
from specverify.reference.architecture import Model, Seeded
from specverify.reference.images.spans import Images
from specverify.reference.malformed import Malformed


def model_of_request(model: Model, adapter: Adapter | None, images: Images, text: tuple[int, ...]) -> Model:
    """`model` with this adapter, and with those of `images` that end before the last token of `text`.

    A fork's twin has a text that begins with its source's: its images are told by their places in that text.
    """
    images = tuple(image for image in images if image.end < len(text))
    if (model.adapter, model.images) == (adapter, images):
        return model
    if not isinstance(model, Seeded):
        raise Malformed("adapter", "only built-in models have adapters and images")
    return replace(model, adapter=adapter, images=images)


def marks(model: Model) -> object:
    """What beside tokens the keys and values of a request on `model` depend on; None for tokens alone."""
    return (model.adapter, model.images) if model.images else model.adapter
