"""One request's step where it samples, or processes logits: its coins, its history, its draws, its acceptance."""

import torch
from torch import Tensor

from backends.engine.sampling import processing
from backends.engine.sampling.coins import Coins, rounded, spent_by
from backends.engine.sampling.drawing import named
from backends.engine.sampling.forest import forest
from backends.engine.sampling.seams import SamplingSeams
from backends.engine.sampling.verify import verify
from reference import tape
from reference.case import Case
from reference.tree import Shape, Tree


class StepSampling:
    """Step `number` of `case`, `output` being what it emitted before.

    Attributes:
        samples: Whether tokens are chosen by chance at all.
    """

    def __init__(
        self, case: Case, output: tuple[int, ...], number: int, device: torch.device, seams: SamplingSeams
    ) -> None:
        self._case = case
        self._output = output
        self._seams = seams
        self.samples = not case.sampling.greedy
        dtype = torch.float64 if case.dtype == "float64" else torch.float32
        uniforms = torch.tensor(tape.coins(case.sampling, number, case.most_nodes), device=device)[None]
        mine = rounded(seams.own_coins(uniforms), dtype)
        self._dice = Coins(mine, case.most_nodes, True, seams.below, seams.inverse)

    @property
    def spent(self) -> tuple[int, ...]:
        """Places of the coins that decided so far, in order."""
        return spent_by(self._dice, 0)

    @property
    def draws(self) -> bool:
        """Whether a model draft draws its tokens instead of naming the best."""
        return self._case.sampling.draws != "top-k"

    def proposals(self, shape: Shape, token: list[int], node: int, logits: Tensor) -> list[Tensor]:
        """The law [V] told to the verifier for children that the draft's `logits` [V] at `node` merely ranked."""
        law = self._draft_law(shape, token, node, logits)
        return [
            self._seams.certain(torch.tensor([token[child]], device=law.device), law)[0]
            for child in shape.children[node]
        ]

    def _draft_law(self, shape: Shape, token: list[int], node: int, logits: Tensor) -> Tensor:
        """The draft's law at `node`, [1, V]; the tokens above it stand in `token`."""
        spread = logits.expand(1, len(shape), -1)
        past = self._past(shape, token, logits)
        return self._seams.draft_law(spread, self._case.sampling, self._case.stops, past)[:, node]

    def draw_children(
        self, shape: Shape, token: list[int], node: int, logits: Tensor
    ) -> tuple[list[int], list[Tensor]]:
        """Draw the children of `node` from the draft's `logits` [V]; the tokens above it stand in `token`.

        Where the law has fewer tokens than there are children, the rest are the best of what is left, surely.

        Returns:
            Their tokens, and the proposal [V] of each.
        """
        sampling, seams = self._case.sampling, self._seams
        law = self._draft_law(shape, token, node, logits)
        claimed = seams.handed_over(law, logits[None].to(law.dtype), sampling)
        tried = torch.zeros_like(law, dtype=torch.bool)
        every = torch.ones(1, dtype=torch.bool, device=logits.device)
        names, proposals = [], []
        for child in shape.children[node]:
            one, possible, offered = named(law, 0, child, tried, sampling.draws, self._dice, seams, every)
            if bool(possible[0]):
                offered = claimed
            else:
                one = logits[None].masked_fill(tried, -torch.inf).argmax(-1)
                offered = seams.certain(one, law)
            tried = tried | torch.nn.functional.one_hot(one, law.shape[-1]).bool()
            names.append(int(one[0]))
            proposals.append(offered[0])
        return names, proposals

    def scores(self, tree: Tree, logits: Tensor) -> Tensor:
        """Greedy scores [nodes, V]: the logits after everything that looks back."""
        past = self._past(tree, list(tree.token), logits)
        if past is None:
            return logits
        return self._seams.scores(logits[None], self._case.sampling, self._case.stops, past)[0]

    def accept(self, tree: Tree, logits: Tensor, proposal: Tensor | None) -> tuple[list[int], int, Tensor, Tensor]:
        """Verify `tree` by the case's rule.

        Args:
            tree: The drafted tree.
            logits: The target's, [nodes, V].
            proposal: What the draft hands over [nodes, V]; None for tokens that were not drawn.

        Returns:
            Accepted rows, root first; the bonus token; the target's law [nodes, V]; the proposal that was used.
        """
        sampling, seams, stops = self._case.sampling, self._seams, self._case.stops
        past = self._past(tree, list(tree.token), logits)
        law = seams.target_law(logits[None], sampling, stops, past)
        bonus = law if seams.bonus_law is seams.target_law else seams.bonus_law(logits[None], sampling, stops, past)
        token = torch.tensor([tree.token], device=logits.device)
        removed = sampling.draws == "without-replacement" and proposal is not None
        sure = torch.nn.functional.one_hot(token[0], law.shape[-1])
        told = (sure if proposal is None else proposal).to(law.dtype)
        made = verify(forest(tree, token), law, told[None], self._dice, sampling.rule, removed, seams, bonus)
        path = [row for row in made.path[0].tolist() if row >= 0]
        return path, int(made.bonus[0]), law[0], told

    def _past(self, shape: Shape, token: list[int], logits: Tensor) -> processing.History | None:
        sampling = self._case.sampling
        if not sampling.processes:
            return None
        trees = forest(shape, torch.tensor([token], device=logits.device))
        return self._seams.history(trees, self._case.prompt, self._output, sampling, logits.shape[-1])
