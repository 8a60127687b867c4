"""DeepSeek-V3.2 and GLM-5: an indexer chooses the columns of each row, and its keys stand in the cache."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from specverify.backends.base import Unsupported
from specverify.backends.compositions import open_cpu
from specverify.backends.registry import open_backend
from specverify.cli import main
from specverify.properties.strategies.models import GALLERY
from specverify.reference.architecture import Seeded
from specverify.reference.family.latent import IndexedSettings
from specverify.reference.layout import KvLayout
from specverify.reference.malformed import Malformed
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.oracle.formulas.layer import best_columns
from specverify.reference.oracle.parameters import load
from tests.inprocess import in_this_process
from tests.meta.oracle.test_rare_families import case_for, far_apart
from tests.published import save_model as published

TIES, V32 = (arch for arch in GALLERY if arch.family == "deepseek_v32")
(GLM,) = (arch for arch in GALLERY if arch.family == "glm_moe_dsa")


def test_the_first_of_equal_columns_are_taken() -> None:
    """transformers leaves it to torch's topk, which says nothing of equal scores."""
    assert best_columns(np.array([0.0, 3.0, 0.0, 0.0]), 2).tolist() == [0, 1]
    case = case_for(TIES)
    assert far_apart(case, Oracle(), open_cpu().run) < 1e-9


@pytest.mark.parametrize("latent", [False, True])
def test_a_cache_shows_index_keys_behind_its_keys(latent: bool) -> None:
    case = case_for(GLM, KvLayout(latent=latent))
    settings = IndexedSettings.of(GLM)
    width = settings.latent_rank if latent else GLM.head_dim
    for trace in (Oracle()(case), open_cpu().run(case)):
        committed = trace.steps[0].committed
        assert committed is not None
        assert committed.before is not None
        keys = committed.before.keys
        assert keys.shape[-1] == width + settings.index_width
        assert keys[0, ..., width:].any()
        assert not keys[1, ..., width:].any()  # it takes the columns of the layer before


def test_fewer_columns_change_the_logits() -> None:
    few, all_columns = (
        replace(V32, settings=replace(IndexedSettings.of(V32), index_columns=count)) for count in (4, 64)
    )
    logits = []
    for arch in (few, all_columns):
        scored = Oracle()(case_for(arch)).steps[0].scored
        assert scored is not None
        logits.append(scored.logits)
    assert np.abs(logits[0] - logits[1]).max() > 1e-3


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"query_rank": 0}, "the indexer reads compressed queries"),
        ({"index_width": 1}, "index_width of 1 has no 2"),
        ({"following_layers": 1}, "a layer before chooses columns"),
        ({"interleaved": False}, "turns neighbours"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_makes_no_sense_is_refused(changes: dict[str, int], line: str) -> None:
    with pytest.raises(Malformed, match=line):
        replace(V32, settings=replace(V32.settings, **changes))


def test_attention_that_goes_by_runs_declines_it() -> None:
    backend = open_backend("cpu-split")
    assert not backend.declaration.indexed
    assert backend.declaration.not_loaded(V32) == "columns that an indexer chooses in a deepseek_v32 model"
    with pytest.raises(Unsupported, match="indices: attention split at the prefix reads unbroken runs"):
        backend.run(case_for(V32, dtype="float32"))
    assert open_backend("cpu-eager").declaration.indexed


def test_seeded_indexers_of_many_heads_have_no_ties() -> None:
    names = [name for name in load(Seeded(V32, 1), "float64").state if ".indexer." in name]
    assert len(names) == 5 * V32.layers


FAULTS = ("indexed-columns-of-first-row", "indexer-counts-hidden-columns", "index-keys-of-rejected-rows-stay")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek-v3.2", "glm-5", "glm-5.2"])
def test_diff_agrees_on_a_checkpoint_and_not_on_faults(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    in_this_process(monkeypatch)
    folder = published(name, tmp_path, seed=1)
    for fault in (None, *FAULTS):
        options = [] if fault is None else ["--fault", fault]
        with pytest.raises(SystemExit) as ended:
            main(["diff", "--model", str(folder), "--cases", "3", "--new-tokens", "6", "--dtype", "float32", *options])
        assert ended.value.code == (0 if fault is None else 1), f"{fault}: {capfd.readouterr().out}"
