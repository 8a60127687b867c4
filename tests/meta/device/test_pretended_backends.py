"""Our backends of an NVIDIA device on the pretended one: drawn cases agree, in every layout and with every draft."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from specverify.conformance.drawn import judge_all, no_request_notices
from specverify.properties.strategies import cases
from specverify.properties.strategies.settings import explore, without_local_constants
from specverify.pytest_plugin import BackendUnderTest
from specverify.reference.case import Case
from specverify.reference.layout import KINDS
from tests.pretended.backends import NAMES

OF_EACH_LAYOUT = 12
"""Cases that the slow tier draws in each layout."""


@pytest.fixture(scope="module", params=NAMES)
def subject(request: pytest.FixtureRequest) -> Iterator[BackendUnderTest]:
    subject = BackendUnderTest(f"tests.pretended.backends:{request.param}")
    yield subject
    subject.close()


@pytest.fixture(autouse=True)
def same_cases() -> Iterator[None]:
    with without_local_constants():
        yield


@pytest.mark.parametrize("count", [2, pytest.param(200, marks=pytest.mark.slow)])
def test_drawn_cases_agree(subject: BackendUnderTest, count: int) -> None:
    assert subject.declaration.emulated
    assert subject.declaration.device == "cuda"
    judge_all(subject, count, seed=count)


@pytest.mark.slow
@pytest.mark.parametrize("layout", KINDS)
def test_drawn_cases_of_each_layout_agree(subject: BackendUnderTest, layout: str) -> None:
    drawn: dict[Case, None] = {}

    def collect(case: Case) -> None:
        drawn.setdefault(case)

    explore(1, OF_EACH_LAYOUT, cases(subject.dtypes, layout=layout, within=subject.declaration), collect)
    for case in drawn:
        subject.check(case)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["branch", "paged", "prefix"])
def test_no_request_notices_its_company(subject: BackendUnderTest, layout: str, tmp_path: Path) -> None:
    no_request_notices(subject, layout, tmp_path)
