"""Cases on a real checkpoint, made from prompts.

Drafts come from an n-gram trie, from the model's own top tokens, and (if sampled) from the model itself. The first
steps of a case tell how long the run will take.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from specverify.checkpoints.chosen_steps import check_steps, step_cases
from specverify.checkpoints.given_draft import given_draft, with_static_tree
from specverify.checkpoints.guided import check_ends, check_guides, guide
from specverify.checkpoints.load import cases_under_load
from specverify.checkpoints.opening import open_checkpoint
from specverify.checkpoints.prompts import prompts_of
from specverify.checkpoints.sessions import SESSION_LEVEL, check_admitted, layout_of, side_by_side
from specverify.plan import Plan
from specverify.properties.strategies.acceptance import accepted_path
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
from specverify.reference.trace import Array, Trace
from specverify.reference.tree import RankTree, Tree
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
    "acceptance.rate",
    "acceptance.company-independent",
    "pair.greedy-match",
    "pair.same-law",
    "layers.between-taps",
    "layers.experts-best",
    "layers.columns-best",
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


def asked_of(prompt: int, plan: Plan, invariants: tuple[Invariant, ...]) -> tuple[Invariant, ...]:
    """The invariants that prompt `prompt` is asked; behind `plan.variants` prompts, those that read its own runs.

    Variants ask what does not depend on the text, such as padding and layouts, and take most of a prompt's time.
    """
    if plan.varies(prompt):
        return invariants
    return tuple(invariant for invariant in invariants if invariant.looks_at_run or invariant.name in TOKEN_LEVEL)


GREEDY_MATCH, OF_DRAFT = "lossless.greedy-match", "lossless.draft-independent"
"""The invariants that hold each greedy token against the oracle's choice, and against plain decode by the engine."""


def long_asked_of(prompt: int, plan: Plan, invariants: tuple[Invariant, ...]) -> tuple[Invariant, ...]:
    """The invariants that the long case of prompt `prompt` is asked where its plain decode runs for these alone.

    Behind `plan.variants` prompts the text is not decoded plainly to its end. Where each greedy token is judged as the
    oracle's choice, plain decode can show nothing more than a tie; the first tokens of it, the control, run everywhere.
    """
    names = {invariant.name for invariant in invariants}
    if plan.varies(prompt) or not plan.sampling.greedy or GREEDY_MATCH not in names:
        return invariants
    return tuple(invariant for invariant in invariants if invariant.name != OF_DRAFT)


@dataclass(frozen=True)
class PreparedCases:
    """The cases of a prompted run: their number, their vocabulary, and the function that makes them one by one.

    `first` is a case of the first prompt, by which the speed of the run is estimated. `num_prompts` is the number of
    prompts, where variants of some of them alone run; 0 where every case is asked the same.
    """

    total: int
    vocab_size: int
    cases: Callable[[Oracle], Iterator[JudgedCase]]
    first: Case
    num_prompts: int = 0


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
    padding = PADDED if within is None or "padded_nodes" in within.layout_settings else 0
    if plan.grammar is not None:
        check_guides(within, plan.grammar.after)
        plan = replace(plan, sampling=guide(plan.sampling, plan.grammar, checkpoint))
    ends = ends_of(checkpoint) if within is None or "eos" in within.stops else ()
    if plan.grammar is not None:
        check_ends(within, ends)
    bases = [base_case(checkpoint, prompt, number, plan, ends, within=within) for number, prompt in enumerate(prompts)]
    _check_settings(plan, bases[0])
    draft_of_plan = (
        None
        if plan.draft is None
        else given_draft(plan.draft, checkpoint, within, plan.draft_weights, plan.draft_trees)
    )
    if plan.steps:
        return _chosen_steps(bases, plan, subject, invariants, draft_of_plan, padding)
    if plan.draft is None and within is not None and not {Ngram.TAG, Scripted.TAG} & set(within.drafts):
        if plan.concurrency:
            own = [next(own_way(base, plan, number, within)) for number, base in enumerate(bases)]
            return _under_load(own, plan, within, invariants)
        cases_of_engine = _cases_of_engine(bases, plan, within, invariants)
        return PreparedCases(
            len(cases_of_engine),
            checkpoint.vocab_size,
            lambda oracle: iter(cases_of_engine),
            cases_of_engine[0][0],
            len(bases),
        )

    if plan.batch or plan.draft not in (None, Scripted.TAG):
        draft = Ngram(LOOKUP, LOOKUP_ORDER) if draft_of_plan is None else draft_of_plan
        for number, base in enumerate(bases):
            _check_fits(plan, base, draft, number)
        drafted = [_with_draft(base, draft, plan, number, within) for number, base in enumerate(bases)]
        if plan.concurrency and within is not None:
            return _under_load(drafted, plan, within, invariants)
        if plan.batch:
            together = tuple(invariant for invariant in invariants if invariant.name in (*long, *SESSION_LEVEL))
            others_invariants = tuple(invariant for invariant in invariants if invariant not in together)
            begun = [_first_steps(case) for case in drafted] if others_invariants else []
            judged = [(case, together) for case in side_by_side(drafted, plan.batch)]
            judged += [
                (case, asked_of(group * plan.batch, plan, others_invariants))
                for group, case in enumerate(side_by_side(begun, plan.batch))
            ]
            if within is not None:
                for case, _ in judged:
                    check_admitted(case, within, f"--batch {plan.batch}")
            return PreparedCases(len(judged), checkpoint.vocab_size, lambda _: iter(judged), drafted[0], len(bases))
        return PreparedCases(
            len(bases) * (bool(tokens) + bool(close)),
            checkpoint.vocab_size,
            lambda oracle: (
                judged_case
                for number, case in enumerate(drafted)
                for judged_case in _long_and_close(
                    _decoded_plainly(case, subject, long_asked_of(number, plan, tokens)),
                    long_asked_of(number, plan, tokens),
                    asked_of(number, plan, close),
                    padded_nodes=padding * plan.varies(number),
                )
            ),
            drafted[0],
            len(bases),
        )

    def cases(oracle: Oracle) -> Iterator[JudgedCase]:
        for number, base in enumerate(bases):
            lookup = _with_draft(base, Ngram(LOOKUP, LOOKUP_ORDER), plan, 3 * number, within)
            try:
                plain = subject(base.plain_decode())
            except NoTrace:
                yield lookup, invariants  # the judge reports the crash, or the reason why the case is declined
                continue
            script = own_top_tokens(plain, base.prompt[-1], seed=plan.seed + number)
            scripted = _with_draft(base, script, plan, 3 * number + 1, within)
            every = tokens if plan.draft is None else ()
            if every:
                yield lookup, tokens
            padded_nodes = padding * plan.varies(number)
            first, *later = _long_and_close(scripted, tokens, asked_of(number, plan, close), padded_nodes=padded_nodes)
            yield first
            if every and sampled:
                yield (
                    _with_draft(
                        base,
                        LanguageModel(checkpoint, OWN_TREE, _nameable_ids(checkpoint)),
                        plan,
                        3 * number + 2,
                        within,
                    ),
                    tokens,
                )
            yield from later

    total = len(bases) * ((1 + (1 + sampled) * (plan.draft is None)) * bool(tokens) + bool(close))
    return PreparedCases(total, checkpoint.vocab_size, cases, bases[0], len(bases))


def _chosen_steps(
    bases: Sequence[Case],
    plan: Plan,
    subject: Subject,
    invariants: tuple[Invariant, ...],
    draft: Draft | None,
    padded_nodes: int,
) -> PreparedCases:
    """The cases of `plan.steps`: drafted as the plan says, or by n-grams and by the model's own top tokens in turn.

    Raises:
        UnusableInput: The engine runs no single step, or a grammar is asked for.
    """
    check_steps(plan, subject)

    def cases(oracle: Oracle) -> Iterator[JudgedCase]:
        for number, base in enumerate(bases):

            def draft_at(begun: Case, plain: Trace, turn: int, first_turn: int = number * plan.steps) -> Case:
                by_script = draft is None and turn % 2 == 1
                script = own_top_tokens(plain, begun.prompt[-1], plan.seed + first_turn + turn) if by_script else None
                chosen = script or draft or Ngram(LOOKUP, LOOKUP_ORDER)
                drafted = _with_draft(begun, chosen, plan, first_turn + turn, subject.abilities)
                return replace(drafted, layout=replace(drafted.layout, padded_nodes=padded_nodes))

            for case in step_cases(base, plan, number, subject, draft_at):
                yield case, asked_of(number, plan, invariants)

    total = len(bases) * plan.steps
    return PreparedCases(total, bases[0].model.vocab_size, cases, replace(bases[0], steps=1), len(bases))


def _long_and_close(
    case: Case, tokens: tuple[Invariant, ...], close: tuple[Invariant, ...], *, padded_nodes: int
) -> Iterator[JudgedCase]:
    """The long case under the invariants of tokens, and its first steps under the others.

    Padding rows are asked of the prompts of which variants run: other prompts share the plain runs of their long cases.
    """
    if tokens:
        yield case, tokens
    if close:
        yield replace(case, steps=CLOSE_STEPS, layout=replace(case.layout, padded_nodes=padded_nodes)), close


def _decoded_plainly(case: Case, subject: Subject, invariants: tuple[Invariant, ...]) -> Case:
    """`case`; where an invariant compares it with its plain decode, that runs first and serves as the control too."""
    if case.sampling.greedy and any(invariant.name == OF_DRAFT for invariant in invariants):
        subject.outcome(case.plain_decode())  # a run that breaks is told when it is asked for again
    return case


def _first_steps(case: Case) -> Case:
    """The first steps of a case in company, which ends after them: a session has no limit of steps."""
    most = min(case.stops.max_new_tokens, CLOSE_STEPS * (case.draft.height + 1))
    return replace(case, stops=replace(case.stops, max_new_tokens=most))


def _check_settings(plan: Plan, base: Case) -> None:
    """Refuse sampling settings with which the case of a prompt is none, such as a banned token beyond the vocabulary.

    Raises:
        UnusableInput: with the reason.
    """
    try:
        replace(base.plain_decode(), sampling=plan.sampling)
    except Malformed as why:
        raise UnusableInput(f"{plan.model}: these sampling settings make no case: {why}") from None


def _check_fits(plan: Plan, base: Case, draft: Draft, number: int) -> None:
    """Refuse a draft with which the case of a prompt is none.

    Raises:
        UnusableInput: with the prompt and the reason.
    """
    try:
        replace(base, draft=draft)
    except Malformed as why:
        raise UnusableInput(f"--draft {plan.draft}: prompt {number + 1}: {why}") from None


def _under_load(
    cases: Sequence[Case], plan: Plan, within: Abilities, invariants: tuple[Invariant, ...]
) -> PreparedCases:
    """The cases of `plan.concurrency` on an engine that batches by itself.

    Raises:
        UnusableInput: The engine takes fewer requests at once.
    """
    loaded = cases_under_load(cases, plan.concurrency, plan.seed, "stop_tokens" in within.stops)
    for case in loaded:
        check_admitted(case, within, f"--concurrency {','.join(map(str, plan.concurrency))}")
    return PreparedCases(
        len(loaded), cases[0].model.vocab_size, lambda _: ((case, invariants) for case in loaded), cases[0]
    )


def _cases_of_engine(
    bases: Sequence[Case], plan: Plan, within: Abilities, invariants: tuple[Invariant, ...]
) -> list[JudgedCase]:
    """The cases on an engine that runs no tree of ours: each prompt by itself, or `plan.batch` of them in a session.

    Raises:
        UnusableInput: The engine runs no such session.
    """
    cases_by_prompt = [tuple(own_way(base, plan, number, within)) for number, base in enumerate(bases)]
    if not plan.batch:
        return [
            (case, asked_of(number, plan, invariants)) for number, cases in enumerate(cases_by_prompt) for case in cases
        ]
    sessions = [session for cases in zip(*cases_by_prompt, strict=True) for session in side_by_side(cases, plan.batch)]
    for session in sessions:
        check_admitted(session, within, f"--batch {plan.batch}")
    return [(session, invariants) for session in sessions]


def own_way(base: Case, plan: Plan, number: int, within: Abilities) -> Iterator[Case]:
    """The cases of prompt `number` on an engine that runs no tree of ours.

    The engine speculates in its own way, if at all. One that takes a draft model is given the target itself as well,
    whose tokens are all accepted. Such an engine ends where the checkpoint says, where it declares that it ends at all.
    """
    assert isinstance(base.model, Checkpoint)
    plain = replace(base.plain_decode(), layout=KvLayout() if plan.layout is None else base.layout)
    yield _with_draft(plain, plain.draft, plan, 3 * number, within)
    if LanguageModel.TAG in within.drafts:
        draft = LanguageModel(base.model, OWN_TREE)
        yield _with_draft(replace(plain, draft=draft), draft, plan, 3 * number + 1, within)


def _with_draft(base: Case, draft: Draft, plan: Plan, turn: int, within: Abilities | None) -> Case:
    """`base` with `draft` as rule and backend can verify it; in a sampled plan with a seed of its own."""
    fitting = fitting_draft(draft, plan.sampling, within)
    if plan.sampling.greedy:
        return replace(base, draft=fitting, sampling=plan.sampling)
    seed = int(np.random.default_rng([plan.seed, turn]).integers(0, 2**62))
    return replace(base, draft=fitting, sampling=replace(plan.sampling, processors=plan.processors, seed=seed))


def fitting_draft(draft: Draft, sampling: Sampling, within: Abilities | None) -> Draft:
    """The draft as a chain where the rule or the backend verifies chains alone; static where siblings are drawn."""
    if within is not None and within.trees == "chains" and draft.branches:
        return draft.as_chain()
    if sampling.greedy:
        return draft
    if sampling.rule.promise.chains_only:
        return draft.as_chain()
    return with_static_tree(draft) if draft.refuses_draws(sampling.draws) else draft


def _nameable_ids(checkpoint: Checkpoint) -> tuple[int, ...]:
    """The ids that the model may name when it drafts for itself."""
    return tuple(token for token in range(checkpoint.vocab_size) if token % UNNAMED or checkpoint.vocab_size < UNNAMED)


def ends_of(checkpoint: Checkpoint) -> tuple[int, ...]:
    """The token ids at which the checkpoint ends a text, as far as it scores them."""
    try:
        return tuple(token for token in end_tokens(checkpoint.source) if 0 <= token < checkpoint.vocab_size)
    except UnreadableCheckpoint as why:
        raise UnusableInput(str(why)) from None


def base_case(
    checkpoint: Checkpoint,
    prompt: tuple[int, ...],
    number: int,
    plan: Plan,
    ends: tuple[int, ...],
    *,
    within: Abilities | None = None,
) -> Case:
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
            layout_of(plan.layout, checkpoint, within),
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


def own_top_tokens(plain: Trace, root: int, seed: int) -> Scripted:
    """Trees of the model's own top tokens along its plain decoding `plain`; `root` is the prompt's last token.

    Each tree holds the next one to five tokens, with second and third best tokens beside them, a rejected branch below
    one of those, and sometimes a wrong token in the middle. So every depth of acceptance occurs. Rows are shuffled.
    """
    rng = np.random.default_rng(seed)
    rows = [step.scored.logits[0] for step in plain.steps if step.scored is not None]
    output = (root, *plain.output)
    trees = []
    position = 0
    while position < len(rows):
        depth = int(rng.integers(1, 6))
        parent = [0]
        token = [output[position]]
        spine = 0
        # From this level on the spine holds the second-best token; mostly it lies beyond the tree.
        wrong_from = int(rng.integers(1, 3 * depth + 2))
        for level in range(1, min(depth, len(rows) - position) + 1):
            next_token = output[position + level]  # under a grammar not always the row's best token
            best = [
                next_token,
                *[token_id for token_id in _top(rows[position + level - 1], 3) if token_id != next_token],
            ]
            first = best[0] if level < wrong_from else best[min(1, len(best) - 1)]
            siblings = [first, *[token_id for token_id in best[1:] if token_id != first][: int(rng.integers(0, 3))]]
            below = len(parent)
            for sibling in siblings:
                parent.append(spine)
                token.append(int(sibling))
            if len(siblings) > 1:
                parent.append(below + 1)
                token.append(int(best[0]))
            spine = below
        natural = Tree(tuple(parent), tuple(token))
        order = (0, *(1 + rng.permutation(len(natural) - 1)).tolist())
        trees.append(natural.renumber(order))
        # The next step begins after the accepted nodes and the bonus.
        position += len(accepted_path(natural, output[position + 1 :]))
    return Scripted(tuple(trees))


def _top(row: Array, count: int) -> list[int]:
    best = np.argpartition(-row, min(count, len(row)) - 1)[:count]
    return [int(token) for token in best[np.argsort(-row[best], kind="stable")]]


FEW, MORE = 2, 3
"""Steps of the two runs that are timed, after a first step has read the weights and the prompt."""

WORTH = 40
"""Tokens of a whole run below which nothing is timed: the run takes hardly longer."""


def estimate(first: Case, total: int, new_tokens: int, oracle: Oracle, subject: Subject) -> str:
    """One line: the measured seconds of a step, and of the whole run if each step emits one token.

    Drafted tokens that are accepted make a run faster, invariants that run a case again make it slower. The line is
    empty for a small run, and where the backend gives no trace; the first case will then say why.
    """
    if total * new_tokens < WORTH:
        return ""
    began = time.monotonic()
    try:
        for run in (subject, oracle):
            run(replace(first, steps=1))
        reading = time.monotonic() - began
        few, more = ([_seconds(run, replace(first, steps=steps)) for run in (oracle, subject)] for steps in (FEW, MORE))
    except NoTrace:
        return ""
    step = [max(0.0, long - short) / (MORE - FEW) for short, long in zip(few, more, strict=True)]
    total_s = total * (sum(few) + max(0, new_tokens - FEW) * sum(step))
    return (
        f"{total} cases of up to {new_tokens} tokens: about {_duration(total_s)}; reading the weights and the first "
        f"step took {reading:.1f} s, a step takes {step[0]:.2f} s in the oracle and {step[1]:.2f} s in the backend"
    )


def _seconds(run: Oracle | Subject, case: Case) -> float:
    began = time.monotonic()
    run(case)
    return time.monotonic() - began


def _duration(seconds: float) -> str:
    """`47 s`, `12 min` or `3.5 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
