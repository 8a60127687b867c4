"""Cases of the corpus without a fault: each shows an error of one line of the engine that few drawn cases reach."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reports import bundle
from tests.measure.mutation.engine_judge import IN_MODE, Posed, judged
from tests.measure.mutation.generate import Mutant, mutants_of
from tests.measure.mutation.loader import source_of
from tests.measure.mutation.pool import run

CASES = Path(__file__).resolve().parents[2] / "corpus" / "cases"

LONE_ROW = "return infer(self.ask(twice, held, self.encode(held.visible), scaling))[:, :, :2]"

SHOWS = {
    "block-on-a-chain": ("engine.sampling.rules", "over = (seams.block_residual(offered, row, pi))"),
    "child-gone-beside-its-cousins": ("engine.sampling.forest", "kept = torch.where(flat, self.children, 1)"),
    "draft-forwards-counted": ("engine.draft.language_model", "self.calls -= 1"),
    "fork-of-a-draft-that-proposed": ("engine.kv.arena", "lease.draft.length = max(source.draft.length, columns)"),
    "fork-to-another-draft-model": ("engine.kv.arena", "source.draft is not None and (source.owner is not draft)"),
    "gathered-beside-the-kernel": ("engine.attention.gathered", "clamp(max=paging.table.shape[0] - 1)"),
    "llama3-on-both-sides-of-its-band": (
        "engine.model.float64_modules",
        "smooth = ((original / wavelength - low) / ((high + low)))",
    ),
    "longrope-by-its-factor": ("engine.model.float64_modules", "stretch = (rope.get('factor') and"),
    "longrope-with-attention-factor": (
        "engine.model.float64_modules",
        "return (base * torch.tensor(rope['short_factor']",
    ),
    "more-heads-again-in-a-static-buffer": ("engine.server", "since.update((model.fallbacks + before))"),
    "more-heads-than-the-operator-shares": ("ascend.fused", "groups = query.shape[1] // columns.key.shape[2]"),
    "more-siblings-than-tokens": (
        "engine.sampling.rounds",
        "rank >= world.vocab and (world.sampling.draws != 'top-k')",
    ),
    "pages-kept-by-nobody": ("engine.kv.arena", "layout.page_size) if True else None"),
    "prefix-cache-gives-way": ("engine.kv.prefix", "if ((owner, tokens) not in self._kept)"),
    "prefix-of-one-beside-a-split-one": ("engine.attention.triton_kernels", "(prefix + SPLITS * TILE - 2)"),
    "repetition-penalty-of-two": ("engine.sampling.processing", "if sampling.repetition_penalty != 2.0:"),
    "restore-in-vain-gives-back": ("engine.server", "pass"),
    "ring-of-a-draft-longer-than-a-block": ("engine.kv.sliding", "(self.rows + rows >= self.most_rows):"),
    "scores-beyond-the-range-of-exponentials": ("engine.attention.split", "weights = ((sums + top.masked_fill"),
    "single-row-behind-512-columns": ("ascend.fused", "if (rows >= 1):"),
    "steps-at-most": ("engine.play", "taken -= 1"),
    "switch-of-drafts": ("engine.server", "self._switch(request, (replace(request.case)))"),
    "target-only-on-ragged-levels": ("engine.sampling.rules", "there = (below >= 0)"),
    "trie-counts-each-token-once": ("engine.draft.ngram", "for at in range((max(self._seen, 1) - 1), len(tokens)):"),
    "twins-of-a-model-draft": ("engine.draft.language_model", "self._shape.path(kept[-0])"),
    "typical-two-levels": ("engine.sampling.rules", "fine & fine.gather(0, trees.parent), fine)"),
    "whole-blocks-in-16-bits": ("ascend.fused", "kv_heads = operands.key.shape[1 if True else 2]"),
    "window-of-one-behind-one-token": ("engine.kv.sliding", "max(1, self.length - 1)"),
    "window-seen-by-a-single-row": ("ascend.fused", LONE_ROW),
    "yarn-ramp-without-width": ("engine.model.float64_modules", "last = (last - 0.001) if first == last else last"),
    "yarn-without-beta-slow": ("engine.model.float64_modules", 'turning(rope.get("beta_slow") or 2)'),
}
"""For each case one mutant that it shows: its module under `backends`, and what stands in its line."""

PLACES = {
    "draft-forwards-counted": ("ModelDraft._feed", "self.calls += 1"),
    "restore-in-vain-gives-back": ("Server._restore", "self._arena.give_back(lease)"),
}
"""Where the line says too little: what it is in, and what stood there."""

BEFORE = {"more-heads-again-in-a-static-buffer": "more-heads-than-the-operator-shares"}
"""What must run before in the same process: counts of one model add up."""

MODES = {"gathered-beside-the-kernel": f"{IN_MODE}reference"}


def mutant_of(name: str) -> Mutant:
    """The one mutant that SHOWS names."""
    tail, after = SHOWS[name]
    module = f"backends.{tail}"
    within, before = PLACES.get(name, ("", ""))
    made, _ = mutants_of(module, source_of(module)[1])
    (found,) = [
        one
        for one in made
        if after in one.after and after not in one.before and before in one.before and within in one.within
    ]
    return found


def outcome(name: str) -> dict[str, Any]:
    """What a child comes to that judges the mutant on the case."""
    names = [*filter(None, (BEFORE.get(name),)), name]
    kept = [bundle.load(CASES / f"{one}.json") for one in names]
    posed = tuple(Posed(one.case, "", frozenset(), "", None) for one in kept)
    mutant, backend = mutant_of(name), f"{kept[-1].backend}{MODES.get(name, '')}"

    def plainly(tell: Callable[[str], None]) -> Any:
        # Pytest would rewrite every module of ours first.
        sys.meta_path[:] = [one for one in sys.meta_path if type(one).__name__ != "AssertionRewritingHook"]
        return judged(mutant, backend, posed, "kept", tell)

    ((_, came),) = run([(None, plainly)], 1, 60.0, lambda: False)
    returned: dict[str, Any] = came["returned"]
    return returned


def test_every_case_says_what_it_shows() -> None:
    assert sorted(SHOWS) == sorted(file.stem for file in CASES.glob("*.json"))
    assert all(mutant_of(name).before for name in SHOWS)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SHOWS))
def test_a_case_shows_its_error(name: str) -> None:
    came = outcome(name)
    assert came["outcome"] == "caught", came
    assert came["case"] == bundle.load(CASES / f"{name}.json").case.id
