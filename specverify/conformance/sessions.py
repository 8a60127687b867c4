"""Sessions played action by action on an engine, watched after every action."""

from pathlib import Path

import pytest

from specverify.properties.live.play import play
from specverify.properties.live.watch import SessionStats
from specverify.properties.tally import Failure
from specverify.pytest_plugin import BackendUnderTest
from specverify.reference.oracle.decoder import Oracle
from specverify.reports import bundle
from specverify.reports.pages.terminal import failure_page
from specverify.setup.environment import environment


def refuse(failure: Failure | None, folder: Path) -> None:
    """Fail the test with the page of the failure, if there is one, after writing its bundle to `folder`."""
    if failure is not None:
        file = bundle.save(folder, failure, environment())
        pytest.fail(f"\n{failure_page(failure)}\n{file}", pytrace=False)


def require_live(backend: BackendUnderTest) -> None:
    """Skip the test where the engine has no sessions that can be played action by action."""
    if backend.subject.serve is None:
        pytest.skip(f"{backend.name} declares no sessions that are played action by action")


def no_request_notices(backend: BackendUnderTest, kind: str, folder: Path) -> None:
    """Play four sessions in the KV layout `kind`; fail the test where a request notices its company.

    The test is skipped where the engine does not declare the layout. Bundles go to `folder`.
    """
    if kind not in backend.declaration.layouts:
        pytest.skip(f"{backend.name} declares no KV layout {kind}")
    played, dtype = SessionStats(), backend.declaration.dtypes[0]
    failure = play(backend.subject, Oracle(), played, kind, dtype, sessions=4, actions=12, number=0)
    refuse(failure, folder)
    assert played.judged == played.sessions > 0
    assert played.compared > 0
    assert played.interruptions.total() > 0
