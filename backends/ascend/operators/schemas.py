"""The schemas of the emulated operators, verbatim from a torch_npu wheel."""

WHEEL = "torch_npu 2.13.0"
"""The wheel whose libtorch_npu.so holds the schemas of NPU.

The schemas of ATB are those of op-plugin 517f2e7, since the wheel holds them only in pieces.
"""

NPU: dict[str, str] = {
    "npu_fused_infer_attention_score": (
        "npu_fused_infer_attention_score(Tensor query, Tensor key, Tensor value, *, Tensor? pse_shift=None, "
        "Tensor? atten_mask=None, SymInt[]? actual_seq_lengths=None, SymInt[]? actual_seq_lengths_kv=None, "
        "Tensor? dequant_scale1=None, Tensor? quant_scale1=None, Tensor? dequant_scale2=None, Tensor? "
        "quant_scale2=None, Tensor? quant_offset2=None, Tensor? antiquant_scale=None, Tensor? "
        "antiquant_offset=None, Tensor? key_antiquant_scale=None, Tensor? key_antiquant_offset=None, Tensor? "
        "value_antiquant_scale=None, Tensor? value_antiquant_offset=None, Tensor? block_table=None, Tensor? "
        "query_padding_size=None, Tensor? kv_padding_size=None, Tensor? key_shared_prefix=None, Tensor? "
        "value_shared_prefix=None, SymInt[]? actual_shared_prefix_len=None, Tensor? query_rope=None, Tensor? "
        "key_rope=None, Tensor? key_rope_antiquant_scale=None, int num_heads=1, float scale=1.0, int "
        'pre_tokens=2147483647, int next_tokens=2147483647, str input_layout="BSH", int '
        "num_key_value_heads=0, int sparse_mode=0, int inner_precise=0, int block_size=0, int "
        "antiquant_mode=0, int key_antiquant_mode=0, int value_antiquant_mode=0, bool softmax_lse_flag=False)"
        " -> (Tensor, Tensor)"
    ),
    "npu_fused_infer_attention_score_v2": (
        "npu_fused_infer_attention_score_v2(Tensor query, Tensor key, Tensor value, *, Tensor? "
        "query_rope=None, Tensor? key_rope=None, Tensor? pse_shift=None, Tensor? atten_mask=None, SymInt[]? "
        "actual_seq_qlen=None, SymInt[]? actual_seq_kvlen=None, Tensor? block_table=None, Tensor? "
        "dequant_scale_query=None, Tensor? dequant_scale_key=None, Tensor? dequant_offset_key=None, Tensor? "
        "dequant_scale_value=None, Tensor? dequant_offset_value=None, Tensor? dequant_scale_key_rope=None, "
        "Tensor? quant_scale_out=None, Tensor? quant_offset_out=None, Tensor? quant_scale_p=None, Tensor? "
        "learnable_sink=None, int num_query_heads=1, int num_key_value_heads=0, float softmax_scale=1.0, int "
        'pre_tokens=2147483647, int next_tokens=2147483647, str input_layout="BSH", int sparse_mode=0, int '
        "block_size=0, int query_quant_mode=0, int key_quant_mode=0, int value_quant_mode=0, int "
        "inner_precise=0, bool return_softmax_lse=False, int? query_dtype=None, int? key_dtype=None, int? "
        "value_dtype=None, int? query_rope_dtype=None, int? key_rope_dtype=None, int? "
        "key_shared_prefix_dtype=None, int? value_shared_prefix_dtype=None, int? "
        "dequant_scale_query_dtype=None, int? dequant_scale_key_dtype=None, int? "
        "dequant_scale_value_dtype=None, int? dequant_scale_key_rope_dtype=None, int? out_dtype=None) -> "
        "(Tensor, Tensor)"
    ),
    "npu_fusion_attention": (
        "npu_fusion_attention(Tensor query, Tensor key, Tensor value, int head_num, str input_layout, Tensor?"
        " pse=None, Tensor? padding_mask=None, Tensor? atten_mask=None, float scale=1., float keep_prob=1., "
        "int pre_tockens=2147483647, int next_tockens=2147483647, int inner_precise=0, int[]? prefix=None, "
        "int[]? actual_seq_qlen=None, int[]? actual_seq_kvlen=None, int sparse_mode=0, bool "
        'gen_mask_parallel=True, bool sync=False, str softmax_layout="", Tensor? sink=None, Tensor? '
        "dropout_mask=None, int seed=0, int offset=0) -> (Tensor, Tensor, Tensor, Tensor, int, int, int)"
    ),
    "npu_scatter_nd_update_": (
        "npu_scatter_nd_update_(Tensor(a!) input, Tensor indices, Tensor updates) -> Tensor(a!)"
    ),
    "npu_scatter_pa_kv_cache": (
        "npu_scatter_pa_kv_cache(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
        "Tensor slot_mapping, *, Tensor? compress_lens=None, Tensor? compress_seq_offsets=None, Tensor? "
        "seq_lens=None, str? cache_mode='PA_NZ') -> ()"
    ),
    "scatter_update_": ("scatter_update_(Tensor(a!) input, Tensor indices, Tensor updates, int axis) -> Tensor(a!)"),
    "npu_rotary_mul": (
        "npu_rotary_mul(Tensor input, Tensor r1, Tensor r2, str rotary_mode='half', Tensor? rotate=None) -> Tensor"
    ),
    "npu_apply_rotary_pos_emb": (
        "npu_apply_rotary_pos_emb(Tensor query, Tensor key, Tensor cos, Tensor sin, str layout='BSND', str "
        "rotary_mode='half') -> (Tensor, Tensor)"
    ),
    "npu_rms_norm": ("npu_rms_norm(Tensor input, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor)"),
    "npu_add_rms_norm": (
        "npu_add_rms_norm(Tensor x1, Tensor x2, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor, Tensor)"
    ),
}
"""The schemas of namespace npu."""

ATB: dict[str, str] = {
    "_npu_reshape_and_cache": (
        "_npu_reshape_and_cache(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
        "Tensor slot_indices) -> ()"
    ),
    "_npu_paged_attention_splitfuse": (
        "_npu_paged_attention_splitfuse(Tensor query, Tensor key_cache, Tensor value_cache, Tensor "
        "block_table, Tensor context_lens, Tensor mask, Tensor seq_len, int num_kv_heads, int num_heads, "
        "float scale_value, Tensor(a!) out) -> ()"
    ),
}
"""The schemas of namespace atb."""
