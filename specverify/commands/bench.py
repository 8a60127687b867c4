"""The command `bench`: ratios of times that are measured side by side, a subcommand for each bench."""

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specverify.commands import shared_options
from specverify.plan import Plan
from specverify.reference.case import DTYPES

if TYPE_CHECKING:
    from specverify.setup.files import Outputs

DEFAULT = "throughput"
"""The bench that runs where none is named."""


class Bench(click.Command):
    """One bench; for an option of other benches it says which have it."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click's own; raises UsageError with the benches that have the option."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as why:
            owners = [name for name, other in bench.commands.items() if why.option_name in _spellings(other)]
            if not owners:
                raise
            raise click.UsageError(f"{why.option_name} is for bench {' and '.join(owners)}", ctx) from None


class Benches(click.Group):
    """The benches, of which DEFAULT runs where the command line begins with an option, or is empty."""

    command_class = Bench

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click's own, after the name of the default bench is put where none stands."""
        is_named = bool(args) and (not args[0].startswith("-") or args[0] in self.get_help_option_names(ctx))
        return super().parse_args(ctx, args if is_named else [DEFAULT, *args])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click's own; raises UsageError with the names of all benches for an unknown one."""
        if args[0] not in self.commands:
            raise click.UsageError(f"{args[0]!r} is not one of {', '.join(map(repr, self.commands))}", ctx)
        return super().resolve_command(ctx, args)


def _spellings(command: click.Command) -> list[str]:
    """Every spelling of every option of a command."""
    return [spelling for parameter in command.params for spelling in parameter.opts]


def _with_outputs(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--json` and `--html` to a bench, which gets its `Outputs` before it measures."""

    @wraps(command)
    def run(*, json_file: str | None, html_file: str | None, **options: Any) -> int:
        from specverify.setup.files import Outputs

        code: int = command(outputs=Outputs(json_file, html_file, options.get("table")), **options)
        return code

    html = shared_options.html_file("Write the figures as one HTML page.")
    return shared_options.json_file("Write the figures as one JSON object.")(html(run))


def _plots(kind: str, figures: dict[str, Any]) -> Callable[[], bytes]:
    """The maker of the HTML page of a bench whose figures are plotted."""

    def page() -> bytes:
        from specverify import __version__
        from specverify.reports.html.bench import bench_page  # Jinja is imported only for a page

        return bench_page(kind, figures, __version__)

    return page


def _figures(kind: str, figures: dict[str, Any]) -> Callable[[], bytes]:
    """The maker of the HTML page of a bench whose figures are listed."""

    def page() -> bytes:
        from specverify import __version__
        from specverify.reports.html.selftest import figures_page

        sentence = "What checking costs. Times are ratios of what was measured side by side in this run."
        return figures_page(f"Bench: {kind}", sentence, figures, __version__)

    return page


BACKEND = click.option("--backend", default="cpu-eager", show_default=True, help="Backend name or pkg.module:factory.")
CASES = click.option("--cases", type=click.IntRange(min=1), default=200, show_default=True, help="Cases to judge.")
SEED = click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the draws.")
MODEL = click.option("--model", required=True, help="Checkpoint directory, hub id, or builtin:NAME.")
THREADS = click.option("--threads", type=click.IntRange(min=1), help="Threads of torch (default: all cores).")
DTYPE = click.option("--dtype", type=click.Choice(DTYPES), default="float32", show_default=True, help="Working dtype.")
NODES = click.option(
    "--nodes", multiple=True, type=click.IntRange(1, 512), help="Nodes of the trees; repeatable (default: a series)."
)


@click.group(cls=Benches)
def bench() -> None:
    """Measure what checking costs: cases per second (throughput, which runs where no bench is named), or one part."""


@bench.command()
@BACKEND
@CASES
@SEED
@_with_outputs
def throughput(*, backend: str, cases: int, seed: int, outputs: "Outputs") -> int:
    """Time cases per second, and wall time over time in the backend's forwards."""
    # Imports stand in the function, so that other commands and `--help` do not pay for them.
    from specverify.bench.throughput import throughput as measure
    from specverify.reports.pages.tables import figures_table

    figures = measure(backend, cases, seed)
    outputs.write(figures_table(figures), figures, _figures("throughput", figures))
    return 0


@bench.command()
@click.option("--layout", metavar="NAME", help="Only this KV layout (default: each).")
@_with_outputs
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
    outputs.write(kv_table(figures), figures, _figures("kv", figures))
    return 0


@bench.command()
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True, help="Where it runs.")
@click.option("--model", help="A checkpoint whose heads are timed; `drawn` for those of all models that cases draw.")
@click.option("--dtype", type=click.Choice(DTYPES), help="Working dtype (default: the device's own).")
@click.option("--table", metavar="FILE", help="Write the times by which cpu-measured chooses its attention.")
@_with_outputs
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
    outputs.write(page, figures, _figures("attention", figures))
    return 0


@bench.command()
@BACKEND
@CASES
@SEED
@_with_outputs
def isolation(*, backend: str, cases: int, seed: int, outputs: "Outputs") -> int:
    """Time what a process of its own costs a backend.

    As many workers as `diff` has judge each case both ways, in turn.
    """
    from specverify.bench.isolation import measure
    from specverify.reports.pages.tables import figures_table

    figures = measure(backend, cases, seed)
    outputs.write(figures_table(figures), figures, _figures("isolation", figures))
    return 0


@bench.command()
@MODEL
@BACKEND
@click.option("--prompts", help="Prompt file, or builtin:humaneval (default: random token ids).")
@click.option("--cases", type=click.IntRange(min=1), default=4, show_default=True, help="Prompts, or dialogues.")
@click.option("--dialogues", metavar="FILE", help="JSON lines with `turns`, each on the caches of the last.")
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
@_with_outputs
def decode(
    *,
    model: str,
    backend: str,
    prompts: str | None,
    cases: int,
    dialogues: str | None,
    lengths: tuple[int, ...],
    drafts: tuple[str, ...],
    nodes: tuple[int, ...],
    depths: tuple[int, ...],
    sweep: bool,
    windows: tuple[int, ...],
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
    """Time greedy generation by the target alone, by each draft and tree, and by transformers.

    Figures are speed, times of tokens, accepted tokens by depth, and stages. Exit 1 if a text of ours is not the
    target's own.
    """
    from specverify.bench.budgets import SWEPT_DEPTHS, SWEPT_NODES
    from specverify.bench.decode import DecodeOrder, run_decode
    from specverify.campaign.threads import for_checkpoint
    from specverify.records.ranks import ranks_of

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
    )
    figures, page, code = run_decode(order, ranks)
    if ranks.rank:  # the first rank alone writes files
        click.echo(page, err=True)
        return code
    outputs.write(page, figures, _plots("decode", figures))
    return code


@bench.command()
@MODEL
@BACKEND
@NODES
@DTYPE
@THREADS
@_with_outputs
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
    outputs.write(growth_page(figures), figures, _plots("growth", figures))
    return 0


@bench.command()
@click.option("--model", help="Checkpoint directory, hub id, or builtin:NAME (default: a built-in model).")
@NODES
@_with_outputs
def oracle(*, model: str | None, nodes: tuple[int, ...], outputs: "Outputs") -> int:
    """Time trees of the NumPy oracle beside transformers' float64 forward of the same trees.

    Exit 1 if the two give different numbers.
    """
    from specverify.bench.oracle import NODES as ORACLE_NODES
    from specverify.bench.oracle import measure
    from specverify.reports.pages.tables import oracle_page

    figures = measure(model, nodes or ORACLE_NODES)
    outputs.write(oracle_page(figures), figures, _figures("oracle", figures))
    return int(not figures["same"])
