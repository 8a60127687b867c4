"""The rehearsal of a training: all of its parts once, on a few tokens, before any minute is spent.

The target is tapped, the head is made, a loss is computed and differentiated, the head drafts, and an EAGLE head is
written and read again as `--draft` reads it. Nothing of it stays.
"""

import math
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from specverify.checkpoints.opening import open_checkpoint
from specverify.reference.draft_files import open_head
from specverify.reference.files.fields import UnreadableCheckpoint
from specverify.setup.errors import UnusableInput
from specverify.training.acceptance import CHAIN, TREE, HeldOutText, head_acceptance
from specverify.training.heads.base import TrainedHead
from specverify.training.heads.make import make_head
from specverify.training.heads.medusa import MedusaModule
from specverify.training.plan import TrainingPlan
from specverify.training.published import HeadFolder
from specverify.training.states import batch_of
from specverify.training.target import Target, states_of

TOKENS, ADDED = 4, 8
"""The tokens of the prompt, and those by which the target continues it."""


def rehearse(plan: TrainingPlan, target: Target) -> None:
    """Run every part of the training of `plan` once.

    Raises:
        UnusableInput: The target has too few layers, no states where the head reads them or other shapes than the head
            takes over, or the head would not be read by `--draft`; the line says which.
    """
    reads = states_of(plan.kind, target.layers, plan.layers)
    total = len(target.head)
    named = torch.arange(min(plan.vocabulary, total)) if plan.kind == "eagle3" else None
    try:
        head = make_head(plan, target, named)
        (text,) = target.continue_prompts([[token % total for token in range(1, TOKENS + 1)]], ADDED, reads)
        loss = head(batch_of([text], False, str(target.device)), plan.steps)
        loss.backward()
        for tree in (CHAIN, TREE):
            head_acceptance(head, [HeldOutText(text.tokens, text.prompt, text.states.float())], tree)
    except (RuntimeError, IndexError, KeyError, AttributeError) as why:
        line = " ".join(str(why).split())[:160]
        raise UnusableInput(
            f"--model {plan.model}: {plan.kind} heads cannot be trained on it ({type(why).__name__}: {line})"
        ) from why
    if not math.isfinite(float(loss.detach())):
        raise UnusableInput(f"--model {plan.model}: the first loss is {float(loss.detach()):g}; its states overflow")
    # The layout of Medusa heads has no field that a target could break, and the files are as large as a vocabulary.
    if plan.kind != MedusaModule.kind:
        _check_readable(plan, target, head)


def _check_readable(plan: TrainingPlan, target: Target, head: TrainedHead) -> None:
    with TemporaryDirectory() as folder:
        HeadFolder(Path(folder) / "head", "").publish(head, target.config.to_dict())
        try:
            open_head(Path(folder) / "head", open_checkpoint(plan.model, understood=False))
        except UnreadableCheckpoint as why:
            line = str(why).replace(folder, "")[:200]
            raise UnusableInput(f"--model {plan.model}: `--draft` would not read its {plan.kind} head: {line}") from why
