"""The oracle's run of a case: one speculative step after the other, in float64.

Each step is computed from scratch.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np

from specverify.reference.architecture import Checkpoint, Model
from specverify.reference.case import Case
from specverify.reference.draft.eagle1 import Eagle1
from specverify.reference.draft.hidden import HiddenStates
from specverify.reference.draft.layer_head import LayerHead
from specverify.reference.kv_rounding import KvRounding
from specverify.reference.malformed import Malformed
from specverify.reference.oracle import acceptance, lowering, processing, sampled_step, stopping
from specverify.reference.oracle.amplification import (
    PERTURBATIONS,
    PERTURBED,
    Change,
    RowMovements,
    amplification,
    perturb_weights,
    score_movements,
    sizes_of_change,
)
from specverify.reference.oracle.choices import Choices, RowChoices
from specverify.reference.oracle.draft import Question, propose
from specverify.reference.oracle.draft.eagle1 import NO_EXCHANGES, Exchanges, HeadRun, run_path
from specverify.reference.oracle.draft.head import own_rows_after
from specverify.reference.oracle.evaluator import Evaluator, PackingEvaluator, latent_kv, recurrent_state
from specverify.reference.oracle.formulas import rotary
from specverify.reference.oracle.formulas.rounded_columns import RoundedColumns
from specverify.reference.oracle.lowering import cut_to_chunk
from specverify.reference.oracle.model import Inputs, Nodes
from specverify.reference.oracle.parameters import Parameters, load
from specverify.reference.oracle.sampled_step import SampledStep, one_hot_proposal
from specverify.reference.oracle.scored_choices import ScoredChoices, scored_choices, with_choices
from specverify.reference.oracle.shared_prefix import SharedPrefix
from specverify.reference.trace import Accounting, Array, Attended, Committed, Emitted, Kv, Scored, Step, Trace, frozen
from specverify.reference.trace_memory import TraceMemory
from specverify.reference.tree import Tree

KV_STEPS = 4
"""Number of first steps whose context KV the trace holds; for a later state, ask for a case that begins there."""


class Oracle:
    """Runs cases and remembers their traces, so that several invariants may ask for the same case.

    Every method that takes a context and a tree, or tokens, raises Malformed where these do not fit the model.

    Attributes:
        evaluator: The way models are run: `PathByPath`, or `SharedPrefix`, which tests prove equal to it.
    """

    def __init__(self, evaluator: Callable[[Parameters], Evaluator] = SharedPrefix, keep: int = 64) -> None:
        self.evaluator = evaluator
        self._evaluators: OrderedDict[tuple[Model, str], Evaluator] = OrderedDict()
        self._rounding_evaluators: OrderedDict[tuple[Model, str, KvRounding], Evaluator] = OrderedDict()
        self._traces = TraceMemory[Trace](keep)
        self._neighbours: dict[float, tuple[Oracle, ...]] = {}
        self._change: Change | None = None
        self._movements: dict[tuple[Model, str, tuple[int, ...], Tree], dict[str, Array]] = {}

    def __call__(self, case: Case) -> Trace:
        """The oracle's trace of `case`."""
        trace = self._traces.get(case)
        if trace is None:
            trace = self._run(case)
            self._traces.put(case, trace)
        return trace

    def remember_up_to(self, most_bytes: int) -> None:
        """Remember traces of so many bytes; see `TraceMemory.most_bytes`."""
        self._traces.most_bytes = most_bytes

    def target_of(self, case: Case) -> Evaluator:
        """The evaluator of the target of `case`, which rounds its keys and values where the layout says so.

        Raises:
            Malformed: the layout rounds them, and this reference computes no columns in NumPy.
        """
        rounding = case.layout.rounding
        evaluator = self.model(case.model, case.dtype)
        if rounding is None:
            return evaluator
        key = (case.model, case.dtype, rounding)
        if key not in self._rounding_evaluators:
            parameters = self.round_columns(evaluator.parameters, rounding, case.dtype)
            self._rounding_evaluators[key] = self.evaluator(parameters)
            while len(self._rounding_evaluators) > 8:
                self._rounding_evaluators.popitem(last=False)
        self._rounding_evaluators.move_to_end(key)
        return self._rounding_evaluators[key]

    def model(self, model: Model, dtype: str) -> Evaluator:
        """The evaluator of `model`, with weights rounded to `dtype`."""
        key = (model, dtype)
        if key not in self._evaluators:
            self._evaluators[key] = self.evaluator(self._load(model, dtype))
            # An evaluator holds weights and KV, so few are kept; the least recently used goes first.
            while len(self._evaluators) > 8:
                self._evaluators.popitem(last=False)
        self._evaluators.move_to_end(key)
        return self._evaluators[key]

    def round_columns(self, parameters: Parameters, rounding: KvRounding, dtype: str) -> Parameters:
        """`parameters` whose keys and values are rounded; see `target_of`."""
        if not parameters.state or not isinstance(parameters.kind_of_array, np.ndarray):
            raise Malformed("layout.kv_dtype", f"{rounding.dtype}: this reference does not round keys and values")
        return replace(parameters, rounded=RoundedColumns(rounding, dtype, parameters.architecture.layers))

    def _draft_model(self, model: Model, dtype: str) -> Evaluator:
        return self.model(model, dtype)

    def _load(self, model: Model, dtype: str) -> Parameters:
        return load(model, dtype)

    def expect(self, case: Case, steps: Iterable[Step]) -> None:
        """Score the trees of `steps`, which a run of `case` showed, in packed forwards once they are asked for.

        Small models gain nothing by it and are left alone.
        """
        if isinstance(case.model, Checkpoint):
            evaluator = self.target_of(case)
            if isinstance(evaluator, PackingEvaluator):
                evaluator.expect([(step.context, step.drafted.tree) for step in steps if step.drafted is not None])

    def inputs(self, case: Case, context: tuple[int, ...], tree: Tree) -> Inputs:
        """The inputs of attention at every node of `tree` after `context`, on the target of `case`."""
        return self.target_of(case).inputs(context, tree)

    def scored_choices(
        self, kind: str, case: Case, context: tuple[int, ...], tree: Tree, rows: list[int] | None = None
    ) -> ScoredChoices | None:
        """See `specverify.reference.oracle.scored_choices.scored_choices`; on the target of `case`."""
        return scored_choices(kind, self.target_of(case), context, tree, rows=rows)

    def score_movement(self, kind: str, case: Case, context: tuple[int, ...], tree: Tree) -> Array | None:
        """See `specverify.reference.oracle.amplification.score_movements`; on the target of `case`."""
        key = (case.model, case.dtype, context, tree)
        if key not in self._movements:
            # Both kinds of choice are asked one after the other.
            if len(self._movements) >= 8:
                self._movements.clear()
            parameters = self.target_of(case).parameters
            self._movements[key] = score_movements(self.evaluator, parameters, context, tree)
        return self._movements[key].get(kind)

    def gaps_choosing(
        self, kind: str, case: Case, context: tuple[int, ...], tree: Tree, rows: RowChoices
    ) -> Array | None:
        """`ScoredChoices.gaps` of one kind of `rows`, which all rows take."""
        scored, chosen = scored_choices(kind, self._choosing(case, context, tree, rows), context, tree), rows.of(kind)
        return None if scored is None or chosen is None or not scored.fits(chosen) else scored.gaps(chosen)

    def nodes_choosing(self, case: Case, context: tuple[int, ...], tree: Tree, rows: RowChoices) -> Nodes:
        """The numbers of `tree` if its rows and those of `context` take `rows`.

        Rows that are UNKNOWN there take what their own scores choose.
        """
        return self._choosing(case, context, tree, rows).nodes(context, tree)

    def kv_choosing(self, case: Case, tokens: tuple[int, ...], rows: RowChoices) -> Kv | None:
        """The columns of `tokens` if their rows take `rows`."""
        chain = Tree((0, *range(len(tokens) - 1)), tokens)
        return self._kv(case, self._choosing(case, (), chain, rows), tokens)

    def _choosing(self, case: Case, context: tuple[int, ...], tree: Tree, rows: RowChoices) -> Evaluator:
        parameters = self.target_of(case).parameters
        return self.evaluator(with_choices(parameters, context, tree, rows))

    def follows(self, case: Case) -> bool:
        """Whether this oracle computes experts, indexed columns or rounded ones, and can be told what rows take."""
        parameters = self.target_of(case).parameters
        formulas = parameters.formulas
        chooses = formulas.experts is not None or formulas.indexer is not None
        return bool(parameters.state) and (chooses or parameters.rounded is not None)

    def following(self, case: Case, choices: Choices) -> "Oracle":
        """This oracle with the rows of the target of `case` taking what `choices` says; drafts take their own.

        A draft may be the same model: where it stores its columns otherwise than the target, its rows have other
        numbers, and take what their own scores choose.
        """
        return _FollowingOracle(self, case, choices)

    def head_run(
        self, case: Case, tokens: tuple[int, ...], path: tuple[int, ...], exchanges: Exchanges = NO_EXCHANGES
    ) -> HeadRun | None:
        """The head of `case` on `path` below the last of `tokens`; see `specverify.reference.oracle.draft.eagle1`.

        None for a draft that is no head with experts, and where no token before the last has a state.
        """
        draft = case.draft
        if not isinstance(draft, Eagle1) or not draft.experts or len(tokens) < 2:
            return None
        hidden = select_states(self.target_of(case).states(tokens[:-1]), draft.reads)
        question = Question(tokens, 0, None, SampledStep(case, (), 0), hidden, case.model, case.dtype, self._change)
        return run_path(draft, question, path, exchanges)

    def amplification(self, case: Case, context: tuple[int, ...], tree: Tree) -> RowMovements | None:
        """See `specverify.reference.oracle.amplification.amplification`; on the target of `case`."""
        sizes = sizes_of_change(case.model, case.dtype)
        return amplification(self.evaluator, self.target_of(case).parameters, context, tree, sizes)

    def neighbours(self, size: float = PERTURBED) -> tuple["Oracle", ...]:
        """Oracles of which all weights, of heads too, differ by `size` (`perturb_weights`), each in a way of its own.

        What differs between them and this one says how roundings inside a model are amplified.
        """
        if size not in self._neighbours:
            self._neighbours[size] = tuple(_PerturbedOracle(self, Change(seed, size)) for seed in range(PERTURBATIONS))
        return self._neighbours[size]

    def _kv(self, case: Case, target: Evaluator, context: tuple[int, ...]) -> Kv | None:
        """The columns that the cache of the case's layout holds of `context`."""
        latent = case.layout.latent and target.parameters.architecture.settings.latent_rank > 0
        return latent_kv(target, context) if latent else target.kv(context)

    def _run(self, case: Case) -> Trace:
        target = self.target_of(case)
        arch = target.parameters.architecture
        # Refused before the first step: no engine with a cache can equal the definition on such a run.
        rotary.check_span(arch.rope, arch.max_positions, len(case.prefix), case.longest)
        sampled_step.check_grammar(case)
        drafting_model = case.drafting_model
        draft = None if drafting_model is None else self._draft_model(drafting_model, case.dtype)
        output: tuple[int, ...] = ()
        finish = None
        steps: list[Step] = []
        case_now = case
        while finish is None and (not case.steps or len(steps) < case.steps):
            step = self._step(case_now, target, draft, output, len(steps))
            assert step.emitted is not None
            case_now = _with_own_rows(case_now, step)
            output, finish = output + step.emitted.tokens, step.emitted.finish
            steps.append(step)
        wants_logprobs = case.sampling.prompt_logprobs
        logprobs = _prompt_logprobs(target, case.prompt) if wants_logprobs else None
        return Trace(tuple(steps), output, finish, _accounting(steps), prompt_logprobs=logprobs)

    def _step(
        self, case: Case, target: Evaluator, draft: Evaluator | None, output: tuple[int, ...], number: int
    ) -> Step:
        # The last of `tokens` is the pending root; the tokens before it are the committed context.
        tokens = case.prompt + output
        sampled = SampledStep(case, output, number)
        reads = case.draft.reads
        hidden = None if reads is None else select_states(target.states(tokens[:-1]), reads)
        question = Question(tokens, number, draft, sampled, hidden, case.model, case.dtype, self._change)
        drafted = propose(case.draft, question)
        if case.layout.stay_in_chunk:
            drafted = cut_to_chunk(drafted, len(tokens) - 1, target.parameters.architecture)
        tree, context = drafted.tree, tokens[:-1]
        nodes = target.nodes(context, tree)
        law = None
        if case.sampling.greedy:
            scores = sampled.scores(tree, nodes.logits) if case.sampling.processes else nodes.logits
            accepted = acceptance.greedy_walk(tree, scores)
        else:
            law = sampled.laws(tree, nodes.logits)
            proposal = one_hot_proposal(tree, law.shape[1]) if drafted.proposal is None else drafted.proposal
            drafted = replace(drafted, proposal=frozen(proposal))
            accepted = sampled.accept(tree, law, proposal)
        block = (*[tree.token[node] for node in accepted.path[1:]], accepted.bonus)
        least, grammar = case.sampling.min_tokens, case.sampling.grammar
        emitted, finish = stopping.clip(block, output, case.stops, len(case.prompt), least, grammar)
        # Log-probabilities are those of the unprocessed logits. The emitted tokens may be fewer than the rows.
        rows = [nodes.logits[node] for node in accepted.path]
        hidden_states = None if reads is None else _states(target, reads, context, tree)
        logprobs = tuple(processing.logprob(row, token) for row, token in zip(rows, emitted, strict=False))
        return Step(
            context=context,
            drafted=drafted,
            lowered=lowering.lower(tree, len(context), target.parameters.architecture, target.parameters.images),
            attended=Attended(nodes.attended),
            scored=Scored(nodes.logits, law, hidden_states, *sampled.masks(tree)),
            accepted=accepted,
            emitted=Emitted(emitted, finish, logprobs),
            committed=Committed(
                # All tokens but the last: that one is the next pending root, without KV.
                length=len(tokens) + len(emitted) - 1,
                before=None if number >= KV_STEPS else self._kv(case, target, context),
                recurrent_before=None if number >= KV_STEPS else recurrent_state(target, context),
                matched=None if grammar is None else len(output) + len(emitted),
            ),
        )


def _with_own_rows(case: Case, step: Step) -> Case:
    """`case` with the rows that its head keeps after `step`, where the head's alignment leaves any."""
    rows = own_rows_after(case.draft, step)
    if not rows or not isinstance(case.draft, LayerHead):
        return case
    return replace(case, draft=case.draft.with_own_rows(rows))


def select_states(states: Array, reads: HiddenStates) -> Array:
    """The part of `states` (see `Evaluator.states`) that `reads` asks for: [tokens, width]."""
    # States begin with the embeddings, which `reads` numbers -1; the last state is the normed one.
    places = [layer + 1 for layer in reads.layers] or [-1]
    return np.concatenate([states[place] for place in places], axis=-1)


def _states(target: Evaluator, reads: HiddenStates, context: tuple[int, ...], tree: Tree) -> Array:
    """The hidden states at each node of `tree`: [nodes, width]."""
    return frozen(select_states(target.node_states(context, tree), reads))


def _prompt_logprobs(target: Evaluator, prompt: tuple[int, ...]) -> tuple[float, ...]:
    """The log-probability of each token of `prompt` but the first, given those before it."""
    if len(prompt) < 2:
        return ()
    rows = target.nodes((), Tree((0, *range(len(prompt) - 2)), prompt[:-1])).logits
    return tuple(processing.logprob(row, token) for row, token in zip(rows, prompt[1:], strict=True))


def _accounting(steps: list[Step]) -> Accounting:
    proposed = sum(len(step.drafted.tree) - 1 for step in steps if step.drafted)
    lengths = tuple(len(step.accepted.path) - 1 for step in steps if step.accepted)
    return Accounting(len(steps), 0, proposed, sum(lengths), proposed - sum(lengths), lengths)


class _PerturbedOracle(Oracle):
    """The oracle `base` with one `change` of the weights of all its models."""

    def __init__(self, base: Oracle, change: Change) -> None:
        super().__init__(base.evaluator)
        self._base = base
        self._weight_change = self._change = change

    def _load(self, model: Model, dtype: str) -> Parameters:
        return perturb_weights(self._base.model(model, dtype).parameters, self._weight_change)

    def round_columns(self, parameters: Parameters, rounding: KvRounding, dtype: str) -> Parameters:
        parameters = super().round_columns(parameters, rounding, dtype)
        assert parameters.rounded is not None
        return replace(parameters, rounded=replace(parameters.rounded, is_exact=False))


class _FollowingOracle(Oracle):
    """An oracle whose target takes the experts, columns and codes that an engine chose, in rows whose text it was told.

    Attributes:
        base: The oracle whose rows take what their own scores choose.
        case: The case whose target's rows take what `choices` says.
        choices: The choices of an engine.
    """

    def __init__(self, base: Oracle, case: Case, choices: Choices) -> None:
        super().__init__(base.evaluator)
        self.base = base
        self.case, self.choices = case, choices

    def following(self, case: Case, choices: Choices) -> Oracle:
        return self.base.following(case, choices)

    def target_of(self, case: Case) -> Evaluator:
        is_stored_alike = case.layout.rounding == self.case.layout.rounding
        return super().target_of(case) if is_stored_alike else self.base.target_of(case)

    def neighbours(self, size: float = PERTURBED) -> tuple[Oracle, ...]:
        if size not in self._neighbours:
            neighbours = self.base.neighbours(size)
            self._neighbours[size] = tuple(neighbour.following(self.case, self.choices) for neighbour in neighbours)
        return self._neighbours[size]

    def _draft_model(self, model: Model, dtype: str) -> Evaluator:
        return self.base.model(model, dtype)

    def round_columns(self, parameters: Parameters, rounding: KvRounding, dtype: str) -> Parameters:
        return self.base.round_columns(parameters, rounding, dtype)

    def _load(self, model: Model, dtype: str) -> Parameters:
        parameters = self.base.model(model, dtype).parameters
        return replace(parameters, choices=self.choices) if model == self.case.model else parameters
