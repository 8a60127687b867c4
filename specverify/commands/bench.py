"""The command `bench`: ratios of times that are measured side by side, a subcommand for each bench."""

from typing import TYPE_CHECKING

import click

from specverify.commands.bench_decode import decode
from specverify.commands.bench_heads import heads
from specverify.commands.bench_options import (
    BACKEND,
    CASES,
    DTYPE,
    MODEL,
    NODES,
    SEED,
    THREADS,
    Benches,
    figures_pages,
    plots,
    with_outputs,
)
from specverify.plan import Plan
from specverify.reference.case import DTYPES
from specverify.setup.number_lists import numbers

if TYPE_CHECKING:
    from specverify.setup.files import Outputs


@click.group(cls=Benches)
def bench() -> None:
    """Measure what checking costs: cases per second (throughput, which runs where no bench is named), or one part."""


@bench.command()
@BACKEND
@CASES
@SEED
@with_outputs
def throughput(*, backend: str, cases: int, seed: int, outputs: "Outputs") -> int:
    """Time cases per second, and wall time over time in the backend's forwards."""
    # Imports stand in the function, so that other commands and `--help` do not pay for them.
    from specverify.bench.throughput import throughput as measure
    from specverify.reports.pages.bench_advice import throughput_advice
    from specverify.reports.pages.tables import figures_table

    figures = measure(backend, cases, seed)
    page = figures_table(figures) + throughput_advice(figures)
    outputs.write(page, figures, figures_pages("throughput", figures))
    return 0


@bench.command()
@click.option("--layout", metavar="NAME", help="Only this KV layout (default: each).")
@with_outputs
def kv(*, layout: str | None, outputs: "Outputs") -> int:
    """Time verify and commit of each KV layout, against prefix length, page size and rows kept.

    Verify is one block written and read; no model runs.
    """
    from specverify.bench.kv import REPETITIONS, measure
    from specverify.reports.pages.tables import kv_table
    from specverify.setup.selection import check_layout

    if layout is not None:
        check_layout(layout, ())
    figures = measure(layout, REPETITIONS)
    outputs.write(kv_table(figures), figures, figures_pages("kv", figures))
    return 0


@bench.command()
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True, help="Where it runs.")
@click.option("--model", help="A checkpoint whose heads are timed; `drawn` for those of all models that cases draw.")
@click.option("--dtype", type=click.Choice(DTYPES), help="Working dtype (default: the device's own).")
@click.option("--table", metavar="FILE", help="Write the times by which cpu-measured chooses its attention.")
@with_outputs
def attention(
    *,
    device: str,
    model: str | None,
    dtype: str | None,
    table: str | None,
    outputs: "Outputs",
) -> int:
    """Time our split of prefix and tree (and our kernel, on a GPU) beside other ways to compute attention.

    The others are SDPA under a dense mask, FlexAttention, written-out attention and one reading of KV.
    """
    from specverify.bench import attention as attention_bench
    from specverify.reports.pages.tables import attention_table

    figures_of_shapes = attention_bench.measure_settings(device, attention_bench.settings(device, model, dtype))
    table_content = attention_bench.table(device, figures_of_shapes)
    # Figures of one shape are shown with their ratios, those of many by the table.
    if len(figures_of_shapes) == 1:
        figures = figures_of_shapes[0]
        page = attention_table(figures)
    else:
        figures = table_content
        page = attention_bench.summary(table_content)
    if table is not None:
        attention_bench.write(table, table_content)
    outputs.write(page, figures, figures_pages("attention", figures))
    return 0


@bench.command()
@BACKEND
@CASES
@SEED
@with_outputs
def isolation(*, backend: str, cases: int, seed: int, outputs: "Outputs") -> int:
    """Time what a process of its own costs a backend.

    As many workers as `diff` has judge each case both ways, in turn.
    """
    from specverify.bench.isolation import measure
    from specverify.reports.pages.tables import figures_table

    figures = measure(backend, cases, seed)
    outputs.write(figures_table(figures), figures, figures_pages("isolation", figures))
    return 0


bench.add_command(decode)
bench.add_command(heads)


@bench.command("draft-attention")
@MODEL
@BACKEND
@click.option("--draft", required=True, metavar="DIR|model:DIR", help="A head, or a second model.")
@click.option("--prompts", help="Prompt file, or builtin:humaneval (default: random token ids).")
@click.option("--cases", type=click.IntRange(min=1), default=4, show_default=True, help="Prompts.")
@click.option("--prompt-length", "lengths", callback=numbers, metavar="128,512", help="Tokens of the prompts.")
@click.option("--buckets", callback=numbers, default="16,64,256", show_default=True, help="Distances in tokens.")
@click.option("--new-tokens", type=click.IntRange(min=2), default=64, show_default=True, help="Tokens per prompt.")
@DTYPE
@SEED
@THREADS
@with_outputs
def draft_attention(
    *,
    model: str,
    backend: str,
    draft: str,
    prompts: str | None,
    cases: int,
    lengths: tuple[int, ...],
    buckets: tuple[int, ...],
    new_tokens: int,
    dtype: str,
    seed: int,
    threads: int | None,
    outputs: "Outputs",
) -> int:
    """Count where a draft looks: the share of largest weights (top-1), and of all weight, by distance in tokens."""
    from specverify.bench.draft_attention import measure
    from specverify.campaign.threads import for_checkpoint
    from specverify.reports.pages.draft_attention import attention_by_distance

    click.get_current_context().with_resource(for_checkpoint(threads or 0))
    plan = Plan(backend, model=model, prompts=prompts, cases=cases, new_tokens=new_tokens, dtypes=(dtype,), seed=seed)
    figures = measure(plan, draft, lengths, buckets)
    outputs.write(attention_by_distance(figures), figures, plots("draft-attention", figures))
    return 0


@bench.command()
@MODEL
@BACKEND
@NODES
@DTYPE
@THREADS
@with_outputs
def growth(
    *,
    model: str,
    backend: str,
    nodes: tuple[int, ...],
    dtype: str,
    threads: int | None,
    outputs: "Outputs",
) -> int:
    """Time the target's verify forward by nodes, batch and prefix, and its head by vocabulary and scored rows."""
    from specverify.bench.growth import Sizes, measure
    from specverify.campaign.threads import for_checkpoint
    from specverify.reports.pages.tables import growth_page

    click.get_current_context().with_resource(for_checkpoint(threads or 0))
    sizes = Sizes(nodes) if nodes else Sizes()
    figures = measure(backend, model, dtype, sizes)
    outputs.write(growth_page(figures), figures, plots("growth", figures))
    return 0


@bench.command()
@click.option("--model", help="Checkpoint directory, hub id, or builtin:NAME (default: a built-in model).")
@NODES
@with_outputs
def oracle(*, model: str | None, nodes: tuple[int, ...], outputs: "Outputs") -> int:
    """Time trees of the NumPy oracle beside transformers' float64 forward of the same trees.

    Exit 1 if the two give different numbers.
    """
    from specverify.bench.oracle import NODES as ORACLE_NODES
    from specverify.bench.oracle import measure
    from specverify.reports.pages.tables import oracle_page

    figures = measure(model, nodes or ORACLE_NODES)
    outputs.write(oracle_page(figures), figures, figures_pages("oracle", figures))
    return int(not figures["same"])


@bench.command()
@click.option("--batch", "batches", callback=numbers, default="1,4,16", show_default=True, help="Requests of a call.")
@click.option("--rule", "rules", multiple=True, metavar="RULE", help="Only this rule; repeatable.")
@click.option("--nodes", type=click.IntRange(2, 512), default=16, show_default=True, help="Nodes of each tree.")
@click.option("--vocabulary", type=click.IntRange(min=16), default=4096, show_default=True, help="Tokens of a law.")
@THREADS
@with_outputs
def acceptance(
    *,
    batches: tuple[int, ...],
    rules: tuple[str, ...],
    nodes: int,
    vocabulary: int,
    threads: int | None,
    outputs: "Outputs",
) -> int:
    """Time the acceptance of a batch: each request alone, one call, captured, compiled by inductor; warm-up apart.

    Rules are multi-round and target-only where none is named. Exit 1 if a way decides a request otherwise than alone.
    """
    from specverify.bench.acceptance import RULES, Sizes, check_rules, measure
    from specverify.campaign.threads import for_checkpoint
    from specverify.reports.pages.acceptance import acceptance_page, advise

    check_rules(rules)
    click.get_current_context().with_resource(for_checkpoint(threads or 0))
    figures = measure(batches, tuple(dict.fromkeys(rules)) or RULES, Sizes(nodes, vocabulary))
    figures["advice"] = advise(figures)
    outputs.write(acceptance_page(figures), figures, figures_pages("acceptance", figures))
    return int(not figures["same"])
