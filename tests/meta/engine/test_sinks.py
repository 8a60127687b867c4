"""Attention sinks on every path that computes them: against softmax in float64, and in a model of gpt-oss."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from specverify.backends.engine.attention.eager import eager
from specverify.backends.engine.attention.flex import Flex
from specverify.backends.engine.attention.gathered import eager_gathered
from specverify.backends.engine.attention.split import Split
from specverify.backends.engine.columns import Attend
from specverify.backends.registry import open_backend
from specverify.properties.invariants import ALL
from specverify.properties.verdict.judge import judge
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.draft import Scripted
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.sampling import Stops
from specverify.reference.tree import Tree
from specverify.setup.subjects import subject_of
from tests.drawn_families import listed_architectures
from tests.tiers import gated
from tests.treeattention import Scene, scene

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
NARROWED = 2.0
"""What attention in 16 bits that is rounded before its sinks take their share adds to the bound of one rounding."""


def kernel(splits: int) -> Attend:
    """The Triton kernel with so many splits of the prefix."""
    pytest.importorskip("triton", reason="Triton is not installed: pip install -e '.[triton]', on Linux")
    from specverify.backends.engine.attention.triton_launch import Plan, interpreted_kernel

    return replace(interpreted_kernel(), plan=lambda query, kv_heads, packed: Plan(16, 16, splits))


PATHS: dict[str, Callable[[], Attend]] = {
    "eager": lambda: eager_gathered,
    "split": Split,
    "flex": Flex,
    "triton": lambda: kernel(0),
    "triton split in two": lambda: kernel(2),
}


def with_sinks(drawn_scene: Scene, size: float) -> Scene:
    heads = drawn_scene.query.shape[1]
    sinks = (size * torch.linspace(-1, 1, heads)).to(drawn_scene.query.dtype)
    return replace(drawn_scene, columns=replace(drawn_scene.columns, sinks=sinks))


SINKS = (3.0, 0.0, 40.0)
"""Sinks among the scores, all at 0, and above and below all scores."""

EVERY = [
    (path, dtype, size)
    for path in PATHS
    for dtype in DTYPES
    for size in SINKS
    if dtype != torch.float64 or not path.startswith("triton")  # Triton's dot product takes no float64
]


@pytest.mark.parametrize(
    ("path", "dtype", "size"),
    gated(EVERY, lambda index: EVERY[index][1] == torch.float32 and EVERY[index][2] == SINKS[0]),
)
def test_sinks_take_their_share_of_the_softmax(path: str, dtype: torch.dtype, size: float) -> None:
    """An empty prefix, unequal lanes, a window, several query heads for one KV head."""
    attend = PATHS[path]()
    for drawn_scene in (
        scene(((0, 3),), 2, 1, 8, dtype),
        scene(((17, 6), (3, 1)), 4, 2, 8, dtype),
        scene(((33, 5),), 2, 2, 8, dtype, window=5),
    ):
        sink_scene = with_sinks(drawn_scene, size)
        rounded = NARROWED if dtype in (torch.bfloat16, torch.float16) else 1.0
        assert sink_scene.error(attend(sink_scene.query, sink_scene.columns, sink_scene.scaling)) <= rounded
        without = eager_gathered(drawn_scene.query, drawn_scene.columns, drawn_scene.scaling)
        assert sink_scene.error(without) > 1, "sinks that change nothing would be missed"


@pytest.mark.parametrize("path", ["eager", "split", "flex"])
def test_values_may_be_narrower_than_keys_beside_sinks(path: str) -> None:
    """As in MiMo-V2: the part of the sinks is as wide as the values."""
    sink_scene = with_sinks(scene(((17, 6), (3, 1)), 4, 2, 8, torch.float32), 3.0)
    columns = sink_scene.columns
    narrow = replace(columns, value=columns.value[..., :4])
    mixed = PATHS[path]()(sink_scene.query, narrow, sink_scene.scaling)
    whole = eager_gathered(sink_scene.query, columns, sink_scene.scaling)
    torch.testing.assert_close(mixed, whole[..., :4])


def test_pages_are_read_with_sinks_too() -> None:
    sink_scene = with_sinks(scene(((40, 7), (5, 2)), 4, 2, 8, torch.float32, page=7), 2.0)
    for path in ("split", "triton split in two"):
        assert sink_scene.error(PATHS[path]()(sink_scene.query, sink_scene.columns, sink_scene.scaling)) <= 1


def test_compiled_flex_attention_says_that_it_ran_uncompiled() -> None:
    messages: list[str] = []
    drawn_scene = with_sinks(scene(((4, 3),), 2, 1, 8, torch.float32), 1.0)
    columns = replace(drawn_scene.columns, announce=messages.append)
    mixed = Flex(compiled=True)(drawn_scene.query, columns, drawn_scene.scaling)
    assert torch.allclose(mixed, eager(drawn_scene.query, columns, drawn_scene.scaling), atol=1e-5)
    assert messages == ["compiled FlexAttention is not asked for the log-sum-exps that sinks need"]


@pytest.mark.filterwarnings("ignore:return_lse is deprecated")
def test_flex_gives_its_log_sum_exps_on_torch_2_6_to_2_8_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those versions have no AuxRequest; torch 2.13 still takes the argument that they know."""
    monkeypatch.delattr("torch.nn.attention.flex_attention.AuxRequest", raising=False)
    drawn = with_sinks(scene(((4, 3),), 2, 1, 8, torch.float32), 1.0)
    assert drawn.error(Flex()(drawn.query, drawn.columns, drawn.scaling)) <= 1


@pytest.mark.parametrize("name", ["triton-interpreted", "cpu-fused-flex"])
def test_a_model_with_sinks_agrees_with_the_oracle(name: str) -> None:
    if name.startswith("triton"):
        pytest.importorskip("triton", reason="Triton is not installed: pip install -e '.[triton]', on Linux")
    backend = open_backend(name)
    assert backend.declaration.sinks
    context = tuple(invariant for invariant in ALL if invariant.name == "attention.context-exact")
    prompt = tuple(token % 25 for token in range(3, 40, 2))
    draft = Scripted((Tree((0, 0, 0, 1), (prompt[-1], 5, 7, 3)),))
    case = Case(Seeded(listed_architectures("gpt_oss")[0], 1), prompt, draft, stops=Stops(3))
    verdict = judge(case, context, Oracle(), subject_of(backend))
    assert (verdict.findings, verdict.outcomes) == ((), {"attention.context-exact": "checked"})
