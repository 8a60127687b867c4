"""Residue: something that a run left in the backend's process, and that is told once for the backend."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Residue:
    """Something that a run left in its process, and that by itself changes no answer of a later case.

    Attributes:
        kind: The kind of thing, such as `environment` or `threads`; a run tells each kind once.
        what: A phrase, such as `set the environment variables A, B`, whose subject is the run.
        case: The id of the first case that left it; empty where the run was none of a case.
    """

    kind: str
    what: str
    case: str = ""
