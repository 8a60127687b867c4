"""Invariants of commits: the cache holds the KV of the emitted tokens, no other.

They cover the target's cache and the draft's, the slots that were committed before, and the faster ways to commit.
"""

import os
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from specverify.properties.invariants.rows import KvExcuses, common_columns, compare_kv, kv_reads, shape_finding
from specverify.properties.tolerance.closeness import Noise, draft_kv_case, kv_behind, kv_case, noise
from specverify.properties.verdict.finding import Comparisons, Finding
from specverify.properties.verdict.followed import follow_step
from specverify.properties.verdict.invariant import TURNS, Fact, Invariant, NotApplicable, Oracle, Unobserved, needing
from specverify.properties.verdict.subject import FASTER, Subject
from specverify.properties.verdict.variants import pending_root
from specverify.reference.architecture import Architecture, Seeded
from specverify.reference.case import Case
from specverify.reference.draft import Scripted
from specverify.reference.layout import FAST_SWITCH, NO_PREFIX, NOT_IN_ORDER
from specverify.reference.trace import Array, Committed, Kv, Stage, Step

NEEDS = needing(Stage.COMMITTED)


def commits(case: Case, subject: Subject) -> Iterator[tuple[int, tuple[int, ...], Committed]]:
    """For each step that reveals its commit: its number, the tokens that must be cached afterwards, the record."""
    for number, step in enumerate(subject(case).steps):
        if step.committed is not None and step.emitted is not None:
            tokens = (*step.context, pending_root(case, subject, number), *step.emitted.tokens)
            # The last token is the pending root of the next step: the next forward writes its KV.
            yield number, tokens[:-1], step.committed


def _unequal_bits(observed: Array, true: Array, first: list[int]) -> tuple[int, int, int] | None:
    """The first (layer, head, slot) with unequal bits, or None; slots before a layer's `first` are left out."""
    unlike = (observed != true).any(axis=3)
    for layer, begin in enumerate(first):
        unlike[layer, :, :begin] = False
    differ = np.argwhere(unlike)
    return (int(differ[0][0]), int(differ[0][1]), int(differ[0][2])) if len(differ) else None


def _compare_bits(
    name: str, step: int, observed: Kv, true: Kv, words: str, stage: Stage = Stage.COMMITTED
) -> Iterator[Finding | Comparisons]:
    """A finding at the first slot of `true` whose bits in `observed` differ; `observed` may hold more slots."""
    begins = [kv.first or (0,) * len(true.keys) for kv in (observed, true)]
    first = [max(pair) for pair in zip(*begins, strict=True)]
    for kind in ("keys", "values"):
        observed_slots = getattr(observed, kind)[:, :, : true.length]
        expected_slots = getattr(true, kind)
        if observed_slots.shape != expected_slots.shape:
            yield shape_finding(name, stage, step, expected_slots, observed_slots, {"kind": kind[:-1]})
            return
        if kind == "keys":
            yield Comparisons(common_columns(observed, true))
        place = _unequal_bits(observed_slots, expected_slots, first)
        if place is not None:
            layer, head, slot = place
            where: dict[str, int | str] = {"layer": layer, "head": head, "slot": slot, "kind": kind[:-1]}
            expected_values, observed_values = (
                [float(value) for value in getattr(kv, kind)[place][:4]] for kv in (true, observed)
            )
            yield Finding(name, stage, step, {**where, "side": words}, expected_values, observed_values)
            return


def _nothing_compared(case: Case, subject: Subject, why: str) -> Exception:
    """The exception of a check that compared no slot: NotApplicable if no step had a context, else Unobserved."""
    if not any(step.context for step in subject(case).steps):
        return NotApplicable("nothing was committed before the step")
    return Unobserved(why)


def isolation(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """The verify forward leaves the committed cache bit-identical: it writes to the tree's own slots alone."""
    looked = 0
    for number, _, record in commits(case, subject):
        if record.before is None or record.verified is None:
            continue
        looked += record.before.length
        if record.before.keys.shape != record.verified.keys.shape:
            yield shape_finding("cache.isolation", Stage.ATTENDED, number, record.before.keys, record.verified.keys)
            continue
        yield from _compare_bits(
            "cache.isolation", number, record.verified, record.before, "during the verify forward", Stage.ATTENDED
        )
    if not looked:
        raise _nothing_compared(case, subject, "the backend does not reveal its committed cache around the forward")


def untouched_slots(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """A commit only appends: every slot that was committed before the step has the same bits after it."""
    looked = 0
    for number, _, record in commits(case, subject):
        if record.before is None or record.after is None:
            continue
        looked += record.before.length
        if record.after.length < record.before.length:
            lengths = f"at least {record.before.length} slots", f"{record.after.length} slots"
            yield Finding("cache.untouched-slots", Stage.COMMITTED, number, {"side": "length"}, *lengths)
            continue
        yield from _compare_bits("cache.untouched-slots", number, record.after, record.before, "by the commit")
    if not looked:
        raise _nothing_compared(case, subject, "the backend does not reveal its committed cache before and after")


def commit_equivalence(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """After each step, K and V of target and draft are those of running the emitted tokens in sequence.

    The same holds when the next step begins, since other requests of a session act in between.
    """
    error = noise(case, oracle, subject)
    looked = False
    last_commit: tuple[tuple[int, ...], Kv | None] = ((), None)
    for number, tokens, record in commits(case, subject):
        if last_commit[1] is not None and record.before is not None and not _same_bits(record.before, last_commit[1]):
            source_case = kv_case(case, last_commit[0])
            true = kv_behind(case, oracle, last_commit[0], number)
            yield from _compare_with_oracle(
                "target", number - 1, record.before, true, source_case, oracle, error, side="between"
            )
        last_commit = (tokens, record.after)
        if record.after is not None and isinstance(case.model, Seeded):
            yield from _lost_columns(number, record.after, case.model.architecture)
        if record.length != len(tokens):
            where: dict[str, int | str] = {"cache": "target", "side": "length"}
            yield Finding("cache.commit-equivalence", Stage.COMMITTED, number, where, len(tokens), record.length)
        if record.after is not None:
            looked = looked or bool(tokens)
            follower = follow_step(case, oracle, subject(case).steps[number])
            source_case = kv_case(case, tokens)
            true = kv_behind(case, follower, tokens, number + 1)
            yield from _compare_with_oracle("target", number, record.after, true, source_case, follower, error)
        if record.draft is not None and case.draft.model is not None:
            # A draft cache that is refilled at each step must hold the step's context and the root alone.
            context = len(subject(case).steps[number].context)
            least = len(tokens) - 1 if case.layout.draft_sync == "keep" else min(context + 1, len(tokens) - 1)
            # A step without its draft feeds it nothing: the next proposal reads what it lacks.
            least = 0 if number in subject.bare else least
            yield from _compare_draft_cache(case, number, record.draft, tokens, least, oracle, error)
    if not looked:
        raise Unobserved("the backend does not reveal its committed cache")


def _same_bits(first: Kv, second: Kv) -> bool:
    """Whether both caches hold the same bits; NaN stands for columns that a layer has let go."""
    pairs = ((first.keys, second.keys), (first.values, second.values))
    return all(np.array_equal(*pair, equal_nan=True) for pair in pairs)


def _lost_columns(number: int, cache: Kv, arch: Architecture) -> Iterator[Finding]:
    """Findings where a layer has let go of a column that a future row can still see."""
    for layer, first in enumerate(cache.first):
        # The next row is at position `length`: a window reaches `window - 1` columns back, a chunk to its first column.
        window = arch.windows[layer]
        chunk = arch.chunks[layer] if arch.chunks else 0
        needed = 0
        if window:
            needed = max(0, cache.length - window + 1)
        elif chunk:
            needed = cache.length // chunk * chunk
        if first > needed:
            where: dict[str, int | str] = {"cache": "target", "layer": layer, "side": "held"}
            yield Finding("cache.commit-equivalence", Stage.COMMITTED, number, where, needed, first)


def _compare_draft_cache(
    case: Case, number: int, cache: Kv, tokens: tuple[int, ...], least: int, oracle: Oracle, error: Noise
) -> Iterator[Finding | Comparisons]:
    """Findings for the draft's cache, which must hold at least the first `least` of the committed `tokens`.

    It may lack the last one: an accepted leaf was never fed to the draft model.
    """
    if not least <= cache.length <= len(tokens):
        where: dict[str, int | str] = {"cache": "draft", "side": "length"}
        expected = f"{least} to {len(tokens)}"
        yield Finding("cache.commit-equivalence", Stage.COMMITTED, number, where, expected, cache.length)
        return
    source_case = draft_kv_case(case, tokens[: cache.length])
    record = oracle(source_case).steps[0].committed
    yield from _compare_with_oracle(
        "draft", number, cache, None if record is None else record.before, source_case, oracle, error
    )


def _compare_with_oracle(
    cache: str,
    number: int,
    kv: Kv,
    true: Kv | None,
    source_case: Case,
    oracle: Oracle,
    error: Noise,
    **side: str,
) -> Iterator[Finding | Comparisons]:
    """Findings where `kv` is not `true`, the KV that the oracle reveals on the case `source_case`."""
    if true is None or not true.length:
        return
    cache_noise = error if cache == "target" else _draft_noise(error, true)
    words: dict[str, int | str] = {"cache": cache, **side}
    excuses = KvExcuses(oracle, source_case, error.dtype)
    reads = kv_reads(source_case, source_case.prefix)
    yield from compare_kv(
        "cache.commit-equivalence", number, true, kv, cache_noise, words, excuses=excuses, reads=reads
    )


def _draft_noise(error: Noise, true: Kv) -> Noise:
    """The noise of the draft's cache, scaled from the target's.

    The control runs the target alone. So each draft layer gets the worst relative error of any target layer, times 4.
    """
    layers = len(true.keys)
    sizes = {kind: float(np.sqrt(np.mean(np.square(getattr(true, kind))))) for kind in ("keys", "values")}
    attended, keys, values = error.inner_scale
    relative = max(float(error.keys.max()) / keys, float(error.values.max()) / values) if keys and values else 0.0
    return replace(
        error,
        inner_scale=(attended, sizes["keys"], sizes["values"]),
        keys=np.full(layers, 4 * relative * sizes["keys"]),
        values=np.full(layers, 4 * relative * sizes["values"]),
    )


def fast_equals_full(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """Full reorder, fast reorder and crop leave bit-identical caches, of target and draft, and the same output.

    A step is compared if the trace says that both ways ran. A commit that fell back to another way is not compared,
    but its stated reason must be true of its own step.
    """
    name = "cache.fast-equals-full"
    full = subject(replace(case, layout=replace(case.layout, commit="path")))
    looked = 0
    silent = set[str]()
    for way in FASTER:
        variant = subject(replace(case, layout=replace(case.layout, commit=way)))
        for number, (full_step, twin) in enumerate(zip(full.steps, variant.steps, strict=False)):
            if full_step.committed is None or twin.committed is None:
                continue
            for fact in _both_ways(name, way, number, full_step, twin, silent):
                yield fact
                if isinstance(fact, Finding):
                    return
                looked += fact.count
        if variant.output != full.output:  # reached only if no cache differs, or no cache is revealed
            yield Finding(name, Stage.EMITTED, 0, {"variant": way}, full.output, variant.output)
    # Commits by length say nothing of the fast way, which this engine was told not to take.
    if any(FAST_SWITCH in why for why in silent):
        raise Unobserved(f"{FAST_SWITCH}=0: no commit ran fast")
    if silent and not looked:
        raise NotApplicable(f"no commit was made in two ways: {'; '.join(sorted(silent))}")
    if not looked:
        raise Unobserved("the backend does not reveal its committed cache, or not which way its commits went")


def _both_ways(
    name: str, way: str, number: int, full_step: Step, twin: Step, silent: set[str]
) -> Iterator[Finding | Comparisons]:
    """Findings where step `number`, committed by path (`full_step`) and by `way` (`twin`), leaves two different caches.

    If a run committed in another way, the reason is added to `silent`; a reason that does not hold is a finding.
    """
    assert full_step.committed is not None
    assert twin.committed is not None
    ways = full_step.committed.way, twin.committed.way
    if None in ways:
        return
    if ways[1] != way:
        reason = false_reason(way, twin)
        if reason is not None:
            expected = f"a commit by {way}" + (", which the step admits" if admits(way, twin) else ", or a reason")
            where: dict[str, int | str] = {"variant": way, "side": "way"}
            yield Finding(name, Stage.COMMITTED, number, where, expected, f"one by {ways[1]}, with {reason}")
        silent.add(f"by {way}: {twin.committed.fallback}")
        return
    # Both runs took the same way, so that nothing is compared.
    if ways[0] == way:
        silent.add(f"{way} was taken where path was asked for")
        return
    for cache, true, observed in (
        ("target", full_step.committed.after, twin.committed.after),
        ("draft", full_step.committed.draft, twin.committed.draft),
    ):
        if true is None or observed is None:
            continue
        if true.keys.shape != observed.keys.shape:
            place: dict[str, int | str] = {"cache": cache, "variant": way, "side": "shape"}
            yield Finding(name, Stage.COMMITTED, number, place, str(true.keys.shape), str(observed.keys.shape))
            return
        for fact in _compare_bits(name, number, observed, true, f"commit by {way}"):
            if isinstance(fact, Finding):
                fact = replace(fact, where={**fact.where, "cache": cache, "variant": way})
            yield fact


def admits(way: str, step: Step) -> bool:
    """Whether `step` could be committed by `way`: `fast` needs a committed prefix, `length` rows kept in their order.

    The rows kept are the accepted path, as far as its tokens were emitted. A step that does not reveal the path or the
    tokens counts as not admitting `length`.
    """
    if way == "fast":
        return bool(step.context)
    if step.accepted is None or step.emitted is None:
        return False
    # A block of k emitted tokens keeps k rows, the root's included: the last token has no KV yet.
    kept_rows = step.accepted.path[: len(step.emitted.tokens)]
    return kept_rows == tuple(range(len(kept_rows)))


def false_reason(way: str, step: Step) -> str | None:
    """The reason that `step` gives for a commit by another way than `way`, if it is false; None otherwise.

    Only the reasons of `specverify.reference.layout` can be checked from outside; a reason in an engine's own words
    cannot.
    """
    assert step.committed is not None
    reason = step.committed.fallback
    if reason is None:
        return "no reason"
    way_of_reason = {NO_PREFIX: "fast", NOT_IN_ORDER: "length"}
    if way_of_reason.get(reason) == way and admits(way, step):
        return reason
    # The engine runs in this environment, so the switch that it names can be looked up.
    if reason == f"{FAST_SWITCH}=0" and os.environ.get(FAST_SWITCH) != "0":
        return reason
    return None


INVARIANTS = (
    Invariant("cache.isolation", "Verification leaves the committed cache bit-identical.", NEEDS, isolation),
    Invariant(
        "cache.untouched-slots", "A commit leaves every slot committed earlier bit-identical.", NEEDS, untouched_slots
    ),
    Invariant(
        "cache.commit-equivalence",
        "Committed keys and values, of target and draft model, are those of running the emitted tokens in sequence.",
        NEEDS,
        commit_equivalence,
    ),
    Invariant(
        "cache.fast-equals-full",
        "Every way to commit leaves bit-identical caches and the same output.",
        NEEDS,
        fast_equals_full,
        lambda case: case.draft != Scripted() and len(case.layout.traits.commits) > 1,
        every=TURNS,
    ),
)
