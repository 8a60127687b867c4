"""MTP modules of a checkpoint directory beside transformers' `generate(use_mtp=True)`, token by token.

No family of ours has published modules, so Llama's class is told where they lie: transformers finds them by patterns
that it has for other families alone.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM
from transformers.generation.candidate_generator import MTPCandidateGenerator

from specverify.reference.case import Case
from specverify.reference.draft.hidden import HiddenStates
from specverify.reference.draft.layer_head import HeadLayer
from specverify.reference.draft.mtp import Mtp
from specverify.reference.draft_files import open_head
from specverify.reference.oracle.checkpoint import identify
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.sampling import Stops
from specverify.reference.tree import RankTree
from tests.headfiles import TARGET, checkpoint, weights_of

PROMPT = (3, 1, 4, 1, 5)
NEW_TOKENS = 24
ARCH = TARGET.architecture
LAYER = HeadLayer(ARCH.heads, ARCH.kv_heads, ARCH.head_dim, ARCH.intermediate_size, norm_eps=ARCH.norm_eps)


@pytest.mark.parametrize("count", [1, 2])
def test_tokens_and_drafts_are_those_of_generate(count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = Mtp(RankTree((0,), (0,)), HiddenStates(place="normed", shift=1), LAYER, count, normed_back=True)
    folder = checkpoint(tmp_path / "target", weights_of(head), num_nextn_predict_layers=count)
    monkeypatch.setattr(LlamaForCausalLM, "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.(8|9)\..*"])
    network = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    network.config.num_mtp_layers = count
    drafted: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    plain = MTPCandidateGenerator.get_candidates

    def watch_candidates(self: Any, input_ids: Any, *arguments: Any, **named: Any) -> Any:
        candidates, scores = plain(self, input_ids, *arguments, **named)
        context = tuple(input_ids[0].tolist())
        drafted.append((context, tuple(candidates[0].tolist())[len(context) :]))
        return candidates, scores

    monkeypatch.setattr(MTPCandidateGenerator, "get_candidates", watch_candidates)
    ids = torch.tensor([PROMPT])
    out = network.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False, use_mtp=True,
        pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    target, oracle = identify(folder), Oracle()
    words = open_head(folder, target).words
    chain = replace(words, shape=RankTree((0, *range(count)), (0,) * (count + 1)))
    trace = oracle(Case(target, PROMPT, chain, stops=Stops(NEW_TOKENS)))
    assert tuple(out[0].tolist()) == PROMPT + trace.output
    compared = 0
    for context, tokens in drafted:
        if tokens:  # transformers drafts nothing before its first forward
            step = oracle(Case(target, context, chain, stops=Stops(1), steps=1)).steps[0]
            assert step.drafted is not None
            assert step.drafted.tree.token[1 : len(tokens) + 1] == tokens
            compared += len(tokens)
    assert compared > NEW_TOKENS // 2
