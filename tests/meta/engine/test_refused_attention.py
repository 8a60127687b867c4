"""The engine declines, before any run and by name, models that ask attention for what it does not compute."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from specverify.backends.base import Unsupported
from specverify.backends.compositions import open_cpu
from specverify.backends.engine.attention.eager import eager
from specverify.backends.engine.attention.interface import INERT, INERT_VALUES, through_interface
from specverify.backends.engine.kv.base import CacheSpec
from specverify.backends.engine.kv.branch import Branch
from specverify.backends.engine.kv.lanes import BatchCache
from specverify.backends.engine.model.models import ModelCache
from specverify.backends.engine.reach import Reach
from specverify.reference.case import Case
from specverify.reference.draft import Scripted
from specverify.reference.oracle.checkpoint import identify
from specverify.reference.sampling import Stops
from specverify.reference.tree import Tree
from tests.checkpoints import save_checkpoint

REFUSED = {
    "glm4-moe-lite": r"Glm4MoeLiteForCausalLM: layer 0 caches keys of shape .* latent attention \(MLA\)",
    "bloom": r"BloomForCausalLM: this engine cannot run it",
    "mamba": r"MambaForCausalLM: (layers of kind linear_attention|this engine cannot run it)",
}


def case_of(folder: Path, dtype: str = "float32") -> Case:
    tree = Tree((0, 0, 0, 1, 2), (3, 5, 7, 5, 11))
    model = identify(folder, understood=False)
    return Case(model, (1, 2, 3, 4, 9, 3), Scripted((tree,)), stops=Stops(3), steps=1, dtype=dtype)


@pytest.mark.parametrize("family", REFUSED)
def test_a_model_that_is_not_computed_is_declined_in_one_line(family: str, tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=REFUSED[family]) as error:
        open_cpu().run(case_of(save_checkpoint(family, tmp_path)))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("family", ["mistral", "mixtral", "qwen3-moe", "gpt-oss", "deepseek-v3"])
def test_a_model_that_is_computed_is_not_declined(family: str, tmp_path: Path) -> None:
    assert len(open_cpu().run(case_of(save_checkpoint(family, tmp_path))).output) >= 1


def test_a_refusal_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint of real size takes long to load: twenty prompts must not load it twenty times to be declined."""
    shelf, model = ModelCache("cpu"), identify(save_checkpoint("glm4-moe-lite", tmp_path), understood=False)
    with pytest.raises(Unsupported) as first:
        shelf.open(model, "float32")
    monkeypatch.setattr(
        "specverify.backends.engine.model.models.from_disk", lambda model, dtype: pytest.fail("loaded again")
    )
    with pytest.raises(Unsupported, match=re.escape(str(first.value))):
        shelf.open(model, "float32")


class Attention(nn.Module):
    layer_idx = 0


def call_attention(mask: Any = None, window: int = 0, **named: Any) -> Tensor:
    """The engine's attention on two rows, called as transformers calls it."""
    query = torch.randn(1, 2, 2, 4, generator=torch.Generator().manual_seed(3))
    room = CacheSpec((Reach(window),), 2, 4, 2, 2, torch.device("cpu"), torch.float32)
    cache = Branch(room, "path")
    cache.open(2)
    visible = torch.ones(2, 2, dtype=torch.bool).tril()[None, None] if mask is None else mask
    travelling: dict[str, Any] = {"attend": eager, "lanes": BatchCache([cache], [2]), "reaches": [Reach(window)]}
    return through_interface(Attention(), query, query, query, visible, 0.5, **travelling, **named)[0]


@pytest.mark.parametrize(
    "named",
    [
        {"sinks": torch.zeros(2)},
        {"position_bias": torch.zeros(1, 2, 2, 2)},
        {"alibi": torch.zeros(2)},
        {"block_indices": torch.zeros(2, dtype=torch.int64)},
        {"dropout": 0.1},
        {"output_attentions": True},
        {"something_new": 1},
        {"something_new": False},
    ],
    ids=lambda named: ",".join(f"{key}={value}" for key, value in named.items() if not isinstance(value, Tensor)),
)
def test_an_argument_that_is_not_computed_is_refused_by_name(named: dict[str, Any]) -> None:
    with pytest.raises(Unsupported, match=f"Attention hands the argument {next(iter(named))}"):
        call_attention(**named)


def test_arguments_that_are_inert_change_no_bit() -> None:
    plain = call_attention()
    for name in INERT:
        arguments: dict[str, Any] = {name: torch.arange(2) if name == "position_ids" else True}
        assert torch.equal(call_attention(**arguments), plain), name
    for name, (value, _) in INERT_VALUES.items():
        assert torch.equal(call_attention(**{name: value}), plain), name
    assert torch.equal(call_attention(s_aux=None, softcap=None, something_new=None), plain)


def test_a_mask_that_the_model_has_added_to_is_refused() -> None:
    with pytest.raises(Unsupported, match=r"attention_mask of torch\.float32"):
        call_attention(mask=torch.zeros(1, 1, 2, 2))


def test_a_window_other_than_that_of_the_masks_is_refused() -> None:
    assert torch.equal(call_attention(window=3, sliding_window=3), call_attention())
    for asked_window, mask_window in ((3, 0), (None, 3), (4, 3)):
        with pytest.raises(Unsupported, match=f"sliding_window of {asked_window}"):
            call_attention(window=mask_window, sliding_window=asked_window)
