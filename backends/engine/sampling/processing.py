"""The processing of logits to laws, per node and batched.

Penalties, bad words, min_tokens and custom processors look back at the tokens before a node: prompt, output and the
path from the root to the node. Then temperature, top-k, top-p and min-p make the law of the next token.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from specverify.backends.engine.sampling.forest import Forest
from specverify.backends.engine.uploads import upload
from specverify.reference import user_processors
from specverify.reference.sampling import Sampling, Stops


@dataclass(frozen=True)
class History:
    """The tokens before the next token of each node.

    Attributes:
        seen_tokens: bool [B, N, V]; whether the token is in prompt, output or path.
        counts: [B, N, V]; how often the token is in output or path.
        tail: int64 [B, N, T]; the last T tokens, -1 before the first token.
        emitted: int64 [B, N]; number of output tokens before the node's next token.
        sequence: Returns prompt + output + path of one request and node, for custom processors.
        legal: bool [B, N, V]; the tokens that the grammar allows after each node, none after a refused node; None for
            a request without a grammar.
    """

    seen_tokens: Tensor
    counts: Tensor
    tail: Tensor
    emitted: Tensor
    sequence: Callable[[int, int], tuple[int, ...]]
    legal: Tensor | None = field(default=None, kw_only=True)


def history(trees: Forest, prompt: tuple[int, ...], output: tuple[int, ...], sampling: Sampling, vocab: int) -> History:
    """The history of every node of `trees`.

    All requests share `prompt` and `output`; the last token of both together is the root.
    """
    batch, nodes = trees.token.shape
    device = trees.token.device
    # A bad word is banned at its last token, so as many tokens as come before that one must be known.
    tail_length = max([1, *(len(word) - 1 for word in sampling.bad_words)])
    # The -1 in front make a tail of fixed length, and match no bad word.
    text = upload(torch.tensor((*[-1] * tail_length, *prompt, *output)), device)
    seen_tokens = torch.zeros(vocab, dtype=torch.bool, device=device)
    seen_tokens[text[tail_length:]] = True
    counts = upload(torch.bincount(torch.tensor(output, dtype=torch.long), minlength=vocab), device)
    seen_tokens = seen_tokens.expand(batch, nodes, vocab)
    counts = counts.expand(batch, nodes, vocab)
    tail = text[-tail_length:].expand(batch, nodes, tail_length)
    own_token = torch.nn.functional.one_hot(trees.token, vocab)
    parents = trees.parent[..., None]
    for level in range(1, trees.height + 1):  # from the root down, since a node extends the history of its parent
        at_level = (trees.depth == level)[..., None]
        seen_tokens = torch.where(
            at_level, seen_tokens.gather(1, parents.expand_as(seen_tokens)) | (own_token > 0), seen_tokens
        )
        counts = torch.where(at_level, counts.gather(1, parents.expand_as(counts)) + own_token, counts)
        shifted = torch.cat([tail.gather(1, parents.expand_as(tail))[..., 1:], trees.token[..., None]], -1)
        tail = torch.where(at_level, shifted, tail)

    def sequence(request: int, node: int) -> tuple[int, ...]:
        path: list[int] = []
        while node:
            path.append(int(trees.token[request, node]))
            node = int(trees.parent[request, node])
        return (*prompt, *output, *reversed(path))

    return History(seen_tokens, counts, tail, len(output) + trees.depth, sequence)


def widen(logits: Tensor) -> Tensor:
    """The logits in float32; float64 logits stay float64."""
    return logits if logits.dtype == torch.float64 else logits.float()


def scores(logits: Tensor, sampling: Sampling, stops: Stops, past: History) -> Tensor:
    """Logits [B, N, V] after penalties, bans, custom processors and the grammar; 16-bit logits become float32.

    Rounding to 16 bits after a penalty would turn different logits into ties, and so change an arg-max.
    """
    logits = widen(logits)
    if sampling.repetition_penalty != 1.0:
        # Negative logits are multiplied: dividing them would raise them.
        penalty = sampling.repetition_penalty
        logits = torch.where(past.seen_tokens, torch.where(logits < 0, logits * penalty, logits / penalty), logits)
    # An integer tensor times a Python number would be float32, even for float64 logits.
    counts = past.counts.to(logits.dtype)
    if sampling.presence_penalty:
        logits = logits - sampling.presence_penalty * (counts > 0).to(logits.dtype)
    if sampling.frequency_penalty:
        logits = logits - sampling.frequency_penalty * counts
    for word in sampling.bad_words:
        lead = upload(torch.tensor(word[:-1], dtype=torch.long), logits.device)
        is_matched = (past.tail[..., past.tail.shape[-1] - len(lead) :] == lead).all(-1)
        logits = _ban(logits, [word[-1]], is_matched)
    if sampling.min_tokens and (stops.eos or stops.stop_tokens):
        logits = _ban(logits, [*stops.eos, *stops.stop_tokens], past.emitted < sampling.min_tokens)
    for name in sampling.processors:
        logits = _run_processor(name, logits, past)
    return logits if past.legal is None else mask_illegal(logits, past.legal)


def mask_illegal(logits: Tensor, legal: Tensor) -> Tensor:
    """The logits with -inf for tokens that are not `legal`; a row in which that leaves no token stays as it is.

    A softmax of such a row would be NaN. It belongs to a node behind which nothing is emitted.
    """
    legal_logits = logits.masked_fill(~legal, -torch.inf)
    return torch.where(legal_logits.isneginf().all(-1, keepdim=True), logits, legal_logits)


def _ban(logits: Tensor, tokens: list[int], is_banned: Tensor) -> Tensor:
    column = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
    column[upload(torch.tensor(tokens), logits.device)] = True
    return logits.masked_fill(is_banned[..., None] & column, -torch.inf)


def _run_processor(name: str, logits: Tensor, past: History) -> Tensor:
    """Apply the user's processor row by row, since it takes the logits of one position."""
    rows = logits.detach().cpu().double().numpy()
    changed = [
        [
            user_processors.apply(name, past.sequence(request, node), rows[request, node])
            for node in range(rows.shape[1])
        ]
        for request in range(rows.shape[0])
    ]
    return upload(torch.tensor(np.array(changed), dtype=logits.dtype), logits.device)


def last_softmax(logits: Tensor) -> Tensor:
    """The softmax of each row of `logits`."""
    return logits.softmax(-1)


def law(
    logits: Tensor,
    sampling: Sampling,
    stops: Stops,
    past: History | None,
    softmax: Callable[[Tensor], Tensor] = last_softmax,
) -> Tensor:
    """The law of the next token at each node [B, N, V]; `past` may be None if no setting looks back at earlier tokens.

    The order is: scores, temperature, top-k (tokens equal to the k-th stay), top-p (a token stays if the mass before it
    is below top_p; equal tokens in order of ids), min-p. 16-bit logits are widened first, because a nucleus that is cut
    in bfloat16 may hold other tokens.
    """
    logits = widen(logits)
    if past is not None:
        logits = scores(logits, sampling, stops, past)
    return truncate(logits / sampling.temperature, sampling, softmax)


def truncate(logits: Tensor, sampling: Sampling, softmax: Callable[[Tensor], Tensor] = last_softmax) -> Tensor:
    """The softmax of `logits`, which temperature has already divided, cut by top-k, top-p and min-p."""
    if 0 < sampling.top_k < logits.shape[-1]:
        least = logits.topk(sampling.top_k, -1).values[..., -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    probabilities = softmax(logits)
    if sampling.top_p < 1.0:
        ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
        mass_before = ordered.cumsum(-1) - ordered
        nucleus = mass_before < sampling.top_p
        nucleus[..., 0] = True  # the most probable token stays, whatever the rounding of the sum
        probabilities = probabilities * torch.zeros_like(nucleus).scatter(-1, order, nucleus)
        probabilities = probabilities / probabilities.sum(-1, keepdim=True)
    if sampling.min_p > 0.0:
        nucleus = probabilities >= sampling.min_p * probabilities.max(-1, keepdim=True).values
        probabilities = probabilities * nucleus
        probabilities = probabilities / probabilities.sum(-1, keepdim=True)
    return probabilities
