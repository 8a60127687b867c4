"""A target of a user in our engine: prefill, decode and verify in place of our own forwards.

The contract is that of an exported program (ExecuTorch): a prefill and a decode return the logits and the hidden state
of their last token alone, a verification those of every row. Where the target keeps its rows is its own affair: it
leaves them where they lie, or writes the next ones over the rejected (trees are then chains). Drafting, EAGLE heads
among it, acceptance and stops are our engine's.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from specverify.backends.adapt.component.contract import Component, Contract
from specverify.backends.engine.columns import Attend
from specverify.backends.engine.kv.base import KvCache
from specverify.backends.engine.kv.lanes import BatchCache
from specverify.backends.engine.kv.target_calls import calls_over
from specverify.backends.engine.model.causal_lm import CausalLm, Rows
from specverify.backends.engine.model.hidden import HiddenTap
from specverify.backends.engine.request import Request
from specverify.backends.engine.seams import Seams
from specverify.reference.trace import Stage

METHODS = ("begin", "prefill", "decode", "verify", "keep")
"""The methods of `OpenTarget`."""

TARGET = Contract(
    kind="target",
    stage=Stage.SCORED,
    offers={
        "checkpoint": "the folder of the target's checkpoint, a string",
        "layers": "the layers, from 0, after which the states of the residual stream lie side by side in what the "
        "draft reads; empty for the output of the last norm; None for a draft that reads no states",
        "vocabulary": "the number of token ids",
        "width": "the width of a row of states, 0 for a draft that reads none",
    },
    needs=(("checkpoint",),),
    returns=(
        "an object with five methods. `begin()` forgets the request before. `prefill(tokens)` and `decode(token)` "
        "append tokens, and return the logits [vocabulary] and the state [width] of the last one. `verify(tokens, "
        "positions, parent)` runs the rows of a tree, row 0 the root and its own parent, and returns the logits "
        "[rows, vocabulary] and the states [rows, width]. `keep(path)` commits these of the rows, root first, and "
        "drops the others. States are None where the draft reads none"
    ),
    judged_by=("attention.context-exact", "draft.hidden-state-descriptor", "lossless.greedy-match", "lossless.*"),
)


class OpenTarget(Protocol):
    """An open target, for one request at a time; `TARGET` says what each method returns."""

    def begin(self) -> None:
        """Forget the request before."""
        ...

    def prefill(self, tokens: Tensor) -> tuple[Any, Any]:
        """Append tokens int64 [n]; the logits and the state of the last one."""
        ...

    def decode(self, token: Tensor) -> tuple[Any, Any]:
        """Append a token int64 [1]; its logits and its state."""
        ...

    def verify(self, tokens: Tensor, positions: Tensor, parent: Tensor) -> tuple[Any, Any]:
        """Run the rows of a tree, int64 [rows] each; the logits and the states of all of them."""
        ...

    def keep(self, path: list[int]) -> None:
        """Commit the rows `path` of the last verification, and drop its others."""
        ...


class TargetPart:
    """The user's targets, one for each checkpoint and layers, and the model of the request that runs."""

    def __init__(self, component: Component) -> None:
        self._component = component
        self._open_targets: dict[tuple[str, tuple[int, ...] | None], OpenTarget] = {}
        self.checkpoint = ""
        self._running: TargetLm | None = None

    def plant_into(self, seams: Seams) -> Seams:
        """The engine whose target is the user's."""

        class TreeRequest(Request):
            @property
            def rows(self) -> Rows:
                assert self.block is not None
                return replace(super().rows, parents=list(self.block.proposal.tree.parent))

        def network(model: CausalLm) -> CausalLm:
            self._running = TargetLm(model, self._component, self._open_target)
            return self._running

        def commit(cache: KvCache, path: list[int]) -> str | None:
            assert self._running is not None
            self._running.keep(path)
            return seams.commit(cache, path)

        return replace(seams, network=network, commit=commit, request=TreeRequest)

    def _open_target(self, layers: tuple[int, ...] | None, vocabulary: int, width: int) -> OpenTarget:
        """The target of the checkpoint and layers, opened once.

        Raises:
            StageFailure: It lacks a method.
        """
        key = self.checkpoint, layers
        if key not in self._open_targets:
            target = self._component(checkpoint=self.checkpoint, layers=layers, vocabulary=vocabulary, width=width)
            missing = [name for name in METHODS if not callable(getattr(target, name, None))]
            if missing:
                kind = type(target).__name__
                raise self._component.failure(f"{self._component.name} returned {kind} without {', '.join(missing)}")
            self._open_targets[key] = target
        return self._open_targets[key]


OpenBy = Callable[[tuple[int, ...] | None, int, int], OpenTarget]
"""From the layers of states, the vocabulary and the width of states to an open target."""


class TargetLm(CausalLm):
    """The target of a user as the causal model of our engine, whose own weights are shared with heads alone.

    The tokens of a prompt wait until the first tree is known: under a bare root they are prefilled with it, so that the
    logits of a prefill are judged as well. A draft that reads states needs those of every token of the prompt, which a
    verification of the prompt as a chain returns.
    """

    def __init__(self, model: CausalLm, component: Component, open_by: OpenBy) -> None:
        # Everything but the forwards is our model's; counters begin anew.
        self.__dict__.update(model.__dict__)
        self.forward_s = 0.0
        self.calls = 0
        self.attention_calls = 0
        self.fallbacks = type(model.fallbacks)()
        self._component = component
        self._open_by = open_by
        self._target: OpenTarget | None = None
        self._waiting: list[int] = []
        self._is_open = False  # whether rows wait for `keep`

    @torch.no_grad()
    def forward(
        self,
        batch: list[Rows],
        attend: Attend,
        score: int = -1,
        filler: float = 0.0,
        lanes: type[BatchCache] = BatchCache,
        watch: list[Tensor] | None = None,
        tap: HiddenTap | None = None,
    ) -> list[Tensor]:
        """See `CausalLm.forward`; a batch of one request."""
        (rows,) = batch
        cache = rows.cache
        width = len(rows.tokens)
        if not cache.length:
            self._begin(tap)
        cache.open(width)
        self._write_zeros_everywhere(cache, width)
        if watch is None and tap is None and not score:
            self._waiting += rows.tokens.tolist()
            return [torch.empty(0)]
        tokens = rows.tokens
        if watch is None:
            logits, states = self._prefill_states(cache, tokens, rows.positions)
        elif width == 1:
            logits, states = self._append(cache, tokens)
        else:
            self._flush(cache)
            assert rows.parents is not None
            logits, states = self._verify(tokens, rows.positions, rows.parents)
            calls_over(cache)["verify"] += 1
            self._is_open = True
        self.calls += 1
        if watch is not None:
            spec = self.room(0, 0)
            heads = int(self.model.config.num_attention_heads)
            widths = [spec.sizes(layer)[1][1] for layer in range(self.layers)]
            watch += [torch.zeros(1, heads, width, value_width, dtype=self.dtype) for value_width in widths]
        if tap is not None:
            tap.states |= dict.fromkeys(tap.descriptors, states[None])
        return [logits]

    def keep(self, path: list[int]) -> None:
        """Commit the rows `path` of the tree that was verified; a row that was appended is committed already."""
        if self._is_open:
            assert self._target is not None
            self._target.keep(list(path))
            self._is_open = False

    def _begin(self, tap: HiddenTap | None) -> None:
        layers, width = None, 0
        if tap is not None:
            (descriptor,) = tap.descriptors
            layers, width = tuple(descriptor.layers), descriptor.parts * int(self.model.config.hidden_size)
        self._width = width
        self._target = self._open_by(layers, int(self.model.config.vocab_size), width)
        self._target.begin()
        self._waiting = []
        self._is_open = False

    def _append(self, cache: KvCache, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Append a root, and the prompt that waits for it; the logits [1, vocabulary] and the state [1, width]."""
        assert self._target is not None
        if self._waiting:
            answer = self._target.prefill(torch.tensor([*self._waiting, *tokens.tolist()]))
            self._waiting = []
            calls_over(cache)["prefill"] += 1
        else:
            answer = self._target.decode(tokens.clone())
            calls_over(cache)["decode"] += 1
        logits, states = self._admit(answer, ())
        return logits[None], states[None]

    def _flush(self, cache: KvCache) -> None:
        """Prefill the prompt that waits, below a tree."""
        if self._waiting:
            assert self._target is not None
            self._admit(self._target.prefill(torch.tensor(self._waiting)), ())
            self._waiting = []
            calls_over(cache)["prefill"] += 1

    def _prefill_states(self, cache: KvCache, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Append tokens whose states are all needed: the rows of a chain."""
        assert self._target is not None
        chain = [0, *range(len(tokens) - 1)]
        logits, states = self._verify(tokens, positions, chain)
        self._target.keep(list(range(len(tokens))))
        calls_over(cache)["prefill"] += 1
        return logits, states

    def _verify(self, tokens: Tensor, positions: Tensor, parent: list[int]) -> tuple[Tensor, Tensor]:
        assert self._target is not None
        answer = self._target.verify(tokens.clone(), positions.clone(), torch.tensor(parent))
        return self._admit(answer, (("rows", len(tokens)),))

    def _admit(self, answer: Any, rows: tuple[tuple[str, int], ...]) -> tuple[Tensor, Tensor]:
        """An answer of the target as logits and states in the working dtype."""
        component = self._component
        if not isinstance(answer, (tuple, list)) or len(answer) != 2:
            raise component.wrong_answer(answer, "a pair: logits and states")
        vocabulary = int(self.model.config.vocab_size)
        logits = component.tensor("logits", answer[0], "float", (*rows, ("vocabulary", vocabulary)))
        states = torch.zeros(*(size for _, size in rows), 0)
        if self._width:
            states = component.tensor("states", answer[1], "float", (*rows, ("width", self._width)))
        return logits.to(self.dtype), states.to(self.dtype)

    def _write_zeros_everywhere(self, cache: KvCache, rows: int) -> None:
        """Write rows of zeros to our cache, whose lengths the engine goes by and whose columns nothing reads."""
        spec = self.room(0, 0)
        for layer in range(self.layers):
            heads, widths = spec.sizes(layer)
            keys, values = (torch.zeros(heads, rows, width, dtype=self.dtype) for width in widths)
            cache.write(layer, keys, values)
