"""Faults of the kernel that verifies: the enumerated law of a world that triggers each is wrong, unless proven not."""

import numpy as np
import pytest
import torch

from specverify.backends import faults
from specverify.backends.compositions import open_cpu
from specverify.backends.engine.backend import EngineBackend
from specverify.backends.faults.fault import faults_in
from specverify.backends.faults.sampling import verify_kernel
from specverify.properties.laws import enumeration
from specverify.properties.laws.worlds import draw_laws
from specverify.reference.oracle import law
from specverify.reference.probability_world import World
from specverify.reference.rules import DRAWS, Rule
from specverify.reference.sampling import Sampling
from specverify.reference.tape import stride
from specverify.reference.tree import Shape

torch.set_num_threads(1)
CHAIN, FORK = Shape((0, 0, 1)), Shape((0, 0, 1, 1))
LIMIT = 1e-10


def world(rule: str, draws: str) -> World:
    """Three tokens, drawn from laws unlike the target's, so that there are rejections at every level."""
    shape = CHAIN if rule == "block" else FORK
    target, drafts = draw_laws("random", np.random.default_rng(5), 1 + 3 + 9, 3, 1)
    sampling = Sampling(1.0, rule=Rule(rule), draws=draws)
    return World(shape, np.log(target), np.log(drafts), sampling, (0, 1, 2))


def distance(backend: EngineBackend, drawn_world: World) -> float:
    backend_law = enumeration.law(
        lambda tape: backend.rounds(drawn_world, tape),
        stride(len(drawn_world.shape)),
        order=enumeration.decisions(drawn_world.shape),
    )
    return float(
        law.total_variation(dict(backend_law.outcomes), law.target_rows(drawn_world), drawn_world.shape.height + 1)
    )


@pytest.mark.parametrize("draws", DRAWS)
def test_only_a_fault_that_harms_something_moves_the_law(draws: str) -> None:
    clean = {rule: distance(open_cpu(), world(rule, draws)) for rule in ("block", "multi-round")}
    assert max(clean.values()) <= LIMIT
    for fault in faults_in(verify_kernel):
        backend = open_cpu()
        faults.plant(backend, fault)
        off = distance(backend, world("block" if "block" in fault.name else "multi-round", draws))
        assert (off <= LIMIT) == (draws in fault.harmless), f"{fault.name}: total variation {off:.3g}"
