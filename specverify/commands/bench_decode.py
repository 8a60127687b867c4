"""The bench of generation: the target alone, each draft and tree, and transformers, side by side."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from specverify.bench.turn import STORED
from specverify.commands.bench_options import BACKEND, DTYPE, MODEL, SEED, THREADS, Bench, plots, with_outputs
from specverify.plan import Plan
from specverify.reference.quantisation import QUANTISED
from specverify.reference.rules import RULES
from specverify.setup.number_lists import numbers

if TYPE_CHECKING:
    from specverify.setup.files import Outputs


RULE = "eagle"
"""The acceptance rule of sampled texts where none is named: the one that keeps dynamic trees."""


def _kinds(context: click.Context, option: click.Parameter, value: str | None) -> tuple[str, ...]:
    """The kinds of weights of a list such as `stored,int8`; none where the option is not given."""
    kinds = tuple(dict.fromkeys(value.split(","))) if value is not None else ()
    known_kinds = (STORED, *QUANTISED)
    unknown_kinds = [kind for kind in kinds if kind not in known_kinds]
    if unknown_kinds:
        raise click.BadParameter(f"{unknown_kinds[0]!r} is none of {', '.join(known_kinds)}")
    return kinds


def _rule(temperature: float | None, rule: str | None) -> str | None:
    """The acceptance rule of a bench; None where texts are greedy and no rule was named."""
    return RULE if temperature is not None and rule is None else rule


@click.command(cls=Bench)
@MODEL
@BACKEND
@click.option("--prompts", help="Prompt file, or builtin:humaneval (default: random token ids).")
@click.option("--cases", type=click.IntRange(min=1), default=4, show_default=True, help="Prompts, or dialogues.")
@click.option("--dialogues", metavar="FILE", help="JSON lines with `turns`, or builtin:two-turns.")
@click.option("--prefix-length", "prefixes", callback=numbers, metavar="64,256", help="Of --dialogues: what all have.")
@click.option(
    "--history-length", "histories", callback=numbers, metavar="64,256", help="Of --dialogues: what was said."
)
@click.option("--prompt-length", "lengths", multiple=True, type=click.IntRange(min=1), help="Repeatable.")
@click.option(
    "--draft",
    "drafts",
    multiple=True,
    metavar="DIR|ngram|model:DIR",
    default=["ngram"],
    show_default=True,
    help="Repeatable.",
)
@click.option("--nodes", multiple=True, type=click.IntRange(1, 512), help="Budget of drafted nodes; repeatable.")
@click.option("--depth", "depths", multiple=True, type=click.IntRange(1, 64), help="Tree levels; repeatable.")
@click.option("--sweep", is_flag=True, help="A grid of budgets, where --nodes or --depth does not give them.")
@click.option(
    "--draft-window", "windows", multiple=True, type=click.IntRange(min=1), help="Tokens it sees; repeatable."
)
@click.option("--lengths", "chains", callback=numbers, metavar="3,5,7", help="Draft lengths, each a chain.")
@click.option(
    "--draft-weights", "weights", callback=_kinds, metavar="stored,int8,int4", help="Weights of the drafts, each a way."
)
@click.option(
    "--draft-vocabulary", "vocabularies", callback=numbers, metavar="1000,4000", help="Tokens that drafts can name."
)
@click.option(
    "--vocabulary-text",
    "vocabulary_texts",
    multiple=True,
    metavar="TEXT",
    help="Prompt file whose most frequent tokens these are (default: the prompts); repeatable.",
)
@click.option("--batch", "batches", callback=numbers, metavar="1,4,16", help="Prompts that step together.")
@click.option("--overlap", "overlapped", is_flag=True, help="With --batch: launch steps ahead of their results.")
@click.option("--temperature", type=click.FloatRange(min=0, min_open=True), help="Sample (default: greedy).")
@click.option("--top-p", type=click.FloatRange(0, 1, min_open=True), help="With --temperature: mass that is kept.")
@click.option("--rule", type=click.Choice(list(RULES)), help=f"With --temperature: acceptance rule (default {RULE}).")
@click.option("--new-tokens", type=click.IntRange(min=2), default=64, show_default=True, help="Tokens per prompt.")
@click.option("--repeat", type=click.IntRange(min=1), default=1, show_default=True, help="Rounds of every prompt.")
@click.option("--layout", metavar="NAME", help="This KV layout (default: branch).")
@DTYPE
@SEED
@THREADS
@click.option("--trace", metavar="DIR", help="Record the run, and go on after what DIR holds of it.")
@click.option(
    "--dist-backend",
    type=click.Choice(["gloo", "nccl", "hccl"]),
    default="gloo",
    show_default=True,
    help="Under torchrun: how its processes meet.",
)
@with_outputs
def decode(
    *,
    model: str,
    backend: str,
    prompts: str | None,
    cases: int,
    dialogues: str | None,
    prefixes: tuple[int, ...],
    histories: tuple[int, ...],
    lengths: tuple[int, ...],
    drafts: tuple[str, ...],
    nodes: tuple[int, ...],
    depths: tuple[int, ...],
    sweep: bool,
    windows: tuple[int, ...],
    chains: tuple[int, ...],
    weights: tuple[str, ...],
    vocabularies: tuple[int, ...],
    vocabulary_texts: tuple[str, ...],
    batches: tuple[int, ...],
    overlapped: bool,
    temperature: float | None,
    top_p: float | None,
    rule: str | None,
    new_tokens: int,
    repeat: int,
    layout: str | None,
    dtype: str,
    seed: int,
    threads: int | None,
    trace: str | None,
    dist_backend: str,
    outputs: "Outputs",
) -> int:
    """Time generation by the target alone, by each draft and tree, and by transformers.

    Figures are speed, times of tokens, tokens per verify call, accepted tokens by depth, stages, and memory by part.
    With --batch, our engine alone runs. Exit 1 if a greedy text of ours is not the target's own.
    """
    from specverify.bench.budgets import SWEPT_DEPTHS, SWEPT_NODES
    from specverify.bench.decode import DecodeOrder, run_decode
    from specverify.campaign.threads import for_checkpoint
    from specverify.commands.sampling_options import sampling_of
    from specverify.records.ranks import ranks_of

    if batches and dialogues is not None:
        raise click.UsageError("--batch and --dialogues contradict each other: a dialogue runs by itself")
    if dialogues is None and (prefixes or histories):
        raise click.UsageError("--prefix-length and --history-length need --dialogues")
    if overlapped and not batches:
        raise click.UsageError("--overlap needs --batch: it is a way to step a batch")
    if dialogues is not None and (prompts is not None or lengths):
        raise click.UsageError("--dialogues stands in place of --prompts and --prompt-length")
    click.get_current_context().with_resource(for_checkpoint(threads or 0))
    ranks = ranks_of(backend=dist_backend)
    plan = Plan(
        backend,
        model=model,
        prompts=prompts,
        cases=cases,
        new_tokens=new_tokens,
        dtypes=(dtype,),
        seed=seed,
        layout=layout,
        sampling=sampling_of(model, {"temperature": temperature, "top_p": top_p, "rule": _rule(temperature, rule)}),
    )
    order = DecodeOrder(
        plan,
        drafts,
        nodes=nodes or (SWEPT_NODES if sweep else ()),
        depths=depths or (SWEPT_DEPTHS if sweep else ()),
        repeats=repeat,
        windows=windows,
        lengths=lengths,
        dialogues=dialogues,
        folder=None if trace is None else Path(trace),
        chains=chains,
        batches=batches,
        overlapped=overlapped,
        weights=weights,
        vocabularies=vocabularies,
        vocabulary_texts=vocabulary_texts,
        prefixes=prefixes,
        histories=histories,
    )
    figures, page, code = run_decode(order, ranks)
    if ranks.rank:  # the first rank alone writes files
        click.echo(page, err=True)
        return code
    outputs.write(page, figures, plots("decode", figures))
    return code
