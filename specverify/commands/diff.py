"""The command `diff`: options as arguments of `specverify.interface`, and the pages of the result."""

from pathlib import Path
from typing import Any

import click

from specverify.commands import sampling_options, shared_options
from specverify.plan import DEFAULT_CASES, DEVICES, FOCI
from specverify.properties.reference_names import NUMPY
from specverify.reference.case import DTYPES
from specverify.reference.parallel import RANKS
from specverify.reference.quantisation import QUANTISED
from specverify.setup.number_lists import layer_range, numbers


@click.command()
@click.option("--backend", help="Backend name or pkg.module:factory (default cpu-eager, or the fault's own).")
@click.option(
    "--against", help="The reference in place of the NumPy oracle: any backend, or `transformers`, run plainly."
)
@shared_options.REFERENCE
@click.option("--model", help="Checkpoint directory, hub id, or builtin:NAME (default: seeded built-in models).")
@click.option(
    "--draft",
    metavar="DIR|builtin:NAME|ngram|model:DIR|scripted",
    help="The draft of --model: a head's directory, a second model, or a draft without files (default: all of those).",
)
@click.option("--draft-weights", type=click.Choice(list(QUANTISED)), help="Round weights of --draft to 8 or 4 bits.")
@click.option(
    "--draft-trees",
    metavar="FILE",
    help="Trees of --draft: a table of `dispatch learn`, or a tree that ends early (default: one).",
)
@click.option(
    "--batch",
    type=click.IntRange(1, 32),
    help="With --model: prompts side by side in one session, with evictions and a fork (default: each alone).",
)
@click.option(
    "--concurrency",
    callback=numbers,
    metavar="1,4,16",
    help="With --model, on a server or another engine that batches by itself: requests side by side (default: 1).",
)
@click.option("--focus", type=click.Choice(FOCI), help="Ask every case for this: the law of sampled tokens.")
@click.option("--prompts", help="Prompt file, or builtin:humaneval; needs --model.")
@click.option("--invariant", "invariants", multiple=True, metavar="GLOB", help="Only these invariants; repeatable.")
@click.option(
    "--cases",
    type=click.IntRange(min=1),
    help=f"Cases, or prompts with --model (default {DEFAULT_CASES}, fewer on a slow backend, and 20).",
)
@click.option("--new-tokens", type=click.IntRange(min=1), default=64, show_default=True, help="Tokens per prompt.")
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    metavar="N",
    help="With --model: judge N steps of each prompt, by the seed, and say that the others are left out.",
)
@click.option(
    "--layers",
    metavar="A:B",
    callback=layer_range,
    help="With --model: judge layers A to B - 1 alone, on the engine's own inputs; what is left out is told.",
)
@click.option(
    "--variants",
    type=click.IntRange(min=0),
    metavar="K",
    help="With --model: run variants (padding, layouts, ...) of K prompts; the others are judged by their own runs.  "
    "[default: 3]",
)
@sampling_options.options
@shared_options.time_budget("Begin no case after S s.")
@click.option("--dtype", "dtypes", multiple=True, type=click.Choice(DTYPES), help="Working dtype; repeatable.")
@click.option("--device", type=click.Choice(list(DEVICES)), help="Pick the eager backend of this device.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the whole run.")
@shared_options.jobs("Worker processes (default: one per core, up to 4).")
@shared_options.threads("Threads of a backend on the CPU (default: 1; for a checkpoint what is faster).")
@click.option("--report", type=click.Path(path_type=Path), default=Path(".specverify"), help="Folder for reports.")
@click.option("--trace", metavar="DIR", type=click.Path(path_type=Path), help="Record the run: `trace show DIR`.")
@click.option("--junit", metavar="FILE", help="Write a JUnit XML report.")
@shared_options.json_file("Write the result as one JSON object.")
@shared_options.html_file("Write the run as one HTML page, with pictures of each failure.")
@click.option("--watch", is_flag=True, help="Write the --html page while the run goes on; it reloads itself.")
@click.option("--layout", metavar="NAME", help="Only this KV layout: `list layouts` (default: all, mixed).")
@click.option("--ranks", type=click.Choice([*map(str, RANKS)]), help="Shard every case's target over this many ranks.")
@shared_options.fault("Plant this catalogue fault in the engine first.")
@shared_options.MODE
@shared_options.processors("A logits processor of your own, for sampled cases; repeatable.")
@shared_options.guards
@click.option("--keep-going", is_flag=True, help="Judge every case, and tell each distinct cause once.")
@click.option("--max-failures", type=click.IntRange(min=1), metavar="N", help="Stop at the N-th distinct cause.")
@shared_options.verbose("Print the counts of every invariant, and every fact of the run.")
def diff(
    *,
    backend: str | None,
    against: str | None,
    reference: str | None,
    model: str | None,
    draft: str | None,
    draft_weights: str | None,
    draft_trees: str | None,
    batch: int | None,
    concurrency: tuple[int, ...],
    focus: str | None,
    prompts: str | None,
    invariants: tuple[str, ...],
    cases: int | None,
    new_tokens: int,
    steps: int | None,
    layers: tuple[int, int] | None,
    variants: int | None,
    time_budget: float | None,
    dtypes: tuple[str, ...],
    device: str | None,
    seed: int,
    jobs: int | None,
    threads: int | None,
    report: Path,
    trace: Path | None,
    junit: str | None,
    json_file: str | None,
    html_file: str | None,
    watch: bool,
    layout: str | None,
    ranks: str | None,
    fault: str | None,
    mode: str | None,
    processors: tuple[str, ...],
    case_timeout: float | None,
    start_timeout: float,
    memory_limit: int | None,
    keep_going: bool,
    max_failures: int | None,
    verbose: bool,
    **settings: Any,
) -> int:
    """Draw cases, run oracle and backend, judge, shrink, report."""
    from specverify.campaign import recorder
    from specverify.interface.planning import plan_of

    if watch and html_file in (None, "-"):
        raise click.UsageError("--watch needs --html FILE: that page is written while the run goes on")
    plan = plan_of(
        backend=backend,
        against=against,
        reference=reference or NUMPY,
        model=model,
        draft=draft,
        draft_weights=draft_weights,
        draft_trees=draft_trees,
        batch=batch,
        concurrency=concurrency,
        focus=focus,
        prompts=prompts,
        invariants=invariants,
        cases=cases,
        new_tokens=new_tokens,
        steps=steps,
        layers=layers,
        variants=variants,
        sampling=sampling_options.sampling_of(model, settings),
        grammar=sampling_options.grammar_of(
            model,
            settings["grammar"],
            settings["grammar_library"],
            settings["grammar_after"],
            settings["thinking_budget"],
        ),
        time_budget=time_budget,
        dtypes=dtypes,
        device=device,
        seed=seed,
        jobs=jobs,
        layout=layout,
        ranks=None if ranks is None else int(ranks),
        fault=fault,
        mode=mode,
        processors=processors,
        case_timeout=case_timeout,
        start_timeout=start_timeout,
        threads=threads,
        memory_limit=memory_limit,
        keep_going=keep_going,
        max_failures=max_failures,
    )
    return recorder.diff(
        plan,
        report,
        junit_file=junit,
        json_file=json_file,
        html_file=html_file,
        verbose=verbose,
        trace=trace,
        watch=watch,
    )
