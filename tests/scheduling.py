"""Which worker of `pytest -n` runs which tests: each file of `tests/meta` is one worker's and draws its cases once."""

from pathlib import PurePosixPath

from xdist.scheduler import LoadScopeScheduling


class ByFile(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no annotations
    """Hands out the files of `tests/meta` whole, the largest first, and then every other test by itself.

    Several of these files draw cases, find one or run a command once for all their tests, which under `--dist load`
    every worker did again. The tests of backends, which share nothing but an open backend, even out the end.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::", 1)[0]
        return file if PurePosixPath(file).parts[:2] == ("tests", "meta") else nodeid
