"""Cases on a real checkpoint, made from prompts.

Drafts come from an n-gram trie, from the model's own top tokens, and (if sampled) from the model itself.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from specverify.checkpoints.given_draft import given_draft, with_static_tree
from specverify.checkpoints.guided import check_guides, guide
from specverify.checkpoints.opening import open_checkpoint
from specverify.checkpoints.prompts import prompts_of
from specverify.checkpoints.scripts import own_top_tokens
from specverify.checkpoints.sessions import SESSION_LEVEL, check_admitted, layout_of, side_by_side
from specverify.plan import Plan
from specverify.properties.verdict.invariant import Invariant, Oracle
from specverify.properties.verdict.subject import NoTrace, Subject
from specverify.reference.abilities import Abilities
from specverify.reference.architecture import Checkpoint
from specverify.reference.case import Case
from specverify.reference.draft import Draft, LanguageModel, Ngram, Scripted
from specverify.reference.files.fields import UnreadableCheckpoint
from specverify.reference.files.generation_settings import end_tokens
from specverify.reference.layout import KvLayout
from specverify.reference.malformed import Malformed
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.tree import RankTree
from specverify.setup import processors
from specverify.setup.errors import UnusableInput

TOKEN_LEVEL = (
    "acceptance.greedy-walk",
    "acceptance.support",
    "acceptance.path-in-tree",
    "lossless.greedy-match",
    "lossless.draft-independent",
    "lossless.stops",
    "lossless.accounting",
    "lossless.completes",
    "lossless.distribution",
    "lossless.processors-per-node",
    "lossless.logprobs",
    "serving.matcher-in-step",
    "acceptance.sampled-walk",
    "acceptance.proposal-consistent",
    "pair.greedy-match",
    "pair.same-law",
)
"""The invariants that judge a long generation; the others judge the first steps on the same prompt."""

LONG_IF_SAMPLED = ("lossless.processors-per-node", "lossless.logprobs", "acceptance.proposal-consistent")
"""Invariants of TOKEN_LEVEL that learn nothing new from a long greedy run; there they judge its first steps."""


def branches(*depths: int) -> RankTree:
    """A static tree with one branch for each rank r: `depths[r]` nodes, the first of rank r, the others of rank 0."""
    parent, rank = [0], [0]
    for place, depth in enumerate(depths):
        up = 0
        for level in range(depth):
            parent.append(up)
            rank.append(0 if level else place)
            up = len(parent) - 1
    return RankTree(tuple(parent), tuple(rank))


LOOKUP = branches(8, 6, 4)
"""The tree of the n-gram draft: three continuations of the longest known suffix."""

LOOKUP_ORDER = 6
"""Length of an n-gram, with the predicted token."""

OWN_TREE = branches(3, 2)
"""The tree that the model drafts for itself in sampled runs."""

UNNAMED = 3
"""One token id in this many is left out when the model drafts for itself; else q were p, and nothing rejected."""

PADDED = 32
"""Padding of the trees of those cases, in rows; a larger tree stays as it is."""

CLOSE_STEPS = 2
"""Steps of the cases on which the other invariants are judged."""

JudgedCase = tuple[Case, tuple[Invariant, ...]]


@dataclass(frozen=True)
class PreparedCases:
    """The cases of a prompted run: their number, their vocabulary, and the function that makes them one by one.

    `first` is a case of the first prompt, by which the speed of the run is estimated.
    """

    total: int
    vocab_size: int
    cases: Callable[[Oracle], Iterator[JudgedCase]]
    first: Case


def prepare(plan: Plan, subject: Subject, invariants: tuple[Invariant, ...]) -> PreparedCases:
    """Open checkpoint and prompts.

    Raises:
        UnusableInput: A checkpoint, prompt file or processor cannot be used, or a prompt is too long for the model.
        MissingInput: This machine lacks something.
    """
    assert plan.model is not None
    checkpoint = open_checkpoint(plan.model, understood=plan.against is None)
    processors.admit(plan.processors, checkpoint.vocab_size)
    prompts = prompts_of(plan, checkpoint)
    sampled = not plan.sampling.greedy
    long = TOKEN_LEVEL if sampled else tuple(name for name in TOKEN_LEVEL if name not in LONG_IF_SAMPLED)
    close = tuple(invariant for invariant in invariants if invariant.name not in long)
    tokens = tuple(invariant for invariant in invariants if invariant.name in long)
    within = subject.abilities
    if plan.grammar is not None:
        check_guides(within)
        plan = replace(plan, sampling=guide(plan.sampling, plan.grammar, checkpoint))
    ends = ends_of(checkpoint) if within is None or "eos" in within.stops else ()
    bases = [base_case(checkpoint, prompt, number, plan, ends) for number, prompt in enumerate(prompts)]
    draft_of_plan = (
        None
        if plan.draft is None
        else given_draft(plan.draft, checkpoint, within, plan.draft_weights, plan.draft_trees)
    )
    if plan.draft is None and within is not None and not {Ngram.TAG, Scripted.TAG} & set(within.drafts):
        cases_of_engine = _cases_of_engine(bases, plan, within)
        return PreparedCases(
            len(cases_of_engine),
            checkpoint.vocab_size,
            lambda oracle: ((case, invariants) for case in cases_of_engine),
            cases_of_engine[0],
        )

    if plan.batch or plan.draft not in (None, Scripted.TAG):
        draft = Ngram(LOOKUP, LOOKUP_ORDER) if draft_of_plan is None else draft_of_plan
        for number, base in enumerate(bases):
            _check_fits(plan, base, draft, number)
        drafted = [_with_draft(base, draft, plan, number) for number, base in enumerate(bases)]
        if plan.batch:
            together = tuple(invariant for invariant in invariants if invariant.name in (*long, *SESSION_LEVEL))
            others_invariants = tuple(invariant for invariant in invariants if invariant not in together)
            begun = [_first_steps(case) for case in drafted] if others_invariants else []
            judged = [(case, together) for case in side_by_side(drafted, plan.batch)]
            judged += [(case, others_invariants) for case in side_by_side(begun, plan.batch)]
            if within is not None:
                for case, _ in judged:
                    check_admitted(case, within, plan.batch)
            return PreparedCases(len(judged), checkpoint.vocab_size, lambda _: iter(judged), drafted[0])
        return PreparedCases(
            len(bases) * (bool(tokens) + bool(close)),
            checkpoint.vocab_size,
            lambda oracle: (judged_case for case in drafted for judged_case in _long_and_close(case, tokens, close)),
            drafted[0],
        )

    def cases(oracle: Oracle) -> Iterator[JudgedCase]:
        for number, base in enumerate(bases):
            lookup = _with_draft(base, Ngram(LOOKUP, LOOKUP_ORDER), plan, 3 * number)
            try:
                plain = subject(base.plain_decode())
            except NoTrace:
                yield lookup, invariants  # the judge reports the crash, or the reason why the case is declined
                continue
            script = own_top_tokens(plain, base.prompt[-1], seed=plan.seed + number)
            scripted = _with_draft(base, script, plan, 3 * number + 1)
            every = tokens if plan.draft is None else ()
            if every:
                yield lookup, tokens
            first, *later = _long_and_close(scripted, tokens, close)
            yield first
            if every and sampled:
                yield (
                    _with_draft(
                        base, LanguageModel(checkpoint, OWN_TREE, _nameable_ids(checkpoint)), plan, 3 * number + 2
                    ),
                    tokens,
                )
            yield from later

    total = len(bases) * ((1 + (1 + sampled) * (plan.draft is None)) * bool(tokens) + bool(close))
    return PreparedCases(total, checkpoint.vocab_size, cases, bases[0])


def _long_and_close(case: Case, tokens: tuple[Invariant, ...], close: tuple[Invariant, ...]) -> Iterator[JudgedCase]:
    """The long case under the invariants of tokens, and its first steps under the others."""
    if tokens:
        yield case, tokens
    if close:
        # Padding rows, which the long cases do not cover.
        yield replace(case, steps=CLOSE_STEPS, layout=replace(case.layout, padded_nodes=PADDED)), close


def _first_steps(case: Case) -> Case:
    """The first steps of a case in company, which ends after them: a session has no limit of steps."""
    most = min(case.stops.max_new_tokens, CLOSE_STEPS * (case.draft.height + 1))
    return replace(case, stops=replace(case.stops, max_new_tokens=most))


def _check_fits(plan: Plan, base: Case, draft: Draft, number: int) -> None:
    """Refuse a draft with which the case of a prompt is none.

    Raises:
        UnusableInput: with the prompt and the reason.
    """
    try:
        replace(base, draft=draft)
    except Malformed as why:
        raise UnusableInput(f"--draft {plan.draft}: prompt {number + 1}: {why}") from None


def _cases_of_engine(bases: Sequence[Case], plan: Plan, within: Abilities) -> list[Case]:
    """The cases on an engine that runs no tree of ours: each prompt by itself, or `plan.batch` of them in a session.

    Raises:
        UnusableInput: The engine runs no such session.
    """
    cases_by_prompt = [tuple(own_way(base, plan, number, within)) for number, base in enumerate(bases)]
    if not plan.batch:
        return [case for cases in cases_by_prompt for case in cases]
    sessions = [session for cases in zip(*cases_by_prompt, strict=True) for session in side_by_side(cases, plan.batch)]
    for session in sessions:
        check_admitted(session, within, plan.batch)
    return sessions


def own_way(base: Case, plan: Plan, number: int, within: Abilities) -> Iterator[Case]:
    """The cases of prompt `number` on an engine that runs no tree of ours.

    The engine speculates in its own way, if at all. One that takes a draft model is given the target itself as well,
    whose tokens are all accepted. Such an engine ends where the checkpoint says, where it declares that it ends at all.
    """
    assert isinstance(base.model, Checkpoint)
    plain = replace(base.plain_decode(), layout=KvLayout())
    yield _with_draft(plain, plain.draft, plan, 3 * number)
    if LanguageModel.TAG in within.drafts:
        draft = LanguageModel(base.model, OWN_TREE)
        yield _with_draft(replace(plain, draft=draft), draft, plan, 3 * number + 1)


def _with_draft(base: Case, draft: Draft, plan: Plan, turn: int) -> Case:
    """`base` with `draft`; in a sampled plan with a seed of its own, and as a chain if the rule needs chains."""
    if plan.sampling.greedy:
        return replace(base, draft=draft, sampling=plan.sampling)
    if plan.sampling.rule.promise.chains_only:
        fitting = draft.as_chain()
    else:
        fitting = with_static_tree(draft) if draft.refuses_draws(plan.sampling.draws) else draft
    seed = int(np.random.default_rng([plan.seed, turn]).integers(0, 2**62))
    return replace(base, draft=fitting, sampling=replace(plan.sampling, processors=plan.processors, seed=seed))


def _nameable_ids(checkpoint: Checkpoint) -> tuple[int, ...]:
    """The ids that the model may name when it drafts for itself."""
    return tuple(token for token in range(checkpoint.vocab_size) if token % UNNAMED or checkpoint.vocab_size < UNNAMED)


def ends_of(checkpoint: Checkpoint) -> tuple[int, ...]:
    """The token ids at which the checkpoint ends a text, as far as it scores them."""
    try:
        return tuple(token for token in end_tokens(checkpoint.source) if 0 <= token < checkpoint.vocab_size)
    except UnreadableCheckpoint as why:
        raise UnusableInput(str(why)) from None


def base_case(checkpoint: Checkpoint, prompt: tuple[int, ...], number: int, plan: Plan, ends: tuple[int, ...]) -> Case:
    """The greedy case of prompt `number`, drafted by n-grams.

    Raises:
        UnusableInput: The prompt is too long, or holds a token that the checkpoint has not.
    """
    foreign = next((token for token in prompt if token >= checkpoint.vocab_size), None)
    if foreign is not None:
        raise UnusableInput(
            f"prompt {number + 1}: token {foreign} is beyond the {checkpoint.vocab_size} of {checkpoint.source}; "
            "tokenizer and weights do not belong together"
        )
    try:
        return Case(
            checkpoint,
            prompt,
            Ngram(LOOKUP, LOOKUP_ORDER),
            layout_of(plan.layout, checkpoint),
            sampling=Sampling(grammar=plan.sampling.grammar),
            stops=Stops(plan.new_tokens, ends),
            dtype=plan.dtypes[0],
            ranks=plan.ranks or 1,
        )
    except Malformed as why:
        raise UnusableInput(
            f"prompt {number + 1} ({len(prompt)} tokens, {plan.new_tokens} to come): {why}; shorten it or lower "
            "--new-tokens"
        ) from None
