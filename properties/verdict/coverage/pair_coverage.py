"""PairCoverage: the pairs that judged cases had, of those that they might have had."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from specverify.properties.verdict.coverage.declared import is_declared
from specverify.properties.verdict.coverage.impossible import is_impossible
from specverify.properties.verdict.coverage.pairs import LABELS, Label, Pair, bits_of, candidate_pairs
from specverify.reference.abilities import Abilities


def declared_labels(abilities: Abilities, shows_steps: bool = True) -> tuple[int, ...]:
    """The labels that a request of an engine may have, as places in LABELS.

    Args:
        abilities: What the engine takes.
        shows_steps: Whether it shows the trees and paths of its steps.
    """
    return tuple(place for place, label in enumerate(LABELS) if is_declared(label, abilities, shows_steps))


def possible_pairs(places: Iterable[int]) -> int:
    """The pairs that a request may have whose labels are among those at `places` of LABELS, as bits."""
    declared = {LABELS[place] for place in places}
    return sum(
        pair.bit
        for pair in candidate_pairs()
        if pair.first in declared and pair.second in declared and not is_impossible(pair)
    )


@dataclass(frozen=True)
class PairCoverage:
    """The coverage of a run.

    Attributes:
        possible: The pairs that a request may have, as bits.
        met: Those that a judged request had.
    """

    possible: int
    met: int = 0

    def with_case(self, labels: Iterable[Iterable[int]]) -> "PairCoverage":
        """The coverage after a case whose requests have the labels at these places of LABELS."""
        met_bits = self.met
        for places in labels:
            met_bits |= bits_of(places)
        return replace(self, met=met_bits & self.possible)

    @property
    def num_possible(self) -> int:
        """The number of pairs that may be met."""
        return bin(self.possible).count("1")

    @property
    def num_met(self) -> int:
        """The number of pairs that were met."""
        return bin(self.met).count("1")

    @property
    def share(self) -> float:
        """The share of the possible pairs that were met; 1 where none is possible."""
        return self.num_met / self.num_possible if self.possible else 1.0

    @property
    def missing(self) -> tuple[Pair, ...]:
        """The pairs that were not met, in the order of the tables."""
        unmet_bits = self.possible & ~self.met
        return tuple(pair for pair in candidate_pairs() if pair.bit & unmet_bits)

    @property
    def absent(self) -> tuple[Label, ...]:
        """The labels that no judged request had in any pair."""
        met_labels, unmet_labels = self._labels(self.met), self._labels(self.possible & ~self.met)
        return tuple(label for label in LABELS if unmet_labels[label] and not met_labels[label])

    @property
    def missing_of_present(self) -> tuple[Pair, ...]:
        """The pairs that were not met although each of their two labels was, in some other pair."""
        absent = set(self.absent)
        return tuple(pair for pair in self.missing if pair.first not in absent and pair.second not in absent)

    @staticmethod
    def _labels(bits: int) -> Counter[Label]:
        """For each label the number of pairs among `bits` that have it."""
        pairs = [pair for pair in candidate_pairs() if pair.bit & bits]
        return Counter(label for pair in pairs for label in (pair.first, pair.second))
