"""The work of the command `bench decode`: figures, page and exit code."""

from typing import Any

from specverify.backends.base import Unsupported
from specverify.bench.decode import DecodeOrder, measure
from specverify.bench.decode_figures import report_decode
from specverify.records.ranks import Ranks
from specverify.setup.errors import UnusableInput


def run_decode(order: DecodeOrder, ranks: Ranks) -> tuple[dict[str, Any], str, int]:
    """Run a bench.

    Returns:
        Figures, page and exit code, as `told`; a rank other than the first has no figures, and one line as its page.

    Raises:
        UnusableInput: The backend declines the model; `measure` raises it for other reasons too.
    """
    try:
        measured = measure(order, ranks)
    except Unsupported as why:
        raise UnusableInput(f"bench decode --backend {order.plan.backend}: {why}") from None
    if ranks.rank == 0:
        return report_decode(measured)
    count = len({turn.prompt for turn in measured.turns})
    line = f"rank {ranks.rank} of {ranks.world}: prompts finished: {count}"
    return {}, "\n".join([line, *measured.missing]), 3 if measured.missing else 0
