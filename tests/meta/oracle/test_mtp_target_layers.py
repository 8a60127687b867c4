"""MTP modules with layers of the target's family: equal to transformers' own, in every layout, and refusals."""

from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers.modeling_layers import MtpModel

from specverify.backends.engine.model.built_in import built_in
from specverify.backends.engine.model.family import EXACT
from specverify.backends.engine.model.family.experts import stack_experts
from specverify.backends.engine.model.float64_modules import make_exact
from specverify.backends.registry import open_backend
from specverify.properties.strategies.draft.mtp import fitting_modules
from specverify.reference.architecture import LARGEST, Architecture, Rope, Seeded
from specverify.reference.case import Case
from specverify.reference.draft.hidden import HiddenStates
from specverify.reference.draft.mtp import PLAIN_LAYER, Mtp, module_prefix
from specverify.reference.family import FAMILIES
from specverify.reference.layout import KvLayout
from specverify.reference.malformed import Malformed
from specverify.reference.oracle.model import PathByPath
from specverify.reference.sampling import Stops
from specverify.reference.tree import RankTree
from specverify.reference.weights import seeded_head
from tests.meta.words.test_head_drafts import ORACLE, compare_trees, findings_of
from tests.models import LLAMA

NORMED = HiddenStates(place="normed", shift=1)
PROMPT = (3, 1, 4, 1, 5)


def target(family: str, number: int = 0) -> Seeded:
    """A drawn target of `family`."""
    fields = dict(FAMILIES[family].drawn[number])
    if "rope" in fields:
        fields["rope"] = Rope(**fields["rope"])
    return Seeded(Architecture(family, **fields), 3)


TARGETS = {
    "deepseek_v3": target("deepseek_v3"),
    "deepseek_v3, yarn, halves": target("deepseek_v3", 2),
    "glm4_moe": target("glm4_moe"),
    "glm4_moe, biases and groups": target("glm4_moe", 1),
    "qwen3_next": target("qwen3_next"),
    "qwen3_5": target("qwen3_5"),
    "qwen3_5, tied": target("qwen3_5", 1),
    "qwen3_5_moe": target("qwen3_5_moe"),
}


def scores_of_transformers(draft: Mtp, model: Seeded) -> tuple[list[int], np.ndarray]:
    """The greedy tokens of transformers' own modules after PROMPT, and their scores [modules, vocabulary]."""
    main = built_in(model, "float64").eval()
    config = main.config
    config.num_mtp_layers = draft.count
    config._attn_implementation = "sdpa"  # eager attention takes its softmax in float32
    if getattr(config, "layer_types", None) is not None:
        config.mtp_layer_types = ["full_attention"] * draft.count
    modules = MtpModel(deepcopy(main), draft.count).double().eval()
    modules.tie_with_main_model(main)  # what is made draws its weights anew, those that it shares too
    weights = {name: torch.tensor(values) for name, values in seeded_head(draft, model).items()}
    outer = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "shared_head.norm": "post_norm"}
    for number, layer in enumerate(modules.layers):
        prefix = f"{module_prefix(model.architecture.layers, number)}."
        layer_weights = {
            name.removeprefix(prefix): values for name, values in weights.items() if name.startswith(prefix)
        }
        state = {
            f"{their_name}.weight": layer_weights.pop(f"{our_name}.weight") for our_name, their_name in outer.items()
        }
        state |= {f"mtp_block.{name}": values for name, values in stack_experts(layer_weights).items()}
        layer.load_state_dict(state, strict=True)
    make_exact(modules, modules.config, EXACT)  # norms and rotary tables of transformers are float32 otherwise
    with torch.no_grad():
        states = PathByPath(ORACLE.model(model, "float64").parameters).states(PROMPT[:-1])[-1]
        tokens, logits, _ = modules(
            input_ids=torch.tensor([PROMPT[1:]]),
            last_hidden_states=torch.tensor(states)[None],
            attention_mask=None,
            position_ids=torch.arange(1, len(PROMPT))[None],
            mtp_cache=None,
        )
    return tokens[0].tolist(), logits[0].numpy()


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("name", TARGETS)
def test_a_chain_is_the_one_of_transformers_own_modules(name: str, count: int) -> None:
    chain = RankTree((0, *range(count)), (0,) * (count + 1))
    draft = Mtp(chain, NORMED, None, count, normed_back=True)
    drafted = ORACLE(Case(TARGETS[name], PROMPT, draft, stops=Stops(1), dtype="float64")).steps[0].drafted
    assert drafted is not None
    assert drafted.logits is not None
    tokens, scores = scores_of_transformers(draft, TARGETS[name])
    assert list(drafted.tree.token[1:]) == tokens
    np.testing.assert_allclose(drafted.logits[:count], scores, rtol=0, atol=1e-9)


CHAINS = RankTree((0, 0, 0, *range(1, 6)), (0, 0, 1, *(0,) * 5))


@pytest.mark.parametrize("name", TARGETS)
def test_the_engine_drafts_as_the_oracle(name: str) -> None:
    draft = Mtp(CHAINS, NORMED, None, 2, zero_first=True)
    case = Case(TARGETS[name], PROMPT, draft, KvLayout(prefill_chunk=1), stops=Stops(4), dtype="float64")
    assert compare_trees(case, open_backend("cpu-eager").run(case))
    assert findings_of(case) == []


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v3, yarn, halves"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_rows_of_latent_modules_hold_latents_where_the_layout_says_so(name: str, dtype: str) -> None:
    draft = Mtp(CHAINS, NORMED, None, 2)
    layout = KvLayout(kind="paged", page_size=4, latent=True)
    case = Case(TARGETS[name], PROMPT, draft, layout, stops=Stops(6), dtype=dtype)
    assert findings_of(case) == []
    step = open_backend("cpu-eager").run(case).steps[-1]
    assert step.committed is not None
    kv = step.committed.draft
    assert kv is not None
    settings = TARGETS[name].architecture.settings
    assert kv.keys.shape[:2] == (2, 1)
    assert (kv.keys.shape[-1], kv.values.shape[-1]) == (settings.latent_rank, settings.rotary_dim)


def test_what_does_not_fit_is_refused() -> None:
    draft = Mtp(CHAINS, NORMED, None, 2)
    with pytest.raises(Malformed, match=r"layer.*llama has no MTP modules of its own layers"):
        Case(LLAMA, PROMPT, draft)
    # All layers are dense and the experts are as many as published ones.
    with pytest.raises(Malformed, match="weights of modules; those of a built-in model are at most"):
        Case(target("deepseek_v3", 1), PROMPT, draft)
    assert draft.kv_sizes == (2, None, None)
    assert "layers of the target's family" in draft.description
    assert any(simpler.layer == PLAIN_LAYER for simpler in draft.simpler())
    assert replace(draft, layer=PLAIN_LAYER).settings_weight < draft.settings_weight


@pytest.mark.parametrize(
    ("hidden", "vocabulary", "expected"),
    [
        (16, 16, (True, 3, True)),
        (256, 4096, (False, 3, True)),
        (1024, 16, (False, 1, True)),
        (2048, 16, (False, 3, False)),
    ],
)
def test_modules_of_a_wide_target_are_made_to_fit(
    hidden: int, vocabulary: int, expected: tuple[bool, int, bool]
) -> None:
    """Drawn modules lose their matrices, then all but one, then the layers: a malformed draw ends a run."""
    wide = replace(TARGETS["deepseek_v3"].architecture, vocab_size=vocabulary, hidden_size=hidden)
    modules = fitting_modules(Mtp(CHAINS, NORMED, None, 3, own_embedding=True, own_head=True), wide)
    assert (modules.own_head, modules.count, modules.layer is None) == expected
    assert modules.layer is not None or modules.count_weights(wide) <= LARGEST
