"""Runs a Python file as it would run by itself, in a process that records as its environment says."""

import runpy
import sys
from pathlib import Path

from specverify.setup.errors import MissingInput
from specverify.traces.taps.tapping import tap_inherited


def main() -> None:
    """Tap this process, and run the file that the first argument names with the other arguments."""
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    try:
        tap_inherited()
    except MissingInput as why:
        sys.exit(f"specverify: {why}")
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
