"""Versions of torch_npu: the schemas of 2.6 to 2.14 are emulated in turn, and each takes the calls that we make."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from specverify.backends.ascend.operators import versions
from specverify.backends.ascend.operators.install import KERNELS, SCHEMAS, install
from specverify.backends.ascend.operators.versions import KNOWN, OTHERS, compare_schemas, schema_at, takes
from specverify.backends.compositions import open_cpu, open_engine
from specverify.commands import doctor_checks
from specverify.reference.case import Case
from specverify.reference.draft import Ngram
from specverify.reference.layout import KvLayout
from specverify.reference.sampling import Stops
from specverify.reference.tree import RankTree
from tests.models import LLAMA

VERSIONS = (*OTHERS, KNOWN)

WRITES = {"2.6.0": False, "2.7.1": False, "2.9.0": False, "2.13.0": True, "2.14.0": True}
"""Whether npu_scatter_pa_kv_cache has a `cache_mode`, by version."""


@pytest.fixture(params=VERSIONS)
def version(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The operators of one version, emulated in a namespace of their own in the place of `torch.ops.npu`."""
    install()
    namespace = f"npu_{request.param.replace('.', '_')}"
    make_library: Any = torch.library.Library
    libraries = [make_library(namespace, "FRAGMENT"), make_library(namespace, "IMPL", "CPU")]
    for operator in SCHEMAS["npu"]:
        schema = schema_at(request.param, operator)
        if schema is not None:
            libraries[0].define(schema)
            libraries[1].impl(operator, KERNELS[operator][0])
    monkeypatch.setattr(torch.ops, "npu", getattr(torch.ops, namespace))
    yield request.param
    for library in libraries:
        library._destroy()


CASE = Case(
    LLAMA,
    (1, 2, 1, 2, 1),
    Ngram(RankTree((0, 0, 0, 1), (0, 1, 0, 0)), 2),
    KvLayout(kind="paged", page_size=2),
    stops=Stops(max_new_tokens=6),
    dtype="float32",
)


def test_the_engine_calls_what_the_version_has(version: str) -> None:
    trace = open_engine("ascend-fused-emulated").run(CASE)
    assert trace.output == open_cpu().run(CASE).output
    assert trace.fallbacks == {}
    assert takes("npu_scatter_pa_kv_cache", "cache_mode") == WRITES[version]


def test_latent_rows_go_to_the_second_version_of_the_operator_where_there_is_one(version: str) -> None:
    assert takes("npu_fused_infer_attention_score_v2") == (version != "2.6.0")


def test_a_schema_is_recognised(version: str) -> None:
    rows = {row["name"].removeprefix("schema "): row for row in compare_schemas()}
    assert set(rows) == set(SCHEMAS["npu"])
    assert all(version in row["detail"] for row in rows.values())
    absent = {name for name, row in rows.items() if row["state"] == "absent"}
    assert absent == {name for name in rows if schema_at(version, name) is None}
    assert not any(row["state"] == "differs" for row in rows.values())


def test_a_schema_that_no_version_has_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    install()
    monkeypatch.setitem(SCHEMAS["npu"], "npu_rms_norm", "npu_rms_norm(Tensor input) -> Tensor")
    monkeypatch.setattr(versions, "OTHERS", {})
    (row,) = [row for row in compare_schemas() if row["name"] == "schema npu_rms_norm"]
    assert row["state"] == "differs"
    assert "float epsilon" in row["detail"]


def test_doctor_compares_all_schemas_where_torch_npu_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    install()
    assert doctor_checks.schema_rows() == []
    monkeypatch.setattr("specverify.backends.ascend.device.why_no_npu", lambda: None)
    assert len(doctor_checks.schema_rows()) == len(SCHEMAS["npu"])
