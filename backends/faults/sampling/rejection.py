"""Faults of sampled acceptance: what is compared with a coin, and the law that the last token is drawn from."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from backends.engine.sampling.coins import Coins
from backends.engine.sampling.forest import Forest
from backends.engine.sampling.seams import SamplingSeams
from backends.engine.seams import Seams
from backends.faults.fault import Fault
from reference.trace import Stage


def patched(change: Callable[[SamplingSeams], SamplingSeams]) -> Callable[[Seams], Seams]:
    """A patch of the sampling seams as a patch of the engine's."""
    return lambda seams: replace(seams, sampling=change(seams.sampling))


def _rows(target: Tensor, at: Tensor) -> Tensor:
    return target[torch.arange(len(at), device=at.device), at]


def stale_residual(seams: SamplingSeams) -> SamplingSeams:
    """The residual of the last level with a rejection outlives the acceptance that followed it."""

    def last_law(target: Tensor, at: Tensor, left: Tensor, stopped: Tensor, rejected: Tensor) -> Tensor:
        return torch.where((stopped | (rejected > 0))[:, None], left, _rows(target, at))

    return replace(seams, last_law=last_law)


def zero_only(seams: SamplingSeams) -> SamplingSeams:
    """After a rejection only the rejected token is taken out of p, as if q were certain of it."""

    def residual(law: Tensor, proposal: Tensor, token: Tensor, row: Tensor) -> Tensor:
        left = law.scatter(1, token[:, None], 0.0)
        total = left.sum(-1, keepdim=True)
        return torch.where(total > 0, left / total, row)

    return replace(seams, residual=residual)


def sibling_kept(seams: SamplingSeams) -> SamplingSeams:
    """Earlier siblings stay in q, though siblings were drawn without replacement."""
    return replace(seams, sibling_law=lambda proposal, tried, removed: proposal)


def once_per_leaf(seams: SamplingSeams) -> SamplingSeams:
    """A node that several leaves share is tested again for the second of them, on a fresh coin."""

    def accepts(dice: Coins, trees: Forest, child: Tensor, threshold: Tensor, asked: Tensor) -> Tensor:
        hit = seams.accepts(dice, trees, child, threshold, asked)
        forks = (trees.children[trees.requests(), child] > 0).sum(-1) > 1
        again = asked & ~hit & forks
        return hit | (dice.below(dice.place("order", child), threshold, again) & again)

    return replace(seams, accepts=accepts)


def coin_reused(seams: SamplingSeams) -> SamplingSeams:
    """The coin that rejected a token also draws the token that replaces it."""

    def bonus_place(dice: Coins, at: Tensor, rejected: Tensor) -> Tensor:
        return torch.where(rejected > 0, dice.place("accept", rejected), seams.bonus_place(dice, at, rejected))

    return replace(seams, bonus_place=bonus_place)


def row_zero(seams: SamplingSeams) -> SamplingSeams:
    """After a rejection the last token comes from row 0 of the target, wherever the path ended."""

    def last_law(target: Tensor, at: Tensor, left: Tensor, stopped: Tensor, rejected: Tensor) -> Tensor:
        law = seams.last_law(target, at, left, stopped, rejected)
        return torch.where((stopped & (at > 0))[:, None], target[:, 0], law)

    return replace(seams, last_law=last_law)


def row_after(seams: SamplingSeams) -> SamplingSeams:
    """After a rejection the last token comes from the row of the rejected token."""

    def last_law(target: Tensor, at: Tensor, left: Tensor, stopped: Tensor, rejected: Tensor) -> Tensor:
        law = seams.last_law(target, at, left, stopped, rejected)
        return torch.where((stopped & (rejected > 0))[:, None], _rows(target, rejected), law)

    return replace(seams, last_law=last_law)


def bonus_from_p(seams: SamplingSeams) -> SamplingSeams:
    """The last token always comes from p: what was rejected may come back."""

    def last_law(target: Tensor, at: Tensor, left: Tensor, stopped: Tensor, rejected: Tensor) -> Tensor:
        return _rows(target, at)

    return replace(seams, last_law=last_law)


def softmax_of_residual(seams: SamplingSeams) -> SamplingSeams:
    """The clamped difference goes through softmax instead of being divided by its sum."""

    def residual(law: Tensor, proposal: Tensor, token: Tensor, row: Tensor) -> Tensor:
        return (law - proposal).clamp(min=0).softmax(-1)

    return replace(seams, residual=residual)


def at_most(seams: SamplingSeams) -> SamplingSeams:
    """A coin equal to its threshold accepts."""
    return replace(seams, below=lambda coin, threshold: coin <= threshold)


def coin_zero(seams: SamplingSeams) -> SamplingSeams:
    """Acceptance compares 0 instead of its coin: everything possible is accepted."""

    def accepts(dice: Coins, trees: Forest, child: Tensor, threshold: Tensor, asked: Tensor) -> Tensor:
        return seams.accepts(dice, trees, child, (threshold > 0).to(threshold.dtype), asked)

    return replace(seams, accepts=accepts)


def no_coin(seams: SamplingSeams) -> SamplingSeams:
    """A token is accepted where p >= q, and nowhere else."""

    def accepts(dice: Coins, trees: Forest, child: Tensor, threshold: Tensor, asked: Tensor) -> Tensor:
        return seams.accepts(dice, trees, child, (threshold >= 1).to(threshold.dtype), asked)

    return replace(seams, accepts=accepts)


def ratio_reversed(seams: SamplingSeams) -> SamplingSeams:
    """A token is accepted with probability q/p."""

    def accepts(dice: Coins, trees: Forest, child: Tensor, threshold: Tensor, asked: Tensor) -> Tensor:
        return seams.accepts(dice, trees, child, 1.0 / threshold.clamp(min=1e-30), asked)

    return replace(seams, accepts=accepts)


def residual_by_arg_max(seams: SamplingSeams) -> SamplingSeams:
    """The token after a rejection is the most probable one of the residual."""

    def last_law(target: Tensor, at: Tensor, left: Tensor, stopped: Tensor, rejected: Tensor) -> Tensor:
        law = seams.last_law(target, at, left, stopped, rejected)
        best = torch.nn.functional.one_hot(law.argmax(-1), law.shape[-1]).to(law.dtype)
        return torch.where(stopped[:, None], best, law)

    return replace(seams, last_law=last_law)


def neighbours_seed(seams: SamplingSeams) -> SamplingSeams:
    """Each request draws with its neighbour's coins."""
    return replace(seams, own_coins=lambda uniforms: uniforms.roll(1, 0))


def coins_shared(seams: SamplingSeams) -> SamplingSeams:
    """Every second request keeps the coins of the one before it: its own were written to a copy."""

    def own_coins(uniforms: Tensor) -> Tensor:
        rows = torch.arange(len(uniforms), device=uniforms.device)
        return uniforms[rows - rows % 2]

    return replace(seams, own_coins=own_coins)


def _fault(
    name: str,
    id: str,
    sentence: str,
    source: str,
    trigger: str,
    plant: Callable[[SamplingSeams], SamplingSeams],
    **harmless: str,
) -> Fault:
    """A fault of acceptance; `harmless` says under which draws it changes nothing, and why."""
    spelled = {kind.replace("_", "-"): why for kind, why in harmless.items()}
    return Fault(name, id, Stage.ACCEPTED, sentence, source, trigger, patched(plant), spelled)


ONE_HOT = "relu(p - e_x) over its sum is p with x zeroed, over its sum"
UNREPLACED = "the law of a sibling drawn with replacement is q itself"

FAULTS = (
    _fault(
        "stale-residual-for-bonus",
        "BZ-001",
        "The bonus after full acceptance is drawn from the residual of an earlier rejection.",
        "catalogue BZ-001: bonus token drawn from stale residual after the whole path was accepted",
        "an accepted child whose sibling was rejected",
        stale_residual,
    ),
    _fault(
        "residual-zeroes-token-only",
        "",
        "After a rejection only the rejected token leaves p; q is not subtracted.",
        "statistics-and-numerics A.2: the residual is relu(p - q), not p without the token",
        "a rejected token whose q is not certain",
        zero_only,
        top_k=ONE_HOT,
    ),
    _fault(
        "sibling-not-removed-from-q",
        "",
        "The second sibling is tested against q with the first one still in it.",
        "statistics-and-numerics A.3: earlier sibling's q not zeroed",
        "two siblings drawn without replacement, the first rejected",
        sibling_kept,
        top_k="a one-hot proposal holds no other sibling",
        with_replacement=UNREPLACED,
    ),
    _fault(
        "shared-node-tested-per-leaf",
        "BZ-003",
        "A node that several leaves share is tested once for each of them.",
        "catalogue BZ-003: shared prefix node tested once per leaf path",
        "a rejected child with two children",
        once_per_leaf,
    ),
    _fault(
        "coin-reused-for-residual",
        "BZ-087",
        "The coin that rejected a token also draws its replacement.",
        "catalogue BZ-087: same uniform number used for rejection and for resampling",
        "a rejection",
        coin_reused,
    ),
    _fault(
        "residual-from-row-zero",
        "",
        "After a rejection below the root the token is drawn from the root's row.",
        "peers.md C1: row i reads another row's p",
        "a rejection below an accepted node",
        row_zero,
    ),
    _fault(
        "resampled-from-row-after",
        "BZ-129",
        "After a rejection the token is drawn from the row of the rejected token.",
        "catalogue BZ-129: rejection handled one iteration late",
        "a rejection",
        row_after,
    ),
    _fault(
        "bonus-from-whole-law",
        "",
        "After a rejection the token is drawn from p instead of the residual.",
        "statistics-and-numerics A.4: bonus from p",
        "a rejection",
        bonus_from_p,
    ),
    _fault(
        "residual-through-softmax",
        "BZ-104",
        "The residual goes through softmax instead of being normalised.",
        "catalogue BZ-104: residual passed through softmax instead of normalisation",
        "a rejection",
        softmax_of_residual,
    ),
    _fault(
        "coin-at-threshold-accepts",
        "BZ-060",
        "A coin equal to its threshold accepts, so a coin of 0 accepts a token of probability 0.",
        "catalogue BZ-060: zero-probability draft accepted when the coin is exactly 0",
        "a drafted token of probability 0 and a coin of 0",
        at_most,
    ),
    _fault(
        "acceptance-ignores-coin",
        "BZ-039",
        "Acceptance compares 0 instead of its coin, so everything possible is accepted.",
        "catalogue BZ-039: probabilistic rejection kernel always accepts (u=0)",
        "a drafted token less probable than its proposal",
        coin_zero,
    ),
    _fault(
        "accepted-only-if-likelier",
        "",
        "A token is accepted exactly where p >= q, by no coin.",
        "statistics-and-numerics B.5: accept iff p >= q",
        "a drafted token less probable than its proposal",
        no_coin,
    ),
    _fault(
        "acceptance-ratio-reversed",
        "",
        "A token is accepted with probability q/p.",
        "statistics-and-numerics B.5: ratio reversed",
        "a drafted token whose p is not its q",
        ratio_reversed,
    ),
    _fault(
        "residual-by-arg-max",
        "",
        "The token after a rejection is the best of the residual.",
        "statistics-and-numerics B.5: argmax instead of sampling the residual",
        "a rejection whose residual has two tokens",
        residual_by_arg_max,
    ),
    _fault(
        "neighbours-seed",
        "",
        "Each request of a batch draws with its neighbour's coins.",
        "the field's per-request seeds, read one row off (peers.md C1, row i reads row i+1)",
        "two requests in a batch",
        neighbours_seed,
    ),
    _fault(
        "every-second-request-shares-coins",
        "BZ-155",
        "Every second request of a batch draws with the coins of the one before.",
        "catalogue BZ-155: unseeded rows not filled when a batch mixes requests",
        "two requests in a batch",
        coins_shared,
    ),
)
