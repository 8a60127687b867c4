"""The component: one function of a stranger in our engine, as a backend.

A module with `open_ = component(attention=my_kernel)` is a backend: `--backend my_module:open_`. All else is our own
engine, so that the first stage that differs is the component's.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from specverify.backends.adapt.component.contract import Component, Contract
from specverify.backends.adapt.component.planted import (
    ATTENTION,
    COMMIT,
    VERIFY,
    with_attention,
    with_cache_commit,
    with_greedy_verify,
)
from specverify.backends.adapt.component.sampler import COINS, SAMPLER, Sampler
from specverify.backends.adapt.component.target import TARGET, TargetPart
from specverify.backends.adapt.component.tree_builder import TREE_BUILDER, TreeBuilder
from specverify.backends.adapt.models import checkpoint_of
from specverify.backends.base import Declaration, Unsupported
from specverify.backends.engine.backend import EngineBackend
from specverify.backends.engine.seams import Seams
from specverify.reference.case import Case
from specverify.reference.probability_world import Blocks, GivenTree, World
from specverify.reference.rules import DRAWS, PLAIN
from specverify.reference.trace import Array, Lowered, Stage, Step, Trace

CONTRACTS = {contract.kind: contract for contract in (TREE_BUILDER, VERIFY, SAMPLER, ATTENTION, COMMIT, TARGET)}
"""Every kind of component by its keyword."""


@dataclass(frozen=True)
class Settings:
    """The options of `component` beside the function."""

    name: str
    device: str
    dtypes: tuple[str, ...]
    trees: str
    rules: tuple[str, ...]
    draws: tuple[str, ...]
    variant_interval: int


PLANTED: dict[str, Callable[[Component, Seams], Seams]] = {
    VERIFY.kind: with_greedy_verify,
    ATTENTION.kind: with_attention,
    COMMIT.kind: with_cache_commit,
}
"""For each kind without a state of its own, the engine with such a function."""


def component(
    *,
    tree_builder: Callable[..., Any] | None = None,
    verify: Callable[..., Any] | None = None,
    sampler: Callable[..., Any] | None = None,
    attention: Callable[..., Any] | None = None,
    commit: Callable[..., Any] | None = None,
    target: Callable[..., Any] | None = None,
    name: str = "",
    device: str = "cpu",
    dtypes: tuple[str, ...] = ("float32",),
    trees: str = "any",
    rules: tuple[str, ...] = (),
    draws: tuple[str, ...] = DRAWS,
    variant_interval: int = 0,
) -> Callable[[], "ComponentBackend"]:
    """A backend's factory, from one function under test that takes the place of one stage of our engine.

    `CONTRACTS` describes each kind: the arguments that a function may take, by name, what it returns, and the
    invariants that judge it. Arguments are torch tensors on `device`, without a batch axis, copied for the function;
    answers may be tensors, NumPy arrays or lists. An answer of another type, shape or range is a finding of
    `lossless.completes` at the component's stage.

    Args:
        tree_builder: Lowers a drafted tree to index arrays.
        verify: Accepts drafted tokens greedily.
        sampler: Accepts drafted tokens against the laws of target and draft.
        attention: Computes attention under a mask.
        commit: Keeps the accepted rows of a KV cache.
        target: Opens a target with methods to prefill, decode and verify.
        name: The backend's name; by default the function's.
        device: The torch device of the engine around the function.
        dtypes: Working dtypes; a sampler that computes in float32 alone leaves float64 out.
        trees: Trees that the function takes, one of `specverify.reference.abilities.TREES`.
        rules: The acceptance rules whose law a sampler has; by default `chain` where `trees` is `chains`, else
            `multi-round`.
        draws: How siblings are named where a sampler can verify them, of `specverify.reference.rules.DRAWS`.
        variant_interval: As in `specverify.backends.base.Declaration`; above 1 for a slow function. 0 stands for 8 for
            a sampler that takes coins, which is run on tens of thousands of tapes for one law, and for 1 otherwise.

    Raises:
        TypeError: There is not exactly one function, or it does not fit its contract.
    """
    kinds = {"tree_builder": tree_builder, "verify": verify, "sampler": sampler, "attention": attention}
    kinds |= {"commit": commit, "target": target}
    functions = {kind: candidate for kind, candidate in kinds.items() if candidate is not None}
    if len(functions) != 1:
        given_kinds = " and ".join(functions) or "none"
        raise TypeError(f"component: give one function, as one of {', '.join(CONTRACTS)}; found {given_kinds}")
    ((kind, function),) = functions.items()
    if not callable(function):
        raise TypeError(f"component: {kind} is {type(function).__name__}, expected a function")
    part = Component(function, CONTRACTS[kind])
    if part.parameters & set(COINS) and not set(COINS) <= part.parameters:
        raise TypeError(f"component: {part.name} as sampler takes one of {' and '.join(COINS)}; take both or none")
    rules = rules or (("chain",) if trees == "chains" else (PLAIN,))
    interval = variant_interval or (8 if part.parameters & set(COINS) else 1)
    settings = Settings(name or part.name, device, dtypes, trees, rules, draws, interval)
    return lambda: ComponentBackend(part, settings)


class ComponentBackend(EngineBackend):
    """Our engine with one function of a stranger in it; its traces show what the function did, and what followed."""

    copies_prefills = False  # a stranger's target may keep state of its own beside our cache

    def __init__(self, component: Component, settings: Settings) -> None:
        super().__init__(settings.name, settings.device, dtypes=settings.dtypes)
        self._builder = TreeBuilder(component) if component.contract is TREE_BUILDER else None
        self._target = TargetPart(component) if component.contract is TARGET else None
        self._sampler = None
        if component.contract is SAMPLER:
            self._sampler = Sampler(component, float32="float64" not in settings.dtypes)
        part = self._builder or self._sampler or self._target
        if part is None:
            self.seams = PLANTED[component.contract.kind](component, self.seams)
        else:
            self.seams = part.plant_into(self.seams)
        self.declaration = restricted_declaration(self.declaration, component, settings)

    def run(self, case: Case) -> Trace:
        """See `specverify.backends.base.Backend.run`."""
        if self._target is not None:
            self._target.checkpoint = str(checkpoint_of(case.model, case.dtype))
        trace = super().run(case)
        return replace(trace, steps=tuple(self._own_part_of(step) for step in trace.steps))

    def _own_part_of(self, step: Step) -> Step:
        """The step without the arrays and coins that are not the component's."""
        if self._target is not None:
            # Our cache holds zeros in its place, and nobody sees the attention of the user's target.
            return replace(step, attended=None, committed=None)
        if self._builder is not None and step.lowered is not None:
            shown_arrays = {name: getattr(step.lowered, name) for name in self._builder.shown_names}
            return replace(step, lowered=Lowered(**shown_arrays))
        if self._sampler is not None and step.accepted is not None:
            # Nobody knows which coins the function used.
            return replace(step, accepted=replace(step.accepted, coins=None))
        return step

    def verify(self, given: GivenTree, tape: Array) -> Blocks:
        """See `specverify.backends.base.ExactLaw`."""
        if self._sampler is None:
            return super().verify(given, tape)
        with self._sampler.enumerating():
            return self._bounds(super().verify(given, tape))

    def rounds(self, world: World, tape: Array) -> Blocks:
        """See `specverify.backends.base.ExactLaw`."""
        if self._sampler is None:
            return super().rounds(world, tape)
        # One coin chooses from the law of the sampler's own draws: it must not be rounded to float32.
        wide = world if self._sampler.takes_coins else replace(world, dtype="float64")
        with self._sampler.enumerating():
            return self._bounds(super().rounds(wide, tape))

    def samples(self, world: World, seeds: Array) -> Blocks:
        """See `specverify.backends.base.ExactLaw`; raises Unsupported for a sampler.

        A law needs tens of thousands of rounds, each a call of the function. The law on given tables is enumerated, and
        whole generations test the draws.
        """
        if self._sampler is not None:
            raise Unsupported(f"{self.declaration.name} is sampled in generations, not round by round")
        return super().samples(world, seeds)

    def _bounds(self, blocks: Blocks) -> Blocks:
        """The blocks; without the intervals of coins where the function itself compares them."""
        assert self._sampler is not None
        return replace(blocks, low=None, high=None) if self._sampler.takes_coins else blocks


def restricted_declaration(engine: Declaration, component: Component, settings: Settings) -> Declaration:
    """The declaration of our engine, restricted to what the component sees."""
    contract: Contract = component.contract
    parameters = component.parameters
    after = frozenset(stage for stage in Stage if stage >= contract.stage)
    # Acceptance is judged on the logits that it was given.
    evidence = {Stage.DRAFTED} | ({Stage.SCORED} if contract.stage >= Stage.SCORED else set())
    narrow = replace(
        engine,
        reveals=after | evidence,
        trees=settings.trees,
        commits=("path",),
        layouts=("branch",),
        layout_settings=(),
        sessions=False,
        takes_tape=False,
        max_temperature=0.0,
        processes=False,
        variant_interval=settings.variant_interval,
    )
    if contract is TARGET:
        # All else is our engine: requests may sample, under its own rules and coins.
        return replace(
            narrow,
            reveals=frozenset({Stage.DRAFTED, Stage.SCORED, Stage.ACCEPTED, Stage.EMITTED}),
            takes_tape=True,
            max_temperature=float("inf"),
            processes=True,
            adapters=False,
            images=False,
            prompt_logprobs=False,
        )
    if contract is TREE_BUILDER:
        reach = {"window", "chunk"} <= parameters
        layout_settings = ("padded_nodes",) if "padded_nodes" in parameters else ()
        return replace(narrow, layout_settings=layout_settings, least_window=1 if reach else 0)
    if contract is ATTENTION:
        return replace(
            narrow,
            soft_caps="any" if "softcap" in parameters else "none",
            sinks=False,
            indexed=False,
            unequal_widths=False,
        )
    if contract is not SAMPLER:
        return narrow
    takes_coins = set(COINS) <= parameters
    return replace(
        narrow,
        takes_tape=takes_coins,
        greedy=False,
        max_temperature=float("inf"),
        rules=settings.rules,
        draws=settings.draws,
        tables_dtype="float64" if takes_coins and "float64" in settings.dtypes else "float32",
    )
