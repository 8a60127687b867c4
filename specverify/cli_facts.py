"""Commands that say how things are: law, list, doctor, bench."""

from pathlib import Path
from typing import Any

import click

from reference.rules import DRAWS, RULES


@click.command()
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


@click.command("list")
@click.argument(
    "subject",
    required=False,
    type=click.Choice(["backends", "layouts", "invariants", "faults", "catalogue", "models"]),
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_(subject: str | None, as_json: bool) -> int:
    """List backends (available, or why not), KV layouts, invariants, faults, the catalogue of reports, models."""
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


@click.command()
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


@click.command()
@click.argument(
    "what",
    default="throughput",
    type=click.Choice(["throughput", "calibration", "kv", "attention", "search", "mutants", "isolation"]),
)
@click.option("--backend", help="throughput: backend name or pkg.module:factory (default cpu-eager).")
@click.option(
    "--cases",
    type=click.IntRange(min=1),
    help="throughput: cases to judge (default 200); search: cases of each search (default 200).",
)
@click.option("--tests", type=click.IntRange(min=1), help="calibration: black-box tests to run (default 10000).")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="attention: where (default cpu).")
@click.option("--layout", metavar="NAME", help="kv: only this KV layout (default: each).")
@click.option("--of", type=click.Choice(["engine", "reference"]), help="mutants: whose (default engine).")
@click.option("--sample", type=click.IntRange(min=0), help="mutants: how many, 0 for all (default 400).")
@click.option("--jobs", type=click.IntRange(min=1), help="mutants: processes (default 1).")
@click.option("--budget", type=click.FloatRange(min=1), metavar="S", help="mutants: begin none after S s.")
@click.option(
    "--report", type=click.Path(path_type=Path), help="mutants: folder of results, taken up again (.specverify)."
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--json", "json_file", metavar="FILE|-", help="Write the figures as one JSON object.")
def bench(
    what: str,
    backend: str | None,
    cases: int | None,
    tests: int | None,
    device: str | None,
    layout: str | None,
    of: str | None,
    sample: int | None,
    jobs: int | None,
    budget: float | None,
    report: Path | None,
    seed: int,
    json_file: str | None,
) -> int:
    """Measure what checking costs, or how often it is wrong.

    throughput: cases per second, and wall time over time in the backend's forwards. calibration: black-box sampling
    tests of correct samplers, which must not raise an alarm; exit 1 if one does. kv: verify (one block written and
    read, no model) and commit of each KV layout, against prefix length, page size and rows kept. attention: our split
    of prefix and tree (and our kernel, on a GPU) beside SDPA under a dense mask, FlexAttention, and one reading of KV.
    search: how many drawn cases it takes until each condition appears under which faults show; nothing is judged.
    mutants: what share of one-line errors in the engine the invariants catch (in the oracle: its tests), and which
    survive; exit 1 below the goal, 3 where not all of them were judged. isolation: what a process of its own costs a
    backend, each drawn case judged in this process and in that one, in turn.
    """
    from reports.mutantspage import mutants_page
    from reports.tables import attention_table, calibration_table, figures_table, kv_table, search_table
    from reports.writing import check, write_json

    for name, value, wants in (
        ("backend", backend, what if what == "isolation" else "throughput"),
        ("cases", cases, what if what in ("search", "isolation") else "throughput"),
        ("tests", tests, "calibration"),
        ("device", device, "attention"),
        ("layout", layout, "kv"),
        ("of", of, "mutants"),
        ("sample", sample, "mutants"),
        ("jobs", jobs, "mutants"),
        ("budget", budget, "mutants"),
        ("report", report, "mutants"),
    ):
        if value is not None and what != wants:
            raise click.UsageError(f"--{name} is for bench {wants}")
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
    elif what == "search":
        from specverify import searchbench

        figures = searchbench.measure(cases or 200, seed)
        page = search_table(figures)
    elif what == "attention":
        from specverify import attentionbench

        figures = attentionbench.measure(device or "cpu")
        page = attention_table(figures)
    elif what == "isolation":
        from specverify import isolationbench

        figures = isolationbench.measure(backend or "cpu-eager", cases or 200, seed)
        page = figures_table(figures)
    elif what == "mutants":
        from specverify import mutants

        folder = report or Path(".specverify")
        asked = mutants.Options(
            of or "engine", mutants.SAMPLE if sample is None else sample, seed, jobs or 1, budget, folder
        )
        figures = mutants.bench(asked, mutants.scope_of(asked))
        page = mutants_page(figures)
    else:
        from specverify.bench import throughput

        figures = throughput(backend or "cpu-eager", cases or 200, seed)
        page = figures_table(figures)
    click.echo(page, err=json_file == "-")
    if json_file is not None:
        write_json(json_file, figures)
    return 1 if figures.get("red") else 3 if figures.get("unfinished") else 0


COMMANDS = (law, list_, doctor, bench)
