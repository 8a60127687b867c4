"""The formulas of drafts of blocks (arXiv 2602.06036, arXiv 2607.05147), from scratch on true states.

At each step the keys and values of the whole context are made anew from the target's states, then the block runs once.
No mask is used: a slot attends to a list of the rows that it sees.
"""

from dataclasses import replace

import numpy as np

from specverify.reference.architecture import Rope
from specverify.reference.draft.block import (
    BIAS,
    CONFIDENCE_HEAD,
    CONVOLUTIONS,
    MARKOV_PREFIX,
    PREDECESSOR,
    PREVIOUS,
    SELECTOR,
    SIDES,
    SUCCESSOR,
    Block,
    layer_prefix,
)
from specverify.reference.draft.hidden import HeadInput
from specverify.reference.oracle.draft.level_by_level import tree_of
from specverify.reference.oracle.draft.question import Question, proposes
from specverify.reference.oracle.formulas import rotary
from specverify.reference.oracle.formulas.layer import gated_block, linear, rms_norm, sigmoid
from specverify.reference.oracle.model import attention
from specverify.reference.oracle.parameters import parameters_outside_layers
from specverify.reference.trace import Array, Drafted, frozen
from specverify.reference.tree import Tree


class BlockFormulas:
    """The formulas of a draft of blocks, with its weights."""

    def __init__(self, draft: Block, question: Question) -> None:
        assert question.target is not None
        self.draft = draft
        self.layer = draft.layer
        self.state = question.weights_of(draft.weights)
        target_parameters = parameters_outside_layers(question.target, question.dtype)
        self.embedding = self.state.get("embed_tokens.weight", target_parameters.state["model.embed_tokens.weight"])
        self.target_head = target_parameters.head

    def outputs(self, root: int, hidden: Array) -> Array:
        """The outputs [slots, hidden] of the block under the token `root`, behind the target's states `hidden`."""
        draft = self.draft
        context = self._norm(linear(hidden, self.state, "fc"), "hidden_norm")
        x: Array = self.embedding[[root, *(draft.mask_token,) * (draft.slots - 1)]]
        for number in range(draft.layers):
            x = x + self._attention_part(number, context, x)
            x = x + self._feed_forward_part(number, x)
        return self._norm(x, "norm")

    def _attention_part(self, number: int, context: Array, x: Array) -> Array:
        """The rows [slots, hidden] that attention of layer `number` adds to the stream `x`."""
        prefix = layer_prefix(number)
        normed = self._norm(x, f"{prefix}.input_layernorm")
        before, after = self._kernels(f"{prefix}.{CONVOLUTIONS[0]}", normed)
        mixed = self._attend(number, context, convolve(normed, before))
        return convolve(linear(mixed, self.state, f"{prefix}.self_attn.o_proj"), after)

    def _feed_forward_part(self, number: int, x: Array) -> Array:
        """The rows [slots, hidden] that the feed-forward block of layer `number` adds to the stream `x`."""
        prefix = layer_prefix(number)
        normed = self._norm(x, f"{prefix}.post_attention_layernorm")
        before, after = self._kernels(f"{prefix}.{CONVOLUTIONS[1]}", normed)
        return convolve(gated_block(convolve(normed, before), self.state, f"{prefix}.mlp"), after)

    def _kernels(self, name: str, normed: Array) -> tuple[Array | None, Array | None]:
        """The kernels [slots, taps, hidden] of the convolutions before and after a part; None without any."""
        draft = self.draft
        if not draft.conv_taps:
            return None, None
        deltas = linear(normed, self.state, f"{name}.kernel_projection")
        by_group = deltas.reshape(len(normed), SIDES, draft.conv_taps, -1)
        kernels = self.state[f"{name}.base_kernel"] + np.repeat(by_group, draft.conv_group, axis=-1)
        return kernels[:, 0], kernels[:, 1]

    def score(self, outputs: Array, path: tuple[int, ...]) -> Array:
        """The scores [draft vocabulary] of the tokens behind `path`, the root's token and those below it."""
        slot = self.draft.slot_of(len(path) - 1)
        scores: Array
        if "lm_head.weight" in self.state:
            scores = linear(outputs[slot], self.state, "lm_head")
        else:
            scores = self.target_head @ outputs[slot]
        if self.draft.selects:
            return self._select(scores, outputs[slot], len(path) - 1, path[-1])
        return scores + self._bias(outputs, path) if self.draft.markov_rank else scores

    def confidence(self, outputs: Array, path: tuple[int, ...]) -> float:
        """The log-probability that the confidence head gives the token behind `path`, the root's and those below it."""
        read = outputs[self.draft.slot_of(len(path) - 1)]
        if self.draft.confidence == "markov":
            read = np.concatenate([read, self.state[PREVIOUS][path[-1]]])
        (logit,) = linear(read, self.state, CONFIDENCE_HEAD)
        return float(-np.logaddexp(0.0, -logit))

    def _select(self, scores: Array, output: Array, level: int, previous: int) -> Array:
        """The scores behind the token `previous`: those of the candidates of a slot, and minus infinity elsewhere."""
        draft = self.draft
        if level < len(draft.candidates):
            candidates = np.array(draft.candidates[level])
        else:
            candidates = np.argsort(-scores, kind="stable")[: draft.selector_top_k]
        context = self.state[PREDECESSOR][previous] * linear(output, self.state, f"{SELECTOR}.hidden_projection")
        selected = np.full(len(scores), -np.inf)
        selected[candidates] = scores[candidates] + self.state[SUCCESSOR][candidates] @ context
        return selected

    def _attend(self, number: int, context: Array, x: Array) -> Array:
        """The attention output [slots, heads * head_dim] of layer `number` for the normed input `x` [slots, hidden]."""
        layer, draft, name = self.layer, self.draft, f"{layer_prefix(number)}.self_attn"
        first = len(context)
        rows = np.concatenate([context, x])

        def by_head(projection: str, inputs: Array) -> Array:
            y: Array = linear(inputs, self.state, f"{name}.{projection}_proj").reshape(len(inputs), -1, layer.head_dim)
            return y

        def rotate(y: Array, begin: int) -> Array:
            table = rotary.frequencies(layer.rope or Rope(layer.theta), layer.head_dim, 0, 0)
            cos, sin = rotary.table(np.arange(begin, begin + len(y)), *table)
            turned: Array = rotary.turn(y.swapaxes(0, 1), cos, sin).swapaxes(0, 1)
            return turned

        queries = rotate(self._norm(by_head("q", x), f"{name}.q_norm"), first)
        keys = rotate(self._norm(by_head("k", rows), f"{name}.k_norm"), 0)
        values = by_head("v", rows)
        window, scale = draft.window(number), 1 / np.sqrt(layer.head_dim)
        mixed = []
        for position, query in enumerate(queries, first):
            last = position if draft.is_causal(number) else len(rows) - 1
            if window:
                last = min(last, position + window - 1)
            begin = max(0, position - window + 1) if window else 0
            mixed.append(attention(query, keys[begin : last + 1], values[begin : last + 1], scale))
        return np.array(mixed).reshape(len(x), -1)

    def _bias(self, outputs: Array, path: tuple[int, ...]) -> Array:
        """The bias [draft vocabulary] of the Markov head behind `path`."""
        embedded = self.state[PREVIOUS][list(path)]
        first_slot = self.draft.slot_of(0)
        rank = self.draft.markov_rank
        if self.draft.markov == "rnn":
            memory = np.zeros(rank)
            read = np.zeros(rank)
            for slot, previous in enumerate(embedded, first_slot):
                joined = linear(
                    np.concatenate([memory, previous, outputs[slot]]), self.state, f"{MARKOV_PREFIX}.joint_proj"
                )
                gate, candidate, read = np.split(joined, 3)
                memory = sigmoid(gate) * memory + (1 - sigmoid(gate)) * np.tanh(candidate)
            latent = np.tanh(read)
        else:
            latent = embedded[-1]
        if self.draft.markov == "gated":
            slot = first_slot + len(path) - 1
            latent = latent * sigmoid(
                linear(np.concatenate([outputs[slot], latent]), self.state, f"{MARKOV_PREFIX}.gate_proj")
            )
        bias: Array = self.state[BIAS] @ latent
        return bias

    def _norm(self, x: Array, name: str) -> Array:
        """`x` [..., n] through the norm `name`."""
        return rms_norm(x, self.state[f"{name}.weight"], self.layer.norm_eps)


def convolve(x: Array, kernel: Array | None) -> Array:
    """Slots `x` [slots, hidden] through a causal convolution inside the block; as they are without a `kernel`.

    The kernel [slots, taps, hidden] is each slot's own; a tap that reaches before the block reads zeros.
    """
    if kernel is None:
        return x
    convolved = np.zeros_like(x)
    for slot in range(len(x)):
        for tap in range(min(kernel.shape[1], slot + 1)):
            convolved[slot] += kernel[slot, tap] * x[slot - tap]
    return convolved


@proposes(Block.TAG)
def propose(draft: Block, question: Question) -> Drafted:
    """The tree of a draft of blocks; the bare root where no token before the root has a state."""
    tokens, hidden, target = question.tokens, question.hidden, question.target
    assert target is not None
    assert hidden is not None
    if not len(hidden):
        return Drafted(Tree((0,), tokens[-1:]))
    formulas = BlockFormulas(draft, question)
    outputs = formulas.outputs(tokens[-1], hidden)

    def score(paths: list[tuple[int, ...]]) -> Array:
        return np.stack([formulas.score(outputs, (tokens[-1], *path)) for path in paths])

    def confidence(path: tuple[int, ...]) -> float:
        return formulas.confidence(outputs, (tokens[-1], *path))

    drafted = tree_of(
        draft,
        draft.shape,
        target.vocab_size,
        question,
        score,
        draft.fixed,
        confidence if draft.confidence else None,
    )
    return replace(drafted, given=HeadInput(draft.reads, 0, tokens[:-1], frozen(hidden)))
