"""The exact law of one rule in one small world, by enumeration.

The facts (`LawFacts`) also hold the rule's own declaration: whether it promises to be lossless in this setting.
"""

from dataclasses import dataclass
from typing import Any

from specverify.laws.user_rule import own_rule
from specverify.laws.world_options import MOST_TOKENS, Tables
from specverify.reference.malformed import Malformed
from specverify.reference.oracle import acceptance
from specverify.reference.oracle.acceptance import Answer, Program, ProgramArguments
from specverify.reference.oracle.law import Law, expected_length, round_law, sorted_biases, total_variation
from specverify.reference.oracle.tree_growth import DraftStop
from specverify.reference.rules import Rule
from specverify.reports.format import cut
from specverify.reports.pages.law import LawFacts
from specverify.setup.errors import UnusableInput

MOST_RUNS = 20_000
"""Most runs of a rule in one world; fewer for a large vocabulary, which makes each run long."""

MOST_WORK = 120_000
"""Most runs times tokens of the vocabulary: about ten seconds."""

NOISE = 1e-10
"""Total variation allowed to a user's rule that computes in floats; fractions are exact."""


@dataclass(frozen=True)
class LawQuery:
    """A rule in a world.

    Attributes:
        rule: The built-in rule; for a user's rule, the thresholds that it receives.
        tables: The world.
        draws: One of DRAWS; ignored if the tables give tokens.
        setting: The settings in words.
        soft: Whether top-k tokens come with the soft q, as if they had been drawn from it.
        user_rule: The user's own rule, `pkg.module:function`, or None.
        claims: Whether the user's rule claims to be lossless.
        stop: The confidence at which drafting ends; None for trees of the whole shape.
    """

    rule: Rule
    tables: Tables
    draws: str
    setting: str = ""
    soft: bool = False
    user_rule: str | None = None
    claims: bool = False
    stop: DraftStop | None = None


def enumerate_law(query: LawQuery, most: int | None = None) -> LawFacts:
    """The facts about a rule in a world, by enumeration of every possible decision.

    Args:
        query: Rule and world.
        most: Most runs of the rule; None for as many as take about ten seconds.

    Raises:
        UnusableInput: The world is too large, or the user's own rule errs.
    """
    tables, rule = query.tables, query.rule
    runs = _Runs(query, min(MOST_RUNS, MOST_WORK // tables.vocab) if most is None else most)
    blocks = _law(query, runs)
    height = tables.shape.height + 1
    off = total_variation(blocks, tables.target_row, height)
    # One float among the weights of a user's rule makes the law inexact.
    exact = not any(isinstance(mass, float) for mass in blocks.values())
    has_tokens = tables.tokens is not None
    promise: bool | None = rule.lossless("top-k" if has_tokens else query.draws, tables.distinct(query.draws))
    declared = rule.promise
    condition = declared.condition
    why = ""
    if query.user_rule is not None:
        # A user's rule promises only what the command line claims for it.
        promise = True if query.claims else None
        condition = ""
    elif query.soft and rule.promise.reads_draft_law:
        promise = False
        condition = "tokens are drawn from the q that is handed over"
        why = f"a greedy draft treated as a sample: {rule.name} promises the target's law only where {condition}"
    elif (
        query.stop is not None and query.stop.when == "drop" and query.draws != "top-k" and rule.promise.reads_draft_law
    ):
        promise = False
        condition = "the decision to draft a token reads the tokens before it alone"
        why = f"an unlikely draw is withdrawn: {rule.name} promises the target's law only where {condition}"
    return LawFacts(
        rule=query.user_rule or rule.name,
        setting=query.setting,
        draws="given" if has_tokens else query.draws,
        tree=_tree(tables),
        promise=promise,
        condition=condition,
        source="" if query.user_rule else declared.source,
        sentence="" if query.user_rule else declared.sentence,
        why=why,
        biased=off != 0 if exact else off > NOISE,
        exact=exact,
        total_variation=off,
        expected=expected_length(blocks),
        height=height,
        cells=len(blocks),
        evaluations=runs.count,
        biases=tuple(sorted_biases(blocks, tables.target_row, height)),
    )


def _tree(tables: Tables) -> str:
    parents = " ".join(map(str, tables.shape.parent))
    tokens = f", tokens {' '.join(map(str, tables.tokens))}" if tables.tokens is not None else ""
    return f"parents {parents} (node 0 is the root){tokens}; {tables.vocab} tokens"


def _law(query: LawQuery, runs: "_Runs") -> Law:
    tables = query.tables
    # Built-in rules read only the children of the current node, so that a tree can be drawn while it is walked.
    is_drawn_first = query.soft or query.user_rule is not None
    try:
        blocks = round_law(
            tables.shape,
            tables.target_row,
            tables.draft_row,
            query.rule,
            query.draws,
            tables.tokens,
            runs,
            whole_tree_first=is_drawn_first,
            stop=query.stop,
        )
    except Malformed as why:
        if isinstance(why.__cause__, UnusableInput):
            raise why.__cause__ from None
        raise UnusableInput(cut(f"--rule {query.user_rule}: {why.why}" if query.user_rule else str(why))) from why
    # A rule that reads a clock or random numbers of its own gives runs that do not add up to 1.
    total = sum(blocks.values())
    if not -NOISE < float(total) - 1.0 < NOISE:
        raise UnusableInput(
            f"--rule {query.user_rule}: its runs add up to {float(total):.6g}, not to 1:"
            " it may depend on nothing but its arguments and coins"
        )
    return blocks


class _Runs:
    """A rule that counts its runs and raises after too many.

    Attributes:
        count: Runs so far.
    """

    def __init__(self, query: LawQuery, most: int) -> None:
        self._program: Program = acceptance.verify if query.user_rule is None else own_rule(query.user_rule)
        self._tables = query.tables
        self._soft = query.soft
        self._most = most
        self.count = 0

    def __call__(self, *arguments: Any) -> Answer:
        """Run the rule once.

        Raises:
            UnusableInput: The rule was run too often.
        """
        self.count += 1
        if self.count > self._most:
            raise UnusableInput(
                f"too large a world: more than {self._most} runs of the rule; give it fewer nodes or tokens (of at most"
                f" {MOST_TOKENS}), --draws top-k, or more time with --max-runs"
            )
        question = ProgramArguments(*arguments)
        if self._soft:
            above = [question.tree.tokens_to(up)[1:] for up in question.tree.parent]
            # The soft q of a node is the draft's law at its parent, after the path to the parent.
            soft = [self._tables.draft_row(path, 0) for path in above]
            question = question._replace(proposal=soft, sampled=True)
        return self._program(*question)
