"""Live sessions on the named engine, in every KV layout that it declares."""

from pathlib import Path

import pytest

from specverify.conformance.drawn import no_request_notices, require_live
from specverify.pytest_plugin import BackendUnderTest
from specverify.reference.layout import KINDS


@pytest.mark.parametrize("kind", KINDS)
def test_no_request_notices_its_company(backend: BackendUnderTest, kind: str, tmp_path: Path) -> None:
    """Requests that are added, evicted, restored and cancelled leave one another as each is alone."""
    require_live(backend)
    no_request_notices(backend, kind, tmp_path)
