"""The contract probe: on the emulation every rule holds and says EMULATED; a device that does otherwise is told."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specverify.backends.ascend import device
from specverify.backends.ascend.operators.install import install
from specverify.backends.ascend.operators.rules import RULES
from specverify.backends.ascend.probe.examples import EXAMPLES
from specverify.backends.ascend.probe.probe import ProbeSite, probe
from specverify.cli import main
from specverify.commands import doctor_checks
from specverify.commands.doctor_checks import rows_of

install()


def settle_cpu() -> None:
    """The CPU is never late."""


EMULATION = ProbeSite(torch.ops, "cpu", emulated=True, settle=settle_cpu)


def test_on_the_emulation_every_rule_holds_and_every_row_says_emulated() -> None:
    rows = rows_of(EMULATION)
    assert {row["rule"] for row in rows} == {*RULES, "numbers", "float64"}
    assert [row for row in rows if row["state"] != "ok"] == []
    assert all(row["detail"].startswith("EMULATED: ") and row["emulated"] for row in rows)


def test_a_device_that_does_otherwise_is_told() -> None:
    """Its operators take whatever they are given; what touches memory of others is never asked of a device."""
    calls: list[str] = []

    def lax(name: str) -> Any:
        def operator(**inputs: Any) -> tuple[torch.Tensor]:
            calls.append(name)
            return (inputs.get("query", torch.zeros(1)),)

        return operator

    class Space:
        def __getattr__(self, name: str) -> Any:
            return lax(name)

    ground = ProbeSite(SimpleNamespace(npu=Space(), atb=Space()), "cpu", emulated=False, settle=settle_cpu)
    rows = rows_of(ground)
    states = {row["rule"]: row["state"] for row in rows}
    foreign = {example.rule for example in EXAMPLES if example.foreign}
    for rule in RULES.values():
        expected = "absent" if rule.id in foreign else "struck" if rule.verdict == "rejects" else "ok"
        assert states[rule.id] == expected, rule.id
    assert states["numbers"] == "struck"
    assert "_npu_reshape_and_cache" in calls
    assert not any("EMULATED" in row["detail"] for row in rows)


def test_an_operator_that_is_not_there_holds_no_rule_and_breaks_none() -> None:
    results = probe(ProbeSite(SimpleNamespace(npu=torch.ops.npu, atb=SimpleNamespace()), "cpu", True, settle_cpu))
    absent = [result for result in results if result.operator.startswith("_npu")]
    assert {result.state for result in absent} == {"not run"}
    assert all(result.detail.startswith("no such operator here: ") for result in absent)
    assert {result.state for result in results if result not in absent} == {"holds"}


def test_a_kernel_that_fails_late_is_a_refusal_all_the_same() -> None:
    class Late:
        def __getattr__(self, name: str) -> Any:
            return lambda **_: (torch.zeros(1),)

    def fail() -> None:
        raise RuntimeError("error code is 507015, aicore exception")

    rows = rows_of(ProbeSite(SimpleNamespace(npu=Late(), atb=Late()), "cpu", emulated=False, settle=fail))
    # Laws are asked by other operators, which do not fail here.
    assert {row["state"] for row in rows if row["rule"] != "float64"} == {"struck", "absent"}
    assert any("aicore exception" in row["detail"] for row in rows)


def test_without_a_device_it_is_exit_code_3_and_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    if device.why_no_npu() is None:
        pytest.skip("this machine has an Ascend device")
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--probe", "ascend"])
    output = capfd.readouterr()
    assert ended.value.code == 3
    assert output.out == ""
    assert output.err.count("\n") == 1
    assert "torch_npu" in output.err
    assert "nothing emulated is probed" in output.err


@pytest.mark.parametrize("as_json", [False, True])
def test_the_table_and_the_json(as_json: bool, capfd: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setattr(doctor_checks, "probe_rows", lambda: rows_of(EMULATION))
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--probe", "ascend", *(["--json"] if as_json else [])])
    out = capfd.readouterr().out
    assert ended.value.code == 0
    assert "EMULATED" in out
    if as_json:
        assert {row["rule"] for row in json.loads(out)["rules"]} == {*RULES, "numbers", "float64"}
