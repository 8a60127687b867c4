"""`python -m tests.measure calibration`: quiet on correct samplers, and exit code 1 on a wrong one."""

import json
import re
from functools import partial
from pathlib import Path

import pytest

from specverify.properties.laws.sampled.draft_faults import GROUPS
from tests.measure import calibration
from tests.measure.__main__ import main


def test_calibration(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    result_file = tmp_path / "c.json"
    with pytest.raises(SystemExit) as ended:
        main(["calibration", "--tests", "300", "--seed", "3", "--json", str(result_file)])
    assert ended.value.code == 0
    out, _ = capfd.readouterr()
    assert re.search(r"^gate +quiet ", out, re.MULTILINE)
    assert re.search(r"^tests +300 +seed 3, ", out, re.MULTILINE)
    figures = json.loads(result_file.read_text())
    assert (figures["tests"], figures["seed"], figures["red"]) == (300, 3, False)
    assert figures["mean_e"] <= 1
    streams = figures["streams"]
    assert (streams["runs"], streams["red"]) == (150, 0.0)
    assert streams["mean_e"] <= 1 + 4 * streams["standard_error"]
    assert {name: group["share_at_100"] <= 0.02 for name, group in streams["groups"].items()} == dict.fromkeys(
        GROUPS, True
    )
    assert re.search(r"^stream on a coin of the draft ", out, re.MULTILINE)
    # The same command on a sampler that is wrong.
    monkeypatch.setattr(calibration, "calibrate", partial(calibration.calibrate, bias=0.2))
    with pytest.raises(SystemExit) as ended:
        main(["calibration", "--tests", "20", "--json", "-"])
    assert ended.value.code == 1
    out, err = capfd.readouterr()
    assert json.loads(out)["red"] is True
    assert re.search(r"^gate +RED ", err, re.MULTILINE)
