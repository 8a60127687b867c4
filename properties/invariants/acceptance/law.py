"""Invariants of the exact law: the distribution that a backend's sampling emits.

The backend's own sampling code runs on tables of probabilities, without a model. Enumeration over all coins gives the
exact probability of each emitted block (`properties/laws/enumeration.py`), which is compared with the law of the rule.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from specverify.properties.invariants.acceptance.coins import NEEDS, judgeable_steps
from specverify.properties.invariants.applies import is_drawn, is_sampled, tables_of
from specverify.properties.laws import enumeration
from specverify.properties.laws.worlds import prune_tree, world_of
from specverify.properties.tolerance.bounds import UNIT
from specverify.properties.verdict.finding import Comparisons, Finding
from specverify.properties.verdict.invariant import TURNS, Fact, Invariant, NotApplicable, Oracle, Unobserved, needing
from specverify.properties.verdict.subject import NoTrace, Refusal, Subject, Tables
from specverify.reference import tape
from specverify.reference.case import Case
from specverify.reference.oracle import law
from specverify.reference.probability_world import Blocks, GivenTree, World
from specverify.reference.sampling import Sampling
from specverify.reference.trace import Array, Stage
from specverify.reference.tree import Shape, Tree

LIMIT = {"float64": 1e-10, "float32": 1e-6}
"""Largest total variation between an enumerated law of given probabilities and its rule's.

It covers rounding of thresholds alone.
"""

MOST_LIMIT = 1e-4
"""The limit of a law on tables has this bound, however small the temperature: a wrong law must stay visible."""

ROUNDINGS = 2
"""Roundings of a logit before it becomes a probability: behind a penalty, and behind the temperature."""

MOST_CELLS = 40_000
"""Largest number of cells in the enumeration of one law; with more, the invariant does not apply to the case."""

MOST_COINS = 1_400_000
"""Largest product of a law's cells and a tape's coins.

With it, giving up on a wide tree costs a second instead of half a minute.
"""

Block = tuple[int, ...]

GIVEN_SIZE = 400
"""Largest product of nodes and vocabulary of a tree whose acceptance law is enumerated; a larger tree is pruned."""


def enumerate_law(
    subject: Subject, key: object, shape: Shape, dtype: str, evaluate: Callable[[Array], Blocks]
) -> enumeration.Law:
    """The exact law of the blocks that `evaluate` returns for given coins; the subject remembers one law per key."""

    def make() -> enumeration.Law:
        # Coins are multiples of 1 / grid: the spacing of uniform numbers with the dtype's significant bits. A coin that
        # chooses from a law known in fractions is as fine as can be.
        grid = 2**53 if dtype == "float64" or not subject.takes_tape else 2**24
        # A wide tape costs more for each cell, so that fewer cells fit into the same time.
        order = enumeration.decisions(shape)
        coins = tape.stride(len(shape))
        max_cells = min(MOST_CELLS, MOST_COINS // coins)
        try:
            return enumeration.law(evaluate, coins, grid=grid, most_cells=max_cells, order=order)
        except enumeration.TooManyCells as error:
            raise NotApplicable(str(error)) from error
        except NoTrace as no_trace:
            if isinstance(no_trace.outcome, Refusal) and not subject.takes_tape:
                raise Unobserved(no_trace.outcome.why) from no_trace  # its own draws are not known
            raise

    enumerated = subject.compute_once(key, make)
    assert isinstance(enumerated, enumeration.Law)
    return enumerated


def law_exact(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """Given a step's own tree, laws and proposals, the emitted blocks have exactly the law of the rule."""
    tables = tables_of(subject, "on tables with a tape")
    steps = judgeable_steps(case, subject)
    if not steps:
        raise Unobserved("the backend does not reveal laws and proposals")
    number, (tree, target, proposal) = max(steps, key=lambda item: len(item[1][0]))  # it has the most decisions
    if not np.isfinite(target).all() or not np.isfinite(proposal).all():
        raise NotApplicable("a law is not finite; lossless.processors-per-node and proposal-consistent say so")
    if target.shape[1] > MOST_CELLS // 4:
        raise NotApplicable("a vocabulary of more tokens than a law may have cells; lossless.distribution samples it")
    world = _pruned_world(tree, target, proposal, case)
    key = ("given", case)
    # The given laws are float64 arrays, whatever the working dtype of the case is.
    dtype = subject.tables_dtype
    enumerated = enumerate_law(subject, key, world.tree, dtype, lambda coins: tables.verify(world, coins))
    expected_law = law.given_tree_law(world, is_drawn(case))
    yield Comparisons(enumerated.cells)
    yield from _stray_findings("acceptance.law-exact", enumerated, number)
    if enumerated.strays:
        return
    distance = float(law.distance(dict(enumerated.outcomes), expected_law))
    if distance > LIMIT[dtype]:
        measure = distance / LIMIT[dtype]
        yield _block_finding("acceptance.law-exact", number, expected_law, enumerated.outcomes, measure)


def _block_finding(
    name: str, number: int, expected_law: law.Law, outcomes: dict[Block, float], measure: float
) -> Finding:
    """The finding for the block whose probability is furthest off; the block itself settles ties."""

    def error(block: Block) -> tuple[float, Block]:
        return abs(float(expected_law.get(block, 0)) - outcomes.get(block, 0.0)), block

    worst = max(expected_law.keys() | outcomes.keys(), key=error)
    where: dict[str, int | str] = {"block": " ".join(map(str, worst))}
    expected, observed = float(expected_law.get(worst, 0)), outcomes.get(worst, 0.0)
    return Finding(name, Stage.ACCEPTED, number, where, expected, observed, measure)


def _pruned_world(tree: Tree, target: Array, proposal: Array, case: Case) -> GivenTree:
    """The step's tree pruned, level by level, to as many nodes as GIVEN_SIZE allows; rows sum to 1 in float64."""
    max_nodes = max(2, GIVEN_SIZE // target.shape[1])
    kept_nodes = sorted(sorted(range(len(tree)), key=lambda node: (tree.depth[node], node))[:max_nodes])
    shape = prune_tree(Shape(tree.parent), max_nodes)
    part = Tree(shape.parent, tuple(tree.token[node] for node in kept_nodes))
    rows, proposal_rows = target[kept_nodes], proposal[kept_nodes]
    laws = (rows / rows.sum(-1, keepdims=True), proposal_rows / proposal_rows.sum(-1, keepdims=True))
    return GivenTree(part, *laws, case.sampling, 1 if case.spread else case.ranks)


def limit_on_tables(world: World) -> float:
    """The largest total variation between the enumerated law of `world` and its rule's.

    Beside LIMIT it covers the roundings of logits: each is off by up to a unit roundoff of its size, which changes its
    probability by as large a part, in each row that a block passes.
    """
    sampling = world.sampling
    tables = np.concatenate([world.target[None], world.drafts])
    logit = float(np.abs(tables[np.isfinite(tables)]).max())
    tokens = world.shape.height + 1
    factor = max(sampling.repetition_penalty, 1 / sampling.repetition_penalty)
    logit = logit * factor + abs(sampling.presence_penalty) + abs(sampling.frequency_penalty) * tokens
    roundings = ROUNDINGS * UNIT[world.dtype] * logit / sampling.temperature * tokens
    return min(MOST_LIMIT, LIMIT[world.dtype] + roundings)


def law_joint(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """Drafting and acceptance together, on tables: all emitted tokens jointly have the target's law.

    A lossy rule is compared with its own law instead.
    """
    tables, world = tables_of(subject, "on tables with a tape"), world_of(case)
    enumerated = _law_of(subject, tables, world, ("world", case))
    name = "acceptance.law-joint"
    yield Comparisons(enumerated.cells)
    yield from _stray_findings(name, enumerated, 0)
    if enumerated.strays:
        return
    continuation = law.target_rows(world)
    height = world.shape.height + 1
    emitted: law.Law = dict(enumerated.outcomes)
    sampling, limit = world.sampling, limit_on_tables(world)
    # A lossless rule must reproduce the target's law; only a lossy one needs the law of its own program.
    if sampling.rule.lossless(sampling.draws, sampling.draws != "with-replacement"):
        distance = float(law.total_variation(emitted, continuation, height))
        if distance > limit:
            worst = law.sorted_biases(emitted, continuation, height)[0]
            yield _joint_finding(name, worst.context, worst.target, worst.law, distance / limit)
        return
    expected_law = law.world_law(world, whole_tree_first=False)
    distance = float(law.distance(emitted, expected_law))
    if distance > limit:
        yield _block_finding(name, 0, expected_law, enumerated.outcomes, distance / limit)


def _law_of(subject: Subject, tables: Tables, world: World, key: object) -> enumeration.Law:
    return enumerate_law(subject, key, world.shape, world.dtype, lambda coins: tables.rounds(world, coins))


def _joint_finding(name: str, context: tuple[int, ...], expected: object, observed: object, measure: float) -> Finding:
    """The finding for the token whose probability after the emitted prefix `context` is furthest off."""
    target_law, engine_law = np.asarray(expected, dtype=np.float64), np.asarray(observed, dtype=np.float64)
    token = int(np.abs(target_law - engine_law).argmax())
    where: dict[str, int | str] = {"token": token, "context": " ".join(map(str, context)) or "nothing"}
    return Finding(name, Stage.ACCEPTED, 0, where, float(target_law[token]), float(engine_law[token]), measure)


def _stray_findings(name: str, enumerated: enumeration.Law, number: int) -> Iterator[Finding]:
    """A finding if the enumeration met a request whose outcome changes with the coins of other requests."""
    if enumerated.strays:
        where: dict[str, int | str] = {"variant": "other requests in its batch"}
        yield Finding(name, Stage.ACCEPTED, number, where, "the same outcome", "another")


EXTREMES = (0.0, 2.0**-24, 0.5, 1.0 - 2.0**-24)
"""Coins at the ends of a float32 generator's range, and one in the middle."""


def edge_coins(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """With coins at 0, just above 0 and just below 1, no token of probability 0 is emitted, even if it was drafted."""
    tables = tables_of(subject, "on tables with a tape")
    if not subject.takes_tape:
        raise Unobserved("the backend takes no tape, so that no coin can be put at the end of its range")
    world = world_of(case, "edges")
    if not world.sampling.rule.promise.takes_coins:
        raise NotApplicable(f"{world.sampling.rule.name} acceptance looks at no coin")
    rng = np.random.default_rng(int(case.id, 16))
    # The target gets probability 0 for the draft's likeliest token, so that rejection at probability 0 is tried often.
    target = world.target.copy()
    target[np.arange(len(target)), world.drafts[0].argmax(-1)] = -np.inf
    # Without processors: no top-k, top-p or penalty may remove a token.
    sampling = Sampling(world.sampling.temperature, rule=world.sampling.rule, draws=world.sampling.draws)
    world = replace(world, target=target, sampling=sampling)
    coins = np.array(EXTREMES)[rng.integers(0, len(EXTREMES), size=(128, tape.stride(len(world.shape))))]
    blocks = tables.rounds(world, coins)
    for tokens in sorted({tuple(int(token) for token in row if token >= 0) for row in blocks.tokens}):
        yield Comparisons(len(tokens))
        for position, token in enumerate(tokens):
            if np.isneginf(target[world.row(tokens[:position]), token]):
                where: dict[str, int | str] = {
                    "position": position,
                    "token": token,
                    "side": "a coin at the end of its range",
                }
                yield Finding("acceptance.support-at-edges", Stage.ACCEPTED, 0, where, "probability 0", "emitted")
                return


def renamed_law(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """After renaming every token id of a world, the law is the renamed law of the original world."""
    tables = tables_of(subject, "on tables with a tape")
    world = world_of(case)
    new = np.random.default_rng([int(case.id, 16), 7]).permutation(world.vocab)
    if (new == np.arange(world.vocab)).all():
        # The identity would compare the law with itself.
        new = np.roll(new, 1)
    twin = _rename_world(world, tuple(int(token) for token in new))
    base_law = _law_of(subject, tables, world, ("world", case))
    twin_law = _law_of(subject, tables, twin, ("renamed", case))
    if base_law.strays or twin_law.strays:
        raise NotApplicable("outcomes depend on neighbours; acceptance.law-joint says so")
    if world.sampling.draws == "top-k" and _ranks_tie(world):
        raise NotApplicable("equal draft scores are ranked by id")
    yield Comparisons(base_law.cells)
    expected_law: law.Law = {
        tuple(int(new[token]) for token in block): mass for block, mass in base_law.outcomes.items()
    }
    distance = float(law.distance(expected_law, dict(twin_law.outcomes)))
    # Twice the limit, since both laws are enumerated and each has an error of its own.
    limit = limit_on_tables(world)
    if distance > 2 * limit:
        measure = distance / limit
        yield _block_finding("acceptance.renamed-law", 0, expected_law, twin_law.outcomes, measure)


def _ranks_tie(world: World) -> bool:
    ordered = np.sort(world.drafts, axis=-1)
    with np.errstate(invalid="ignore"):
        return bool((np.diff(ordered, axis=-1) == 0).any())


def _rename_world(world: World, new: tuple[int, ...]) -> World:
    """The same world with token t renamed to new[t].

    Raises:
        NotApplicable: Several contexts share one row of the tables, or a setting depends on token ids.
    """
    height = world.shape.height
    vocab = world.vocab
    if len(world.target) < sum(vocab**depth for depth in range(height + 1)):
        raise NotApplicable("contexts share rows")
    if world.sampling.bad_words or world.sampling.grammar or world.sampling.min_tokens or world.sampling.top_p < 1:
        raise NotApplicable("settings that name tokens, or break ties by id")
    target, drafts = world.target.copy(), world.drafts.copy()
    old_of = np.argsort(new)
    contexts: list[tuple[int, ...]] = [()]
    for _ in range(height + 1):
        for path in contexts:
            row = world.row(path)
            twin = world.row(tuple(new[token] for token in path))
            target[twin], drafts[:, twin] = world.target[row][old_of], world.drafts[:, row][:, old_of]
        contexts = [(*path, token) for path in contexts for token in range(vocab)]
    return replace(world, target=target, drafts=drafts, prompt=tuple(new[token] for token in world.prompt))


INVARIANTS = (
    Invariant(
        "acceptance.law-exact",
        "Given a step's tree, laws and proposals, acceptance emits exactly by the law of its rule.",
        NEEDS,
        law_exact,
        is_sampled,
        every=TURNS,
    ),
    Invariant(
        "acceptance.law-joint",
        "Drafting and acceptance together emit all tokens jointly by the target's law, or the rule's if it is lossy.",
        needing(Stage.EMITTED),
        law_joint,
        is_sampled,
        every=2,
    ),
    Invariant(
        "acceptance.support-at-edges",
        "With coins at the ends of their range, no token of probability 0 is emitted.",
        NEEDS,
        edge_coins,
        is_sampled,
    ),
    Invariant(
        "acceptance.renamed-law",
        "Renaming every token id renames the law of what is sampled and changes nothing else.",
        NEEDS,
        renamed_law,
        is_sampled,
        every=2 * TURNS,
    ),
)
