"""ExecuTorch's plan for EAGLE-3 on the models of a case, which are exported as its two programs.

A target is exported once for each choice of states, a head once for each target.
"""

from functools import lru_cache
from pathlib import Path

import torch

from specverify.backends.adapt.eagle3_programs import Eagle3Pair, open_pair
from specverify.backends.adapt.eagle3_runner import DECLARATION, LENGTHS, Eagle3Runner
from specverify.backends.adapt.export.executorch_eagle3 import save_draft, save_target
from specverify.backends.adapt.models import new_folder, transformers_model
from specverify.reference.architecture import Model
from specverify.reference.case import Case
from specverify.reference.draft.eagle3 import Eagle3
from specverify.reference.draft.hidden import HiddenStates
from specverify.reference.weights import head_weights

OPEN_PAIRS = 16
"""Pairs of programs that stay open, each with caches of its own."""


@lru_cache(maxsize=OPEN_PAIRS)
def target_file(model: Model, dtype: str, reads: HiddenStates) -> Path:
    """The program of a target, exported once for this process."""
    return save_target(transformers_model(model, dtype), reads, new_folder() / "target.pte", LENGTHS)


@lru_cache(maxsize=OPEN_PAIRS)
def draft_file(head: Eagle3, model: Model, dtype: str) -> Path:
    """The program of a head (`Head.weights`), exported once for this process."""
    weights = {name: torch.tensor(values) for name, values in head_weights(head, model).items()}
    return save_draft(transformers_model(model, dtype), head, weights, new_folder() / "draft.pte", LENGTHS)


@lru_cache(maxsize=OPEN_PAIRS)
def _open_exported(model: Model, dtype: str, reads: HiddenStates, head: Eagle3 | None) -> Eagle3Pair:
    return open_pair(target_file(model, dtype, reads), None if head is None else draft_file(head, model, dtype))


def open_case(case: Case) -> Eagle3Pair:
    """The programs of the models of a case, exported and opened once for this process."""
    draft = case.draft
    if isinstance(draft, Eagle3):
        words = draft.stored_words.weights
        return _open_exported(case.model, case.dtype, draft.reads, words)
    return _open_exported(case.model, case.dtype, HiddenStates((0,), shift=1), None)


def open_eagle3() -> Eagle3Runner:
    """The backend that exports the models of each case."""
    return Eagle3Runner(DECLARATION, open_case)
