"""`law`: the exact law of an acceptance rule in a small world, next to the target's."""

from collections.abc import Sequence
from fractions import Fraction

from specverify.interface.results import LawResult
from specverify.reference.rules import RULES
from specverify.setup.errors import UnusableInput

Probability = int | float | str | Fraction
"""A probability; a fraction or a text such as `3/5` is exact, and a float is taken as it is printed."""


def law(
    rule: str,
    *,
    p: Sequence[Probability] | None = None,
    q: Sequence[Probability] | None = None,
    draws: str | None = None,
    siblings: int | None = None,
    depth: int | None = None,
    tree: Sequence[int] | None = None,
    tokens: Sequence[int] | None = None,
    soft_q: bool = False,
    claims_lossless: bool = False,
    max_runs: int | None = None,
) -> LawResult:
    """Enumerate the law of a rule over all coins, as `specverify law` does.

    >>> from specverify import law
    >>> result = law("multi-round", p=["3/5", "2/5"], q=["1/2", "1/2"])
    >>> result.agrees, result.total_variation
    (True, Fraction(0, 1))

    Args:
        rule: The name of a built-in rule (`specverify list rules`), or `pkg.module:function` for one of your own.
        p: The target's probabilities at every context; by default a pair with `q` that tells rules apart.
        q: The draft's.
        draws: How siblings are named; by default as the rule was published.
        siblings: Children of each node.
        depth: Levels below the root.
        tree: Parents of the nodes, in place of `siblings` and `depth`; node 0 is the root, its own parent.
        tokens: Tokens of the nodes, the root's first, in place of drafting any.
        soft_q: With top-k: whether the soft q is handed over, as if tokens had been drawn from it.
        claims_lossless: Whether your own rule claims to be lossless: the result then disagrees where it is not.
        max_runs: Runs of the rule before a world counts as too large.

    Raises:
        UnusableInput: An argument is wrong, or two contradict each other.
    """
    import click

    from specverify.laws.command import Options, laws_of

    own = ":" in rule
    if not own and rule not in RULES:
        raise UnusableInput(f"{rule}: no such rule; known are {', '.join(RULES)}, or pkg.module:function")
    options = Options(
        rule=None if own else rule,
        user_rule=rule if own else None,
        p=_written(p),
        q=_written(q),
        draws=draws,
        siblings=siblings,
        depth=depth,
        tree=_written(tree),
        tokens=_written(tokens),
        soft_q=soft_q,
        claims_lossless=claims_lossless,
        max_runs=max_runs,
    )
    try:
        (facts,) = laws_of(options)
    except click.UsageError as why:
        raise UnusableInput(why.format_message()) from None
    return LawResult(facts)


def _written(numbers: Sequence[Probability] | None) -> str | None:
    """Numbers as the command line takes them."""
    return None if numbers is None else ",".join(map(str, numbers))
