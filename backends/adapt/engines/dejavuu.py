"""dejavuu's engine on transformers models, shown step by step.

The trees of a case reach dejavuu through its `Drafter`, and a subclass of its transformers backend writes down what the
engine asked of it: the forward of a tree, and the rows that it keeps. Chains are trees of one path here: the crop of
dejavuu's chain path is refused by transformers 5 (`tests/strangers/found`).
"""

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from dejavuu.core.engine import generate
from dejavuu.core.sampling import Sampler
from dejavuu.decoders.hf import HFBackend
from dejavuu.drafters import Drafter, DraftTree

from specverify.backends.adapt.drafting import DRAFTS, TreeDraft
from specverify.backends.adapt.models import OPEN_MODELS, checkpoint_of
from specverify.backends.adapt.rounds import Round, kv_of, trace_of_rounds
from specverify.backends.base import Declaration, Unsupported
from specverify.reference.architecture import Model
from specverify.reference.case import Case
from specverify.reference.trace import Kv, Stage, Trace


class RecordingBackend(HFBackend):  # type: ignore[misc]
    """dejavuu's transformers backend; it writes into the rounds of the request that is running.

    Attributes:
        rounds: The rounds of the request so far.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rounds: list[Round] = []

    def forward(self, token_ids: list[int], past: Any, past_len: int, *options: Any) -> tuple[Any, Any, Any]:
        """Run a forward as dejavuu does; one behind a proposal gives its round the logits, [rows, vocabulary]."""
        if self.rounds:
            self.rounds[-1].before = _kv(past, past_len)
        logits, present, hidden = super().forward(token_ids, past, past_len, *options)
        if self.rounds:
            self.rounds[-1].logits = torch.from_numpy(logits)
            self.rounds[-1].verified = _kv(present, past_len)
        return logits, present, hidden

    def gather_kv(self, kv: Any, committed: int, path: list[int]) -> Any:
        """Gather the rows of the accepted path, as dejavuu does."""
        gathered = super().gather_kv(kv, committed, path)
        self.rounds[-1].path = path[1:]
        self.rounds[-1].after = _kv(gathered, committed + len(path))
        return gathered


def _kv(cache: Any, length: int) -> Kv | None:
    """The first `length` columns of a cache of transformers."""
    if not length:
        return None
    return kv_of([layer.keys[0] for layer in cache.layers], [layer.values[0] for layer in cache.layers], length)


class CaseDrafter(Drafter):  # type: ignore[misc]
    """Proposes the trees of a case, their rows by depth."""

    def __init__(self, case: Case, rounds: list[Round]) -> None:
        self._draft = TreeDraft(case)
        self._rounds = rounds

    def propose(self, ctx: list[int], past_len: int, budget: int) -> DraftTree:
        """The next tree of the case, which is a chain."""
        return self.propose_tree(ctx, past_len, budget, 1)

    def propose_tree(self, ctx: list[int], past_len: int, budget: int, width: int) -> DraftTree:
        """The next tree of the case."""
        self._rounds.append(Round(self._draft.propose(ctx)))
        tree = self._rounds[-1].tree
        return DraftTree(list(tree.token), [-1, *tree.parent[1:]])

    def update(self, accepted: list[int]) -> None:
        """Note the token behind the accepted rows."""
        self._rounds[-1].bonus = accepted[-1]


@lru_cache(maxsize=OPEN_MODELS)
def _open_recording_backend(model: Model, dtype: str) -> RecordingBackend:
    return RecordingBackend(str(checkpoint_of(model, dtype)), "cpu", dtype)


class DejavuuTree:
    """dejavuu on the trees of a case, one request at a time."""

    declaration = Declaration(
        name="dejavuu",
        device="cpu",
        reveals=frozenset({Stage.DRAFTED, Stage.SCORED, Stage.ACCEPTED, Stage.EMITTED, Stage.COMMITTED}),
        dtypes=("float32",),
        drafts=DRAFTS,
        layout_settings=(),
        max_temperature=float("inf"),
        draws=("top-k",),  # dejavuu's drafters name tokens and draw none
        processes=("top_p",),
        stops=("max_new_tokens", "eos"),
        families=("llama", "pangu", "qwen2", "qwen3", "mistral"),
        soft_caps="none",
        least_window=0,  # dejavuu 0.2.0 shows a tree what a window hides (`tests/strangers/found`)
    )

    def run(self, case: Case) -> Trace:
        """Decode `case` with dejavuu; its rounds are the steps of the trace.

        Raises:
            Unsupported: for more than one ending token, as dejavuu knows one.
        """
        if len(case.stops.eos) > 1:
            raise Unsupported(f"{len(case.stops.eos)} ending tokens: dejavuu ends at one")
        backend = _open_recording_backend(case.model, case.dtype)
        sampling = case.sampling
        rounds: list[Round] = []
        backend.rounds = rounds
        result = generate(
            backend,
            list(case.prompt),
            case.stops.room(len(case.prompt)),
            CaseDrafter(case, rounds),
            budget=case.most_nodes,
            eos=case.stops.eos[0] if case.stops.eos else None,
            tree=True,
            sampler=None if sampling.greedy else Sampler(sampling.temperature, sampling.top_p, sampling.seed),
        )
        return trace_of_rounds(case, rounds, tuple(int(np.int64(token)) for token in result.tokens))


open_tree = DejavuuTree
