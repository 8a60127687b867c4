"""Bit-stable runs that fit two cores, and this repository's own `--backend`, `backend` fixture and marks."""

import os
from collections.abc import Iterator
from typing import Any

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

import pytest  # noqa: E402 - the thread counts come first
import torch  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

from specverify.pytest_plugin import BackendUnderTest, yield_backend  # noqa: E402
from specverify.pytest_selection import Selection  # noqa: E402
from tests import rotation  # noqa: E402

torch.set_num_threads(1)

settings.register_profile(
    "gate", max_examples=8, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
)
settings.register_profile("night", settings.get_profile("gate"), max_examples=2000)
settings.load_profile(os.environ.get("SPECVERIFY_PROFILE", "gate"))

SELECTION = Selection()


def pytest_addoption(parser: pytest.Parser) -> None:
    SELECTION.add_options(parser)
    rotation.add_option(parser)


def pytest_configure(config: pytest.Config) -> None:
    SELECTION.register(config)


def pytest_sessionstart(session: pytest.Session) -> None:
    SELECTION.refuse_absent(session.config)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    SELECTION.parametrize(metafunc)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    SELECTION.choose(config, items)
    rotation.leave_out_of_turn(config, items)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    SELECTION.settle(session, exitstatus)


def pytest_report_header(config: pytest.Config) -> list[str]:
    return [*SELECTION.header(config), *rotation.header(config)]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    line = SELECTION.summary(config)
    if line is not None:
        terminalreporter.write_line(line)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    SELECTION.take_over(node.config, getattr(node, "workeroutput", None) or {})


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object | None:
    """The order of `tests/scheduling.py` for `-n`, where no other `--dist` is asked for."""
    if config.getoption("dist") != "load":
        return None
    from tests.scheduling import ByFile

    return ByFile(config, log)


@pytest.fixture(scope="session")
def backend(request: pytest.FixtureRequest) -> Iterator[BackendUnderTest]:
    """Each backend in turn; see `BackendUnderTest`."""
    yield from yield_backend(request)
