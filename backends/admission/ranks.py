"""Admission of the runs of ranks, which a trace shows where the target is sharded."""

from backends.admission.misshapen import refusal
from backends.admission.numbers import TOKEN, wholes, word
from backends.admission.stages import ours
from reference.parallel.ranks import RankRun


def admitted_ranks(value: object, ranks: int) -> tuple[RankRun, ...] | None:
    """The run of each of `ranks` ranks; None for a backend that does not show them.

    Raises:
        Misshapen: for a wrong number of runs, or a field of a wrong type.
    """
    if value is None:
        return None
    if not isinstance(value, (tuple, list)) or len(value) != ranks:
        found = f"{len(value)} runs" if isinstance(value, (tuple, list)) else ""
        raise refusal("ranks", value, f"the runs of {ranks} ranks", found)
    return tuple(_run(f"ranks[{rank}]", one) for rank, one in enumerate(value))


def _run(field: str, value: object) -> RankRun:
    one = ours(field, value, RankRun)
    for name in ("tokens", "calls"):
        if not isinstance(getattr(one, name), (tuple, list)):
            raise refusal(f"{field}.{name}", getattr(one, name), "a tuple")
    tokens = tuple(wholes(f"{field}.tokens[{at}]", step, 0, None, TOKEN) for at, step in enumerate(one.tokens))
    calls = tuple(word(f"{field}.calls[{at}]", call) for at, call in enumerate(one.calls))
    return RankRun(tokens, wholes(f"{field}.lengths", one.lengths, 0), calls)
