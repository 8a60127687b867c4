"""EAGLE-3 beside the module of `speculators`, on a directory that its own save_pretrained wrote."""

from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specverify.reference.case import Case
from specverify.reference.draft.eagle3 import Eagle3
from specverify.reference.draft.hidden import HiddenStates
from specverify.reference.draft.layer_head import HeadLayer
from specverify.reference.draft_files import open_head
from specverify.reference.oracle.decoder import Oracle, select_states
from specverify.reference.sampling import Stops
from specverify.reference.trace import Array
from specverify.reference.tree import RankTree
from specverify.reference.weights import seeded_weights
from tests.headfiles import TARGET, inputs, weights_of

pytest.importorskip("speculators", reason="needs the package speculators")

CLOSE = 1e-5
"""The largest difference in float32, relative to the largest score."""

TOKENS = (3, 4, 1, 5, 11, 1, 16, 2, 5, 2, 11, 16, 1, 5)
"""From the third on the head with a reduced vocabulary can name them."""

DEPTH = 3
REDUCED = (1, 2, 5, 11, 16)
FLAGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "reduced": {"vocabulary": REDUCED},
    "norm_before_residual": {"norm_before_residual": True, "vocabulary": REDUCED},
    "norm_output": {"norm_output": True},
    "norm_before_fc": {},
    "fc_norm": {},
    "three layers": {"layers": 3, "vocabulary": REDUCED},
}


def theirs(folder: Path, head: Eagle3, flag: str) -> Any:
    """Their module with the weights of `head`, saved into `folder` by its own method."""
    speculators = import_module("speculators")
    proposals = import_module("speculators.proposals.greedy")
    eagle3 = import_module("speculators.models.eagle3")
    transformers = import_module("transformers")
    arch, layer = TARGET.architecture, head.layer
    inner = transformers.LlamaConfig(
        vocab_size=arch.vocab_size, hidden_size=arch.hidden_size, intermediate_size=layer.intermediate_size,
        num_hidden_layers=head.layers, num_attention_heads=layer.heads, num_key_value_heads=layer.kv_heads,
        head_dim=layer.head_dim, rms_norm_eps=layer.norm_eps, rope_theta=layer.theta, tie_word_embeddings=False,
    )  # fmt: skip
    inner._attn_implementation = "eager"
    config = eagle3.Eagle3SpeculatorConfig(
        transformer_layer_config=inner,
        draft_vocab_size=len(head.vocabulary) or arch.vocab_size,
        norm_before_residual=head.norm_before_residual,
        norm_output=head.norm_output,
        norm_before_fc=flag == "norm_before_fc",
        fc_norm=flag == "fc_norm",
        eagle_aux_hidden_state_layer_ids=inputs(head),
        speculators_config=speculators.SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[proposals.GreedyTokenProposalConfig(speculative_tokens=DEPTH)],
            default_proposal_method="greedy",
            verifier=speculators.VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
    )
    model = eagle3.Eagle3DraftModel(config)
    state = {name.replace("midlayer.", "layers.0."): torch.tensor(array) for name, array in weights_of(head).items()}
    state["embed_tokens.weight"] = torch.tensor(seeded_weights(TARGET)["model.embed_tokens.weight"])
    load_report = model.load_state_dict(
        {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in state.items()}, strict=False
    )
    assert not load_report.unexpected_keys
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():  # the norms before fc, which our seeded heads do not have
        for name, parameter in model.named_parameters():
            if name.startswith(("input_norm", "fc_norm")):
                parameter.copy_(1 + 0.2 * torch.randn(parameter.shape, generator=draw))
    model.save_pretrained(folder)
    return model.eval()


def scores_of_theirs(model: Any, states: Array) -> list[Array]:
    """Their scores [rows, draft vocabulary] of each step of training-time test, whose tokens are the true ones."""
    score_rows: list[Array] = []
    hook = model.lm_head.register_forward_hook(
        lambda _, __, scores: score_rows.append(scores[0].detach().double().numpy())
    )
    with torch.no_grad():
        tokens = torch.tensor([TOKENS[1:]])
        model(torch.tensor(states, dtype=torch.float32)[None], tokens, torch.zeros_like(tokens), ttt_steps=DEPTH)
    hook.remove()
    return score_rows


@pytest.mark.parametrize("flag", FLAGS)
def test_the_oracle_equals_their_module(tmp_path: Path, flag: str) -> None:
    layer = HeadLayer(2, 1, 4, 12, theta=10000.0, norm_eps=1e-5)
    head = Eagle3(RankTree((0,), (0,)), HiddenStates((1, 3, 4), shift=1), layer, **FLAGS[flag])
    model = theirs(tmp_path / "head", head, flag)
    opened = open_head(tmp_path / "head", TARGET).words
    oracle, worst, compared = Oracle(), 0.0, 0
    states = select_states(oracle.model(TARGET, "float32").states(TOKENS[:-1]), head.reads)
    scored = scores_of_theirs(model, states)
    for root in range(1, len(TOKENS) - DEPTH):
        chain = RankTree((0, *range(DEPTH)), (0,) * (DEPTH + 1))
        fixed = TOKENS[root : root + DEPTH + 1]
        draft = replace(opened, shape=chain, fixed=fixed)
        case = Case(TARGET, TOKENS[: root + 1], draft, stops=Stops(1), dtype="float32", steps=1)
        drafted = oracle(case).steps[0].drafted
        assert drafted is not None
        assert drafted.logits is not None
        for depth in range(DEPTH):
            expected, observed = scored[depth][root - 1], drafted.logits[depth]
            worst = max(worst, float(np.abs(expected - observed).max() / np.abs(expected).max()))
            compared += 1
    print(f"{flag}: {worst:.2e} over {compared} rows")  # noqa: T201 - the measured figure, with -s
    assert compared == (len(TOKENS) - DEPTH - 1) * DEPTH
    assert worst < CLOSE
