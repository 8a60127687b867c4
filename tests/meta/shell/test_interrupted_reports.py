"""A signal that comes while the reports of a run are written waits until all of them are there."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from specverify.cli import main
from specverify.reports.pages import summary
from tests.inprocess import in_this_process
from tests.tiers import first


@pytest.mark.parametrize("name", first(["SIGINT", "SIGTERM", "SIGHUP"], 1))
def test_a_signal_during_the_reports(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    in_this_process(monkeypatch)
    page = summary.summary_page

    def interrupt_page(*facts: Any) -> str:
        os.kill(os.getpid(), getattr(signal, name))
        return page(*facts)

    monkeypatch.setattr(summary, "summary_page", interrupt_page)
    before = signal.getsignal(getattr(signal, name))
    result_file = tmp_path / "result.json"
    arguments = ["diff", "--cases", "2", "--jobs", "1", "--report", str(tmp_path), "--json", str(result_file)]
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--invariant", "lossless.completes"])
    assert ended.value.code == 0
    assert json.loads(result_file.read_text())["outcome"] == "agree"
    assert "AGREE" in capfd.readouterr().out
    assert signal.getsignal(getattr(signal, name)) is before
