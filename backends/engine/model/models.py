"""The opening of the transformers model that a case names.

The model is a built-in with seeded weights (`built_in`), or a checkpoint directory (safetensors only).
"""

import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from specverify.backends.base import Unsupported
from specverify.backends.engine.model.built_in import DTYPES, batch_experts, built_in, loop_over_experts
from specverify.backends.engine.model.causal_lm import CausalLm
from specverify.backends.engine.model.examined import examine_and_open
from specverify.backends.engine.model.family import EXACT, FAMILIES
from specverify.backends.engine.model.float64_modules import make_exact
from specverify.backends.engine.model.graphs import Graphs, Recorder
from specverify.backends.engine.model.head import HeadModel, MakeHead
from specverify.backends.engine.model.quantised import Dequantise, dequantise, quantise_state
from specverify.backends.engine.model.stored_state import checkpoint_state
from specverify.reference.architecture import Checkpoint, Model, Rope, Seeded
from specverify.reference.case import Case
from specverify.reference.draft.head import Head
from specverify.reference.files.fields import LARGEST_CONFIG, UnreadableCheckpoint
from specverify.reference.files.regular import read_whole
from specverify.reference.files.text_model import is_composite, text_content
from specverify.reference.weights import head_weights

# Built-in models stretch their context by odd factors on purpose, and transformers would warn about each of them.
logging.set_verbosity_error()


TOKENS, IMAGES = "tokens", "images"
"""The two readings of a prompt with images by a draft's model."""


class ModelCache:
    """Models kept open between runs; only weights are kept, so a run leaves no state that the next could notice."""

    def __init__(self, device: str, keep: int = 256, recorder: Recorder | None = None) -> None:
        self._device = device
        self._recorder = recorder
        self._keep = keep
        self._open: OrderedDict[tuple[Model, str, Dequantise, str], CausalLm] = OrderedDict()
        self._heads: OrderedDict[tuple[Head, Model, str, Dequantise], HeadModel] = OrderedDict()
        self._refused: dict[tuple[Model, str], str] = {}

    def head(self, case: Case, make: MakeHead, product: Dequantise = dequantise) -> HeadModel:
        """Return the head of the draft of `case` on its target, from this cache or made by `make`.

        Drafts that differ in their trees alone share a head. `product` makes quantised weights.

        Raises:
            Unsupported: as `open`.
        """
        draft = case.draft
        assert isinstance(draft, Head)
        key = (draft.weights, case.model.bare, case.dtype, product)
        if key not in self._heads:
            weights = weights_of_head(draft, case.model, DTYPES[case.dtype], product)
            self._heads[key] = make(case, self.open(case.model, case.dtype), weights)
            # The weights of a checkpoint's heads are large, and two stay open for a switch of drafts.
            while len(self._heads) > (self._keep if isinstance(case.model, Seeded) else 2):
                self._heads.popitem(last=False)
        self._heads.move_to_end(key)
        return self._heads[key]

    def open(self, model: Model, dtype: str, product: Dequantise = dequantise, prompts: str = TOKENS) -> CausalLm:
        """Return the model in its working dtype, from this cache or freshly loaded; `product` makes quantised weights.

        A model with an adapter is the one without it: each request brings its adapter to its own rows. A draft's model
        that reads images of `prompts` is another one than that which reads their tokens: pages are known by the model
        whose columns they hold.

        A checkpoint's model is first examined by one small forward. A refusal is remembered, so that no later case
        loads the checkpoint again only to be refused.

        Raises:
            Unsupported: for a model that this engine cannot run in this dtype.
        """
        model = model.bare
        key = (model, dtype, product, prompts)
        if (model, dtype) in self._refused:
            raise Unsupported(self._refused[model, dtype])
        if key not in self._open:
            try:
                self._open[key] = self._load(model, dtype, product)
            except Unsupported as error:
                self._refused[model, dtype] = str(error)
                raise
            # No static buffer of a recording holds a recurrent state.
            if self._recorder is not None and not self._open[key].recurrent:
                self._open[key].graphs = Graphs(self._recorder)
            # Beside a checkpoint only one other model stays open, which is enough for a target and its draft.
            while len(self._open) > (self._keep if isinstance(model, Seeded) else 2):
                self._open.popitem(last=False)
        self._open.move_to_end(key)
        return self._open[key]

    def _load(self, model: Model, dtype: str, product: Dequantise) -> CausalLm:
        network = built_in(model, dtype, product) if isinstance(model, Seeded) else from_disk(model, dtype)
        if isinstance(model, Checkpoint) and model.quantised:
            _of_few_bits(network, model.quantised, product)
        # By the class of the model, so that checkpoints of a family are prepared as its built-ins are.
        for family in FAMILIES.values():
            if isinstance(network, family.model):
                family.prepare(network)
        if dtype == "float64":
            _exact(network)
        if self._device != "cpu":
            batch_experts(network)
        network = network.to(self._device).eval()
        return CausalLm(network, self._device) if isinstance(model, Seeded) else examine_and_open(network, self._device)


def _of_few_bits(network: Any, kind: str, product: Dequantise) -> None:
    """Replace the projections of a checkpoint's model by their quantised values.

    Raises:
        Unsupported: for a model that keeps the projections of several experts in one tensor.
    """
    state = network.state_dict()
    stacked = [name for name, tensor in state.items() if name.endswith("_proj") and tensor.dim() == 3]
    if stacked:
        raise Unsupported(
            f"{kind} weights of {stacked[0]}: matrices of experts are not quantised; choose another draft"
        )
    network.load_state_dict(quantise_state(state, kind, product), strict=True)


def weights_of_head(head: Head, target: Model, dtype: torch.dtype, product: Dequantise) -> dict[str, Tensor]:
    """The weights of `head` on `target` by their published names, floats in `dtype`; `product` makes quantised ones."""
    tensors = {name: torch.tensor(values) for name, values in head_weights(head, target).items()}
    state = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    return quantise_state(state, head.quantised, product) if head.quantised else state


def _exact(network: Any) -> None:
    loop_over_experts(network)  # torch has no grouped product of float64 matrices
    try:
        make_exact(network, network.config, EXACT)
    except ValueError as error:
        raise Unsupported(f"float64: {error}") from error


def refuse_long(model: Model, longest: int) -> None:
    """Refuse a run of more positions than the rotary tables serve without a change.

    Beyond its original context `longrope` uses other tables, and keys that are already cached would keep the old ones.

    Raises:
        Unsupported: for `longrope` beyond its original context.
    """
    rope = model.architecture.rope if isinstance(model, Seeded) else _checkpoint_rope(model)
    if rope.kind == "longrope" and longest > rope.original:
        raise Unsupported(
            f"longrope past its original context ({longest} > {rope.original} positions): "
            "cached keys would keep the short factors; shorten the run"
        )


def _checkpoint_rope(model: Checkpoint) -> Rope:
    config = _config(model)
    rope = getattr(config, "rope_parameters", None) or {}  # absent from a model without rotary embedding
    kind = rope.get("rope_type", "default")
    return Rope(kind=kind, original=rope.get("original_max_position_embeddings", 0)) if kind == "longrope" else Rope()


def _content(model: Checkpoint) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(read_whole(Path(model.source) / "config.json", LARGEST_CONFIG))
    return content


def _config(model: Checkpoint) -> Any:
    """The config of transformers; of a model of several modalities that is read by its text model, the text model's."""
    path = Path(model.source)
    makers = {kind: make for family in FAMILIES.values() for kind, make in family.checkpoint.items()}
    try:
        content = _content(model)
        text = text_content(path / "config.json", content)
        if text.get("model_type") in makers:
            return makers[text["model_type"]](text)
        if is_composite(content):
            kind = text.pop("model_type")
            return AutoConfig.for_model(kind, **text)
        return AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # transformers' validators raise classes of their own
        raise Unsupported(f"transformers refuses {path}/config.json: {' '.join(str(error).split())[:200]}") from error


def _source_or_state(model: Checkpoint, config: Any, dtype: torch.dtype) -> tuple[str | None, dict[str, Tensor] | None]:
    """The folder from which transformers reads the weights, or the weights themselves where it cannot.

    `config` then loses what it says of quantisation.

    Raises:
        Unsupported: The weights are quantised in a way that is not read.
    """
    content = _content(model)
    if getattr(config, "quantization_config", None) is None and not is_composite(content):
        return model.source, None
    try:
        state = checkpoint_state(Path(model.source), content, dtype)
    except UnreadableCheckpoint as error:
        raise Unsupported(str(error)) from error
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return None, state


def from_disk(model: Checkpoint, dtype: str) -> Any:
    """Open the transformers model of a checkpoint directory: safetensors alone, and no code of the checkpoint.

    Raises:
        Unsupported: if transformers cannot open it.
    """
    config = _config(model)
    source, state = _source_or_state(model, config, DTYPES[dtype])
    logging.disable_progress_bar()  # a bar is written to standard error, which belongs to the commands
    model_class = LlamaForCausalLM if isinstance(config, LlamaConfig) else AutoModelForCausalLM
    try:
        if source is None and model_class is AutoModelForCausalLM:
            # The class that chooses by the config opens folders alone.
            with torch.device("meta"):
                model_class = type(AutoModelForCausalLM.from_config(config))
        network = model_class.from_pretrained(
            source,
            config=config,
            state_dict=state,
            dtype=DTYPES[dtype],
            use_safetensors=True,
            local_files_only=True,
            # config.json may name an attention kernel of the hub, which would be fetched and run.
            attn_implementation="eager",
        )
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a config that makes no sense fails in many ways
        raise Unsupported(f"transformers cannot open {model.source}: {' '.join(str(error).split())[:200]}") from error
    if model.stored_rows:
        _resize_rows(network, model.vocab_size)
    return network


def _resize_rows(network: Any, rows: int) -> None:
    """Give embedding and head `rows` rows: the first of those that are stored, and rows of zeros behind them."""
    resized: dict[int, torch.nn.Parameter] = {}
    for module in (network.get_input_embeddings(), network.get_output_embeddings()):
        stored = module.weight
        if id(stored) not in resized:  # a tied head has the weight of the embedding
            weight = stored.new_zeros(rows, stored.shape[1])
            weight[: len(stored)] = stored.detach()[:rows]
            resized[id(stored)] = torch.nn.Parameter(weight, requires_grad=False)
        module.weight = resized[id(stored)]
    network.get_input_embeddings().num_embeddings = rows
    network.get_output_embeddings().out_features = rows
    network.config.vocab_size = rows
