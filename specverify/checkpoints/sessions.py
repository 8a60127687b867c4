"""Sessions of prompts on a checkpoint: side by side, with evictions and a fork.

Actions that are impossible when their turn comes do nothing: a request that has ended takes no further step.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from specverify.reference.abilities import Abilities
from specverify.reference.architecture import Checkpoint
from specverify.reference.case import Case
from specverify.reference.family import FAMILIES
from specverify.reference.files.fields import quote_value, read_json
from specverify.reference.layout import KINDS, PLAIN, KvLayout
from specverify.reference.malformed import Malformed
from specverify.reference.oracle.configuration import BY_TYPE
from specverify.reference.session import Action, Mate, Session
from specverify.setup.errors import UnusableInput
from specverify.setup.selection import kind_of

SESSION_LEVEL = (
    "lossless.schedule-independent",
    "lossless.interruption-isolated",
    "lossless.interrupted",
    "cache.allocator-conserves",
    "cache.prefix-reuse",
)
"""The invariants that judge sessions beside those that judge a long generation."""

PAGE = 16
"""Columns of a page, in layouts with pages."""

CONTINUED = 3
"""Tokens with which a fork goes on."""


def layout_of(name: str | None, checkpoint: Checkpoint, within: Abilities | None = None) -> KvLayout:
    """The layout that `--layout` names, with the fastest of its commits that `within` has; `branch` if it names none.

    Raises:
        UnusableInput: It names latent rows, and the checkpoint's family has none.
    """
    layout = name or PLAIN
    kind, latent = kind_of(layout), layout != kind_of(layout)
    if latent:
        _check_latent(layout, Path(checkpoint.source) / "config.json")
    traits = KINDS[kind]
    declared = traits.commits if within is None else within.commits
    possible = [commit for commit in traits.commits if commit in declared]
    # Without a common commit the case keeps the layout's own, and the backend declines it by name.
    commit = "fast" if "fast" in possible else (possible or traits.commits)[0]
    return KvLayout(commit, kind=kind, page_size=PAGE if traits.pages else 0, latent=latent)


def _check_latent(layout: str, where: Path) -> None:
    """Raise UnusableInput if `where`, a config.json, is of no family that has latent rows."""
    model_type = read_json(where).get("model_type")
    has_latent = {kind: FAMILIES[family.name].settings.latent_rank > 0 for kind, family in BY_TYPE.items()}
    if not has_latent.get(str(model_type), False):
        having = " and ".join(kind for kind, latent in has_latent.items() if latent)
        refusal = (
            f"{where.parent} is of model_type {quote_value(model_type)}, which has no latent rows ({having} have them)"
        )
        raise UnusableInput(f"--layout {layout}: {refusal}")


def side_by_side(cases: Sequence[Case], batch: int) -> Iterator[Case]:
    """One session for each `batch` cases, with a fork of its first request.

    Raises:
        UnusableInput: A prompt and its fork are too long for the model.
    """
    for first in range(0, len(cases), batch):
        group = cases[first : first + batch]
        yield _session(group, first)


def _session(group: Sequence[Case], first: int) -> Case:
    head, later = group[0], group[1:]
    mates = [Mate(case.prompt, case.draft, case.sampling, case.stops) for case in later]
    twin = replace(mates[0], prompt=mates[0].prompt[:CONTINUED]) if mates else _mate_of(head)
    everyone, fork = tuple(range(len(group))), len(group)
    last = everyone[-1:]
    actions = [Action("add", (number,)) for number in everyone]
    actions += [Action("step", everyone), Action("fork", (0, fork)), Action("step", (*everyone, fork))]
    actions += [Action("preempt", everyone[:1]), Action("evict", last), Action("step", (*everyone, fork))]
    actions += [Action("restore", last)]
    # Every step emits a token at least, so that these steps end every request.
    ends = max(case.stops.max_new_tokens for case in group)
    actions += [Action("step", (*reversed(everyone), fork))] * ends
    try:
        return replace(head, steps=0, session=Session((*mates, twin), tuple(actions)))
    except Malformed as why:
        raise UnusableInput(f"prompts {first + 1} to {first + len(group)} side by side: {why}") from None


def _mate_of(case: Case) -> Mate:
    return Mate(case.prompt[:CONTINUED], case.draft, case.sampling, case.stops)


def check_admitted(case: Case, within: Abilities, option: str) -> None:
    """Refuse a batch, which `option` asks for, that the backend, or its draft, cannot run.

    Raises:
        UnusableInput: with what the backend does not declare.
    """
    # The bare sentence of the abilities, which a declaration begins with its own name.
    if (lacking := Abilities.outside(within, case)) is not None:
        raise UnusableInput(f"{option}: the backend declares no {lacking}")
