"""The catalogue is accounted for: every public report is planted, or listed with the reason why it cannot be."""

from specverify.backends import faults
from specverify.backends.faults.unplanted import REASONS_UNPLANTED, reports
from specverify.commands.subjects import catalogue

PLANTED = {fault.id for fault in faults.ALL if fault.id}


def test_every_report_is_planted_or_has_its_reason() -> None:
    report_ids = [report.id for report in reports()]
    assert len(report_ids) == len(set(report_ids)) == 114
    assert set(report_ids) == PLANTED | set(REASONS_UNPLANTED)
    assert not PLANTED & set(REASONS_UNPLANTED)
    assert len(PLANTED) >= 90


def test_a_reason_is_a_sentence_and_a_fault_names_its_source() -> None:
    for why in REASONS_UNPLANTED.values():
        assert why[0].isupper()
        assert why.endswith(".")
    assert all(fault.source for fault in faults.ALL)
    assert len({fault.name for fault in faults.ALL}) == len(faults.ALL)


def test_a_row_names_faults_or_the_reason() -> None:
    rows = catalogue()
    assert {row["name"] for row in rows} == {report.id for report in reports()}
    for row in rows:
        assert (row["state"] == "planted") == bool(row["faults"]) == (row["name"] in PLANTED)
        assert row["sentence"] == (", ".join(row["faults"]) or REASONS_UNPLANTED[row["name"]])
        assert all(faults.fault_named(name).id == row["name"] for name in row["faults"])
