"""Exports that are kept for the rest of the process.

Each checkpoint is exported once by each exporter.
"""

import atexit
import shutil
import tempfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

from specverify.backends.adapt.models import OPEN_MODELS


@lru_cache(maxsize=OPEN_MODELS)
def exported(save: Callable[[str | Path, Path], Path], checkpoint: str | Path) -> Path:
    """The file that an exporter writes for a checkpoint: once for this process, and removed when the process ends."""
    folder = Path(tempfile.mkdtemp(prefix="specverify-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return save(checkpoint, folder / "export")
