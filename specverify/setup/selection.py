"""Names on the command line that need no engine: invariants, KV layouts, ranks."""

from dataclasses import replace
from fnmatch import fnmatchcase

from specverify.backends.registry import UnknownBackend, check_address, shipped_names, unknown
from specverify.backends.shipped import ROWS
from specverify.properties.invariants import ALL, BESIDE_TOKENS, EVERY_INVARIANT
from specverify.properties.strategies.models import drawn_architectures
from specverify.properties.verdict.invariant import Invariant
from specverify.reference.abilities import Abilities
from specverify.reference.layout import KINDS
from specverify.reference.parallel import SHARDED
from specverify.setup.errors import MissingInput


class Unknown(ValueError):
    """A name on the command line is unknown; the message lists the known names, or the command that lists them."""


def invariants_matching(globs: tuple[str, ...], tokens_alone: bool = False) -> tuple[Invariant, ...]:
    """The invariants that any of `globs` matches; all invariants without globs.

    Args:
        globs: Patterns of names.
        tokens_alone: Whether the reference shows tokens alone; then those are chosen from that need no oracle.

    Raises:
        Unknown: A glob matches no invariant, or none that can be asked with this reference.
    """
    invariants = BESIDE_TOKENS if tokens_alone else ALL
    for glob in globs:
        if not any(fnmatchcase(invariant.name, glob) for invariant in invariants):
            check_globs((glob,))
            needs = (
                "an oracle, and the reference shows tokens alone" if tokens_alone else "--against an engine of tokens"
            )
            raise Unknown(f"every invariant that matches {glob!r} needs {needs}")
    return tuple(
        invariant for invariant in invariants if not globs or any(fnmatchcase(invariant.name, glob) for glob in globs)
    )


def check_backend(name: str) -> None:
    """Check that a backend that is named without a module is one that we ship.

    Raises:
        UnknownBackend: It is not, or the name is no address.
    """
    check_address(name)
    if ":" not in name and name not in shipped_names():
        raise UnknownBackend(unknown(name))


def check_drawn(name: str, within: Abilities) -> None:
    """Check that there is a model to draw cases on for an engine with these abilities.

    Raises:
        MissingInput: The engine declares that it loads none of them.
    """
    if not drawn_architectures(within):
        families = "any family" if within.families is None else ", ".join(within.families)
        raise MissingInput(
            f"--backend {name}: no model to draw cases on is of {families} and has heads of a multiple of "
            f"{within.head_multiple}, as it declares; widen the declaration, or judge a checkpoint (--model)"
        )


def check_globs(globs: tuple[str, ...]) -> None:
    """Check that every glob matches an invariant, whatever the reference.

    Raises:
        Unknown: A glob matches none.
    """
    for glob in globs:
        if not any(fnmatchcase(invariant.name, glob) for invariant in EVERY_INVARIANT):
            raise Unknown(f"no invariant matches {glob!r}: `specverify list invariants` names them")


LATENT = ",latent"
"""The end of a layout on the command line that asks for latent rows, as `paged,latent`."""


def kind_of(layout: str) -> str:
    """The kind of KV layout that the command line's word `layout` names; latent rows are no part of it."""
    return layout.removesuffix(LATENT)


def check_layout(layout: str, backends: tuple[str, ...], latent: bool = False) -> None:
    """Check that a KV layout exists, and that those of `backends` that are ours declare it.

    A backend that is not ours is checked when it is opened, in a process of its own.

    Args:
        layout: A kind of layout; or with `latent`, one that asks for latent rows.
        backends: Names of backends.
        latent: Whether latent rows may be asked for, which a checkpoint's family must have.

    Raises:
        Unknown: The layout does not exist, or a backend does not declare it.
    """
    kind = kind_of(layout)
    if kind not in KINDS:
        raise Unknown(f"no KV layout is called {kind!r}: known are {', '.join(KINDS)}")
    if kind != layout and not latent:
        raise Unknown(f"{layout} needs --model: drawn cases hold latent rows in every layout, where the model has them")
    for backend in backends:
        # The registry's rows are read, so that nothing is opened for this check.
        declared = next((row.layouts for row in ROWS if row.name == backend), None)
        if declared is not None:
            check_declared(kind, backend, declared)


def check_latent(layout: str, backend: str, settings: tuple[str, ...]) -> None:
    """Raise Unknown if `layout` asks for latent rows, and `backend` does not name them in its layout `settings`."""
    if kind_of(layout) != layout and "latent" not in settings:
        raise Unknown(f"{backend} declares no latent rows, which {layout} asks for")


def check_dtypes(dtypes: tuple[str, ...], backend: str, declared: tuple[str, ...]) -> None:
    """Raise Unknown, naming the first working dtype that is asked for and not declared by `backend`."""
    missing = next((dtype for dtype in dtypes if dtype not in declared), None)
    if missing is not None:
        raise Unknown(f"{backend} declares no dtype {missing}: it has {', '.join(declared)}")


def check_ranks(ranks: int, backends: tuple[str, ...]) -> None:
    """Check that those of `backends` that are ours declare runs on `ranks` ranks; others are checked when opened.

    Raises:
        Unknown: One does not.
    """
    for row in ROWS:
        if row.name in backends and ranks not in row.ranks:
            raise Unknown(_no_ranks(row.name, ranks, row.ranks))


def _no_ranks(name: str, ranks: int, declared: tuple[int, ...]) -> str:
    numbers = " and ".join(map(str, declared))
    return f"{name} declares no run on {ranks} rank{'s' * (ranks > 1)}: it has {numbers} (`cpu-ranks` has 2 and 4)"


def over_ranks(within: Abilities, ranks: int, name: str) -> Abilities:
    """`within`, with every target sharded over `ranks` ranks; on several, with families that have a sharded form alone.

    Raises:
        Unknown: The backend `name` does not declare the number.
    """
    if ranks not in within.ranks:
        raise Unknown(_no_ranks(name, ranks, within.ranks))
    sharded = tuple(family for family in SHARDED if within.families is None or family in within.families)
    return replace(within, ranks=(ranks,), spread=False, families=within.families if ranks == 1 else sharded)


def check_declared(layout: str, backend: str, declared: tuple[str, ...]) -> None:
    """Check that the kind of `layout` is among the KV layouts that `backend` declares.

    Raises:
        Unknown: It is not.
    """
    kind = kind_of(layout)
    if kind not in declared:
        raise Unknown(f"{backend} declares no KV layout {kind}: it has {', '.join(declared) or 'none'}")
