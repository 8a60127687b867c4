"""Position-overwrite runs where the cache is shown to be updated before attention reads it, and nowhere else."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from specverify.backends.base import Unsupported
from specverify.backends.compositions import open_cpu
from specverify.backends.engine import open_models
from specverify.backends.engine.attention.eager import eager
from specverify.backends.engine.backend import EngineBackend
from specverify.backends.engine.columns import AttentionInputs
from specverify.backends.engine.kv.lanes import BatchCache
from specverify.backends.engine.kv.seams import KvSeams
from specverify.properties.strategies.models import GALLERY
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.draft import LanguageModel, Scripted
from specverify.reference.layout import KvLayout
from specverify.reference.sampling import Stops
from specverify.reference.tree import RankTree, Tree
from tests.tiers import each

TREE = Tree((0, 0, 0, 1), (2, 1, 3, 1))
CASE = Case(Seeded(GALLERY[0], 3), (1, 2), Scripted((TREE,)), KvLayout(kind="overwrite"), stops=Stops(max_new_tokens=4))


class ReadsFirst(BatchCache):
    """Attention gets what lay in the cells before this forward wrote its rows there."""

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Any, Any]:
        stale = [tuple(tensor.clone() for tensor in cache.read(layer_idx)) for cache in self.caches]
        super().update(key_states, value_states, layer_idx)
        return torch.stack([keys for keys, _ in stale]), torch.stack([values for _, values in stale])


def with_lanes(lanes: type[BatchCache]) -> EngineBackend:
    backend = open_cpu()
    backend.seams = replace(backend.seams, kv=KvSeams(lanes=lanes))
    return backend


def test_a_cache_that_is_read_before_it_is_updated_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = with_lanes(ReadsFirst)
    with pytest.raises(Unsupported, match="layout overwrite: it could not be shown that the cache is updated before"):
        backend.run(CASE)
    # Without the probe it would have run, and wrongly.
    right = open_cpu().run(CASE).steps[0].scored
    monkeypatch.setattr(open_models, "_probe", lambda *_: True)
    wrong = with_lanes(ReadsFirst).run(CASE).steps[0].scored
    assert right is not None
    assert wrong is not None
    assert abs(right.logits - wrong.logits).max() > 1e-3


@pytest.mark.parametrize("kind", ["static", "scratch"])
def test_other_layouts_are_not_asked(kind: str) -> None:
    assert with_lanes(ReadsFirst).run(replace(CASE, layout=KvLayout(kind=kind))).output


def test_a_draft_is_asked_too() -> None:
    backend = open_cpu()

    def stale(query: Tensor, columns: AttentionInputs, scaling: float) -> Tensor:
        memory.append(columns.value)
        return eager(query, replace(columns, value=columns.value * len(memory)), scaling)

    memory: list[Tensor] = []
    backend.seams = replace(backend.seams, draft_attend=stale)
    draft = LanguageModel(Seeded(GALLERY[0], 4), RankTree((0, 0), (0, 0)))
    assert backend.run(CASE).output
    with pytest.raises(Unsupported, match="layout overwrite"):
        backend.run(replace(CASE, draft=draft))


def test_a_model_is_asked_once_for_each_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, probe = [], open_models._probe
    monkeypatch.setattr(open_models, "_probe", lambda *arguments: calls.append(arguments) or probe(*arguments))  # type: ignore[func-returns-value]
    backend = open_cpu()
    for case in (CASE, replace(CASE, prompt=(3, 1, 2)), replace(CASE, dtype="float64"), CASE):
        assert backend.run(case).output
    assert len(calls) == 2, "one model in two dtypes"

    def other_attention(*arguments: Any) -> Tensor:
        return eager(*arguments)

    backend.seams = replace(backend.seams, attend=other_attention)
    backend.run(CASE)
    assert len(calls) == 3
    assert all(open_models._results[model][attend, lanes] for model, attend, lanes in calls)


@pytest.mark.parametrize(("arch", "dtype"), each(product(GALLERY, ["float64", "float32", "bfloat16", "float16"]), 3))
def test_every_model_of_the_gallery_is_shown(arch: Any, dtype: str) -> None:
    case = replace(
        CASE, model=Seeded(arch, 1), dtype=dtype, prompt=(1, 0), draft=Scripted(), stops=Stops(max_new_tokens=1)
    )
    assert open_cpu().run(case).output
