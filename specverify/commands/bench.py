"""The command `bench`: ratios of times that are measured side by side in one run."""

from typing import Any

import click


@click.command()
@click.argument("what", default="throughput", type=click.Choice(["throughput", "kv", "attention", "isolation"]))
@click.option("--backend", help="throughput, isolation: backend name or pkg.module:factory (default cpu-eager).")
@click.option("--cases", type=click.IntRange(min=1), help="throughput, isolation: cases to judge (default 200).")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="attention: where (default cpu).")
@click.option("--layout", metavar="NAME", help="kv: only this KV layout (default: each).")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--json", "json_file", metavar="FILE|-", help="Write the figures as one JSON object.")
def bench(
    what: str,
    backend: str | None,
    cases: int | None,
    device: str | None,
    layout: str | None,
    seed: int,
    json_file: str | None,
) -> int:
    """Measure what checking costs.

    throughput: cases per second, and wall time over time in the backend's forwards. kv: verify (one block written and
    read, no model) and commit of each KV layout, against prefix length, page size and rows kept. attention: our split
    of prefix and tree (and our kernel, on a GPU) beside SDPA under a dense mask, FlexAttention, and one reading of KV.
    isolation: what a process of its own costs a backend: as many workers as `diff` has judge each case both ways, in
    turn.
    """
    # Imports stand in the function, so that other commands and `--help` do not pay for them.
    from reports.pages.tables import attention_table, figures_table, kv_table
    from reports.writing import check, write_json

    judging = "isolation" if what == "isolation" else "throughput"
    for name, value, wants in (
        ("backend", backend, judging),
        ("cases", cases, judging),
        ("device", device, "attention"),
        ("layout", layout, "kv"),
    ):
        if value is not None and what != wants:
            raise click.UsageError(f"--{name} is for bench {wants}")
    if json_file is not None:
        check(json_file)
    figures: dict[str, Any]
    if what == "kv":
        from specverify.bench.kv import REPETITIONS, measure
        from specverify.setup.selection import check_layout

        if layout is not None:
            check_layout(layout, ())
        figures = measure(layout, REPETITIONS)
        page = kv_table(figures)
    elif what == "attention":
        from specverify.bench import attention

        figures = attention.measure(device or "cpu")
        page = attention_table(figures)
    elif what == "isolation":
        from specverify.bench import isolation

        figures = isolation.measure(backend or "cpu-eager", cases or 200, seed)
        page = figures_table(figures)
    else:
        from specverify.bench.throughput import throughput

        figures = throughput(backend or "cpu-eager", cases or 200, seed)
        page = figures_table(figures)
    click.echo(page, err=json_file == "-")
    if json_file is not None:
        write_json(json_file, figures)
    return 0
