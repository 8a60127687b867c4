"""The command `bench`: ratios of times that are measured side by side in one run."""

from pathlib import Path
from typing import Any

import click

from reference.case import DTYPES
from specverify.plan import Plan

DECODING = (
    "model",
    "prompts",
    "draft",
    "nodes",
    "depth",
    "sweep",
    "draft-window",
    "prompt-length",
    "dialogues",
    "new-tokens",
    "dtype",
    "repeat",
    "threads",
    "trace",
    "dist-backend",
)
"""Options of `bench decode` alone."""


KINDS = ("throughput", "kv", "attention", "isolation", "decode", "growth", "oracle")
"""The benches."""


@click.command()
@click.argument("what", default="throughput", type=click.Choice(KINDS))
@click.option("--backend", help="throughput, isolation, decode, growth: backend name or pkg.module:factory.")
@click.option(
    "--cases", type=click.IntRange(min=1), help="throughput, isolation: cases (default 200); decode: prompts."
)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="attention: where (default cpu).")
@click.option("--layout", metavar="NAME", help="kv: only this KV layout (default: each); decode: this one.")
@click.option(
    "--model", help="decode, growth, oracle: checkpoint directory, hub id, or builtin:NAME; attention: heads."
)
@click.option("--table", metavar="FILE", help="attention: write the times by which cpu-measured chooses its attention.")
@click.option("--prompts", help="decode: prompt file, or builtin:humaneval.")
@click.option(
    "--draft", "drafts", multiple=True, metavar="DIR|ngram|model:DIR", help="decode: repeatable (default ngram)."
)
@click.option(
    "--nodes",
    multiple=True,
    type=click.IntRange(1, 512),
    help="decode: budget of drafted nodes; growth, oracle: sizes of trees.",
)
@click.option("--depth", "depths", multiple=True, type=click.IntRange(1, 64), help="decode: tree levels; repeatable.")
@click.option("--sweep", is_flag=True, help="decode: a grid of budgets, where --nodes or --depth does not give them.")
@click.option("--draft-window", "windows", multiple=True, type=click.IntRange(min=1), help="decode: tokens it sees.")
@click.option("--prompt-length", "lengths", multiple=True, type=click.IntRange(min=1), help="decode: repeatable.")
@click.option("--dialogues", metavar="FILE", help="decode: JSON lines with `turns`, each on the caches of the last.")
@click.option("--new-tokens", type=click.IntRange(min=2), help="decode: tokens per prompt (default 64).")
@click.option("--dtype", type=click.Choice(DTYPES), help="decode, growth, attention: working dtype.")
@click.option("--repeat", type=click.IntRange(min=1), help="decode: rounds of every prompt (default 1).")
@click.option("--threads", type=click.IntRange(min=1), help="decode, growth: threads of torch (default: all cores).")
@click.option("--trace", metavar="DIR", help="decode: record the run, and go on after what DIR holds of it.")
@click.option(
    "--dist-backend",
    type=click.Choice(["gloo", "nccl", "hccl"]),
    help="decode under torchrun: how its processes meet (default gloo).",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--json", "json_file", metavar="FILE|-", help="Write the figures as one JSON object.")
@click.option("--html", "html_file", metavar="FILE", help="Write the figures as one HTML page.")
def bench(
    what: str,
    backend: str | None,
    cases: int | None,
    device: str | None,
    layout: str | None,
    model: str | None,
    table: str | None,
    prompts: str | None,
    drafts: tuple[str, ...],
    nodes: tuple[int, ...],
    depths: tuple[int, ...],
    sweep: bool,
    windows: tuple[int, ...],
    lengths: tuple[int, ...],
    dialogues: str | None,
    new_tokens: int | None,
    dtype: str | None,
    repeat: int | None,
    threads: int | None,
    trace: str | None,
    dist_backend: str | None,
    seed: int,
    json_file: str | None,
    html_file: str | None,
) -> int:
    """Measure what checking costs.

    throughput: cases per second, and wall time over time in the backend's forwards. kv: verify (one block written and
    read, no model) and commit of each KV layout, against prefix length, page size and rows kept. attention: our split
    of prefix and tree (and our kernel, on a GPU) beside SDPA under a dense mask, FlexAttention, written-out attention
    and one reading of KV, with the heads of --model if given (`drawn`: of all models that cases draw).
    isolation: what a process of its own costs a backend: as many workers as `diff` has judge each case both ways, in
    turn. decode: greedy generation on a checkpoint by the target alone, by each draft and tree, and by transformers:
    speed, times of tokens, accepted tokens by depth, stages; exit 1 if a text of ours is not the target's own.
    growth: the target's verify forward by nodes, batch and prefix, its head by vocabulary and scored rows.
    oracle: trees of the NumPy oracle beside transformers' float64 forward of the same trees.
    """
    # Imports stand in the function, so that other commands and `--help` do not pay for them.
    from reports.pages.tables import attention_table, figures_table, kv_table
    from reports.writing import check_writable, write_json, write_whole
    from specverify.campaign.threads import for_checkpoint
    from specverify.setup.report_files import check_apart

    of = {
        "throughput": ("backend", "cases"),
        "isolation": ("backend", "cases"),
        "attention": ("device", "model", "dtype", "table"),
        "kv": ("layout",),
        "growth": ("backend", "model", "dtype", "nodes", "threads"),
        "oracle": ("model", "nodes"),
        "decode": ("backend", "cases", "layout", *DECODING),
    }
    given = {
        "backend": backend, "cases": cases, "device": device, "layout": layout, "model": model, "prompts": prompts,
        "draft": drafts, "nodes": nodes, "depth": depths, "sweep": sweep or None,
        "draft-window": windows, "prompt-length": lengths, "dialogues": dialogues, "new-tokens": new_tokens,
        "dtype": dtype, "repeat": repeat, "table": table, "threads": threads,
        "trace": trace, "dist-backend": dist_backend,
    }  # fmt: skip
    for name, value in given.items():
        if value not in (None, ()) and name not in of[what]:
            wants = " and ".join(one for one, names in of.items() if name in names)
            raise click.UsageError(f"--{name} is for bench {wants}")
    if dialogues is not None and (prompts is not None or lengths):
        raise click.UsageError("--dialogues stands in place of --prompts and --prompt-length")
    if what in ("decode", "growth") and model is None:
        raise click.UsageError(f"bench {what} needs --model")
    check_apart({"--json": json_file, "--html": html_file, "--table": table})
    for file in filter(None, (json_file, html_file, table)):
        check_writable(file)
    figures: dict[str, Any]
    code = 0
    if what in ("decode", "growth"):
        click.get_current_context().with_resource(for_checkpoint(threads or 0))
    if what == "decode":
        from specverify.bench.budgets import SWEPT_DEPTHS, SWEPT_NODES
        from specverify.bench.decode import DecodeOrder
        from specverify.bench.decode_command import run_decode
        from specverify.records.ranks import ranks_of

        plan = Plan(
            backend or "cpu-eager", model=model, prompts=prompts, cases=cases or 4, new_tokens=new_tokens or 64,
            dtypes=(dtype or "float32",), seed=seed, layout=layout,
        )  # fmt: skip
        if sweep:
            nodes, depths = nodes or SWEPT_NODES, depths or SWEPT_DEPTHS
        folder, ranks = None if trace is None else Path(trace), ranks_of(backend=dist_backend or "gloo")
        wanted = DecodeOrder(
            plan, drafts or ("ngram",), nodes, depths, repeat or 1, windows, lengths, dialogues, folder
        )
        figures, page, code = run_decode(wanted, ranks)
        if ranks.rank:  # the first rank alone writes files
            click.echo(page, err=True)
            return code
    elif what == "growth":
        from reports.pages.growth import growth_page
        from specverify.bench.growth import forwards

        assert model is not None
        sizes = forwards.Sizes(nodes) if nodes else forwards.Sizes()
        figures = forwards.measure(backend or "cpu-eager", model, dtype or "float32", sizes)
        page = growth_page(figures)
    elif what == "oracle":
        from reports.pages.growth import oracle_page
        from specverify.bench.growth import oracle

        figures = oracle.measure(model, nodes or oracle.NODES)
        page, code = oracle_page(figures), int(not figures["same"])
    elif what == "kv":
        from specverify.bench.kv import REPETITIONS, measure
        from specverify.setup.selection import check_layout

        if layout is not None:
            check_layout(layout, ())
        figures = measure(layout, REPETITIONS)
        page = kv_table(figures)
    elif what == "attention":
        from specverify.bench.ways import table as ways

        every = ways.measure_settings(device or "cpu", ways.settings(device or "cpu", model, dtype))
        found = ways.table(device or "cpu", every)
        # Figures of one shape are shown with their ratios, those of many by the table.
        figures, page = (every[0], attention_table(every[0])) if len(every) == 1 else (found, ways.summary(found))
        if table is not None:
            ways.write(table, found)
    elif what == "isolation":
        from specverify.bench import isolation

        figures = isolation.measure(backend or "cpu-eager", cases or 200, seed)
        page = figures_table(figures)
    else:
        from specverify.bench.throughput import throughput

        figures = throughput(backend or "cpu-eager", cases or 200, seed)
        page = figures_table(figures)
    click.echo(page, err="-" in (json_file, html_file))
    if json_file is not None:
        write_json(json_file, figures)
    if html_file is not None and what in ("decode", "growth"):
        from reports.html.bench import bench_page
        from specverify import __version__

        write_whole(html_file, bench_page(what, figures, __version__))
    elif html_file is not None:
        from reports.html.selftest import figures_page
        from specverify import __version__

        sentence = "What checking costs. Times are ratios of what was measured side by side in this run."
        write_whole(html_file, figures_page(f"Bench: {what}", sentence, figures, __version__))
    return code
