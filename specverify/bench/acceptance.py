"""The command `bench acceptance`: verification of many requests in one call, beside each alone.

Production servers compile the acceptance of sampling with a dynamic size of the batch, so that a program is compiled at
most twice, and tell warm-up from what follows (arXiv 2508.08192, section 3.2). Here each rule gets drawn trees, laws
and coins. The ways take turns on the same requests, and every decision is compared with that of the request alone.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters

from specverify.backends.engine.composition import SEAMS
from specverify.backends.engine.sampling.batched import (
    Answers,
    BatchedVerify,
    PaddedBatch,
    Program,
    acceptance_program,
    tensors_of,
)
from specverify.backends.engine.sampling.coins import Coins, spent_places
from specverify.backends.engine.sampling.forest import forest
from specverify.backends.engine.sampling.question import Question
from specverify.backends.engine.sampling.rules import BATCHED, PROGRAMS
from specverify.backends.engine.sampling.seams import SamplingSeams
from specverify.backends.engine.sampling.verify import verify
from specverify.dispatch.measure import tree_of
from specverify.isolation.engine import COMPILED
from specverify.reference.rules import Rule
from specverify.reference.tape import stride
from specverify.reference.tree import Tree
from specverify.reports.pages.acceptance import ALONE
from specverify.setup.errors import UnusableInput

BATCHES, RULES = (1, 4, 16), ("multi-round", "target-only")
"""Requests of a call, and names of rules, where none are named."""

ROUNDS = 40
"""Timed calls of each way on each size of batch."""

MOST_FIRST_CALLS = 8
"""First calls of one size of batch after which a way that still compiles is timed as it is."""

ROUNDING = 1e-5
"""Requests with a coin so near to the end of its interval are drawn anew: compilers sum float32 in other orders."""

Decisions = list[tuple[list[int], int]]
"""For each request its accepted rows, root first, and the token after them."""

Way = Callable[[list[Question], SamplingSeams], Decisions]
"""A way to decide a batch of requests."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of what is timed: nodes of each tree, tokens of the vocabulary, and timed calls of each way."""

    nodes: int = 16
    vocabulary: int = 4096
    rounds: int = ROUNDS


@dataclass(frozen=True)
class UncompiledVerify(BatchedVerify):
    """Acceptance of a batch by the program that is captured elsewhere, run as it is."""

    def ask(self, key: Program, batch: PaddedBatch) -> Answers:
        """Run the program of `key` on `batch`."""
        return acceptance_program(*key)(batch.height, *tensors_of(batch))


def decide_alone(questions: list[Question], seams: SamplingSeams) -> Decisions:
    """The decisions of the engine that verifies requests one by one."""
    decisions: Decisions = []
    for question in questions:
        acceptance = verify(
            question.trees,
            question.law,
            question.proposal,
            question.dice,
            question.rule,
            question.removed,
            seams,
            question.bonus,
        )
        decisions.append(([row for row in acceptance.path[0].tolist() if row >= 0], int(acceptance.bonus[0])))
    return decisions


WAYS: Mapping[str, Callable[[], Way]] = {
    ALONE: lambda: decide_alone,
    "one call": UncompiledVerify,
    "captured": BatchedVerify,
    "inductor": lambda: BatchedVerify("inductor"),
}
"""Each way by name, and what makes one that has compiled nothing yet."""


def check_rules(names: Sequence[str]) -> None:
    """Check that batches of requests are decided together by each rule.

    Raises:
        UnusableInput: A name is no rule, or its program decides requests one by one alone.
    """
    batched = [name for name, program in PROGRAMS.items() if program in BATCHED]
    for name in names:
        if name not in batched:
            raise UnusableInput(f"--rule {name}: rules that decide many requests in one call are {', '.join(batched)}")


def tree_shape(rule: Rule, nodes: int) -> tuple[int, ...]:
    """The parents of the tree's nodes: a chain where the rule verifies chains alone."""
    return tuple(max(0, node - 1) for node in range(nodes)) if rule.promise.chains_only else tree_of(nodes).parent


def draw_questions(rule: Rule, sizes: Sizes, batch: int, seed: int) -> list[Question]:
    """`batch` requests with one shape of tree, whose decisions no rounding changes."""
    chance = torch.Generator().manual_seed(seed)
    questions: list[Question] = []
    while len(questions) < batch:
        question = _draw_question(rule, sizes, chance)
        if distance_to_edges(question) >= ROUNDING:
            questions.append(question)
    return questions


def _draw_question(rule: Rule, sizes: Sizes, chance: torch.Generator) -> Question:
    """A request with float32 laws [1, nodes, vocabulary]; the draft's law is the target's with noise.

    Siblings are drawn as the publication of the rule draws them.
    """
    shape = tree_shape(rule, sizes.nodes)
    logits = 4 * torch.randn(1, sizes.nodes, sizes.vocabulary, generator=chance)
    noise = torch.randn(logits.shape, generator=chance)
    target, draft = logits.softmax(-1), (logits + noise).softmax(-1)
    token = torch.zeros(sizes.nodes, dtype=torch.long)
    for node, below in enumerate(Tree(shape, (0,) * sizes.nodes).children):
        if below:
            token[list(below)] = _draw_siblings(draft[0, node], len(below), rule.promise.draws, chance)
    tree = Tree(shape, tuple(token.tolist()))
    # A node's proposal is the law of its parent's row.
    proposal = draft[:, list(shape)]
    dice = Coins(torch.rand(1, stride(sizes.nodes), generator=chance), sizes.nodes)
    removed = rule.promise.draws == "without-replacement"
    return Question(forest(tree, token[None]), target, target, proposal, dice, rule, removed)


def distance_to_edges(question: Question) -> float:
    """How far the coins that decide for the request alone lie from the ends of the intervals that decide alike."""
    dice = Coins(question.dice.uniforms, question.dice.nodes, True)
    decide_alone([replace(question, dice=dice)], SEAMS.sampling)
    assert dice.low is not None
    assert dice.high is not None
    places = list(spent_places(dice, 0))
    coins = dice.uniforms.double()
    return float(torch.minimum(coins - dice.low, dice.high - coins)[0, places].min())


def _draw_siblings(law: torch.Tensor, count: int, draws: str, chance: torch.Generator) -> torch.Tensor:
    if draws == "top-k":
        return law.topk(count).indices
    return law.multinomial(count, replacement=draws == "with-replacement", generator=chance)


def unspent(questions: list[Question]) -> list[Question]:
    """The same requests, of whose coins nothing is noted; no way records the intervals of coins."""
    return [replace(question, dice=Coins(question.dice.uniforms, question.dice.nodes)) for question in questions]


def measure(
    batches: tuple[int, ...] = BATCHES,
    rules: tuple[str, ...] = RULES,
    sizes: Sizes = Sizes(),
    ways: Mapping[str, Callable[[], Way]] | None = None,
) -> dict[str, Any]:
    """Time every one of WAYS, or of `ways`, for each rule and each size of batch; the sizes come in their order.

    Returns:
        nodes, vocabulary, rounds, threads; rows: for each rule, batch and way its compilations, warmup_s
        (seconds of the first calls, up to the first that compiled nothing), late (compilations in the timed calls),
        median_ms, low_ms and high_ms (the quartiles), ratio (its median over that of ALONE), differences (requests
        decided otherwise than alone); rules: for each rule the levels of its trees, and the tokens that a request
        accepts on average; absent: a reason for each way that did not compile; same (whether no request was decided
        otherwise).

    Raises:
        UnusableInput: As `check_rules`.
    """
    check_rules(rules)
    rows: list[dict[str, Any]] = []
    accepted: list[dict[str, Any]] = []
    absent: dict[str, str] = {}
    with fresh_compilations(), torch.no_grad():
        for name in rules:
            rule = Rule(name)
            # What another rule or an earlier caller compiled would be found again.
            torch._dynamo.reset()
            present = {way: make() for way, make in (ways or WAYS).items() if way not in absent}
            lengths: list[int] = []
            for batch in batches:
                rows += _measure_batch(rule, sizes, batch, present, absent, lengths)
            levels = Tree(tree_shape(rule, sizes.nodes), (0,) * sizes.nodes).height
            accepted.append({"rule": name, "levels": levels, "accepted": statistics.mean(lengths) - 1})
    return {
        "nodes": sizes.nodes,
        "vocabulary": sizes.vocabulary,
        "rounds": sizes.rounds,
        "threads": torch.get_num_threads(),
        "rows": rows,
        "rules": accepted,
        "absent": absent,
        "same": not any(row["differences"] for row in rows),
    }


@contextmanager
def fresh_compilations() -> Iterator[None]:
    """Inside the `with`, compiled code is put into an empty folder, so that no earlier run shortens a warm-up."""
    before = os.environ.get(COMPILED)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        os.environ[COMPILED] = folder
        try:
            yield
        finally:
            if before is None:
                del os.environ[COMPILED]
            else:
                os.environ[COMPILED] = before


def _measure_batch(
    rule: Rule, sizes: Sizes, batch: int, present: dict[str, Way], absent: dict[str, str], lengths: list[int]
) -> list[dict[str, Any]]:
    """The rows of one size of batch; a way that does not compile moves from `present` to `absent`.

    The lengths of the accepted paths, root included, are added to `lengths`.
    """
    first = draw_questions(rule, sizes, batch, 0)
    due = decide_alone(unspent(first), SEAMS.sampling)
    warmups: dict[str, Warmup] = {}
    for name in [*present]:
        outcome = warm_up(present[name], first, due)
        if isinstance(outcome, str):
            absent[name] = outcome
            del present[name]
        else:
            warmups[name] = outcome
    times: dict[str, list[float]] = {name: [] for name in present}
    differences = {name: warmup.differences for name, warmup in warmups.items()}
    late = dict.fromkeys(present, 0)
    names = [*present]
    for number in range(1, sizes.rounds + 1):
        questions = draw_questions(rule, sizes, batch, number)
        due = decide_alone(unspent(questions), SEAMS.sampling)
        lengths += [len(path) for path, _ in due]
        # Each round begins with another way, so that none always follows the same one.
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            fresh_questions = unspent(questions)
            before = compilations()
            began = time.perf_counter()
            decisions = present[name](fresh_questions, SEAMS.sampling)
            times[name].append(time.perf_counter() - began)
            late[name] += compilations() - before
            differences[name] += count_differences(decisions, due)
    alone = statistics.median(times[ALONE])
    rows = []
    for name in names:
        low, median, high = statistics.quantiles(times[name], n=4, method="inclusive")
        rows.append(
            {
                "rule": rule.name,
                "batch": batch,
                "way": name,
                "compilations": warmups[name].compilations,
                "warmup_s": warmups[name].seconds,
                "late": late[name],
                "median_ms": 1000 * median,
                "low_ms": 1000 * low,
                "high_ms": 1000 * high,
                "ratio": median / alone,
                "differences": differences[name],
            }
        )
    return rows


@dataclass(frozen=True)
class Warmup:
    """The first calls of a way on one size of batch.

    Attributes:
        seconds: Of the calls up to and with the first that compiled nothing.
        compilations: Graphs that were compiled in them.
        differences: Requests decided otherwise than alone.
    """

    seconds: float
    compilations: int
    differences: int


def warm_up(way: Way, questions: list[Question], due: Decisions) -> Warmup | str:
    """Call `way` on `questions` until a call compiles nothing; or why this machine does not compile it, in one line.

    `due` are the decisions of each request alone.
    """
    try:
        return _first_calls(way, questions, due)
    except BackendCompilerFailed as error:
        return failure_text(error)


def _first_calls(way: Way, questions: list[Question], due: Decisions) -> Warmup:
    seconds, compiled, differences = 0.0, 0, 0
    for _ in range(MOST_FIRST_CALLS):
        fresh_questions = unspent(questions)
        before = compilations()
        began = time.perf_counter()
        decisions = way(fresh_questions, SEAMS.sampling)
        seconds += time.perf_counter() - began
        differences += count_differences(decisions, due)
        fresh = compilations() - before
        compiled += fresh
        if not fresh:
            break
    return Warmup(seconds, compiled, differences)


def compilations() -> int:
    """Graphs that torch.compile has handed to a backend in this process."""
    return int(counters["stats"]["unique_graphs"])


def count_differences(decisions: Decisions, due: Decisions) -> int:
    """Requests whose accepted rows or token differ; one that has no answer differs."""
    differing = sum(got != expected for got, expected in zip(decisions, due, strict=False))
    return differing + abs(len(decisions) - len(due))


def failure_text(error: BackendCompilerFailed) -> str:
    """Why a compiler failed, in one line."""
    lines = [" ".join(line.split()) for line in str(error).splitlines() if line.strip()]
    # torch's message begins with "backend='inductor' raised:", and the cause is on the line after it.
    cause = next((line for line in lines if not line.endswith("raised:")), type(error).__name__)
    return cause[:160]
