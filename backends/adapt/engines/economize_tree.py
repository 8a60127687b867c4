"""economize's tree pass, verifiers and cache, shown step by step.

The trees of a case reach economize through its public `Drafter`; a registered verifier of ours hands every decision to
economize's own and writes down what it was given and what it answered. economize chooses a token after the prompt
before it drafts: there the verifier names the pending root, so that the prompt is fed without its last token.
"""

from collections.abc import Callable
from typing import Any

import torch
from economize import VERIFIERS, CycleDecoder, DecodeConfig, Draft, Drafter, GreedySelector, TopPSampler, VerifyEvent
from economize.arch import adapter_for
from economize.decoding.verifiers import GreedyVerifier, RejectionVerifier
from economize.runtime import LayerRunner
from torch import Tensor

from specverify.backends.adapt.drafting import DRAFTS, TreeDraft
from specverify.backends.adapt.models import transformers_model
from specverify.backends.adapt.rounds import Round, kv_of, trace_of_rounds
from specverify.backends.base import Declaration
from specverify.reference.case import Case
from specverify.reference.trace import Kv, Stage, Trace

FAMILIES = ("llama", "pangu", "qwen2", "qwen3", "mistral", "gemma2")
"""The families that economize has an adapter of its own for; it runs a Pangu model as a Llama with biases."""


class Notebook:
    """The rounds of one request and the cache that economize fills."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.draft = TreeDraft(case, lambda scores: law(scores, case.sampling.temperature, case.sampling.top_p))
        self.coins = torch.Generator().manual_seed(case.sampling.seed ^ 0x5DEECE66D)
        self.rounds: list[Round] = []
        self.cache: Any = None
        self.has_root = False

    def kv(self, length: int) -> Kv | None:
        """A copy of the first `length` columns of economize's cache; None for none."""
        layers = sorted(self.cache.keys)
        keys, values = ([cache[layer][0] for layer in layers] for cache in (self.cache.keys, self.cache.values))
        return kv_of(keys, values, length)


def law(scores: Tensor, temperature: float, top_p: float) -> Tensor:
    """The law of a draft's scores [vocabulary], float64.

    economize's own `distributions` has float32 and cuts, even with a top_p of 1, what its running sum rounds away: a
    second sibling drawn without replacement may lie there.
    """
    laws = torch.softmax(scores.double() / temperature, -1)
    if top_p == 1.0:
        return laws
    sorted_law, order = laws.sort(-1, descending=True)
    sorted_law = sorted_law * (sorted_law.cumsum(-1) - sorted_law < top_p)
    return torch.zeros_like(laws).scatter_(-1, order, sorted_law / sorted_law.sum())


class CaseDrafter(Drafter):  # type: ignore[misc]
    """Proposes the trees of a case."""

    def __init__(self, notebook: Notebook) -> None:
        self._notebook = notebook

    def begin(self, runner: LayerRunner, cache: Any, batch_size: int) -> None:
        """Keep the cache, whose columns the notebook copies."""
        self._notebook.cache = cache

    def observe(self, exact: Any, columns: Tensor) -> None:
        """Do nothing: the trees of a case read no hidden states."""

    def draft_capacity(self, cycle_length: int) -> int:
        """The number of nodes below the root of the largest tree."""
        return self._notebook.draft.most_nodes

    def drafts_trees(self, verifier: Any) -> bool:
        """True: a chain is a tree of one path."""
        return True

    def propose(self, request: Any) -> Draft:
        """The next tree of the case, its rows by depth; an empty draft for the bare root."""
        notebook = self._notebook
        end = request.ends[0]
        tokens = request.seq[0, :end].tolist()
        proposal = notebook.draft.propose(tokens, notebook.coins)
        now = Round(proposal, notebook.kv(end - 1))
        notebook.rounds.append(now)
        tree = now.tree
        if len(tree) == 1:
            return Draft.empty(1, request.seq.device)
        offered_law = None if proposal.offered_law is None else proposal.offered_law[torch.tensor(now.order[1:])][None]
        parents = torch.tensor([[up - 1 for up in tree.parent[1:]]])
        return Draft(torch.tensor([tree.token[1:]]), [len(tree) - 1], parents, offered_law)


class _RecordingVerifier:
    """The part of a verifier that writes down; it stands before economize's own class."""

    notebook: Notebook

    def verify_batch(self, logits: Tensor, draft: Draft, selector: Any, seq: Tensor, ends: Any) -> Any:
        """Name the pending root after the prompt; else note what economize's verifier decides on a bare root."""
        book = self.notebook
        if not book.has_root:
            book.has_root = True
            return torch.tensor([0]), torch.tensor([book.case.prompt[-1]])
        accepted, following = super().verify_batch(logits, draft, selector, seq, ends)  # type: ignore[misc]
        self._note(logits, selector, [], int(following[0]))
        return accepted, following

    def verify_tree(self, logits: Tensor, draft: Draft, selector: Any) -> tuple[list[list[int]], list[int]]:
        """Note what economize's verifier decides on a tree."""
        paths, following = super().verify_tree(logits, draft, selector)  # type: ignore[misc]
        self._note(logits, selector, [row + 1 for row in paths[0]], int(following[0]))
        return paths, following

    def _note(self, logits: Tensor, selector: Any, path: list[int], bonus: int) -> None:
        now = self.notebook.rounds[-1]
        now.logits = logits[0].clone()
        now.path = path
        now.bonus = bonus
        now.law = None if selector.greedy else selector.distributions(logits[0]).clone()
        now.verified = None if now.before is None else self.notebook.kv(now.before.length)


@VERIFIERS.register("specverify-greedy")
class RecordingGreedy(_RecordingVerifier, GreedyVerifier):  # type: ignore[misc]
    """economize's greedy verifier, noted."""


@VERIFIERS.register("specverify-rejection")
class RecordingRejection(_RecordingVerifier, RejectionVerifier):  # type: ignore[misc]
    """economize's rejection verifier, noted."""


class EconomizeTree:
    """economize on the trees of a case, one request at a time."""

    declaration = Declaration(
        name="economize-tree",
        device="cpu",
        reveals=frozenset({Stage.DRAFTED, Stage.SCORED, Stage.ACCEPTED, Stage.EMITTED, Stage.COMMITTED}),
        dtypes=("float32", "bfloat16", "float16"),
        drafts=DRAFTS,
        layout_settings=(),
        max_temperature=float("inf"),
        rules=("multi-round",),
        processes=("top_p",),
        stops=("max_new_tokens", "eos", "stop_tokens"),
        families=FAMILIES,
        soft_caps="published",
        least_prompt=2,  # economize feeds at least one token before the pending root
    )

    def run(self, case: Case) -> Trace:
        """Decode `case` with economize; its rounds are the steps of the trace."""
        sampling = case.sampling
        greedy = case.sampling.greedy
        room = case.stops.room(len(case.prompt))
        selector = GreedySelector() if greedy else TopPSampler(sampling.temperature, sampling.top_p, sampling.seed)
        book = Notebook(case)
        config = DecodeConfig(
            cycle_length=2, verifier="specverify-greedy" if greedy else "specverify-rejection", sync_interval=1
        )
        events: list[VerifyEvent] = []
        note: Callable[[VerifyEvent], None] = lambda event: _note_commit(book, events, event)  # noqa: E731
        runner = LayerRunner(adapter_for(transformers_model(case.model, case.dtype)))
        decoder = CycleDecoder(runner, CaseDrafter(book), config, observers=(note,))
        decoder.verifier.notebook = book
        ends = frozenset({*case.stops.eos, *case.stops.stop_tokens})

        def ends_text(tokens: Tensor) -> bool:
            return len(tokens) > len(case.prompt) and int(tokens[-1]) in ends

        # The pending root is a stop where it happens to be one of the ending tokens: a predicate leaves it out.
        stop = ends_text if case.prompt[-1] in ends else ends
        with torch.no_grad():
            result = decoder.decode(torch.tensor(case.prefix), room + 1, selector, stop)
        return trace_of_rounds(case, book.rounds, tuple(result.tokens.tolist())[1:])


def _note_commit(book: Notebook, events: list[VerifyEvent], event: VerifyEvent) -> None:
    """Keep the cache as it is after a commit; the event of the prompt commits no round."""
    events.append(event)
    if len(events) > 1:
        book.rounds[-1].after = book.kv(event.start + len(event.tokens))


open_tree = EconomizeTree
