"""The page that compares an acceptance rule's law with the target's law."""

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from rich.bar import Bar
from rich.console import Group
from rich.table import Table
from rich.text import Text

from specverify.reference.oracle.acceptance import Row
from specverify.reference.oracle.coin_source import Number
from specverify.reference.oracle.law import Bias
from specverify.reference.oracle.tree_growth import Path
from specverify.reports.format import clean, number, plural
from specverify.reports.layout80 import MARGIN, WIDTH, indent, label_rows, plain_text, wrapping_text

MOST_ROWS = 12
"""The most tokens of a law that are printed: the most different probabilities first, then the likeliest."""

WORST = 3
"""The number of contexts that are named."""

EXACT = 18
"""The longest fraction, in characters, that is printed beside its decimal."""

ADVICE = "the same random numbers decide twice: give each purpose draws of its own, by another seed or one generator"
"""The way out, where random numbers decide twice."""

DIGITS = 10_000
"""The most bits of a fraction in JSON; Python refuses to write integers of many more digits."""


@dataclass(frozen=True)
class LawFacts:
    """The facts about one rule.

    Attributes:
        rule: The name of the rule.
        setting: Thresholds and other settings of the rule, in words.
        draws: How the draft chose siblings, in words.
        tree: The tree, in words.
        promise: Whether the rule declares to be lossless in this setting; None where it declares nothing.
        condition: The conditions of that declaration; empty where there are none.
        source: The publication of the rule.
        why: The reason why the promise does not hold here, where it is known.
        biased: Whether the law differs from the target's.
        exact: Whether the law is known in fractions.
        total_variation: The total variation of the completed law from the target's.
        expected: Tokens emitted per step.
        height: The largest number of tokens in a step.
        cells: The number of blocks that can be emitted.
        evaluations: The number of runs of the rule.
        biases: The law after each emitted prefix, the most biased first.
        world: The world of tables that was measured; the worst of them, where there were several.
        shared: The random numbers that decide twice, each with both places in the code.
    """

    rule: str
    setting: str
    draws: str
    tree: str
    promise: bool | None
    condition: str
    source: str
    sentence: str
    why: str
    biased: bool
    exact: bool
    total_variation: Number
    expected: Number
    height: int
    cells: int
    evaluations: int
    biases: tuple[Bias, ...]
    world: str = ""
    shared_draws: tuple[str, ...] = ()

    @property
    def is_broken(self) -> bool:
        """Whether the rule breaks its promise to be lossless, or loses by random numbers that decide twice."""
        return self.biased and (self.promise is True or bool(self.shared_draws))

    @property
    def verdict(self) -> str:
        """The comparison of law and promise in a few words."""
        if self.is_broken and not self.promise:
            return "BROKEN, nothing claimed"
        if self.promise is None:
            return f"{'LOSSY' if self.biased else 'LOSSLESS'}, nothing claimed"
        if self.is_broken:
            return "BROKEN PROMISE"
        if self.biased:
            return "LOSSY as declared"
        return "LOSSLESS as declared" if self.promise else "LOSSLESS here, though not declared"

    @property
    def first_token(self) -> Bias:
        """The law of the first token."""
        return next(bias for bias in self.biases if bias.context == ())

    @property
    def worst_biases(self) -> list[Bias]:
        """The prefixes that contribute to the bias, the worst first; none where there is no bias."""
        return [bias for bias in self.biases if bias.weight > 1e-12] if self.biased else []


def law_page(facts: LawFacts, picture: bool) -> str:
    """One law on one page: first token, total variation, the contexts that cause it, and bars if `picture`."""
    head = f"{clean(facts.rule)}{f'  {facts.source}' if facts.source else ''}"
    setting = [("", facts.sentence)] if facts.sentence else []
    setting += [("draws", facts.draws), ("tree", facts.tree)]
    setting += [("setting", facts.setting)] if facts.setting else []
    parts = [plain_text(wrapping_text(head)) + label_rows(setting), _probabilities(facts.first_token)]
    if picture:
        parts.append(_bars(facts.first_token))
        parts += [_bars(bias) for bias in facts.worst_biases[:1] if bias.context != ()]
    parts.append(label_rows(result_rows(facts)))
    parts.append(plain_text(wrapping_text(f"{facts.verdict}  {verdict_reason(facts)}")))
    return "\n".join(parts)


def result_rows(facts: LawFacts) -> list[tuple[str, str]]:
    """Labelled facts: the distance of the law, its tokens per step, and where its bias comes from."""
    distance = facts.total_variation
    law_text = f"total variation {_number_text(distance)} from the target's law of {plural(facts.height, 'token')}"
    if not facts.exact:
        law_text += " (computed in floats)"
    rows = [("law", law_text)]
    rows.append(("tokens", f"{_number_text(facts.expected)} per step, of {facts.height} at most"))
    worst = facts.worst_biases
    sentences = [bias_words(bias) for bias in worst[:WORST]]
    if len(worst) > WORST:
        sentences.append(f"and {plural(len(worst) - WORST, 'more context')} with less")
    rows += [("where from" if i == 0 else "", line) for i, line in enumerate(sentences)]
    if not worst:
        rows.append(("where from", "nowhere: whatever was emitted, the next token has the target's law"))
    rows += [("decides twice" if i == 0 else "", line) for i, line in enumerate(facts.shared_draws)]
    rows.append(("enumerated", f"{plural(facts.evaluations, 'run')} of the rule, {plural(facts.cells, 'block')}"))
    return rows


def verdict_reason(facts: LawFacts) -> str:
    """The reason behind `LawFacts.verdict`, in a phrase."""
    if facts.why:
        return facts.why
    condition = f" on this condition: {facts.condition}" if facts.condition else ""
    if facts.is_broken and facts.shared_draws:
        return ADVICE
    if facts.promise is None:
        return "--claims-lossless makes this a gate (exit code 1 where it is lossy)"
    if facts.is_broken:
        return f"it promises the target's own law{condition}"
    if facts.promise:
        return f"the target's own law{condition}"
    return f"it promises the target's own law{condition}" if facts.condition else "it promises no law"


def bias_words(bias: Bias) -> str:
    """A context and its most biased token, such as `after tokens 3, token 2 gets .41 where ...`."""
    token = max(range(len(bias.law)), key=lambda candidate: abs(float(bias.law[candidate] - bias.target[candidate])))
    rule_text, target_text = _distinct_texts(bias.law[token], bias.target[token])
    if bias.context == ():
        return f"at the first token, token {token} gets {rule_text} where the target gives {target_text}"
    return (
        f"after tokens {path_words(bias.context)}, token {token} gets {rule_text} where the target gives {target_text}"
        f" (a block goes on from there with probability {number(float(bias.reach))})"
    )


def path_words(context: Path) -> str:
    """The tokens of a context."""
    return " ".join(map(str, context))


def _distinct_texts(a: Number, b: Number) -> tuple[str, str]:
    """Two numbers with as many digits as are needed to tell them apart."""
    for digits in range(3, 17):
        texts = f"{float(a):.{digits}g}", f"{float(b):.{digits}g}"
        if texts[0] != texts[1]:
            break
    return texts


def exact_text(value: Number) -> str | None:
    """A fraction as text; None for a float, and for a fraction too long to write."""
    if isinstance(value, float):
        return None
    fraction = Fraction(value)
    return None if max(fraction.numerator.bit_length(), fraction.denominator.bit_length()) > DIGITS else str(fraction)


def _number_text(value: Number) -> str:
    """A number as a decimal, preceded by its fraction where that is short."""
    decimal, exact = number(float(value)), exact_text(value)
    if exact is None or len(exact) > EXACT or exact == decimal:
        return decimal
    return f"{exact} = {float(value):.6g}"


def tokens_to_show(bias: Bias) -> list[int]:
    """The tokens to print, in the order of their ids."""
    gaps = [abs(float(rule_p - target_p)) for rule_p, target_p in zip(bias.law, bias.target, strict=True)]
    ranked = sorted(range(len(gaps)), key=lambda token: (-gaps[token], -float(bias.target[token]), token))
    return sorted(ranked[:MOST_ROWS])


def _omission(bias: Bias) -> str:
    num_left_out = len(bias.law) - MOST_ROWS
    return indent(f"{plural(num_left_out, 'token')} more, each less far off\n") if num_left_out > 0 else ""


def _probabilities(bias: Bias) -> str:
    """Target and law of the first token as decimals, and as fractions where all fractions are short."""
    tokens = tokens_to_show(bias)
    fractions = [[exact_text(row[token]) for token in tokens] for row in (bias.target, bias.law)]
    are_short = all(text is not None and len(text) <= EXACT for texts in fractions for text in texts)
    table = Table(box=None, padding=(0, 3, 0, 0), pad_edge=False)
    table.add_column("first token")
    for name in ("target", "law", "law - target", *(["target =", "law ="] if are_short else [])):
        table.add_column(name, justify="right")
    for i, token in enumerate(tokens):
        target_p, rule_p, shift = map(
            float, (bias.target[token], bias.law[token], bias.law[token] - bias.target[token])
        )
        row = [str(token), f"{target_p:.6g}", f"{rule_p:.6g}", f"{shift:+.3g}" if shift else "0"]
        table.add_row(*row, *(str(texts[i]) for texts in fractions if are_short))
    return indent(plain_text(table, width=WIDTH - MARGIN)) + _omission(bias)


def _bars(bias: Bias) -> str:
    """Two bars for each token to one scale, the target's above the law's."""
    tokens = tokens_to_show(bias)
    top = max(float(value) for row in (bias.target, bias.law) for value in row)
    title = "first token" if bias.context == () else f"after tokens {path_words(bias.context)}"
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(justify="right")
    table.add_column()
    table.add_column(width=46)
    table.add_column(justify="right")
    for token in tokens:
        for name, row in (("target", bias.target), ("law", bias.law)):
            value = float(row[token])
            label = str(token) if name == "target" else ""
            table.add_row(Text(label), Text(name), Bar(top, 0, value, width=46), Text(f"{value:.4f}"))
    return indent(plain_text(Group(Text(title), table), width=WIDTH - MARGIN)) + _omission(bias)


def law_table(rows: Iterable[LawFacts]) -> str:
    """One line for each rule and kind of draft, with the largest total variation among the worlds."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in ("rule", "draws", "declared"):
        table.add_column(name, no_wrap=True)
    for name in ("total variation", "cells", "runs"):
        table.add_column(name, justify="right", no_wrap=name != "total variation")
    conditions: dict[str, str] = {}
    for facts in rows:
        draws = ", ".join(part for part in (facts.draws, facts.setting) if part)
        declared = "BROKEN" if facts.is_broken else "lossless" if facts.promise else "lossy"
        if facts.condition:
            conditions[facts.rule] = facts.condition
            declared += " *"
        distance = "0" if facts.total_variation == 0 else f"{float(facts.total_variation):.3g}"
        cells = (facts.rule, draws, declared, distance, str(facts.cells), str(facts.evaluations))
        table.add_row(*(Text(cell) for cell in cells))
    notes = [f"* {rule} is lossless on this condition: {condition}" for rule, condition in conditions.items()]
    return plain_text(table) + "\n" + "".join(plain_text(wrapping_text(note)) for note in notes)


def law_record(facts: LawFacts) -> dict[str, Any]:
    """The facts as one JSON object."""
    return {
        "rule": facts.rule,
        "setting": facts.setting,
        "draws": facts.draws,
        "world": facts.world,
        "tree": facts.tree,
        "lossless": facts.promise is True,
        "condition": facts.condition,
        "verdict": facts.verdict,
        "exact": facts.exact,
        "total_variation": float(facts.total_variation),
        "total_variation_exact": exact_text(facts.total_variation),
        "expected_tokens": float(facts.expected),
        "cells": facts.cells,
        "evaluations": facts.evaluations,
        "first_token": {"law": _floats(facts.first_token.law), "target": _floats(facts.first_token.target)},
        "where_from": [_context(bias) for bias in facts.worst_biases[:WORST]],
        "decides_twice": list(facts.shared_draws),
    }


@dataclass(frozen=True)
class UnknownLaw:
    """A sampler whose random numbers decide several times, in a way whose joint law is not known.

    Attributes:
        rule: The name of the sampler.
        why: The decision behind which nothing is known.
        shared: The random numbers that decide twice, each with both places in the code.
        promise: Whether it claims to be lossless.
    """

    rule: str
    why: str
    shared_draws: tuple[str, ...]
    promise: bool

    @property
    def verdict(self) -> str:
        """The finding in a few words."""
        return "BROKEN PROMISE" if self.promise else "BROKEN, nothing claimed"


def page_without_law(facts: UnknownLaw) -> str:
    """The page of a sampler that has no law."""
    rows = [("decides twice" if i == 0 else "", line) for i, line in enumerate(facts.shared_draws)]
    rows.append(("law", f"none: {facts.why}"))
    head = plain_text(wrapping_text(clean(facts.rule)))
    verdict = plain_text(wrapping_text(f"{facts.verdict}  {ADVICE}"))
    return f"{head}{label_rows(rows)}\n{verdict}"


def record_without_law(facts: UnknownLaw) -> dict[str, Any]:
    """A sampler without a law as `--json` writes it: a list with one record."""
    record = {
        "rule": facts.rule,
        "lossless": facts.promise,
        "verdict": facts.verdict,
        "total_variation": None,
        "why": facts.why,
        "decides_twice": list(facts.shared_draws),
    }
    return {"rules": [record]}


def _context(bias: Bias) -> dict[str, Any]:
    return {
        "context": list(bias.context),
        "reach": float(bias.reach),
        "total_variation": float(bias.total_variation),
        "law": _floats(bias.law),
        "target": _floats(bias.target),
        "words": bias_words(bias),
    }


def _floats(row: Row) -> list[float]:
    return [float(value) for value in row]


def law_records(rows: Iterable[LawFacts]) -> dict[str, Any]:
    """The facts of all rules, as `--json` writes them."""
    return {"rules": [law_record(facts) for facts in rows]}
