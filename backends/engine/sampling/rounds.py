"""Whole rounds of drafting and acceptance on tables in place of models.

The engine's own sampling runs on tables of logits or laws, many requests at once. `EngineBackend` offers it as
`specverify.backends.base.ExactLaw`.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from specverify.backends.engine.guided.guide import open_guide
from specverify.backends.engine.law_device import law_device
from specverify.backends.engine.sampling import processing
from specverify.backends.engine.sampling.coins import Coins, round_coins
from specverify.backends.engine.sampling.drawing import draw_child
from specverify.backends.engine.sampling.forest import Forest, forest
from specverify.backends.engine.sampling.seams import SamplingSeams
from specverify.backends.engine.sampling.verify import Acceptance, verify
from specverify.reference.probability_world import Blocks, GivenTree, World
from specverify.reference.tape import stride
from specverify.reference.trace import Array
from specverify.reference.tree import Shape

DTYPES = {"float64": torch.float64, "float32": torch.float32}

BATCH = 1 << 22
"""The largest number of elements of a [B, N, V] tensor; larger batches are cut into pieces."""

GOLDEN, FIRST, SECOND = -7046029254386353131, -4658895280553007687, -7723592293110705685
"""The constants of SplitMix64 (Steele et al. 2014) as signed 64-bit integers."""


class Tables:
    """Runs the tables of a `World` on `device`, or on the host if it has no float64, with the engine's own sampling.

    `seams` returns the sampling seams of the moment, so that a fault planted later takes effect.
    """

    def __init__(self, device: str, seams: Callable[[], SamplingSeams]) -> None:
        self._device = law_device(torch.device(device))
        self._seams = seams

    def verify(self, verification: GivenTree, tape: Array) -> Blocks:
        """Run acceptance on `verification`, one request per row of `tape` [B, stride(nodes)]; see `ExactLaw`."""
        dtype = torch.float64
        target = torch.tensor(verification.target, dtype=dtype, device=self._device)
        proposal = torch.tensor(verification.proposal, dtype=dtype, device=self._device)
        removed = verification.sampling.draws == "without-replacement"
        seams = self._seams()

        def run(uniforms: Tensor) -> tuple[Acceptance, Coins]:
            batch = len(uniforms)
            token = torch.tensor(verification.tree.token, device=self._device).expand(batch, -1)
            dice = self._dice(uniforms, len(verification.tree), seams)
            trees = forest(verification.tree, token)
            laws = [law.expand(batch, *law.shape) for law in (target, proposal)]
            return verify(trees, laws[0], laws[1], dice, verification.sampling.rule, removed, seams), dice

        return self._in_pieces(run, tape, dtype, verification.target.size)

    def rounds(self, world: World, tape: Array) -> Blocks:
        """Draft and accept in `world`, one request per row of `tape` [B, stride(nodes)]; see `ExactLaw`."""
        seams = self._seams()
        dtype = DTYPES[world.dtype]
        tables = self._tables(world, dtype)

        def run(uniforms: Tensor) -> tuple[Acceptance, Coins]:
            dice = self._dice(uniforms, len(world.shape), seams)
            return one_round(world, tables, dice, seams), dice

        return self._in_pieces(run, tape, dtype, len(world.shape) * world.vocab)

    def samples(self, world: World, seeds: Array) -> Blocks:
        """Draft and accept in `world` on the engine's own random stream, request b seeded with `seeds[b]`.

        The coins are not recorded: the blocks have no `low` and `high`.
        """
        num_coins = stride(len(world.shape))
        tape = stream_uniforms(torch.tensor(seeds.astype(np.int64), device=self._device), 0, num_coins)
        seams = self._seams()
        dtype = DTYPES[world.dtype]
        tables = self._tables(world, dtype)

        def run(uniforms: Tensor) -> tuple[Acceptance, Coins]:
            coins = round_coins(seams.own_coins(uniforms), dtype)
            dice = Coins(coins, len(world.shape), False, seams.below, seams.inverse)
            return one_round(world, tables, dice, seams), dice

        return self._in_pieces(run, tape.cpu().numpy(), dtype, len(world.shape) * world.vocab)

    def _dice(self, uniforms: Tensor, nodes: int, seams: SamplingSeams) -> Coins:
        return Coins(seams.own_coins(uniforms), nodes, True, seams.below, seams.inverse)

    def _tables(self, world: World, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return (
            torch.tensor(world.target, dtype=dtype, device=self._device),
            torch.tensor(world.drafts, dtype=dtype, device=self._device),
        )

    def _in_pieces(
        self, run: Callable[[Tensor], tuple[Acceptance, Coins]], tape: Array, dtype: torch.dtype, elements: int
    ) -> Blocks:
        size = max(1, BATCH // elements)
        pieces = []
        for start in range(0, len(tape), size):
            uniforms = round_coins(torch.tensor(tape[start : start + size], device=self._device), dtype)
            decision, dice = run(uniforms)
            cells = (dice.low, dice.high)
            pieces.append(
                [
                    None if tensor is None else tensor.cpu().numpy()
                    for tensor in (decision.path, decision.tokens, *cells)
                ]
            )
        path, tokens, low, high = (
            None if column[0] is None else np.concatenate(column) for column in zip(*pieces, strict=True)
        )
        assert path is not None
        assert tokens is not None
        return Blocks(path, tokens, low, high)


def one_round(world: World, tables: tuple[Tensor, Tensor], dice: Coins, seams: SamplingSeams) -> Acceptance:
    """Draft level by level from the draft tables, look up the target's logits at every node, and run acceptance."""
    target_table, draft_tables = tables
    sampling = world.sampling
    batch = len(dice.uniforms)
    nodes = len(world.shape)
    device = target_table.device
    root = torch.full((batch, nodes), world.prompt[-1], dtype=torch.long, device=device)
    if world.tokens is not None:
        root = torch.tensor(world.tokens, device=device).expand(batch, nodes)
    trees = forest(world.shape, root)
    rows = torch.zeros(batch, nodes, dtype=torch.long, device=device)
    vocab = world.vocab
    num_rows = len(target_table)
    # Rows that no child fills keep a uniform law; results computed from them are masked out.
    proposal = torch.full((batch, nodes, vocab), 1.0 / vocab, dtype=target_table.dtype, device=device)
    for level in range(world.shape.height):
        for node in (number for number in range(nodes) if world.shape.depth[number] == level):
            below = world.shape.children[node]
            if below:
                trees, offered = _children(world, trees, node, draft_tables[:, rows[:, node]], dice, seams)
                for child, law in zip(below, offered, strict=True):
                    proposal[:, child] = law
            for child in below:
                # As in `World.row`: the tokens on a path select the row of both tables.
                rows[:, child] = (rows[:, node] * vocab + trees.token[:, child] + 1) % num_rows
    past = _past(world, world.shape, trees, seams)
    logits = target_table[rows]
    law = seams.target_law(logits, sampling, world.stops, past)
    bonus = law if seams.bonus_law is seams.target_law else seams.bonus_law(logits, sampling, world.stops, past)
    # Given tokens count as surely proposed: no sibling's token was removed from a law.
    removed = sampling.draws == "without-replacement" and world.tokens is None
    return verify(trees, law, proposal, dice, sampling.rule, removed, seams, bonus)


def _children(
    world: World, trees: Forest, node: int, logits: Tensor, dice: Coins, seams: SamplingSeams
) -> tuple[Forest, list[Tensor]]:
    """Name the children of `node`; return the forest without the children that have no token, and each proposal [B, V].

    `logits` is [drafts, B, V]: draft k modulo their number names the k-th child.
    """
    below = world.shape.children[node]
    if world.tokens is not None:
        return trees, [
            seams.certain(trees.token[:, child], logits[0], partial(logits[0].softmax, -1)) for child in below
        ]
    # A history follows from the path alone: of a tree of N nodes it would be computed N times for each of them.
    path = world.shape.path(node)
    chain = Shape((0, *range(len(path) - 1)))
    past = _past(world, chain, forest(chain, trees.token[:, list(path)]), seams)
    spread = [logits_of_draft[:, None].expand(-1, len(path), -1) for logits_of_draft in logits]
    laws = [processing.law(rows, world.sampling, world.stops, past)[:, -1] for rows in spread]
    verifier_laws = [seams.hand_over(law, raw, world.sampling) for law, raw in zip(laws, logits, strict=True)]
    tried_tokens = torch.zeros_like(laws[0], dtype=torch.bool)
    token = trees.token.clone()
    nameless = torch.zeros_like(trees.present)
    offered = []
    is_present = trees.present[:, node]
    for rank, child in enumerate(below):
        if rank >= world.vocab and world.sampling.draws == "top-k":  # more children than tokens to rank
            nameless[:, child] = True
            offered.append(laws[0])
            continue
        law, verifier_law = laws[rank % len(laws)], verifier_laws[rank % len(laws)]
        child_token, possible, child_law = draw_child(
            law, rank, child, tried_tokens, world.sampling.draws, dice, seams, is_present
        )
        token[:, child] = child_token
        nameless[:, child] = ~possible
        tried_tokens = tried_tokens | torch.nn.functional.one_hot(child_token, world.vocab).bool()
        offered.append(child_law if world.sampling.draws == "top-k" else verifier_law)
    named_trees = Forest(token, trees.parent, trees.children, trees.depth, trees.present, trees.height)
    return named_trees.without(nameless), offered


def _past(world: World, shape: Shape, trees: Forest, seams: SamplingSeams) -> processing.History | None:
    """The history of every node of `trees`, which have this `shape`; None if no setting looks back."""
    if not world.sampling.processes:
        return None
    past = seams.history(trees, world.prompt, (), world.sampling, world.vocab)
    grammar = world.sampling.grammar
    if grammar is None:
        return past
    # One walk for each tree that differs: of many requests few do.
    distinct, distinct_of = torch.unique(trees.token, dim=0, return_inverse=True)
    guide = open_guide(grammar, world.stops.eos)
    rows = [seams.masks(guide, shape, tokens).legal for tokens in distinct.tolist()]
    return replace(past, legal=torch.stack(rows).to(trees.token.device)[distinct_of])


def stream_uniforms(seeds: Tensor, start: int, count: int) -> Tensor:
    """The uniforms `start` to `start + count` of each request's own stream: float64 [B, count], multiples of 2^-53.

    Coin i of a request is a SplitMix64 hash of (seed, i) alone, so that no other request and no unused coin changes it.
    `seeds` is int64 [B].
    """
    counter = torch.arange(start, start + count, device=seeds.device)
    key = _mix(seeds * GOLDEN + 1)
    bits = _mix(key[:, None] + (counter + 1)[None] * GOLDEN)
    # The upper 53 bits; the mask clears the copies of the sign that an arithmetic shift brings in.
    return (bits >> 11 & (1 << 53) - 1).double() * 2.0**-53


def _mix(state: Tensor) -> Tensor:
    """SplitMix64's finaliser; the masks make its shifts logical, since torch's shifts on int64 are arithmetic."""
    state = (state ^ (state >> 30 & (1 << 34) - 1)) * FIRST
    state = (state ^ (state >> 27 & (1 << 37) - 1)) * SECOND
    return state ^ (state >> 31 & (1 << 33) - 1)
