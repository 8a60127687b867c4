"""Everything that a model computes with goes to its device, and no narrow model holds float64."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from specverify.backends.base import Unsupported
from specverify.backends.engine.model.models import ModelCache
from specverify.properties.strategies.models import GALLERY
from specverify.reference.architecture import Seeded
from specverify.reference.family import FAMILIES
from tests.drawn_families import RARE, draw_architecture

ARCHITECTURES = {arch.family: arch for arch in GALLERY} | {family: draw_architecture(family, 0) for family in RARE}


def tensors_of(network: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors in the attributes of modules, and in lists and dicts there, with their names."""
    for name, module in network.named_modules():
        for attribute, value in vars(module).items():
            yield from ((f"{name}.{attribute}", tensor) for tensor in tensors_within(value))


def tensors_elsewhere(network: nn.Module, device: str) -> Iterator[str]:
    """The names of tensors on another device."""
    return (name for name, tensor in tensors_of(network) if tensor.device.type != device)


def tensors_within(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for entry in value.values():
            yield from tensors_within(entry)
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from tensors_within(entry)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("family", ARCHITECTURES)
def test_a_model_leaves_no_tensor_behind(family: str, dtype: str) -> None:
    try:
        model = ModelCache("cpu").open(Seeded(ARCHITECTURES[family], 0), dtype)
    except Unsupported as why:
        pytest.skip(f"{family} in {dtype}: {why}")
    wide = [name for name, tensor in tensors_of(model.model) if tensor.dtype == torch.float64]
    assert dtype == "float64" or wide == [], "a device may have no float64"
    assert list(tensors_elsewhere(model.model.to("meta"), "meta")) == []


def test_every_family_is_asked() -> None:
    assert {*ARCHITECTURES} == {*FAMILIES}


def test_a_tensor_left_behind_is_seen() -> None:
    module = nn.Linear(2, 2)
    module.bias_of_router = {"scores": [torch.zeros(2)]}  # type: ignore[assignment]
    assert list(tensors_elsewhere(module.to("meta"), "meta")) == [".bias_of_router"]
