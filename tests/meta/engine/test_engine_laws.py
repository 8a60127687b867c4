"""The engine's own sampling, enumerated coin by coin, has the target's law: every rule, on hundreds of worlds."""

from functools import partial
from itertools import product

import numpy as np
import pytest
import torch

from specverify.backends.compositions import open_cpu
from specverify.backends.engine.sampling.coins import Coins, inverse, round_coins
from specverify.backends.engine.sampling.forest import forest
from specverify.backends.engine.sampling.rounds import stream_uniforms
from specverify.backends.engine.sampling.rules import PROGRAMS
from specverify.backends.engine.sampling.seams import SamplingSeams
from specverify.backends.engine.sampling.verify import verify
from specverify.properties.laws import enumeration
from specverify.properties.laws.worlds import draw_laws
from specverify.reference.oracle import law
from specverify.reference.probability_world import GivenTree, World
from specverify.reference.rules import DRAWS, RULES, Rule
from specverify.reference.sampling import Sampling
from specverify.reference.tape import stride
from specverify.reference.tree import Shape, Tree
from tests.tiers import each, first

torch.set_num_threads(1)
ENGINE = open_cpu()
LIMIT = {"float64": 1e-10, "float32": 1e-6}
WORLDS = 150
"""Random worlds for each rule and kind of draft; both kinds make 300, a twentieth of them without `-m slow`."""

PARTS = first(range(20), 1)

LOSSLESS = [name for name, promise in RULES.items() if promise.lossless]


def random_shape(rng: np.random.Generator, nodes: int, chain: bool) -> Shape:
    return Shape((0, *(node - 1 if chain else int(rng.integers(0, node)) for node in range(1, nodes))))


def random_world(rng: np.random.Generator, rule: Rule, draws: str, dtype: str = "float64") -> World:
    """Up to 8 tokens and 7 nodes; drawn trees as large as a number of decisions allows, large ones more rarely."""
    most = 15_000 if rng.integers(12) == 0 else 2_000
    while True:
        vocab, nodes = int(rng.integers(2, 9)), int(rng.integers(2, 8))
        wide = len(RULES) if rule.name == "eagle" else 1
        if draws == "top-k" or wide * vocab**nodes * nodes < most:
            break
    shape = random_shape(rng, nodes, rule.promise.chains_only)
    rows = min(512, sum(vocab**depth for depth in range(shape.height + 1)))
    kind = str(rng.choice(["random", "random", "peaked", "zeros", "narrow", "ties", "equal"]))
    target, drafts = draw_laws(kind, rng, rows, max(vocab, 2), 2 if rule.name == "specinfer" else 1)
    with np.errstate(divide="ignore"):
        return World(shape, np.log(target), np.log(drafts), Sampling(1.0, rule=rule, draws=draws), dtype=dtype)


def enumerate_law(world: World, most_cells: int = enumeration.MOST_CELLS) -> enumeration.Law:
    grid = 2**53 if world.dtype == "float64" else 2**24
    order = enumeration.decisions(world.shape)
    exact_law = enumeration.law(
        lambda tape: ENGINE.rounds(world, tape), stride(len(world.shape)), grid=grid, order=order, most_cells=most_cells
    )
    assert not exact_law.strays
    assert not exact_law.disputed, "the engine reports cells that are not there"
    return exact_law


def lossless(world: World) -> bool:
    """Whether the rule promises it here: two drafts may name the same best token twice."""
    draws = world.sampling.draws
    distinct = draws == "without-replacement" or (draws == "top-k" and len(world.drafts) == 1)
    return world.sampling.rule.lossless(draws, distinct)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("drawn", [False, True], ids=["ranked", "drawn"])
@pytest.mark.parametrize("name", LOSSLESS)
def test_a_lossless_rule_is_lossless(name: str, drawn: bool, part: int) -> None:
    rng = np.random.default_rng([sum(name.encode()), drawn, part])
    rule, judged = Rule(name), 0
    for number in range(WORLDS // len(PARTS)):
        draws = DRAWS[1 + number % 2] if drawn else DRAWS[0]
        if not rule.lossless(draws, draws != "with-replacement"):
            draws = next(draw for draw in DRAWS[1:] if rule.lossless(draw, draw != "with-replacement"))
        world = random_world(rng, rule, draws)
        emitted: law.Law = dict(enumerate_law(world).outcomes)
        if lossless(world):
            off = law.total_variation(emitted, law.target_rows(world), world.shape.height + 1)
            judged += 1
        else:
            off = law.distance(emitted, law.world_law(world, whole_tree_first=False))
        assert off <= LIMIT["float64"], (number, world)
        for block in emitted:
            assert all(law.target_rows(world)(block[:index])[token] > 0 for index, token in enumerate(block)), block
    assert judged or name == "specinfer"


LOSSY = [
    (Rule("typical"), "top-k"),
    (Rule("typical", epsilon=0.09), "without-replacement"),
    (Rule("ensemble"), "without-replacement"),
    (Rule("fly", entropy=0.3), "without-replacement"),
    (Rule("synthetic"), "with-replacement"),
    (Rule("target-only", threshold_acc=0.9), "top-k"),
    (Rule("target-only", threshold_single=0.2), "top-k"),
    (Rule("target-only", threshold_acc=0.5, threshold_single=0.5), "without-replacement"),
    (Rule("target-only"), "with-replacement"),
    (Rule("specinfer"), "without-replacement"),
]


@pytest.mark.parametrize(("rule", "draws"), LOSSY, ids=lambda value: value if isinstance(value, str) else value.name)
def test_a_lossy_rule_is_as_lossy_as_its_definition(rule: Rule, draws: str) -> None:
    rng, apart = np.random.default_rng(3), []
    for _ in range(8):
        world = random_world(rng, rule, draws)
        emitted: law.Law = dict(enumerate_law(world).outcomes)
        assert law.distance(emitted, law.world_law(world, whole_tree_first=False)) <= LIMIT["float64"]
        apart.append(law.total_variation(emitted, law.target_rows(world), world.shape.height + 1))
    assert max(apart) > 1e-3, "no world showed that the rule is lossy"


@pytest.mark.parametrize(("name", "draws"), each(product(RULES, DRAWS), 2))
def test_float32_keeps_to_a_millionth(name: str, draws: str) -> None:
    rng = np.random.default_rng(11)
    for _ in range(3):
        world = random_world(rng, Rule(name), draws, "float32")
        expected_law = law.world_law(world, whole_tree_first=False)
        assert law.distance(dict(enumerate_law(world).outcomes), expected_law) <= LIMIT["float32"]


@pytest.mark.slow
def test_seven_drawn_nodes_over_eight_tokens() -> None:
    """A tree whose every token is drawn: more than a million cells, minutes and gigabytes."""
    rng = np.random.default_rng(0)
    shape, vocab = Shape((0, 0, 0, 1, 1, 2, 2)), 8
    target, drafts = draw_laws("random", rng, 73, vocab, 1)
    sampling = Sampling(1.0, draws="without-replacement")
    world = World(shape, np.log(target), np.log(drafts), sampling)
    off = law.total_variation(dict(enumerate_law(world, 8_000_000).outcomes), law.target_rows(world), 3)
    assert off <= LIMIT["float64"]


@pytest.mark.parametrize("name", list(RULES))
def test_a_given_tree_has_the_law_of_its_rule(name: str) -> None:
    rng = np.random.default_rng(5)
    for _ in range(8):
        shape = random_shape(rng, int(rng.integers(2, 8)), RULES[name].chains_only)
        vocab = int(rng.integers(2, 9))
        token = tuple(int(token) for token in rng.integers(0, vocab, size=len(shape)))
        target = rng.dirichlet(np.ones(vocab), len(shape))
        soft = rng.dirichlet(np.ones(vocab), len(shape))
        sampled = bool(rng.integers(2))
        proposal = soft if sampled else np.eye(vocab)[list(token)]
        draws = str(rng.choice(DRAWS[1:] if sampled else DRAWS))
        tree = Tree(shape.parent, token)
        given_tree = GivenTree(tree, target, proposal, Sampling(1.0, rule=Rule(name), draws=draws))
        given_law = enumeration.law(partial(ENGINE.verify, given_tree), stride(len(tree)))
        assert law.distance(dict(given_law.outcomes), law.given_tree_law(given_tree, sampled)) <= LIMIT["float64"]


@pytest.mark.parametrize("name", each(PROGRAMS, 3))
def test_a_rule_compiles_without_a_break_in_the_graph(name: str) -> None:
    rng = np.random.default_rng(1)
    shape = random_shape(rng, 5, RULES[name].chains_only)
    batch, vocab = 4, 6
    token = torch.tensor(rng.integers(0, vocab, size=(batch, 5)))
    target, proposal = (torch.tensor(rng.dirichlet(np.ones(vocab), (batch, 5))) for _ in range(2))
    uniforms = torch.tensor(rng.random((batch, stride(5))))
    seams = SamplingSeams()

    def run(uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        answer = verify(forest(shape, token), target, proposal, Coins(uniforms, 5), Rule(name), True, seams)
        return answer.path, answer.tokens

    compiled = torch.compile(run, backend="eager", fullgraph=True)
    for plain, fast in zip(run(uniforms), compiled(uniforms), strict=True):
        assert torch.equal(plain, fast)


def test_a_request_does_not_depend_on_its_batch() -> None:
    rng = np.random.default_rng(2)
    world = random_world(rng, Rule(), "without-replacement")
    tape = rng.random((64, stride(len(world.shape))))
    batch_blocks = ENGINE.rounds(world, tape)
    for row in range(0, 64, 7):
        alone = ENGINE.rounds(world, tape[row : row + 1])
        assert np.array_equal(alone.tokens[0], batch_blocks.tokens[row])


def test_inverse_cdf_at_its_edges() -> None:
    weights = torch.tensor([[0.0, 0.25, 0.0, 0.5, 0.25, 0.0]], dtype=torch.float64)
    ulp = 2.0**-53
    tokens_by_coin = {0.0: 1, 0.25 - ulp: 1, 0.25: 3, 0.75 - ulp: 3, 0.75: 4, 1 - ulp: 4}
    for coin, token in tokens_by_coin.items():
        drawn, low, high = inverse(torch.tensor([coin], dtype=torch.float64), weights)
        assert int(drawn[0]) == token
        assert float(low[0]) <= coin < float(high[0])


def test_coins_rounded_to_float32_stay_below_one() -> None:
    assert float(round_coins(torch.tensor([1 - 2.0**-53], dtype=torch.float64), torch.float32)[0]) == 1 - 2.0**-24


def test_the_stream_of_a_request_is_its_own() -> None:
    seeds = torch.tensor([5, 6, 2**62, 5])
    streams = stream_uniforms(seeds, 0, 1000)
    assert torch.equal(streams[0], streams[3])
    assert torch.equal(stream_uniforms(seeds, 400, 100), streams[:, 400:500]), "coins are addressed, not consumed"
    assert not torch.equal(streams[0], streams[1])
    many = stream_uniforms(torch.arange(20_000), 0, 8)
    assert float(many.min()) >= 0
    assert float(many.max()) < 1
    assert abs(float(many.mean()) - 0.5) < 4 * (1 / 12 / many.numel()) ** 0.5
    assert np.abs(np.corrcoef(many.numpy().T) - np.eye(8)).max() < 5 / 20_000**0.5
    assert len(np.unique(many.numpy())) == many.numel()
