"""The English account of each finding: expectation and observation in sentences."""

from collections.abc import Callable, Mapping
from typing import Any

from specverify.properties.tolerance.mask_column import EXTRA, MISSING
from specverify.properties.verdict.finding import ASKED_BY, COMPLETES, FINISHED, STAGE_UNKNOWN, Finding
from specverify.reference.trace import Stage
from specverify.reports.format import address, clean, coordinate, coordinate_words, excess, expected_and_observed, show
from specverify.reports.invariant_sentences import PLAIN
from specverify.reports.layer_words import hiding_words, showing_words, special_words
from specverify.reports.tree_scene import Scene, position_of

Sentence = str | Callable[["SentenceNames"], str]
"""A sentence with names in braces, or a function that chooses the sentence for a finding."""


class SentenceNames(dict[str, str]):
    """The names that a sentence may use: each coordinate, and `expected`, `observed`, `row` and `by`.

    A coordinate that the finding lacks reads as something indefinite ("a node"), so that every sentence fits every
    finding. `used` collects the coordinates that a sentence has named.
    """

    def __init__(self, finding: Finding, scene: Scene) -> None:
        super().__init__()
        self.finding = finding
        self.scene = scene
        self.used_coordinates: set[str] = set()

    def __missing__(self, key: str) -> str:
        # `str.format_map` asks here for each name that is not filled in yet.
        where: Mapping[str, Any] = self.finding.where
        if key in ("expected", "observed"):
            return expected_and_observed(self.finding)[key == "observed"]
        if key == "by":
            return f" ({excess(self.finding)})" if self.finding.measure is not None else ""
        if key == "which":
            return self._column_meaning()
        # A finding carries its row or its node; a sentence that names the other one reads the one that is there.
        if key == "row":
            key = "node" if "node" in where and "row" not in where else "row"
        elif key == "node":
            key = "row" if "row" in where and "node" not in where else "node"
        elif key == "slot":
            key = "position" if "position" in where and "slot" not in where else "slot"
        if key in where:
            self.used_coordinates.add(key)
            return coordinate(key, where[key])
        return {"kind": "key or value", "cache": "target cache", "variant": "the variant"}.get(key, f"a {key}")

    def _column_meaning(self) -> str:
        """The meaning of the finding's column, in brackets: a position of the context, or a node of the tree."""
        column, tree = self.finding.where.get("column"), self.scene.tree
        if not isinstance(column, int) or self.scene.context is None or tree is None:
            return ""
        node = column - self.scene.context
        return f" (position {column} of the context)" if node < 0 else f" (node {node})" if node < len(tree) else ""

    def limit(self, is_seen: bool) -> str:
        """Why the row may not see the finding's column, or with `is_seen` why it must: `, outside the window of 4 ...`.

        Empty where no window and no chunk decides it.
        """
        where, case = self.finding.where, self.scene.case
        layer, column = where.get("layer"), position_of(self.scene, where.get("column"))
        node = where.get("node", where.get("row"))
        if case is None or not isinstance(layer, int) or column is None or not isinstance(node, int):
            return ""
        row = position_of(self.scene, (self.scene.context or 0) + node)
        if row is None:
            return ""
        hidden = hiding_words(case.model, layer, row, column)
        reason = "" if is_seen and hidden else showing_words(case.model, layer) if is_seen else hidden
        if reason:
            self.used_coordinates.add("layer")
        return f", {reason}" if reason else ""

    def layer_specials(self) -> str:
        """What is special in the attention of the finding's layer, as a sentence of its own; empty for a plain one."""
        layer, case = self.finding.where.get("layer"), self.scene.case
        if case is None or not isinstance(layer, int):
            return ""
        words = special_words(case.model, layer)
        return f" Its layer {layer} has {', '.join(word.split(' in layer')[0] for word in words)}." if words else ""

    def truth(self) -> tuple[bool, bool] | None:
        """Expected and observed as bools, where both say whether a cell is visible; otherwise None."""
        pair = [show(value) for value in (self.finding.expected, self.finding.observed)]
        truth_values = {"visible": True, "true": True, "hidden": False, "false": False}
        return (truth_values[pair[0]], truth_values[pair[1]]) if all(value in truth_values for value in pair) else None


def _mask_sentence(names: SentenceNames) -> str:
    """The sentence about a mask cell that is wrong."""
    truth = names.truth()
    if truth == (False, True) and (limit := names.limit(is_seen=False)):
        return f"The mask lets {{row}} see {{column}}{limit}."
    if truth == (False, True):
        return "The mask lets {row} see {column}, which is neither in its committed context nor one of its ancestors."
    if truth == (True, False):
        return "The mask hides {column} from {row}, though it belongs to its context."
    return "The mask of {row} is not its committed context plus its ancestors and itself."


def _visibility_sentence(names: SentenceNames) -> str:
    """The sentence about a column that the transparent probe found attended, or not attended."""
    truth = names.truth()
    if truth == (False, True):
        limit = names.limit(is_seen=False)
        return (
            f"{{Node}} attended to {{column}}, which it may not see{limit}: the transparent probe shows it in its "
            "logits."
        )
    if truth == (True, False):
        limit = names.limit(is_seen=True)
        return (
            f"{{Node}} did not attend to {{column}}, which it must see{limit}: the transparent probe finds no trace of "
            "it."
        )
    return "{Node} did not attend to exactly the rows it may see, read off the transparent probe."


def _context_sentence(names: SentenceNames) -> str:
    """The sentence about attention or a forward that differs from the path's own from-scratch result."""
    cause = names.finding.where.get("cause")
    if names.finding.stage is Stage.ATTENDED and cause in (EXTRA, MISSING):
        names.used_coordinates.add("cause")
        limit = names.limit(is_seen=cause == MISSING)
        if cause == EXTRA:
            return (
                f"{{Node}} attended to {{column}}{{which}}, which it may not see{limit}: "
                "that alone explains its output{by}."
            )
        return (
            f"{{Node}} did not attend to {{column}}{{which}}, which it must see{limit}: "
            "that alone explains its output{by}."
        )
    subject = (
        "What attention returned for" if names.finding.stage is Stage.ATTENDED else "What the forward computed for"
    )
    return (
        f"{subject} {{node}} is not what its own path gives from scratch{{by}}: it saw something else, or went wrong."
        f"{names.layer_specials()}"
    )


def _fast_commit_sentence(names: SentenceNames) -> str:
    """The sentence about a fast commit that differs from the full one."""
    if names.finding.stage is Stage.EMITTED:
        return "With a faster commit the output is {observed} instead of {expected}."
    return (
        "The faster commit left another {kind} at {slot} than gathering the whole cache by the accepted path does{by}."
    )


def _commit_sentence(names: SentenceNames) -> str:
    """The sentence about committed keys or values that are not those of the accepted path."""
    if names.scene.writer_rejected:
        return f"Node {names.scene.writer} was rejected, and it was the one that wrote {{slot}}. " + (
            "After the commit, the {kind} there is not that of the accepted path{by}."
        )
    return (
        "After the commit, the {kind} at {slot} of the {cache} is not that of decoding the accepted tokens alone{by}."
    )


def _draft_logits_sentence(names: SentenceNames) -> str:
    """The sentence about a draft whose scores differ; in the first step it had no state that could have drifted."""
    reason = "its numbers are wrong from its first step on" if names.finding.step == 0 else "its state has drifted"
    if names.finding.where.get("side") != "logits":
        return (
            "The draft, run step by step on its own cache, scores {node} otherwise than from scratch{by}: "
            f"{reason}."
        )
    return (
        "At {node} the draft, run step by step on its own cache, scores {token} {observed}; from scratch it scores it "
        f"{{expected}}{{by}}: {reason}."
    )


SENTENCES: dict[str, Sentence] = {
    **PLAIN,
    "structure.mask-is-ancestry": _mask_sentence,
    "attention.context-exact": _context_sentence,
    "attention.visibility-exact": _visibility_sentence,
    "cache.commit-equivalence": _commit_sentence,
    "cache.fast-equals-full": _fast_commit_sentence,
    "draft.fidelity": _draft_logits_sentence,
}
"""A sentence, or the function that chooses one, for each invariant of this project.

Names in braces are keys of SentenceNames; a capital marks the beginning of a sentence.
"""

SIDES: dict[tuple[str, str], Sentence] = {
    ("structure.positions-are-depth", "slot"): (
        "The slot that {row} writes is not its own past the committed tokens: expected {expected}, got {observed}."
    ),
    ("structure.validity-closed", "rows"): "The backend lowered the tree to {observed} instead of {expected}.",
    ("attention.context-exact", "control"): (
        "Even without speculation the backend is further from the reference ({observed}) than its dtype explains "
        "({expected}): its plain decode is at fault."
    ),
    ("acceptance.greedy-walk", "bonus"): (
        "After {node}, where the walk ends, the arg-max is token {expected}; the backend chose {observed}."
    ),
    ("acceptance.coins-once", "output"): (
        "Changing only coins that decided nothing changed the output from {expected} to {observed}."
    ),
    ("acceptance.streams-disjoint", "coin"): (
        "What each random number decides must be {expected}; the step made {observed}."
    ),
    ("acceptance.sampled-walk", "bonus"): (
        "After {node}, where the walk ends, the bonus coin draws token {expected}; the backend emitted {observed}."
    ),
    ("acceptance.proposal-consistent", "token"): (
        "By its coin and the law that the verifier is told of, {node} carries token {expected}; it carries {observed}."
    ),
    ("acceptance.support", "length"): "The step emitted {observed} tokens; its accepted path allows {expected}.",
    ("acceptance.path-in-tree", "tokens"): (
        "The accepted path and the bonus are tokens {expected}; the step emitted {observed}."
    ),
    ("acceptance.chain-degenerate", "fallback"): (
        "A chain can be committed by its length alone, but the backend fell back: {observed}."
    ),
    ("cache.commit-equivalence", "length"): (
        "After the commit the {cache} holds {observed} tokens; those committed so far are {expected}."
    ),
    ("cache.commit-equivalence", "between"): (
        "When the next step began, the {kind} at {slot} of the {cache} was no longer what the commit had left there, "
        "nor that of decoding the accepted tokens alone: {observed} instead of {expected}{by}."
    ),
    ("cache.recurrent-rows", "prefill"): (
        "When the first step began, the {kind} of {layer} was {observed}; running the tokens before it in sequence "
        "leaves {expected}{by}."
    ),
    ("cache.recurrent-equivalence", "between"): (
        "Before the next step, the {kind} of {layer} was {observed}; the emitted tokens leave {expected}{by}."
    ),
    ("cache.fast-equals-full", "way"): "The step asked for {expected}; it was committed otherwise: {observed}.",
    ("cache.untouched-slots", "length"): (
        "The step did not leave the committed length as it must: expected {expected}, got {observed}."
    ),
    ("draft.hidden-state-descriptor", "descriptor"): (
        "The draft's weights read the {expected}; the engine gave it the {observed}."
    ),
    ("draft.hidden-state-descriptor", "rows"): (
        "Before this step the draft's head had to run {expected} on the target's states; it ran {observed}."
    ),
    ("draft.hidden-state-descriptor", "beside"): (
        "Beside the target's state at {position} the head was given token {observed}; the token after that state is "
        "{expected}."
    ),
    ("draft.hidden-state-descriptor", "scored"): (
        "The hidden state that the verify forward handed over for {node} is not the one that the draft's descriptor "
        "names: expected {expected}, got {observed}{by}."
    ),
    ("draft.fidelity", "root"): "The root of the tree carries token {observed}; the pending token is {expected}.",
    ("draft.fidelity", "tree"): "The draft proposed {observed}; from scratch it proposes {expected}.",
    (
        "draft.fidelity",
        "token",
    ): "{Node} carries token {observed}; from scratch the draft proposes {expected}{by}.",
    ("draft.fidelity", "logits"): _draft_logits_sentence,
    ("draft.fidelity", "confidence"): (
        "The draft's confidence head gives what follows {node} the log-probability {observed}; by its definition it "
        "gives {expected}{by}."
    ),
    ("draft.rollback", "logits"): (
        "After its rejected nodes were rolled back, the draft scores {token} {observed} at {node}; a draft that never "
        "saw them scores it {expected}{by}."
    ),
    ("draft.switched", "logits"): (
        "At {node} the draft that the request switched to scores {token} {observed}; from scratch it scores it "
        "{expected}{by}."
    ),
    ("draft.switched", "root"): "The root of the tree carries token {observed}; the pending token is {expected}.",
    ("draft.switched", "tree"): "The request drafted {observed}; the draft switched to proposes {expected}.",
    ("draft.switched", "token"): (
        "{Node} carries token {observed}; the draft switched to proposes {expected} from scratch{by}."
    ),
    ("draft.shared", "root"): "The root of the tree carries token {observed}; the pending token is {expected}.",
    ("draft.shared", "tree"): (
        "The request drafted {observed}; by all texts that entered the shared trie it proposes {expected}."
    ),
    ("lossless.logprobs", "prompt"): (
        "The log-probability of {token} at {position} of the prompt is {observed}; the target's is {expected}{by}."
    ),
    ("lossless.logprobs", "prompt length"): "Log-probabilities of the prompt: {expected} are due, {observed} came.",
    ("pair.greedy-match", "logprobs"): (
        "The log-probability of the token at {position} is {observed}; the reference gives that token {expected}{by}."
    ),
    ("pair.greedy-match", "repeated"): (
        "The greedy text leaves the reference's at {position}: token {observed} instead of {expected}. Both sides "
        "repeat it; without log-probabilities a near tie cannot be told from a fault."
    ),
    ("pair.greedy-match", "asked again"): (
        "The greedy text left the reference's at {position}, and asked again the backend did not repeat it: token "
        "{observed} instead of {expected}. That is nondeterminism, not a divergence."
    ),
    ("lossless.grammar-per-node", "mask"): (
        "After the path to {node} the grammar calls {token} {expected}; the backend's mask calls it {observed}."
    ),
    ("lossless.grammar-per-node", "law"): (
        "After the path to {node} {token} is {expected}, but the law gives it a probability of {observed}."
    ),
    ("lossless.grammar-per-node", "path"): (
        "The path to {node} is {expected} by the grammar; the backend takes it for {observed}."
    ),
    ("lossless.grammar-per-node", "output"): (
        "The output leaves the grammar's language at {position}: token {observed} follows where {expected} may."
    ),
    ("lossless.ranks-agree", "lengths"): "Out of step: {rank} accepted {observed} rows, and rank 0 {expected}.",
    ("lossless.ranks-agree", "tokens"): "Out of step: {rank} emitted {observed}, and rank 0 {expected}.",
    ("lossless.ranks-agree", "collectives"): "Out of step: {rank} entered {observed}, and rank 0 {expected}.",
    ("lossless.draft-independent", "finish"): (
        "With another draft the output ends for another reason: {observed} instead of {expected}."
    ),
}
"""The sentence of an invariant for a finding about one particular side of its comparison."""

SHAPE = "What the backend shows for {invariant} has {observed}; tree, model and context give it {expected}."
"""The sentence for records of unequal size."""

BROKEN = "A run that {invariant} asks for did not finish: {observed}."
"""The sentence of an invariant on whose variant of the case the backend broke."""

GENERIC = "{invariant} does not hold: it asks for {expected}, and the backend gave {observed}{by}."
"""The sentence of an invariant that is not one of this project's."""


def reference_name(against: str | None) -> str:
    """The reference of a run in words, from the argument of `--against`; None stands for the NumPy oracle."""
    names = {None: "the oracle", "transformers": "plain transformers"}
    return names.get(against) or f"the backend {clean(str(against))}"


def account(finding: Finding, scene: Scene | None = None, complete: bool = True) -> str:
    """The finding in one or two sentences.

    `complete` adds the stage, the step and the coordinates that the sentence leaves out.
    """
    names = SentenceNames(finding, scene or Scene())
    sentence: Sentence = SENTENCES.get(finding.invariant, GENERIC)
    side = str(finding.where.get("side"))
    if (finding.invariant, side) in SIDES:
        sentence = SIDES[finding.invariant, side]
        names.used_coordinates.add("side")
    elif side == "shape" or str(finding.observed).endswith(" rows"):
        sentence = SHAPE
    asked_by = finding.where.get(ASKED_BY)
    if isinstance(finding.expected, str) and finding.expected == FINISHED:
        sentence = sentence if finding.invariant == COMPLETES and asked_by is None else BROKEN
    template = sentence if isinstance(sentence, str) else sentence(names)
    text = _fill(template, names)
    if not complete:
        return text
    if sentence in (GENERIC, BROKEN):
        return f"{text[:-1]} ({address(finding)})."
    stated_names = names.used_coordinates | ({"side"} if finding.where.get("side") == STAGE_UNKNOWN else set())
    coordinates = coordinate_words(finding.where, without=frozenset(stated_names))
    return f"{text[:-1]} ({coordinates})." if coordinates else text


def _fill(template: str, names: SentenceNames) -> str:
    """The sentence with its names replaced; a capitalised name begins with a capital letter."""
    names["invariant"] = show(names.finding.where.get(ASKED_BY, names.finding.invariant))
    for name in ("row", "node"):
        if f"{{{name.capitalize()}}}" in template:
            word = names[name]
            names[name.capitalize()] = word[:1].upper() + word[1:]
    return template.format_map(names)
