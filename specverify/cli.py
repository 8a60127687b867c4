"""The command line: diff, replay, law, list, doctor, bench; one clear line for wrong input, exit codes 0 to 3."""

import sys
from pathlib import Path
from typing import Any

from specverify import threads

threads.single()

import click  # noqa: E402

import specverify  # noqa: E402
from backends.flags import MODES  # noqa: E402
from reference.case import DTYPES  # noqa: E402
from reference.rules import DRAWS, RULES  # noqa: E402
from specverify import sampling_options  # noqa: E402
from specverify.plan import DEFAULT_CASES, Plan, default_dtypes, default_jobs  # noqa: E402

DEVICES = {"cpu": "cpu-eager", "cuda": "cuda-eager", "npu": "ascend-eager"}
"""The backend that `--device` means when `--backend` is not given."""


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(specverify.__version__)
def cli() -> None:
    """Verify tree speculative decoding: the target's own output, faster, or a case that shows where it breaks.

    Exit codes: 0 agree, 1 differ, 2 wrong usage or unreadable input, 3 could not judge.
    """


@cli.command()
@click.option("--backend", help="Backend name or pkg.module:factory (default cpu-eager, or the fault's own).")
@click.option("--against", help="Another backend as the reference, in place of the NumPy oracle.")
@click.option("--model", help="Checkpoint directory, hub id, or builtin:NAME (default: seeded built-in models).")
@click.option("--prompts", help="Prompt file, or builtin:humaneval; needs --model.")
@click.option("--invariant", "invariants", multiple=True, metavar="GLOB", help="Only these invariants; repeatable.")
@click.option(
    "--cases", type=click.IntRange(min=1), help=f"Cases, or prompts with --model (default {DEFAULT_CASES}, 20)."
)
@click.option("--new-tokens", type=click.IntRange(min=1), default=64, show_default=True, help="Tokens per prompt.")
@sampling_options.options
@click.option(
    "--time-budget", type=click.FloatRange(min=0, min_open=True), metavar="S", help="Begin no case after S s."
)
@click.option("--dtype", "dtypes", multiple=True, type=click.Choice(DTYPES), help="Working dtype; repeatable.")
@click.option("--device", type=click.Choice(list(DEVICES)), help="Pick the eager backend of this device.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the whole run.")
@click.option("--jobs", type=click.IntRange(min=1), help="Worker processes (default: one per core, up to 4).")
@click.option("--report", type=click.Path(path_type=Path), default=Path(".specverify"), help="Folder for reports.")
@click.option("--junit", metavar="FILE", help="Write a JUnit XML report.")
@click.option("--json", "json_file", metavar="FILE|-", help="Write the result as one JSON object.")
@click.option("--layout", metavar="NAME", help="Only this KV layout: `list layouts` (default: all, mixed).")
@click.option("--fault", metavar="NAME", help="Plant this catalogue fault in the engine first.")
@click.option("--mode", type=click.Choice(MODES), help="reference: eager attention only (default: as flags say).")
@click.option(
    "--processor",
    "processors",
    multiple=True,
    metavar="pkg.module:function",
    help="A logits processor of your own, for sampled cases; repeatable.",
)
def diff(
    backend: str | None,
    against: str | None,
    model: str | None,
    prompts: str | None,
    invariants: tuple[str, ...],
    cases: int | None,
    new_tokens: int,
    time_budget: float | None,
    dtypes: tuple[str, ...],
    device: str | None,
    seed: int,
    jobs: int | None,
    report: Path,
    junit: str | None,
    json_file: str | None,
    layout: str | None,
    fault: str | None,
    mode: str | None,
    processors: tuple[str, ...],
    **settings: Any,
) -> int:
    """Draw cases, run oracle and backend, judge, shrink, report."""
    from specverify import diff as command

    if prompts is not None and model is None:
        raise click.UsageError("--prompts needs --model: the built-in models have no tokenizer")
    sampling = sampling_options.sampling_of(model, settings)
    name = backend or (DEVICES[device] if device else _backend_of(fault))
    _check_names(name, device, against, invariants, fault)
    if layout is not None:
        from specverify.selection import check_layout

        if model is not None:
            raise click.UsageError("--layout is for drawn cases, not for --model")
        check_layout(layout, (name, against) if against is not None else (name,))
    if model is None:  # a checkpoint has a vocabulary of its own to try them on
        from specverify.processors import admit

        admit(processors)
    elif processors and sampling.greedy:
        raise click.UsageError("--processor needs --temperature here: prompts are sampled with it or decoded without")
    plan = Plan(
        backend=name,
        against=against,
        model=model,
        prompts=prompts,
        invariants=invariants,
        cases=cases or (DEFAULT_CASES if model is None else 20),
        new_tokens=new_tokens,
        sampling=sampling,
        time_budget_s=time_budget or 0.0,
        dtypes=dtypes or (default_dtypes(name) if model is None else default_dtypes(name)[:1]),
        seed=seed,
        jobs=1 if model is not None else jobs or default_jobs(device or "cpu"),
        fault=fault,
        processors=processors,
        layout=layout,
        mode=mode,
    )
    return command.diff(plan, report, junit, json_file)


def _backend_of(fault: str | None) -> str:
    """The backend to run when none is named: where the fault is to be planted, or the first there is."""
    if fault is None:
        return DEVICES["cpu"]
    from specverify.opening import fault_named  # brings torch, which this process needs for nothing else

    return fault_named(fault).on


def _check_names(
    backend: str, device: str | None, against: str | None, invariants: tuple[str, ...], fault: str | None
) -> None:
    """Refuse names that mean nothing before any worker starts; devices are looked for by the workers."""
    from backends.base import Unavailable
    from backends.registry import ROWS, UnknownBackend
    from specverify.selection import invariants_matching

    if device is not None and device not in [row.device for row in ROWS]:
        raise Unavailable(
            f"--device {device}: no backend here runs on it: `specverify list backends` names those we have"
        )
    invariants_matching(invariants)
    if fault is not None:
        from specverify.opening import fault_named  # brings torch, which this process needs for nothing else

        fault_named(fault)
    for one in filter(None, (backend, against)):
        if ":" not in one and one not in [row.name for row in ROWS]:
            known = ", ".join(row.name for row in ROWS)
            raise UnknownBackend(f"no backend is called {one!r}: known are {known}, or give pkg.module:factory")
    if device is not None:
        of = next((row.device for row in ROWS if row.name == backend), device)
        if of != device:
            raise click.UsageError(f"--device {device} contradicts --backend {backend}, which runs on {of}")


@cli.command()
@click.argument("file", type=click.Path())
@click.option("--backend", help="Backend to run it on (default: the one it was saved with).")
@click.option("--fault", metavar="NAME", help="Plant this catalogue fault first.")
@click.option("--model", help="Where the checkpoint of the case lies on this machine.")
@click.option(
    "--processor",
    "processors",
    multiple=True,
    metavar="pkg.module:function",
    help="Admit a logits processor that the case names; repeatable.",
)
@click.option("--mode", type=click.Choice(MODES), help="reference: eager attention only (default: as flags say).")
@click.option("--json", "json_file", metavar="FILE|-", help="Write the result as one JSON object.")
def replay(
    file: str,
    backend: str | None,
    fault: str | None,
    model: str | None,
    processors: tuple[str, ...],
    mode: str | None,
    json_file: str | None,
) -> int:
    """Run one saved case again: FAILED (same finding), CHANGED (another), FIXED (none)."""
    from reports import record, terminal, writing
    from specverify.replay import replay as run

    if json_file is not None:
        writing.check(json_file)
    result = run(file, backend, fault, model, processors, mode)
    to_stderr = json_file == "-"
    if result.failure is not None:
        click.echo(terminal.failure_page(result.failure), err=to_stderr)
    click.echo(f"{result.word}  {result.why}", err=to_stderr)
    if json_file is not None:
        found = None if result.failure is None else record.failure_fact(result.failure)
        writing.write_json(
            json_file, {"result": result.word, "why": result.why, "finding": found, "emulated": result.emulated}
        )
    return result.exit_code


@cli.command()
@click.argument("rule", required=False, type=click.Choice(list(RULES)))
@click.option("--p", metavar="P,P,…", help="The target's probabilities at every context: 0.6,0.4 or 3/5,2/5.")
@click.option("--q", metavar="Q,Q,…", help="The draft's (default for both: a pair designed to tell rules apart).")
@click.option("--draws", type=click.Choice(DRAWS), help="How siblings are named (default: as RULE was published).")
@click.option("--siblings", type=click.IntRange(1, 31), help="Children of each node.")
@click.option("--depth", type=click.IntRange(1, 31), help="Levels below the root.")
@click.option("--tree", metavar="N,N,…", help="Parents of the nodes; node 0 is the root, its own parent: 0,0,0,1,1.")
@click.option("--tokens", metavar="T,T,…", help="Tokens of the nodes, the root's first, in place of drafting any.")
@click.option("--threshold-single", metavar="X", help="target-only: accept where p(x) reaches it (default 1).")
@click.option("--threshold-acc", metavar="X", help="target-only: divides the covered mass (default 1).")
@click.option("--epsilon", metavar="X", help="typical: the hard threshold (default 0.3).")
@click.option("--delta", metavar="X", help="typical: the factor of exp(-entropy) (default 0.09).")
@click.option("--world", metavar="FILE.json", help="Tree, thresholds, and target and draft after each path.")
@click.option("--soft-q", is_flag=True, help="With top-k: hand over the soft q, as if tokens had been drawn from it.")
@click.option("--rule", "own", metavar="pkg.module:function", help="A rule of your own in place of RULE.")
@click.option("--claims-lossless", is_flag=True, help="With --rule: exit 1 unless it is lossless.")
@click.option("--table", is_flag=True, help="All built-in rules, all kinds of draft, on a standard set of worlds.")
@click.option("--picture", is_flag=True, help="Bars of the first token's law, and of the worst context's.")
@click.option("--max-runs", type=click.IntRange(min=1), help="Runs of the rule before a world counts as too large.")
@click.option("--json", "json_file", metavar="FILE|-", help="Write the result as one JSON object.")
def law(**options: Any) -> int:
    """Enumerate the exact law of an acceptance rule, and hold it against the target's.

    Exit 1 where a rule that declares to be lossless in this setting is not; a rule that is lossy as declared is fine.
    """
    from specverify import law as command

    return command.law(command.Options(**options))


@cli.command("list")
@click.argument("subject", required=False, type=click.Choice(["backends", "layouts", "invariants", "faults", "models"]))
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_(subject: str | None, as_json: bool) -> int:
    """List backends (available, or why not), KV layouts, invariants, faults, models."""
    from reports.tables import rows_table
    from reports.writing import write_json
    from specverify.listing import SUBJECTS, listing

    chosen = [subject] if subject else list(SUBJECTS)
    content: Any = {one: listing(one) for one in chosen}
    if as_json:
        write_json("-", content[subject] if subject else content)
        return 0
    for one in chosen:
        click.echo(rows_table(one, content[one]))
    return 0


@cli.command()
@click.option("--probe", type=click.Choice(["ascend"]), help="Run the operators' contract on the device instead.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor(probe: str | None, as_json: bool) -> int:
    """Say what is installed, what is missing, what is shadowed. Exit 3 if something needed is not there.

    With --probe, say which documented rules of the device's operators hold on it: exit 1 if one does not.
    """
    from reports.tables import rows_table
    from reports.writing import write_json
    from specverify.doctor import examine, healthy

    if probe is not None:
        from specverify.probing import probed

        found = probed()
        if as_json:
            write_json("-", {"probe": probe, "rules": found})
        else:
            click.echo(rows_table(f"probe {probe}", found))
        return 1 if any(row["state"] == "struck" for row in found) else 0
    rows = examine()
    if as_json:
        write_json("-", {"healthy": healthy(rows), "checks": rows})
    else:
        click.echo(rows_table("doctor", rows))
    return 0 if healthy(rows) else 3


@cli.command()
@click.argument("what", default="throughput", type=click.Choice(["throughput", "calibration", "kv"]))
@click.option("--backend", help="throughput: backend name or pkg.module:factory (default cpu-eager).")
@click.option("--cases", type=click.IntRange(min=1), help="throughput: cases to judge (default 200).")
@click.option("--tests", type=click.IntRange(min=1), help="calibration: black-box tests to run (default 10000).")
@click.option("--layout", metavar="NAME", help="kv: only this KV layout (default: each).")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--json", "json_file", metavar="FILE|-", help="Write the figures as one JSON object.")
def bench(
    what: str,
    backend: str | None,
    cases: int | None,
    tests: int | None,
    layout: str | None,
    seed: int,
    json_file: str | None,
) -> int:
    """Measure what checking costs, or how often it is wrong.

    throughput: cases per second, and wall time over time in the backend's forwards. calibration: black-box sampling
    tests of correct samplers, which must not raise an alarm; exit 1 if one does. kv: verify (one block written and
    read, no model) and commit of each KV layout, against prefix length, page size and rows kept.
    """
    from reports.tables import calibration_table, figures_table, kv_table
    from reports.writing import check, write_json

    for name, value, of in (
        ("backend", backend, "throughput"),
        ("cases", cases, "throughput"),
        ("tests", tests, "calibration"),
        ("layout", layout, "kv"),
    ):
        if value is not None and of != what:
            raise click.UsageError(f"--{name} is for bench {of}")
    if json_file is not None:
        check(json_file)
    if what == "calibration":
        from specverify.calibration import calibrate

        figures = calibrate(tests or 10_000, seed)
        page = calibration_table(figures)
    elif what == "kv":
        from specverify.kvbench import REPETITIONS, measure
        from specverify.selection import check_layout

        if layout is not None:
            check_layout(layout, ())
        figures = measure(layout, REPETITIONS)
        page = kv_table(figures)
    else:
        from specverify.bench import throughput

        figures = throughput(backend or "cpu-eager", cases or 200, seed)
        page = figures_table(figures)
    click.echo(page, err=json_file == "-")
    if json_file is not None:
        write_json(json_file, figures)
    return 1 if figures.get("red") else 0


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; every known complaint is one line on standard error and an exit code."""
    from backends.base import Unavailable, WrongFlag
    from backends.registry import UnknownBackend
    from reports.bundle import Unreadable
    from reports.writing import Unwritable
    from specverify.selection import Unknown
    from specverify.unusable import MissingInput, UnusableInput

    try:
        code = cli.main(args=arguments, prog_name="specverify", standalone_mode=False)
    except click.exceptions.Abort:
        code = _complain("interrupted", 3)
    except click.exceptions.NoArgsIsHelpError as why:
        click.echo(why.format_message(), err=True)
        code = 2
    except click.ClickException as why:
        code = _complain(why.format_message(), 2)
    except (Unknown, UnknownBackend, UnusableInput, Unreadable, Unwritable, WrongFlag) as why:
        code = _complain(str(why), 2)
    except (Unavailable, MissingInput) as why:
        code = _complain(str(why), 3)
    sys.exit(code if isinstance(code, int) else 0)


def _complain(why: str, code: int) -> int:
    click.echo(f"specverify: {' '.join(why.split())}", err=True)
    return code
