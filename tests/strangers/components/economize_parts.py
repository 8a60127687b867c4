"""economize's parts as components: the layout of draft trees, and two of its verifiers."""

from types import SimpleNamespace
from typing import Any

import torch
from economize.decoding.config import DecodeConfig
from economize.decoding.protocols import Draft
from economize.decoding.selectors import GreedySelector
from economize.decoding.verifiers import GreedyVerifier, RejectionVerifier
from economize.runtime.mask import TreeLayout
from torch import Tensor

from specverify.adapt import component


def above(parent: Tensor) -> Tensor:
    """Its own parents [1, nodes - 1]: without the root, whose children have the parent -1."""
    return (parent[1:] - 1)[None]


def layout(parent: Tensor, committed: int) -> dict[str, Tensor]:
    """`TreeLayout.build` on the whole tree, whose root it takes for a node without a parent."""
    rooted = parent.clone()
    rooted[0] = -1
    tree_layout = TreeLayout.build(rooted[None], torch.tensor([committed]))
    return {"mask": tree_layout.visible[0], "position": tree_layout.positions[0], "slot": tree_layout.slots[0]}


def rooted_path(answer: tuple[list[list[int]], list[int]]) -> tuple[list[int], int]:
    """Its answer for one row, with the root in front."""
    paths, following = answer
    return [0, *(node + 1 for node in paths[0])], following[0]


def greedy(tokens: Tensor, parent: Tensor, logits: Tensor) -> tuple[list[int], int]:
    """The `greedy` verifier on a tree."""
    draft = Draft(tokens[None, 1:], [len(tokens) - 1], above(parent))
    verifier = GreedyVerifier(DecodeConfig(verifier="greedy"))
    return rooted_path(verifier.verify_tree(logits[None], draft, GreedySelector()))


def rejection(tokens: Tensor, parent: Tensor, p: Tensor, q: Tensor) -> tuple[list[int], int]:
    """The `rejection` verifier on a tree, whose siblings were drawn independently, or not drawn at all."""
    laws: Any = SimpleNamespace(greedy=False, generator=None, distributions=lambda rows: rows.float())
    draft = Draft(tokens[None, 1:], [len(tokens) - 1], above(parent), q[None, 1:].float())
    verifier = RejectionVerifier(DecodeConfig(verifier="rejection"))
    return rooted_path(verifier.verify_tree(p[None], draft, laws))


open_layout = component(tree_builder=layout, name="economize-layout", trees="ordered")
open_greedy = component(verify=greedy, name="economize-greedy", trees="ordered")
open_rejection = component(
    sampler=rejection, name="economize-rejection", trees="ordered", draws=("top-k", "with-replacement")
)
