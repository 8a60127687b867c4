"""The target of a training run, and the texts that it continues."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.utils import logging

from specverify.backends.base import Unsupported
from specverify.backends.engine.model.hidden import HiddenTap
from specverify.checkpoints.opening import directory_of, open_checkpoint
from specverify.reference.draft.hidden import HiddenStates
from specverify.setup.errors import UnusableInput


class Stopped(Exception):
    """The user asked for the end while the target was continuing texts."""


NORMED = HiddenStates(place="normed")
"""The output of the last norm, from which the target's law follows."""


@dataclass(frozen=True)
class ContinuedText:
    """A text of the target.

    Attributes:
        tokens: int64 [T], the prompt and what the target added.
        prompt: The number of the prompt's tokens.
        states: The states that the head reads, [T, width].
        last: The output of the last norm, [T, hidden].
    """

    tokens: Tensor
    prompt: int
    states: Tensor
    last: Tensor


class Target:
    """A checkpoint through transformers, in float32 until `narrow`.

    Attributes:
        directory: The checkpoint's folder.
        digest: The digest of its configuration and weights.
        config: The configuration of transformers.
        embedding, head: The two matrices over the vocabulary, float32 [vocabulary, hidden].
    """

    def __init__(self, model: str, device: str = "cpu") -> None:
        """Open the target.

        Raises:
            UnusableInput, MissingInput: The checkpoint cannot be opened; the line says why.
        """
        self.directory: Path = directory_of(model)
        self.digest: str = open_checkpoint(model, understood=False).digest
        self.device = torch.device(device)
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        local = {"trust_remote_code": False, "local_files_only": True}
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(self.directory, **local)
            network = AutoModelForCausalLM.from_pretrained(
                self.directory, dtype=torch.float32, use_safetensors=True, **local
            )
        except Exception as why:  # transformers and tokenizers raise types of their own, and plain Exception
            line = " ".join(str(why).split())[:160]
            raise UnusableInput(f"--model {model}: transformers cannot open it ({line})") from None
        self.network: Any = network.to(self.device).eval().requires_grad_(False)
        self.config: Any = network.config
        self.embedding: Tensor = network.get_input_embeddings().weight.detach().clone()
        tied = network.get_output_embeddings().weight.data_ptr() == network.get_input_embeddings().weight.data_ptr()
        self.head: Tensor = self.embedding if tied else network.get_output_embeddings().weight.detach().clone()

    @property
    def layers(self) -> int:
        """The number of the target's layers."""
        return int(self.config.num_hidden_layers)

    @property
    def last_layer(self) -> Any:
        """The module of the last layer; None where the network keeps its layers elsewhere."""
        layers = getattr(self.network.base_model, "layers", None)
        return None if layers is None else layers[-1]

    @property
    def last_norm(self) -> Tensor | None:
        """The weight of the norm after the last layer, if it has one."""
        return getattr(getattr(self.network.base_model, "norm", None), "weight", None)

    def narrow(self, dtype: torch.dtype) -> None:
        """Compute in `dtype` from now on; `embedding` and `head` stay float32."""
        self.network.to(dtype)

    def encode(self, texts: Sequence[str], most: int) -> list[list[int]]:
        """The last `most` tokens of each text, of those that have two at least."""
        sequences = [list(self.tokenizer(text).input_ids)[-most:] for text in texts]
        beyond = max((token for sequence in sequences for token in sequence), default=0)
        if beyond >= len(self.embedding):
            raise UnusableInput(
                f"{self.directory}: its tokenizer names token {beyond}, and the model has {len(self.embedding)}"
            )
        return [sequence for sequence in sequences if len(sequence) >= 2]

    @torch.no_grad()
    def continue_prompts(
        self,
        prompts: list[list[int]],
        added: int,
        reads: HiddenStates,
        stopped: Callable[[], bool] = lambda: False,
        tell_tokens: Callable[[int], None] = lambda count: None,
    ) -> list[ContinuedText]:
        """The greedy continuations of prompts by `added` tokens each, with the states of every token.

        No token ends a text, as in runs that ask for so many tokens. The prompts run side by side, padded on the left.
        `tell_tokens` is told after each forward how many tokens each prompt has been continued by.

        Raises:
            Stopped: `stopped` said so between two tokens.
        """
        longest = max(map(len, prompts))
        gaps = torch.tensor([longest - len(prompt) for prompt in prompts], device=self.device)
        tokens = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts], device=self.device)
        places = torch.arange(longest + added, device=self.device)
        mask = (places[None] >= gaps[:, None]).long()
        positions = (places[None] - gaps[:, None]).clamp(min=0)
        cache, parts, inputs = DynamicCache(), [tokens], tokens
        states: list[Tensor] = []
        last: list[Tensor] = []
        for turn in range(added + 1):
            if stopped():
                raise Stopped
            end = longest + turn
            tap = HiddenTap(reads, NORMED)
            with _refuse_unsupported(), tap.on(self.network.base_model):
                logits = self.network(
                    input_ids=inputs,
                    attention_mask=mask[:, :end],
                    position_ids=positions[:, end - inputs.shape[1] : end],
                    past_key_values=cache,
                    use_cache=True,
                    logits_to_keep=1,
                ).logits
            states.append(tap.states[reads])
            last.append(tap.states[NORMED])
            if turn < added:
                inputs = logits[:, -1].argmax(-1, keepdim=True)
                parts.append(inputs)
            tell_tokens(min(turn + 1, added))
        all_tokens, all_states, all_last = torch.cat(parts, 1), torch.cat(states, 1), torch.cat(last, 1)
        return [
            ContinuedText(
                all_tokens[lane, gap:].cpu(), len(prompt), all_states[lane, gap:].cpu(), all_last[lane, gap:].cpu()
            )
            for lane, (prompt, gap) in enumerate(zip(prompts, gaps.tolist(), strict=True))
        ]


def states_of(kind: str, layers: int, head_layers: int = 1) -> HiddenStates:
    """The states that a head of `kind` reads from a target of so many layers.

    EAGLE-3 reads the inputs of the layers 2, N // 2 and N - 3, as its authors do, which are the streams after the
    layers before them. A target that is too small for three such layers gives its first, middle and last streams. The
    layout of heads with several layers, `head_layers`, numbers inputs alone, so that it cannot name the last stream.

    Raises:
        UnusableInput: The target has too few layers.
    """
    if kind != "eagle3":
        return HiddenStates(place="normed", shift=int(kind == "eagle1"))
    inputs = (2, layers // 2, layers - 3)
    if not inputs[0] < inputs[1] < inputs[2]:
        last = layers - (head_layers > 1)
        inputs = (0, (last + 1) // 2, last)
    if len(set(inputs)) < 3:
        head = "an EAGLE-3 head" if head_layers == 1 else f"an EAGLE-3 head of {head_layers} layers"
        raise UnusableInput(f"{head} reads three layers of its target, which has {layers}")
    return HiddenStates(tuple(layer - 1 for layer in inputs), "residual", 1)


def texts_digest(*parts: str) -> str:
    """The SHA-256 of strings, each with its length before it."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"{len(part)}:{part}".encode())
    return digest.hexdigest()


@contextmanager
def _refuse_unsupported() -> Iterator[None]:
    try:
        yield
    except Unsupported as why:
        raise UnusableInput(f"--model: {why}") from None
