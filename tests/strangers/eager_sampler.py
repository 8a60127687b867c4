"""A stranger's tree sampler for tests: eager, one request at a time, its randomness where it happens to fall."""

import random
from dataclasses import dataclass

import torch

FAULTS = ("draft-without-temperature", "sibling-kept-in-q", "bonus-from-p", "bonus-without-temperature")


@dataclass
class EagerSampler:
    """Two levels of `width` drafted siblings, verified as published Python engines do it.

    Attributes:
        target: Logits [V], [V, V], [V, V, V] after no, one and two tokens.
        draft: Logits [V], [V, V].
        temperature: Of both models.
        width: Siblings at each level.
        sampled: Whether siblings are drawn without replacement; else they are the draft's best.
        fault: One of FAULTS, or empty.
    """

    target: tuple[torch.Tensor, ...]
    draft: tuple[torch.Tensor, ...]
    temperature: float = 0.7
    width: int = 2
    sampled: bool = True
    fault: str = ""

    def propose(self, logits: torch.Tensor) -> tuple[list[int], torch.Tensor]:
        """The siblings below one node, and the law they are said to have come from."""
        law = torch.softmax(logits / self.temperature, dim=-1)
        if self.sampled:
            tokens = torch.multinomial(law, self.width, replacement=False)
        else:
            tokens = torch.topk(law, self.width).indices
        if self.fault == "draft-without-temperature":
            law = torch.softmax(logits, dim=-1)
        return tokens.tolist(), law

    def verify(self, p: torch.Tensor, tokens: list[int], q: torch.Tensor) -> tuple[int | None, torch.Tensor]:
        """The accepted sibling, or None with the law of the token in its place."""
        for token in tokens:
            ratio = p[token] / q[token] if self.sampled else p[token]
            if random.random() <= ratio:
                return token, p
            if self.sampled:
                p = (p - q).clamp(min=0)
                if self.fault != "sibling-kept-in-q":
                    q = q.clone()
                    q[token] = 0
                    q = q / q.sum()
            else:
                p = p.clone()
                p[token] = 0
            p = p / p.sum()
        return None, p

    def round(self) -> tuple[int, ...]:
        """Tokens of one speculative round."""
        block: tuple[int, ...] = ()
        for level in range(2):
            p = torch.softmax(self.target[level][block] / self.temperature, dim=-1)
            tokens, q = self.propose(self.draft[level][block])
            accepted, residual = self.verify(p, tokens, q)
            if accepted is None:
                bonus = p if self.fault == "bonus-from-p" else residual
                return (*block, int(torch.multinomial(bonus, 1)))
            block = (*block, accepted)
        logits = self.target[2][block]
        if self.fault != "bonus-without-temperature":
            logits = logits / self.temperature
        return (*block, int(torch.multinomial(torch.softmax(logits, dim=-1), 1)))
