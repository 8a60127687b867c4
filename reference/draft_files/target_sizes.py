"""The sizes of a target on which a head depends."""

from dataclasses import dataclass
from pathlib import Path

from specverify.reference.architecture import Model, Seeded
from specverify.reference.files.fields import Fields, UnreadableCheckpoint, read_json
from specverify.reference.files.text_model import sizes_content


@dataclass(frozen=True)
class TargetSizes:
    """The sizes of a target.

    Attributes:
        name: The target in messages.
        hidden_size: Length of a hidden state.
        layers: Number of decoder layers.
        vocab_size: Number of token ids that the target scores.
        digest: The digest of the target's files; empty for a built-in target.
    """

    name: str
    hidden_size: int
    layers: int
    vocab_size: int
    digest: str = ""

    def check_equal(self, fields: Fields, name: str, size: int) -> None:
        """Refuse a head whose config.json states a value other than `size` in the field `name`.

        Raises:
            UnreadableCheckpoint: with both sizes.
        """
        if fields.get(name) is not None and fields.size(name) != size:
            raise fields.refuse(
                f"{name} is {fields.size(name)}, and {self.name} has {size}: the head of another target"
            )


def target_sizes(model: Model) -> TargetSizes:
    """The sizes of `model`; those of a checkpoint are read from its config.json.

    Raises:
        UnreadableCheckpoint: config.json is missing or lacks a size.
    """
    if isinstance(model, Seeded):
        arch = model.architecture
        return TargetSizes("the built-in target", arch.hidden_size, arch.layers, arch.vocab_size)
    file = Path(model.source) / "config.json"
    fields = Fields(file, sizes_content(read_json(file)), {})
    layers = fields.integer("num_hidden_layers")
    if layers < 1:
        raise UnreadableCheckpoint(f"{fields.where}: num_hidden_layers is {layers}; correct it")
    return TargetSizes(f"the target {model.source}", fields.size("hidden_size"), layers, model.vocab_size, model.digest)
