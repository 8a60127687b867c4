"""Image: a block of a prompt that is numbered as a grid, and may have embeddings of its own.

This is M-RoPE (arXiv 2409.12191). The token of frame f, row r and column c of a block has the positions p + f, p + r
and p + c on the axes time, height and width, where p is the position that a text token would have there. Text is
numbered alike on all axes, and goes on behind a block one past the largest number in it. From there on a token's
position is its column plus a constant, the rope delta.

In engines the tokens of a block are placeholders: the output of a vision tower stands in place of their embeddings.
Rows of such embeddings are weights of the case, made from the seed of the block for each width that reads them
(`specverify.reference.weights.image_embeddings`): a draft model with a vision tower of its own has rows of its own
width.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from specverify.reference.malformed import Malformed
from specverify.reference.rules import OMIT_DEFAULT


@dataclass(frozen=True)
class Image:
    """A block of `frames` * `height` * `width` tokens, from the token `start` of the prompt on.

    Attributes:
        seed: The seed of the embeddings that stand in place of those of its tokens; 0 for the tokens' own.
    """

    start: int
    frames: int
    height: int
    width: int
    seed: int = field(default=0, metadata=OMIT_DEFAULT)

    def __post_init__(self) -> None:
        if self.start < 0:
            raise Malformed("start", f"{self.start} is negative")
        for name in ("frames", "height", "width"):
            if getattr(self, name) < 1:
                raise Malformed(name, f"{getattr(self, name)} is not a size")
        if self.seed < 0:
            raise Malformed("seed", f"{self.seed}: seeds are not negative")

    @property
    def end(self) -> int:
        """The number of the token behind the block."""
        return self.start + self.frames * self.height * self.width


Images = tuple[Image, ...]


def check_images(images: Images, family: str, three_axes: bool) -> None:
    """Raise Malformed for blocks of a family with one axis, and for blocks that overlap or are not in order."""
    if images and not three_axes:
        raise Malformed("images", f"{family} numbers its tokens on one axis")
    for i, (image, next_image) in enumerate(pairwise(images)):
        if next_image.start < image.end:
            raise Malformed(
                f"images[{i + 1}]", f"begins at token {next_image.start}, and the one before ends at {image.end}"
            )


def check_inside(images: Images, prompt: Sequence[int]) -> None:
    """Raise Malformed for a block that does not end before the last token of `prompt`: the pending root is text."""
    for i, image in enumerate(images):
        if image.end >= len(prompt):
            raise Malformed(
                f"images[{i}]", f"ends at token {image.end}; text must follow, and the prompt has {len(prompt)} tokens"
            )
