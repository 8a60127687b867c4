"""Adapters: words, weights, the merged product, and requests of one server."""

from dataclasses import replace

import numpy as np
import pytest

from specverify.backends.compositions import open_engine
from specverify.properties.strategies.models import GALLERY
from specverify.reference.abilities import Abilities
from specverify.reference.adapters import ADAPTED, PROJECTIONS, Adapter
from specverify.reference.architecture import Architecture, Seeded
from specverify.reference.case import Case
from specverify.reference.draft import LanguageModel, Scripted
from specverify.reference.layout import KvLayout
from specverify.reference.malformed import Malformed
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.oracle.parameters import load
from specverify.reference.sampling import Stops
from specverify.reference.session import Action, Mate, Session
from specverify.reference.trace import Trace
from specverify.reference.tree import RankTree, Tree
from specverify.reference.weights import low_rank, seeded_weights

ARCH = next(arch for arch in GALLERY if arch.family == "llama" and arch.vocab_size > 8)
EVERY = Adapter(3, 2.0, PROJECTIONS, 1)
OTHER_ADAPTER = Adapter(2, 4.0, ("q", "v"), 2)
TREE = Tree((0, 0, 0, 1, 2, 1), (1, 3, 0, 2, 4, 1))


def test_the_merged_weights_are_those_with_the_scaled_product() -> None:
    model = Seeded(ARCH, 1, adapter=OTHER_ADAPTER)
    bare, merged, parts = seeded_weights(model.bare), load(model, "float64").state, low_rank(model)
    assert len(parts) == 2 * ARCH.layers
    for name, weight in bare.items():
        down, up = parts.get(name, (np.zeros((1, 1)), np.zeros((1, 1))))
        more = 2.0 * up @ down if name in parts else 0.0
        assert np.abs(merged[name] - weight - more).max() < 1e-12
    assert not low_rank(model.bare)
    other_parts = low_rank(Seeded(ARCH, 2, adapter=OTHER_ADAPTER))
    assert not np.array_equal(other_parts[min(parts)][0], parts[min(parts)][0])


@pytest.mark.parametrize("family", ADAPTED)
def test_the_engine_adds_what_the_oracle_merges_in_every_family(family: str) -> None:
    arch = next((arch for arch in GALLERY if arch.family == family and arch.vocab_size > 4), None)
    if arch is None:
        arch = replace(ARCH, family=family)
    case = Case(Seeded(arch, 1, adapter=EVERY), (2, 0, 1), Scripted((TREE,)), stops=Stops(4), dtype="float64")
    trace, true = open_engine("cpu-eager").run(case), Oracle()(case)
    assert trace.output == true.output
    plain = Oracle()(replace(case, model=case.model.bare))
    for step, true_step in zip(trace.steps, true.steps, strict=True):
        assert step.scored is not None
        assert true_step.scored is not None
        assert np.abs(step.scored.logits - true_step.scored.logits).max() < 1e-9
    assert plain.steps[0].scored is not None
    assert true.steps[0].scored is not None
    assert np.abs(plain.steps[0].scored.logits[0] - true.steps[0].scored.logits[0]).max() > 1e-2


def session(kind: str, *actions: Action) -> tuple[Case, Trace]:
    prompt = (2, 0, 1, 3, 1, 2)
    mates = (
        Mate(prompt, stops=Stops(3), adapter=EVERY),
        Mate(prompt, stops=Stops(3), adapter=OTHER_ADAPTER),
        Mate(prompt),
    )
    layout = KvLayout(kind=kind, page_size=2) if kind == "prefix" else KvLayout()
    case = Case(
        Seeded(ARCH, 1), prompt, stops=Stops(3), dtype="float64", layout=layout, session=Session(mates, actions)
    )
    return case, open_engine("cpu-eager").run(case)


@pytest.mark.parametrize("kind", ["branch", "prefix"])
def test_requests_of_one_batch_run_with_adapters_of_their_own(kind: str) -> None:
    adds = [Action("add", (request,)) for request in range(4)]
    case, trace = session(kind, *adds, *[Action("step", (2, 0, 1, 3))] * 3)
    assert trace.shared is not None
    for number, request in enumerate(trace.shared.requests):
        assert request is not None
        true = Oracle()(case.alone(number))
        assert request.output == true.output[: len(request.output)]
        for step, true_step in zip(request.steps, true.steps, strict=False):
            assert step.scored is not None
            assert true_step.scored is not None
            assert np.abs(step.scored.logits - true_step.scored.logits).max() < 1e-9


def test_pages_are_shared_under_one_adapter_alone() -> None:
    ended = (Action("add", (1,)), *[Action("step", (1,))] * 3)

    def page_counts(number: int) -> tuple[int, int]:
        """Pages that the prefix cache holds before and after a request with the same prompt has ended."""
        _, trace = session("prefix", *ended, Action("add", (number,)), *[Action("step", (number,))] * 3)
        assert trace.shared is not None
        return len(trace.shared.accounts[3].kept), len(trace.shared.accounts[-1].kept)

    assert page_counts(2)[1] == 2 * page_counts(2)[0] > 0, "pages of their own"
    case, trace = session("prefix", *ended, Action("add", (3,)))
    assert case.alone(3).model.adapter is None
    assert trace.shared is not None
    table = trace.shared.accounts[-1].tables[3]
    assert not set(table) & set(trace.shared.accounts[-1].kept)


def test_a_fork_across_adapters_prefills_its_own() -> None:
    case, trace = session("prefix", Action("add", (1,)), Action("fork", (1, 2)), Action("step", (1, 2)))
    assert trace.shared is not None
    account, twin = trace.shared.accounts[1], trace.shared.requests[2]
    assert not set(account.tables[1]) & set(account.tables[2])
    true = Oracle()(case.alone(2, case.alone(1).prompt))
    assert twin is not None
    assert twin.steps[0].scored is not None
    assert true.steps[0].scored is not None
    assert np.abs(twin.steps[0].scored.logits - true.steps[0].scored.logits).max() < 1e-9


def _model(**fields: object) -> Seeded:
    return Seeded(ARCH, 0, **{"adapter": OTHER_ADAPTER, **fields})  # type: ignore[arg-type]


def _arch(family: str) -> Architecture:
    return next(arch for arch in GALLERY if arch.family == family)


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda: Adapter(0, 1.0, ("q",)), "rank: 0 is not from 1 to 64"),
        (lambda: Adapter(1, float("nan"), ("q",)), "alpha: nan is not above 0 and at most 1024"),
        (lambda: Adapter(1, 1.0, ()), "projections: some of q, k, v, o, gate, up, down, in this order, each once"),
        (lambda: Adapter(1, 1.0, ("v", "q")), "projections: some of q, k, v, o, gate, up, down, in this order"),
        (lambda: Adapter(1, 1.0, ("q",), -1), "seed: seeds are not negative"),
        (lambda: _model(quantised="int8"), "adapter: belongs to margin weights of the working dtype"),
        (lambda: Seeded(_arch("gemma2"), 0, adapter=OTHER_ADAPTER), "adapter: belongs to margin weights"),
        (
            lambda: Case(_model(), (1,), LanguageModel(_model(), RankTree((0, 0), (0, 0)))),
            "draft.model: has an adapter or images; only targets have them",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(make: object, line: str) -> None:
    with pytest.raises(Malformed) as error:
        make()  # type: ignore[operator]
    assert str(error.value).startswith(line)


def test_an_engine_without_adapters_declines_every_request_that_names_one() -> None:
    able = Abilities(dtypes=("float32",), sessions=True, adapters=True, drafts=("scripted",), ranks=(1, 2))
    case = Case(_model(), (1,), dtype="float32")
    assert able.outside(case) is None
    assert replace(able, adapters=False).outside(case) == "adapter"
    assert able.outside(replace(case, ranks=2)) == "adapter on 2 ranks"
    both = replace(case, model=case.model.bare, session=Session((Mate((1,), adapter=OTHER_ADAPTER),), ()))
    assert replace(able, adapters=False).outside(both) == "adapter"
