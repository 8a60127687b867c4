"""Online distillation: the target runs beside the head that learns from it, and no state is stored.

The texts stand in rounds. The target continues the prompts of a round when the round is first learned. Whenever it is
learned, one forward of the target gives the states, and with them the target's law, from which the head learns.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch

from specverify.reference.draft.hidden import HiddenStates
from specverify.training.heads.base import Batch
from specverify.training.states import batch_of
from specverify.training.target import ContinuedText, Target

ROUND = 16
"""The prompts that the target continues side by side, of each process."""


@dataclass(frozen=True)
class OnlineOrder:
    """The endless order of batches of texts whose states are made when a batch needs them, the same for one seed.

    Attributes:
        target: The target.
        prompts: The prompts, each a list of tokens.
        reads: The states that the head reads.
        added: The tokens by which the target continues each prompt; 0 for the prompts as they are.
        per_batch: The texts of a batch.
        seed: The seed of the order.
        stopped: Whether the user asked for the end; then the target continues no further prompt.
        rank, world: This process and the number of processes, which share the prompts of each round.
        continued_texts: For each round that was learned, its texts, as lists of tokens.
    """

    target: Target
    prompts: list[list[int]]
    reads: HiddenStates
    added: int
    per_batch: int
    seed: int
    stopped: Callable[[], bool]
    rank: int = 0
    world: int = 1
    continued_texts: dict[int, list[list[int]]] = field(default_factory=dict)

    @property
    def shards(self) -> int:
        """The number of stored shards that are read: none."""
        return 0

    @property
    def rounds(self) -> int:
        """The number of rounds."""
        return -(-len(self.prompts) // (ROUND * self.world))

    def batches(self, skip: int = 0, device: str = "cpu") -> Iterator[Batch]:
        """Batches from number `skip` on, for ever; the target runs for no batch that is skipped.

        Raises:
            Stopped: `stopped` said so while the target ran; the batches end with it.
        """
        epoch = 0
        while True:
            order = torch.Generator().manual_seed(self.seed + epoch)
            for number in torch.randperm(self.rounds, generator=order).tolist():
                within = torch.Generator().manual_seed(self.seed + 1000 * epoch + number)
                shuffled = torch.randperm(len(self._prompts_of(number)), generator=within).tolist()
                firsts = range(0, len(shuffled), self.per_batch)
                if skip >= len(firsts):
                    skip -= len(firsts)
                    continue
                texts = self.texts(number)
                for first in firsts[skip:]:
                    chosen = [texts[text] for text in shuffled[first : first + self.per_batch]]
                    yield batch_of(chosen, self.added > 0, device)
                skip = 0
            epoch += 1

    def texts(self, number: int) -> list[ContinuedText]:
        """The texts of round `number`, with the states that the target has now."""
        prompts = self._prompts_of(number)
        if number not in self.continued_texts:
            continued = self.target.continue_prompts(prompts, self.added, self.reads, self.stopped)
            self.continued_texts[number] = [text.tokens.tolist() for text in continued]
        states = self.target.continue_prompts(self.continued_texts[number], 0, self.reads, self.stopped)
        return [replace(text, prompt=len(prompt)) for text, prompt in zip(states, prompts, strict=True)]

    def token_counts(self) -> Counter[int]:
        """How often each token occurs in the prompts, and in what the target adds to those of the first round."""
        counts: Counter[int] = Counter()
        for prompt in self.prompts:
            counts.update(prompt)
        for text, prompt in zip(self.texts(0), self._prompts_of(0), strict=True):
            counts.update(text.tokens[len(prompt) :].tolist())
        return counts

    def _prompts_of(self, number: int) -> list[list[int]]:
        """The prompts of round `number` that this process learns; at least one where the last round is short."""
        first = number * ROUND * self.world
        whole_round = self.prompts[first : first + ROUND * self.world]
        return whole_round[self.rank :: self.world] or whole_round[:1]
