"""Admission: rebuild a backend's answer from our own types, or refuse it.

Every array of the answer is given the shape that `specverify.reference.trace` names for it. An answer whose type, shape
or range no invariant could compare is refused in one line, which tells the adapter's author the field, what was found
and what is expected.
"""

from specverify.backends.admission.declared import check_declaration
from specverify.backends.admission.misshapen import Misshapen
from specverify.backends.admission.traces import LiveAdmission, admit_blocks, admit_trace

__all__ = ["LiveAdmission", "Misshapen", "admit_blocks", "admit_trace", "check_declaration"]
