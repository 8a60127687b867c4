"""The command `bench decode`: ways to generate a text, timed side by side.

The ways are our engine with the target alone, our engine with each draft and each tree, and transformers' own
generation. Every prompt is run in every way before the next prompt begins, in an order that turns from prompt to
prompt, so that a machine that slows down slows all ways. One untimed generation of each way comes first.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from specverify.backends.base import Unsupported
from specverify.backends.engine.backend import EngineBackend
from specverify.bench.batches import BatchRun
from specverify.bench.budgets import ways_of, windows_of
from specverify.bench.contexts import lengthen
from specverify.bench.decode_figures import report_decode
from specverify.bench.decode_record import Measurements, add_record, manifest_for, measurements_of, stray_of
from specverify.bench.decode_run import Run, sampling_words
from specverify.bench.dialogues import DialogueRun, Tokens, dialogues_of, shape_dialogues, with_room
from specverify.bench.hugging_face import ASSISTED, LOOKUP, PLAIN
from specverify.bench.memory import MB, resident_bytes
from specverify.bench.turn import TARGET, Turn, Way
from specverify.bench.variants import Forms, token_counts
from specverify.checkpoints.cases import base_case, ends_of, fitting_draft
from specverify.checkpoints.opening import open_checkpoint
from specverify.checkpoints.prompts import prompts_of
from specverify.interrupts import Interrupts
from specverify.plan import Plan
from specverify.records import merge
from specverify.records.ranks import Ranks
from specverify.records.write import Writer
from specverify.reference.case import Case
from specverify.reference.draft import Draft, Ngram
from specverify.reference.malformed import Malformed
from specverify.reference.sampling import Sampling
from specverify.reports.progress import Progress
from specverify.setup.errors import UnusableInput
from specverify.setup.subjects import manifest, open_planted


@dataclass(frozen=True)
class DecodeOrder:
    """The order for a bench: ways, prompts and trees to time.

    Attributes:
        plan: Backend, model, prompts, new tokens, dtype, layout and seed.
        drafts: Arguments of `--draft`; each is a way, or several with `nodes` and `depths`.
        nodes: Budgets of drafted nodes; empty for the draft's own.
        depths: Levels below the root; empty for the draft's own.
        repeats: How often each way runs each prompt.
        windows: Tokens of its context that a draft sees, each a way beside that of the whole context.
        lengths: Lengths to which every prompt is brought; empty for its own.
        dialogues: The file of dialogues that run in place of prompts, each turn with the caches of the one before.
        folder: Where the record is written; a run goes on after the prompts that its record holds. None writes none.
        chains: Draft lengths, each a way with a chain of so many tokens.
        batches: Numbers of prompts that step together, ascending; empty for prompts by themselves.
        overlapped: With `batches`, whether steps are launched ahead of their results.
        weights: Kinds of weights of the drafts, STORED or one of QUANTISED, each a way; empty for the stored ones.
        vocabularies: Numbers of tokens that the drafts can name, each a way beside that of all tokens.
        prefixes: With `dialogues`, lengths of a beginning that all of them share.
        histories: With `dialogues`, lengths to which the messages before the last one are brought.
        vocabulary_texts: Prompt files whose most frequent tokens these are; empty for the prompts of the run.
    """

    plan: Plan
    drafts: tuple[str, ...] = (Ngram.TAG,)
    nodes: tuple[int, ...] = ()
    depths: tuple[int, ...] = ()
    repeats: int = 1
    windows: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()
    dialogues: str | None = None
    folder: Path | None = None
    chains: tuple[int, ...] = ()
    batches: tuple[int, ...] = ()
    overlapped: bool = False
    weights: tuple[str, ...] = ()
    vocabularies: tuple[int, ...] = ()
    vocabulary_texts: tuple[str, ...] = ()
    prefixes: tuple[int, ...] = ()
    histories: tuple[int, ...] = ()


def measure(order: DecodeOrder, ranks: Ranks) -> Measurements:
    """Time every way on every prompt of this rank, and wait for the other ranks.

    Returns:
        What rank 0 has put together of the whole shards; what this rank has measured, elsewhere.

    Raises:
        UnusableInput: The backend is no engine of ours, model, prompts or drafts cannot be used, the folder holds the
            record of another run, or there are several ranks and no folder.
        MissingInput: This machine lacks something.
    """
    if ranks.world > 1 and order.folder is None:
        raise UnusableInput("bench decode under torchrun needs --trace DIR: the shards of its ranks are files")
    if ranks.world > 1 and order.batches:
        raise UnusableInput("bench decode --batch under torchrun: prompts that step together belong to one process")
    ranks.join()
    run, bases, drafts, device = _open_run(order)
    facts = run.facts | device | ({"lengths": order.lengths} if order.lengths else {})
    measured = Measurements(run.ways, list(drafts), [], [], facts, [way for way, _ in drafts.values()])
    numbers = ranks.prompt_numbers(len(bases))
    with ExitStack() as stack:
        writer = None
        if order.folder is not None:
            manifest = manifest_for(
                _options(order),
                bases[0],
                texts=run.prompts,
                drafts=drafts,
                ways=run.ways,
                facts=facts,
                shard=(ranks.rank, ranks.world),
            )
            writer = stack.enter_context(Writer(ranks.folder(order.folder), manifest))
            wanted_blocks = run.blocks([number for number in numbers if number not in writer.before.prompts])
            numbers = [number for block in wanted_blocks for number in block]
            # A block that was killed between two of its lines runs again whole.
            for number in numbers:
                writer.before.prompts.pop(number, None)
            add_record(measured, writer.before)
        progress = stack.enter_context(Progress(sum(map(run.turns_of, numbers)) * order.repeats * len(run.ways)))
        interrupts = stack.enter_context(Interrupts())
        if numbers:
            progress.note("untimed runs")
            run.warm_up()
            progress.note("")
        blocks = run.blocks(numbers)
        for place, block in enumerate(blocks):
            turns = list[Turn]()
            for turn in run.run_block(block, order.repeats):
                if interrupts.word is not None:
                    break
                turns.append(turn)
                if writer is not None:
                    writer.turn(asdict(turn))
                progress.advance()
            if interrupts.word is not None:
                count = sum(map(len, blocks[:place]))
                again = "" if writer is None else "; the same command goes on with the others"
                measured.missing.append(f"{interrupts.word}: {count} of {len(numbers)} prompts are measured{again}")
                break
            measured.turns += turns
            for number in block:
                measured.agreements += run.agreements[number]
                if writer is not None:
                    _write_strays(writer, run, number, measured.turns)
                    writer.prompt(
                        {"prompt": number, "agreements": [asdict(agreement) for agreement in run.agreements[number]]}
                    )
    unmet = ranks.meet()
    if ranks.world > 1 and ranks.rank == 0:
        assert order.folder is not None
        shards = [merge.shard_folder(order.folder, rank, ranks.world) for rank in range(ranks.world)]
        record = merge.merge_records(shards)
        merge.write(record, order.folder)
        measured = measurements_of(record)
    elif unmet is not None:
        measured.missing.append(f"{unmet}; this shard is whole: `specverify trace merge` puts shards together")
    measured.facts["peak_resident_mb"] = resident_bytes() / MB
    return measured


def _open_run(order: DecodeOrder) -> tuple[Run, list[Case], dict[str, tuple[Way, Draft]], dict[str, str]]:
    """The run, a case of the target alone for each prompt or dialogue, the ways with a draft, and the device."""
    plan = order.plan
    if order.batches:
        plan = replace(plan, cases=max(plan.cases, order.batches[-1]))
    backend = open_planted(plan.backend, None, plan.mode)
    if not isinstance(backend, EngineBackend):
        raise UnusableInput(
            f"bench decode --backend {plan.backend}: it times the stages of our engine, and this is another"
        )
    assert plan.model is not None
    checkpoint = open_checkpoint(plan.model)
    ends = ends_of(checkpoint)
    dialogues, shapes = list[list[Tokens]](), list[tuple[int, int]]()
    if order.dialogues is not None:
        own_dialogues = dialogues_of(order.dialogues, plan.model, plan.cases)
        dialogues, shapes = shape_dialogues(own_dialogues, order.prefixes, order.histories)
    prompts = [turns[0] for turns in dialogues] or prompts_of(plan, checkpoint, uses_cache=True)
    if order.batches:
        prompts = _whole_blocks(prompts, order.batches[-1])
    if order.lengths:
        prompts = [prompt for length in order.lengths for prompt in lengthen(prompts, length)]
    bases = [
        with_seed(base_case(checkpoint, prompt, number, plan, ends).plain_decode(), plan.sampling, plan.seed, number)
        for number, prompt in enumerate(prompts)
    ]
    forms = Forms(order.weights, order.vocabularies, token_counts(order.vocabulary_texts, prompts, plan.model))
    drafts = {
        way.name: (way, draft)
        for name in order.drafts
        for variant, formed_draft in forms.drafts(name, checkpoint, backend.declaration)
        for way, own_draft in ways_of(name, formed_draft, order.nodes, order.depths, order.chains)
        for verified in [fitting_draft(own_draft, plan.sampling, backend.declaration)]
        for way, draft in windows_of(variant.named(way), verified, order.windows)
    }
    for number, base in enumerate(bases):
        for name, (_, draft) in drafts.items():
            _check_fits(name, base, draft, number)
            if dialogues:
                _check_fits(name, base, draft, number, dialogues[number])
    facts = manifest(backend)
    transformers_ways = [PLAIN, LOOKUP] if backend.declaration.device == "cpu" else []
    if transformers_ways and any(draft.model is not None for _, draft in drafts.values()):
        transformers_ways.append(ASSISTED)
    if order.batches:
        return BatchRun(backend, bases, drafts, order.batches, order.overlapped), bases, drafts, facts
    if dialogues:
        return DialogueRun(backend, dialogues, bases, drafts, transformers_ways, shapes), bases, drafts, facts
    return Run(backend, bases, drafts, [TARGET, *drafts, *transformers_ways]), bases, drafts, facts


def _write_strays(writer: Writer, run: Run, number: int, turns: list[Turn]) -> None:
    """Write a dump for each text of this prompt that is not the target's and parts from it at no tie."""
    turn_of_way = {(turn.way, turn.place, turn.batch): turn for turn in turns if turn.prompt == number}
    for agreement in run.agreements[number]:
        key = number, agreement.way, agreement.place, agreement.batch
        if not agreement.agrees and key in run.strays:
            name = f"dialogue-{number}-turn-{agreement.place}" if agreement.place else f"prompt-{number}"
            name += f"-batch-{agreement.batch}" if agreement.batch else ""
            dump = stray_of(turn_of_way[key[1:]], agreement, *run.strays[key])
            writer.failure(f"{name}-{run.ways.index(agreement.way)}", dump)


def _check_fits(name: str, base: Case, draft: Draft, number: int, turns: Sequence[Tokens] = ()) -> None:
    """Refuse a draft, or a dialogue of these turns, for which the target has no room."""
    try:
        replace(with_room(base, turns) if turns else base, draft=draft)
    except Malformed as why:
        raise UnusableInput(f"bench decode --draft {name}: prompt {number + 1}: {why}") from None


def _options(order: DecodeOrder) -> dict[str, Any]:
    plan = order.plan
    return {
        "model": plan.model, "prompts": plan.prompts, "cases": plan.cases, "new_tokens": plan.new_tokens,
        "drafts": order.drafts, "nodes": order.nodes, "depths": order.depths, "windows": order.windows,
        "lengths": order.lengths, "dialogues": order.dialogues,
        "repeats": order.repeats, "seed": plan.seed, "layout": plan.layout,
        "chains": order.chains, "batches": order.batches, "overlapped": order.overlapped,
        "sampling": sampling_words(plan.sampling), "backend": plan.backend, "weights": order.weights,
        "vocabularies": order.vocabularies, "vocabulary_texts": order.vocabulary_texts,
        "prefixes": order.prefixes, "histories": order.histories,
    }  # fmt: skip


def _whole_blocks(prompts: list[Tokens], largest: int) -> list[Tokens]:
    """As many prompts as fill whole batches of the largest size: each size of batch runs the same ones.

    Raises:
        UnusableInput: There are fewer. One that stood in two lanes would count as two.
    """
    if len(prompts) < largest:
        raise UnusableInput(f"bench decode --batch {largest}: {len(prompts)} prompts fill no batch; give more")
    return prompts[: len(prompts) // largest * largest]


def with_seed(base: Case, sampling: Sampling, seed: int, number: int) -> Case:
    """`base` with the sampling of a bench; prompt `number` samples with a seed of its own."""
    if sampling.greedy:
        return base
    drawn_seed = int(np.random.default_rng([seed, number]).integers(0, 2**62))
    return replace(base, sampling=replace(sampling, seed=drawn_seed))


def run_decode(order: DecodeOrder, ranks: Ranks) -> tuple[dict[str, Any], str, int]:
    """Run a bench.

    Returns:
        Figures, page and exit code, as `told`; a rank other than the first has no figures, and one line as its page.

    Raises:
        UnusableInput: The backend declines the model; `measure` raises it for other reasons too.
    """
    try:
        measured = measure(order, ranks)
    except Unsupported as why:
        raise UnusableInput(f"bench decode --backend {order.plan.backend}: {why}") from None
    if ranks.rank == 0:
        return report_decode(measured)
    count = len({turn.prompt for turn in measured.turns})
    line = f"rank {ranks.rank} of {ranks.world}: prompts finished: {count}"
    return {}, "\n".join([line, *measured.missing]), 3 if measured.missing else 0
