"""Data parallelism: ranks with requests of their own, which step together.

They do so however unequal their acceptance is. Each rank holds the whole target. Before a step the ranks tell each
other their rows, as engines do whose experts are spread over ranks. A rank whose requests are over steps along with
no rows until no rank has any.
"""

from collections.abc import Sequence

import torch

from backends.engine.collectives.group import Group
from backends.engine.model.models import ModelCache
from backends.engine.seams import Seams
from backends.engine.server import Server
from reference.case import Case
from reference.session import Action
from reference.trace import Trace


def step_together(cases: Sequence[Case], shelf: ModelCache, seams: Seams, group: Group) -> tuple[Trace, list[int]]:
    """Play the case of this rank, one of `cases`, in step with the others.

    Returns:
        The trace, and for each step the number of ranks that had a request.
    """
    case = cases[group.rank]
    server = Server(case, shelf, seams)
    server.do(Action("add", (0,)))
    busy: list[int] = []
    while True:
        taken = len(server.trace.steps)
        living = 0 in server.living and (not case.steps or taken < case.steps)
        told = torch.stack(group.all_gather(torch.tensor([int(living)])))
        if not int(told.sum()):
            return server.trace, busy
        busy.append(int(told.sum()))
        if living:
            server.do(Action("step", (0,)))
        # Every rank meets the others once more behind the step, whether it ran a forward or stepped along.
        group.all_reduce(torch.tensor([len(server.trace.steps) - taken]))
