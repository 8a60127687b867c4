"""The acceptance rules, as programs over a batch of trees.

No program loops over requests or branches on data, as torch.compile demands. `target` [B, N, V] is the target's law
after each node. `proposal` [B, N, V] is the law from which each node's token was drawn, before the tokens of earlier
siblings were removed. `specverify.reference.rules` names the sources of the rules.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from specverify.backends.engine.sampling.coins import Coins
from specverify.backends.engine.sampling.forest import Forest
from specverify.backends.engine.sampling.seams import SamplingSeams, without
from specverify.reference.rules import Rule


@dataclass
class Walk:
    """The state of the acceptance walk of each request.

    Attributes:
        node: int64 [B]; the last accepted node.
        alive: bool [B]; whether the last level accepted a child.
        path: int64 [B] for each level so far; -1 after the end of the walk.
        residual: [B, V]; the residual law after the rejections of the last level that had children.
        stopped: bool [B]; whether the walk ended at a node whose children were all rejected.
        rejected: int64 [B]; the last rejected child of the last level that had children, 0 for none.
    """

    node: Tensor
    alive: Tensor
    path: list[Tensor]
    residual: Tensor
    stopped: Tensor
    rejected: Tensor

    @classmethod
    def begin(cls, target: Tensor) -> "Walk":
        """Every request at its root."""
        root = torch.zeros(target.shape[0], dtype=torch.long, device=target.device)
        false = torch.zeros_like(root, dtype=torch.bool)
        return cls(root, ~false, [root], target[:, 0], false, root)

    def descend(self, accepted: Tensor, has_children: Tensor, residual: Tensor, rejected: Tensor) -> None:
        """Record the decision of one level: the accepted child or 0; `has_children` says whether any was tried."""
        fresh = self.alive & has_children
        self.residual = torch.where(fresh[:, None], residual, self.residual)
        self.rejected = torch.where(fresh, rejected, self.rejected)
        self.stopped = torch.where(self.alive, has_children & (accepted == 0), self.stopped)
        self.alive = self.alive & (accepted > 0)
        self.node = torch.where(self.alive, accepted, self.node)
        self.path.append(torch.where(self.alive, accepted, -1))


@dataclass
class Trials:
    """The siblings of one level, tried one after the other until one is accepted.

    Attributes:
        row: [B, V]; the target's law at the node above.
        law: [B, V]; the residual of `row` after the rejections so far.
        accepted: int64 [B]; the accepted child, 0 for none.
        rejected: int64 [B]; the last rejected child, 0 for none.
    """

    row: Tensor
    law: Tensor
    accepted: Tensor
    rejected: Tensor

    @classmethod
    def below(cls, row: Tensor, nodes: Tensor) -> "Trials":
        """The trials of a new level: `nodes` have the laws `row`, and no child of them is tried yet."""
        return cls(row, row, torch.zeros_like(nodes), torch.zeros_like(nodes))

    def ask(
        self,
        dice: Coins,
        trees: Forest,
        seams: SamplingSeams,
        child: Tensor,
        threshold: Tensor,
        offered: Tensor,
        active: Tensor,
    ) -> Tensor:
        """Try `child` [B], drawn from `offered` [B, V], for the requests `active`; return where it is rejected."""
        token = trees.token[trees.requests(), child]
        hit = seams.accepts(dice, trees, child, threshold, active) & active
        rejected_here = active & ~hit
        self.accepted = torch.where(hit, child, self.accepted)
        self.law = torch.where(rejected_here[:, None], seams.residual(self.law, offered, token, self.row), self.law)
        self.rejected = torch.where(rejected_here, child, self.rejected)
        return rejected_here


Program = Callable[[Forest, Tensor, Tensor, Coins, SamplingSeams, Rule, bool], Walk]


def multi_round(
    trees: Forest, target: Tensor, proposal: Tensor, dice: Coins, seams: SamplingSeams, rule: Rule, removed: bool
) -> Walk:
    """Try siblings in row order, each against the residual of earlier rejections; a chain has one child a level."""
    lanes = trees.requests()
    walk = Walk.begin(target)
    for _ in range(trees.height):
        level = Trials.below(target[lanes, walk.node], walk.node)
        below = trees.children[lanes, walk.node]
        tried_tokens = torch.zeros_like(level.row, dtype=torch.bool)
        for rank in range(below.shape[1]):
            child = below[:, rank]
            active = walk.alive & (level.accepted == 0) & (child > 0)
            token = trees.token[lanes, child]
            offered = seams.sibling_law(seams.of_node(proposal, child), tried_tokens, removed)
            is_rejected = level.ask(dice, trees, seams, child, _ratio(level.law, offered, token), offered, active)
            # Without replacement, later siblings lack the token.
            tried_tokens = tried_tokens | (is_rejected[:, None] & _mark(token, tried_tokens))
        walk.descend(level.accepted, below[:, 0] > 0, level.law, level.rejected)
    return walk


def specinfer(
    trees: Forest, target: Tensor, proposal: Tensor, dice: Coins, seams: SamplingSeams, rule: Rule, removed: bool
) -> Walk:
    """Try siblings in random order, each against the law of the draft that proposed it."""
    lanes = trees.requests()
    walk = Walk.begin(target)
    for _ in range(trees.height):
        level = Trials.below(target[lanes, walk.node], walk.node)
        below = trees.children[lanes, walk.node]
        untried = below > 0
        for rank in range(below.shape[1]):
            active = walk.alive & (level.accepted == 0) & untried.any(-1)
            needs_coin = active & (untried.sum(-1) > 1)  # the last sibling left needs no coin
            # The k-th trial reads the order coin of the k-th child, whatever sibling it picks
            # (`specverify.reference.tape`).
            pick = dice.choose(dice.place("order", below[:, rank]), untried.to(target.dtype), needs_coin)
            first_untried = untried.long().argmax(-1)
            pick = torch.where(needs_coin, pick, first_untried)
            child = below.gather(1, pick[:, None])[:, 0]
            offered = seams.of_node(proposal, child)
            ratio = _ratio(level.law, offered, trees.token[lanes, child])
            is_rejected = level.ask(dice, trees, seams, child, ratio, offered, active)
            untried = untried & ~(is_rejected[:, None] & _mark(pick, untried))
        walk.descend(level.accepted, below[:, 0] > 0, level.law, level.rejected)
    return walk


def eagle(
    trees: Forest, target: Tensor, proposal: Tensor, dice: Coins, seams: SamplingSeams, rule: Rule, removed: bool
) -> Walk:
    """Walk token prefixes instead of nodes: siblings with one token are one candidate, accepted with p(x).

    A rejected token is set to zero in the law. The path is the way from the root to the last accepted node: a child of
    any twin of an accepted node may follow it.
    """
    lanes = trees.requests()
    walk = Walk.begin(target)
    nodes = trees.token.shape[1]
    # All nodes whose path has the accepted tokens: children of every twin of an accepted node are tried.
    on_path = torch.zeros_like(trees.present)
    on_path[:, 0] = True
    for depth in range(1, trees.height + 1):
        level = Trials.below(target[lanes, walk.node], walk.node)
        candidates = on_path.gather(1, trees.parent) & (trees.depth == depth) & trees.present & walk.alive[:, None]
        tried_tokens = torch.zeros_like(level.row, dtype=torch.bool)
        for node in range(1, nodes):
            token = trees.token[:, node]
            active = candidates[:, node] & (level.accepted == 0) & ~tried_tokens.gather(1, token[:, None])[:, 0]
            marked = _mark(token, tried_tokens)
            share = level.law.gather(1, token[:, None])[:, 0]
            child = torch.full_like(walk.node, node)
            is_rejected = level.ask(dice, trees, seams, child, share, level.law * marked, active)
            tried_tokens = tried_tokens | (is_rejected[:, None] & marked)
        accepted = level.accepted
        on_path = candidates & (trees.token == trees.token[lanes, accepted][:, None]) & (accepted > 0)[:, None]
        walk.descend(accepted, candidates.any(-1), level.law, level.rejected)
    walk.path = _way_to(walk.node, trees)
    return walk


def _way_to(node: Tensor, trees: Forest) -> list[Tensor]:
    """The nodes from the root to `node` [B]: int64 [B] for each level, -1 below `node`."""
    way = []
    for depth in range(trees.height, -1, -1):
        is_here = trees.depth.gather(1, node[:, None])[:, 0] == depth
        way.append(torch.where(is_here, node, -1))
        node = torch.where(is_here, trees.parent.gather(1, node[:, None])[:, 0], node)
    return way[::-1]


def target_only(
    trees: Forest, target: Tensor, proposal: Tensor, dice: Coins, seams: SamplingSeams, rule: Rule, removed: bool
) -> Walk:
    """Take one coin a level and accept the first sibling where the covered mass over threshold_acc exceeds the coin.

    A sibling with at least the probability threshold_single is accepted whatever the coin.
    """
    lanes = trees.requests()
    walk = Walk.begin(target)
    for _ in range(trees.height):
        law = target[lanes, walk.node]
        below = trees.children[lanes, walk.node]
        is_child = below > 0
        token = trees.token.gather(1, below)
        share = law.gather(1, token) * is_child
        covered = share.cumsum(-1) / rule.threshold_acc
        # A likely token ends the search whatever the coin: its bar and all later bars are infinite.
        is_likely = (is_child & (share >= rule.threshold_single)).long().cummax(-1).values > 0
        bars = torch.where(is_likely, torch.full_like(covered, torch.inf), covered)
        active = walk.alive & is_child[:, 0] & ~is_likely[:, 0]
        first = dice.first_below(dice.place("accept", walk.node), bars, active)
        ranks = torch.arange(below.shape[1], device=first.device)
        # The bar of an absent child equals the bar before it, so the first bar above the coin is a present child's.
        accepted = torch.where(walk.alive, (below * (ranks == first[:, None])).sum(-1), 0)
        is_rejected = is_child & (ranks < first[:, None])
        # Not one_hot: on the CPU torch reads the smallest and the largest token back to the host.
        tried_tokens = (
            (token[..., None] == torch.arange(law.shape[-1], device=token.device)) & is_rejected[..., None]
        ).any(1)
        count = is_rejected.sum(-1)
        rejected = below.gather(1, (count - 1).clamp(min=0)[:, None])[:, 0] * (count > 0)
        walk.descend(accepted, below[:, 0] > 0, without(law, tried_tokens), rejected)
    return walk


def typical(
    trees: Forest, target: Tensor, proposal: Tensor, dice: Coins, seams: SamplingSeams, rule: Rule, removed: bool
) -> Walk:
    """Accept, without a coin, the longest path of typical tokens; among equals the likeliest, then the first."""
    lanes = trees.requests()
    walk = Walk.begin(target)
    entropy = -torch.special.xlogy(target, target).sum(-1)
    # The threshold of a node follows from the target's law at its parent.
    bar = (rule.delta * (-entropy).exp()).clamp(max=rule.epsilon).gather(1, trees.parent)
    law_above = target.gather(1, trees.parent[..., None].expand_as(target))
    share = law_above.gather(2, trees.token[..., None])[..., 0]
    is_typical = trees.present & (share > bar)
    is_typical[:, 0] = True
    likelihood = torch.where(trees.depth > 0, share.clamp(min=torch.finfo(share.dtype).tiny).log(), 0.0)
    total = torch.zeros_like(likelihood)
    for level in range(1, trees.height + 1):
        at_level = trees.depth == level
        is_typical = torch.where(at_level, is_typical & is_typical.gather(1, trees.parent), is_typical)
        total = torch.where(at_level, total.gather(1, trees.parent) + likelihood, total)
    longest = torch.where(is_typical, trees.depth, -1)
    is_longest = longest == longest.max(-1, keepdim=True).values
    # The likelihood decides among the longest paths. `tiny` above keeps it finite, so arg-max picks one of them.
    end = torch.where(is_longest, total, -torch.inf).argmax(-1)
    climbed = [end]
    for _ in range(trees.height):
        climbed.append(trees.parent[lanes, climbed[-1]])
    rows = torch.stack(climbed[::-1], 1)
    depth = trees.depth[lanes, end]
    steps = torch.arange(trees.height + 1, device=end.device)[None]
    shifted = (steps + trees.height - depth[:, None]).clamp(max=trees.height)
    path = torch.where(steps <= depth[:, None], rows.gather(1, shifted), -1)
    walk.node = end
    walk.path = list(path.unbind(1))
    walk.residual = target[lanes, end]
    return walk


def block(
    trees: Forest, target: Tensor, proposal: Tensor, dice: Coins, seams: SamplingSeams, rule: Rule, removed: bool
) -> Walk:
    """Accept a chain up to the last node whose coin is below its block ratio h (Sun et al. 2024)."""
    lanes = trees.requests()
    walk = Walk.begin(target)
    node = walk.node
    pi = torch.ones_like(target[:, 0, 0])
    alive = walk.alive
    tau = walk.node
    depth = torch.zeros_like(walk.node)
    residual = walk.residual
    is_ended = torch.zeros_like(alive)
    chain = [node]
    for level in range(trees.height + 1):
        child = trees.children[lanes, node, 0]
        has_child = alive & (child > 0)
        row = target[lanes, node]
        offered = seams.of_node(proposal, child)
        excess = seams.block_residual(row, offered, pi)
        mass = excess.sum(-1)
        ratio = torch.where(
            has_child, seams.block_ratio(row, offered, pi), pi
        )  # at the last node the ratio is pi itself
        hit = (seams.accepts(dice, trees, node, ratio, alive) & alive) if level else alive
        tau = torch.where(hit, node, tau)
        depth = torch.where(hit, level, depth)
        node_residual = torch.where(mass[:, None] > 0, excess / mass[:, None], row)
        residual = torch.where(hit[:, None], node_residual, residual)
        is_ended = torch.where(hit, has_child, is_ended)
        token = trees.token[lanes, child]
        pi = torch.where(has_child, seams.joint_ratio(pi, _ratio(row, offered, token)), pi)
        node = torch.where(has_child, child, node)
        alive = has_child
        chain.append(torch.where(has_child, child, -1))
    steps = torch.arange(trees.height + 1, device=node.device)[None]
    path = torch.where(steps <= depth[:, None], torch.stack(chain[: trees.height + 1], 1), -1)
    walk.node = tau
    walk.path = list(path.unbind(1))
    walk.residual = residual
    walk.stopped = is_ended
    walk.rejected = torch.where(is_ended, trees.children[lanes, tau, 0], 0)
    return walk


def traversal(
    trees: Forest, target: Tensor, proposal: Tensor, dice: Coins, seams: SamplingSeams, rule: Rule, removed: bool
) -> Walk:
    """Try each node after all nodes below it, by its joint ratio; a rejected child takes its share of law and weight.

    Every request goes around its own tree: a node is entered before the nodes below it and left after them
    (Weng et al. 2025).
    """
    lanes = trees.requests()
    walk = Walk.begin(target)
    nodes = trees.token.shape[1]
    columns = torch.arange(nodes, device=trees.token.device)
    tour, leaves = _tour(trees)
    law = target.clone()
    weight = torch.ones_like(target[:, :, 0])
    is_open = walk.alive
    for visit in range(2 * nodes):
        node, is_leaving = tour[:, visit], leaves[:, visit]
        above = trees.parent[lanes, node]
        is_root = node == 0
        token = trees.token[lanes, node]
        elder = (trees.parent == above[:, None]) & (columns[None] < node[:, None]) & (columns[None] > 0)
        tried_tokens = torch.zeros_like(law[:, 0], dtype=torch.long)
        tried_tokens = tried_tokens.scatter_reduce(1, trees.token, (elder & trees.present).long(), "amax") > 0
        offered = seams.sibling_law(seams.of_node(proposal, node), tried_tokens, removed)
        row, pi = law[lanes, above], weight[lanes, above]
        # Entered: the ratio follows from what earlier siblings have left of the law above.
        entered = is_open & ~is_leaving & ~is_root
        ratio = seams.joint_ratio(pi, _ratio(row, offered, token))
        weight[lanes, node] = torch.where(entered, ratio, weight[lanes, node])
        # Left: accepted by its own coin, or taken out of the law above.
        is_tested = is_open & is_leaving & ~is_root
        hit = seams.accepts(dice, trees, node, weight[lanes, node], is_tested) & is_tested
        excess = seams.block_residual(row, offered, pi)
        mass = excess.sum(-1)
        is_rejected = is_tested & ~hit
        remaining = torch.where(mass[:, None] > 0, excess / mass[:, None], target[lanes, above])
        law[lanes, above] = torch.where(is_rejected[:, None], remaining, row)
        weight[lanes, above] = torch.where(is_rejected, seams.block_ratio(row, offered, pi), pi)
        hit = hit | (is_open & is_leaving & is_root)
        walk.node = torch.where(hit, node, walk.node)
        walk.residual = torch.where(hit[:, None], law[lanes, node], walk.residual)
        is_open = is_open & ~hit
    youngest = trees.children[lanes, walk.node].max(-1).values
    walk.stopped = youngest > 0
    walk.rejected = youngest
    walk.path = _way_to(walk.node, trees)
    return walk


def _tour(trees: Forest) -> tuple[Tensor, Tensor]:
    """The way around each tree of N nodes: int64 [B, 2N], the node of each visit, and bool [B, 2N], whether it is left.

    Children follow each other by row. The visits of a smaller tree end early: the others are of node 0, not left.
    """
    nodes = trees.token.shape[1]
    columns = torch.arange(nodes, device=trees.token.device)
    size = trees.present.long()
    for level in range(trees.height, 0, -1):
        size = size.scatter_add(1, trees.parent, torch.where(trees.depth == level, size, 0))
    is_elder = (trees.parent[:, :, None] == trees.parent[:, None, :]) & (columns[None, :] < columns[:, None])
    elders = (is_elder * (size * trees.present * (columns > 0))[:, None, :]).sum(-1)
    order = torch.zeros_like(size)
    for level in range(1, trees.height + 1):
        order = torch.where(trees.depth == level, order.gather(1, trees.parent) + 1 + elders, order)
    # A node is entered after the nodes before it in this order were entered, and those that do not lie above it left.
    entry = 2 * order - trees.depth
    departure = entry + 2 * size - 1
    # Absent nodes write to a column behind all others.
    entry = torch.where(trees.present, entry, 2 * nodes)
    departure = torch.where(trees.present, departure, 2 * nodes)
    tour = torch.zeros_like(size).repeat(1, 2)
    tour = torch.cat([tour, tour[:, :1]], 1)
    tour = tour.scatter(1, entry, columns.expand_as(entry)).scatter(1, departure, columns.expand_as(departure))
    leaves = torch.zeros_like(tour, dtype=torch.bool).scatter(1, departure, trees.present)
    return tour[:, :-1], leaves[:, :-1]


def sample_and_match(
    trees: Forest, target: Tensor, proposal: Tensor, dice: Coins, seams: SamplingSeams, rule: Rule, removed: bool
) -> Walk:
    """Draw a token from the target at each node; the first child that carries it is accepted, or else it is emitted."""
    lanes = trees.requests()
    walk = Walk.begin(target)
    for _ in range(trees.height):
        law = target[lanes, walk.node]
        below = trees.children[lanes, walk.node]
        active = walk.alive & (below[:, 0] > 0)
        drawn_token = dice.choose(dice.place("accept", walk.node), law, active)
        carries = (below > 0) & (trees.token.gather(1, below) == drawn_token[:, None])
        first = below.gather(1, carries.long().argmax(-1, keepdim=True))[:, 0]
        accepted = torch.where(active & carries.any(-1), first, 0)
        drawn = seams.emitted(drawn_token, law)
        walk.descend(accepted, below[:, 0] > 0, drawn, below.max(-1).values)
    return walk


Acceptance = Callable[[Tensor, Tensor, Tensor], Tensor]
"""The probability [B] that a token is accepted, from p [B, V], q [B, V] and the token [B]."""


def _walk_chain(
    trees: Forest, target: Tensor, proposal: Tensor, dice: Coins, seams: SamplingSeams, acceptance: Acceptance
) -> Walk:
    """Accept each node of a chain with `acceptance`, but no token of probability 0."""
    lanes = trees.requests()
    walk = Walk.begin(target)
    for _ in range(trees.height):
        level = Trials.below(target[lanes, walk.node], walk.node)
        child = trees.children[lanes, walk.node, 0]
        token = trees.token[lanes, child]
        offered = seams.of_node(proposal, child)
        share = level.row.gather(1, token[:, None])[:, 0]
        threshold = seams.possible(acceptance(level.row, offered, token), share)
        level.ask(dice, trees, seams, child, threshold, offered, walk.alive & (child > 0))
        walk.descend(level.accepted, child > 0, level.law, level.rejected)
    return walk


def ensemble(
    trees: Forest, target: Tensor, proposal: Tensor, dice: Coins, seams: SamplingSeams, rule: Rule, removed: bool
) -> Walk:
    """Accept by the mixture of p and q, with weight and 1 - weight (DIVERSED)."""

    def acceptance(row: Tensor, offered: Tensor, token: Tensor) -> Tensor:
        return seams.mixed_ratio(_ratio(row, offered, token), rule.weight)

    return _walk_chain(trees, target, proposal, dice, seams, acceptance)


def synthetic(
    trees: Forest, target: Tensor, proposal: Tensor, dice: Coins, seams: SamplingSeams, rule: Rule, removed: bool
) -> Walk:
    """Accept every node with the probability acceptance_rate (vLLM)."""

    def acceptance(row: Tensor, offered: Tensor, token: Tensor) -> Tensor:
        return torch.full_like(row[:, 0], rule.acceptance_rate)

    return _walk_chain(trees, target, proposal, dice, seams, acceptance)


def fly(
    trees: Forest, target: Tensor, proposal: Tensor, dice: Coins, seams: SamplingSeams, rule: Rule, removed: bool
) -> Walk:
    """Decide on all nodes of a chain, then lift rejections at uncertain rows with accepted nodes behind them (FLy)."""
    lanes = trees.requests()
    walk = Walk.begin(target)
    node, alive = walk.node, walk.alive
    size = int(rule.window)
    decisions: list[Tensor] = []
    is_uncertain: list[Tensor] = []
    for _ in range(trees.height):
        child = trees.children[lanes, node, 0]
        alive = alive & (child > 0)
        row, token = target[lanes, node], trees.token[lanes, child]
        ratio = _ratio(row, seams.of_node(proposal, child), token)
        decisions.append(seams.accepts(dice, trees, child, ratio, alive) & alive)
        entropy = -torch.special.xlogy(row, row).sum(-1)
        is_uncertain.append((entropy >= rule.entropy) & (row.gather(1, token[:, None])[:, 0] > 0))
        node = torch.where(alive, child, node)
    for level, hit in enumerate(decisions):
        child = trees.children[lanes, walk.node, 0]
        row, token = target[lanes, walk.node], trees.token[lanes, child]
        window = decisions[level + 1 : level + 1 + size]
        is_lifted = is_uncertain[level] & seams.window_accepted(window, hit, size)
        accepted = torch.where((hit | is_lifted) & (child > 0), child, 0)
        law = seams.residual(row, seams.of_node(proposal, child), token, row)
        walk.descend(accepted, child > 0, law, torch.where(accepted > 0, 0, child))
    return walk


def _ratio(law: Tensor, offered: Tensor, token: Tensor) -> Tensor:
    """law(token) / offered(token) [B]; 0 for a token that `offered` gives no probability."""
    column = token[:, None]
    law_share, offered_share = law.gather(1, column)[:, 0], offered.gather(1, column)[:, 0]
    return torch.where(offered_share > 0, law_share / offered_share, torch.zeros_like(law_share))


def _mark(column: Tensor, mask: Tensor) -> Tensor:
    """A one-hot mask, bool [B, n], at `column` [B]; n is the size of the last dimension of `mask`."""
    return torch.arange(mask.shape[-1], device=column.device) == column[:, None]


PROGRAMS: dict[str, Program] = {
    "chain": multi_round,
    "multi-round": multi_round,
    "eagle": eagle,
    "specinfer": specinfer,
    "target-only": target_only,
    "typical": typical,
    "block": block,
    "traversal": traversal,
    "sample-and-match": sample_and_match,
    "ensemble": ensemble,
    "fly": fly,
    "synthetic": synthetic,
}
"""The program of each rule of `specverify.reference.rules.RULES`."""

BATCHED = (multi_round, target_only)
"""The programs that decide for the requests of a batch together."""
