"""The invariant of guided decoding: the mask at every node, and the output.

The legal tokens are computed from the grammar, byte by byte, for each path anew
(`specverify.reference.oracle.language`). That a masked law is also drawn from exactly is the matter of
`acceptance.law-joint`, whose world then has a grammar.
"""

from collections.abc import Iterator

import numpy as np

from specverify.properties.invariants.applies import step_of_token
from specverify.properties.invariants.own_laws import output_before
from specverify.properties.verdict.finding import Comparisons, Finding
from specverify.properties.verdict.invariant import Fact, Invariant, Oracle, needing
from specverify.properties.verdict.subject import Subject
from specverify.reference.case import Case
from specverify.reference.oracle.language import LegalTokens, legal_after
from specverify.reference.trace import Array, Scored, Stage, Step

NAME = "lossless.grammar-per-node"


def has_grammar(case: Case) -> bool:
    """Whether the request has a grammar."""
    return case.sampling.grammar is not None


def _legal(case: Case, output: tuple[int, ...]) -> LegalTokens:
    assert case.sampling.grammar is not None
    return legal_after(case.sampling.grammar, case.stops.eos, output)


def grammar_per_node(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """Masks and refused nodes are those of each node's own path, laws keep to them, and so does the output."""
    trace = subject(case)
    for number, step in enumerate(trace.steps):
        if step.scored is None or step.drafted is None:
            continue
        for compared, finding in _nodes(case, step, step.scored, number):
            yield Comparisons(compared)
            if finding is not None:
                yield finding
                return
    for position, token in enumerate(trace.output):
        legal = _legal(case, trace.output[:position])
        yield Comparisons()
        if not legal.tokens[token]:
            allowed = tuple(np.flatnonzero(legal.tokens).tolist())
            where: dict[str, int | str] = {"position": position, "token": token, "side": "output"}
            yield Finding(NAME, Stage.EMITTED, step_of_token(trace, position), where, allowed, token)
            return


def _nodes(case: Case, step: Step, scored: Scored, number: int) -> Iterator[tuple[int, Finding | None]]:
    """For each node, how many numbers were compared, and what is wrong."""
    assert step.drafted is not None
    tree = step.drafted.tree
    output = output_before(case, step)
    for node in range(len(tree)):
        true = _legal(case, output + tree.tokens_to(node)[1:])
        compared = 0
        finding = None
        if scored.refused is not None:
            compared += 1
            if bool(scored.refused[node]) != true.refused:
                words = ["legal", "refused"]
                word = words[bool(scored.refused[node])]
                finding = Finding(NAME, Stage.SCORED, number, {"node": node, "side": "path"}, words[true.refused], word)
        if not true.refused:
            for side, row in (("mask", scored.legal), ("law", _tokens_with_mass(scored.law, node, true))):
                if row is None or finding is not None:
                    continue
                # A law may leave legal tokens out, but names no other; a mask names exactly the legal ones.
                allowed = row[node] if side == "mask" else row
                wrong = allowed != true.tokens if side == "mask" else allowed & ~true.tokens
                compared += len(allowed)
                if wrong.any():
                    token = int(wrong.argmax())
                    where: dict[str, int | str] = {"node": node, "token": token, "side": side}
                    words = ["not legal", "legal"]
                    expected = words[bool(true.tokens[token])]
                    observed = words[bool(allowed[token])]
                    finding = Finding(NAME, Stage.SCORED, number, where, expected, observed)
        yield compared, finding


def _tokens_with_mass(law: Array | None, node: int, true: LegalTokens) -> Array | None:
    """The tokens that the law gives any probability; None behind the end of a text, where no law is drawn from."""
    return None if law is None or not true.tokens.any() else law[node] != 0.0


INVARIANTS = (
    Invariant(
        NAME,
        "At every node the grammar allows the tokens that its language allows after the node's own path, and the "
        "output is of the language.",
        needing(Stage.EMITTED),
        grammar_per_node,
        has_grammar,
    ),
)
