"""An engine as a backend of SpecVerify: a function from a prompt to tokens.

The function below is plain greedy decoding with transformers, so that this file runs as it stands. Put your engine's
call in its place, add the parameters that the engine can use, and run after each change:

    specverify check-adapter MODULE:open_
"""

from typing import Any

import torch

from specverify.adapt import blackbox


def generate(prompt_ids: list[int], max_new_tokens: int, model: Any, stops: tuple[int, ...] = ()) -> list[int]:
    """The new token ids after `prompt_ids`, at most `max_new_tokens`, without the prompt.

    The names of the parameters say what the engine can do, and cases ask for nothing else. All but the first two may
    be left out, and there are more of them:

    - model, draft_model: the target and its draft as transformers' classes; draft_model is None where a request asks
      for decoding without speculation.
    - checkpoint, draft_checkpoint: the same as directories with config.json, safetensors and a tokenizer.
    - temperature (0.0 is greedy), top_k, top_p, min_p: sampling.
    - seed: the seed of the call; without it random, NumPy and torch are seeded before the call.
    - stops: token ids that end the text. The ending token is returned; nothing may follow it.
    """
    tokens = list(prompt_ids)
    # From here on: your engine.
    for _ in range(max_new_tokens):
        logits = model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
        tokens.append(int(logits.argmax()))
        if tokens[-1] in stops:
            break
    return tokens[len(prompt_ids) :]


# `blackbox` takes more facts where the engine needs them: device="cuda", dtypes=("bfloat16",), families=("llama",),
# least_window=2 (narrowest sliding window), longest=512 (tokens of prompt and output), least_prompt=2.
open_ = blackbox(generate)
