"""The soft cap of attention: the oracle against Gemma 2's own code, and every backend computes it or refuses it."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

from specverify.backends.base import Unsupported
from specverify.backends.compositions import open_cpu
from specverify.backends.flags import mode_of
from specverify.backends.registry import open_backend, why_unavailable
from specverify.backends.shipped import ROWS
from specverify.properties.invariants import ALL
from specverify.properties.strategies.models import CAPPED, GALLERY
from specverify.properties.verdict.judge import judge
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.draft import Scripted
from specverify.reference.malformed import Malformed
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.oracle.model import PathByPath, attention
from specverify.reference.sampling import Stops
from specverify.reference.trace import Array
from specverify.reference.tree import Tree
from specverify.setup.subjects import subject_of
from tests.corruption import ORACLE

TREE = Tree((0, 0, 0, 1, 2, 1), (3, 5, 7, 5, 11, 4))
CONTEXT_EXACT = tuple(invariant for invariant in ALL if invariant.name == "attention.context-exact")


def case_of(index: int, dtype: str = "float32") -> Case:
    prompt = (1, 2, 3, 4, 9, 8, 7, 1, 0, 6, 3)
    return Case(Seeded(GALLERY[index], 1), prompt, Scripted((TREE,)), stops=Stops(2), steps=1, dtype=dtype)


class Module(torch.nn.Module):
    num_key_value_groups = 2


@pytest.mark.parametrize("cap", [0.0, 0.7, 30.0])
def test_attention_is_gemma_2s(cap: float) -> None:
    rng = np.random.default_rng(4)
    query, keys, values = rng.normal(size=(4, 6)), rng.normal(size=(9, 2, 6)), rng.normal(size=(9, 2, 6))
    theirs, _ = eager_attention_forward(
        Module(),
        torch.tensor(query)[None, :, None],
        *(torch.tensor(array).transpose(0, 1)[None] for array in (keys, values)),
        None,
        scaling=6**-0.5,
        softcap=cap or None,
    )
    # Their softmax is in float32 whatever the inputs.
    np.testing.assert_allclose(attention(query, keys, values, 6**-0.5, cap), theirs[0, 0].numpy(), atol=1e-6)


@pytest.mark.parametrize("index", CAPPED)
def test_both_oracles_and_the_engine_agree_and_see_it(index: int) -> None:
    def logits(case: Case, oracle: Oracle) -> Array:
        scored = oracle(case).steps[0].scored
        assert scored is not None
        return scored.logits

    case = case_of(index, "float64")
    true = logits(case, ORACLE)
    np.testing.assert_allclose(logits(case, Oracle(evaluator=PathByPath)), true, rtol=0, atol=1e-12)
    scored = open_cpu().run(case).steps[0].scored
    assert scored is not None
    np.testing.assert_allclose(scored.logits, true, rtol=0, atol=1e-12)
    without = replace(case, model=Seeded(replace(GALLERY[index], score_cap=0.0), 1))
    assert np.abs(logits(without, ORACLE) - true).max() > 0.5, "the cap changes nothing: this model tests nothing"


def computed_and_refused(names: list[str], case_for: Callable[[str], Case]) -> tuple[set[str], set[str]]:
    """The backends that compute attention of a case with a soft cap, and those that refuse the soft cap by name.

    `case_for` makes the case in a backend's own dtype. Fails for a backend that does neither.
    """
    computed, refused = set(), set()
    for name in names:
        backend = open_backend(name)
        backend.mode = mode_of("performance")  # type: ignore[attr-defined]
        case = case_for(backend.declaration.dtypes[0])
        if 1 not in backend.declaration.ranks:  # it runs sharded targets alone, by the attention of cpu-eager
            continue
        beyond = backend.declaration.outside(case)
        if beyond is not None:
            assert beyond.startswith(f"{name} declares no soft cap of attention in a "), name
            # Nor does the engine compute anything else for a checkpoint, whose architecture no declaration knows.
            with pytest.raises(Unsupported, match=r"softcap: "):
                backend.run(case)
            refused.add(name)
        else:
            verdict = judge(case, CONTEXT_EXACT, ORACLE, subject_of(backend))
            assert (verdict.outcomes, verdict.findings) == ({"attention.context-exact": "checked"}, ()), name
            computed.add(name)
    return computed, refused


def test_every_backend_computes_it_or_refuses_it_by_name() -> None:
    """A path that reads the scores without the cap would be wrong and silent."""
    here = [row.name for row in ROWS if why_unavailable(row.name) is None]
    computed, refused = computed_and_refused(here, lambda dtype: case_of(CAPPED[0], dtype))
    assert "cpu-eager" in computed
    assert {name for name in refused if "fused" in name}
    assert not {name for name in computed if "fused" in name}


def test_a_fused_backend_computes_it_in_mode_reference() -> None:
    backend = open_backend("cpu-fused")
    backend.mode = mode_of("reference")  # type: ignore[attr-defined]
    verdict = judge(case_of(CAPPED[0]), CONTEXT_EXACT, ORACLE, subject_of(backend))
    assert (verdict.unsupported, verdict.findings) == (None, ())


def test_a_cap_that_is_none_is_refused() -> None:
    for cap in (-1.0, 1e7, float("nan")):
        with pytest.raises(Malformed, match="score_cap"):
            replace(GALLERY[0], score_cap=cap)
