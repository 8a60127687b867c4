"""The work of the command `law`: from its options to a printed and written law.

The options give a rule and a small world; the law is compared with the target's.
"""

from dataclasses import dataclass, fields
from fractions import Fraction
from typing import cast

import click

from specverify import __version__
from specverify.backends.interception.errors import DecidesTooOften
from specverify.laws.enumeration import LawQuery, enumerate_law
from specverify.laws.world_file import WrittenWorld, read
from specverify.laws.world_options import (
    Tables,
    exact_number,
    fitting_tokens,
    full_tree,
    parse_law,
    parse_numbers,
    shape_of,
)
from specverify.reference.malformed import Malformed
from specverify.reference.oracle.tree_growth import STOPS, DraftStop
from specverify.reference.rules import PLAIN, RULES, THRESHOLDS, Rule
from specverify.reference.tree import Shape
from specverify.reports.pages.law import (
    LawFacts,
    UnknownLaw,
    law_page,
    law_records,
    law_table,
    page_without_law,
    record_without_law,
)
from specverify.setup.errors import UnusableInput
from specverify.setup.files import Outputs


@dataclass(frozen=True)
class Options:
    """The options as typed; None and False mean that an option was not typed."""

    rule: str | None = None
    p: str | None = None
    q: str | None = None
    draws: str | None = None
    siblings: int | None = None
    depth: int | None = None
    tree: str | None = None
    tokens: str | None = None
    threshold_single: str | None = None
    threshold_acc: str | None = None
    epsilon: str | None = None
    delta: str | None = None
    weight: str | None = None
    entropy: str | None = None
    window: str | None = None
    acceptance_rate: str | None = None
    world: str | None = None
    stop_below: str | None = None
    stop: str | None = None
    soft_q: bool = False
    user_rule: str | None = None
    torch: str | None = None
    claims_lossless: bool = False
    table: bool = False
    picture: bool = False
    max_runs: int | None = None

    def typed(self, *skipped: str) -> list[str]:
        """The typed options, in the spelling of the command line, except the fields `skipped`."""
        names = {"rule": "RULE", "user_rule": "--rule"}
        typed = [field.name for field in fields(self) if getattr(self, field.name) not in (None, False)]
        return [names.get(name, f"--{name.replace('_', '-')}") for name in typed if name not in skipped]


def law(options: Options, outputs: Outputs) -> int:
    """Enumerate the law, print it and write it; return exit code 1 if a promise is broken, else 0."""
    try:
        laws = laws_of(options)
    except DecidesTooOften as why:
        unknown = UnknownLaw(options.torch or "", str(why), why.shared_numbers, options.claims_lossless)
        page = page_without_law(unknown)
        outputs.write(page.removesuffix("\n"), record_without_law(unknown), lambda: _html_page(unknown))
        return 1
    page = law_table(laws) if options.table else law_page(laws[0], options.picture)
    outputs.write(page.removesuffix("\n"), law_records(laws), lambda: _html_page(laws))
    return 1 if any(facts.is_broken for facts in laws) else 0


def _html_page(laws: list[LawFacts] | UnknownLaw) -> bytes:
    from specverify.reports.html import law as html

    if isinstance(laws, UnknownLaw):
        return html.page_without_law(laws, __version__)
    return html.law_page(laws, __version__)


def laws_of(options: Options) -> list[LawFacts]:
    """The laws that the options ask for: all built-in rules on standard worlds, or one.

    Raises:
        UsageError, UnusableInput: The options do not fit together, or describe no world.
    """
    if options.table:
        from specverify.laws.standard_worlds import standard_laws

        typed_options = options.typed("table")
        if typed_options:
            raise click.UsageError(f"--table has rules and worlds of its own: leave out {', '.join(typed_options)}")
        return standard_laws()
    return [_sampler_law(options, options.torch) if options.torch is not None else _rule_law(options)]


def _sampler_law(options: Options, name: str) -> LawFacts:
    """The facts about a sampler written in torch."""
    from specverify.laws.torch_sampler import torch_law  # brings torch

    typed_options = options.typed("torch", "p", "q", "world", "claims_lossless", "picture", "max_runs")
    if typed_options:
        raise click.UsageError(f"--torch has a tree and a rule of its own: leave out {', '.join(typed_options)}")
    return torch_law(name, _world(options).tables, options.claims_lossless, options.max_runs)


def _rule_law(options: Options) -> LawFacts:
    """The facts about the one rule that the options name."""
    if (options.rule is None) == (options.user_rule is None):
        choices = f"RULE ({', '.join(RULES)}) or --rule pkg.module:function, or --torch pkg.module:function"
        raise click.UsageError(f"give {choices}{', not both' if options.rule else '; or --table'}")
    if options.claims_lossless and options.user_rule is None:
        raise click.UsageError("--claims-lossless is for --rule and --torch: the built-in rules declare what they are")
    world = _world(options)
    thresholds = {**world.thresholds, **_thresholds(options)}
    try:
        # Annotated as floats, but rules only compare and divide thresholds; fractions keep the law exact.
        rule = Rule(options.rule or PLAIN, **{name: cast(float, value) for name, value in thresholds.items()})
    except Malformed as why:
        raise UnusableInput(f"{why.path}: {why.why}") from None
    # Only a built-in rule declares which trees it verifies.
    refused = rule.refuses(world.tables.shape.branches) if options.user_rule is None else None
    if refused is not None:
        raise UnusableInput(f"{refused}, or give --siblings 1")
    # The order of precedence: the command line, the world file, the soft q, the rule as published.
    draws = options.draws or world.draws or ("top-k" if options.soft_q else rule.promise.draws)
    if world.tables.tokens is not None and (options.draws is not None or options.soft_q):
        raise click.UsageError("--draws and --soft-q mean nothing where tokens are given: none is drawn")
    if options.soft_q and (draws != "top-k" or len(world.tables.drafts) > 1):
        raise click.UsageError("--soft-q needs --draws top-k and one draft: drawn tokens have the soft q already")
    return enumerate_law(
        LawQuery(
            rule,
            world.tables,
            draws,
            _in_words(rule, thresholds, options),
            options.soft_q,
            options.user_rule,
            options.claims_lossless,
            _stop(options, world),
        ),
        options.max_runs,
    )


def _stop(options: Options, world: WrittenWorld) -> DraftStop | None:
    """The confidence at which drafting ends, if the options name one."""
    if options.stop_below is None:
        if options.stop is not None:
            raise click.UsageError("--stop says when a confidence is compared: give it with --stop-below")
        return None
    if world.tables.tokens is not None:
        raise click.UsageError("--stop-below means nothing where tokens are given: none is drawn")
    if options.soft_q:
        raise click.UsageError("--stop-below and --soft-q are two reasons for another law: give one of them")
    least = exact_number(options.stop_below, "--stop-below")
    if not 0 < least <= 1:
        raise UnusableInput(f"--stop-below: {options.stop_below} is not a probability (above 0, at most 1)")
    return DraftStop(least, options.stop or STOPS[0])


def _world(options: Options) -> WrittenWorld:
    """The world that the options describe, or the file they name."""
    if options.world is not None:
        clash = [
            name for name in ("p", "q", "siblings", "depth", "tree", "tokens") if getattr(options, name) is not None
        ]
        if clash:
            raise click.UsageError(f"--world has it all: leave out {', '.join(f'--{name}' for name in clash)}")
        return read(options.world)
    if options.tree is not None and (options.siblings or options.depth):
        raise click.UsageError("--tree says it all: leave out --siblings and --depth")
    shape = _shape(options)
    if options.p is None and options.q is None:
        # The same pair as in `--table`, designed to tell rules apart.
        from specverify.laws.standard_worlds import HEAVY_EXACT

        p, q = HEAVY_EXACT
    elif options.p is None or (options.q is None and options.tokens is None):
        raise click.UsageError("--p and --q come together (--q alone may be missing where --tokens are given)")
    else:
        p = parse_law(options.p, "--p")
        q = p if options.q is None else parse_law(options.q, "--q")
        if len(p) != len(q):
            raise UnusableInput(f"--p has {len(p)} probabilities and --q {len(q)}: give one for each token to both")
    tokens = None
    if options.tokens is not None:
        tokens = fitting_tokens(parse_numbers(options.tokens, "--tokens"), shape, len(p), "--tokens")
    return WrittenWorld(Tables(shape, {(): p}, ({(): q},), tokens), None, {})


def _shape(options: Options) -> Shape:
    if options.tree is not None:
        return shape_of(parse_numbers(options.tree, "--tree"), "--tree")
    chain = options.rule is not None and RULES[options.rule].chains_only
    if options.siblings is None and options.depth is None:
        return Shape((0, 0, 1) if chain else (0, 0, 0, 1, 1))
    return full_tree(options.siblings or (1 if chain else 2), options.depth or 1)


def _thresholds(options: Options) -> dict[str, Fraction]:
    typed = {name: getattr(options, name) for name in THRESHOLDS if getattr(options, name) is not None}
    for name in typed:
        if options.rule is not None and name not in RULES[options.rule].thresholds:
            raise click.UsageError(f"--{name.replace('_', '-')} means nothing to the rule {options.rule}")
    return {name: exact_number(text, f"--{name.replace('_', '-')}") for name, text in typed.items()}


def _in_words(rule: Rule, thresholds: dict[str, Fraction], options: Options) -> str:
    """The settings in words: the thresholds that the rule reads, and whether the soft q is handed over."""
    heeded = THRESHOLDS if options.user_rule is not None else rule.promise.thresholds
    parts = [f"{name} {thresholds[name]}" for name in heeded if name in thresholds]
    if options.stop_below is not None:
        parts.append(STOP_WORDS[options.stop or STOPS[0]].format(options.stop_below))
    return ", ".join(parts + (["soft q handed over"] if options.soft_q else []))


STOP_WORDS = {
    "before": "no children where no token of the draft reaches {}",
    "after": "no children below a drawn token below {}",
    "drop": "no drawn token below {}",
}
"""The settings of `--stop-below` in words, by `--stop`."""
