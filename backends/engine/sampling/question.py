"""The verification that a sampling request asks for, before anything is decided."""

from dataclasses import dataclass

from torch import Tensor

from specverify.backends.engine.sampling.coins import Coins
from specverify.backends.engine.sampling.forest import Forest
from specverify.reference.rules import Rule


@dataclass(frozen=True)
class Question:
    """The verification that one request asks for.

    Attributes:
        trees: Its drafted tree, as a batch of one.
        law: The target's law after each node, [1, N, V].
        bonus: The law of the token after the path, [1, N, V].
        proposal: The proposal of each node's token, [1, N, V].
        dice: Its coins.
        rule: The rule and its thresholds.
        removed: Whether tokens were drawn without replacement.
        by_program: Whether the engine's own program of the rule decides.
    """

    trees: Forest
    law: Tensor
    bonus: Tensor
    proposal: Tensor
    dice: Coins
    rule: Rule
    removed: bool
    by_program: bool = True
