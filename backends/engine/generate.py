"""A whole generation by tree speculation: draft, lower, verify, accept, emit, commit, until a stop."""

from dataclasses import dataclass

from transformers import DynamicCache

from backends.base import StageFailure
from backends.engine import accept, attention, branch, stops
from backends.engine.causal_lm import CausalLm, cached_length
from backends.engine.draft import language_model
from backends.engine.draft.base import Draft
from backends.engine.reveal import Revealer
from backends.engine.sampling.seams import SamplingSeams
from backends.engine.sampling.step import StepSampling
from backends.engine.seams import Seams
from backends.engine.tensorise import check_structure, tensorise
from reference.case import Case
from reference.trace import Accepted, Accounting, Committed, Emitted, Kv, Stage, Step, Trace

SEAMS = Seams(
    name_children=language_model.name_children,
    branch_rows=language_model.branch_rows,
    draft_attend=attention.eager,
    tensorise=tensorise,
    attend=attention.eager,
    score=accept.gather_rows,
    walk=accept.greedy_walk,
    clip=stops.clip,
    commit=branch.commit,
    advance=lambda kept: kept,
    roll_back=language_model.roll_back,
    logprobs=accept.logprobs,
    sampling=SamplingSeams(),
)
"""The engine as it is meant to be."""


@dataclass
class Counters:
    """What the run counts as it goes; `lengths` holds the accepted drafted tokens of each step."""

    proposed: int
    lengths: list[int]


class Generation:
    """One request from prompt to stop, root pending: the committed cache lacks the last token and nothing else."""

    def __init__(self, case: Case, target: CausalLm, draft: Draft, seams: Seams) -> None:
        self._case = case
        self._target = target
        self._draft = draft
        self._seams = seams
        self._revealer = Revealer()
        self._attend = self._revealer.watching(seams.attend)
        self._tokens = list(case.prompt)
        self._cache = DynamicCache()
        self._position = len(case.prefix)
        self._finish: str | None = None
        self._limits, self._written = stops.limits(case), stops.Written()
        self._counters = Counters(0, [])
        self._at = Stage.DRAFTED

    def run(self) -> Trace:
        """Prefill, then step until a stop or until the case's steps are used up.

        Raises:
            StageFailure: for whatever breaks on the way, with the stage in which it broke.
        """
        try:
            return self._run()
        except StageFailure:
            raise
        except Exception as error:
            why = " ".join(str(error).split())[:200]
            raise StageFailure(self._at, f"{type(error).__name__}: {why}") from error

    def _run(self) -> Trace:
        case = self._case
        self._target.prefill(case.prefix, self._cache, self._seams.attend, case.layout.prefill_chunk)
        steps: list[Step] = []
        while self._finish is None and (not case.steps or len(steps) < case.steps):
            steps.append(self._step())
        counters = self._counters
        accounting = Accounting(
            verify_calls=len(steps),
            draft_calls=self._draft.calls,
            proposed=counters.proposed,
            accepted=sum(counters.lengths),
            rejected=counters.proposed - sum(counters.lengths),
            accept_lengths=tuple(counters.lengths),
        )
        return Trace(tuple(steps), tuple(self._tokens[len(case.prompt) :]), self._finish, accounting)

    def _step(self) -> Step:
        case, reveal = self._case, self._revealer
        context = tuple(self._tokens[:-1])
        self._at = Stage.DRAFTED
        chance = self._chance()
        proposal = self._draft.propose(self._tokens, chance if chance is not None and chance.samples else None)
        tree = proposal.tree
        committed = cached_length(self._cache)
        before = reveal.kv(self._cache)

        self._at = Stage.LOWERED
        tensors = self._seams.tensorise(tree, committed, self._position, self._target.windows, case.layout.padded_nodes)
        check_structure(tensors, committed, case.max_positions)
        working = branch.replicate(self._cache)
        self._at = Stage.ATTENDED
        flat = self._target.forward(
            tensors.token, tensors.position, tensors.visible, working, self._attend, len(tensors.token)
        )
        attended = reveal.attended(tensors)
        self._at = Stage.SCORED
        logits = self._seams.score(flat, tensors.retrieve_index)
        verified = reveal.kv(self._cache)

        self._at = Stage.ACCEPTED
        law = told = None
        if chance is None or case.sampling.greedy:
            scores = logits if chance is None else chance.scores(tree, logits)
            path, bonus = self._seams.walk(tensors, scores)
        else:
            path, bonus, law, told = chance.accept(tree, logits, proposal.proposal)
        block = [*(tree.token[row] for row in path[1:]), bonus]
        self._at = Stage.EMITTED
        emitted, self._finish = self._seams.clip(block, self._written, self._limits)
        self._written = stops.follow(self._written, emitted, self._limits)
        logprobs = self._seams.logprobs(logits)[path[: len(emitted)], emitted[: len(path)]].tolist()
        # Emitted tokens but the last have their KV in the tree: the root's, then that of each accepted row.
        kept = path[: len(emitted)]
        self._at = Stage.COMMITTED
        self._cache, fallback = self._seams.commit(self._cache, working, kept, case.layout.commit)
        self._position += self._seams.advance(len(kept))
        self._draft.settle(kept)
        self._tokens += emitted
        self._counters.proposed += len(tree) - 1
        self._counters.lengths.append(len(path) - 1)
        return Step(
            context,
            reveal.drafted(proposal, told),
            reveal.lowered(tensors),
            attended,
            reveal.scored(logits, law),
            Accepted(tuple(path), bonus, None if law is None or chance is None else chance.spent),
            Emitted(tuple(emitted), self._finish, tuple(logprobs)),
            self._committed(before, verified, fallback),
        )

    def _chance(self) -> StepSampling | None:
        """What decides by chance or by history in this step; None for plain greedy decoding."""
        sampling, number = self._case.sampling, len(self._counters.lengths)
        if sampling.greedy and not sampling.processes:
            return None
        output = tuple(self._tokens[len(self._case.prompt) :])
        return StepSampling(self._case, output, number, self._target.device, self._seams.sampling)

    def _committed(self, before: Kv | None, verified: Kv | None, fallback: str | None) -> Committed:
        reveal = self._revealer
        after, draft = reveal.kv(self._cache), reveal.kv(self._draft.cache)
        return Committed(cached_length(self._cache), before, verified, after, draft, fallback)
