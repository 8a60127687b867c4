"""The catalogue of public reports, and why some of them cannot be planted.

An entry that this engine cannot show is listed with its reason, for example because no model here has the feature.
"""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

REASONS_UNPLANTED: dict[str, str] = {
    "BZ-008": "It is a mask of training: a head that learned under it drafts badly, and its trees are verified "
    "rightly. The tests of `train eagle3` compare each row of the training-time test with the oracle, and refuse this "
    "mask.",
    "BZ-045": "Each forward of a draft reads its own request's block table when it runs: no merged graph of several "
    "positions reads it later, and no context parallelism re-indexes it.",
    "BZ-056": "A token is drawn by one coin and the inverse of the cumulative law, on one stream: there is no noise "
    "over the vocabulary that an allocator could recycle.",
    "BZ-065": "A tree is lowered by itself, from parents that are in it: no array of the batch holds a neighbour's "
    "entries behind its own, and no parent is absent.",
    "BZ-099": "It moves the ends of decisions by one rounding: only a coin in that gap, one draw in about 2^24, would "
    "tell, and there right samplers differ as well.",
    "BZ-125": "Its cause is not known; sums in another order for wider blocks differ by roundings, which are ties here "
    "and no fault.",
    "BZ-171": "A row runs through a recurrent layer by the same code, alone or with others: no second "
    "kernel rounds the state elsewhere.",
}
"""The catalogue id of each report that cannot be planted, with the reason."""


@dataclass(frozen=True)
class Report:
    """One entry of the catalogue."""

    id: str
    title: str
    source: str


@cache
def reports() -> tuple[Report, ...]:
    """Every entry of `catalogue.json`, which lies beside this file."""
    content = json.loads((Path(__file__).parent / "catalogue.json").read_text(encoding="utf-8"))
    return tuple(Report(entry, **words) for entry, words in content.items())
