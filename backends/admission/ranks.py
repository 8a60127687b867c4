"""Admission of the runs of ranks, which a trace shows where the target is sharded."""

from specverify.backends.admission.misshapen import refusal
from specverify.backends.admission.numbers import TOKEN, admit_ints, admit_word
from specverify.backends.admission.stages import require_type
from specverify.reference.parallel import RankRun


def admit_rank_runs(value: object, ranks: int) -> tuple[RankRun, ...] | None:
    """The run of each of `ranks` ranks; None for a backend that does not show them.

    Raises:
        Misshapen: for a wrong number of runs, or a field of a wrong type.
    """
    if value is None:
        return None
    if not isinstance(value, (tuple, list)) or len(value) != ranks:
        description = f"{len(value)} runs" if isinstance(value, (tuple, list)) else ""
        raise refusal("ranks", value, f"the runs of {ranks} ranks", description)
    return tuple(_admit_run(f"ranks[{rank}]", run) for rank, run in enumerate(value))


def _admit_run(field: str, value: object) -> RankRun:
    run = require_type(field, value, RankRun)
    for name in ("tokens", "calls"):
        if not isinstance(getattr(run, name), (tuple, list)):
            raise refusal(f"{field}.{name}", getattr(run, name), "a tuple")
    tokens = tuple(
        admit_ints(f"{field}.tokens[{number}]", step, 0, None, TOKEN) for number, step in enumerate(run.tokens)
    )
    calls = tuple(admit_word(f"{field}.calls[{number}]", call) for number, call in enumerate(run.calls))
    return RankRun(tokens, admit_ints(f"{field}.lengths", run.lengths, 0), calls)
