"""Options of `diff` that a backend would ignore, each refused by its name.

An option is in effect, or a case that holds it is declined by what the backend does not declare
(`specverify.reference.abilities`), or it is refused here, before any case is run.
"""

from specverify.plan import Plan
from specverify.reference.abilities import Abilities
from specverify.reference.rules import PLAIN
from specverify.setup.selection import Unknown


def refuse_ignored(plan: Plan, within: Abilities, backend: str) -> None:
    """Refuse an option of `plan` that the backend called `backend`, of these abilities, does not read.

    Raises:
        Unknown: with the option.
    """
    sampling = plan.sampling
    if not sampling.greedy:
        # Where an engine has a way of its own, cases hold the plain value.
        if not within.rules and sampling.rule.name != PLAIN:
            raise Unknown(f"--rule {sampling.rule.name}: {backend} accepts tokens by a rule of its own")
        if not within.draws and sampling.draws != sampling.rule.promise.draws:
            raise Unknown(f"--draws {sampling.draws}: {backend} names siblings in a way of its own")
    if plan.concurrency and not within.continuous:
        numbers = ",".join(map(str, plan.concurrency))
        raise Unknown(f"--concurrency {numbers}: {backend} declares no continuous batching")
    if plan.processors and "processors" not in within.processed:
        raise Unknown(f"--processor {plan.processors[0]}: {backend} declares no processing by functions of a user")
