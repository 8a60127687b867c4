"""Every field of a head's config.json: read, without effect, or refused at any value but one.

Heads are computed by one set of formulas. A field by which transformers, vLLM, SGLang or speculators would compute
another one must not be passed over, since the engine under test and the oracle share the reading of these files.
"""

from collections.abc import Collection, Mapping
from typing import Any

from specverify.reference.files.fields import Fields, quote_value

READ = {
    "attention_bias", "bias", "draft_vocab_size", "eagle_aux_hidden_state_layer_ids", "fc_norm", "fusion_bias",
    "head_dim", "hidden_act", "hidden_size", "intermediate_size", "layernorms", "medusa_fc_bias", "medusa_num_heads",
    "medusa_num_layers", "no_rope_layers", "norm_before_fc", "norm_before_residual", "norm_output",
    "num_attention_heads", "num_experts_per_tok", "num_heads", "num_hidden_layers", "num_key_value_heads",
    "num_local_experts", "num_nextn_predict_layers", "original_lm_head", "parallel_drafting", "qkv_bias",
    "quantization_config", "rms_norm_eps", "rope_parameters", "rope_scaling", "rope_theta", "speculators_model_type",
    "target_hidden_size", "tie_word_embeddings", "truncated_vocab_size", "use_aux_hidden_state", "vocab_size",
    "partial_rotary_factor", "logit_scale", "mlp_bias", "use_sliding_window",
}  # fmt: skip
"""Fields that the readers of this folder read."""

NESTED = {"transformer_layer_config", "model", "eagle_config"}
"""Objects whose fields count as those of the file."""

NEUTRAL: dict[str, Any] = {
    # windows, chunks and what attention sees
    "attention_chunk_size": None, "is_causal": True, "use_bidirectional_attention": False, "attention_sink": False,
    # norms and caps
    "use_qk_norm": False, "qk_norm": False, "qk_layernorm": False, "query_key_norm": False, "clip_qkv": None,
    "attn_logit_softcapping": None, "final_logit_softcapping": None, "query_pre_attn_scalar": None,
    # factors
    "embedding_multiplier": 1.0, "residual_multiplier": 1.0, "attention_multiplier": None, "logits_scaling": 1.0,
    "lm_head_multiplier": 1.0, "key_multiplier": 1.0, "attention_in_multiplier": 1.0, "attention_out_multiplier": 1.0,
    "scale_emb": 1, "scale_depth": None, "dim_model_base": None, "embedding_scale": None, "normalize_embedding": False,
    "attn_temperature_tuning": False, "floor_scale": None, "attn_scale": None, "mup": None, "rope_interleave": False,
    # experts, latent attention and recurrent state
    "num_experts": 0, "n_routed_experts": 0, "n_shared_experts": 0, "moe_intermediate_size": None,
    "shared_expert_intermediate_size": None, "first_k_dense_replace": None, "moe_layer_freq": None,
    "kv_lora_rank": None, "q_lora_rank": None, "qk_rope_head_dim": None, "qk_nope_head_dim": None, "v_head_dim": None,
    "linear_num_key_heads": None, "linear_num_value_heads": None, "full_attention_interval": None,
    # rotary embedding
    "mrope_section": None, "rope_local_base_freq": None, "original_max_position_embeddings": None, "rotary_pct": 1.0,
    "no_rope_layer_interval": None, "position_embedding_type": "absolute",
    # of heads with further parts
    "draft_hidden_size": None, "num_aux_hidden_states": None, "medusa_choices": None, "num_ctx_layers": None,
}  # fmt: skip
"""Fields that are refused at any value but this one and null; `layer_types` and `sliding_window` have checks apart."""

BLOCK_DRAFTS = {
    "dflash_config": "DFlash, DSpark or Domino", "block_size": "DFlash or DSpark", "mask_token_id": "DFlash or P-EAGLE",
    "target_layer_ids": "DFlash", "markov_rank": "DSpark", "use_markov_head": "DSpark", "sample_from_anchor": "DSpark",
    "pard_token": "PARD or P-EAGLE", "ptd_token_id": "P-EAGLE", "k_train": "P-EAGLE", "parallel_drafting": "P-EAGLE",
}  # fmt: skip
"""Fields of drafts that propose a block of tokens at once, each with the names of such drafts."""

BLOCK_CLASSES = ("DFlash", "DSpark", "Domino", "PEagle", "Pard")
"""Parts of names of classes of such drafts, which `architectures` may be the only field to tell."""

OF_PARALLEL = ("mask_token_id", "pard_token", "ptd_token_id", "parallel_drafting")
"""Fields of P-EAGLE that the reader of EAGLE-3 reads: three names of the mask token, and the word that it is used."""

READ_OF_BLOCKS = {
    "attention_bias", "attention_mode", "aux_hidden_state_layer_ids", "block_size", "confidence_head_with_markov",
    "conv_group_size", "conv_kernel_size", "dflash_config", "draft_vocab_size", "enable_confidence_head", "head_dim",
    "hidden_act", "hidden_size", "intermediate_size", "is_causal", "layer_types", "logit_scale", "markov_head_type",
    "markov_rank", "mask_token_id", "mlp_bias", "num_attention_heads", "num_hidden_layers", "num_key_value_heads",
    "num_target_layers", "partial_rotary_factor", "projector_type", "quantization_config", "rms_norm_eps",
    "rope_parameters", "rope_scaling", "rope_theta", "sample_from_anchor", "selector_rank", "selector_top_k",
    "sliding_window", "speculators_model_type", "target_hidden_size", "target_layer_ids", "tie_word_embeddings",
    "use_sliding_window", "vocab_size",
}  # fmt: skip
"""Fields that the reader of DFlash, DFlash2 and DSpark reads."""

NEUTRAL_OF_BLOCKS: dict[str, Any] = {
    "input_embedding_scale": 1.0, "output_multiplier": 1.0, "shift_label": False, "qkv_bias": False, "bias": False,
    "use_qk_norm": True, "parallel_drafting": False,
}  # fmt: skip
"""Fields of such drafts that are refused at any value but this one and null, before those of NEUTRAL."""

INERT_OF_BLOCKS = {
    "auf", "ce_loss_alpha", "confidence_head_alpha", "emb_dim", "gru_hidden_dim", "l1_loss_alpha",
    "lambda_base_decay_ratio", "lambda_base_start", "loss_decay_gamma", "num_anchors", "pure_draft_prefix_len",
    "sliding_window_non_causal",
}  # fmt: skip
"""Fields of training, of Domino's own parts, and of windows, which speculators' files are not read with."""

OTHER_BLOCKS = {
    "use_markov_head": "an early DSpark",
}  # fmt: skip
"""Fields of drafts of blocks with further parts, each with the draft's name."""

INERT = {
    "_name_or_path", "_attn_implementation_autoset", "_commit_hash", "add_cross_attention", "architectures",
    "attention_dropout", "attn_pdrop", "auto_map", "bad_words_ids", "base_model_ep_plan", "base_model_name_or_path",
    "begin_suppress_tokens", "bos_token_id", "chunk_size_feed_forward", "cross_attention_hidden_size",
    "decoder_sparse_step", "decoder_start_token_id", "diversity_penalty", "do_sample", "dtype", "early_stopping",
    "embd_pdrop",
    "embed_requires_grad", "encoder_no_repeat_ngram_size", "eos_token_id", "exponential_decay_length_penalty",
    "finetuning_task", "forced_bos_token_id", "forced_eos_token_id", "gradient_checkpointing",
    "has_no_defaults_at_init", "hidden_dropout", "id2label", "ignore_index", "inference", "initializer_range",
    "is_decoder", "is_encoder_decoder", "label2id", "length_penalty", "license", "max_length",
    "max_position_embeddings",
    "max_sequence_length", "max_window_layers", "medusa_model_type", "min_length", "model_max_length", "model_type",
    "name_or_path", "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_return_sequences",
    "output_attentions", "output_hidden_states", "output_router_logits", "output_scores", "pad_token_id", "prefix",
    "pretraining_tp", "problem_type", "pruned_heads", "remove_invalid_values", "repetition_penalty", "resid_pdrop",
    "residual_dropout", "return_dict", "return_dict_in_generate", "router_aux_loss_coef", "router_jitter_noise",
    "save_model_type", "sep_token_id", "speculators_config", "speculators_version", "suppress_tokens",
    "target_model_type", "target_model_name_or_path", "task_specific_params", "temperature", "tf_legacy_loss",
    "tie_encoder_decoder", "tokenizer_class", "top_k", "top_p", "torch_dtype", "torchscript", "train_config",
    "specverify_training", "transformers_version", "typical_p", "unsloth_version", "use_bfloat16", "use_cache",
    "version",
}  # fmt: skip
"""Fields of a file, of training and of generation, which change no row of a head."""


def check_known_block(fields: Fields) -> None:
    """Refuse a draft of blocks with a field that is not known, or by which it would be computed in another way.

    Raises:
        UnreadableCheckpoint: with the field.
    """
    options = fields.get("dflash_config")
    if options is not None and not isinstance(options, dict):
        raise fields.refuse(f"dflash_config is {quote_value(options)}, not an object; correct it")
    for name, kind in OTHER_BLOCKS.items():
        if fields.get(name):
            raise fields.refuse(
                f"{name} is {quote_value(fields.get(name))}: {kind}, which is not computed here (DFlash, DFlash2 and "
                "DSpark are)"
            )
    if fields.get("projector_type") not in (None, "dflash", "dspark"):
        raise fields.refuse(
            f"projector_type is {quote_value(fields.get('projector_type'))}, which is not computed here (dflash and "
            "dspark are)"
        )
    stated = fields.get("architectures")
    for architecture in stated if isinstance(stated, list) else [stated]:
        lower_name = str(architecture).lower()
        if any(part in lower_name for part in ("domino", "peagle", "pard")):
            raise fields.refuse(
                f"architectures names {quote_value(architecture)}, which is not computed here (DFlash, DFlash2 and "
                "DSpark are)"
            )
    check_neutral(fields, {**NEUTRAL, **NEUTRAL_OF_BLOCKS}, READ_OF_BLOCKS)
    known = READ_OF_BLOCKS | INERT_OF_BLOCKS | INERT | NESTED | NEUTRAL.keys() | NEUTRAL_OF_BLOCKS.keys()
    _check_no_other(fields, known | OTHER_BLOCKS.keys())


def check_known(fields: Fields, is_parallel: bool = False) -> None:
    """Refuse a head with a field that is not known, or by which it would be computed in another way.

    `is_parallel` tells that the head is one of P-EAGLE, whose own fields are read.

    Raises:
        UnreadableCheckpoint: with the field.
    """
    for name, kinds in BLOCK_DRAFTS.items():
        if fields.get(name) and not (is_parallel and name in OF_PARALLEL):
            raise fields.refuse(
                f"{name} is {quote_value(fields.get(name))}: a draft that proposes a block at once ({kinds}), which is "
                "not computed here"
            )
    stated = fields.get("architectures")
    for architecture in stated if isinstance(stated, list) else [stated]:
        names = [name.lower() for name in BLOCK_CLASSES if not (is_parallel and name == "PEagle")]
        if any(name in str(architecture).lower() for name in names):
            raise fields.refuse(
                f"architectures names {quote_value(architecture)}, a draft that proposes a block at once, which is not "
                "computed here"
            )
    check_plain_formulas(fields)
    _check_no_other(fields, BLOCK_DRAFTS.keys() | READ | INERT | NEUTRAL.keys() | NESTED | set(WINDOWS))


def _check_no_other(fields: Fields, known: set[str]) -> None:
    """Refuse a null where a value must be stated, and a field that is not `known`."""
    for name in STATED:
        if name in fields.content and fields.content[name] is None:
            raise fields.refuse(f"field {name} is null; state its value")
    if fields.get("max_position_embeddings") is not None:
        fields.integer("max_position_embeddings")
    for name, value in fields.content.items():
        if name not in known and value is not None:
            raise fields.refuse(
                f"{name} is {quote_value(value)}, a field that heads are not known to have; remove it if it changes "
                "no number"
            )


STATED = (
    "hidden_size", "num_hidden_layers", "vocab_size", "max_position_embeddings", "rms_norm_eps", "rope_theta",
    "num_heads", "medusa_num_heads", "medusa_num_layers",
)  # fmt: skip
"""Fields that may be absent and not null, for which neither transformers' Llama nor Medusa's class has a value."""

WINDOWS = ("layer_types", "sliding_window")
"""The fields that give layers a sliding window."""


def check_plain_formulas(fields: Fields) -> None:
    """Refuse a config.json that asks for another formula of a decoder layer than Llama's.

    Raises:
        UnreadableCheckpoint: with the field.
    """
    check_neutral(fields, NEUTRAL)
    types = fields.get("layer_types")
    if types is not None and (not isinstance(types, list) or any(kind != "full_attention" for kind in types)):
        raise fields.refuse(f"layer_types is {quote_value(types)}: layers of heads see all rows above them")
    if types is not None and len(types) != fields.integer("num_hidden_layers", 1):
        raise fields.refuse(f"layer_types has {len(types)} entries, and num_hidden_layers says otherwise; correct it")
    # transformers reads the window where `use_sliding_window` is true, and other readers wherever it is stated.
    if fields.get("sliding_window") is not None and fields.get("use_sliding_window") is not False:
        raise fields.refuse("sliding_window is stated: layers of heads have none; set it to null")


def check_neutral(fields: Fields, neutral: Mapping[str, Any], read: Collection[str] = ()) -> None:
    """Refuse a field of `neutral` at any value but its own and null, unless it is `read`.

    Raises:
        UnreadableCheckpoint: with the field.
    """
    for name, plain in neutral.items():
        value = fields.get(name)
        if name in read or value is None or value in ([], {}):
            continue
        if value != plain or isinstance(value, bool) != isinstance(plain, bool):
            raise fields.refuse(f"{name} is {quote_value(value)}; heads are computed without it")
