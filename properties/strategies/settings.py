"""Hypothesis settings for loops of draws outside tests, reproducible by seed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from types import ModuleType
from typing import Any, TypeVar

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Unsatisfiable
from hypothesis.strategies import SearchStrategy

Drawn = TypeVar("Drawn")

DRAWING = (Phase.generate,)
"""Draw values; do not shrink a failing one."""

SEARCHING = (Phase.generate, Phase.shrink)
"""Draw values, and shrink a failing one."""


def explore(
    number: int,
    examples: int,
    strategy: SearchStrategy[Drawn],
    take: Callable[[Drawn], None],
    phases: tuple[Phase, ...] = DRAWING,
) -> None:
    """Call `take` with up to `examples` values of `strategy`, and with none where no draw is admitted.

    The same `number` draws the same values in every process, whatever modules it has loaded, as long as `take` does not
    raise and the version of Hypothesis is the same. Where `take` raises an `Exception`, Hypothesis shrinks the value if
    `phases` say so.
    """
    with without_local_constants(), suppress(Unsatisfiable):
        seed(number)(drawing_settings(examples, phases)(given(strategy)(take)))()


def drawing_settings(examples: int, phases: tuple[Phase, ...] = DRAWING, **more: Any) -> settings:
    """Settings for `examples` draws without database, printed reports, deadlines or health checks.

    A profile that a project or a CI loads does not change the draws: `backend` and `derandomize` are set here.
    """
    return settings(
        max_examples=examples,
        phases=phases,
        # Explicit values, since a loaded profile would otherwise change the draws.
        backend="hypothesis",
        derandomize=False,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        print_blob=False,
        **more,
    )


class _NoConstants:
    """Replaces Hypothesis's table of the constants in loaded modules with an empty one."""

    def set_for_type(self, choice_type: str) -> tuple[()]:
        """No constants of `choice_type`; Hypothesis calls this method since 6.131.10 at the latest."""
        return ()

    __getitem__ = set_for_type  # the call of Hypothesis 6.131.5


_OWN_CACHE: list[Any] = []
"""The one cache of constants for our own draws; it holds Hypothesis's own constants alone."""


@contextmanager
def without_local_constants() -> Iterator[None]:
    """Keep constants of the modules that this process has loaded out of the draws made in this context.

    Hypothesis after 6.131.0 draws one value in twenty from constants, half of these from the source of every
    loaded module that is no installed package: the user's adapter, and ours in a checkout. With them a seed draws
    other cases in every process. Versions before that have nothing to switch off. The constants are back when the
    context ends, for the Hypothesis tests of a project that also uses ours.
    """
    providers = _providers()
    if providers is None:
        yield
        return
    if not _OWN_CACHE:
        _OWN_CACHE.append(type(providers.CONSTANTS_CACHE)(1024))
    replacements = {"_get_local_constants": _NoConstants, "CONSTANTS_CACHE": _OWN_CACHE[0]}
    originals = {name: getattr(providers, name) for name in replacements}
    providers.__dict__.update(replacements)
    try:
        yield
    finally:
        providers.__dict__.update(originals)


def _providers() -> ModuleType | None:
    """Hypothesis's module that draws constants of loaded modules; None for a version that draws none."""
    try:
        providers = import_module("hypothesis.internal.conjecture.providers")
    except ModuleNotFoundError:
        return None
    return providers if hasattr(providers, "_get_local_constants") else None
