"""The rows that the command `list` prints, one function for each subject.

The subjects are backends, layouts, invariants, faults, the catalogue of reports, models, families, rules and kinds of
tree.
"""

import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specverify.reports.writing import write_whole
from specverify.setup.files import make_folder

if TYPE_CHECKING:
    from specverify.reference.architecture import Architecture

LISTS = Path(".specverify") / "lists"
"""The folder of lists that take seconds to make."""

SUBJECTS = ("backends", "layouts", "invariants", "faults", "catalogue", "models", "families", "rules", "trees")


def rows_of(subject: str) -> list[dict[str, Any]]:
    """The rows of one subject, as `--json` prints them."""
    # Each subject imports what it lists when it is asked: some need torch, and most do not.
    rows_by_subject: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "backends": backends,
        "layouts": layouts,
        "invariants": invariants,
        "faults": plantable_faults,
        "catalogue": catalogue,
        "models": models,
        "families": _families,
        "rules": rules,
        "trees": trees,
    }
    return rows_by_subject[subject]()


def backends() -> list[dict[str, Any]]:
    """Every backend we ship; `unavailable` names the device or package that this machine lacks for it, else None.

    The last rows are forms of names for engines of the user, which cannot be opened without more words.
    """
    from specverify.backends.adapters import SHIPPED_BACKENDS, Adapter
    from specverify.backends.registry import FORMS, why_absent
    from specverify.backends.shipped import ROWS

    emulated = {row.name for row in ROWS if row.emulated}
    forms: list[dict[str, Any]] = [
        {
            "name": form,
            "device": where,
            "emulated": False,
            "sentence": sentence,
            "unavailable": None,
            "excluded": [],
            "known": [],
        }
        for form, where, sentence in FORMS
    ]
    shipped = [
        {
            "name": row.name,
            "device": row.device,
            "emulated": row.name in emulated,
            "sentence": row.sentence,
            "unavailable": why_absent(row.name),
            "excluded": list(row.excluded) if isinstance(row, Adapter) else [],
            "known": [fault.sentence for fault in row.known] if isinstance(row, Adapter) else [],
        }
        for row in SHIPPED_BACKENDS
    ]
    return [*shipped, *forms]


def layouts() -> list[dict[str, Any]]:
    """Every KV layout, and the backends that declare it, including those that cannot be opened on this machine."""
    from specverify.backends.shipped import ROWS
    from specverify.reference.layout import KINDS

    return [
        {"name": kind, "sentence": traits.sentence, "backends": [row.name for row in ROWS if kind in row.layouts]}
        for kind, traits in KINDS.items()
    ]


def invariants() -> list[dict[str, Any]]:
    """Every invariant with the stages it needs."""
    from specverify.properties.invariants import EVERY_INVARIANT

    return [
        {
            "name": invariant.name,
            "sentence": invariant.statement,
            "needs": [stage.word for stage in sorted(invariant.needs)],
        }
        for invariant in EVERY_INVARIANT
    ]


def _families() -> list[dict[str, Any]]:
    from specverify.commands.families import families

    return families()


def plantable_faults() -> list[dict[str, Any]]:
    """Every fault that can be planted.

    Faults are patches of the engine, and to import them takes seconds. The rows are kept under the digest of the files
    that they come from, so that they are made once for each version of these.
    """
    folder = Path(str(files("specverify.backends")), "faults")
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        digest.update(f"{file.relative_to(folder)}\0".encode() + file.read_bytes())
    cached_file = LISTS / f"faults-{digest.hexdigest()[:32]}.json"
    with suppress(OSError, ValueError):  # no such file yet, or a damaged one: the rows are made again
        rows: list[dict[str, Any]] = json.loads(cached_file.read_text())
        return rows
    fault_rows = _fault_rows()
    with suppress(OSError):  # a place that takes no files costs the same seconds again, no more
        make_folder(LISTS)
        write_whole(cached_file, json.dumps(fault_rows).encode())
    return fault_rows


def _fault_rows() -> list[dict[str, Any]]:
    from specverify.backends import faults

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
    from specverify.backends.faults.unplanted import REASONS_UNPLANTED, reports

    faults = plantable_faults()
    rows = []
    for report in reports():
        # Several faults may reproduce one report.
        planted = [fault["name"] for fault in faults if fault["id"] == report.id]
        rows.append(
            {
                "name": report.id,
                "state": "planted" if planted else "not planted",
                "title": report.title,
                "source": report.source,
                "faults": planted,
                "sentence": ", ".join(planted) if planted else REASONS_UNPLANTED[report.id],
            }
        )
    return rows


def models() -> list[dict[str, Any]]:
    """The checkpoints that packages ship, and the gallery of seeded models from which cases are drawn."""
    from specverify.checkpoints.opening import BUILT_IN
    from specverify.properties.strategies.models import GALLERY

    drawn = [{"name": f"gallery:{number}", "sentence": _describe(arch)} for number, arch in enumerate(GALLERY)]
    shipped = [
        {"name": f"builtin:{name}", "sentence": shipped_checkpoint.words}
        for name, shipped_checkpoint in BUILT_IN.items()
    ]
    return [*shipped, *drawn]


def _describe(arch: "Architecture") -> str:
    windows = f", windows {'/'.join(map(str, arch.windows))}" if any(arch.windows) else ""
    tied = ", tied" if arch.tied else ""
    return (
        f"{arch.family}, {arch.layers} layer{'s' * (arch.layers > 1)}, {arch.heads} heads on {arch.kv_heads} KV, "
        f"vocabulary {arch.vocab_size}, rotary {arch.rope.kind}{windows}{tied}"
    )


def rules() -> list[dict[str, Any]]:
    """Every acceptance rule, and the ways to name siblings for which it keeps the target's law."""
    from specverify.reference.rules import DRAWS, RULES, Rule

    rows = []
    for name, promise in RULES.items():
        # Siblings drawn with replacement may carry the same token.
        lossless_for = [draws for draws in DRAWS if Rule(name).lossless(draws, draws != "with-replacement")]
        sentences = [f"Lossless for siblings by {', '.join(lossless_for)}." if lossless_for else "Lossy, as declared."]
        sentences += [f"Condition: {promise.condition}."] if promise.condition else []
        sentences += ["It verifies chains alone."] if promise.chains_only else []
        rows.append(
            {
                "name": name,
                "state": "lossless" if promise.lossless else "lossy",
                "lossless_for": lossless_for,
                "chains_only": promise.chains_only,
                "condition": promise.condition,
                "source": promise.source,
                "sentence": " ".join([promise.sentence, *sentences]),
            }
        )
    return rows


def trees() -> list[dict[str, Any]]:
    """Every kind of drafted tree, and the ways to name its siblings for which a rule can be told their law."""
    from specverify.reference.draft_trees import TREE_LAWS
    from specverify.reference.rules import DRAWS

    return [
        {
            "name": law.name,
            "state": "any draws" if law.draws == DRAWS else ", ".join(law.draws),
            "draws": law.draws,
            "sentence": law.proposal,
        }
        for law in TREE_LAWS
    ]
