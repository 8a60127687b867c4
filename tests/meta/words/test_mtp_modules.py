"""MTP modules: equal to transformers' own, from few states on, and refusals."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM
from transformers.modeling_layers import MtpModel

from specverify.backends.engine.model.built_in import config_of
from specverify.backends.engine.model.family import EXACT
from specverify.backends.engine.model.float64_modules import make_exact
from specverify.backends.registry import open_backend
from specverify.properties.shrinking.cases import nearer
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.draft.hidden import HiddenStates
from specverify.reference.draft.layer_head import HeadLayer
from specverify.reference.draft.mtp import Mtp, module_prefix
from specverify.reference.layout import KvLayout
from specverify.reference.malformed import Malformed
from specverify.reference.oracle.model import PathByPath
from specverify.reference.sampling import Stops
from specverify.reference.tree import RankTree
from specverify.reference.weights import seeded_head, seeded_weights
from tests.meta.words.test_head_drafts import ORACLE, compare_trees, findings_of
from tests.models import LLAMA

NORMED = HiddenStates(place="normed", shift=1)
ARCH = LLAMA.architecture
LAYER = HeadLayer(
    ARCH.heads, ARCH.kv_heads, ARCH.head_dim, ARCH.intermediate_size, theta=ARCH.rope.theta, norm_eps=ARCH.norm_eps
)
"""The sizes of a layer of the target, of whose class transformers makes its modules."""

RENAMED = {"shared_head.norm": "post_norm", "self_attn": "mtp_block.self_attn", "mlp": "mtp_block.mlp"} | {
    norm: f"mtp_block.{norm}" for norm in ("input_layernorm", "post_attention_layernorm")
}
"""The names of transformers' modules, by the beginnings of published names."""


def of_transformers(draft: Mtp, model: Seeded, prompt: tuple[int, ...]) -> tuple[list[int], np.ndarray]:
    """The greedy tokens of transformers' own modules after `prompt`, and their scores [modules, vocabulary]."""
    config = config_of(model.architecture)
    config.num_mtp_layers = draft.count
    config.mtp_hidden_states_first = draft.state_first
    config._attn_implementation = "sdpa"  # eager attention takes its softmax in float32
    main = LlamaForCausalLM(config).double().eval()
    main.load_state_dict({name: torch.tensor(array) for name, array in seeded_weights(model).items()}, strict=False)
    modules = MtpModel(main, draft.count).double().eval()
    weights = seeded_head(draft, model)
    for number, layer in enumerate(modules.layers):
        prefix, state = f"{module_prefix(model.architecture.layers, number)}.", {}
        for name, weight in weights.items():
            if name.startswith(prefix):
                own_name = name.removeprefix(prefix)
                first = next((old for old in RENAMED if own_name.startswith(f"{old}.")), None)
                state[own_name if first is None else own_name.replace(first, RENAMED[first], 1)] = torch.tensor(weight)
        layer.load_state_dict(state, strict=True)
    make_exact(modules, modules.config, EXACT)  # norms and rotary tables of transformers are float32 otherwise
    with torch.no_grad():
        states = PathByPath(ORACLE.model(model, "float64").parameters).states(prompt[:-1])[-1]
        tokens, logits, _ = modules(
            input_ids=torch.tensor([prompt[1:]]),
            last_hidden_states=torch.tensor(states)[None],
            attention_mask=None,
            position_ids=torch.arange(1, len(prompt))[None],
            mtp_cache=None,
        )
    return tokens[0].tolist(), logits[0].numpy()


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("state_first", [False, True])
def test_a_chain_is_the_one_of_transformers_own_modules(count: int, state_first: bool) -> None:
    assert ARCH.family == "llama"
    chain = RankTree((0, *range(count)), (0,) * (count + 1))
    draft = Mtp(chain, NORMED, LAYER, count, normed_back=True, state_first=state_first)
    case = Case(LLAMA, (3, 1, 4, 1, 5), draft, stops=Stops(1), dtype="float64")
    drafted = ORACLE(case).steps[0].drafted
    assert drafted is not None
    assert drafted.logits is not None
    tokens, scores = of_transformers(draft, LLAMA, case.prompt)
    assert list(drafted.tree.token[1:]) == tokens
    np.testing.assert_allclose(drafted.logits[:count], scores, rtol=0, atol=1e-9)


@pytest.mark.parametrize("num_known", [1, 2, 3])
@pytest.mark.parametrize("chunk", [0, 1])
def test_modules_without_a_row_hide_their_column_where_few_states_are_known(num_known: int, chunk: int) -> None:
    chain = RankTree((0, 0, 0, *range(1, 9)), (0, 0, 1, *(0,) * 8))
    draft = Mtp(chain, NORMED, LAYER, 4)
    layout = KvLayout(prefill_chunk=chunk)
    case = Case(LLAMA, (3, 1, 4, 1)[: num_known + 1], draft, layout, stops=Stops(4), dtype="float64")
    assert compare_trees(case, open_backend("cpu-eager").run(case))
    assert findings_of(case) == []


def test_what_does_not_fit_is_refused() -> None:
    draft = Mtp(RankTree((0, 0), (0, 0)), NORMED, LAYER, 2)
    case = Case(LLAMA, (3, 1, 4), draft, dtype="float64")
    with pytest.raises(Malformed, match="0 is no number of modules"):
        replace(draft, count=0)
    with pytest.raises(Malformed, match=r"reads\.shift.*the shift is 1 in MTP"):
        replace(draft, reads=HiddenStates(place="normed"))
    with pytest.raises(Malformed, match="MTP weights expect one hidden state"):
        replace(case, draft=replace(draft, reads=HiddenStates((0, 1), shift=1)))
    assert draft.kv_sizes == (2, LAYER.kv_heads, LAYER.head_dim)
    rich = replace(case, draft=replace(draft, zero_first=True))
    smaller_heads = {
        (smaller_case.draft.count, smaller_case.draft.zero_first)
        for smaller_case in nearer(rich)
        if isinstance(smaller_case.draft, Mtp)
    }
    assert {(1, True), (2, False)} <= smaller_heads
