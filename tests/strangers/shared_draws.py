"""Samplers of one speculative round whose draws share a generator, a seed or a vector of noise, rightly or wrongly.

Each takes the tables of target and draft, and the seed of the round.
"""

import random
from collections.abc import Callable
from random import random as imported_coin
from typing import Any

import numpy as np
import torch
from numpy.random import default_rng
from torch import Tensor

Table = Callable[..., Tensor]
Tokens = tuple[int, ...]

MODULE_GENERATOR = default_rng(3)
"""A generator that is made when the module is imported."""


def laws(target: Table, draft: Table) -> tuple[Tensor, Tensor]:
    return target(()).exp(), draft(()).exp()


def residual(p: Tensor, q: Tensor) -> Tensor:
    return (p - q).clamp(min=0)


def inverse(law: Tensor, coin: Tensor) -> int:
    return int((law.cumsum(0) / law.sum() <= coin).sum())


def gumbel(law: Tensor) -> int:
    return int((law.log() - torch.log(-torch.log(torch.rand_like(law)))).argmax())


def two_generators(target: Table, draft: Table, seed: int = 1234) -> Tokens:
    p, q = laws(target, draft)
    drafting, verifying = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed)
    token = inverse(q, torch.rand(1, generator=drafting))
    if torch.rand((), generator=verifying) < p[token] / q[token]:
        return (token,)
    return (int(torch.multinomial(residual(p, q), 1, generator=verifying)),)


def copied_generator(target: Table, draft: Table, seed: int = 1234) -> Tokens:
    p, q = laws(target, draft)
    drafting, verifying = torch.Generator().manual_seed(seed), torch.Generator()
    verifying.set_state(drafting.get_state())
    token = int(torch.multinomial(q, 1, generator=drafting))
    if torch.rand((), generator=verifying, dtype=torch.float64) < p[token] / q[token]:
        return (token,)
    return (int(torch.multinomial(residual(p, q), 1, generator=drafting)),)


def generators_of_two_seeds(target: Table, draft: Table, seed: int = 1234) -> Tokens:
    p, q = laws(target, draft)
    drafting, verifying = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed + 10**6)
    token = inverse(q, torch.rand(1, generator=drafting))
    if torch.rand((), generator=verifying) < p[token] / q[token]:
        return (token,)
    return (int(torch.multinomial(residual(p, q), 1, generator=verifying)),)


def reseeded(target: Table, draft: Table, seed: int = 1234) -> Tokens:
    p, q = laws(target, draft)
    torch.manual_seed(seed)
    token = int(torch.multinomial(q, 1))
    torch.manual_seed(seed)
    if torch.rand(()) < p[token] / q[token]:
        return (token,)
    torch.manual_seed(seed)
    return (int(torch.multinomial(residual(p, q), 1)),)


def forked(target: Table, draft: Table, seed: int = 1234) -> Tokens:
    p, q = laws(target, draft)
    torch.manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        token = inverse(q, torch.rand(()))
    if torch.rand(()) < p[token] / q[token]:
        return (token,)
    return (inverse(residual(p, q), torch.rand(())),)


def default_rng_twice(target: Table, draft: Table, seed: int = 1234) -> Tokens:
    p, q = (law.numpy() for law in laws(target, draft))
    token = int(np.random.default_rng(seed).choice(len(q), p=q))
    verifying = np.random.default_rng(seed)
    if verifying.random() < p[token] / q[token]:
        return (token,)
    surplus = np.maximum(p - q, 0)
    return (int(verifying.choice(len(p), p=surplus / surplus.sum())),)


def one_random_object(target: Table, draft: Table, seed: int = 0) -> Tokens:
    p, q = (law.tolist() for law in laws(target, draft))
    draws = random.Random(seed)
    token = draws.choices(range(len(q)), weights=q)[0]
    if draws.random() < p[token] / q[token]:
        return (token,)
    surplus = [max(target_mass - draft_mass, 0.0) for target_mass, draft_mass in zip(p, q, strict=True)]
    return (draws.choices(range(len(p)), weights=surplus)[0],)


def generators_of_the_module(target: Table, draft: Table, seed: int | None = None) -> Tokens:
    p, q = (law.numpy() for law in laws(target, draft))
    generator = MODULE_GENERATOR if seed is None else np.random.default_rng(seed)
    token = int(generator.choice(len(q), p=q))
    if imported_coin() < p[token] / q[token]:
        return (token,)
    surplus = np.maximum(p - q, 0)
    return (int(generator.choice(len(p), p=surplus / surplus.sum())),)


def noise_twice(target: Table, draft: Table, seed: int = 1234) -> Tokens:
    p, q = laws(target, draft)
    torch.manual_seed(seed)
    noise = torch.empty_like(p).exponential_()
    token = int((q / noise).argmax())
    if torch.rand(()) < p[token] / q[token]:
        return (token,)
    return (int((residual(p, q) / noise).argmax()),)


def gumbel_fresh(target: Table, draft: Table, seed: int = 1234) -> Tokens:
    p, q = laws(target, draft)
    torch.manual_seed(seed)
    token = gumbel(q)
    if torch.rand(()) < p[token] / q[token]:
        return (token,)
    return (gumbel(residual(p, q)),)


def gumbel_twice(target: Table, draft: Table, seed: int = 1234) -> Tokens:
    p, q = laws(target, draft)
    torch.manual_seed(seed)
    noise = -torch.log(-torch.log(torch.rand_like(p)))
    token = int((q.log() + noise).argmax())
    if torch.rand(()) < p[token] / q[token]:
        return (token,)
    return (int((residual(p, q).log() + noise).argmax()),)


def gumbel_without_a_logarithm(target: Table, draft: Table, seed: int = 1234) -> Tokens:
    p, q = laws(target, draft)
    torch.manual_seed(seed)
    token = int((q.log() - torch.log(torch.rand_like(q))).argmax())
    if torch.rand(()) < p[token] / q[token]:
        return (token,)
    return (gumbel(residual(p, q)),)


def noise_thrice(target: Table, draft: Table, seed: int = 1234) -> Tokens:
    p, q = laws(target, draft)
    torch.manual_seed(seed)
    noise = torch.empty_like(p).exponential_()
    token, best = int((q / noise).argmax()), int((p / noise).argmax())
    return (token,) if token == best else (int((residual(p, q) / noise).argmax()),)


def coupled(target: Table, draft: Table, seed: int = 1234) -> Tokens:
    """Draft and target decide by one vector of noise, and the target's decision is emitted: lossless."""
    p, q = laws(target, draft)
    torch.manual_seed(seed)
    noise = torch.empty_like(p).exponential_()
    token, best = int((q / noise).argmax()), int((p / noise).argmax())
    return (token,) if token == best else (best,)


def noise_and_its_coin(target: Table, draft: Table, seed: int = 1234) -> Tokens:
    p, q = laws(target, draft)
    torch.manual_seed(seed)
    noise = torch.rand_like(p)
    token = int((q + noise).argmax())
    if noise[0] < p[token] / q[token]:
        return (token,)
    return (int(torch.multinomial(residual(p, q), 1)),)


SAMPLERS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        two_generators, copied_generator, generators_of_two_seeds, reseeded, forked, default_rng_twice,
        one_random_object, generators_of_the_module, noise_twice, gumbel_fresh, gumbel_twice,
        gumbel_without_a_logarithm, noise_thrice, coupled,
    )
}  # fmt: skip
"""The samplers that have a law."""
