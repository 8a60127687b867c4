"""Calls to FlashInfer: a stand-in that follows its documentation gets what means the right attention."""

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from specverify.backends.base import Unavailable
from specverify.backends.engine.attention.flashinfer import FlashInfer
from specverify.backends.registry import open_backend
from tests.treeattention import scene


@dataclass
class Documented:
    """BatchPrefillWithPagedKVCacheWrapper in float64, as its documentation says, lane by lane."""

    plan_arguments: dict[str, Any] = field(default_factory=dict)

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        custom_mask: Tensor,
        sm_scale: float,
        q_data_type: torch.dtype,
    ) -> None:
        for tensor in (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len):
            assert tensor.dtype == torch.int32
        assert custom_mask.dtype == torch.bool
        assert q_data_type in (torch.float16, torch.bfloat16)
        self.plan_arguments = {**locals()}

    def run(self, query: Tensor, cells: tuple[Tensor, Tensor]) -> Tensor:
        arguments = self.plan_arguments
        assert query.shape[1:] == (arguments["num_qo_heads"], arguments["head_dim_qk"])
        for cell in cells:
            assert cell.is_contiguous()
            assert cell.shape[1:] == (arguments["page_size"], arguments["num_kv_heads"], arguments["head_dim_qk"])
        groups = arguments["num_qo_heads"] // arguments["num_kv_heads"]
        outs, mask_offset = [], 0
        for lane in range(len(arguments["qo_indptr"]) - 1):
            rows = query[arguments["qo_indptr"][lane] : arguments["qo_indptr"][lane + 1]].double()
            begin, end = arguments["paged_kv_indptr"][lane : lane + 2].tolist()
            length = (end - begin - 1) * arguments["page_size"] + int(arguments["paged_kv_last_page_len"][lane])
            ids = arguments["paged_kv_indices"][begin:end].long()
            key, value = (
                cell[ids].flatten(0, 1)[:length].double().repeat_interleave(groups, 1).transpose(0, 1) for cell in cells
            )
            mask = arguments["custom_mask"][mask_offset : mask_offset + len(rows) * length].view(len(rows), length)
            mask_offset += len(rows) * length
            scores = (rows.transpose(0, 1) @ key.transpose(-1, -2) * arguments["sm_scale"]).masked_fill(
                ~mask, -torch.inf
            )
            outs.append((scores.softmax(-1) @ value).transpose(0, 1))
        assert mask_offset == len(arguments["custom_mask"])
        return torch.cat(outs).to(query.dtype)


@pytest.mark.parametrize("page", [0, 1, 3])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_what_it_is_told_means_the_attention(page: int, dtype: torch.dtype) -> None:
    drawn_scene = scene(((10, 6), (0, 4), (31, 1)), dim=64, dtype=dtype, page=page, window=4 if page == 3 else 0)
    out = FlashInfer(Documented())(drawn_scene.query, drawn_scene.columns, drawn_scene.scaling)
    assert drawn_scene.error(out) <= 1
    assert bool(out.isfinite().all())


@pytest.mark.parametrize(("dtype", "dim"), [(torch.float32, 64), (torch.float16, 8)])
def test_what_it_has_no_kernel_for_is_announced(dtype: torch.dtype, dim: int) -> None:
    drawn_scene = scene(((10, 6),), dim=dim, dtype=dtype)
    messages: list[str] = []
    out = FlashInfer(Documented())(
        drawn_scene.query, replace(drawn_scene.columns, announce=messages.append), drawn_scene.scaling
    )
    assert drawn_scene.error(out) <= 1
    assert messages == [f"FlashInfer has no kernel for {str(dtype)[6:]}, head_dim {dim}: eager attention ran"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
def test_where_it_is_not_one_line_says_so() -> None:
    with pytest.raises(Unavailable, match=r"^cuda-fused-flashinfer needs an NVIDIA device: .*cpu-fused"):
        open_backend("cuda-fused-flashinfer")
