"""Parameters: a target's weights in float64, and the steps of a layer.

Weights are rounded to the engine's working dtype first, so the oracle computes the model that the engine holds.
"""

import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from specverify.reference.architecture import Architecture, Checkpoint, Model, Seeded
from specverify.reference.draft.head import Head
from specverify.reference.draft.mtp import Mtp
from specverify.reference.family.vision_text import VisionTextSettings
from specverify.reference.files.stored import StoredTensor
from specverify.reference.images import Images
from specverify.reference.malformed import Malformed
from specverify.reference.oracle.checkpoint import (
    StoredWeights,
    UnreadableCheckpoint,
    identify,
    open_weights,
    read_weights,
)
from specverify.reference.oracle.choices import Choices, RowChoices
from specverify.reference.oracle.configuration import read_architecture
from specverify.reference.oracle.family import FAMILIES
from specverify.reference.oracle.formulas import rotary
from specverify.reference.oracle.formulas.layer import (
    TANH_ROUNDINGS,
    Formulas,
    gated_block,
    layer_norm,
    linear,
    rms_norm,
)
from specverify.reference.oracle.formulas.recurrence import LayerState
from specverify.reference.oracle.formulas.rounded_columns import RoundedColumns
from specverify.reference.oracle.formulas.routers import Router
from specverify.reference.quantisation import QUANTISED
from specverify.reference.trace import Array
from specverify.reference.tree import Tree
from specverify.reference.weights import ROWS_BY_TOKEN, head_weights, image_embeddings, low_rank, seeded_weights

BLOCK = 2**22
"""Numbers of a weight that are rounded at a time."""

LAYER = re.compile(r"model\.layers\.(\d+)\.")
"""The beginning of the names of a layer's weights."""


@dataclass(frozen=True, eq=False)
class Parameters:
    """A model ready to compute: its architecture and its state dict in float64, weight matrices as [out, in].

    Attributes:
        embedding_scale: The factor of embeddings, rounded to the working dtype as engines round it.
        layer_input_scale: The same of the embeddings that enter each layer.
        images: The blocks of every text whose tokens are numbered as grids, and may have embeddings of their own.
        choices: The experts, columns and codes that rows take whose text it knows; others take those of their own
            scores and numbers.
        rounded: How keys and values are rounded before they are read; None where they are not.
    """

    architecture: Architecture
    state: Mapping[str, Array]
    embedding_scale: float = 1.0
    layer_input_scale: float = 1.0
    images: Images = ()
    choices: Choices | None = None
    rounded: RoundedColumns | None = None

    @property
    def kind_of_array(self) -> Array:
        """A weight: `np.zeros(shape, like=...)` makes an array of the kind with which the model computes (NEP 35)."""
        return self.state["model.norm.weight"]

    def host_copy(self, array: Array) -> Array:
        """`array` as NumPy's own, as evaluators answer; it is that already where the weights are."""
        return array

    @property
    def formulas(self) -> Formulas:
        """The formulas of the model's family."""
        return FAMILIES[self.architecture.family].formulas

    def embed(self, tokens: Array, columns: Array) -> Array:
        """The input of the first layer for `tokens` [T] at `columns` [T] of a text: [T, hidden]."""
        rows: Array = self.state["model.embed_tokens.weight"][tokens]
        return self.with_images(rows * self.embedding_scale, columns)

    def with_images(self, embedded: Array, columns: Array) -> Array:
        """The embeddings `embedded` [T, hidden] of the tokens at `columns` [T], with those of images in their places.

        `embedded` is changed.
        """
        for image in self.images:
            inside = (columns >= image.start) & (columns < image.end)
            if image.seed and inside.any():
                of_image = image_embeddings(image, embedded.shape[-1])
                embedded[inside] = of_image[columns[inside] - image.start]
        return embedded

    def layer_inputs(self, tokens: Array, x: Array) -> Array | None:
        """The inputs at the end of each layer beside the residual stream, [layers, T, width]; None for layers without.

        `x` [T, hidden] is the input of the first layer for `tokens` [T].
        """
        make = self.formulas.layer_inputs
        return None if make is None else make(self.architecture, self.state, tokens, x, self.layer_input_scale)

    def norm(self, x: Array, name: str) -> Array:
        """`x` [..., n] through the norm `name`."""
        gain = self.formulas.gain(self.state[f"{name}.weight"])
        norm = layer_norm if self.architecture.words.centred_norms else rms_norm
        return norm(x, gain, self.architecture.norm_eps)

    def attention_input(self, layer: int, x: Array) -> Array:
        """The residual stream `x` [T, hidden] after the norm before attention of `layer`, where the family has one."""
        return self._norm_if_any(self.architecture.words.norms.before_attention, layer, x)

    def _norm_if_any(self, norm: str | None, layer: int, x: Array) -> Array:
        """`x` [T, hidden] through the norm of `layer` with this name; unchanged where the family has none."""
        return x if norm is None else self.norm(x, f"model.layers.{layer}.{norm}")

    def project(self, layer: int, name: str, x: Array) -> Array:
        """The projection q, k or v of the input `x` [T, hidden] of attention: [T, heads, width].

        Queries and keys are normed where the family norms them before rotary embedding.
        """
        if self.formulas.project is not None:
            return self.formulas.project(self.architecture, self.state, layer, name, x)
        prefix, arch = f"model.layers.{layer}.self_attn.{name}", self.architecture
        y = linear(x, self.state, f"{prefix}_proj")
        has_norm = f"{prefix}_norm.weight" in self.state and not self.formulas.norms_after_rotation
        if has_norm and arch.words.whole_query_key_norms:
            y = self.norm(y, f"{prefix}_norm")
        sizes = arch.layer_heads(layer)
        by_head: Array = y.reshape(len(x), -1, sizes.value_dim if name == "v" else sizes.head_dim)
        return self.norm(by_head, f"{prefix}_norm") if has_norm and not arch.words.whole_query_key_norms else by_head

    def rotate(self, layer: int, name: str, y: Array, cos: Array, sin: Array) -> Array:
        """The queries or keys `y` [heads, T, head_dim] of `layer` after its rotary embedding, if it has one.

        They are normed here where the family norms them after rotary embedding.
        """
        if layer not in self.architecture.unrotated:
            y = self.formulas.rotate(self.architecture, y, cos, sin)
        norm = f"model.layers.{layer}.self_attn.{name}_norm"
        return self.norm(y, norm) if self.formulas.norms_after_rotation and f"{norm}.weight" in self.state else y

    def frequencies(self, layer: int, length: int) -> tuple[Array, float]:
        """The inverse frequencies of `layer` and the factor on its tables; see `rotary.frequencies`."""
        arch, rope = self.architecture, self.formulas.rope(self.architecture, layer)
        width = int(arch.settings.rotary_dim or arch.layer_heads(layer).head_dim)
        return rotary.frequencies(rope, width, arch.max_positions, length)

    def rotary_table(self, columns: Array, inv_freq: Array, scaling: float) -> tuple[Array, Array]:
        """`rotary.table` at the positions of the tokens at `columns` [T] of a text."""
        if not self.images:
            return rotary.table(columns, inv_freq, scaling)
        sections = VisionTextSettings.of(self.architecture).sections
        return rotary.grid_table(sections, rotary.grid_positions(self.images, columns), inv_freq, scaling)

    def sinks(self, layer: int) -> Array | None:
        """The sink of each head of `layer`, [heads], or None: a score that takes a share of the softmax."""
        return self.state.get(f"model.layers.{layer}.self_attn.sinks")

    @property
    def twins_differ(self) -> bool:
        """Whether nodes of one text have unlike `choices`."""
        return self.choices is not None and self.choices.twins_differ

    def known_choices(self, context: tuple[int, ...], tree: Tree | None = None) -> RowChoices:
        """The entries of `choices` for the rows of `context` and of `tree` below it."""
        return RowChoices() if self.choices is None else self.choices.of(context, tree)

    def read_back(
        self, layer: int, keys: Array, values: Array, positions: Array, known_codes: Array | None
    ) -> tuple[Array, Array]:
        """Keys and values [kv_heads, T, width] of `layer` as a cache that rounds them gives them back.

        `positions` [T] are those of the rows; `known_codes` [layers, T, codes] as `known_choices` gives them.
        """
        if self.rounded is None:
            return keys, values
        known = None if known_codes is None else known_codes[layer]
        return self.rounded.columns(layer, (keys, values), positions, known)

    def feed_forward_input(self, layer: int, entering: Array, x: Array) -> Array:
        """The normed input [T, hidden] of the feed-forward block of `layer`; see `finish_layer`."""
        words = self.architecture.words
        if words.side_by_side:
            return self.attention_input(layer, entering)
        return self._norm_if_any(words.norms.before_feed_forward, layer, x)

    def finish_layer(
        self, layer: int, entering: Array, x: Array, known_experts: Array | None = None, inputs: Array | None = None
    ) -> Array:
        """The residual stream after `layer`.

        Args:
            layer: The layer.
            entering: The residual stream before it, [T, hidden].
            x: The residual stream between its attention and its feed-forward block, [T, hidden].
            known_experts: The experts that the rows take, [layers, T, taken], where they are known (`known_choices`).
            inputs: What enters the layers beside the residual stream (`layer_inputs`).
        """
        norms = self.architecture.words.norms
        output = self._feed_forward(layer, self.feed_forward_input(layer, entering, x), known_experts)
        finished = x + self.formulas.residual_scale(self.architecture) * self._norm_if_any(
            norms.after_feed_forward, layer, output
        )
        if self.formulas.after_layer is None:
            return finished
        layer_input = None if inputs is None else inputs[layer]
        return self.formulas.after_layer(self.architecture, self.state, layer, finished, layer_input)

    def start(self) -> LayerState:
        """The recurrent state of a layer before the first token."""
        assert self.formulas.recurrence is not None
        return self.formulas.recurrence.begin(self.architecture)

    def run_recurrence(
        self, layer: int, x: Array, start: LayerState, parent: Sequence[int]
    ) -> tuple[list[LayerState], Array]:
        """The state after each row of a layer with a recurrent state, and what it adds to the residual stream.

        Args:
            layer: The layer.
            x: The residual stream before it, [T, hidden].
            start: The state from which rows go on that have no row above.
            parent: The row above each row, which comes before it; -1 for none.
        """
        formulas, arch = self.formulas, self.architecture
        assert formulas.recurrence is not None
        layer_states, added = formulas.recurrence.run_rows(
            arch, self.state, layer, start, self.attention_input(layer, x), parent
        )
        return layer_states, formulas.residual_scale(arch) * added

    def after_attention(self, layer: int, x: Array, mixed: Array) -> Array:
        """The residual stream between attention and the feed-forward block of `layer`.

        Args:
            layer: The layer.
            x: The residual stream before it, [T, hidden].
            mixed: Its attention output before the output projection, [T, heads * value_dim].
        """
        gate = self.formulas.output_gate
        if gate is not None:
            mixed = mixed * gate(self.architecture, self.state, layer, self.attention_input(layer, x))
        output = linear(mixed, self.state, f"model.layers.{layer}.self_attn.o_proj")
        added = self._norm_if_any(self.architecture.words.norms.after_attention, layer, output)
        factor = self.formulas.residual_scale(self.architecture) * self.formulas.attention_scale(self.architecture)
        return x + factor * added

    def _feed_forward(self, layer: int, x: Array, known_experts: Array | None) -> Array:
        """The feed-forward block of `layer`: [T, hidden] -> [T, hidden]."""
        formulas, arch = self.formulas, self.architecture
        router = None if formulas.experts is None else formulas.experts.router(arch, self.state, layer, x)
        if formulas.experts is not None and router is not None:
            experts = router.follow(None if known_experts is None else known_experts[layer])
            return formulas.experts.mix(arch, self.state, layer, x, router, experts)
        if formulas.feed_forward is not None:
            return formulas.feed_forward(arch, self.state, layer, x)
        return gated_block(x, self.state, f"model.layers.{layer}.mlp", formulas.activation)

    def router(self, layer: int, entering: Array, residual: Array) -> Router | None:
        """The scores of experts for the residual streams before the layer and after its attention.

        None for a layer without experts.
        """
        if self.formulas.experts is None:
            return None
        x = self.feed_forward_input(layer, entering, residual)
        return self.formulas.experts.router(self.architecture, self.state, layer, x)

    @property
    def head(self) -> Array:
        """The matrix from the last hidden state to logits, [vocabulary, hidden]; a tied head is the embedding."""
        return self.state["model.embed_tokens.weight" if self.architecture.tied else "lm_head.weight"]

    def logits(self, last: Array) -> Array:
        """Logits [..., vocabulary] of the normed last hidden states [..., hidden]."""
        return self.formulas.logits(self.architecture, last @ self.head.T)


def load(model: Model, dtype: str) -> Parameters:
    """The parameters of a model in working dtype `dtype`: rounded to it as an engine would, then held in float64.

    Raises:
        UnreadableCheckpoint: the checkpoint cannot be read, or does not have the digest that the case names.
        Malformed: a weight is too large for `dtype`.
    """
    if isinstance(model, Seeded) and model.images:
        return replace(load(replace(model, images=()), dtype), images=model.images)
    if isinstance(model, Seeded):
        scales = _embedding_scales(model.architecture, dtype)
        if model.adapter is not None:
            return _adapted_parameters(model, scales)
        return _quantised_parameters(model, scales, dtype) if model.quantised else _built_in_parameters(model, scales)
    return _checkpoint_parameters(model, dtype)


@lru_cache(maxsize=64)
def load_head(head: Head, target: Model, dtype: str) -> dict[str, Array]:
    """A draft head's weights, rounded to `dtype` and held in float64; see `specverify.reference.weights.head_weights`.

    Args:
        head: The head, with the bare root as its tree (`Head.weights`), so that its trees share one entry of the cache.
        target: The target.
        dtype: The working dtype.

    Raises:
        UnreadableCheckpoint: stored weights cannot be read, or are not those of the case.
        Malformed: a weight is too large for `dtype`.
    """
    state = head_weights(head, target)
    check_modules(head, target, state)
    if head.files is not None:  # seeded weights are exact in every working dtype
        state = {
            name: round_to(weight, dtype, name) if weight.dtype == np.float64 else weight
            for name, weight in state.items()
        }
    return _quantise_weights(state, head.quantised, dtype) if head.quantised else state


def check_modules(head: Head, target: Model, state: Mapping[str, Array]) -> None:
    """Refuse the stored weights `state` of MTP modules that are no layers of the target's family.

    Raises:
        UnreadableCheckpoint: a tensor is missing, has no place or another shape, or the family has no such modules.
    """
    if not isinstance(head, Mtp) or head.layer is not None or not isinstance(target, Checkpoint):
        return
    try:
        expected_shapes = head.tensors(read_architecture(Path(target.source) / "config.json"))
    except Malformed as complaint:
        raise UnreadableCheckpoint(f"{target.source}: {complaint}") from None
    for name in sorted(expected_shapes.keys() | state.keys()):
        if name not in state:
            raise UnreadableCheckpoint(f"{target.source}: tensor {name} is missing; the MTP modules are not whole")
        if name not in expected_shapes:
            raise UnreadableCheckpoint(f"{target.source}: tensor {name} has no place in an MTP module of the target")
        if state[name].shape != expected_shapes[name]:
            raise UnreadableCheckpoint(
                f"{target.source}: tensor {name} has shape {list(state[name].shape)}, an MTP module of the target "
                f"has {list(expected_shapes[name])}"
            )


@lru_cache(maxsize=64)
def _built_in_parameters(model: Seeded, scales: tuple[float, float]) -> Parameters:
    # Seeded weights are exact in every working dtype (weights.representable): nothing to round.
    return Parameters(model.architecture, seeded_weights(model), *scales)


@lru_cache(maxsize=64)
def _quantised_parameters(model: Seeded, scales: tuple[float, float], dtype: str) -> Parameters:
    return Parameters(model.architecture, _quantise_weights(seeded_weights(model), model.quantised, dtype), *scales)


@lru_cache(maxsize=64)
def _adapted_parameters(model: Seeded, scales: tuple[float, float]) -> Parameters:
    """The parameters with the adapter's product merged into each weight that it changes, in float64."""
    assert model.adapter is not None
    adapter_products = low_rank(model)
    state = {
        name: weight + model.adapter.scale * (adapter_products[name][1] @ adapter_products[name][0])
        if name in adapter_products
        else weight
        for name, weight in seeded_weights(model.bare).items()
    }
    return Parameters(model.architecture, state, *scales)


def _quantise_weights(state: Mapping[str, Array], kind: str, dtype: str) -> dict[str, Array]:
    """Weights that are rounded to `dtype` already, with the quantised ones replaced by number * scale in `dtype`."""
    names = FEED_FORWARD_NAMES if QUANTISED[kind].feed_forward else QUANTISED_NAMES
    return {
        name: round_to(quantised_weights(weight, kind), dtype, name) if name.endswith(names) else weight
        for name, weight in state.items()
    }


def _embedding_scales(arch: Architecture, dtype: str) -> tuple[float, float]:
    """The factors of the embeddings of tokens, and of those that enter each layer, as engines hold them."""
    formulas = FAMILIES[arch.family].formulas
    scales = np.array([formulas.embedding_scale(arch), formulas.layer_input_scale(arch)])
    of_tokens, of_layers = round_to(scales, dtype) if formulas.embedding_rounded else scales
    return float(of_tokens), float(of_layers)


COPIED_BYTES = 1 << 28
"""Weights of so many bytes in float64 have perturbed copies in memory; of larger ones they are made when read.

A copy answers again in no time. Made anew, one of 73M parameters takes a second for each tree.
"""


@lru_cache(maxsize=2)
def _checkpoint_parameters(model: Checkpoint, dtype: str) -> Parameters:
    # The cache keeps two: a target and a draft. A model of 135M parameters takes 1.1 GB in float64.
    architecture, stored, by_layer = _weights_by_layer(model, dtype)
    state = read_weights(model.source, stored)
    for name, weight in state.items():
        state[name] = _held_weight(model, architecture, dtype, name, weight, stored)
    num_bytes = sum(weight.nbytes for weight in state.values())
    weights = WholeWeights(state, by_layer) if num_bytes > COPIED_BYTES else state
    held_architecture = _held_architecture(model, architecture)
    return Parameters(held_architecture, weights, *_embedding_scales(held_architecture, dtype))


@lru_cache(maxsize=2)
def parameters_by_layer(model: Checkpoint, dtype: str) -> Parameters:
    """As `load`, with a state dict that reads weights from the files when they are asked for (`WeightsByLayer`).

    Raises:
        UnreadableCheckpoint: the checkpoint cannot be read, or does not have the digest that the case names.
    """
    architecture, _, by_layer = _weights_by_layer(model, dtype)
    held_architecture = _held_architecture(model, architecture)
    return Parameters(held_architecture, by_layer, *_embedding_scales(held_architecture, dtype))


def _weights_by_layer(model: Checkpoint, dtype: str) -> "tuple[Architecture, StoredWeights, WeightsByLayer]":
    _check_digest(model)
    architecture, stored = open_weights(model.source)

    def hold(name: str, weight: Array) -> Array:
        return _held_weight(model, architecture, dtype, name, weight, stored)

    def is_as_stored(name: str) -> bool:
        return _is_held_as_stored(model, architecture, dtype, name, stored)

    return architecture, stored, WeightsByLayer(stored, hold, is_as_stored)


def parameters_outside_layers(model: Model, dtype: str) -> Parameters:
    """As `load`; of a checkpoint the state dict holds the weights outside layers alone, which draft heads share.

    A head then needs no layer of a target that another evaluator runs.
    """
    return _outer_parameters(model, dtype) if isinstance(model, Checkpoint) else load(model, dtype)


@lru_cache(maxsize=2)
def _outer_parameters(model: Checkpoint, dtype: str) -> Parameters:
    parameters = parameters_by_layer(model, dtype)
    outer_names = (name for name in parameters.state if not LAYER.match(name))
    return replace(parameters, state={name: parameters.state[name] for name in outer_names})


class WeightsByLayer(Mapping[str, Array]):
    """The state dict of a checkpoint, of which the weights of one layer at a time lie in memory.

    Args:
        stored: The weights as they are stored.
        hold: From a name and the stored weight to the weight as an engine holds it, in float64.
        is_as_stored: From a name to whether the held weight is the stored one.
        roundings: The entry TANH_ROUNDINGS of a perturbed model; None for the model itself.
    """

    def __init__(
        self,
        stored: StoredWeights,
        hold: Callable[[str, Array], Array],
        is_as_stored: Callable[[str], bool],
        roundings: Array | None = None,
    ) -> None:
        self._stored = stored
        self._hold = hold
        self._is_as_stored = is_as_stored
        self._roundings = roundings
        self._layer: str | None = None
        self._weights: dict[str, Array] = {}

    def __getitem__(self, name: str) -> Array:
        if name == TANH_ROUNDINGS and self._roundings is not None:
            return self._roundings
        match = LAYER.match(name)
        layer = None if match is None else match[1]
        if layer != self._layer:
            self._layer = layer
            self._weights.clear()
        if name not in self._weights:
            weight = self._hold(name, self._stored[name])
            if layer is None:  # embedding and head are as large as layers: they are not kept beside each other
                return weight
            self._weights[name] = weight
        return self._weights[name]

    def __contains__(self, name: object) -> bool:
        return name in self._stored

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)

    def whole_tensor(self, name: str) -> StoredTensor | None:
        """The stored tensor whose numbers are those of the weight called `name`, where there is one."""
        return self._stored.whole_tensor(name) if self._is_as_stored(name) else None

    def perturbed(self, seed: int, size: float) -> "WeightsByLayer":
        """The same weights, each multiplied by 1 + `size` * (a normal number) when it is read.

        Each weight has a generator of its own, of `seed` and its name.
        """

        def hold(name: str, stored_weight: Array) -> Array:
            weight = self._hold(name, stored_weight)
            generator = np.random.default_rng([seed, zlib.crc32(name.encode())])
            changed = generator.standard_normal(weight.shape, dtype=np.float32).astype(np.float64)
            changed *= size
            changed += 1
            changed *= weight
            return changed

        widest = max(max(shape, default=0) for shape in self._stored.shapes.values())
        roundings = size * np.random.default_rng(seed).standard_normal(widest)
        return WeightsByLayer(self._stored, hold, lambda name: False, roundings)


class WholeWeights(dict[str, Array]):
    """The state dict of a checkpoint with all weights in memory; models whose weights differ a little add none to them.

    Args:
        weights: The weights as an engine holds them, in float64.
        by_layer: The same weights, read when they are asked for.
    """

    def __init__(self, weights: Mapping[str, Array], by_layer: WeightsByLayer) -> None:
        super().__init__(weights)
        self._by_layer = by_layer

    def perturbed(self, seed: int, size: float) -> WeightsByLayer:
        """See `WeightsByLayer.perturbed`."""
        return self._by_layer.perturbed(seed, size)


def _check_digest(model: Checkpoint) -> None:
    checkpoint = identify(model.source)
    if checkpoint.digest != model.digest:
        raise UnreadableCheckpoint(
            f"{model.source}: its digest is {checkpoint.digest}, the case was made with {model.digest}; "
            "point it to the original checkpoint"
        )


def _held_architecture(model: Checkpoint, architecture: Architecture) -> Architecture:
    """The architecture of the checkpoint with the vocabulary that the case names."""
    return replace(architecture, vocab_size=model.vocab_size) if model.stored_rows else architecture


HELD_EXACTLY = {
    "bfloat16": ("BF16",),
    "float16": ("F16",),
    "float32": ("BF16", "F16", "F32"),
    "float64": ("BF16", "F16", "F32", "F64"),
}
"""The stored dtypes whose numbers each working dtype holds exactly."""


def _held_weight(
    model: Checkpoint, architecture: Architecture, dtype: str, name: str, weight: Array, stored: StoredWeights
) -> Array:
    """The stored `weight` as an engine of working dtype `dtype` holds it, in float64, read-only."""
    if _has_resized_rows(model, architecture, name):
        weight = resize_rows(weight, model.vocab_size)
    held_dtype = FAMILIES[architecture.family].weight_dtype(name, dtype)
    if stored.stored_dtype(name) not in HELD_EXACTLY[held_dtype]:
        # In place: what was read belongs to nobody else, and an embedding is too large to lie in memory twice.
        weight = round_to(weight, held_dtype, name, into=weight)
    if model.quantised:
        weight = _quantise_weights({name: weight}, model.quantised, dtype)[name]
    weight.flags.writeable = False
    return weight


def _is_held_as_stored(
    model: Checkpoint, architecture: Architecture, dtype: str, name: str, stored: StoredWeights
) -> bool:
    """Whether `_held_weight` is the stored weight."""
    if model.quantised or _has_resized_rows(model, architecture, name):
        return False
    return stored.stored_dtype(name) in HELD_EXACTLY[FAMILIES[architecture.family].weight_dtype(name, dtype)]


def _has_resized_rows(model: Checkpoint, architecture: Architecture, name: str) -> bool:
    return bool(model.stored_rows) and name in (*ROWS_BY_TOKEN, *architecture.words.rows_by_token)


def resize_rows(weight: Array, rows: int) -> Array:
    """The first `rows` rows of `weight` [stored rows, width], with rows of zeros behind those that are stored."""
    resized = np.zeros((rows, weight.shape[1]))
    resized[: len(weight)] = weight[:rows]
    return resized


def round_to(weight: Array, dtype: str, name: str = "weight", into: Array | None = None) -> Array:
    """`weight` (float64, finite) as `dtype` holds it, to nearest even, in float64 again.

    The 16-bit types are reached through float32, as torch converts them.

    Args:
        weight: The numbers.
        dtype: The dtype.
        name: The name of the weight, for messages.
        into: Where the rounded numbers are written, possibly `weight` itself; None for a new array.

    Raises:
        Malformed: a weight overflows `dtype`.
    """
    if dtype == "float64":
        return weight
    if into is None:
        return _rounded_block(weight, dtype, name)
    rows = max(1, BLOCK * len(weight) // max(1, weight.size)) if weight.ndim else 1
    for first in range(0, len(weight) if weight.ndim else 0, rows):
        into[first : first + rows] = _rounded_block(weight[first : first + rows], dtype, name)
    if not weight.ndim:
        into[()] = _rounded_block(weight, dtype, name)
    return into


def _rounded_block(weight: Array, dtype: str, name: str) -> Array:
    with np.errstate(over="ignore"):
        single = weight.astype(np.float32)
        if dtype == "bfloat16":
            # NumPy has no bfloat16: round the upper 16 bits of the float32 to nearest, ties to even.
            bits = single.view(np.uint32)
            even = (bits >> np.uint32(16)) & np.uint32(1)
            nearest = (bits + np.uint32(0x7FFF) + even) & np.uint32(0xFFFF0000)
            rounded = nearest.view(np.float32)
        else:
            # NumPy rounds to float16 and float32 to nearest, ties to even.
            rounded = single.astype(dtype)
    widened: Array = np.asarray(rounded.astype(np.float64))  # of an array without axes NumPy makes a number
    if not np.isfinite(widened).all():
        raise Malformed("dtype", f"{name} holds {np.abs(weight).max():g}, too large for {dtype}")
    return widened


QUANTISED_NAMES = ("_proj.weight", "fc.weight", ".linear.weight")
"""The ends of the names of quantised matrices: projections, and the two kinds of matrices that only heads have."""


FEED_FORWARD_NAMES = ("gate_proj.weight", "up_proj.weight", "down_proj.weight", ".linear.weight")
"""The ends of the names of the matrices of the feed-forward part."""


def quantised_weights(weight: Array, kind: str) -> Array:
    """The products (number - zero point) * scale that stand for `weight` [out, in], exact in float64."""
    form = QUANTISED[kind]
    weight32 = weight.astype(np.float32)
    columns = form.group or weight.shape[1]
    products = _numbers_from_zero if form.has_zero_points else _numbers_around_zero
    groups = [products(weight32[:, begin : begin + columns], kind) for begin in range(0, weight.shape[1], columns)]
    return np.concatenate(groups, axis=1)


def _numbers_around_zero(group: Array, kind: str) -> Array:
    """The products of a group [out, columns] whose numbers lie around zero."""
    largest = np.abs(group).max(axis=1, keepdims=True)
    scale = np.where(largest == 0, np.float32(1), largest / np.float32(QUANTISED[kind].largest))
    numbers = (group / scale).astype(np.float64)
    rounded = nearest_e4m3(numbers) if kind == "fp8" else np.rint(numbers)
    products: Array = rounded * scale.astype(np.float64)
    return products


def _numbers_from_zero(group: Array, kind: str) -> Array:
    """The products of a group [out, columns] whose numbers run from 0, with a zero point."""
    last = np.float32(QUANTISED[kind].largest)
    lowest = np.minimum(group.min(axis=1, keepdims=True), np.float32(0))
    span = np.maximum(group.max(axis=1, keepdims=True), np.float32(0)) - lowest
    scale = np.where(span == 0, np.float32(1), span / last)
    zero = np.clip(np.rint(-lowest / scale), 0, last)
    numbers = np.clip(np.rint(group / scale) + zero, 0, last)
    products: Array = (numbers - zero).astype(np.float64) * scale.astype(np.float64)
    return products


def nearest_e4m3(values: Array) -> Array:
    """Each value, of at most 448, as the nearest 8-bit float with 4 bits of exponent and 3 of mantissa, ties to even.

    >>> nearest_e4m3(np.array([17.0, 19.0, 448.0, 0.001])).tolist()
    [16.0, 20.0, 448.0, 0.001953125]
    """
    # 2**exponent <= |value| < 2**(exponent + 1); below the smallest normal number 2**-6 the step stays.
    exponent = np.maximum(np.frexp(values)[1] - 1, -6)
    step = np.ldexp(1.0, exponent - 3)
    nearest: Array = np.rint(values / step) * step
    return nearest
