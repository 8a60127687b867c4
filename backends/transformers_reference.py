"""Plain transformers in float64 as a reference evaluator of whole sequences.

A model runs its own transformers code and its own eager attention, on one sequence at a time and without a KV cache.
`--against transformers` uses it in place of the NumPy model; rules, commits and stops stay the oracle's.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.masking_utils import eager_mask
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as eager_with_cap

from specverify.backends.base import Unsupported
from specverify.backends.engine.attention.interface import chosen_mask
from specverify.backends.engine.model.axes import ImageEmbeddings, axes_of, whole_inputs
from specverify.backends.engine.model.built_in import DTYPES, built_in
from specverify.backends.engine.model.hidden import last_norm
from specverify.backends.engine.model.models import from_disk
from specverify.backends.engine.reach import HYBRID, RECURRENT
from specverify.reference.architecture import Model, Seeded
from specverify.reference.family.recurrent import RecurrentState
from specverify.reference.trace import Array

INTERFACE = "specverify-plain"
"""Name under which `record_attention`, which records calls of eager attention, is registered with transformers."""

NARROW = (torch.float32, torch.bfloat16, torch.float16)
WIDER_METHODS = {torch.Tensor.float: torch.Tensor.double, torch.Tensor.half: torch.Tensor.double}


class Wide(TorchFunctionMode):
    """A torch mode in which every call that asks for a narrower float computes in float64.

    transformers computes norms, rotary tables, routers and softmax in float32 whatever the dtype of the model. The
    code that runs is still transformers' own; only the narrower dtypes that it names are replaced by float64.

    Attributes:
        narrow: The names of torch functions that returned a float narrower than float64 all the same.
    """

    def __init__(self) -> None:
        super().__init__()
        self.narrow: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one call in float64; `types` is not used."""
        wide_kwargs = {name: _wide_dtype(value) for name, value in (kwargs or {}).items()}
        # `.float()` and `.half()` name no dtype in their arguments, so the method itself is replaced.
        result = WIDER_METHODS.get(func, func)(*(_wide_dtype(argument) for argument in args), **wide_kwargs)
        if isinstance(result, Tensor) and result.dtype in NARROW:
            self.narrow.add(str(getattr(func, "__name__", func)))
        return result


def _wide_dtype(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in NARROW else value


def _with_images(embeddings: ImageEmbeddings) -> Callable[[Any, Any, Tensor], Tensor]:
    """A hook that puts the embeddings of images into those of a whole sequence, [1, T, hidden]."""

    def put_images(_: Any, __: Any, output: Tensor) -> Tensor:
        images = embeddings.of_columns(torch.arange(output.shape[1]))
        return output if images is None else images.put_into(output[0])[None]

    return put_images


@contextmanager
def wide() -> Iterator[Wide]:
    """Inside the `with`, torch computes in float64 in this thread, and new tensors without a dtype are float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.no_grad(), Wide() as mode:
            yield mode
    finally:
        torch.set_default_dtype(before)


@dataclass(frozen=True)
class Sequence:
    """The arrays of one sequence of T tokens that was run from scratch, all in float64.

    Attributes:
        logits: [T, vocabulary].
        attended: For each layer [heads, T, head_dim]; the output of attention before the output projection.
        queries: For each layer [heads, T, head_dim], as attention receives them.
        keys: For each layer [kv_heads, T, head_dim], as attention receives them: after norms and rotary embedding.
        values: For each layer [kv_heads, T, head_dim].
        sharing: The layers that receive keys and values of an earlier layer.
        index_keys: For each layer [T, width], the index keys by which its indexer scores columns; of width 0 for none.
    """

    logits: Array
    attended: tuple[Array, ...]
    queries: tuple[Array, ...]
    keys: tuple[Array, ...]
    values: tuple[Array, ...]
    sharing: tuple[int, ...] = ()
    index_keys: tuple[Array, ...] = ()


@dataclass(frozen=True)
class _Layer:
    """Inputs and output of one call of attention, without the batch axis: [heads, T, head_dim], the mask [T, T].

    `scale` is the factor by which the products of queries and keys are multiplied, `shares` says whether keys and
    values are those of an earlier layer, and `indexed` whether an indexer chose the columns of each row.
    """

    index: int
    scale: float
    shares: bool
    indexed: bool
    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    mask: Tensor | None


KINDS = ("output", "query", "key", "value")
"""The tensors of a recorded call of attention."""

_recorded_calls: ContextVar[list[_Layer]] = ContextVar("_recorded_calls")


def record_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> Any:
    """Call the eager attention of the file that defines `module`, with the same arguments, and record the call.

    Raises:
        Unsupported: if that file has no `eager_attention_forward`.
    """
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if eager is not None and options.get("softcap") and "softcap" not in signature(eager).parameters:
        eager = eager_with_cap  # a built-in model may have a soft cap that its family lacks in transformers
    if eager is None:
        raise Unsupported(f"{type(module).__name__} has no eager attention of transformers' usual form")
    indices = options.pop("indices", None)
    if indices is not None and attention_mask is not None:  # transformers folds them into the mask of its own names
        lowest = torch.finfo(attention_mask.dtype).min
        attention_mask = attention_mask.masked_fill(~chosen_mask(attention_mask, indices), lowest)
    output, weights = eager(module, query, key, value, attention_mask, **options)
    mask = None if attention_mask is None else attention_mask[0, 0]
    index = module.layer_idx
    assert isinstance(index, int)
    scale = options.get("scaling")
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)  # None means the usual 1 / sqrt(head_dim)
    shares = bool(getattr(module, "is_kv_shared_layer", False))
    _recorded_calls.get().append(
        _Layer(index, scale, shares, indices is not None, query[0], key[0], value[0], output[0].transpose(0, 1), mask)
    )
    return output, weights


AttentionInterface.register(INTERFACE, record_attention)
AttentionMaskInterface.register(INTERFACE, eager_mask)


class _IndexKeys:
    """The cache argument of an indexer, which notes the index keys of a whole sequence by layer."""

    def __init__(self) -> None:
        self.by_layer: dict[int, Tensor] = {}

    def update_indexer(self, keys: Tensor, layer: int) -> Tensor:
        """Note `keys` [1, T, width], and return them."""
        self.by_layer[layer] = keys[0]
        return keys

    def listen(self, network: nn.Module) -> None:
        """Stand as the cache of every indexer of `network`."""
        for name, module in network.named_modules():
            if name.endswith(".indexer"):
                module.register_forward_pre_hook(
                    lambda _, args, kwargs: (args, {**kwargs, "past_key_values": self}), with_kwargs=True
                )


class PlainTransformers:
    """A causal language model of transformers, of any family, with its weights rounded to a working dtype.

    It runs whole sequences without a KV cache and without the engine's attention. It shares with the engine only the
    code that loads weights.

    Attributes:
        reaches: Each layer's window and chunk in tokens, 0 for none; each run checks them against the masks that
            transformers itself makes.
        scale: The factor of the products of queries and keys in the first layer of the latest run.
        config: The transformers config.
    """

    def __init__(self, model: Model, dtype: str) -> None:
        with wide():
            self._network = built_in(model, "float64") if isinstance(model, Seeded) else from_disk(model, "float64")
            self._network.eval()
        if dtype != "float64":
            # The engine's weights have the working dtype: the reference rounds its own to it and stays in float64.
            for name, parameter in self._network.named_parameters():
                stored_dtype = torch.float32 if _stays_wide(self._network, name) else DTYPES[dtype]
                parameter.data = parameter.data.to(stored_dtype).to(torch.float64)
            for name, buffer in self._network.named_buffers():
                if name.endswith("layer_scalar"):  # a weight of Gemma 4 that transformers holds as a buffer
                    buffer.copy_(buffer.to(DTYPES[dtype]))
            for module in self._network.modules():
                if isinstance(getattr(module, "embed_scale", None), Tensor):  # Gemma's embeddings cast it like a weight
                    module.embed_scale = module.embed_scale.to(DTYPES[dtype]).to(torch.float64)
        self.config = self._network.config
        self._axes = axes_of(model)
        if self._axes is not None and self._axes.embeddings is not None:
            self._network.get_input_embeddings().register_forward_hook(_with_images(self._axes.embeddings))
        self._index_keys = _IndexKeys()
        self._index_keys.listen(self._network)
        self._network.set_attn_implementation(INTERFACE)
        if hasattr(self.config, "_experts_implementation"):
            # "eager" is the experts' code in the model's own file; other values replace it by grouped products.
            self.config._experts_implementation = "eager"
        text_config = self.config.get_text_config(decoder=True)
        self.reaches = _reaches(text_config)
        kinds = getattr(text_config, "layer_types", None) or []
        self._attending = [layer for layer in range(len(self.reaches)) if not kinds or kinds[layer] not in RECURRENT]
        self.scale = 1.0
        cap = getattr(self.config, "score_cap", 0.0)  # set by `config_of` if the model's class has no soft cap
        self._cap_options = {"softcap": cap} if cap else {}

    @contextmanager
    def perturbed(self, seed: int, share: float) -> Iterator[None]:
        """Inside the `with`, each weight is multiplied by 1 + `share` * (a normal number of the generator `seed`)."""
        generator = torch.Generator().manual_seed(seed)
        data_by_name = {name: parameter.data for name, parameter in self._network.named_parameters()}
        try:
            for parameter in self._network.parameters():
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64, device="cpu")
                parameter.data = parameter.data * (1 + share * noise.to(parameter.device))
            yield
        finally:
            for name, parameter in self._network.named_parameters():
                parameter.data = data_by_name[name]

    def run(self, tokens: tuple[int, ...]) -> Sequence:
        """Run `tokens`, at least one, from scratch.

        Raises:
            Unsupported: if transformers computes narrower than float64, if layers do not call attention through
                its interface, or if a mask does not match `reaches`.
        """
        layers: list[_Layer] = []
        reset_token = _recorded_calls.set(layers)
        name = type(self._network).__name__
        try:
            with _own_failures(name), wide() as mode:
                inputs = {**whole_inputs(self._axes, tokens), **self._cap_options}
                logits = self._network(**inputs, use_cache=False).logits[0]
        finally:
            _recorded_calls.reset(reset_token)
        if mode.narrow:
            raise Unsupported(f"{name}: transformers computes {', '.join(sorted(mode.narrow))} narrower than float64")
        if not layers or [layer.index for layer in layers] != self._attending:
            raise Unsupported(
                f"{name}: layers {[layer.index for layer in layers]} call attention through transformers' attention "
                f"interface, where each of {self._attending} should, once"
            )
        for layer in layers:
            self._check_mask(layer, self.reaches[layer.index])
        # A layer with a recurrent state attends to nothing: zeros stand for its columns.
        first = layers[0]
        zeros = [torch.zeros_like(tensor) for tensor in (first.query, first.key, first.value, first.output)]
        blank = _Layer(-1, first.scale, False, False, zeros[0], zeros[1], zeros[2], zeros[3], None)
        layer_by_index = {layer.index: layer for layer in layers}
        layers = [layer_by_index.get(index, blank) for index in range(len(self.reaches))]
        self.scale = next(iter(layer_by_index.values())).scale
        arrays = {kind: tuple(getattr(layer, kind).numpy() for layer in layers) for kind in KINDS}
        sharing = tuple(layer.index for layer in layers if layer.shares)
        by_layer, no_keys = self._index_keys.by_layer, torch.zeros(len(tokens), 0, dtype=torch.float64)
        index_keys = tuple(by_layer.get(layer, no_keys).numpy() for layer in range(len(layers)))
        return Sequence(
            logits.numpy(), arrays["output"], arrays["query"], arrays["key"], arrays["value"], sharing, index_keys
        )

    def states(self, tokens: tuple[int, ...]) -> Array:
        """The residual stream, float64 [layers + 2, T, hidden size], as `specverify.reference.oracle.evaluator` has it.

        transformers' `hidden_states` lacks one row, the output of the last layer. That output is the input of the last
        norm, where a hook reads it.

        Raises:
            Unsupported: if the model has no last norm under the name that transformers' decoders use.
        """
        body = self._network.base_model
        # The base of a text model of several modalities (Llama 4) is the model with its head.
        body = body if hasattr(body, "layers") else getattr(body, "model", body)
        norm = last_norm(body)
        if norm is None:
            raise Unsupported(f"{type(self._network).__name__} has no last norm under the name that decoders give it")
        last: list[torch.Tensor] = []
        hook = norm.register_forward_pre_hook(lambda _, inputs: last.append(inputs[0]))
        reset_token = _recorded_calls.set([])
        try:
            with _own_failures(type(self._network).__name__), wide():
                inputs = {**whole_inputs(self._axes, tokens), **self._cap_options}
                hidden_states = body(**inputs, use_cache=False, output_hidden_states=True).hidden_states
        finally:
            _recorded_calls.reset(reset_token)
            hook.remove()
        if any(tensor.shape != last[0].shape for tensor in hidden_states):
            raise Unsupported(
                f"{type(self._network).__name__}: its layers hand on several states for each token "
                f"({list(hidden_states[0].shape)}), and traces hold one"
            )
        # transformers puts the normed output in the last place, so the last layer's own output goes before it.
        states: Array = torch.stack([*hidden_states[:-1], last[0], hidden_states[-1]])[:, 0].numpy()
        return states

    def recurrent(self, tokens: tuple[int, ...]) -> RecurrentState | None:
        """The recurrent state that transformers' own cache holds behind `tokens`; None for a model without any."""
        kinds = getattr(self.config, "layer_types", None) or []
        layers = [layer for layer, kind in enumerate(kinds) if kind in (*RECURRENT, *HYBRID)]
        if not layers or not tokens:
            return None
        cache = DynamicCache(config=self.config)
        reset_token = _recorded_calls.set([])
        try:
            with _own_failures(type(self._network).__name__), wide():
                self._network(torch.tensor([tokens]), use_cache=True, past_key_values=cache, **self._cap_options)
        finally:
            _recorded_calls.reset(reset_token)
        # transformers keeps as many inputs as the convolution is wide, channels first; the oldest one is never read.
        windows = tuple(cache.layers[layer].conv_states[0][0].T[1:].numpy() for layer in layers)
        blank = torch.zeros(1, 0, 0, 0)  # a layer that has a convolution alone
        memories = (cache.layers[layer].recurrent_states[0] for layer in layers)
        return RecurrentState(windows, tuple((blank if memory is None else memory)[0].numpy() for memory in memories))

    def _check_mask(self, layer: _Layer, reach: tuple[int, int]) -> None:
        """Raise Unsupported unless the mask hides exactly the columns after a row and the columns out of its reach."""
        length = layer.query.shape[1]
        if layer.mask is None and length == 1:  # a single row sees itself: no mask is needed
            return
        window, chunk = reach
        row, column = torch.arange(length)[:, None], torch.arange(length)
        visible = column <= row
        if window:
            visible &= column > row - window
        if chunk:
            visible &= column // chunk == row // chunk
        mask = layer.mask
        # An additive mask: 0 where visible, and where hidden the lowest float or minus infinity.
        # An indexer hides further columns, each row others.
        is_open = layer.indexed or (mask is not None and bool((mask[visible] == 0).all()))
        if mask is None or not is_open or not bool((mask[~visible] < -1e30).all()):
            raise Unsupported(
                f"{type(self._network).__name__}: the mask that transformers makes for layer {layer.index} is not "
                f"causal with window {window or None} and chunk {chunk or None}, as config.json says"
            )


def _stays_wide(network: Any, name: str) -> bool:
    """Whether transformers holds the weight `name` in float32 in a model of any dtype but float64."""
    kinds = getattr(network, "_keep_in_fp32_modules_strict", None) or ()
    return any(f".{kind}." in f".{name}." for kind in kinds)


@contextmanager
def _own_failures(name: str) -> Iterator[None]:
    """Inside the `with`, an error of transformers' own forward is Unsupported: it says nothing of the backend."""
    try:
        yield
    except (Unsupported, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # models that expect other inputs, or float32, fail in many ways
        line = " ".join(str(error).split())[:200]
        raise Unsupported(
            f"{name}: transformers' own forward in float64 fails ({type(error).__name__}: {line})"
        ) from error


def _reaches(config: Any) -> tuple[tuple[int, int], ...]:
    """Each layer's window and chunk according to `config`; `PlainTransformers.run` checks them against the masks.

    Raises:
        Unsupported: for a kind of layer that is not attention over tokens.
    """
    window: int = getattr(config, "sliding_window", None) or 0
    chunk: int = getattr(config, "attention_chunk_size", None) or 0
    unlimited = dict.fromkeys(("full_attention", "indexed_attention", *RECURRENT, *HYBRID), (0, 0))
    reach_by_kind = {**unlimited, "sliding_attention": (window, 0), "chunked_attention": (0, chunk)}
    kinds = getattr(config, "layer_types", None)
    if not kinds:
        return ((window, 0),) * int(config.num_hidden_layers)
    for kind in kinds:
        if kind not in reach_by_kind:
            raise Unsupported(
                f"layers of kind {kind}: plain transformers is a reference for {', '.join(reach_by_kind)}"
            )
    return tuple(reach_by_kind[kind] for kind in kinds)
