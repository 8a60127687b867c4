"""Attention over latent rows by Ascend's operators: version 2 of fused-infer attention under the mask of a tree."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from specverify.backends.ascend.fused import AscendFused
from specverify.backends.ascend.latent import LatentCall, ask_latent
from specverify.backends.ascend.operands import Operands
from specverify.backends.ascend.operators.install import install
from specverify.backends.ascend.operators.rules import AscendContractError, NotEmulated
from specverify.backends.ascend.probe.calls import arguments
from specverify.backends.ascend.probe.examples import latent
from specverify.backends.compositions import open_engine
from specverify.backends.engine.columns import AttentionInputs, Paging
from specverify.properties.invariants import ALL
from specverify.properties.verdict.judge import judge
from specverify.reference.family.latent import DeepseekV3Settings
from specverify.reference.layout import KvLayout
from specverify.reference.oracle.decoder import Oracle
from specverify.setup.subjects import subject_of
from tests.drawn_families import listed_architectures
from tests.meta.oracle.test_rare_families import case_for
from tests.tiers import gated

install()

V2 = "npu_fused_infer_attention_score_v2"
BOUND = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Against attention in float64 on normal inputs, which is rounded to 8 or 11 bits."""


def attention(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scale: float) -> Tensor:
    """Attention in float64 of all heads over one KV head."""
    scores = (query.double() @ key.double().transpose(-1, -2) * scale).masked_fill(~visible, float("-inf"))
    return torch.softmax(scores, -1) @ value.double()


def columns(kind: str, dtype: torch.dtype, heads: int, rows: int, prefixes: tuple[int, int]) -> tuple[Any, ...]:
    """Query, latent rows of two lanes with an asymmetric tree, the second one row shorter, and what is meant."""
    torch.manual_seed(heads * rows)
    row_counts, width = (rows, max(1, rows - 1)), max(prefixes) + rows
    query, key = torch.randn(2, heads, rows, 10).to(dtype), torch.randn(2, 1, width, 10).to(dtype)
    visible = torch.zeros(2, 1, rows, width, dtype=torch.bool)
    for lane, prefix in enumerate(prefixes):
        visible[lane, :, : row_counts[lane], :prefix] = True
        for row in range(rows):
            visible[lane, 0, row, prefix + row] = True
            if 0 < row < row_counts[lane]:
                above = (row - 1) // 2
                visible[lane, 0, row, prefix:] |= visible[lane, 0, above, prefix:]
    expected = attention(query, key, key[..., :8], visible, 0.3)
    paging = None
    if kind.startswith("paged"):
        size = int(kind.removeprefix("paged"))
        each = -(-width // size)
        order = torch.randperm(2 * each + 1)
        cells = torch.full((2 * each + 1, size, 1, 10), float("nan"), dtype=dtype)
        lengths = torch.tensor(
            [prefix + count for prefix, count in zip(prefixes, row_counts, strict=True)], dtype=torch.int32
        )
        for lane in range(2):
            for column in range(int(lengths[lane])):
                cells[order[lane * each + column // size], column % size] = key[lane, :, column]
        table = order[: 2 * each].view(2, each).to(torch.int32)
        paging = Paging(cells, cells[..., :8], table, lengths)
    messages: list[str] = []
    starts = torch.tensor(prefixes, dtype=torch.int32)
    inputs = AttentionInputs(key, key[..., :8], visible, starts, paging, messages.append, latent=True)
    return query, inputs, expected, row_counts[1], messages


def asking(calls: list[LatentCall]) -> AscendFused:
    """The attention, which notes each of its calls over latent rows."""

    def ask(query: Tensor, operands: Operands, mask: Tensor | None, scaling: float) -> LatentCall:
        calls.append(ask_latent(query, operands, mask, scaling))
        return calls[-1]

    return AscendFused(ask_latent=ask)


@pytest.mark.parametrize("dtype", list(BOUND))
def test_latent_rows_are_attended_as_meant_and_by_which_operator(dtype: torch.dtype) -> None:
    for kind in ("gathered", "paged16", "paged3"):
        for heads, rows, prefixes in (
            (4, 7, (37, 21)),
            (1, 1, (5, 2)),
            (2, 16, (4, 0)),
            (3, 5, (9, 4)),
            (4, 17, (3, 1)),
        ):
            calls: list[LatentCall] = []
            query, inputs, expected, num_rows, messages = columns(kind, dtype, heads, rows, prefixes)
            out = asking(calls)(query, inputs, 0.3).double()
            assert out.shape == expected.shape
            out[1, :, num_rows:], expected[1, :, num_rows:] = 0.0, 0.0  # nobody reads what a padding row gets
            assert float((out - expected).abs().max()) < BOUND[dtype], (kind, heads, rows)
            assert messages == []
            fits = dtype != torch.float32 and heads != 3 and rows <= 16 and not (rows == 16 and kind != "gathered")
            assert len(calls) == fits, (kind, heads, rows)
            if fits:
                assert (calls[0].table is None) == (kind != "paged16")
                assert calls[0].sparse_mode == (9 if rows > 1 else 0)


def test_rows_that_a_trees_mask_cannot_say_go_to_the_other_operators() -> None:
    """A row that does not see a column before the last rows: a window, or a branch that is open beside it."""
    calls: list[LatentCall] = []
    query, inputs, _, _, _ = columns("gathered", torch.float16, 4, 7, (37, 21))
    narrow = inputs.visible.clone()
    narrow[..., :5] = False
    out = asking(calls)(query, replace(inputs, visible=narrow), 0.3).double()
    expected = attention(query, inputs.key, inputs.value, narrow, 0.3)
    assert float((out - expected)[0].abs().max()) < BOUND[torch.float16]
    assert calls == []


def call(**inputs: Any) -> Tensor:
    """The output of version 2 on these arguments."""
    out: Tensor = getattr(torch.ops.npu, V2)(**arguments(V2, inputs))[0]
    return out


def test_sparse_mode_9_is_the_tree_and_sparse_mode_3_the_chain() -> None:
    inputs = latent(rows=5)
    query, key = (torch.cat([inputs[name], inputs[f"{name}_rope"]], -1) for name in ("query", "key"))
    rows, width = query.shape[2], key.shape[2]
    mask = torch.tensor([[0, 1, 1, 1, 1], [0, 0, 1, 1, 1], [0, 1, 0, 1, 1], [0, 0, 1, 0, 1], [0, 1, 0, 1, 0]]).bool()
    visible = torch.ones(rows, width, dtype=torch.bool)
    visible[:, width - rows :] = ~mask
    expected = attention(query, key, inputs["value"], visible, 0.05)
    both = torch.stack([mask, mask])
    for scored in (both, both.to(torch.int8)):
        assert float((call(**{**inputs, "atten_mask": scored}).double() - expected).abs().max()) < 2e-3
    wrong = call(**{**inputs, "atten_mask": both.transpose(1, 2).contiguous()})
    assert float((wrong.double() - expected).abs().max()) > 0.1
    chain = torch.triu(torch.ones(2048, 2048, dtype=torch.bool), 1)
    expected = attention(query, key, inputs["value"], torch.ones(rows, width).tril(width - rows).bool(), 0.05)
    assert float((call(**{**inputs, "atten_mask": chain, "sparse_mode": 3}).double() - expected).abs().max()) < 2e-3
    names = ("query", "key", "value", "query_rope", "key_rope")
    flat = {name: inputs[name].transpose(1, 2).flatten(2).contiguous() for name in names}
    output = call(**{**inputs, **flat, "atten_mask": both, "input_layout": "BSH"})
    assert torch.equal(output, call(**{**inputs, "atten_mask": both}).transpose(1, 2).flatten(2))


def test_what_is_not_emulated_is_not_guessed() -> None:
    unknown: tuple[dict[str, Any], ...] = (
        {"input_layout": "TND"},
        {"sparse_mode": 4},
        {"sparse_mode": 0},
        {"inner_precise": 2},
    )
    for changes in unknown:
        with pytest.raises(NotEmulated, match="query_rope"):
            call(**latent(**changes))
    with pytest.raises(AscendContractError, match=r"fia\.heads"):
        call(**latent(num_heads=8))
    inputs = latent(num_heads=128, input_layout="BSH")
    flat = {
        name: tensor.flatten(2)
        for name, tensor in inputs.items()
        if isinstance(tensor, Tensor) and name != "atten_mask"
    }
    with pytest.raises(AscendContractError, match=r"fia\.heads"):
        call(**{**inputs, **{name: tensor[..., :-1].contiguous() for name, tensor in flat.items()}})
    plain = latent()
    rope = plain.pop("query_rope"), plain.pop("key_rope")
    with pytest.raises(AscendContractError, match=r"fia\.sparse-mode"):
        call(**plain)
    with pytest.raises(NotEmulated, match="query_rope of npu_fused_infer_attention_score"):
        torch.ops.npu.npu_fused_infer_attention_score(
            plain["query"], plain["key"], plain["value"], query_rope=rope[0], key_rope=rope[1], num_heads=4,
            num_key_value_heads=1, input_layout="BNSD",
        )  # fmt: skip


@pytest.mark.parametrize("kind", gated(["branch", "paged", "static", "prefix"], lambda index: index < 2))
def test_deepseeks_tree_runs_by_the_operator(kind: str) -> None:
    backend, calls = open_engine("ascend-fused-emulated"), list[LatentCall]()
    backend.seams = replace(backend.seams, attend=asking(calls))
    # Without experts, whose ties would explain any difference in 16 bits.
    plain = listed_architectures("deepseek_v3")[0]
    arch = replace(plain, settings=replace(DeepseekV3Settings.of(plain), dense_layers=2))
    case = case_for(
        arch, KvLayout(kind=kind, page_size=16 if kind in ("paged", "prefix") else 0, latent=True), "bfloat16"
    )
    judged = ("attention.context-exact", "cache.commit-equivalence", "structure.mask-is-ancestry")
    verdict = judge(
        case, tuple(invariant for invariant in ALL if invariant.name in judged), Oracle(), subject_of(backend)
    )
    assert verdict.findings == ()
    assert set(verdict.outcomes.values()) == {"checked"}
    assert backend.run(case).fallbacks == {}
    trees = [latent_call for latent_call in calls if latent_call.mask is not None]
    assert trees
    assert any(latent_call.table is not None for latent_call in trees) == (kind in ("paged", "prefix"))
