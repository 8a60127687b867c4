"""The class `Engine`: drafted trees, verified by one coin a level over the target's own law."""

import os
from dataclasses import dataclass, field
from typing import Any

import torch

from specverify.backends.adapt.models import open_network
from tests.strangers.stand_in_heads import Eagle3
from tests.strangers.stand_in_parts import law_of, logits_behind, looked_up

from .srt.server_args import ServerArgs

ALL = 1 << 30
"""The top-k that keeps all tokens."""


def has_fault(name: str) -> bool:
    return os.environ.get("SGLANG_STAND_IN_FAULT") == name


@dataclass(kw_only=True)
class SamplingParams:
    max_new_tokens: int | None = 128
    stop_token_ids: list[int] | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = ALL
    ignore_eos: bool = False
    no_stop_trim: bool = False
    sampling_seed: int | None = None

    def __post_init__(self) -> None:
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}.")
        if self.top_k < 1 and self.top_k != -1:
            raise ValueError(f"top_k must be -1 (disable) or at least 1, got {self.top_k}.")
        assert self.ignore_eos
        assert self.no_stop_trim

    def law(self, logits: torch.Tensor) -> torch.Tensor:
        temperature = self.temperature ** (2 if has_fault("temperature-twice") else 1)
        return law_of(logits, temperature, max(self.top_k, 0) % ALL, self.top_p)


@dataclass
class Tree:
    """A drafted tree: node 0 is the text's last token."""

    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [0])

    def children(self, node: int) -> list[int]:
        return [child for child in range(1, len(self.tokens)) if self.parents[child] == node]

    def path(self, node: int) -> list[int]:
        """The tokens from below the root to a node."""
        return [] if node == 0 else [*self.path(self.parents[node]), self.tokens[node]]


@dataclass
class Answer:
    """A request's text so far, its counts, and the generator of its coins."""

    coins: torch.Generator
    tokens: list[int] = field(default_factory=list)
    rows: list[torch.Tensor] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)


def _length_alike(text: list[int], other: list[int]) -> int:
    alike = (place for place, (token, other_token) in enumerate(zip(text, other, strict=False)) if token != other_token)
    return next(alike, min(len(text), len(other)))


def _drawn(law: torch.Tensor, coins: torch.Generator) -> int:
    return int(torch.multinomial(law, 1, generator=coins))


class Engine:
    def __init__(self, **kwargs: Any) -> None:
        self.server_args = settings = ServerArgs(**kwargs)
        assert settings.skip_tokenizer_init
        self._network = open_network(settings.model_path)
        self._draft: Any = None
        if settings.speculative_algorithm == "EAGLE3":
            self._draft = Eagle3(str(settings.speculative_draft_model_path))
        elif settings.speculative_algorithm == "STANDALONE":
            self._draft = open_network(str(settings.speculative_draft_model_path))
        self._coins = torch.Generator().manual_seed(settings.random_seed or 0)
        self._kept_prompts: list[list[int]] = []
        self.is_shut_down = False

    def update_weights_from_disk(self, model_path: str, load_format: str | None = None) -> tuple[bool, str, int]:
        if has_fault("reload-refused"):
            return False, "Failed to update weights:\nshapes differ", 0
        self._kept_prompts = []
        if not has_fault("reloads-nothing"):
            self._network = open_network(model_path)
            self._draft = None if self._draft is None else open_network(model_path)  # the same weights for both
        return True, "Succeeded to update model weights.", 0

    def shutdown(self) -> None:
        self.is_shut_down = True

    @torch.no_grad()
    def generate(
        self,
        prompt: str | None = None,
        sampling_params: list[dict[str, Any]] | None = None,
        input_ids: list[list[int]] | None = None,
        return_logprob: bool = False,
    ) -> list[dict[str, Any]]:
        assert prompt is None
        assert input_ids
        assert sampling_params
        assert return_logprob
        settings = [SamplingParams(**parameters) for parameters in sampling_params]
        prompts = input_ids[::-1] if has_fault("answers-of-others") else input_ids
        answers = [self._answer(text, request) for text, request in zip(prompts, settings, strict=True)]
        return [self._facts(answer, request) for answer, request in zip(answers, settings, strict=True)]

    def _answer(self, prompt: list[int], settings: SamplingParams) -> Answer:
        seeded = self.server_args.enable_deterministic_inference and settings.sampling_seed is not None
        seed = settings.sampling_seed if seeded and not has_fault("seeds-unread") else None
        answer = Answer(self._coins if seed is None else torch.Generator().manual_seed(seed))
        prompt = self._with_kept_prefix(prompt)
        row = logits_behind(self._network, prompt)[-1]
        if not self._take(answer, settings, [_drawn(settings.law(row), answer.coins)], [row]):  # the prefill's token
            while self._verify(prompt, answer, settings):
                pass
        return answer

    def _with_kept_prefix(self, prompt: list[int]) -> list[int]:
        """The prompt as its rows have it, those of a kept prefix from an earlier prompt that begins alike."""
        if self.server_args.disable_radix_cache:
            return prompt
        matches = [_length_alike(prompt, kept) for kept in self._kept_prompts]
        rows = prompt
        if matches and has_fault("match-too-long"):
            kept, length = self._kept_prompts[matches.index(max(matches))], max(matches)
            rows = [*kept[: length + 1], *prompt[length + 1 :]][: len(prompt)] if length else prompt
        self._kept_prompts.append(prompt)
        return rows

    def _verify(self, prompt: list[int], answer: Answer, settings: SamplingParams) -> bool:
        """Draft a tree and verify it; whether the text goes on."""
        text = prompt + answer.tokens
        tree = self._tree(text)
        node, tokens, rows = 0, list[int](), list[torch.Tensor]()
        while True:
            row = logits_behind(self._network, text + tree.path(node))[-1]
            if has_fault("row-of-parent") and node:
                row = rows[-1]
            law = settings.law(row)
            rows.append(row)
            coin = float(torch.rand((), generator=answer.coins, dtype=torch.float64))
            if has_fault("coin-kept") and node:
                coin = 0.0
            chosen = None
            for child in tree.children(node):
                coin -= float(law[tree.tokens[child]])
                law[tree.tokens[child]] = 0.0
                if coin < 0:
                    chosen = child
                    break
            if chosen is None:
                if tree.children(node) and has_fault("residual-not-cut"):
                    law = settings.law(row)
                tokens.append(_drawn(law / law.sum(), answer.coins))
                break
            tokens.append(tree.tokens[chosen])
            node = chosen
        if len(tree.tokens) > 1:
            answer.accepted.append(len(tokens) - 1)
        return not self._take(answer, settings, tokens, rows)

    def _tree(self, text: list[int]) -> Tree:
        settings = self.server_args
        tree = Tree(text[-1:])
        if has_fault("draft-behind-under-overlap") and not settings.disable_overlap_schedule:
            text = text[:-1]  # the token of the step that still runs
        most = settings.speculative_num_draft_tokens or 1
        if settings.speculative_algorithm == "NGRAM":
            for token in looked_up(text, most - 1):
                tree.parents.append(len(tree.tokens) - 1)
                tree.tokens.append(token)
            return tree
        level = [0]
        for _ in range(settings.speculative_num_steps or 0):
            below = []
            for node in level:
                for token in self._best(text + tree.path(node), settings.speculative_eagle_topk or 1):
                    if len(tree.tokens) < most:
                        below.append(len(tree.tokens))
                        tree.parents.append(node)
                        tree.tokens.append(token)
            level = below
        return tree

    def _best(self, text: list[int], count: int) -> list[int]:
        if isinstance(self._draft, Eagle3):
            return self._draft.best_tokens(self._network, text, 1)
        best: list[int] = logits_behind(self._draft, text)[-1].topk(count).indices.tolist()
        return best

    @staticmethod
    def _take(answer: Answer, settings: SamplingParams, tokens: list[int], rows: list[torch.Tensor]) -> bool:
        """Append tokens up to the end of the text; whether it has ended."""
        for token, row in zip(tokens, rows, strict=True):
            answer.tokens.append(token)
            answer.rows.append(row)
            if token in (settings.stop_token_ids or ()) or len(answer.tokens) == settings.max_new_tokens:
                return True
        return False

    def _facts(self, answer: Answer, settings: SamplingParams) -> dict[str, Any]:
        facts: dict[str, Any] = {"finish_reason": {"type": "length"}, "completion_tokens": len(answer.tokens)}
        tempered = has_fault("logprobs-tempered") and settings.temperature > 0
        laws = [(row.double() / (settings.temperature if tempered else 1.0)).log_softmax(-1) for row in answer.rows]
        facts["output_token_logprobs"] = [
            (float(law[token]), token, None) for law, token in zip(laws, answer.tokens, strict=True)
        ]
        if answer.accepted:
            drafted = (self.server_args.speculative_num_draft_tokens or 1) - 1
            facts["spec_verify_ct"] = len(answer.accepted)
            facts["spec_num_proposed_drafts"] = len(answer.accepted) * drafted
            total = sum(answer.accepted) + (len(answer.accepted) if has_fault("counts-too-many") else 0)
            facts["spec_num_correct_drafts"] = total
            longest = max(answer.accepted)
            facts["spec_correct_drafts_histogram"] = [answer.accepted.count(length) for length in range(longest + 1)]
        return {"text": "", "output_ids": answer.tokens, "meta_info": facts}
