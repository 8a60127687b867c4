"""The transformers model of a built-in.

The seeded weights take the place of every weight that transformers makes.
"""

from collections.abc import Sequence
from typing import Any

import torch
import transformers
from torch.overrides import TorchFunctionMode

from specverify.backends.base import Unsupported
from specverify.backends.engine.model.family import FAMILIES
from specverify.backends.engine.model.family.base import rope_of
from specverify.backends.engine.model.quantised import Dequantise, dequantise, quantise_state
from specverify.reference.architecture import Architecture, Seeded
from specverify.reference.weights import seeded_weights

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""The working dtypes of the engine by their names in a case."""


class Uninitialised(TorchFunctionMode):
    """Inside it the functions of `torch.nn.init` return their tensor as it is.

    On the meta device there is nothing to fill, and to find that out takes torch a third of the time of a model.
    """

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Call `func`, unless it is one of `torch.nn.init`."""
        arguments = kwargs or {}
        # Methods of C know no module.
        if getattr(func, "__module__", None) == torch.nn.init.__name__:
            return args[0] if args else arguments["tensor"]
        return func(*args, **arguments)


def config_of(arch: Architecture) -> Any:
    """The transformers config of a built-in model with the architecture `arch`."""
    family = FAMILIES.get(arch.family)
    if family is None:
        raise Unsupported(f"transformers {transformers.__version__} has no {arch.family}; a later release has")
    fields: dict[str, Any] = {
        "vocab_size": arch.vocab_size,
        "hidden_size": arch.hidden_size,
        "intermediate_size": arch.intermediate_size,
        "num_hidden_layers": arch.layers,
        "num_attention_heads": arch.heads,
        "num_key_value_heads": arch.kv_heads,
        "head_dim": arch.head_dim,
        "rms_norm_eps": arch.norm_eps,
        "max_position_embeddings": arch.max_positions,
        "tie_word_embeddings": arch.tied,
        "rope_parameters": rope_of(arch),
        # A built-in has no special tokens: the case alone says which tokens end the output.
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        **family.config_fields(arch),
    }
    try:
        config = family.config(**fields)
    except Exception as why:  # its validators raise classes of their own
        raise Unsupported(f"transformers refuses this {arch.family} config: {' '.join(str(why).split())}") from why
    # `score_cap` is no field of transformers: the engine passes it to attention for models whose class has no soft cap.
    config.score_cap = 0.0 if family.caps_scores else arch.score_cap
    return config


def built_in(model: Seeded, dtype: str, product: Dequantise = dequantise) -> Any:
    """Build the transformers model of a built-in; its weights are exact in every dtype, so casting rounds nothing.

    Quantised weights are those that `product` makes of numbers and scales, rounded to the dtype.

    Raises:
        Unsupported: if transformers' model of that family cannot have this architecture.
    """
    config = config_of(model.architecture)
    family = FAMILIES[model.architecture.family]
    # The seeded weights are assigned below: no memory is taken here, and no weight initialised.
    with torch.device("meta"), Uninitialised():
        network = family.model(config)
    rotary = type(network.model.rotary_emb)(config=config)  # its tables are in no state dict: made on a real device
    state = {name: torch.tensor(values, dtype=DTYPES[dtype]) for name, values in seeded_weights(model).items()}
    if model.quantised:
        state = quantise_state(state, model.quantised, product)
    state = family.arrange({family.rename(name): tensor for name, tensor in state.items()}, model.architecture)
    if model.architecture.tied:  # strict loading wants the head by its own name, although it is the embedding
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    try:
        network.load_state_dict(state, strict=True, assign=True)
    except RuntimeError as why:
        line = " ".join(str(why).split())[:200]
        raise Unsupported(f"transformers' {model.architecture.family} has no such biases or norms: {line}") from why
    network.model.rotary_emb = rotary
    family.complete(network)
    # A grouped product takes rows of a multiple of 16 bytes alone, and small models have others.
    loop_over_experts(network)
    return network


def loop_over_experts(network: Any) -> None:
    """Let a model with experts run the loop over experts of its own file, in place of one grouped product."""
    if hasattr(network.config, "_experts_implementation"):
        network.config._experts_implementation = "eager"


def batch_experts(network: Any) -> None:
    """Let a model that loops over experts multiply the matrices of all chosen experts in one batched product.

    The loop asks the device which experts were chosen, so that the host waits in every layer and no graph can be
    captured. The batched product copies the matrices of each row's experts: a cost of memory that grows with the rows.
    """
    if getattr(network.config, "_experts_implementation", None) == "eager":
        network.config._experts_implementation = "batched_mm"
