"""Registration of the emulated operators in `torch.ops.npu` and `torch.ops.atb`.

The operators are registered for the CPU, under the schemas of the torch_npu wheel.
"""

import json
from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from specverify.backends.ascend.operators import cache_writes, rotary_norm, shapes
from specverify.backends.ascend.operators.fused_infer import attention
from specverify.backends.ascend.operators.fusion_attention import fusion_attention
from specverify.backends.ascend.operators.splitfuse import splitfuse

KERNELS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "npu_fused_infer_attention_score": (attention.version_1, shapes.infer_attention),
    "npu_fused_infer_attention_score_v2": (attention.version_2, shapes.infer_attention),
    "npu_fusion_attention": (fusion_attention, shapes.fusion_attention),
    "npu_scatter_nd_update_": (cache_writes.scatter_nd_update_, shapes.first),
    "npu_scatter_pa_kv_cache": (cache_writes.scatter_pa_kv_cache, shapes.no_output),
    "scatter_update_": (cache_writes.scatter_update_, shapes.first),
    "npu_rotary_mul": (rotary_norm.rotary_mul, shapes.like_first),
    "npu_apply_rotary_pos_emb": (rotary_norm.apply_rotary_pos_emb, shapes.rotary_like),
    "npu_rms_norm": (rotary_norm.rms_norm, shapes.rms_norm),
    "npu_add_rms_norm": (rotary_norm.add_rms_norm, shapes.add_rms_norm),
    "_npu_reshape_and_cache": (cache_writes.reshape_and_cache, shapes.no_output),
    "_npu_paged_attention_splitfuse": (splitfuse, shapes.no_output),
}
"""For each operator, its CPU kernel and its Meta kernel, which gives the shapes of its results."""

SCHEMAS: dict[str, dict[str, str]] = json.loads((Path(__file__).parent / "schemas.json").read_text())
"""The schemas of the operators by namespace, verbatim: npu's from libtorch_npu.so of the wheel of torch_npu 2.13.0.

Those of atb are from op-plugin 517f2e7, since the wheel holds them only in pieces.
"""

Library: Any = torch.library.Library


@lru_cache(maxsize=1)
def install() -> tuple[Any, ...]:
    """Register every operator once, and return the libraries, which must stay alive.

    Only the CPU's dispatch key is used, so that a device's own kernels are never shadowed. Where torch_npu is
    installed, its schemas and Meta kernels come first, and the same process holds device and emulation.

    Raises:
        ImportError: where torch_npu is installed and cannot be imported.
    """
    if find_spec("torch_npu") is not None:
        import torch_npu  # type: ignore[import-not-found, unused-ignore]  # noqa: F401 - registers its schemas
    libraries = []
    for namespace, operator_schemas in SCHEMAS.items():
        fragment = Library(namespace, "FRAGMENT")
        on_cpu = Library(namespace, "IMPL", "CPU")
        without_data = Library(namespace, "IMPL", "Meta")
        for name, schema in operator_schemas.items():
            kernel, meta = KERNELS[name]
            # torch refuses a second schema of one name, so torch_npu's own is kept.
            if not hasattr(getattr(torch.ops, namespace), name):
                fragment.define(schema)
                without_data.impl(name, meta)
            on_cpu.impl(name, kernel)
        libraries += [fragment, on_cpu, without_data]
    return tuple(libraries)
