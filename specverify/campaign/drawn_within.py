"""The abilities within which a run draws cases, and what its sampling can see.

What the two sides of a comparison must share is checked here, before any case.
"""

from specverify.backends.base import Declaration
from specverify.plan import Plan
from specverify.properties.planned_sampling import FOCUSED, expected_draws
from specverify.properties.streams import ExpectedDraws
from specverify.properties.verdict.invariant import Oracle
from specverify.properties.verdict.peer import Peer, shared_abilities
from specverify.reference.abilities import Abilities
from specverify.reference.trace import Stage
from specverify.setup.selection import Unknown, over_ranks


def drawn_within(plan: Plan, declared: Declaration, oracle: Oracle) -> Abilities:
    """The abilities of the backend under test, cut to those of a reference that shows tokens alone.

    Raises:
        Unknown: One side lacks what the comparison needs, or no case samples under `--focus`.
    """
    within: Abilities = declared
    if isinstance(oracle, Peer):
        sides = f"{declared.name} and --against {plan.against}"
        if Stage.EMITTED not in declared.reveals:
            raise Unknown(f"{sides}: {declared.name} reveals no emitted tokens, so that there is nothing to compare")
        within = shared_abilities(declared, oracle.abilities)
        if within.families == ():
            raise Unknown(f"{sides} declare no family of models that both load")
    if plan.focus is not None and not within.max_temperature and plan.model is None:
        who = declared.name if declared.max_temperature == 0 else "--against " + (plan.against or "")
        raise Unknown(f"--focus {plan.focus}: {who} declares no temperature above 0, so that no case samples")
    return over_ranks(within, plan.ranks, declared.name) if plan.ranks else within


def dtypes_of(plan: Plan, declared: Declaration, oracle: Oracle) -> tuple[str, ...]:
    """The plan's dtypes in which both sides can be asked.

    Raises:
        Unknown: There is none.
    """
    if not isinstance(oracle, Peer):
        return plan.dtypes
    shared_dtypes = tuple(dtype for dtype in plan.dtypes if dtype in oracle.abilities.dtypes)
    if not shared_dtypes:
        reference_dtypes = ", ".join(oracle.abilities.dtypes)
        plan_dtypes = ", ".join(plan.dtypes)
        raise Unknown(
            f"{declared.name} is asked in {plan_dtypes}, and --against {plan.against} declares {reference_dtypes} alone"
        )
    return shared_dtypes


def sampling_of(
    plan: Plan, within: Abilities, oracle: Oracle, tables: bool, names: tuple[str, ...]
) -> ExpectedDraws | None:
    """The draws that a case of the plan adds to its sampling; None where no invariant of `names` asks for it."""
    if plan.model is not None or not FOCUSED & set(names):
        return None
    interval = within.variant_interval if isinstance(within, Declaration) else 1
    return expected_draws(within, isinstance(oracle, Peer), tables, plan.focus is not None, interval)
