"""The engine that the command line names, as the fixture `backend` of these tests.

A conformance run without an engine, or without the plugin, ends with one line.
"""

from collections.abc import Iterator

import pytest

from specverify.conformance.opened import open_or_exit
from specverify.properties.strategies.settings import without_local_constants
from specverify.pytest_plugin import SELECTION, BackendUnderTest


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run every test on each engine that the command line names."""
    if "backend" not in metafunc.fixturenames:
        return
    named = metafunc.config.getoption(SELECTION.option("backend"), None)
    metafunc.parametrize("backend", named or ["none"], indirect=True, scope="session")


def pytest_collection_modifyitems(config: pytest.Config) -> None:
    """End a run that names no engine, before its first test."""
    named = config.getoption(SELECTION.option("backend"), None)
    if named is None:
        pytest.exit("specverify.conformance needs its plugin: add `-p specverify`", returncode=2)
    if not named:
        line = f"specverify.conformance needs an engine: {SELECTION.option('backend')} pkg.module:factory"
        pytest.exit(line, returncode=2)


@pytest.fixture(scope="session")
def backend(request: pytest.FixtureRequest) -> Iterator[BackendUnderTest]:
    """Each named engine in turn."""
    with open_or_exit(request.param) as engine:
        yield engine


@pytest.fixture(autouse=True)
def same_cases() -> Iterator[None]:
    """Keep constants of loaded modules, the engine's among them, out of what Hypothesis draws."""
    with without_local_constants():
        yield
