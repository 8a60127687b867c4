"""Ascend's operators, emulated: each rule has a call that keeps it and one that breaks it; what is kept is right."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from specverify.backends.ascend.encodings import additive, boolean, compressed_mask
from specverify.backends.ascend.operators.install import KERNELS, SCHEMAS, install
from specverify.backends.ascend.operators.rules import (
    RULES,
    AscendContractError,
    AscendUndefinedBehaviour,
    BrokenRule,
    as_the_kernel_does,
)
from specverify.backends.ascend.probe import calls
from specverify.backends.ascend.probe.calls import arguments, dense, hidden, numbers, operator_of, paged_arguments
from specverify.backends.ascend.probe.examples import EXAMPLES

install()

BOUND = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 1e-5}
"""How far the emulation may lie from softmax in float64 on normal inputs, relative to numbers above 1."""

INFER = "npu_fused_infer_attention_score"


def run(operator: str, **inputs: Any) -> Any:
    return operator_of(torch.ops, operator)(**arguments(operator, inputs))


def softmax(query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, scale: float) -> Tensor:
    """Attention in float64, [B, N, T, D]."""
    groups = query.shape[1] // key.shape[1]
    wide = key.double().repeat_interleave(groups, 1)
    scores = query.double() @ wide.transpose(-1, -2) * scale
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    return torch.softmax(scores, -1) @ value.double().repeat_interleave(groups, 1)


def tree(parents: list[int], prefix: int) -> Tensor:
    """Bool [T, prefix + T]: every prefix column, and the row's ancestors."""
    visible = torch.zeros(len(parents), prefix + len(parents), dtype=torch.bool)
    visible[:, :prefix] = True
    for row in range(len(parents)):
        node = row
        while True:
            visible[row, prefix + node] = True
            if node == 0:
                break
            node = parents[node]
    return visible


def test_every_rule_has_its_calls_and_every_operator_its_rules() -> None:
    assert [example.rule for example in EXAMPLES] == list(RULES)
    bound = {name for rule in RULES.values() for name in rule.operators}
    assert bound == set(KERNELS) == {*SCHEMAS["npu"], *SCHEMAS["atb"]}
    assert all(rule.text.endswith(".") and rule.source for rule in RULES.values())
    assert {rule.verdict for rule in RULES.values()} == {"rejects", "undefined"}


def test_each_rule_is_kept_by_one_call_and_broken_by_another() -> None:
    for example in EXAMPLES:
        rule = RULES[example.rule]
        refusal = AscendContractError if rule.verdict == "rejects" else AscendUndefinedBehaviour
        for name in rule.operators:
            run(name, **example.right())
            with pytest.raises(refusal, match="EMULATED Ascend") as refused:
                run(name, **example.wrong())
            assert refused.value.rule is rule, f"{rule.id} on {name}: {refused.value}"
            assert "\n" not in str(refused.value)


def test_what_is_undefined_runs_where_the_kernels_behaviour_is_asked_for() -> None:
    for example in EXAMPLES:
        if RULES[example.rule].verdict == "undefined":
            with as_the_kernel_does():
                for name in RULES[example.rule].operators:
                    run(name, **example.wrong())
    with pytest.raises(AscendUndefinedBehaviour):
        run(INFER, **dense(atten_mask=hidden(calls.B, calls.N, calls.T, calls.C)))


@pytest.mark.parametrize("dtype", list(BOUND))
def test_attention_is_softmax_in_float64_under_a_tree(dtype: torch.dtype) -> None:
    torch.manual_seed(7)
    for parents, prefix, heads, kv_heads, dim in (
        ([0, 0, 0, 1, 1, 2, 3, 5], 23, 8, 2, 64),
        ([0, 0, 1], 0, 2, 2, 16),
        ([0] * 40, 700, 4, 1, 128),
    ):
        rows, columns = len(parents), prefix + len(parents)
        visible = tree(parents, prefix)
        query = torch.randn(2, heads, rows, dim).to(dtype)
        key, value = (torch.randn(2, kv_heads, columns, dim).to(dtype) for _ in range(2))
        expected = softmax(query, key, value, visible, dim**-0.5)
        mask = boolean(visible.expand(2, 1, rows, columns))
        plain = {"query": query, "key": key, "value": value, "scale": dim**-0.5, "input_layout": "BNSD"}
        outputs = [run("npu_fusion_attention", **plain, head_num=heads, atten_mask=mask)[0]]
        if dtype != torch.float32:
            inputs = {**plain, "num_heads": heads, "num_key_value_heads": kv_heads, "inner_precise": 2}
            outputs += [run(name, **inputs, atten_mask=mask)[0] for name in (INFER, f"{INFER}_v2")]
            outputs.append(_attend_pages(inputs, visible))
            outputs.append(_split(inputs, visible))
        for output in outputs:
            assert float(((output.double() - expected).abs() / expected.abs().clamp(min=1)).max()) < BOUND[dtype]


def _in_pages(inputs: dict[str, Any], width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Cells [pages, 128, heads, D] of keys and values, garbage where nothing lies, and the block table."""
    batch, heads, columns, dim = inputs["key"].shape
    order = torch.randperm(batch * width)
    cells = []
    for tensor in (inputs["key"], inputs["value"]):
        pages = torch.full((batch * width, 128, heads, dim), 77.0, dtype=tensor.dtype)
        for lane in range(batch):
            for column in range(columns):
                pages[order[lane * width + column // 128], column % 128] = tensor[lane, :, column]
        cells.append(pages)
    return cells[0], cells[1], order.view(batch, width).to(torch.int32)


def _attend_pages(inputs: dict[str, Any], visible: Tensor) -> Tensor:
    """Fused-infer attention over pages, under a mask as wide as the block table."""
    rows, columns = visible.shape
    width = -(-columns // 128) + 1
    key, value, table = _in_pages(inputs, width)
    mask = torch.ones(2, 1, rows, width * 128, dtype=torch.bool)
    mask[..., :columns] = ~visible
    cells = {"key": key.flatten(2), "value": value.flatten(2), "block_table": table, "block_size": 128}
    out: Tensor = run(INFER, **{**inputs, **cells}, atten_mask=mask, actual_seq_lengths_kv=[columns] * 2)[0]
    return out


def _split(inputs: dict[str, Any], visible: Tensor) -> Tensor:
    """ATB's splitfuse over the same pages, as [B, N, T, D]."""
    query = inputs["query"]
    batch, heads, rows, dim = query.shape
    columns = visible.shape[1]
    key, value, table = _in_pages(inputs, -(-columns // 128))
    tokens = query.transpose(1, 2).reshape(-1, heads, dim).contiguous()
    out = torch.empty_like(tokens)
    run(
        "_npu_paged_attention_splitfuse",
        query=tokens,
        key_cache=key,
        value_cache=value,
        block_table=table,
        context_lens=torch.tensor([columns] * batch, dtype=torch.int32),
        mask=additive(visible, query.dtype).repeat(batch, 1),
        seq_len=torch.tensor([rows] * batch, dtype=torch.int32),
        num_kv_heads=key.shape[2],
        num_heads=heads,
        scale_value=inputs["scale"],
        out=out,
    )
    return out.view(batch, rows, heads, dim).transpose(1, 2)


def _encode_mask(name: str, visible: Tensor) -> Tensor:
    """One mask in one of the three encodings."""
    if name == "boolean":
        return boolean(visible)
    return additive(visible, torch.float16) if name == "additive" else compressed_mask(visible.device)


@pytest.mark.parametrize("operator", [INFER, f"{INFER}_v2", "npu_fusion_attention", "_npu_paged_attention_splitfuse"])
def test_an_asymmetric_tree_tells_the_encodings_apart(operator: str) -> None:
    """The right encoding gives the tree; any other, and the right one inverted, is refused or gives something else."""
    torch.manual_seed(11)
    parents, prefix, dim = [0, 0, 0, 1, 1, 4], 9, 32
    visible = tree(parents, prefix)
    rows, columns = visible.shape
    query = torch.randn(1, 4, rows, dim).half()
    key, value = (torch.randn(1, 2, columns, dim).half() for _ in range(2))
    expected = softmax(query, key, value, visible, dim**-0.5)
    inputs: dict[str, Any] = {"query": query, "key": key, "value": value, "scale": dim**-0.5}

    def ask(mask: Tensor, sparse_mode: int) -> Tensor:
        if operator == "npu_fusion_attention":
            plain = {**inputs, "head_num": 4, "input_layout": "BNSD"}
            return run(operator, **plain, atten_mask=mask, sparse_mode=sparse_mode)[0]  # type: ignore[no-any-return]
        if operator.startswith(INFER):
            plain = {**inputs, "num_heads": 4, "num_key_value_heads": 2, "input_layout": "BNSD"}
            return run(operator, **plain, atten_mask=mask, sparse_mode=sparse_mode)[0]  # type: ignore[no-any-return]
        return _split_with(inputs, mask, columns)

    right = "additive" if operator.startswith("_npu") else "boolean"
    for name in ("boolean", "additive", "compressed"):
        for wrong_way in (False, True):
            for sparse_mode in (2, 3) if name == "compressed" else (0,):
                mask = _encode_mask(name, ~visible if wrong_way else visible)
                try:
                    error = float((ask(mask, sparse_mode).double() - expected).abs().max())
                except BrokenRule:
                    error = math.inf
                alike = error < BOUND[torch.float16]
                assert alike == (name == right and not wrong_way), (name, wrong_way, sparse_mode, error)


def _split_with(inputs: dict[str, Any], mask: Tensor, columns: int) -> Tensor:
    query = inputs["query"]
    _, heads, rows, dim = query.shape
    key, value, table = _in_pages({**inputs, "key": inputs["key"], "value": inputs["value"]}, 1)
    tokens = query.transpose(1, 2).reshape(-1, heads, dim).contiguous()
    out = torch.empty_like(tokens)
    length, num_rows = (torch.tensor([count], dtype=torch.int32) for count in (columns, rows))
    run(
        "_npu_paged_attention_splitfuse", query=tokens, key_cache=key, value_cache=value, block_table=table, mask=mask,
        context_lens=length, seq_len=num_rows, num_kv_heads=2, num_heads=heads, scale_value=inputs["scale"], out=out,
    )  # fmt: skip
    return out.view(1, rows, heads, dim).transpose(1, 2)


def test_rows_that_see_nothing_are_a_mean_or_zero_and_never_nan() -> None:
    mask = torch.zeros(calls.T, calls.C, dtype=torch.bool)
    mask[1] = True
    with as_the_kernel_does():
        mean, _ = run(INFER, **dense(atten_mask=mask))
    value = dense()["value"].double().mean(2)
    assert torch.allclose(mean[:, :, 1].double(), value.repeat_interleave(calls.N // calls.KV, 1), atol=2e-3)
    zero, lse = run(INFER, **dense(atten_mask=mask, inner_precise=2, softmax_lse_flag=True))
    assert not zero[:, :, 1].any()
    assert torch.isposinf(lse[:, :, 1]).all()


def test_defaults_that_differ_from_everybodys_are_the_wheels() -> None:
    """Scale 1, layout BSH, as many KV heads as heads: a call that leaves them out is refused or wrong."""
    inputs = dense()
    plain = run(INFER, **inputs)[0]
    assert not torch.allclose(run(INFER, **{**inputs, "scale": 1.0})[0], plain, atol=1e-2)
    del inputs["scale"]
    assert torch.equal(run(INFER, **inputs)[0], run(INFER, **{**inputs, "scale": 1.0})[0])
    with pytest.raises(RuntimeError, match="Unknown keyword argument 'num_heads'"):
        operator_of(torch.ops, f"{INFER}_v2")(**dense())


def test_what_the_device_does_not_write_is_poison() -> None:
    out, _ = run(INFER, **dense(actual_seq_lengths=[calls.T, 1]))
    assert torch.isnan(out[1, :, 1:]).all()
    assert not torch.isnan(out[0]).any()
    assert not torch.isnan(out[1, :, :1]).any()
    with as_the_kernel_does():
        foreign, _ = run(INFER, **paged_arguments(block_table=torch.tensor([[1, 3], [2, 4]], dtype=torch.int32)))
    assert torch.isnan(foreign[1]).any()
    assert not torch.isnan(foreign[0]).any()


def test_cache_writes_land_in_their_slots_and_nowhere_else() -> None:
    for operator, inputs in (
        ("npu_scatter_pa_kv_cache", calls.plain_cache()),
        ("_npu_reshape_and_cache", calls.reshape()),
    ):
        before = inputs["key_cache"].clone()
        run(operator, **inputs)
        slots: Tensor = inputs["slot_mapping" if "slot_mapping" in inputs else "slot_indices"]
        flat, old = inputs["key_cache"].flatten(0, 1), before.flatten(0, 1)
        assert torch.equal(flat[slots.long()], inputs["key"])
        other_slots = torch.ones(len(flat), dtype=torch.bool)
        other_slots[slots.long()] = False
        assert torch.equal(flat[other_slots], old[other_slots])
    inputs = calls.nd()
    assert torch.equal(run("npu_scatter_nd_update_", **inputs)[[1, 5]], inputs["updates"])
    inputs = calls.update()
    cache = run("scatter_update_", **inputs)
    assert torch.equal(cache[1, :, 6:8], inputs["updates"][1])
    assert cache is inputs["input"] or cache.data_ptr() == inputs["input"].data_ptr()


def test_rotary_and_norm_are_what_transformers_computes() -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

    angle = torch.outer(torch.arange(5.0), 1e4 ** -(torch.arange(0, 64, 2) / 64))
    cos, sin = (torch.cat([half, half], -1) for half in (angle.cos(), angle.sin()))
    query, key = numbers(2, 4, 5, 64).float(), numbers(2, 2, 5, 64).float()
    expected = apply_rotary_pos_emb(query, key, cos[None], sin[None])
    for tensor, turned in zip((query, key), expected, strict=True):
        output = run("npu_rotary_mul", input=tensor, r1=cos[None, None], r2=sin[None, None])
        assert torch.allclose(output, turned, atol=1e-6)
    tables = [table[None, :, None].expand(2, 5, 1, 64).contiguous() for table in (cos, sin)]
    rows = [tensor.transpose(1, 2).contiguous() for tensor in (query, key)]
    output = run("npu_apply_rotary_pos_emb", query=rows[0], key=rows[1], cos=tables[0], sin=tables[1])
    assert torch.allclose(output[1].transpose(1, 2), expected[1], atol=1e-6)
    norm = LlamaRMSNorm(16, eps=1e-5)
    torch.nn.init.normal_(norm.weight)
    inputs = numbers(3, 16).float()
    normed, _ = run("npu_rms_norm", input=inputs, gamma=norm.weight.detach(), epsilon=1e-5)
    assert torch.allclose(normed, norm(inputs), atol=1e-6)
    three = run("npu_add_rms_norm", x1=inputs, x2=inputs, gamma=norm.weight.detach(), epsilon=1e-5)
    assert torch.allclose(three[0], norm(2 * inputs), atol=1e-6)
    assert torch.equal(three[2], 2 * inputs)


BUILDERS: dict[str, Callable[[], dict[str, Any]]] = {
    INFER: dense,
    f"{INFER}_v2": dense,
    "npu_fusion_attention": calls.fusion,
    "npu_scatter_nd_update_": calls.nd,
    "npu_scatter_pa_kv_cache": calls.plain_cache,
    "scatter_update_": calls.update,
    "npu_rotary_mul": calls.rotary,
    "npu_rms_norm": calls.norm,
    "npu_add_rms_norm": calls.added_norm,
    "_npu_reshape_and_cache": calls.reshape,
    "_npu_paged_attention_splitfuse": calls.splitfuse_arguments,
}
"""All but npu_apply_rotary_pos_emb, whose schema hides that it writes in place: opcheck refuses exactly that."""


@pytest.mark.filterwarnings("ignore")  # of torch's own
def test_schemas_and_shapes_pass_torchs_opcheck() -> None:
    assert set(KERNELS) - set(BUILDERS) == {"npu_apply_rotary_pos_emb"}
    for name, make in BUILDERS.items():
        overload = operator_of(torch.ops, name).default  # type: ignore[attr-defined]
        results = torch.library.opcheck(
            overload, (), arguments(name, make()), test_utils=("test_schema", "test_faketensor")
        )
        assert set(results.values()) == {"SUCCESS"}, name
