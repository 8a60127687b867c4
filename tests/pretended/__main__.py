"""`python -m tests.pretended COMMAND ...`: a command of specverify, or pytest, where there is the pretended device.

Backends are opened in this process, which alone has the device.
"""

import sys

import pytest

from specverify.cli import main
from specverify.first_contact import parts
from tests.inprocess import in_this_process
from tests.pretended.backends import device_and_backends
from tests.pretended.timed import make_timed_parts_small


def run(words: list[str]) -> int:
    """Run the command; its exit code."""
    with pytest.MonkeyPatch.context() as patch, device_and_backends():
        in_this_process(patch)
        if words[:1] == ["pytest"]:
            # Modules of ours are imported before pytest could rewrite them, which it warns of.
            return int(pytest.main(["-W", "ignore::pytest.PytestAssertRewriteWarning", *words[1:]]))
        if words[:1] == ["first-contact"]:
            make_timed_parts_small(patch)
            # The shipped tests run in a process of their own, in which the backend brings the device along.
            patch.setitem(parts.TESTED, "cuda", "tests.pretended.backends:cuda_eager")
        try:
            main(words)
        except SystemExit as end:
            return int(end.code or 0)
    raise AssertionError("a command ends by its exit code")


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
