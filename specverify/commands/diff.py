"""The command `diff`: options, checks for contradictions, and the resulting plan."""

from pathlib import Path
from typing import Any

import click

from specverify.backends.servers.address import PREFIX as SERVER
from specverify.commands import sampling_options, shared_options
from specverify.plan import (
    DEFAULT_CASES,
    EVERY_CAUSE,
    FOCI,
    TRANSFORMERS,
    Plan,
    default_cases,
    default_dtypes,
    default_jobs,
)
from specverify.reference.case import DTYPES
from specverify.reference.parallel import RANKS
from specverify.reference.quantisation import QUANTISED

DEVICES = {"cpu": "cpu-eager", "cuda": "cuda-eager", "npu": "ascend-eager"}
"""The backend that `--device` means when `--backend` is not given."""


@click.command()
@click.option("--backend", help="Backend name or pkg.module:factory (default cpu-eager, or the fault's own).")
@click.option(
    "--against", help="The reference in place of the NumPy oracle: any backend, or `transformers`, run plainly."
)
@click.option("--model", help="Checkpoint directory, hub id, or builtin:NAME (default: seeded built-in models).")
@click.option(
    "--draft",
    metavar="DIR|builtin:NAME|ngram|model:DIR|scripted",
    help="The draft of --model: a head's directory, a second model, or a draft without files (default: all of those).",
)
@click.option("--draft-weights", type=click.Choice(list(QUANTISED)), help="Round the weights of --draft to 8 bits.")
@click.option(
    "--draft-trees", metavar="FILE", help="Trees of --draft by batch size: a table of `dispatch learn` (default: one)."
)
@click.option(
    "--batch",
    type=click.IntRange(1, 32),
    help="With --model: prompts side by side in one session, with evictions and a fork (default: each alone).",
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
    model: str | None,
    draft: str | None,
    draft_weights: str | None,
    draft_trees: str | None,
    batch: int | None,
    focus: str | None,
    prompts: str | None,
    invariants: tuple[str, ...],
    cases: int | None,
    new_tokens: int,
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

    if prompts is not None and model is None:
        raise click.UsageError("--prompts needs --model: the built-in models have no tokenizer")
    if draft is not None and model is None:
        raise click.UsageError("--draft needs --model: drawn cases have drafts of their own")
    if draft or draft_weights or draft_trees:
        from specverify.checkpoints.given_draft import check_options

        check_options(draft, draft_weights or "", draft_trees)
    if batch is not None and (model is None or draft == "scripted"):
        raise click.UsageError("--batch needs --model, and a draft other than scripted, which is made for one prompt")
    sampling = sampling_options.sampling_of(model, settings)
    grammar = sampling_options.grammar_of(model, settings["grammar"], settings["grammar_library"])
    name = backend or (DEVICES[device] if device else _backend_of(fault))
    _check_names(name, device, against, invariants, fault)
    if model is None and name.startswith(SERVER):
        raise click.UsageError(f"{SERVER}URL brings its own weights: name the same checkpoint's folder with --model")
    if model is not None and against == name and fault is None:
        raise click.UsageError(
            f"--against {against} is the backend itself, which agrees with itself whatever it computes: "
            f"name another, or --against {TRANSFORMERS}"
        )
    if focus is not None and model is not None and sampling.greedy:
        raise click.UsageError(f"--focus {focus} needs --temperature here: prompts are decoded greedily without it")
    if layout is not None:
        from specverify.setup.selection import check_layout

        names = (name, against) if against not in (None, TRANSFORMERS) else (name,)
        check_layout(layout, names, latent=model is not None)
    if ranks is not None:
        from specverify.setup.selection import check_ranks

        check_ranks(int(ranks), (name,))
    if keep_going and max_failures is not None:
        raise click.UsageError("--keep-going and --max-failures contradict each other: give one of them")
    if model is None:  # with a checkpoint, the worker tries the processors on the checkpoint's vocabulary
        from specverify.setup.processors import admit

        admit(processors)
    elif processors and sampling.greedy:
        raise click.UsageError("--processor needs --temperature here: prompts are sampled with it or decoded without")
    plan = Plan(
        backend=name,
        against=against,
        model=model,
        prompts=prompts,
        invariants=invariants,
        cases=cases or (default_cases(name) if model is None else 20),
        new_tokens=new_tokens,
        sampling=sampling,
        time_budget_s=time_budget or 0.0,
        open_ended=time_budget is not None and cases is None,
        dtypes=dtypes or (default_dtypes(name) if model is None else default_dtypes(name)[:1]),
        seed=seed,
        # A checkpoint uses all cores in one process.
        jobs=1 if model is not None else jobs or default_jobs(device or "cpu"),
        fault=fault,
        processors=processors,
        layout=layout,
        ranks=int(ranks or 0),
        mode=mode,
        case_timeout_s=case_timeout,
        start_timeout_s=start_timeout,
        threads=threads or 0,
        memory=memory_limit,
        max_failures=EVERY_CAUSE if keep_going else max_failures or 1,
        focus=focus,
        draft=draft,
        draft_weights=draft_weights or "",
        draft_trees=draft_trees,
        batch=batch or 0,
        grammar=grammar,
    )
    return recorder.diff(
        plan,
        report,
        junit_file=junit,
        json_file=json_file,
        html_file=html_file,
        verbose=verbose,
        trace=trace,
    )


def _backend_of(fault: str | None) -> str:
    """The backend if none is named: the fault's own, or the eager backend on the CPU without a fault."""
    if fault is None:
        return DEVICES["cpu"]
    from specverify.setup.subjects import fault_named  # brings torch, which this process needs for nothing else

    return fault_named(fault).on


def _check_names(
    backend: str, device: str | None, against: str | None, invariants: tuple[str, ...], fault: str | None
) -> None:
    """Refuse unknown names before any worker starts; the workers look for the device itself."""
    from specverify.backends.adapters import SHIPPED_BACKENDS
    from specverify.backends.base import Unavailable
    from specverify.backends.shipped import ROWS
    from specverify.setup.selection import check_backend, check_globs

    if device is not None and device not in [row.device for row in ROWS]:
        raise Unavailable(
            f"--device {device}: no backend here runs on it: `specverify list backends` names those we have"
        )
    check_globs(invariants)
    if fault is not None:
        from specverify.setup.subjects import fault_named  # brings torch, which this process needs for nothing else

        fault_named(fault)
    for name in filter(None, (backend, against)):
        if name is against and name == TRANSFORMERS:
            continue
        check_backend(name)
    if device is not None:
        backend_device = next((row.device for row in SHIPPED_BACKENDS if row.name == backend), device)
        if backend_device != device:
            raise click.UsageError(f"--device {device} contradicts --backend {backend}, which runs on {backend_device}")
