"""The engine keeps what its adapter declares."""

from specverify.conformance import agrees


def test_ten_drawn_cases_agree():
    agrees("my_engine:open_", cases=10)
