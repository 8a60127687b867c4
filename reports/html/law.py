"""The page of `law`: an acceptance rule's law beside the target's, as bars."""

from collections.abc import Sequence
from typing import Any

from reference.oracle.law import Bias
from reports.format import cut, number, plural
from reports.html.document import render_page
from reports.html.pictures.bars import Bars, comparison_bars
from reports.pages.law import ADVICE, LawFacts, UnknownLaw, path_words, result_rows, tokens_to_show, verdict_reason

WHAT = (
    "An acceptance rule decides which drafted tokens become output. A lossless rule emits each token with exactly the "
    "probability that the target model gives it. Here the rule's probabilities are counted out over every course of "
    "its random draws, and held against the target's."
)
"""A law in words, for somebody who never met one."""

CONTEXTS = 3
"""Most contexts, beside the first token, whose law is drawn."""


def law_page(laws: Sequence[LawFacts], version: str) -> bytes:
    """The page of one law, or of the table of all built-in rules."""
    broken = [facts for facts in laws if facts.is_broken]
    outcome = "differ" if broken else "agree"
    one = laws[0] if len(laws) == 1 else None
    facts = {
        "title": f"Law of {cut(one.rule, 80)}" if one else "Laws of acceptance rules",
        "version": version,
        "outcome": "plain" if one is not None and one.biased and not one.is_broken else outcome,
        "word": one.verdict if one else f"{plural(len(laws), 'law')}",
        "verdict": _verdict(one) if one else _verdict_of_all(laws, broken),
        "what": WHAT,
        "one": None if one is None else _law_facts(one),
        "laws": [_row(facts) for facts in laws] if one is None else [],
        "todo": _advice(one) if one else "",
    }
    return render_page("law.html.j2", facts)


def page_without_law(facts: UnknownLaw, version: str) -> bytes:
    """The page of a sampler that has no law."""
    decisions = cut("; ".join(facts.shared_draws), 400)
    page: dict[str, Any] = {
        "title": f"Law of {cut(facts.rule, 80)}",
        "version": version,
        "outcome": "differ",
        "word": facts.verdict,
        "verdict": f"The random numbers of {cut(facts.rule, 120)} decide twice: {decisions}.",
        "what": WHAT,
        "one": None,
        "laws": [],
        "todo": ADVICE,
    }
    return render_page("law.html.j2", page)


def _verdict(facts: LawFacts) -> str:
    name = cut(facts.rule, 120)
    if not facts.biased:
        return f"The rule {name} gives every token exactly the target's probability."
    promise = "promises" if facts.promise else "does not promise"
    token = max(
        range(len(facts.first_token.law)),
        key=lambda at: abs(float(facts.first_token.law[at]) - float(facts.first_token.target[at])),
    )
    got, due = float(facts.first_token.law[token]), float(facts.first_token.target[token])
    shift = f": token {token} comes with probability {got:.4g} where the target gives {due:.4g}" if got != due else ""
    return f"The rule {name} does not give the target's probabilities, which it {promise}{shift}."


def _verdict_of_all(laws: Sequence[LawFacts], broken: list[LawFacts]) -> str:
    if broken:
        names = ", ".join(dict.fromkeys(cut(facts.rule, 60) for facts in broken))
        return f"{plural(len(broken), 'law')} of {len(laws)} break a promise: {names}."
    return f"Every rule keeps what it declares, in {plural(len(laws), 'law')}."


def _advice(facts: LawFacts) -> str:
    if facts.is_broken and facts.shared_draws:
        return f"{ADVICE[0].upper()}{ADVICE[1:]}."
    if facts.is_broken:
        return "Look at how the rule treats the contexts below, the worst first: after each, the bars show which token."
    if facts.biased:
        return "Nothing, if the loss is meant. The bars show which tokens gain and which lose."
    return "Nothing: no token gains or loses."


def _law_facts(facts: LawFacts) -> dict[str, Any]:
    worst = [bias for bias in facts.worst_biases if bias.context != ()][:CONTEXTS]
    return {
        "sentence": facts.sentence,
        "source": facts.source,
        "because": f"{facts.verdict}: {cut(verdict_reason(facts), 400)}",
        "charts": [_chart(facts.first_token), *map(_chart, worst)],
        "rows": [(name, cut(text, 400)) for name, text in _fact_rows(facts)],
        "table": [
            (
                str(token),
                number(float(facts.first_token.target[token])),
                number(float(facts.first_token.law[token])),
                _shift_text(facts, token),
            )
            for token in tokens_to_show(facts.first_token)
        ],
    }


def _fact_rows(facts: LawFacts) -> list[tuple[str, str]]:
    rows = [("draws", facts.draws), ("tree", facts.tree), ("setting", facts.setting), *result_rows(facts)]
    return [(name, text) for name, text in rows if text]


def _shift_text(facts: LawFacts, token: int) -> str:
    off = float(facts.first_token.law[token] - facts.first_token.target[token])
    return f"{off:+.3g}" if off else "0"


def _chart(bias: Bias) -> Bars:
    tokens = tokens_to_show(bias)
    rows = [(f"token {token}", float(bias.target[token]), float(bias.law[token])) for token in tokens]
    left = len(bias.law) - len(tokens)
    reach = "" if bias.context == () else f"A block goes on from there with probability {number(float(bias.reach))}. "
    note = f"{reach}Exact: nothing was sampled." + (
        f" {plural(left, 'token')} more, each less far off." if left else ""
    )
    title = "The first token" if bias.context == () else f"After tokens {path_words(bias.context)}"
    return comparison_bars(title, rows, note)


def _row(facts: LawFacts) -> dict[str, Any]:
    return {
        "rule": cut(facts.rule, 80),
        "draws": cut(", ".join(part for part in (facts.draws, facts.setting) if part), 160),
        "verdict": facts.verdict,
        "off": number(float(facts.total_variation)),
        "counts": (facts.cells, facts.evaluations),
        "broken": facts.is_broken,
        "world": cut(facts.world, 120),
    }
