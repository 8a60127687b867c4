"""Admission: a backend's answer is made of our own types in the shapes of `reference.trace`, or refused in one line."""

from backends.admission.blocks import admitted_blocks
from backends.admission.declared import check_declaration
from backends.admission.misshapen import Misshapen
from backends.admission.traces import LiveDoor, admitted

__all__ = ["LiveDoor", "Misshapen", "admitted", "admitted_blocks", "check_declaration"]
