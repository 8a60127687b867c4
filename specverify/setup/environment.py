"""The environment of a run: names and versions for reports and for `doctor`."""

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version

import specverify
from specverify.backends.flags import flags_set

PACKAGES = ("torch", "transformers", "numpy", "scipy", "hypothesis", "pytest", "safetensors")


def package_version(name: str) -> str | None:
    """The installed version of the package `name`, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def environment() -> dict[str, str]:
    """Versions, the machine and the set flags, as texts by which two runs can be compared."""
    versions = {name: package_version(name) for name in PACKAGES}
    return {
        "specverify": specverify.__version__,
        "python": platform.python_version(),
        **{name: installed for name, installed in versions.items() if installed},
        "platform": f"{platform.system()} {platform.machine()}",
        "cores": str(os.cpu_count()),
        "executable": os.path.basename(sys.executable),
        **flags_set(),
    }
