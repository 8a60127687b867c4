"""The schemas of the loaded torch_npu, and how they differ from the versions that we know.

Versions of torch_npu have different operators, and different arguments of one operator. So a call is chosen by the
schema that is loaded, never by the number of the version.
"""

import json
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from specverify.backends.ascend.operators.install import SCHEMAS

KNOWN = "2.13.0"
"""The version of torch_npu whose schemas `schemas.json` holds."""

OTHERS: dict[str, dict[str, str | None]] = json.loads((Path(__file__).parent / "other_versions.json").read_text())
"""By version of torch_npu, the operators whose schemas differ from those of KNOWN; None for an absent operator.

They are from libtorch_npu.so of the wheels for CPython 3.11 on x86_64.
"""


def takes(operator: str, argument: str = "") -> bool:
    """Whether the loaded `torch.ops.npu` has the operator, and an argument of that name if one is given."""
    packet = getattr(torch.ops.npu, operator, None)
    return packet is not None and (not argument or argument in _arguments(packet.default))


@lru_cache(maxsize=64)
def _arguments(overload: Any) -> frozenset[str]:
    return frozenset(argument.name for argument in overload._schema.arguments)


def schema_at(version: str, operator: str) -> str | None:
    """The schema of an operator in a version that we know, or None where that version lacks it."""
    return OTHERS.get(version, {}).get(operator, SCHEMAS["npu"][operator])


def versions_like(operator: str, schema: str | None) -> list[str]:
    """The versions that we know whose operator has this schema, or which lack it too, oldest first."""
    versions = sorted((KNOWN, *OTHERS), key=lambda version: [int(part) for part in version.split(".")])
    return [version for version in versions if _canonical(schema_at(version, operator)) == _canonical(schema)]


def _canonical(schema: str | None) -> str | None:
    """The schema as torch writes it, without a namespace."""
    if schema is None:
        return None
    text = str(torch._C.parse_schema(schema))
    return text.partition("::")[2] or text


def compare_schemas() -> Iterator[dict[str, str]]:
    """A row for each operator that our backends call: its name, state (ok, differs, absent) and a detail.

    ok means that some version that we know has exactly this schema.
    """
    for operator in SCHEMAS["npu"]:
        packet = getattr(torch.ops.npu, operator, None)
        schema = None if packet is None else str(packet.default._schema)
        versions = versions_like(operator, schema)
        state = "ok"
        detail = f"as in torch_npu {', '.join(versions)}"
        if schema is None:
            state = "absent"
            detail = f"absent, {detail}" if versions else "absent, and in no version that we know"
        elif not versions:
            state = "differs"
            detail = f"in no version that we know: {schema}"
        yield {"name": f"schema {operator}", "state": state, "detail": detail}
