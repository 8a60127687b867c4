"""The rows of `list families`: what is read, what is refused, where it runs."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from specverify.backends.shipped import ROWS
from specverify.properties.strategies.models import GALLERY
from specverify.reference.architecture import Architecture
from specverify.reference.family import FAMILIES
from specverify.reference.files.text_model import COMPOSITES
from specverify.reference.layout import KINDS
from specverify.reference.oracle.configuration import fields_read
from specverify.reference.oracle.family import FAMILIES as READ
from specverify.reference.oracle.family import OracleFamily
from specverify.reference.oracle.family.base import no_window
from specverify.reference.oracle.family.unread import UNREAD

TYPES_FILE = Path(__file__).with_name("model_types.json")
"""Every model type of the named version of transformers, and why plain transformers is no reference for it.

The reason is empty where it judges a tiny model, and null where none was made.

`python -m tests.measure types` writes it.
"""

TRIED = {"llama": "builtin:smollm2", "gemma3": "builtin:gemma3-270m"}
"""Families of which a published checkpoint was run, with its name; the others ran seeded weights alone."""

REFUSED = {"quantization_config": "null, or fp8 in blocks"}
"""Fields that every family refuses at other values than these."""


def families() -> list[dict[str, Any]]:
    """Every model family, with the fields of config.json that are honoured and refused, and where it runs.

    A sentence names the fields that not all families have.
    Then come models of several modalities whose text model is read. The last rows are the other model types that
    transformers knows: why each is not read, and whether plain
    transformers judges it in the oracle's place.
    """
    rows = [_row(name, READ[name]) for name in FAMILIES]
    shared = set.intersection(*({*row["honoured"]} for row in rows if row["honoured"]))
    for row in rows:
        own_fields = ", ".join(field for field in row["honoured"] if field not in shared)
        read = f"Reads {own_fields or 'the fields of every family'}." if row["honoured"] else "No checkpoint is read."
        row["sentence"] = f"{read} {row['sentence']}"
    read_types = {kind for row in rows for kind in row["model_types"]}
    rows += map(_composite_row, COMPOSITES)
    unread = [kind for kind in {**UNREAD, **_answers()["types"]} if kind not in {*read_types, *COMPOSITES}]
    return [*rows, *map(_unread_row, sorted(unread))]


@cache
def _answers() -> dict[str, Any]:
    """The content of TYPES_FILE."""
    content: dict[str, Any] = json.loads(TYPES_FILE.read_text(encoding="utf-8"))
    return content


def _row(name: str, family: OracleFamily) -> dict[str, Any]:
    fields = list(fields_read(family)) if family.model_types else []
    refused = _refused_fields(family) if fields else {}
    tried = TRIED.get(name, "seeded weights alone")
    at_one_value = ", ".join(f"{field} {value}" for field, value in refused.items() if field not in REFUSED)
    able, every = _backends(name), [row.name for row in ROWS]
    lacking = [backend for backend in every if backend not in able]
    parts = [
        f"Refuses other values than {at_one_value}." if refused else "",
        f"Runs in every KV layout, on {'every backend' if not lacking else ', '.join(able)}.",
        f"Tried: {tried}.",
    ]
    return {
        "name": name,
        "state": "read" if fields else "drawn alone",
        "model_types": list(family.model_types),
        "honoured": [field for field in fields if field not in refused],
        "refused": refused,
        "layouts": list(KINDS),
        "backends": able,
        "tried": tried,
        "sentence": " ".join(filter(None, parts)),
    }


def _composite_row(kind: str) -> dict[str, Any]:
    """The row of a model of several modalities."""
    return {
        **_bare_row(kind),
        "state": "text model read",
        "sentence": "Its text model is read by itself, as the model_type in its text_config says; towers are left.",
    }


def _unread_row(kind: str) -> dict[str, Any]:
    """The row of a model type that is not read."""
    why = UNREAD.get(kind, "its formulas are not written here")
    answers = _answers()["types"]
    version = _answers()["transformers"]
    if kind not in answers:
        judged = f"transformers {version} knows no such type"
    elif answers[kind] is None:
        judged = "--against transformers was not tried on it"
    elif answers[kind]:
        judged = f"--against transformers declines it: {answers[kind]}"
    else:
        judged = "--against transformers judges it"
    return {**_bare_row(kind), "sentence": f"Refused, since {why}; {judged}."}


def _bare_row(kind: str) -> dict[str, Any]:
    """The row of a model type that is no family, without its sentence."""
    return {
        "name": f"model_type {kind}",
        "state": "not read",
        "model_types": [kind],
        "honoured": [],
        "refused": {},
        "layouts": [],
        "backends": [],
        "tried": "",
    }


def _refused_fields(family: OracleFamily) -> dict[str, str]:
    """The fields that are refused at other values than one, with that value."""
    name, computed = family.activation
    partial = {} if family.partial_rotary else {"partial_rotary_factor": "1"}
    windowless = {"sliding_window": "null"} if family.slides is no_window else {}
    return {**REFUSED, name: computed, **partial, **windowless, **family.refuses}


def _backends(name: str) -> list[str]:
    """The backends whose attention computes some drawn architecture of the family."""
    drawn = [arch for arch in GALLERY if arch.family == name]
    equal = any(arch.value_dim == arch.head_dim for arch in drawn)
    return [
        row.name
        for row in ROWS
        if FAMILIES[name].sinks <= row.sinks
        and FAMILIES[name].indexed <= row.indexed
        and (row.soft_caps != "none" or _bare(drawn))
        and (row.unequal_widths or equal)
    ]


def _bare(drawn: list[Architecture]) -> bool:
    """Whether some architecture has no soft cap of attention."""
    return any(not arch.score_cap for arch in drawn)
