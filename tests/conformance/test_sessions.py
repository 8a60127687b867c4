"""The session machine on every backend that can be driven action by action, in every KV layout that it declares."""

import os
from pathlib import Path

import pytest

from specverify.conformance.drawn import no_request_notices, refuse, require_live
from specverify.properties.live.play import ROUND, play
from specverify.properties.live.watch import SessionStats
from specverify.pytest_plugin import BackendUnderTest
from specverify.reference.layout import KINDS
from specverify.reference.oracle.decoder import Oracle
from tests.tiers import each

STEPS, INTERRUPTIONS = 20_000, 1_000
"""What the slow test plays at least."""

SPREAD_MIB = 96
"""By how much memory may grow after the first quarter; a leak of 10 KiB per step would show."""


@pytest.fixture
def driven(backend: BackendUnderTest) -> BackendUnderTest:
    require_live(backend)
    return backend


@pytest.mark.parametrize("kind", each(KINDS, 4))
def test_no_request_notices_its_company(driven: BackendUnderTest, kind: str, tmp_path: Path) -> None:
    no_request_notices(driven, kind, tmp_path)


@pytest.mark.slow
def test_twenty_thousand_steps_and_a_thousand_interruptions(
    driven: BackendUnderTest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run it with `pytest -m slow tests/conformance/test_sessions.py`; it prints a line for every 1,000 steps."""
    played, oracle, kinds = SessionStats(), Oracle(), driven.declaration.layouts
    often = [kind for kind, traits in KINDS.items() if traits.pages]
    memory: list[float] = []
    number = 0
    while played.steps < STEPS or played.undisturbed < INTERRUPTIONS:
        kind = (*kinds, *often)[number % (len(kinds) + len(often))]
        kind = kind if kind in kinds else kinds[0]
        dtype = driven.declaration.dtypes[0]
        refuse(play(driven.subject, oracle, played, kind, dtype, ROUND, number=number, judged=8), tmp_path)
        number += 1
        while len(memory) < played.steps // 1000:
            memory.append(resident())
            with capsys.disabled():
                print(line(played, memory[-1]), flush=True)  # noqa: T201
    with capsys.disabled():
        print(played, flush=True)  # noqa: T201
    settled = memory[len(memory) // 4]
    assert memory[-1] - settled < SPREAD_MIB, f"MiB resident at every 1,000 steps: {memory}"


def line(played: SessionStats, resident_mib: float) -> str:
    """One row of the table."""
    return (
        f"{played.steps:6} steps, {played.advances:6} of single requests, {played.compared:6} outputs compared, "
        f"{played.interruptions.total():5} interruptions ({played.undisturbed} seen undisturbed), "
        f"{played.sessions:5} sessions ({played.judged} judged by every invariant), {played.ties} ties, "
        f"{resident_mib:.0f} MiB"
    )


def resident() -> float:
    """MiB of memory that this process holds."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
