"""Invariants of commits: the cache holds the KV of the emitted tokens, no other.

They cover the target's cache and the draft's, the slots that were committed before, and the faster ways to commit.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from properties.commits import FASTER, admits, false_reason
from properties.invariants.rows import columns_of, kv_differs, kv_excuses, kv_reads
from properties.tolerance.closeness import Noise, draft_kv_case, kv_behind, kv_case, noise
from properties.verdict.finding import Compared, Finding
from properties.verdict.followed import follow_step
from properties.verdict.invariant import TURNS, Fact, Invariant, NotApplicable, Oracle, Unobserved, needing
from properties.verdict.subject import Subject
from properties.verdict.variants import pending_root
from reference.architecture import Architecture, Seeded
from reference.case import Case
from reference.draft import Scripted
from reference.layout import FAST_SWITCH
from reference.trace import Array, Committed, Kv, Stage, Step

NEEDS = needing(Stage.COMMITTED)


def commits(case: Case, subject: Subject) -> Iterator[tuple[int, tuple[int, ...], Committed]]:
    """For each step that reveals its commit: its number, the tokens that must be cached afterwards, the record."""
    for number, step in enumerate(subject(case).steps):
        if step.committed is not None and step.emitted is not None:
            tokens = (*step.context, pending_root(case, subject, number), *step.emitted.tokens)
            # The last token is the pending root of the next step: the next forward writes its KV.
            yield number, tokens[:-1], step.committed


def _unequal_bits(seen: Array, true: Array, first: list[int]) -> tuple[int, int, int] | None:
    """The first (layer, head, slot) with unequal bits, or None; slots before a layer's `first` are left out."""
    unlike = (seen != true).any(axis=3)
    for layer, begin in enumerate(first):
        unlike[layer, :, :begin] = False
    differ = np.argwhere(unlike)
    return (int(differ[0][0]), int(differ[0][1]), int(differ[0][2])) if len(differ) else None


def _bits(
    name: str, step: int, seen: Kv, true: Kv, words: str, stage: Stage = Stage.COMMITTED
) -> Iterator[Finding | Compared]:
    """A finding at the first slot of `true` whose bits in `seen` differ; `seen` may hold more slots behind them."""
    begins = [kv.first or (0,) * len(true.keys) for kv in (seen, true)]
    first = [max(pair) for pair in zip(*begins, strict=True)]
    for kind in ("keys", "values"):
        held, own = getattr(seen, kind)[:, :, : true.length], getattr(true, kind)
        if held.shape != own.shape:
            yield Finding(name, stage, step, {"side": "shape", "kind": kind[:-1]}, str(own.shape), str(held.shape))
            return
        if kind == "keys":
            yield Compared(columns_of(seen, true))
        place = _unequal_bits(held, own, first)
        if place is not None:
            layer, head, slot = place
            where: dict[str, int | str] = {"layer": layer, "head": head, "slot": slot, "kind": kind[:-1]}
            wanted, got = ([float(one) for one in getattr(kv, kind)[place][:4]] for kv in (true, seen))
            yield Finding(name, stage, step, {**where, "side": words}, wanted, got)
            return


def _nothing_looked_at(case: Case, subject: Subject, why: str) -> Exception:
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
            shapes = str(record.before.keys.shape), str(record.verified.keys.shape)
            yield Finding("cache.isolation", Stage.ATTENDED, number, {"side": "shape"}, *shapes)
            continue
        yield from _bits(
            "cache.isolation", number, record.verified, record.before, "during the verify forward", Stage.ATTENDED
        )
    if not looked:
        raise _nothing_looked_at(case, subject, "the backend does not reveal its committed cache around the forward")


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
        yield from _bits("cache.untouched-slots", number, record.after, record.before, "by the commit")
    if not looked:
        raise _nothing_looked_at(case, subject, "the backend does not reveal its committed cache before and after")


def commit_equivalence(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """After each step, K and V of target and draft are those of running the emitted tokens in sequence.

    The same holds when the next step begins, since other requests of a session act in between.
    """
    error = noise(case, oracle, subject)
    looked = False
    left: tuple[tuple[int, ...], Kv | None] = ((), None)
    for number, tokens, record in commits(case, subject):
        if left[1] is not None and record.before is not None and not _same_bits(record.before, left[1]):
            asked, true = kv_case(case, left[0]), kv_behind(case, oracle, left[0], number)
            yield from _against("target", number - 1, record.before, true, asked, oracle, error, side="between")
        left = (tokens, record.after)
        if record.after is not None and isinstance(case.model, Seeded):
            yield from _let_go(number, record.after, case.model.architecture)
        if record.length != len(tokens):
            where: dict[str, int | str] = {"cache": "target", "side": "length"}
            yield Finding("cache.commit-equivalence", Stage.COMMITTED, number, where, len(tokens), record.length)
        if record.after is not None:
            looked = looked or bool(tokens)
            own = follow_step(case, oracle, subject(case).steps[number])
            asked, true = kv_case(case, tokens), kv_behind(case, own, tokens, number + 1)
            yield from _against("target", number, record.after, true, asked, own, error)
        if record.draft is not None and case.draft.model is not None:
            # A draft cache that is refilled at each step must hold the step's context and the root alone.
            context = len(subject(case).steps[number].context)
            least = len(tokens) - 1 if case.layout.draft_sync == "keep" else min(context + 1, len(tokens) - 1)
            # A step without its draft feeds it nothing: the next proposal reads what it lacks.
            least = 0 if number in subject.bare else least
            yield from _draft(case, number, record.draft, tokens, least, oracle, error)
    if not looked:
        raise Unobserved("the backend does not reveal its committed cache")


def _same_bits(one: Kv, other: Kv) -> bool:
    """Whether both caches hold the same bits; NaN stands for columns that a layer has let go."""
    pairs = ((one.keys, other.keys), (one.values, other.values))
    return all(np.array_equal(*pair, equal_nan=True) for pair in pairs)


def _let_go(number: int, held: Kv, arch: Architecture) -> Iterator[Finding]:
    """Findings where a layer has let go of a column that a future row can still see."""
    for layer, first in enumerate(held.first):
        # The next row is at position `length`: a window reaches `window - 1` columns back, a chunk to its first column.
        window, chunk = arch.windows[layer], arch.chunks[layer] if arch.chunks else 0
        needed = max(0, held.length - window + 1) if window else held.length // chunk * chunk if chunk else 0
        if first > needed:
            where: dict[str, int | str] = {"cache": "target", "layer": layer, "side": "held"}
            yield Finding("cache.commit-equivalence", Stage.COMMITTED, number, where, needed, first)


def _draft(
    case: Case, number: int, held: Kv, tokens: tuple[int, ...], least: int, oracle: Oracle, error: Noise
) -> Iterator[Finding | Compared]:
    """Findings for the draft's cache, which must hold at least the first `least` of the committed `tokens`.

    It may lack the last one: an accepted leaf was never fed to the draft model.
    """
    if not least <= held.length <= len(tokens):
        where: dict[str, int | str] = {"cache": "draft", "side": "length"}
        expected = f"{least} to {len(tokens)}"
        yield Finding("cache.commit-equivalence", Stage.COMMITTED, number, where, expected, held.length)
        return
    asked = draft_kv_case(case, tokens[: held.length])
    record = oracle(asked).steps[0].committed
    yield from _against("draft", number, held, None if record is None else record.before, asked, oracle, error)


def _against(
    cache: str,
    number: int,
    held: Kv,
    true: Kv | None,
    asked: Case,
    oracle: Oracle,
    error: Noise,
    **side: str,
) -> Iterator[Finding | Compared]:
    """Findings where `held` is not `true`, the KV that the oracle reveals on the case `asked`."""
    if true is None or not true.length:
        return
    own = error if cache == "target" else _for_draft(error, true)
    words: dict[str, int | str] = {"cache": cache, **side}
    told = kv_excuses(oracle, asked, error.dtype)
    reads = kv_reads(asked, asked.prefix)
    yield from kv_differs("cache.commit-equivalence", number, true, held, own, words, excuses=told, reads=reads)


def _for_draft(error: Noise, true: Kv) -> Noise:
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
    looked, silent = 0, set[str]()
    for how in FASTER:
        other = subject(replace(case, layout=replace(case.layout, commit=how)))
        for number, (one, twin) in enumerate(zip(full.steps, other.steps, strict=False)):
            if one.committed is None or twin.committed is None:
                continue
            for fact in _both_ways(name, how, number, one, twin, silent):
                yield fact
                if isinstance(fact, Finding):
                    return
                looked += fact.count
        if other.output != full.output:  # reached only if no cache differs, or no cache is revealed
            yield Finding(name, Stage.EMITTED, 0, {"variant": how}, full.output, other.output)
    # Commits by length say nothing of the fast way, which this engine was told not to take.
    if any(FAST_SWITCH in why for why in silent):
        raise Unobserved(f"{FAST_SWITCH}=0: no commit ran fast")
    if silent and not looked:
        raise NotApplicable(f"no commit was made in two ways: {'; '.join(sorted(silent))}")
    if not looked:
        raise Unobserved("the backend does not reveal its committed cache, or not which way its commits went")


def _both_ways(
    name: str, how: str, number: int, one: Step, twin: Step, silent: set[str]
) -> Iterator[Finding | Compared]:
    """Findings where step `number`, committed by path (`one`) and by `how` (`twin`), leaves two different caches.

    If a run committed in another way, the reason is added to `silent`; a reason that does not hold is a finding.
    """
    assert one.committed is not None
    assert twin.committed is not None
    ways = one.committed.way, twin.committed.way
    if None in ways:
        return
    if ways[1] != how:
        why = false_reason(how, twin)
        if why is not None:
            expected = f"a commit by {how}" + (", which the step admits" if admits(how, twin) else ", or a reason")
            where: dict[str, int | str] = {"variant": how, "side": "way"}
            yield Finding(name, Stage.COMMITTED, number, where, expected, f"one by {ways[1]}, with {why}")
        silent.add(f"by {how}: {twin.committed.fallback}")
        return
    # Both runs took the same way, so that nothing is compared.
    if ways[0] == how:
        silent.add(f"{how} was taken where path was asked for")
        return
    for cache, true, seen in (
        ("target", one.committed.after, twin.committed.after),
        ("draft", one.committed.draft, twin.committed.draft),
    ):
        if true is None or seen is None:
            continue
        if true.keys.shape != seen.keys.shape:
            place: dict[str, int | str] = {"cache": cache, "variant": how, "side": "shape"}
            yield Finding(name, Stage.COMMITTED, number, place, str(true.keys.shape), str(seen.keys.shape))
            return
        for fact in _bits(name, number, seen, true, f"commit by {how}"):
            if isinstance(fact, Finding):
                fact = replace(fact, where={**fact.where, "cache": cache, "variant": how})
            yield fact


def _speculates(case: Case) -> bool:
    return case.draft != Scripted() and len(case.layout.traits.commits) > 1


INVARIANTS = (
    Invariant("cache.isolation", "Verification leaves the committed cache bit-identical.", NEEDS, isolation),
    Invariant(
        "cache.untouched-slots", "A commit leaves every slot committed earlier bit-identical.", NEEDS, untouched_slots
    ),
    Invariant(
        "cache.commit-equivalence",
        "Committed keys and values, of target and draft, are those of running the emitted tokens in sequence.",
        NEEDS,
        commit_equivalence,
    ),
    Invariant(
        "cache.fast-equals-full",
        "Every way to commit leaves bit-identical caches and the same output.",
        NEEDS,
        fast_equals_full,
        _speculates,
        every=TURNS,
    ),
)
