"""Samplers of whole rounds and an engine that runs step by step, right and with faults."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from specverify.adapt import stepper, tables


def one_round(fault: str = "") -> Callable[..., tuple[int, ...]]:
    """One drafted token, accepted or replaced; the fault `residual` replaces it from p."""

    def drawn(target: Callable[..., Tensor], draft: Callable[..., Tensor]) -> tuple[int, ...]:
        p, q = target().exp(), draft().exp()
        token = int(torch.multinomial(q, 1))
        if torch.rand(()) < p[token] / q[token]:
            return token, int(torch.multinomial(target((token,)).exp(), 1))
        return (int(torch.multinomial(p if fault == "residual" else (p - q).clamp(min=0), 1)),)

    return drawn


def walked(fault: str = "") -> Callable[..., Iterator[dict[str, Any]]]:
    """Verifies the case's trees with forwards of whole paths; faults: mask (a row sees all rows), path (too short)."""

    def steps(
        prompt_ids: list[int], max_new_tokens: int, model: Any, trees: list[tuple[list[int], list[int]]]
    ) -> Iterator[dict[str, Any]]:
        tokens, budget = list(prompt_ids), max_new_tokens
        for number in range(max_new_tokens):
            parent, names = trees[number] if number < len(trees) else ([0], [tokens[-1]])
            names = [tokens[-1], *names[1:]]
            mask = torch.eye(len(parent), dtype=torch.bool)
            rows = []
            for node in range(len(parent)):
                ancestor, path = node, [node]
                while ancestor:
                    ancestor = parent[ancestor]
                    path.insert(0, ancestor)
                mask[node, path] = True
                rows.append(model(torch.tensor([[*tokens[:-1], *(names[node] for node in path)]])).logits[0, -1])
            logits, accepted_nodes = torch.stack(rows), [0]
            while True:
                best = int(logits[accepted_nodes[-1]].argmax())
                hit = [
                    node for node in range(1, len(parent)) if parent[node] == accepted_nodes[-1] and names[node] == best
                ]
                if not hit:
                    break
                accepted_nodes.append(hit[0])
            block = [*(names[node] for node in accepted_nodes[1:]), int(logits[accepted_nodes[-1]].argmax())][:budget]
            yield {
                "tokens": block,
                "tree": (parent, names),
                "mask": torch.ones_like(mask) if fault == "mask" else mask,
                "logits": logits,
                "path": accepted_nodes[: len(accepted_nodes) - 1 or 1] if fault == "path" else accepted_nodes,
                "bonus": int(logits[accepted_nodes[-1]].argmax()),
            }
            tokens, budget = tokens + block, budget - len(block)
            if not budget:
                return

    return steps


SHOWN_STAGES = ("tree", "mask", "logits", "path", "bonus")
open_tables, open_residual = tables(one_round()), tables(one_round("residual"))
open_steps = stepper(walked(), shows=SHOWN_STAGES)
open_mask = stepper(walked("mask"), shows=SHOWN_STAGES)
open_path = stepper(walked("path"), shows=SHOWN_STAGES)
