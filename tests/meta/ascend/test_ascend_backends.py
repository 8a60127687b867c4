"""Ascend's backends: what they hand to the operators is the attention that was meant, in every layout and mode."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from specverify.backends import faults
from specverify.backends.ascend.atb import AscendAtb
from specverify.backends.ascend.device import why_no_npu
from specverify.backends.ascend.eager import ascend_eager
from specverify.backends.ascend.encodings import require_pages, require_sight, require_slots
from specverify.backends.ascend.fused import AscendFused
from specverify.backends.ascend.operators.install import install
from specverify.backends.base import Declaration, Unavailable, Unsupported, WrongFlag
from specverify.backends.compositions import open_engine
from specverify.backends.engine.attention.eager import eager
from specverify.backends.engine.columns import Attend, AttentionInputs, Paging
from specverify.backends.engine.composition import SEAMS
from specverify.backends.engine.two_modes import TreesEager, in_mode
from specverify.backends.flags import FAST_REORDER, FLAGS, FORCE_EAGER, NO_FUSED, NO_FUSED_TREE, Mode, mode_of
from specverify.backends.registry import open_backend
from specverify.backends.shipped import ROWS
from specverify.cli import main
from specverify.plan import default_dtypes
from specverify.reference.layout import FAST_SWITCH
from specverify.setup.environment import environment
from specverify.setup.subjects import open_planted

install()

BOUND = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Against attention in float64 on normal inputs; outputs up to 4 are rounded to 8 or 11 bits."""


def columns(
    kind: str,
    dtype: torch.dtype,
    rows: int,
    dim: int,
    messages: list[str],
    prefixes: tuple[int, int] = (150, 37),
    garbage: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, AttentionInputs, Tensor]:
    """Query, columns and what is meant, in float64, for two lanes of unequal prefix, the second with a padding row.

    `garbage` says of bool [2, 1, T, C], what is visible, which columns [2, C] are overwritten with 300.
    """
    torch.manual_seed(rows * dim)
    heads, kv_heads = 4, 2
    row_counts = (rows, max(1, rows - 1))
    width = max(prefix + rows for prefix in prefixes)
    query = torch.randn(2, heads, rows, dim).to(dtype)
    key, value = (torch.randn(2, kv_heads, width, dim).to(dtype) for _ in range(2))
    visible = torch.zeros(2, 1, rows, width, dtype=torch.bool)
    for lane, prefix in enumerate(prefixes):
        first = 5 if "window" in kind else 0
        visible[lane, :, : row_counts[lane], first:prefix] = True
        for row in range(rows):
            visible[lane, 0, row, prefix + row] = True
            if 0 < row < row_counts[lane]:
                visible[lane, 0, row, prefix + (row - 1) // 2] = True
    if garbage is not None:
        for tensor in (key, value):
            tensor.masked_fill_(garbage(visible)[:, None, :, None], 300.0)
    wide = key.double().repeat_interleave(2, 1)
    scores = (query.double() @ wide.transpose(-1, -2) * 0.3).masked_fill(~visible, float("-inf"))
    expected = torch.softmax(scores, -1) @ value.double().repeat_interleave(2, 1)
    expected[1, :, row_counts[1] :] = 0.0
    lengths = torch.tensor(
        [prefix + count for prefix, count in zip(prefixes, row_counts, strict=True)], dtype=torch.int32
    )
    paging = None
    if "paged" in kind:
        size = int(kind.split()[0].removeprefix("paged"))
        each = -(-width // size)
        order = torch.randperm(2 * each + 1)
        cells = [torch.full((2 * each + 1, size, kv_heads, dim), float("nan"), dtype=dtype) for _ in range(2)]
        for lane in range(2):
            for column in range(int(lengths[lane])):
                page = order[lane * each + column // size]
                for cell, tensor in zip(cells, (key, value), strict=True):
                    cell[page, column % size] = tensor[lane, :, column]
        paging = Paging(cells[0], cells[1], order[: 2 * each].view(2, each).to(torch.int32), lengths)
    inputs = AttentionInputs(key, value, visible, torch.tensor(prefixes, dtype=torch.int32), paging, messages.append)
    return query, inputs, expected


@pytest.mark.parametrize("attend", [ascend_eager, AscendFused(), AscendAtb()], ids=["eager", "fused", "atb"])
@pytest.mark.parametrize("dtype", list(BOUND))
def test_what_is_asked_for_is_what_was_meant(attend: Attend, dtype: torch.dtype) -> None:
    """NaN lies in every cell of the pages that no lane owns: reading one shows."""
    for kind in ("gathered", "gathered window", "paged128", "paged128 window", "paged16", "paged3"):
        for rows in (1, 2, 7):
            for dim in (16, 6):
                messages: list[str] = []
                query, inputs, expected = columns(kind, dtype, rows, dim, messages)
                out = attend(query, inputs, 0.3).double()
                assert out.shape == expected.shape
                out[1, :, max(1, rows - 1) :] = 0.0  # nobody reads what a padding row gets
                assert float((out - expected).abs().max()) < BOUND[dtype], (kind, rows, dim)
                falls = dtype == torch.float32 and isinstance(attend, AscendAtb)
                assert bool(messages) == falls, messages


LEAKS = (
    ("ascend-sparse-mode-3", "gathered", 7),
    ("ascend-mask-row-offset", "paged128", 7),
    ("ascend-mask-without-prefix", "gathered", 7),
    ("ascend-one-row-mask-ignored", "gathered window", 1),
    ("ascend-mask-with-head-axis", "gathered", 7),
    ("ascend-table-of-next-request", "paged128", 7),
)
"""Faults of calls by which a row sees what is hidden from it, the layout that each needs, and rows."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_leaks_are_seen_at_prefix_2048_bit_by_bit(dtype: torch.dtype) -> None:
    """Overwriting what is hidden from a row of a lane moves no bit of that row; with a fault it does."""
    right = open_engine("ascend-fused-emulated").seams

    def is_changed(attend: Attend, kind: str, rows: int, lane: int) -> bool:
        row = min(5, rows - 1)

        def hidden(visible: Tensor) -> Tensor:
            spoilt = torch.zeros_like(visible[:, 0, 0])
            spoilt[lane] = ~visible[lane, 0, row]
            if "paged" in kind:
                spoilt[1 - lane] = True
            return spoilt

        outputs = []
        for garbage in (None, hidden):
            query, inputs, _ = columns(kind, dtype, rows, 16, [], (2048, 2040), garbage)
            outputs.append(attend(query, inputs, 0.3)[lane, :, row])
        return not torch.equal(*outputs)

    for name, kind, rows in LEAKS:
        faulty = faults.fault_named(name).plant(right).attend
        assert not any(is_changed(right.attend, kind, rows, lane) for lane in (0, 1)), name
        assert any(is_changed(faulty, kind, rows, lane) for lane in (0, 1)), name


def test_a_fault_of_a_call_is_planted_where_the_call_is() -> None:
    ascend_faults = [fault for fault in faults.ALL if fault.name.startswith("ascend-")]
    assert len(ascend_faults) == 24
    for fault in ascend_faults:
        assert fault.plant(open_backend(fault.on).seams) is not None  # type: ignore[attr-defined]
        with pytest.raises(Unsupported, match=r"a fault of calls to .*: plant it in ascend-fused"):
            fault.plant(SEAMS)


def test_heads_that_no_operator_takes_go_to_eager_and_say_so() -> None:
    messages: list[str] = []
    query, inputs, expected = columns("gathered", torch.float16, 2, 520, messages)
    out = AscendFused()(query, inputs, 0.3).double()
    assert messages == ["eager: head dimension 520, at most 512"]
    assert float((out - expected)[0].abs().max()) < 2e-2


def test_what_the_device_would_not_check_is_checked_before_the_launch() -> None:
    table = torch.tensor([[0, 1]], dtype=torch.int32)
    require_pages(table, [5], 2, 4)
    for wrong, why in (
        (lambda: require_pages(table.long(), [5], 2, 4), "int32 alone"),
        (lambda: require_pages(table, [5], 1, 4), "a page outside 0 to 0"),
        (lambda: require_pages(table - 1, [5], 2, 4), "a page outside"),
        (lambda: require_pages(table, [9], 2, 4), "9 columns in 2 pages of 4"),
        (lambda: require_slots(torch.tensor([0, -1]), 8), "a slot outside 0 to 7: -1"),
        (lambda: require_slots(torch.tensor([0, 8]), 8), "a slot outside 0 to 7: 8"),
        (lambda: require_slots(torch.tensor([3, 3]), 8), "a slot is written twice"),
        (lambda: require_sight(torch.zeros(1, 1, 2, 3, dtype=torch.bool)), "row 0 of lane 0 sees no column"),
    ):
        with pytest.raises(ValueError, match=why):
            wrong()  # type: ignore[no-untyped-call]


def test_rows_of_the_registry_are_what_backends_declare() -> None:
    ascend_rows = [row for row in ROWS if row.name.startswith("ascend")]
    assert Counter((row.device, row.emulated) for row in ascend_rows) == {("npu", False): 3, ("cpu", True): 3}
    for row in ascend_rows:
        if row.emulated:
            assert row.name.endswith("-emulated")
            assert row.sentence.startswith("EMULATED: ")
            declared: Declaration = open_backend(row.name).declaration
            assert (declared.name, declared.device, declared.emulated) == (row.name, "cpu", True)
            assert declared.dtypes == row.dtypes
            assert default_dtypes(row.name) == row.dtypes, "without float64, all that it has"
        elif why_no_npu() is not None:
            with pytest.raises(Unavailable, match=f"^{row.name} needs an Ascend device: .*{row.name}-emulated"):
                open_backend(row.name)


@pytest.mark.parametrize("name", ["ascend-fused", "ascend-eager"])
def test_without_a_device_it_is_exit_code_3_and_names_the_twin(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    if why_no_npu() is None:
        pytest.skip("this machine has an Ascend device")
    with pytest.raises(SystemExit) as ended:
        main(["bench", "--backend", name, "--cases", "1"])
    output = capfd.readouterr()
    assert (ended.value.code, output.out) == (3, "")
    assert output.err.count("\n") == 1
    assert f"{name}-emulated" in output.err


FLAG_MODES: list[tuple[dict[str, str], str | None, Mode]] = [
    ({}, None, Mode()),
    ({NO_FUSED: "0"}, None, Mode()),
    ({NO_FUSED: ""}, None, Mode()),
    ({NO_FUSED: "1"}, None, Mode(fused=False)),
    ({FORCE_EAGER: "1"}, None, Mode(fused=False, aligned=True)),
    ({FORCE_EAGER: "1", NO_FUSED: "1"}, None, Mode(fused=False, aligned=True)),
    ({}, "eager-aligned", Mode(fused=False, aligned=True)),
    ({NO_FUSED_TREE: "1"}, None, Mode(trees=False)),
    ({NO_FUSED_TREE: "1", NO_FUSED: "1"}, None, Mode(fused=False)),
    ({NO_FUSED: "1"}, "performance", Mode()),
    ({}, "reference", Mode(fused=False)),
]


def test_flags_and_options_mean_modes() -> None:
    for flags, word, mode in FLAG_MODES:
        assert mode_of(word, flags) == mode, (flags, word)
    assert FAST_REORDER == FAST_SWITCH
    modes = [Mode(), Mode(fused=False), Mode(trees=False), Mode(fused=False, aligned=True)]
    assert [mode.word for mode in modes] == ["performance", "reference", "performance, trees eager", "eager-aligned"]
    for name in FLAGS:
        with pytest.raises(WrongFlag, match=f"^{name}='yes': set it to 0 or 1"):
            mode_of(None, {name: "yes"})


def test_modes_take_fused_attention_out_and_leave_eager_alone() -> None:
    fused = AscendFused()
    seams = replace(SEAMS, attend=fused, draft_attend=fused)
    assert in_mode(seams, Mode()) is seams
    plain = in_mode(seams, Mode(fused=False))
    assert plain.attend is plain.draft_attend is ascend_eager
    assert in_mode(SEAMS, Mode(fused=False)).attend is eager
    trees = in_mode(seams, Mode(trees=False)).attend
    assert trees == TreesEager(fused, ascend_eager)
    calls: list[str] = []

    def note_calls(name: str) -> Attend:
        def attend(query: Tensor, inputs: AttentionInputs, scaling: float) -> Tensor:
            calls.append(name)
            return query

        return attend

    mixed = TreesEager(note_calls("fused"), note_calls("eager"))
    for rows, prefix in ((1, 5), (4, 5), (4, 0)):
        query, inputs, _ = columns("gathered", torch.float32, rows, 16, [])
        mixed(query, replace(inputs, prefix=torch.full((2,), prefix, dtype=torch.int32)), 0.3)
    assert calls == ["fused", "eager", "fused"]


def test_the_mode_is_an_option_a_flag_and_part_of_the_manifest(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from specverify.setup.subjects import manifest

    assert manifest(open_engine("ascend-fused-emulated")) == {
        "device": "cpu",
        "mode": "performance",
        "emulated": "true",
    }
    backend = open_planted("ascend-fused-emulated", None, "reference")
    assert manifest(backend)["mode"] == "reference"
    monkeypatch.setenv(NO_FUSED_TREE, "1")
    assert manifest(open_engine("ascend-fused-emulated"))["mode"] == "performance, trees eager"
    assert environment()[NO_FUSED_TREE] == "1"
    monkeypatch.setenv(NO_FUSED_TREE, "maybe")
    with pytest.raises(SystemExit) as ended:
        main(["bench", "--backend", "ascend-fused-emulated", "--cases", "1"])
    output = capfd.readouterr()
    assert (ended.value.code, output.out) == (2, "")
    assert output.err == f"specverify: {NO_FUSED_TREE}='maybe': set it to 0 or 1, or leave it unset\n"
