"""Columns stored in eight bits: engine and oracle round alike in every layout, or the case is refused."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

from specverify.backends.compositions import open_cpu
from specverify.backends.engine.kv.base import CacheSpec
from specverify.backends.engine.kv.codec import KvCodec
from specverify.backends.engine.reach import Reach
from specverify.properties.invariants import ALL
from specverify.properties.strategies.cases import cases
from specverify.properties.strategies.models import GALLERY
from specverify.properties.verdict.judge import judge
from specverify.reference.abilities import Abilities
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.draft import LanguageModel, Scripted
from specverify.reference.kv_rounding import LARGEST, KvRounding
from specverify.reference.layout import KINDS, KV_SCALES, KvLayout
from specverify.reference.malformed import Malformed
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.oracle.formulas.rounded_columns import RoundedColumns, float8_numbers, grid
from specverify.reference.oracle.formulas.routers import UNKNOWN
from specverify.reference.oracle.model import PathByPath
from specverify.reference.sampling import Stops
from specverify.reference.session import Action, Mate, Session
from specverify.reference.trace import Array
from specverify.reference.tree import RankTree, Tree
from specverify.setup.subjects import subject_of

TREE = Scripted((Tree((0, 0, 0, 1), (0, 3, 1, 2)),))
ORACLE = Oracle()
DTYPES = pytest.mark.parametrize("dtype", LARGEST)
SCALES = pytest.mark.parametrize("scales", KV_SCALES)
FAMILIES = ("llama", "gemma2", "mixtral", "gemma4", "olmo2", "falcon_h1", "mimo_v2_flash", "deepseek_v3")


def hard_numbers(dtype: str) -> Array:
    """Numbers of all sizes, every number of the dtype, every border between two, and some beyond the largest."""
    random = np.random.default_rng(1)
    sizes = 10.0 ** random.uniform(-4, 3.5, 20_000)
    places = grid(dtype)
    borders = places.borders[1:-1]
    beside = [np.nextafter(borders, np.inf), np.nextafter(borders, -np.inf)]
    return np.concatenate([random.standard_normal(20_000) * sizes, places.numbers, borders, *beside, [1e6, -1e6, 0.0]])


def test_numbers_of_all_codes_are_those_of_torch() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    assert np.array_equal(codes.view(torch.float8_e4m3fn).double().numpy(), float8_numbers(), equal_nan=True)


def test_numbers_of_float32_are_rounded_as_torch_casts_them() -> None:
    numbers = hard_numbers("fp8_e4m3").astype(np.float32)
    cast = torch.tensor(numbers).clamp(-448, 448).to(torch.float8_e4m3fn).double().numpy()
    places = grid("fp8_e4m3")
    assert np.array_equal(places.numbers[places.nearest(numbers.astype(np.float64))], cast)


@DTYPES
def test_engine_rounds_float64_once(dtype: str) -> None:
    numbers = hard_numbers(dtype)
    codec = codec_of(KvRounding(dtype, "tensor", 1.0), torch.float64)
    read = codec.codes_of(torch.tensor(numbers)).numpy()
    places = grid(dtype)
    assert np.array_equal(places.numbers[places.of_code[read]], places.numbers[places.nearest(numbers)])


def codec_of(rounding: KvRounding, dtype: torch.dtype, width: int = 6) -> KvCodec:
    return KvCodec(rounding, CacheSpec((Reach(), Reach()), 3, width, 8, 4, torch.device("cpu"), dtype, 5))


def rows(width: int) -> Array:
    return np.random.default_rng(width).standard_normal((3, 40, width)) * 3


@DTYPES
@SCALES
@pytest.mark.parametrize("engine_dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_engine_and_oracle_read_the_same_numbers(dtype: str, scales: str, engine_dtype: torch.dtype) -> None:
    rounding = KvRounding(dtype, scales, 2.0**-6)
    codec = codec_of(rounding, engine_dtype)
    keys, values = (torch.tensor(rows(width)).to(engine_dtype) for width in (6, 5))
    cells = codec.encode(1, (keys, values))
    assert [cell.shape[-1] for cell in cells] == [*codec.widths(1)]
    oracle = RoundedColumns(rounding, str(engine_dtype).removeprefix("torch."), 2)
    pair = (keys.double().numpy(), values.double().numpy())
    codes = codec.shown_codes(1, cells).numpy()
    # Scales of float32 are rounded, and a number of few bits may be half of the largest one, on a border.
    true = oracle.columns(1, pair, np.arange(40), None if engine_dtype == torch.float64 else codes)
    assert np.array_equal(oracle.codes(1, *true), np.where(codes == 128, 0, codes) if dtype == "fp8_e4m3" else codes)
    unit = torch.finfo(engine_dtype).eps
    for read, expected in zip(codec.decode(1, cells), true, strict=True):
        assert np.abs(read.double().numpy() - expected).max() <= 2 * unit * np.abs(expected).max()


def test_oracle_takes_a_shown_code_near_its_border_alone() -> None:
    rounded = RoundedColumns(KvRounding("int8", "tensor", 1.0), "float32", 2)
    near = 2.5 + 1e-6
    numbers = (np.array([[[near, 2.6, 90.0]]]), np.zeros((1, 1, 1)))
    shown = np.array([[2, 2, 90, 0]])
    keys, _ = rounded.columns(0, numbers, np.arange(1), shown)
    assert keys.tolist() == [[[2.0, 3.0, 90.0]]]
    assert rounded.columns(0, numbers, np.arange(1), None)[0].tolist() == [[[3.0, 3.0, 90.0]]]
    assert rounded.columns(0, numbers, np.arange(1), np.full((1, 4), UNKNOWN))[0].tolist() == [[[3.0, 3.0, 90.0]]]
    held = replace(rounded, is_exact=False)
    assert held.columns(0, numbers, np.arange(1), shown)[0].tolist() == [[[2.0, 2.0, 90.0]]]


def layout_of(kind: str, **settings: object) -> KvLayout:
    traits = KINDS[kind]
    return KvLayout(kind=kind, page_size=2 if traits.pages else 0, **settings)  # type: ignore[arg-type]


STORING = [kind for kind, traits in KINDS.items() if not traits.ring]


@pytest.mark.parametrize("kind", STORING)
def test_logits_are_those_of_the_plain_layout(kind: str) -> None:
    engine = open_cpu()
    arch = next(arch for arch in GALLERY if arch.family == "llama" and arch.heads > arch.kv_heads > 1)
    for dtype, scales in (("fp8_e4m3", "head"), ("int8", "block")):
        layout = KvLayout(kv_dtype=dtype, kv_scales=scales, kv_scale=1 / 16)
        case = Case(Seeded(arch, 1), (2, 1, 1, 3, 1, 2, 3, 0), TREE, layout, stops=Stops(5))
        other = layout_of(kind, kv_dtype=dtype, kv_scales=scales, kv_scale=1 / 16, poison="large")
        plain, twin = engine.run(case), engine.run(replace(case, layout=other))
        for step, twin_step in zip(plain.steps, twin.steps, strict=True):
            assert step.scored is not None
            assert twin_step.scored is not None
            difference = np.abs(step.scored.logits - twin_step.scored.logits).max()
            assert difference == 0 if KINDS[kind].bitwise else difference < 1e-4
            assert np.array_equal(step.scored.stored, twin_step.scored.stored)  # type: ignore[arg-type]


@pytest.mark.parametrize("family", FAMILIES)
def test_both_oracles_agree_with_the_engine(family: str) -> None:
    engine = open_cpu()
    arch = next(arch for arch in GALLERY if arch.family == family and arch.vocab_size > 4)
    for dtype, scales in (("fp8_e4m3", "tensor"), ("int8", "row")):
        layout = layout_of("paged", kv_dtype=dtype, kv_scales=scales, kv_scale=1 / 16)
        case = Case(Seeded(arch, 1), (2, 1, 1, 3, 0), TREE, layout, stops=Stops(3), dtype="float64")
        rounded, path_by_path = ORACLE(case), Oracle(PathByPath)(case)
        exact = ORACLE(replace(case, layout=layout_of("paged")))
        for step, *true in zip(engine.run(case).steps, rounded.steps, path_by_path.steps, strict=True):
            assert step.scored is not None
            for true_step in true:
                assert true_step.scored is not None
                assert np.abs(step.scored.logits - true_step.scored.logits).max() < 1e-9
        first, exact_first = rounded.steps[0].scored, exact.steps[0].scored
        assert first is not None
        assert exact_first is not None
        assert np.abs(first.logits - exact_first.logits).max() > 1e-6


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_a_session_moves_codes_with_their_scales(dtype: str) -> None:
    arch = next(arch for arch in GALLERY if arch.family == "llama" and arch.heads > arch.kv_heads > 1)
    target = Seeded(arch, 3)
    draft = LanguageModel(target, RankTree((0, 0, 0, 1, 1, 2), (0, 0, 1, 0, 1, 0)))
    actions = (
        *(("add", (0,)), ("add", (1,)), ("step", (0, 1)), ("fork", (0, 2)), ("step", (2, 0, 1)), ("evict", (0,))),
        *(("step", (1, 2)), ("restore", (0,)), ("preempt", (0,)), ("step", (0, 1, 2)), ("cancel", (1,))),
        *(("step", (2, 0)), ("hand-over", (0,)), ("step", (0,))),
    )
    mates = (Mate((3, 1, 2), draft, stops=Stops(9)), Mate((2,), draft, stops=Stops(9)))
    session = Session(mates, tuple(Action(kind, requests) for kind, requests in actions))
    layout = replace(layout_of("prefix", kv_dtype="int8", kv_scales="row"), second_tier=4, first_tier=2)
    case = Case(target, (1, 2, 3, 0, 1), draft, layout, stops=Stops(9), dtype=dtype, session=session)
    verdict = judge(case, ALL, ORACLE, subject_of(open_cpu()))
    assert not verdict.findings
    assert not verdict.internal
    assert verdict.outcomes["cache.commit-equivalence"] == "checked"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kv_dtype": "fp8_e5m2"}, "kv_dtype"),
        ({"kv_dtype": "int8", "kv_scales": "page"}, "kv_scales"),
        ({"kv_dtype": "int8", "kv_scale": 0.0}, "kv_scale"),
        ({"kv_dtype": "int8", "kv_scale": float("nan")}, "kv_scale"),
        ({"kv_dtype": "int8", "latent": True}, "latent rows"),
        ({"kv_dtype": "int8", "kind": "sliding"}, "lets columns go"),
    ],
)
def test_a_layout_refuses_what_it_cannot_store(settings: dict[str, object], words: str) -> None:
    with pytest.raises(Malformed, match=words):
        KvLayout(**settings)  # type: ignore[arg-type]


def test_a_case_refuses_ranks_and_index_keys() -> None:
    stored = KvLayout(kv_dtype="int8")
    arch = next(arch for arch in GALLERY if arch.family == "llama")
    with pytest.raises(Malformed, match="2 ranks"):
        Case(Seeded(arch, 1), (1,), layout=stored, ranks=2)
    indexed = next(arch for arch in GALLERY if arch.words.indexed)
    with pytest.raises(Malformed, match="index keys"):
        Case(Seeded(indexed, 1), (1,), layout=stored)


def test_an_engine_without_the_setting_is_not_asked() -> None:
    case = Case(Seeded(GALLERY[0], 1), (1,), layout=KvLayout(kv_dtype="int8"))
    narrow = Abilities(dtypes=("float32",), layout_settings=())
    assert narrow.outside(case) == "KV layout with kv_dtype"
    assert KvLayout(kv_dtype="int8").of_kind("sliding").kv_dtype == ""


@pytest.mark.slow
@pytest.mark.parametrize("dtypes", [("float32", "float64"), ("bfloat16", "float16")])
def test_clean_drawn_cases_with_stored_codes_differ_in_nothing(dtypes: tuple[str, ...]) -> None:
    engine = open_cpu()
    judged = 0

    @seed(1)
    @settings(
        max_examples=400,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(cases(dtypes=dtypes, within=engine.declaration))
    def judge_stored(case: Case) -> None:
        nonlocal judged
        if case.layout.kv_dtype and judged < 40:
            judged += 1
            assert not judge(case, ALL, Oracle(), subject_of(engine)).findings

    judge_stored()
    assert judged >= 40


def test_a_draft_that_is_the_target_takes_experts_of_its_own() -> None:
    # The target's rows read rounded columns, the draft's do not: experts that the target chose are not the draft's.
    arch = next(arch for arch in GALLERY if arch.family == "mixtral")
    model = Seeded(arch, 0)
    layout = KvLayout(kind="paged", page_size=2, kv_dtype="fp8_e4m3", kv_scale=0.125)
    prompt = tuple((7 * place**2 + 3 * place + 1) % arch.vocab_size for place in range(24))
    draft = LanguageModel(model, RankTree((0, 0, 1), (0, 0, 0)))
    case = Case(model, prompt, draft, layout, stops=Stops(8), dtype="float32")
    verdict = judge(case, ALL, Oracle(), subject_of(open_cpu()))
    assert verdict.outcomes["cache.commit-equivalence"] == "checked"
    assert not verdict.findings
