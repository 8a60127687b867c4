"""Exploring: the settings under which Hypothesis draws for our own loops, rather than for a test."""

from typing import Any

from hypothesis import HealthCheck, Phase, settings

DRAWING = (Phase.generate,)
"""Draw, and leave what is found as it is."""

SEARCHING = (Phase.generate, Phase.shrink)
"""Draw, and make what is found smaller."""


def exploring(examples: int, phases: tuple[Phase, ...] = DRAWING, **more: Any) -> settings:
    """Settings for `examples` draws that keep nothing, print nothing and are never stopped for being slow."""
    return settings(
        max_examples=examples,
        phases=phases,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        print_blob=False,
        **more,
    )
