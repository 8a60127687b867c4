"""The generation settings and end tokens that a checkpoint's own files state.

A setting that the file leaves out is neutral here, as in vLLM; transformers has defaults of its own for some of them.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specverify.reference.files.fields import Fields, quote_value, read_json
from specverify.reference.files.text_model import NESTED

FILE = "generation_config.json"

BANNING = ("suppress_tokens", "bad_words_ids")
"""Settings that ban tokens always, and token sequences; a case holds both as `Sampling.bad_words`."""

READ = {
    "do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "min_new_tokens", *BANNING,
}  # fmt: skip
"""The settings that a case takes over."""

NEUTRAL_VALUES: dict[str, Any] = {
    "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "no_repeat_ngram_size": 0, "top_h": None,
    "encoder_repetition_penalty": 1.0, "encoder_no_repeat_ngram_size": 0, "num_beams": 1, "num_beam_groups": 1,
    "diversity_penalty": 0.0, "guidance_scale": 1.0, "min_length": 0, "num_return_sequences": 1, "penalty_alpha": 0.0,
    "token_healing": False, "begin_suppress_tokens": None, "sequence_bias": None, "forced_bos_token_id": None,
    "forced_eos_token_id": None, "forced_decoder_ids": None, "exponential_decay_length_penalty": None,
    "watermarking_config": None, "dola_layers": None, "constraints": None, "force_words_ids": None,
    "stop_strings": None, "max_time": None, "decoder_start_token_id": None,
}  # fmt: skip
"""Settings that no case can hold, each with the value at which it changes nothing; null changes nothing either."""

EMPTY_IS_NEUTRAL = {
    "begin_suppress_tokens", "sequence_bias", "forced_decoder_ids", "force_words_ids", "constraints", "stop_strings",
}  # fmt: skip
"""Settings of NEUTRAL_VALUES that an empty list or object leaves without effect."""

INERT = {
    # special tokens, of which `end_tokens` reads the one that ends a text
    "bos_token_id", "eos_token_id", "pad_token_id", "user_token_id", "assistant_token_id", "transformers_version",
    "_from_model_config", "trust_remote_code", "_commit_hash",
    # lengths, which --new-tokens sets
    "max_length", "max_new_tokens",
    # of beams alone
    "early_stopping", "length_penalty", "low_memory",
    # how to compute, how to speculate and what to return
    "use_cache", "cache_implementation", "cache_config", "max_cache_len", "return_legacy_cache", "compile_config",
    "disable_compile", "continuous_batching_config", "prefill_chunk_size", "output_attentions",
    "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate", "use_mtp", "is_assistant",
    "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold",
    "prompt_lookup_num_tokens", "max_matching_ngram_size", "assistant_early_exit", "assistant_lookbehind",
    "target_lookbehind", "assistant_ensemble_weight", "speculation_type",
    # they change no law of finite logits
    "renormalize_logits", "remove_invalid_values",
    # of the prompt's form (first Qwen and Baichuan releases)
    "chat_format", "max_window_size",
}  # fmt: skip
"""Settings that change no law of a token."""


@dataclass(frozen=True)
class GenerationSettings:
    """The stated settings, as the fields of `Sampling`; `temperature` is 0 where the file asks for greedy decoding."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    bad_words: tuple[tuple[int, ...], ...]
    min_tokens: int


def generation_settings(checkpoint: str | Path) -> GenerationSettings:
    """The settings of the checkpoint in this directory; greedy decoding unless `do_sample` is true.

    Raises:
        UnreadableCheckpoint: The file is missing or damaged, or asks for what no case can hold.
    """
    file = Path(checkpoint) / FILE
    fields = Fields(file, read_json(file), {})
    _refuse_others(fields)
    is_sampled = fields.flag("do_sample")
    _check_types(fields, is_sampled)
    return GenerationSettings(
        temperature=float(fields.number("temperature", 1.0)) if is_sampled else 0.0,
        top_k=fields.integer("top_k", 0) if is_sampled else 0,
        top_p=float(fields.number("top_p", 1.0)) if is_sampled else 1.0,
        min_p=float(fields.number("min_p", 0.0)) if is_sampled else 0.0,
        repetition_penalty=float(fields.number("repetition_penalty", 1.0)),
        presence_penalty=float(fields.number("presence_penalty", 0.0)),
        frequency_penalty=float(fields.number("frequency_penalty", 0.0)),
        bad_words=_bad_words(fields, end_tokens(checkpoint)),
        min_tokens=fields.integer("min_new_tokens", 0),
    )


def _refuse_others(fields: Fields) -> None:
    """Refuse a setting that may change a token and that no case can hold, and one that nobody here knows."""
    for name, value in fields.content.items():
        if name in READ or name in INERT or value is None:
            continue
        if name not in NEUTRAL_VALUES:
            raise fields.refuse(f"{name} is {quote_value(value)}, a setting that is not known here; remove it")
        neutral = NEUTRAL_VALUES[name]
        is_neutral_form = name in EMPTY_IS_NEUTRAL and value in ([], {})
        # In Python `false` equals 0, in JSON it is no number.
        if is_neutral_form or (value == neutral and isinstance(value, bool) == isinstance(neutral, bool)):
            continue
        raise fields.refuse(f"{name} is {quote_value(value)}, which no case can hold; remove it")


FLOATS = ("temperature", "repetition_penalty")
"""Settings that transformers takes as floats alone."""


def _check_types(fields: Fields, is_sampled: bool) -> None:
    """Refuse values over which transformers and vLLM fail or differ."""
    for name in FLOATS:
        value = fields.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value != 1:
            raise fields.refuse(f"{name} is {value}, which transformers takes as a float alone; write {value}.0")
    if is_sampled and fields.get("temperature") == 0:
        raise fields.refuse(
            "temperature is 0 beside do_sample true, which transformers refuses; set do_sample to false"
        )
    if not is_sampled and fields.get("top_k") is not None:
        fields.integer("top_k")
    if fields.get("use_cache") is not None:
        fields.flag("use_cache")


def _bad_words(fields: Fields, ends: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """The token sequences that may not be completed; an end token alone is never one, as in transformers."""
    suppressed, words = ([] if fields.get(name) is None else fields.get(name) for name in BANNING)
    if not isinstance(suppressed, list) or not all(map(_is_token, suppressed)):
        raise fields.refuse(f"suppress_tokens is {quote_value(suppressed)}, not a list of token ids; correct it")
    is_empty = fields.get("bad_words_ids") == []  # transformers refuses an empty list
    if is_empty or not isinstance(words, list) or not all(isinstance(word, list) and word for word in words):
        raise fields.refuse(f"bad_words_ids is {quote_value(words)}, not a list of lists of token ids; correct it")
    if not all(_is_token(token) for word in words for token in word):
        raise fields.refuse("bad_words_ids holds what is no token id; correct it")
    banned_words = [(token,) for token in suppressed]
    banned_words += [tuple(word) for word in words if len(word) > 1 or word[0] not in ends]
    return tuple(dict.fromkeys(banned_words))


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


FILES = ("generation_config.json", "config.json")
"""The files that may name end tokens; the first that does so counts, as in transformers' `generate`."""


def end_tokens(checkpoint: str | Path) -> tuple[int, ...]:
    """The token ids that end a text of the checkpoint in this directory, ascending.

    Engines that load the directory end there by themselves.

    Raises:
        UnreadableCheckpoint: One of FILES is no JSON object, or its field eos_token_id holds neither one whole number
            nor a list of them.
    """
    for file in (Path(checkpoint) / name for name in FILES):
        if not file.is_file():
            continue
        content = read_json(file)
        nested = content.get(NESTED)
        fields = Fields(file, content, {})
        stated = fields.get("eos_token_id")
        if stated is None and isinstance(nested, dict):
            stated = nested.get("eos_token_id")
        if stated is None:
            continue
        ids = stated if isinstance(stated, list) else [stated]
        if any(isinstance(token, bool) or not isinstance(token, int) for token in ids):
            raise fields.refuse(
                f"field eos_token_id is {quote_value(stated)}, not a token id or a list of them; correct it"
            )
        return tuple(sorted(set(ids)))
    return ()
