"""The check of partial rotary embedding, which turns a part of each head."""

from specverify.reference.family.base import ArchitectureFields
from specverify.reference.malformed import Malformed


def check_width(arch: ArchitectureFields) -> None:
    """Raise Malformed for a setting `rotary_dim` that is not an even number of dimensions of a head, nor 0 for all."""
    width = arch.setting("rotary_dim")
    if width % 2 or width >= arch.head_dim:
        raise Malformed("settings", f"rotary_dim of {width:g} is not even and less than the {arch.head_dim} of a head")
