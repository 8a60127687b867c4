"""The guide of a request: its matcher, and its masks on a drafted tree."""

from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor

from specverify.backends.base import Unsupported
from specverify.backends.engine.guided.behind_marker import MatcherBehindMarker
from specverify.backends.engine.guided.matcher import Matcher, PlainMatcher
from specverify.reference.grammar import Grammar
from specverify.reference.tree import Shape


@dataclass(frozen=True)
class Masks:
    """The legal tokens at every node of a tree.

    Attributes:
        legal: bool [nodes, V]; after a node that ends the text, and after a refused one, no token is.
        refused: bool [nodes]; whether a token on the path to the node is not legal. Its row of `legal` says nothing.
    """

    legal: Tensor
    refused: Tensor


@dataclass
class Guide:
    """The grammar of one request and its position; a request keeps it when its caches are given away.

    Attributes:
        matcher: The position behind the tokens that were read.
        ends: Token ids that end the text.
        size: Number of tokens of the vocabulary.
        read: Number of output tokens that the matcher has read, an end token included.
        is_over: Whether an end token was read.
        is_lost: Whether an output token was not legal; the output has no grammar from there on.
    """

    matcher: Matcher
    ends: tuple[int, ...]
    size: int
    read: int = 0
    is_over: bool = False
    is_lost: bool = False

    def row(self) -> Tensor:
        """The tokens that may follow here, end tokens included: bool [V]."""
        if self.is_over or self.is_lost:
            return torch.zeros(self.size, dtype=torch.bool)
        row = self.matcher.legal().clone()
        # The words of end tokens are no text.
        row[list(self.ends)] = self.matcher.complete()
        return row

    def take_back(self) -> None:
        """Take the last token back that was pushed."""
        self.matcher.pop()

    def accept_token(self, token: int) -> bool:
        """Read one token of the output; False if it is not legal."""
        if self.is_over or self.is_lost:
            self.is_lost = True
        elif token in self.ends:
            self.is_over = self.matcher.complete()
            self.is_lost = not self.is_over
        else:
            self.is_lost = not self.matcher.push(token)
            self.matcher.keep()
        self.read += not self.is_lost
        return not self.is_lost


def open_guide(grammar: Grammar, ends: tuple[int, ...]) -> Guide:
    """A guide at the beginning of the output.

    Raises:
        Unsupported: The library is not installed, or refuses the grammar.
    """
    matcher = _open_matcher(grammar)
    if grammar.markers:
        matcher = MatcherBehindMarker(matcher, grammar)
    return Guide(matcher, ends, len(grammar.words))


def _open_matcher(grammar: Grammar) -> Matcher:
    if grammar.library == "plain":
        return PlainMatcher(grammar)
    if find_spec(grammar.library) is None:
        raise Unsupported(
            f"the library {grammar.library} is not installed: pip install 'specverify-decoding[grammars]'"
        )
    if grammar.library == "xgrammar":
        from specverify.backends.engine.guided.by_xgrammar import XgrammarMatcher

        return XgrammarMatcher(grammar)
    from specverify.backends.engine.guided.by_llguidance import LlguidanceMatcher

    return LlguidanceMatcher(grammar)


def masks(guide: Guide, shape: Shape, token: list[int]) -> Masks:
    """The masks of a tree whose root is the last token that the guide has read, by walking it depth first.

    A token is pushed before the nodes below it are asked and taken back behind the last of them, so that the guide ends
    where it began.
    """
    legal = torch.zeros(len(shape), guide.size, dtype=torch.bool)
    refused = torch.ones(len(shape), dtype=torch.bool)

    def walk(node: int) -> None:
        refused[node] = guide.is_lost
        legal[node] = guide.row()
        for child in shape.children[node]:
            # Below a token that is not legal every node stays refused; the walk does not go there.
            if bool(legal[node, token[child]]):
                if token[child] in guide.ends:
                    refused[child] = False
                elif guide.matcher.push(token[child]):
                    walk(child)
                    guide.take_back()

    walk(0)
    return Masks(legal, refused)


def advance(guide: Guide, emitted: list[int], finish: str | None) -> tuple[list[int], str | None]:
    """Read the emitted tokens, and cut them behind a token that none may follow.

    The reason to end comes with them: `eos` and `stop` come before `grammar`, and that before `length`.
    """
    for i, token in enumerate(emitted):
        guide.accept_token(token)
        last = i == len(emitted) - 1
        if not guide.is_lost and not bool(guide.row().any()):
            return emitted[: i + 1], finish if last and finish in ("eos", "stop") else "grammar"
    return emitted, finish
