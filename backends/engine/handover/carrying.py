"""The part of a request that lets it leave one server and go on in another."""

from collections import Counter
from typing import Protocol

import torch
from torch import Tensor

from specverify.backends.engine import stops
from specverify.backends.engine.draft.base import OwnRows
from specverify.backends.engine.guided.guide import Guide
from specverify.backends.engine.handover.packet import BadHandOver
from specverify.backends.engine.handover.state import RequestState, committed_columns_of, fill
from specverify.backends.engine.known_states import KnownStates
from specverify.backends.engine.kv.arena import Model
from specverify.backends.engine.kv.choices import RowChoice, choices_beside
from specverify.backends.engine.kv.target_calls import calls_over
from specverify.backends.engine.model.absent import AbsentModel
from specverify.backends.engine.model.causal_lm import CausalLm
from specverify.reference.trace import Step


class Counting(Protocol):
    """The counters of a request: drafted tokens, and the accepted ones of each step."""

    proposed: int
    lengths: list[int]


class Carrying(KnownStates):
    """A request that can be carried: `carried_state` is its state between two steps, `carry_on` takes a state over.

    Attributes:
        hops: How many times the request was handed over.
        bare: How many of its steps asked no draft.
        earlier_calls: Forwards of the target over caches that it has no more, by kind.
        draft_since: The number of the others that the request had taken when its draft was opened.
    """

    earlier_calls: Counter[str]
    guide: Guide | None
    position: int
    steps: list[Step]
    counters: Counting
    hops: int = 0
    bare: int = 0
    draft_since: int = 0
    _limits: stops.Limits
    _written: stops.OutputTail

    @property
    def target_calls(self) -> Counter[str]:
        """The forwards of the target for the request so far by kind, over every cache that it has had."""
        return self.earlier_calls + calls_over(self.lease.target)

    @property
    def drafted_steps(self) -> int:
        """The number of steps so far that asked a draft for their tree."""
        return len(self.steps) - self.bare

    @property
    def draft_steps(self) -> int:
        """The number of those that asked the draft of now."""
        return self.drafted_steps - self.draft_since

    @property
    def sends_draft(self) -> bool:
        """Whether its draft's keys and values are sent; a head's rows are run again on the hidden states."""
        return self.lease.draft is not None and self.case.draft.reads is None

    def sends(self, target: Model) -> list[Model]:
        """The models whose keys and values are sent: the target, and the model of a draft that is no head."""
        owner = self.lease.owner
        return [target, owner] if self.sends_draft and isinstance(owner, (CausalLm, AbsentModel)) else [target]

    def carried_state(self) -> RequestState:
        """The state that a packet holds; keys and values are copies.

        A draft model may have read the root already, for a tree that was thrown away: its cache is rewound by one.
        """
        self.recompute_states()
        text = tuple(self.tokens)
        cache = self.lease.draft
        calls = self.target_calls
        emitted = self.steps[-1].emitted if self.steps else None
        return RequestState(
            tokens=text,
            position=self.position,
            lengths=tuple(self.counters.lengths),
            proposed=self.counters.proposed,
            draft_calls=self.draft.calls,
            draft_steps=self.draft_steps,
            prefill_calls=calls["prefill"],
            decode_calls=calls["decode"],
            verify_calls=calls["verify"],
            matched=None if self.guide is None else self.guide.read,
            logprob=None if emitted is None or emitted.logprobs is None else emitted.logprobs[-1],
            target=committed_columns_of(self.lease.target, len(text) - 1),
            draft=committed_columns_of(cache, len(text) - 1) if cache is not None and self.sends_draft else None,
            # After a switch to a draft that reads none, those of earlier tokens are of no use.
            hidden=torch.cat(self._hidden) if self._hidden and self.hidden_width else None,
        )

    def follow(self, predecessor: "Carrying") -> None:
        """Begin with the hidden states of `predecessor`: this request has its caches and goes on with its text."""
        self._hidden = [torch.cat(predecessor._hidden)] if predecessor._hidden else []
        self.states_from = predecessor.states_from
        if isinstance(self.draft, OwnRows) and isinstance(predecessor.draft, OwnRows):
            self.draft.follow(predecessor.draft)

    def _show_choices(self, last: Step) -> None:
        """Put the choices of the committed rows, as the sender's `last` step shows them, beside the cache.

        No decode needs them, so that they travel with the steps and not in the packet.
        """
        scored = last.scored
        accepted = last.accepted
        if scored is None or accepted is None:
            return
        context = len(last.context)
        rows = [*range(context), *(context + node for node in accepted.path)][: self.lease.target.length]
        experts, columns = (
            None if choices is None else torch.from_numpy(choices.astype("int64"))
            for choices in (scored.routed, scored.indexed)
        )
        axes = self._shown_axes(last, context, rows)
        # A committed row's positions are the columns of the cache.
        choices_by_row = [
            RowChoice(
                None if experts is None else experts[:, row],
                None if columns is None else columns[:, row],
                None if axes is None else axes[:, place],
            )
            for place, row in enumerate(rows)
        ]
        choices_beside(self.lease.target).write(0, choices_by_row)

    @staticmethod
    def _shown_axes(last: Step, context: int, rows: list[int]) -> Tensor | None:
        """The positions on three axes [3, rows] of columns, and of nodes behind `context`, as the step `last` shows."""
        lowered = last.lowered
        if lowered is None or lowered.axes is None or lowered.retrieve_index is None:
            return None
        columns = [row if row < context else context + int(lowered.retrieve_index[row - context]) for row in rows]
        return torch.from_numpy(lowered.axes.astype("int64"))[:, columns]

    def read_again(self, guide: Guide, output: list[int]) -> None:
        """Read the tokens of `output`, each once, in a guide at the beginning of its grammar."""
        for token in output:
            guide.accept_token(token)

    def carry_on(self, state: RequestState, steps: list[Step]) -> None:
        """Take over `state`, that of a request which another server has begun; this request was just made.

        No packet holds the `steps` that it has revealed so far, since no decode needs them.

        Raises:
            BadHandOver: The grammar reads the text otherwise than the sender says.
        """
        self.tokens = list(state.tokens)
        self.position = state.position
        self.steps = steps
        self.counters.proposed = state.proposed
        self.counters.lengths = list(state.lengths)
        self.earlier_calls = Counter(prefill=state.prefill_calls, decode=state.decode_calls, verify=state.verify_calls)
        self._hidden = [] if state.hidden is None else [state.hidden.to(self.target.device)]
        output = self.tokens[len(self.case.prompt) :]
        self._written = stops.follow(stops.OutputTail(), output, self._limits)
        if self.guide is not None:
            self.read_again(self.guide, output)
            if self.guide.read != state.matched:
                raise BadHandOver(
                    f"the sender's grammar has read {state.matched} tokens, the receiver's {self.guide.read}"
                )
        fill(self.lease.target, state.target)
        for states in self._hidden:
            self.keep_states(0, states)
        if steps:
            self._show_choices(steps[-1])
        if state.draft is not None and self.lease.draft is not None:
            fill(self.lease.draft, state.draft)
        self.draft.calls += state.draft_calls
        self.draft_since = self.drafted_steps - state.draft_steps
