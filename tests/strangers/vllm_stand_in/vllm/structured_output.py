"""Grammars of requests: the words of a tokenizer, and masks along a chain of drafted tokens."""

from typing import Any

import torch
from transformers import AutoTokenizer

from specverify.backends.engine.guided.guide import Guide, masks, open_guide
from specverify.reference.grammar import Grammar
from specverify.reference.spelling import byte_letters
from specverify.reference.tree import Tree

from .exceptions import VLLMValidationError
from .faults import has_fault
from .sampling_params import SamplingParams


def words_of(checkpoint: str, size: int) -> tuple[str, ...]:
    """The bytes of each token of a byte-level tokenizer in hexadecimal digits; a special token has none."""
    tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint)
    byte_of, words = byte_letters(), [""] * size
    for piece, token in tokenizer.get_vocab().items():
        if token not in tokenizer.all_special_ids:
            words[token] = bytes(map(byte_of.__getitem__, piece)).hex()
    return tuple(words)


def guide_of(params: SamplingParams, checkpoint: str, size: int) -> Guide | None:
    """The position in the request's grammar; None without one."""
    language = params.structured_outputs
    if language is None:
        return None
    kinds = {"regex": language.regex, "ebnf": language.grammar, "json_schema": language.json}
    (kind, text), = ((kind, text) for kind, text in kinds.items() if text is not None)  # fmt: skip
    if has_fault("refuses-grammars"):
        raise VLLMValidationError(f"Failed to transform {kind}\ninto a grammar")
    return open_guide(Grammar(kind, text, words_of(checkpoint, size)), tuple(params.stop_token_ids))


def legal_prefix(guide: Guide, root: int, drafted: list[int]) -> list[int]:
    """The drafted tokens up to the first that is not legal."""
    chain = Tree((0, *range(len(drafted))), (root, *drafted))
    legal = masks(guide, chain, list(chain.token)).legal
    length = next((i for i, token in enumerate(drafted) if not legal[i, token]), len(drafted))
    return drafted[:length]


def mask_rows(guide: Guide, root: int, drafted: list[int], rows: torch.Tensor) -> torch.Tensor:
    """The logits [drafted + 1, V] of a chain with -inf for each token that is not legal; behind an end as they are."""
    chain = Tree((0, *range(len(drafted))), (root, *drafted))
    legal = masks(guide, chain, list(chain.token)).legal
    if has_fault("mask-of-the-first"):
        legal = legal[:1].expand_as(legal).clone()
    if has_fault("bonus-unmasked") and drafted:
        legal[-1] = True
    if has_fault("end-too-early"):
        legal[:, list(guide.ends)] = True
    return torch.where(legal | ~legal.any(-1, keepdim=True), rows, -torch.inf)


def advance(guide: Guide, chosen: list[int]) -> None:
    """Read the chosen tokens, of which all but the last were drafted."""
    for token in chosen[-1:] if has_fault("grammar-behind") else chosen:
        guide.accept_token(token)
