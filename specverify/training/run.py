"""A whole training, from the texts to the figures at the end."""

from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch

from specverify.checkpoints.cases import LOOKUP, LOOKUP_ORDER
from specverify.interrupts import Interrupts
from specverify.records.ranks import Ranks, ranks_of
from specverify.reference.draft import Ngram
from specverify.reference.tree import RankTree
from specverify.setup.errors import MissingInput
from specverify.training import vocabulary as vocabularies
from specverify.training.acceptance import CHAIN, TREE, Acceptance, head_acceptance, ngram_acceptance
from specverify.training.data import Data, open_cache, prepare_data, token_counts
from specverify.training.heads.make import make_head
from specverify.training.loop import Clock, Training
from specverify.training.online import OnlineOrder
from specverify.training.plan import TrainingPlan
from specverify.training.published import HeadFolder
from specverify.training.rehearsal import rehearse
from specverify.training.states import Order
from specverify.training.target import Stopped, Target, states_of, texts_digest
from specverify.training.texts import Texts, read_texts
from specverify.training.watch import Watch

NGRAM_CHAIN = Ngram(RankTree((0, 0, 1, 2, 3), (0, 0, 0, 0, 0)), LOOKUP_ORDER)
"""An n-gram lookup that drafts a chain of four tokens."""

NGRAM_TREE = Ngram(LOOKUP, LOOKUP_ORDER)
"""The n-gram lookup of checkpoint runs."""


def train(plan: TrainingPlan, quiet: bool = False) -> dict[str, Any]:
    """Train a head, and measure the best one on the prompts that are judged.

    Returns:
        The figures: acceptance of the head in a chain and in a tree, of n-gram lookups beside it, seconds, the curve.

    Raises:
        UnusableInput, MissingInput, Unwritable: In one line, before the work or where it cannot go on.
    """
    if plan.device == "cuda" and not torch.cuda.is_available():
        raise MissingInput("--device cuda: torch sees no CUDA device here")
    if plan.threads:
        torch.set_num_threads(plan.threads)
    clock = Clock()
    ranks = ranks_of(backend="nccl" if plan.device == "cuda" else "gloo")
    ranks.join()
    quiet = quiet or not ranks.first
    try:
        with Interrupts() as interrupts, Watch(plan.seconds, quiet) as watch:
            texts = read_texts(plan.texts)
            for source, origin, count in texts.origins:
                watch.say(f"text {source}: {origin}, {count} prompts")
            target = Target(plan.model, plan.device)
            rehearse(plan, target)
            if plan.vocabulary_file is not None:
                vocabularies.read(plan.vocabulary_file, len(target.head))  # refused before any work
            folder = HeadFolder(plan.out, _digest(plan, target, texts))
            earlier = folder.load_state()
            data = _data(
                plan,
                target,
                texts,
                ranks,
                watch=watch,
                resumed=earlier is not None,
                clock=clock,
                interrupts=interrupts,
            )
            shards = data.cache.shards if earlier is None else earlier.facts["shards"]
            order = _order(plan, target, data, ranks, shards, lambda: interrupts.word is not None)
            counts = order.token_counts if isinstance(order, OnlineOrder) else lambda: token_counts(data.cache)
            named = _vocabulary(plan, len(target.head), data, folder, counts, watch.say)
            head = make_head(plan, target, named)
            config = target.config.to_dict()
            training = Training(
                plan, head, deepcopy(head), folder, data.watched, config, clock, ranks, begins_at=clock.seconds
            )
            if training.resume():
                watch.say(f"resumed at step {training.step}, after {training.clock.seconds:.0f} s")
            del target
            weights = sum(weight.numel() for weight in head.parameters())
            source = "texts that the target continues beside it" if plan.online else f"{shards} shards"
            watch.say(f"training {weights / 1e6:.1f} M weights on {source}")
            training.run(order, lambda: interrupts.word is not None, watch.say, watch.advance)
            if interrupts.word is not None:
                watch.say(f"{interrupts.word}: the best head so far is in {plan.out}")
            return figures(training, data) if ranks.first else {}
    except Stopped:
        raise MissingInput("interrupted before the first head; the same command goes on from there") from None
    finally:
        ranks.leave()


def figures(training: Training, data: Data) -> dict[str, Any]:
    """The figures of the best head, on the prompts that are judged."""
    best = training.folder.published_tensors()
    if best is not None:
        training.average.load_published(best)

    def figures_of(accepted: Acceptance, depth: int) -> dict[str, Any]:
        return {
            "accepted": round(accepted.mean, 4),
            "tokens_per_call": round(accepted.tokens_per_call, 4),
            "steps": len(accepted.steps),
            "by_depth": [round(share, 4) for share in accepted.by_depth(depth)],
        }

    return {
        "head": str(training.folder.folder),
        "kind": training.plan.kind,
        "layers": training.plan.layers,
        "experts": training.plan.experts,
        "irope": training.plan.irope,
        "online": training.plan.online,
        "weights": sum(weight.numel() for weight in training.head.parameters()),
        "prompts": len(data.judged),
        "chain": figures_of(head_acceptance(training.average, data.judged, CHAIN), CHAIN.depth),
        "tree": figures_of(head_acceptance(training.average, data.judged, TREE), TREE.depth),
        "ngram_chain": figures_of(ngram_acceptance(NGRAM_CHAIN, data.judged), 4),
        "ngram_tree": figures_of(ngram_acceptance(NGRAM_TREE, data.judged), 8),
        "steps": training.step,
        "learned": training.learned,
        "seconds": round(training.clock.seconds, 1),
        "processor_seconds": round(training.clock.processor, 1),
        "curve": training.folder.curve_lines(),
    }


def _digest(plan: TrainingPlan, target: Target, texts: Texts) -> str:
    """The digest of all that a head follows from, the minutes and the machine apart."""
    options = (
        plan.kind,
        plan.generated,
        plan.vocabulary,
        str(plan.vocabulary_file),
        plan.steps,
        plan.heads,
        plan.layers,
        *((plan.experts, plan.experts_per_token) if plan.experts else ()),
        *(("irope",) if plan.irope else ()),
        *(("online",) if plan.online else ()),
    )
    return texts_digest(target.digest, texts.digest, str(options), str((plan.texts_per_batch, plan.rate, plan.seed)))


def _data(
    plan: TrainingPlan,
    target: Target,
    texts: Texts,
    ranks: Ranks,
    *,
    watch: Watch,
    resumed: bool,
    clock: Clock,
    interrupts: Interrupts,
) -> Data:
    """The data; the first process makes it, and the others read it."""
    until = plan.data_share * plan.seconds

    def advance(note: str) -> None:
        watch.advance(clock.seconds, lambda: f"the target continues texts, {note}")

    def goes_on() -> bool:
        # The other processes must end up with the shards of the first one, no more.
        return ranks.first and interrupts.word is None and clock.seconds < until and not resumed

    if not ranks.first:
        ranks.wait()
    cache = open_cache(plan, target, texts)
    data = prepare_data(
        cache,
        plan,
        target,
        texts,
        goes_on=goes_on,
        stopped=lambda: interrupts.word is not None,
        say=watch.say,
        advance=advance,
    )
    if ranks.first:
        ranks.wait()
    return data


def _order(
    plan: TrainingPlan, target: Target, data: Data, ranks: Ranks, shards: int, stopped: Callable[[], bool]
) -> Order | OnlineOrder:
    """The order of batches: of cached states, or of texts that the target continues beside the head."""
    if not plan.online:
        return Order(data.cache, shards, plan.texts_per_batch, plan.generated > 0, plan.seed, ranks.rank, ranks.world)
    return OnlineOrder(
        target,
        data.learned,
        states_of(plan.kind, target.layers, plan.layers),
        plan.generated,
        plan.texts_per_batch,
        plan.seed,
        # Of several processes one must not end while another waits for it.
        stopped if ranks.world == 1 else lambda: False,
        ranks.rank,
        ranks.world,
    )


def _vocabulary(
    plan: TrainingPlan,
    total: int,
    data: Data,
    folder: HeadFolder,
    counts: Callable[[], Counter[int]],
    say: Callable[[str], None],
) -> torch.Tensor | None:
    """The target ids of an EAGLE-3 head's vocabulary, of `total`; those of a head under way stay."""
    if plan.kind != "eagle3":
        return None
    saved = folder.load_state()
    if saved is not None:
        return torch.nonzero(saved.tensors["head/t2d"])[:, 0]
    if plan.vocabulary_file is not None:
        vocabulary = vocabularies.read(plan.vocabulary_file, total)
    else:
        vocabulary, _ = vocabularies.load_or_build(counts(), min(plan.vocabulary, total), total)
    judged = vocabularies.count_tokens(text.tokens[text.prompt :].tolist() for text in data.judged)
    inside = vocabularies.share(vocabulary, judged)
    say(f"draft vocabulary: {len(vocabulary.named)} of {total} ids, {inside:.1%} of held-out tokens")
    return torch.from_numpy(vocabulary.named)
