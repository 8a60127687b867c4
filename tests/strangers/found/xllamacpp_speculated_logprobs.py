"""xllamacpp 2026.10.11549: llama.cpp's server reports log-probability 0 for every token that was speculated.

`POST /completion` with `n_probs`, without a draft and with the model as its own: same tokens, other log-probabilities.
Found by lossless.logprobs on `openai:URL`. Exit code 1 where they differ.
"""

import json
import os
import tempfile
import urllib.request
from pathlib import Path

import gguf
import numpy as np
import xllamacpp as xl

file, rng = Path(tempfile.mkdtemp()) / "tiny.gguf", np.random.default_rng(1)
out = gguf.GGUFWriter(str(file), "llama")
out.add_context_length(256), out.add_embedding_length(32), out.add_feed_forward_length(48)
out.add_block_count(1), out.add_head_count(4), out.add_rope_dimension_count(8), out.add_layer_norm_rms_eps(1e-6)
out.add_tokenizer_model("gpt2"), out.add_tokenizer_pre("gpt-2"), out.add_token_merges(["! !"]), out.add_eos_token_id(63)
out.add_token_list([chr(33 + index) for index in range(62)] + ["!!", "<end>"])
shapes = {"token_embd": (64, 32), "output": (64, 32), "output_norm": (32,), "blk.0.attn_norm": (32,)}
shapes |= {"blk.0.ffn_norm": (32,), "blk.0.ffn_up": (48, 32), "blk.0.ffn_gate": (48, 32), "blk.0.ffn_down": (32, 48)}
for name, shape in (shapes | {f"blk.0.attn_{part}": (32, 32) for part in ("q", "k", "v", "output")}).items():
    out.add_tensor(f"{name}.weight", rng.normal(len(shape) == 1, 0.3, shape).astype(np.float32))
out.write_header_to_file(), out.write_kv_data_to_file(), out.write_tensors_to_file(), out.close()
logprobs, servers = [], []  # servers are kept to the end: one that is dropped waits for itself
for speculates in (False, True):
    how = xl.CommonParams()
    how.model.path, how.port, how.n_ctx, how.warmup = str(file), 8500 + speculates, 256, False
    if speculates:
        how.speculative.types = [xl.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
        how.speculative.draft.mparams.path, how.speculative.draft.p_min = str(file), 0.0
    body = {"prompt": [3, 1, 4], "n_predict": 6, "temperature": 0, "return_tokens": True, "n_probs": 1}
    servers.append(xl.Server(how))
    with urllib.request.urlopen(f"{servers[-1].listening_address}/completion", json.dumps(body).encode()) as answer:
        logprobs.append(
            [(row["id"], round(row["logprob"], 3)) for row in json.load(answer)["completion_probabilities"]]
        )
print("without a draft", logprobs[0], "with a draft", logprobs[1], sep="\n", flush=True)
os._exit(int(logprobs[0] != logprobs[1]))
