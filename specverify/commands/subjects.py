"""The rows that the command `list` prints, one function for each subject.

The subjects are backends, layouts, invariants, faults, the catalogue of reports, and models.
"""

from collections.abc import Callable
from typing import Any

from backends import faults
from backends.adapters import SHIPPED
from backends.faults.unplanted import UNPLANTED, reports
from backends.registry import FORMS, why_unavailable
from backends.shipped import ROWS
from properties.invariants import EVERY_INVARIANT
from properties.strategies.models import GALLERY
from reference.architecture import Architecture
from reference.layout import KINDS
from specverify.checkpoints.opening import BUILT_IN

SUBJECTS = ("backends", "layouts", "invariants", "faults", "catalogue", "models")


def rows_of(subject: str) -> list[dict[str, Any]]:
    """The rows of one subject, as `--json` prints them."""
    made: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "backends": backends,
        "layouts": layouts,
        "invariants": invariants,
        "faults": plantable,
        "catalogue": catalogue,
        "models": models,
    }
    return made[subject]()


def backends() -> list[dict[str, Any]]:
    """Every backend we ship; `unavailable` is the reason if it cannot be opened on this machine, else None.

    The last rows are forms of names for engines of the user, which cannot be opened without more words.
    """
    emulated = {row.name for row in ROWS if row.emulated}
    forms = [
        {"name": form, "device": where, "emulated": False, "sentence": sentence, "unavailable": None}
        for form, where, sentence in FORMS
    ]
    shipped = [
        {
            "name": row.name,
            "device": row.device,
            "emulated": row.name in emulated,
            "sentence": row.sentence,
            "unavailable": why_unavailable(row.name),
        }
        for row in SHIPPED
    ]
    return [*shipped, *forms]


def layouts() -> list[dict[str, Any]]:
    """Every KV layout, and the backends that declare it, including those that cannot be opened on this machine."""
    return [
        {"name": kind, "sentence": traits.sentence, "backends": [row.name for row in ROWS if kind in row.layouts]}
        for kind, traits in KINDS.items()
    ]


def invariants() -> list[dict[str, Any]]:
    """Every invariant with the stages it needs."""
    return [
        {"name": one.name, "sentence": one.statement, "needs": [stage.word for stage in sorted(one.needs)]}
        for one in EVERY_INVARIANT
    ]


def plantable() -> list[dict[str, Any]]:
    """Every fault that can be planted."""
    return [
        {
            "name": fault.name,
            "id": fault.id,
            "stage": fault.stage.word,
            "on": fault.on,
            "sentence": fault.sentence,
            "source": fault.source,
            "trigger": fault.trigger,
        }
        for fault in faults.ALL
    ]


def catalogue() -> list[dict[str, Any]]:
    """Every report of the catalogue, with the faults planted for it, or the reason why no fault can be planted."""
    rows = []
    for report in reports():
        # Several faults may reproduce one report.
        planted = [fault.name for fault in faults.ALL if fault.id == report.id]
        rows.append(
            {
                "name": report.id,
                "state": "planted" if planted else "not planted",
                "title": report.title,
                "source": report.source,
                "faults": planted,
                "sentence": ", ".join(planted) if planted else UNPLANTED[report.id],
            }
        )
    return rows


def models() -> list[dict[str, Any]]:
    """The checkpoints that packages ship, and the gallery of seeded models from which cases are drawn."""
    drawn = [{"name": f"gallery:{at}", "sentence": _described(arch)} for at, arch in enumerate(GALLERY)]
    shipped = [{"name": f"builtin:{name}", "sentence": words} for name, (_, _, words) in BUILT_IN.items()]
    return [*shipped, *drawn]


def _described(arch: Architecture) -> str:
    windows = f", windows {'/'.join(map(str, arch.windows))}" if any(arch.windows) else ""
    tied = ", tied" if arch.tied else ""
    return (
        f"{arch.family}, {arch.layers} layer{'s' * (arch.layers > 1)}, {arch.heads} heads on {arch.kv_heads} KV, "
        f"vocabulary {arch.vocab_size}, rotary {arch.rope.kind}{windows}{tied}"
    )
