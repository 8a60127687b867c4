"""The sampling of one step of one request: coins, history, draws and acceptance.

A request that neither samples nor processes logits needs none of it. The functions of the batch run with a batch of
one.
"""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from specverify.backends.engine.guided.guide import Guide, Masks
from specverify.backends.engine.law_device import law_device
from specverify.backends.engine.sampling import processing
from specverify.backends.engine.sampling.coins import Coins, round_coins, spent_places
from specverify.backends.engine.sampling.drawing import draw_child
from specverify.backends.engine.sampling.forest import forest
from specverify.backends.engine.sampling.question import Question
from specverify.backends.engine.sampling.seams import SamplingSeams
from specverify.backends.engine.sampling.verify import verify
from specverify.backends.engine.uploads import upload
from specverify.reference import tape
from specverify.reference.case import Case
from specverify.reference.tree import Shape, Tree


class StepSampling:
    """The sampling of step `number` of `case`, whose output before the step is `output`.

    Laws are computed on `device`, or on the host where it computes no float64: logits are brought there.

    Attributes:
        samples: Whether tokens are sampled; False for greedy decoding with processed logits.
        masks: The masks on the tree that was processed last; None without a grammar.
        question: The question of `accept`, once it was posed.
        answer: Accepted rows and the token after them, if they were decided together with other requests.
    """

    def __init__(
        self,
        case: Case,
        output: tuple[int, ...],
        number: int,
        device: torch.device,
        seams: SamplingSeams,
        guide: Guide | None = None,
    ) -> None:
        self.case = case
        self.masks: Masks | None = None
        self.question: Question | None = None
        self.answer: tuple[list[int], int] | None = None
        self._guide = guide
        self._output = output
        self._seams = seams
        self._device = law_device(device)
        self.samples = not case.sampling.greedy
        # Laws of 16-bit logits are computed in float32, so their coins are float32 too.
        dtype = torch.float64 if case.dtype == "float64" else torch.float32
        uniforms = upload(torch.tensor(tape.coins(case.sampling, number, case.most_nodes)), self._device)[None]
        coins = round_coins(seams.own_coins(uniforms), dtype)
        self._dice = Coins(coins, case.most_nodes, True, seams.below, seams.inverse)

    @property
    def spent(self) -> tuple[int, ...]:
        """The places of the coins that have decided so far, in order."""
        return spent_places(self._dice, 0)

    @property
    def draws(self) -> bool:
        """Whether a model draft draws its tokens; otherwise it names the best."""
        return self.case.sampling.draws != "top-k"

    def proposals(self, shape: Shape, token: list[int], node: int, logits: Tensor) -> list[Tensor]:
        """The proposal [V] of each child of `node`, if the draft's `logits` [V] ranked the children and drew none."""
        logits = logits.to(self._device)
        scores = processing.widen(logits)[None]
        law = partial(self._draft_law, shape, token, node, logits)
        return [
            self._seams.certain(upload(torch.tensor([token[child]]), logits.device), scores, law)[0]
            for child in shape.children[node]
        ]

    def _draft_law(self, shape: Shape, token: list[int], node: int, logits: Tensor) -> Tensor:
        """The draft's law at `node`, [1, V]; `token` holds the tokens of the nodes above it."""
        # A history follows from the path alone: of a tree of N nodes it would be computed N times for each of them.
        path = shape.path(node)
        chain = Shape((0, *range(len(path) - 1)))
        rows = logits.expand(1, len(path), -1)
        past = self._past(chain, [token[ancestor] for ancestor in path], logits)
        return processing.law(rows, self.case.sampling, self.case.stops, past)[:, -1]

    def draw_children(
        self, shape: Shape, token: list[int], node: int, logits: Tensor
    ) -> tuple[list[int], list[Tensor]]:
        """Draw the children of `node` from the draft's `logits` [V]; `token` holds the tokens of the nodes above it.

        If the law has fewer tokens than the node has children, each further child gets the best token that no sibling
        has, with a one-hot proposal. The tokens come with the proposal [V] of each.
        """
        sampling = self.case.sampling
        seams = self._seams
        logits = logits.to(self._device)
        law = self._draft_law(shape, token, node, logits)
        claimed = seams.hand_over(law, logits[None].to(law.dtype), sampling)
        tried_tokens = torch.zeros_like(law, dtype=torch.bool)
        all_requests = torch.ones(1, dtype=torch.bool, device=logits.device)
        names, proposals = [], []
        for child in shape.children[node]:
            child_token, possible, offered = draw_child(
                law, 0, child, tried_tokens, sampling.draws, self._dice, seams, all_requests
            )
            if bool(possible[0]):
                offered = claimed
            else:
                child_token = logits[None].masked_fill(tried_tokens, -torch.inf).argmax(-1)
                offered = seams.certain(child_token, law, lambda: law)
            tried_tokens = tried_tokens | torch.nn.functional.one_hot(child_token, law.shape[-1]).bool()
            names.append(int(child_token[0]))
            proposals.append(offered[0])
        return names, proposals

    def scores(self, tree: Tree, logits: Tensor) -> Tensor:
        """Greedy scores [nodes, V]: the logits after penalties, bad words, min_tokens and custom processors."""
        logits = logits.to(self._device)
        past = self._past(tree, list(tree.token), logits)
        if past is None:
            return logits
        return self._seams.scores(logits[None], self.case.sampling, self.case.stops, past)[0]

    def accept(self, tree: Tree, logits: Tensor, proposal: Tensor | None) -> tuple[list[int], int, Tensor, Tensor]:
        """Verify `tree` by the case's rule, from the target's logits [nodes, V] and the draft's proposals [nodes, V].

        The proposals are None for tokens that were not drawn.

        Returns:
            Accepted rows, root first; the bonus token; the target's law [nodes, V]; the proposal that was used.
        """
        question = self.question or self.pose(tree, logits, proposal)
        if self.answer is not None:
            path, bonus = self.answer
            return path, bonus, question.law[0], question.proposal[0]
        decision = verify(
            question.trees,
            question.law,
            question.proposal,
            self._dice,
            question.rule,
            question.removed,
            self._seams,
            question.bonus,
        )
        # One transfer for the rows and the token: each would wait for the device.
        *rows, bonus = torch.cat([decision.path[0], decision.bonus]).tolist()
        return [row for row in rows if row >= 0], bonus, question.law[0], question.proposal[0]

    def pose(self, tree: Tree, logits: Tensor, proposal: Tensor | None) -> Question:
        """The laws of `accept` before anything is decided, kept as `question`; arguments as of `accept`."""
        sampling = self.case.sampling
        seams = self._seams
        stops = self.case.stops
        logits = logits.to(self._device)
        past = self._past(tree, list(tree.token), logits)
        law = seams.target_law(logits[None], sampling, stops, past)
        # The fault-free engine has one law for both, which is computed once.
        bonus = law if seams.bonus_law is seams.target_law else seams.bonus_law(logits[None], sampling, stops, past)
        token = upload(torch.tensor([tree.token]), logits.device)
        removed = sampling.draws == "without-replacement" and proposal is not None
        certain_laws = torch.nn.functional.one_hot(
            token[0], law.shape[-1]
        )  # the proposals of tokens that were not drawn
        proposals = (certain_laws if proposal is None else proposal).to(law.dtype)
        self.question = Question(
            forest(tree, token), law, bonus, proposals[None], self._dice, sampling.rule, removed, seams.verifier is None
        )
        return self.question

    def _past(self, shape: Shape, token: list[int], logits: Tensor) -> processing.History | None:
        sampling = self.case.sampling
        if not sampling.processes:
            return None
        trees = forest(shape, upload(torch.tensor([token]), logits.device))
        past = self._seams.history(trees, self.case.prompt, self._output, sampling, logits.shape[-1])
        if self._guide is None:
            return past
        self.masks = self._seams.masks(self._guide, shape, token)
        return replace(past, legal=upload(self.masks.legal[None], logits.device))
