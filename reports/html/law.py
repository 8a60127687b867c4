"""The page of `law`: an acceptance rule's law beside the target's, as bars."""

from collections.abc import Sequence
from typing import Any

from specverify.reference.oracle.law import Bias
from specverify.reports.format import cut, number, plural
from specverify.reports.html.document import render_page
from specverify.reports.html.pictures.bars import Bars, comparison_bars
from specverify.reports.pages.law import (
    ADVICE,
    LawFacts,
    UnknownLaw,
    path_words,
    result_rows,
    tokens_to_show,
    verdict_reason,
)

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
    broken_laws = [facts for facts in laws if facts.is_broken]
    outcome = "differ" if broken_laws else "agree"
    single = laws[0] if len(laws) == 1 else None
    facts = {
        "title": f"Law of {cut(single.rule, 80)}" if single else "Laws of acceptance rules",
        "version": version,
        "outcome": "plain" if single is not None and single.biased and not single.is_broken else outcome,
        "word": single.verdict if single else f"{plural(len(laws), 'law')}",
        "verdict": _verdict(single) if single else _verdict_of_all(laws, broken_laws),
        "what": WHAT,
        "one": None if single is None else _law_facts(single),
        "laws": [_row(facts) for facts in laws] if single is None else [],
        "todo": _advice(single) if single else "",
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
        key=lambda candidate: abs(float(facts.first_token.law[candidate]) - float(facts.first_token.target[candidate])),
    )
    rule_p, target_p = float(facts.first_token.law[token]), float(facts.first_token.target[token])
    shift = (
        f": token {token} comes with probability {rule_p:.4g} where the target gives {target_p:.4g}"
        if rule_p != target_p
        else ""
    )
    return f"The rule {name} does not give the target's probabilities, which it {promise}{shift}."


def _verdict_of_all(laws: Sequence[LawFacts], broken_laws: list[LawFacts]) -> str:
    if broken_laws:
        names = ", ".join(dict.fromkeys(cut(facts.rule, 60) for facts in broken_laws))
        return f"{plural(len(broken_laws), 'law')} of {len(laws)} break a promise: {names}."
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
    shift = float(facts.first_token.law[token] - facts.first_token.target[token])
    return f"{shift:+.3g}" if shift else "0"


def _chart(bias: Bias) -> Bars:
    tokens = tokens_to_show(bias)
    rows = [(f"token {token}", float(bias.target[token]), float(bias.law[token])) for token in tokens]
    num_left_out = len(bias.law) - len(tokens)
    reach = "" if bias.context == () else f"A block goes on from there with probability {number(float(bias.reach))}. "
    note = f"{reach}Exact: nothing was sampled." + (
        f" {plural(num_left_out, 'token')} more, each less far off." if num_left_out else ""
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
