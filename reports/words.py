"""One English account of each finding: what the invariant asks, and what the backend did instead."""

from collections.abc import Callable, Mapping
from typing import Any

from properties.finding import FINISHED, STAGE_UNKNOWN, Finding
from reference.trace import Stage
from reports.scene import Scene
from reports.values import address, coordinate, excess, places, show

Sentence = str | Callable[["Told"], str]


class Told(dict[str, str]):
    """What a sentence may name: each coordinate by its name, and `expected`, `observed`, `row`, `by`.

    A coordinate that the finding lacks reads as something indefinite ("a node"), so that every sentence can be told
    of every finding. `used` collects the coordinates that were named.
    """

    def __init__(self, finding: Finding, scene: Scene) -> None:
        super().__init__()
        self.finding = finding
        self.scene = scene
        self.used: set[str] = set()

    def __missing__(self, key: str) -> str:
        where: Mapping[str, Any] = self.finding.where
        if key in ("expected", "observed"):
            return show(getattr(self.finding, key))
        if key == "by":
            return f" ({excess(self.finding)})" if self.finding.measure is not None else ""
        if key == "row":
            key = "node" if "node" in where and "row" not in where else "row"
        elif key == "node":
            key = "row" if "row" in where and "node" not in where else "node"
        elif key == "slot":
            key = "position" if "position" in where and "slot" not in where else "slot"
        if key in where:
            self.used.add(key)
            return coordinate(key, where[key])
        return {"kind": "key or value", "cache": "target cache", "variant": "the variant"}.get(key, f"a {key}")

    def truth(self) -> tuple[bool, bool] | None:
        """Expected and observed, where both say whether a cell is seen."""
        both = [show(value) for value in (self.finding.expected, self.finding.observed)]
        known = {"visible": True, "true": True, "hidden": False, "false": False}
        return (known[both[0]], known[both[1]]) if all(value in known for value in both) else None


def _mask(told: Told) -> str:
    seen = told.truth()
    if seen == (False, True):
        return "The mask lets {row} see {column}, which is neither in its committed context nor one of its ancestors."
    if seen == (True, False):
        return "The mask hides {column} from {row}, though it belongs to its context."
    return "The mask of {row} is not its committed context plus its ancestors and itself."


def _attended(told: Told) -> str:
    seen = told.truth()
    if seen == (False, True):
        return "{Node} attended to {column}, which it may not see: the transparent probe shows it in its logits."
    if seen == (True, False):
        return "{Node} did not attend to {column}, which it must see: the transparent probe finds no trace of it."
    return "{Node} did not attend to exactly the rows it may see, read off the transparent probe."


def _context(told: Told) -> str:
    what = "What attention returned for" if told.finding.stage is Stage.ATTENDED else "What the forward computed for"
    return f"{what} {{node}} is not what its own path gives from scratch{{by}}: it saw something else, or went wrong."


def _fast(told: Told) -> str:
    if told.finding.stage is Stage.EMITTED:
        return "With a faster commit the output is {observed} instead of {expected}."
    return (
        "The faster commit left another {kind} at {slot} than gathering the whole cache by the accepted path does{by}."
    )


def _committed(told: Told) -> str:
    if told.scene.writer_rejected:
        return f"Node {told.scene.writer} was rejected, and it was the one that wrote {{slot}}. " + (
            "After the commit, the {kind} there is not that of the accepted path{by}."
        )
    return (
        "After the commit, the {kind} at {slot} of the {cache} is not that of decoding the accepted tokens alone{by}."
    )


SENTENCES: dict[str, Sentence] = {
    "structure.parent-range": "The parent of {row} is given as {observed}; it must be {expected}.",
    "structure.depth-consistent": "{Row} is given depth {observed}; its parent puts it at depth {expected}.",
    "structure.validity-closed": (
        "{Row} is wrongly marked as valid or as padding: real rows are valid, and no valid row hangs from padding."
    ),
    "structure.ancestor-table": (
        "The ancestor table names {observed} as the ancestor of {row} at {depth}; walking up its parents gives "
        "{expected}."
    ),
    "structure.mask-is-ancestry": _mask,
    "structure.positions-are-depth": (
        "{Row} is placed at position {observed}; the committed length plus its depth is {expected}."
    ),
    "structure.links-walk-the-tree": (
        "The first-child and next-sibling links do not walk the tree: at {row} they lead to {observed} instead of "
        "{expected}."
    ),
    "attention.context-exact": _context,
    "attention.visibility-exact": _attended,
    "attention.no-leakage": (
        "Changing only what {node} may not see changed its result: something leaks into it from outside its path."
    ),
    "attention.order-equivariant": "The same tree with its rows in another order gave {node} another result{by}.",
    "attention.subtree-removal": "Taking away nodes that {node} cannot see changed its result{by}.",
    "attention.padding-inert": (
        "Padding the tree with empty rows changed {node}{by}: padding must read and write nothing."
    ),
    "attention.prefix-split": (
        "The same tokens, split otherwise between what is cached already and what the forward computes, gave {node} "
        "another result{by}."
    ),
    "acceptance.greedy-walk": (
        "Walking the tree by the arg-max of the backend's own logits accepts {expected}; it accepted {observed}."
    ),
    "acceptance.support": (
        "At {node} the backend chose token {observed}, to which the target gives no probability; it allows {expected}."
    ),
    "acceptance.superset-accepts-no-less": (
        "With further candidates in the tree the accepted path must be {expected}; it was {observed}."
    ),
    "acceptance.chain-degenerate": (
        "On a tree that is a single chain, acceptance must be that of plain speculation, {expected}; it was {observed}."
    ),
    "acceptance.vocabulary-permutation": (
        "Renaming the token ids must rename the outcome to {expected} and change nothing else; it gave {observed}."
    ),
    "acceptance.sampled-walk": (
        "By the coins of the tape, its own laws and its own proposals, the step must accept {expected}; it accepted "
        "{observed}."
    ),
    "acceptance.law-exact": (
        "Over all coins, acceptance of this step's tree gives {block} probability {observed}; its rule "
        "gives it {expected}{by}."
    ),
    "acceptance.law-joint": (
        "Over all coins, on a world of tables drawn for this case, the probability of {token} {context} is "
        "{observed}; it must be {expected}{by}."
    ),
    "acceptance.support-at-edges": (
        "With a coin at the end of its range, {token} was emitted at {position} though its probability is 0."
    ),
    "acceptance.renamed-law": (
        "Renaming the token ids of a world changed its law: {block} has probability {observed} instead "
        "of {expected}{by}."
    ),
    "acceptance.coins-once": ("What each coin decides must be {expected}; {coin} made {observed}."),
    "acceptance.proposal-consistent": (
        "The verifier is told that {node} was drawn with probability {observed} for {token}; it was drawn with "
        "{expected}{by}."
    ),
    "cache.isolation": (
        "The verify forward changed the {kind} at {slot} of the committed cache, which it may only read until the "
        "commit."
    ),
    "cache.commit-equivalence": _committed,
    "cache.untouched-slots": "The step changed the {kind} at {slot}, which it neither wrote nor moved.",
    "cache.fast-equals-full": _fast,
    "cache.stale-unreachable": (
        "Filling free, padded and stale cells with other numbers changed what came out{by}: {observed}. Something "
        "reads a cell that holds nothing."
    ),
    "attention.page-permutation": "The same columns in other pages gave other bits{by}: {observed}.",
    "cache.page-boundary": "The same columns, cut into pages elsewhere, gave other bits{by}: {observed}.",
    "cache.layout-equivalent": "This layout does not give what {expected} gives{by}: {observed}.",
    "attention.batch-mate-independent": (
        "In company the request is not what it is alone: expected {expected}, got {observed}{by}."
    ),
    "lossless.schedule-independent": (
        "With the requests of each batch in another order, the request gave {expected} instead of {observed}."
    ),
    "lossless.interruption-isolated": (
        "What was done to another request changed this one: expected {expected}, got {observed}{by}."
    ),
    "cache.allocator-conserves": "The pages do not add up after this action: expected {expected}, found {observed}.",
    "cache.prefix-reuse": (
        "With a reused prefix the request gave {observed}; computing the prefix anew gives {expected}{by}."
    ),
    "draft.fidelity": (
        "The draft, run step by step on its own cache, scores {node} otherwise than from scratch{by}: its state has "
        "drifted."
    ),
    "draft.rollback": (
        "After its rejected nodes were rolled back, the draft is not as one that never saw them: expected {expected}, "
        "got {observed}{by}."
    ),
    "draft.vocabulary-map": (
        "The draft's own id at {node} stands for target token {expected}, but the node carries {observed}."
    ),
    "lossless.greedy-match": (
        "The output leaves the target's own greedy text at {position}: token {observed} instead of {expected}, and no "
        "near-tie excuses it{by}."
    ),
    "lossless.draft-independent": (
        "Another draft changed the text: at {position} the output is {observed} instead of {expected}; drafts may "
        "change only the speed."
    ),
    "lossless.stops": "The output does not end where the request says: expected {expected}, got {observed}.",
    "lossless.state-isolated": (
        "After another request on the same engine the same case gave {observed} instead of {expected}: state survives "
        "between requests."
    ),
    "lossless.accounting": (
        "The backend's counters do not add up to the steps it shows: expected {expected}, counted {observed}."
    ),
    "lossless.deterministic": "The same case run twice gave {observed} after {expected}: runs must repeat bit for bit.",
    "lossless.processors-per-node": (
        "At {node} the law gives {token} probability {observed}; temperature and processors, seeing that node's own "
        "path, give it {expected}{by}."
    ),
    "lossless.logprobs": (
        "The log-probability reported for {token} at {position} is {observed}; the target's is {expected}{by}."
    ),
    "lossless.distribution": (
        "On its own random numbers, {draws} on a world of tables are not from the law of the rule: the evidence "
        "against it, {side}, is e^{observed}."
    ),
    "lossless.seeded": (
        "The output of {request} must follow from its own seed, {expected}; among other neighbours it was {observed}."
    ),
    "lossless.completes": "The backend did not finish the case, or its own check stopped it: {observed}.",
}
"""A sentence, or what makes one, for each invariant of ours; braces name what Told knows, capitals where it starts."""

SIDES: dict[tuple[str, str], str] = {
    ("structure.positions-are-depth", "slot"): (
        "The slot that {row} writes is not its own past the committed tokens: expected {expected}, got {observed}."
    ),
    ("structure.validity-closed", "rows"): "The backend lowered the tree to {observed} instead of {expected}.",
    ("attention.context-exact", "control"): (
        "Even without speculation the backend is further from the oracle ({observed}) than its dtype explains "
        "({expected}): its plain decode is at fault."
    ),
    ("acceptance.greedy-walk", "bonus"): (
        "After {node}, where the walk ends, the arg-max is token {expected}; the backend chose {observed}."
    ),
    ("acceptance.coins-once", "output"): (
        "Changing only coins that decided nothing changed the output from {expected} to {observed}."
    ),
    ("acceptance.sampled-walk", "bonus"): (
        "After {node}, where the walk ends, the bonus coin draws token {expected}; the backend emitted {observed}."
    ),
    ("acceptance.proposal-consistent", "token"): (
        "By its coin and the law that the verifier is told of, {node} carries token {expected}; it carries {observed}."
    ),
    ("acceptance.support", "length"): "The step emitted {observed} tokens; its accepted path allows {expected}.",
    ("acceptance.chain-degenerate", "fallback"): (
        "A chain can be committed by its length alone, but the backend fell back: {observed}."
    ),
    ("cache.commit-equivalence", "length"): (
        "After the commit the {cache} holds {observed} tokens; those committed so far are {expected}."
    ),
    ("cache.untouched-slots", "length"): (
        "The step did not leave the committed length as it must: expected {expected}, got {observed}."
    ),
    ("draft.fidelity", "root"): "The root of the tree carries token {observed}; the pending token is {expected}.",
    ("draft.fidelity", "tree"): "The draft proposed {observed}; from scratch it proposes {expected}.",
    (
        "draft.fidelity",
        "token",
    ): "{Node} carries token {observed}; from scratch the draft proposes {expected}{by}.",
    ("lossless.draft-independent", "finish"): (
        "With another draft the output ends for another reason: {observed} instead of {expected}."
    ),
}
"""The account where a finding concerns another side of what its invariant compares."""

SHAPE = "What the backend shows for {invariant} has {observed}; tree, model and context give it {expected}."
"""The account of records that have not even the same size."""

BROKEN = "A run that {invariant} asks for did not finish: {observed}."
"""The account of an invariant on whose variant of the case the backend broke."""

GENERIC = "{invariant} does not hold: it asks for {expected}, and the backend gave {observed}{by}."
"""The account of an invariant that is not ours."""


def account(finding: Finding, scene: Scene | None = None, complete: bool = True) -> str:
    """What went wrong, in one or two sentences.

    Args:
        finding: The facts.
        scene: What the trace shows around them, where known.
        complete: Also name the stage, the step and those coordinates that the sentence leaves out.
    """
    told = Told(finding, scene or Scene())
    sentence = SENTENCES.get(finding.invariant, GENERIC)
    side = str(finding.where.get("side"))
    if (finding.invariant, side) in SIDES:
        sentence = SIDES[finding.invariant, side]
        told.used.add("side")
    elif side == "shape" or str(finding.observed).endswith(" rows"):
        sentence = SHAPE
    if isinstance(finding.expected, str) and finding.expected == FINISHED and finding.invariant != "lossless.completes":
        sentence = BROKEN
    template = sentence if isinstance(sentence, str) else sentence(told)
    text = _filled(template, told)
    if not complete:
        return text
    if sentence in (GENERIC, BROKEN):
        return f"{text[:-1]} ({address(finding)})."
    named = told.used | ({"side"} if finding.where.get("side") == STAGE_UNKNOWN else set())
    rest = places(finding.where, without=frozenset(named))
    return f"{text[:-1]} ({rest})." if rest else text


def _filled(template: str, told: Told) -> str:
    told["invariant"] = show(told.finding.invariant)
    for name in ("row", "node"):
        if f"{{{name.capitalize()}}}" in template:
            word = told[name]
            told[name.capitalize()] = word[:1].upper() + word[1:]
    return template.format_map(told)
