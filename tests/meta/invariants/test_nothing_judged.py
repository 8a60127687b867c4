"""Nothing judged is nothing checked: an invariant that compared nothing says so, for each invariant and each stage."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from specverify.backends.compositions import open_cpu
from specverify.properties.invariants import ALL
from specverify.properties.strategies.models import GALLERY, small_draft
from specverify.properties.verdict.invariant import Invariant
from specverify.properties.verdict.judge import judge
from specverify.properties.verdict.subject import Crash, NoTrace, Refusal, Subject
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.draft import LanguageModel, Scripted
from specverify.reference.draft.block import Block
from specverify.reference.draft.eagle1 import Eagle1
from specverify.reference.draft.hidden import HiddenStates
from specverify.reference.draft.layer_head import HeadLayer
from specverify.reference.draft.trie import Trie
from specverify.reference.draft_trees import Dispatch, Expansion, Stopped, named_tree
from specverify.reference.grammar import Grammar
from specverify.reference.layout import KvLayout
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.session import Action, Mate, Session
from specverify.reference.trace import Stage, Step, Trace
from specverify.reference.tree import RankTree, Tree
from specverify.setup.subjects import subject_of
from tests.corruption import BY_NAME, ORACLE
from tests.models import LLAMA, TINY_LLAMA

MIXING = Seeded(next(architecture for architecture in GALLERY if architecture.family == "mixtral"), 0)
PROMPT = (3, 14, 15, 9, 6)
OWN_DRAFT = LanguageModel(LLAMA, RankTree((0, 0, 0, 1), (0, 0, 1, 0)))
MAPPED = LanguageModel(small_draft(17, 0), RankTree((0, 0, 0), (0, 0, 1)), tuple(range(0, 17, 2)))
HEAD = Eagle1(RankTree((0, 0, 0), (0, 0, 1)), HiddenStates(place="normed", shift=1), HeadLayer(2, 1, 4, 12))
SELECTED = Block(OWN_DRAFT.shape, HiddenStates((0,)), HeadLayer(2, 1, 4, 12), 3, 16, selector_rank=2, selector_top_k=3)
GROWN = LanguageModel(LLAMA, Expansion(2, 2, 5))
STOPPED = LanguageModel(LLAMA, Stopped(named_tree("D2"), 0.2))
TABLED = LanguageModel(LLAMA, Dispatch((1, 2), (named_tree("D2"), named_tree("D1")), (1, 2)))
TRIE = Trie(RankTree((0, 0, 0, 1), (0, 0, 1, 0)), 3, 9, shared=True)
FORK = Scripted((Tree((0, 0, 0, 1, 1), (6, 1, 2, 4, 5)), Tree((0, 0), (6, 4))))
STEP = Action("step", (0, 1))


def actions(*words: str) -> tuple[Action, ...]:
    """`kind number number` each."""
    word_lists = [word.split() for word in words]
    return tuple(Action(kind, tuple(map(int, numbers))) for kind, *numbers in word_lists)


HYBRID = Seeded(next(arch for arch in GALLERY if arch.recurrent), 0)
ON_AXES = Seeded(replace(next(arch for arch in GALLERY if arch.words.three_axes), vocab_size=LLAMA.vocab_size), 1)
INDEXED = Seeded(next(arch for arch in GALLERY if arch.words.indexed), 1)

CASES = {
    "hybrid": Case(HYBRID, PROMPT, LanguageModel(HYBRID, OWN_DRAFT.shape), stops=Stops(4), dtype="float64"),
    "tree": Case(LLAMA, PROMPT, FORK, stops=Stops(4), dtype="float64"),
    "sharded": Case(LLAMA, PROMPT, FORK, stops=Stops(3), ranks=2),
    "imaged": Case(ON_AXES, PROMPT, FORK, stops=Stops(4), dtype="float64"),
    "mixing": Case(MIXING, PROMPT, FORK, stops=Stops(4), dtype="float64"),
    "selected": Case(LLAMA, PROMPT, SELECTED, stops=Stops(4), dtype="float64"),
    "indexed": Case(INDEXED, PROMPT, FORK, stops=Stops(4), dtype="float64"),
    "head": Case(LLAMA, PROMPT, HEAD, stops=Stops(4), dtype="float64"),
    "grown": Case(LLAMA, PROMPT, GROWN, stops=Stops(4), dtype="float64"),
    "stopped": Case(LLAMA, PROMPT, STOPPED, stops=Stops(4), dtype="float64"),
    "tabled": Case(LLAMA, PROMPT, TABLED, stops=Stops(4), dtype="float64"),
    "mapped": Case(LLAMA, PROMPT, MAPPED, stops=Stops(4), dtype="float64"),
    "paged": Case(LLAMA, PROMPT, FORK, KvLayout(kind="paged", page_size=2, pages=tuple(range(12))), stops=Stops(3)),
    "open pages": Case(LLAMA, PROMPT, FORK, KvLayout(kind="paged", page_size=2), stops=Stops(3)),
    "sampled": Case(
        TINY_LLAMA,
        (1, 2),
        Scripted((Tree((0, 0, 0, 1), (2, 3, 1, 4)),)),
        sampling=Sampling(1.6, seed=3),
        stops=Stops(4),
        dtype="float64",
    ),
    "drawn": Case(
        TINY_LLAMA,
        (0, 3),
        LanguageModel(small_draft(5, 1), RankTree((0, 0, 0), (0, 0, 1))),
        sampling=Sampling(1.3, draws="without-replacement", seed=2),
        stops=Stops(4),
        dtype="float64",
    ),
    "cut": Case(LLAMA, PROMPT, FORK, sampling=Sampling(1.3, top_k=3, seed=2), stops=Stops(4), dtype="float64"),
    "guided": Case(
        TINY_LLAMA,
        (1, 2),
        Scripted((Tree((0, 0, 0, 1), (2, 0, 1, 1)),)),
        sampling=Sampling(1.6, seed=3, grammar=Grammar("regex", "(ab|b)*c?", ("61", "62", "6162", "63", ""))),
        stops=Stops(4, eos=(4,)),
        dtype="float64",
    ),
    "company": Case(
        LLAMA,
        PROMPT,
        OWN_DRAFT,
        KvLayout(kind="paged", page_size=2),
        stops=Stops(8),
        dtype="float64",
        session=Session(
            (Mate((6, 5, 3), OWN_DRAFT, stops=Stops(8)),),
            (
                *actions("add 0", "add 1"),
                STEP,
                *actions("step 1 0", "preempt 0 1"),
                Action("switch", (0,), FORK),
                *actions("cancel 1", "step 0", "step 0"),
            ),
        ),
    ),
    "ahead": Case(
        LLAMA,
        PROMPT,
        OWN_DRAFT,
        KvLayout(kind="paged", page_size=2),
        stops=Stops(4),
        dtype="float64",
        session=Session((), actions("add 0", *("launch 0",) * 6, "resolve 0", "resolve 0")),
    ),
    "handed": Case(
        LLAMA,
        PROMPT,
        FORK,
        stops=Stops(4),
        dtype="float64",
        session=Session((), actions("add 0", "step 0", "hand-over 0", "step 0")),
    ),
    "sharing": Case(
        LLAMA,
        PROMPT,
        TRIE,
        stops=Stops(4),
        dtype="float64",
        session=Session((Mate((6, 5, 3), TRIE, stops=Stops(4)),), actions("add 0", "add 1", "step 1 0", "step 0")),
    ),
    "warm": Case(
        LLAMA,
        PROMPT,
        Scripted(),
        KvLayout(kind="prefix", page_size=2),
        stops=Stops(2),
        dtype="float64",
        session=Session(
            (Mate(PROMPT, Scripted(), stops=Stops(2)),),
            actions("add 0", "step 0", "step 0", "add 1", "step 1", "step 1"),
        ),
    ),
}
"""By hand: between them each invariant has something to compare on one of them."""


ELSEWHERE = {
    "mapped": ("draft.rollback", "draft.vocabulary-map"),
    "paged": (
        "cache.stale-unreachable",
        "attention.page-permutation",
        "cache.page-boundary",
        "cache.layout-equivalent",
    ),
    "sampled": (
        "acceptance.sampled-walk",
        "acceptance.coins-once",
        "acceptance.streams-disjoint",
        "acceptance.law-exact",
        "acceptance.law-joint",
        "acceptance.support-at-edges",
        "acceptance.renamed-law",
        "lossless.distribution",
        "lossless.seeded",
    ),
    "cut": ("lossless.support",),
    "head": ("draft.hidden-state-descriptor",),
    "grown": ("draft.tree-top-m",),
    "stopped": ("draft.stops",),
    "tabled": ("draft.dispatch",),
    "drawn": ("acceptance.proposal-consistent", "lossless.processors-per-node"),
    "company": (
        "attention.batch-mate-independent",
        "acceptance.company-independent",
        "lossless.schedule-independent",
        "lossless.interruption-isolated",
        "cache.allocator-conserves",
        "draft.switched",
    ),
    "sharing": ("draft.shared",),
    "ahead": (
        "serving.frames-in-epoch",
        "serving.writes-in-owned-pages",
        "serving.no-placeholder",
        "serving.steps-after-finish",
    ),
    "sharded": ("lossless.ranks-agree",),
    "mixing": ("attention.experts-best",),
    "indexed": ("attention.columns-best",),
    "imaged": ("structure.positions-on-axes",),
    "selected": ("draft.candidates",),
    "handed": ("serving.hand-over",),
    "guided": ("lossless.grammar-per-node", "serving.matcher-in-step"),
    "warm": ("cache.prefix-reuse",),
    "hybrid": ("cache.recurrent-rows", "cache.recurrent-equivalence"),
}
"""Invariants that speak of another case than `tree`."""

OUR_INVARIANTS = [invariant for invariant in ALL if not invariant.promise]
"""The invariants without promises that our engine does not make; `test_black_box_told.py` has those."""

KEY = {
    invariant.name: next((key for key, names in ELSEWHERE.items() if invariant.name in names), "tree")
    for invariant in ALL
}


@cache
def engine() -> Subject:
    """The clean engine, each run remembered for all tests."""
    return subject_of(open_cpu(), keep=4096)


def less(strip: Callable[[Trace], Trace], own_run_too: bool = True, only_case: Case | None = None) -> Subject:
    """The clean engine, whose traces are `strip`ped, all of them or all but that of the case `only_case` itself."""

    def run(case: Case) -> Trace | Refusal | Crash:
        try:
            trace = engine()(case)
        except NoTrace as absent:
            return absent.outcome
        if case == only_case and not own_run_too:
            return trace
        if trace.shared is None:
            return strip(trace)
        requests = tuple(request and strip(request) for request in trace.shared.requests)
        return strip(replace(trace, shared=replace(trace.shared, requests=requests)))

    clean = engine()
    return Subject("less", run, clean.reveals, keep=256, tables=clean.tables, takes_tape=clean.takes_tape)


def in_steps(change: Callable[[Step], Step]) -> Callable[[Trace], Trace]:
    return lambda trace: replace(trace, steps=tuple(map(change, trace.steps)))


def without(*stages: Stage) -> Callable[[Trace], Trace]:
    """The trace with these stages hidden in every step."""
    hidden: dict[str, Any] = dict.fromkeys(stage.word for stage in stages)
    return in_steps(lambda step: replace(step, **hidden))


def outcome_of(name: str, subject: Subject, key: str | None = None) -> str:
    """What the invariant says of its case; it is never a difference, since nothing differs."""
    verdict = judge(CASES[key or KEY[name]], (BY_NAME[name],), ORACLE, subject)
    assert verdict.findings == ()
    assert (verdict.outcomes[name] == "checked") == (verdict.compared.get(name, 0) > 0)
    return verdict.outcomes[name]


@pytest.mark.parametrize("name", [invariant.name for invariant in OUR_INVARIANTS])
def test_an_invariant_compares_something_on_our_engine(name: str) -> None:
    assert outcome_of(name, engine()) == "checked"


READS = {
    Stage.DRAFTED: (
        *("draft", "attention.batch", "lossless.schedule", "lossless.interruption", "cache.prefix-reuse"),
        "acceptance.company",
    ),
    Stage.ACCEPTED: ("acceptance.company",),
    Stage.EMITTED: ("cache.isolation", "cache.untouched", "cache.commit-equivalence", "acceptance.chain-degenerate"),
}
"""Stages that invariants read beyond those that they declare, by how their names begin."""


def read_by(invariant: Invariant) -> list[Stage]:
    return [
        stage
        for stage in Stage
        if stage in invariant.needs or any(invariant.name.startswith(prefix) for prefix in READS.get(stage, ()))
    ]


@pytest.mark.parametrize(
    ("name", "stage"),
    [(invariant.name, stage) for invariant in OUR_INVARIANTS for stage in read_by(invariant)],
    ids=str,
)
def test_without_a_stage_that_it_reads_an_invariant_is_not_checked(name: str, stage: Stage) -> None:
    assert outcome_of(name, less(without(stage))) == "unobserved"


@pytest.mark.parametrize(
    "name", [invariant.name for invariant in ALL if any(invariant.name.startswith(x) for x in READS[Stage.DRAFTED])]
)
def test_roots_are_not_compared_with_what_was_not_shown_to_be_emitted(name: str) -> None:
    assert outcome_of(name, less(without(Stage.EMITTED))) in ("unobserved", "checked")


IN_VARIANTS = {
    Stage.DRAFTED: (
        *("acceptance.vocabulary-permutation", "draft.rollback", "attention.batch-mate-independent"),
        "acceptance.company-independent",
    ),
    Stage.SCORED: (
        "attention.order-equivariant",
        "attention.subtree-removal",
        "attention.padding-inert",
        "attention.prefix-split",
        "attention.tree-equals-chain",
        "attention.no-leakage",
        "attention.batch-mate-independent",
    ),
    Stage.ACCEPTED: (
        "acceptance.superset-accepts-no-less",
        "acceptance.chain-degenerate",
        "acceptance.vocabulary-permutation",
        "acceptance.company-independent",
    ),
    Stage.COMMITTED: ("cache.fast-equals-full",),
}


@pytest.mark.parametrize(("stage", "name"), [(stage, name) for stage, names in IN_VARIANTS.items() for name in names])
def test_without_a_stage_in_its_variants_an_invariant_is_not_checked(stage: Stage, name: str) -> None:
    subject = less(without(stage), own_run_too=False, only_case=CASES[KEY[name]])
    assert outcome_of(name, subject) == "unobserved"


def in_stage(stage: Stage, **fields: None) -> Callable[[Trace], Trace]:
    """The trace with parts of one stage hidden."""

    def change(step: Step) -> Step:
        record = getattr(step, stage.word)
        return step if record is None else replace(step, **{stage.word: replace(record, **fields)})

    return in_steps(change)


PARTS: Mapping[str, tuple[Callable[[Trace], Trace], tuple[str, ...]]] = {
    "law": (
        in_stage(Stage.SCORED, law=None),
        ("acceptance.sampled-walk", "acceptance.law-exact", "lossless.processors-per-node"),
    ),
    "proposal": (
        in_stage(Stage.DRAFTED, proposal=None),
        ("acceptance.sampled-walk", "acceptance.law-exact", "acceptance.proposal-consistent"),
    ),
    "coins": (
        in_stage(Stage.ACCEPTED, coins=None),
        ("acceptance.coins-once", "acceptance.streams-disjoint"),
    ),
    "draft logits": (in_stage(Stage.DRAFTED, logits=None), ("acceptance.proposal-consistent", "draft.fidelity")),
    "draft ids": (in_stage(Stage.DRAFTED, draft_ids=None), ("draft.vocabulary-map",)),
    "caches": (
        in_stage(Stage.COMMITTED, before=None, verified=None, after=None, draft=None),
        ("cache.isolation", "cache.untouched-slots", "cache.commit-equivalence", "cache.fast-equals-full"),
    ),
    "way": (in_stage(Stage.COMMITTED, way=None), ("cache.fast-equals-full",)),
    "logprobs": (in_stage(Stage.EMITTED, logprobs=None), ("lossless.logprobs",)),
    "counters": (lambda trace: replace(trace, accounting=None), ("lossless.accounting",)),
    "accounts": (
        lambda trace: replace(trace, shared=trace.shared and replace(trace.shared, accounts=())),
        ("cache.allocator-conserves", "cache.prefix-reuse", "draft.switched", "draft.shared"),
    ),
    "events": (
        lambda trace: replace(trace, shared=trace.shared and replace(trace.shared, events=())),
        ELSEWHERE["ahead"],
    ),
    "requests": (
        lambda trace: replace(trace, shared=None),
        (
            *("cache.allocator-conserves", "cache.prefix-reuse", "draft.switched", "draft.shared"),
            "attention.batch-mate-independent",
            "acceptance.company-independent",
        ),
    ),
}
"""What traces hold beside whole stages, and who compares nothing without it."""


@pytest.mark.parametrize(("part", "name"), [(part, name) for part, (_, names) in PARTS.items() for name in names])
def test_without_a_part_of_a_stage_that_it_reads_an_invariant_is_not_checked(part: str, name: str) -> None:
    key = "drawn" if name == "draft.fidelity" else None
    assert outcome_of(name, less(PARTS[part][0]), key) == "unobserved"


BY_OUTPUT = {
    "tree": {
        "greedy-match",
        "draft-independent",
        "stops",
        "state-isolated",
        "completes",
        "takes-part",
        "deterministic",
    },
    "sampled": {"stops", "state-isolated", "completes", "takes-part", "deterministic", "distribution", "seeded"},
    "company": {"greedy-match", "draft-independent", "stops", "completes", "takes-part"},
}
"""What the output alone shows, all of it of the room `lossless`."""

ALSO_CHECKED = {"company": {"cache.allocator-conserves"}, "sampled": {"acceptance.law-joint"}}
"""The parts that are judged beside the output: the account of pages, and the engine's sampling on tables."""


@pytest.mark.parametrize("key", BY_OUTPUT)
def test_who_reveals_what_was_emitted_is_checked_by_what_reads_the_output(key: str) -> None:
    hidden = without(*(stage for stage in Stage if stage is not Stage.EMITTED))
    nothing_else = in_stage(Stage.EMITTED, logprobs=None)
    bare = less(lambda trace: replace(nothing_else(hidden(trace)), accounting=None))
    verdict = judge(CASES[key], ALL, ORACLE, bare)
    checked = {name for name, outcome in verdict.outcomes.items() if outcome == "checked"}
    expected = {f"lossless.{name}" for name in BY_OUTPUT[key]}
    assert checked == expected | ALSO_CHECKED.get(key, set())
    assert set(verdict.compared) == checked
