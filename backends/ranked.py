"""The engine over ranks that are processes, as a backend."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from specverify.backends.base import StageFailure, Unavailable, Unsupported
from specverify.backends.engine.backend import EngineBackend
from specverify.backends.engine.ranks.crew import Crew
from specverify.backends.engine.ranks.merged import merge_traces
from specverify.backends.engine.ranks.spread import merge_spread
from specverify.backends.engine.seams import Seams
from specverify.backends.engine.two_modes import in_mode
from specverify.reference.case import Case
from specverify.reference.parallel import SHARDED
from specverify.reference.probability_world import Blocks, GivenTree, World
from specverify.reference.trace import Array, Trace

FAILURES: dict[str, Callable[[Any], Exception]] = {
    "unsupported": Unsupported,
    "stopped": lambda why: StageFailure(*why),
    "raised": RuntimeError,
    "parted": RuntimeError,
}
"""The exception for each word of a failed rank, the most telling first."""


class RankedBackend(EngineBackend):
    """The engine whose ranks are processes; a live session, which is played action by action, runs them as threads."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.declaration = replace(self.declaration, families=SHARDED, spread=True)
        self._crews: dict[int, tuple[Seams, Crew]] = {}

    def run(self, case: Case) -> Trace:
        """See `specverify.backends.base.Backend.run`.

        Raises:
            Unavailable: A rank died, lags, or differs from rank 0.
        """
        if case.ranks == 1:
            return super().run(case)
        self._refuse_dtype(case)
        answers = self._ask_all(case.ranks, "run", case)
        if case.spread:
            return merge_spread(case, [trace for trace, _, _ in answers], [calls for _, calls, _ in answers])
        return merge_traces([trace for trace, _, _ in answers], [calls for _, calls, _ in answers], answers[0][2], case)

    def verify(self, given: GivenTree, tape: Array) -> Blocks:
        """See `specverify.backends.base.ExactLaw`."""
        return self._blocks("verify", given, tape)

    def rounds(self, world: World, tape: Array) -> Blocks:
        """See `specverify.backends.base.ExactLaw`."""
        return self._blocks("rounds", world, tape)

    def samples(self, world: World, seeds: Array) -> Blocks:
        """See `specverify.backends.base.ExactLaw`."""
        return self._blocks("samples", world, seeds)

    def _blocks(self, word: str, tables: GivenTree | World, coins: Array) -> Blocks:
        """The blocks of rank 0."""
        if tables.ranks == 1:
            blocks: Blocks = getattr(super(), word)(tables, coins)
        else:
            blocks = self._ask_all(tables.ranks, word, tables, coins)[0]
        return blocks

    def _ask_all(self, ranks: int, *order: Any) -> list[Any]:
        """The answers of all ranks to `order`, rank 0's first.

        Raises:
            Exception: One of FAILURES.
            Unavailable: as `run`.
        """
        try:
            answers = self._crew(ranks).ask(*order)
        except Unavailable:
            self._crews.pop(ranks, None)
            raise
        for failure_word, raises in FAILURES.items():
            for word, why in answers:
                if word == failure_word:
                    raise raises(why)
        return [answer for _, answer in answers]

    def _crew(self, ranks: int) -> Crew:
        """The crew of so many ranks; another one where a fault was planted since."""
        seams = in_mode(self.seams, self.mode)
        entry = self._crews.get(ranks)
        if entry is None or entry[0] is not self.seams:
            if entry is not None:
                entry[1].close()
            self._crews[ranks] = (self.seams, Crew(ranks, seams, self.declaration.name))
        return self._crews[ranks][1]

    @property
    def processes(self) -> tuple[int, ...]:
        """See `specverify.backends.base.Keeping`."""
        return tuple(process_id for _, crew in self._crews.values() for process_id in crew.processes)

    def close(self) -> None:
        """End all processes."""
        for _, crew in self._crews.values():
            crew.close()
        self._crews.clear()
