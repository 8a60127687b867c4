"""transformers' `generate` with MTP modules, and with blocks of DFlash.

Both drafts read the target's hidden states. No released head fits the small targets of cases, so that heads are made
here, for each target. An MTP module is the target's last layer behind its embedding, a good draft where the target has
one layer. A DFlash draft has random weights, which greedy decoding hardly ever accepts, and sampling as far as the two
laws overlap. transformers 5.23 fails after a prompt of fewer tokens than there are modules (`tests/strangers/found`).
"""

from collections.abc import Sequence
from copy import deepcopy
from functools import lru_cache
from typing import Any
from unittest.mock import patch

import torch
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel
from transformers.modeling_layers import MtpModel

from specverify.backends.adapt import Generated, blackbox
from specverify.backends.adapt.engines.hf_generate import generate, processing
from specverify.backends.adapt.models import OPEN_MODELS

MODULES = 2
"""MTP modules of a target, and so the tokens of a round."""

BLOCK = 4
"""Tokens of a DFlash block: the pending root and three drafts."""

FROM_STATE = 0.05
"""Scale of the random weights through which an MTP module reads the hidden state, beside the embedding's 1."""

FAMILIES = ("llama", "qwen2", "qwen3")
"""Families whose layers transformers can make MTP modules of."""


def mtp(
    prompt_ids: list[int], max_new_tokens: int, model: Any, temperature: float = 0.0, top_k: int = 0,
    top_p: float = 1.0, min_p: float = 0.0, stops: Sequence[int] = (),
) -> Generated:  # fmt: skip
    """Assisted generation with MTP modules, which `generate` would read from the target's checkpoint."""
    modules = _modules_for(model)
    options = {"use_mtp": True}
    with patch.object(MtpModel, "from_pretrained", lambda *_, **__: modules):
        return generate(model, prompt_ids, max_new_tokens, processing(temperature, top_k, top_p, min_p), stops, options)


def dflash(
    prompt_ids: list[int], max_new_tokens: int, model: Any, temperature: float = 0.0, top_k: int = 0,
    top_p: float = 1.0, min_p: float = 0.0, stops: Sequence[int] = (),
) -> Generated:  # fmt: skip
    """Assisted generation with blocks of a DFlash draft."""
    options = {"assistant_model": _blocks_for(model), "speculation_type": "dflash"}
    return generate(model, prompt_ids, max_new_tokens, processing(temperature, top_k, top_p, min_p), stops, options)


@lru_cache(maxsize=OPEN_MODELS)
def _modules_for(model: Any) -> Any:
    """MODULES modules, each the target's last layer, whose input is the embedding with a little of the state."""
    config = model.config
    config.num_mtp_layers = MODULES
    if getattr(config, "layer_types", None) is not None:
        config.mtp_layer_types = [config.layer_types[-1]] * MODULES
    body = model.get_decoder()
    width = config.hidden_size
    rms = model.get_input_embeddings().weight.square().mean(-1).sqrt().mean()
    # The draws of a request stay as its seed made them.
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        # A model that is made draws its weights, the embedding and the head that it shares with the target among them.
        modules = MtpModel(deepcopy(model), MODULES).to(model.dtype).eval().requires_grad_(False)
        modules.tie_with_main_model(model)
        for module in modules.layers:
            module.mtp_block.load_state_dict(body.layers[-1].state_dict())
            module.post_norm.load_state_dict(body.norm.state_dict())
            # Columns of the normed embedding, of scale 1, before the columns of the state.
            module.eh_proj.weight[:, :width] = rms * torch.eye(width)
            module.eh_proj.weight[:, width:] = FROM_STATE * rms * torch.randn(width, width) / width**0.5
    return modules


@lru_cache(maxsize=OPEN_MODELS)
def _blocks_for(model: Any) -> Any:
    """A DFlash draft of one layer that reads the target's last layer."""
    target = model.config
    config = MuseGlimmerAssistantConfig(
        hidden_size=target.hidden_size,
        intermediate_size=2 * target.hidden_size,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=target.max_position_embeddings,
        layer_types=["full_attention"],
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        block_size=BLOCK,
        mask_token_id=target.vocab_size - 1,
        target_layer_ids=[target.num_hidden_layers - 1],
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return MuseGlimmerAssistantModel(config).to(model.dtype).eval().requires_grad_(False)


open_mtp = blackbox(mtp, name="hf-generate-mtp", families=FAMILIES, least_window=0, least_prompt=MODULES)
open_dflash = blackbox(dflash, name="hf-generate-dflash", families=FAMILIES, least_window=0)
