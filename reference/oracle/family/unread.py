"""Model types that the oracle does not compute, each with the reason.

`specverify list families` shows them, and so does the refusal of a checkpoint.
"""

LAYER_NORM = "its norms subtract the mean (LayerNorm)"
STATE = "its layers have a recurrent state"
BIAS_BY_DISTANCE = "its attention adds a bias by distance to the scores (ALiBi)"

UNREAD: dict[str, str] = {
    "llama4": "it has a vision tower; the text model alone has the model_type llama4_text",
    "gemma3": "it has a vision tower; the text model alone has the model_type gemma3_text",
    "gemma3n": "its layers share keys and values, and embeddings enter each layer",
    "starcoder2": f"{LAYER_NORM}, and its feed-forward block has no gate",
    "cohere": f"{LAYER_NORM}, and attention and feed-forward block run side by side",
    "nemotron": f"{LAYER_NORM}, and its feed-forward block squares a ReLU",
    "phi": f"{LAYER_NORM}, and attention and feed-forward block run side by side",
    "stablelm": LAYER_NORM,
    "gpt2": f"{LAYER_NORM}, and positions are embedded",
    "gpt_neox": f"{LAYER_NORM}, and attention and feed-forward block run side by side",
    "opt": f"{LAYER_NORM}, and positions are embedded",
    "bloom": BIAS_BY_DISTANCE,
    "mpt": BIAS_BY_DISTANCE,
    "falcon": f"{LAYER_NORM}, and in some checkpoints {BIAS_BY_DISTANCE.removeprefix('its ')}",
    "mamba": STATE,
    "mamba2": STATE,
    "jamba": STATE,
    "falcon_mamba": STATE,
    "bamba": STATE,
    "nemotron_h": f"{STATE}, and others a feed-forward block alone",
    "kimi_linear": f"{STATE} (Kimi delta attention)",
    "recurrent_gemma": STATE,
    "rwkv": STATE,
    "xlstm": STATE,
    "gemma4": "it has towers of other modalities; the text model alone has the model_type gemma4_text",
}
"""The value of `model_type`, and the reason, as the end of a sentence on the model."""
