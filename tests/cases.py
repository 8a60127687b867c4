"""Small cases and drafts that several tests judge, and the folder of the corpus."""

from pathlib import Path

from specverify.properties.strategies.models import GALLERY
from specverify.reference.architecture import Architecture, Seeded
from specverify.reference.case import Case
from specverify.reference.draft import LanguageModel, Scripted
from specverify.reference.sampling import Stops
from specverify.reference.tree import RankTree, Tree
from tests.models import LLAMA

CORPUS = Path(__file__).parent / "corpus"
"""The smallest case of every planted fault, as `specverify replay` reads it."""

PLAIN = Case(LLAMA, (3, 1, 4), stops=Stops(6))
"""Six tokens without a draft."""

SCRIPTED = Case(LLAMA, (3, 1, 4), Scripted((Tree((0, 0, 1), (4, 2, 5)),)), stops=Stops(4))
"""Four tokens, with a scripted chain of two nodes at the first step."""

SHORTEST = Case(Seeded(GALLERY[0], 1), (1, 2), stops=Stops(2))
"""Two tokens of the smallest model without a draft."""

ONE_CHILD = Case(Seeded(Architecture("llama", 16, 8, 8, 2, 1, 4, (0,)), 1), (3, 5), Scripted((Tree((0, 0), (5, 7)),)))
"""A scripted tree of one node below its root."""

SHUFFLED = Scripted((Tree((0, 2, 0, 1), (4, 5, 6, 7)), Tree((0, 0, 0), (0, 1, 2))))
"""A tree whose node 1 stands before its parent, and a tree of two siblings."""

OWN_DRAFT = LanguageModel(LLAMA, RankTree((0, 0, 0, 1, 3), (0, 0, 1, 0, 0)))
"""LLAMA as its own draft: the nodes of rank 0 are accepted."""
