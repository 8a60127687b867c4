"""The pages of `docs/reference` that are made from the program: its commands, its public names and its tables."""

import json
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import click

from tests.measure.documents import words
from tests.measure.documents.pages import ROOT

FOLDER = ROOT / "docs" / "reference"
NOTICE = "<!-- made by `python -m tests.measure docs`: change the program, and run that command -->\n\n"

SCHEMAS = {
    "reference/case.schema.json": "A case file. The fields are explained in [Cases](case.md).",
    "specverify/gate/profile.schema.json": "The profile of the gate, `specverify.toml`.",
    "reports/gate/result.schema.json": "The result of the gate, `gate.json`.",
    "specverify/records/record.schema.json": "The record that `--trace DIR` writes.",
    "backends/programs/protocol.schema.json": "The lines between SpecVerify and a program (`command:PROGRAM`).",
    "backends/engine/attention/measured/table.schema.json": "The table that `bench attention --table` writes.",
}


def reference_pages() -> dict[str, str]:
    """Each page that is made from the program, by the name of its file."""
    makers: dict[str, Callable[[], str]] = {
        "commands.md": commands,
        "python.md": python_interface,
        "case.md": case_fields,
        "trace.md": trace_fields,
        "drafts.md": drafts,
        "families.md": families,
        "layouts.md": layouts,
        "rules.md": rules,
        "invariants.md": invariants,
        "faults.md": faults,
        "backends.md": backends,
        "schemas.md": schemas,
    }
    return {name: NOTICE + maker() for name, maker in makers.items()}


def commands() -> str:
    """Every command with its usage, its options and their help."""
    from specverify.cli import cli

    text = "# Commands\n\nEvery command has `--help`, which prints the same.\n\n"
    text += words.paragraphs(cli.help or "")
    return text + "".join(_command(name, command) for name, command in _every_command("specverify", cli))


def _every_command(name: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    """A command and those below it; a group only where it runs by itself."""
    if not isinstance(command, click.Group):
        yield name, command
        return
    if command.invoke_without_command:
        yield name, command
    for child in command.commands.values():
        yield from _every_command(f"{name} {child.name}", child)


def _command(name: str, command: click.Command) -> str:
    arguments = [parameter for parameter in command.params if isinstance(parameter, click.Argument)]
    options = [
        parameter for parameter in command.params if isinstance(parameter, click.Option) and not parameter.hidden
    ]
    usage = " ".join([name, *(_argument(argument) for argument in arguments), *(["[OPTIONS]"] if options else [])])
    rows = ((f"`{_spelling(option)}`", _help(option)) for option in options)
    listed = words.table(("option", "what it does"), rows) if options else ""
    return f"\n## {name}\n\n```text\n{usage}\n```\n\n{words.paragraphs(command.help or '')}\n{listed}".rstrip() + "\n"


def _argument(argument: click.Argument) -> str:
    kind = argument.type
    name = argument.metavar or (argument.name or "").upper()
    if isinstance(kind, click.Choice) and argument.metavar is None:
        name = "|".join(map(str, kind.choices))
    several = f"{name}..." if argument.nargs == -1 else name
    return several if argument.required else f"[{several}]"


def _spelling(option: click.Option) -> str:
    """The option as one types it, with what stands behind it."""
    names = ", ".join([*option.opts, *option.secondary_opts])
    if option.is_flag or option.count:
        return names
    kind = option.type
    value = option.metavar or (
        "|".join(map(str, kind.choices)) if isinstance(kind, click.Choice) else kind.name.upper()
    )
    return f"{names} {value}"


def _help(option: click.Option) -> str:
    parts = [option.help or ""]
    if option.multiple:
        parts.append("May be given several times.")
    if option.show_default and option.default is not None and not callable(option.default):
        parts.append(f"Default: `{option.default}`.")
    return " ".join(filter(None, parts))


def python_interface() -> str:
    """The names that a user may import."""
    from specverify import adapt, conformance, interface, pytest_plugin
    from specverify.backends.adapt import CONTRACTS, PARTS
    from specverify.backends.adapt.batches import BATCH_PARAMETERS
    from specverify.backends.adapt.blackbox import PARAMETERS

    text = "# Python interface\n\nFor users are the names that `specverify` itself exports, and three modules: "
    text += "`specverify.adapt`, `specverify.conformance` and `specverify.pytest_plugin`. Everything else may change "
    text += "without notice.\n\n## specverify\n\n" + words.paragraphs(words.docstring(interface)[0])
    for name in sorted(interface.__all__, key=str.swapcase):
        text += _public_name(name, getattr(interface, name))
    text += "\n## specverify.adapt\n\n"
    text += words.paragraphs(words.docstring(adapt)[0])
    for name in adapt.__all__:
        text += _public_name(name, getattr(adapt, name))
    text += (
        "\n## Parameters of a black box\n\nA function names those that it wants. All but the first two are optional."
    )
    text += "\n\n"
    text += words.table(
        ("parameter", "what it is given"), ((f"`{name}`", sentence) for name, sentence in PARAMETERS.items())
    )
    text += "\n## Parameters of `generate_many`\n\n"
    text += words.table(
        ("parameter", "what it is given"), ((f"`{name}`", sentence) for name, sentence in BATCH_PARAMETERS.items())
    )
    text += "\n## Kinds of component\n"
    for kind, contract in CONTRACTS.items():
        judged = ", ".join(f"`{name}`" for name in contract.judged_by)
        text += f"\n### component({kind}=...)\n\nIt returns {words.escape_markup(contract.returns)}. "
        text += f"Judged first by: {judged}.\n\n"
        text += words.table(
            ("argument", "what it is"), ((f"`{name}`", sentence) for name, sentence in contract.offers.items())
        )
    text += "\n## Parts of a step\n\nWhat a generator given to `stepper` may put into the dict of a step.\n\n"
    text += words.table(
        ("part", "stage", "what it is"),
        ((f"`{name}`", stage.word, sentence) for name, (stage, sentence) in PARTS.items()),
    )
    for module in (conformance, pytest_plugin):
        text += f"\n## {module.__name__}\n\n" + words.paragraphs(words.docstring(module)[0])
    return text + _public_name("agrees", conformance.agrees)


def _public_name(name: str, value: Any) -> str:
    """The section of one public name: signature, docstring and fields."""
    if isinstance(value, dict):
        return ""  # CONTRACTS and PARTS have sections of their own
    title = f"\n### {name}\n\n"
    if not isinstance(value, type):
        title += f"```python\n{words.signature(value)}\n```\n\n"
    head, sections = words.docstring(value)
    text = title + words.paragraphs(head)
    if isinstance(value, type):
        if is_dataclass(value) and not issubclass(value, Exception):
            text += "\n" + words.field_table(value)
        elif (method := getattr(value, "run", None)) is not None:
            text += f"\n#### {name}.run\n\n" + words.paragraphs(words.docstring(method)[0])
    for section in ("Args", "Returns", "Raises"):
        entries = sections.get(section, {})
        lines = [f"- {_entry_name(entry)}{words.escape_markup(sentence)}\n" for entry, sentence in entries.items()]
        text += f"\n{section}:\n\n{''.join(lines)}" if lines else ""
    return text


def _entry_name(entry: str) -> str:
    return f"`{entry}`: " if entry else ""


def case_fields() -> str:
    """The fields of a case file."""
    from specverify.reference.architecture import Architecture, Checkpoint, Rope, Seeded
    from specverify.reference.case import Case
    from specverify.reference.grammar import Grammar
    from specverify.reference.layout import KvLayout
    from specverify.reference.rules import Rule
    from specverify.reference.sampling import Sampling, Stops
    from specverify.reference.session import ACTIONS, Action, Mate, Session

    text = "# Cases\n\nA case decides everything about one run. Its file is the JSON of these fields; fields at their "
    text += "default may be left out. Drafts have [a page of their own](drafts.md).\n"
    kinds = (
        Case,
        Seeded,
        Architecture,
        Rope,
        Checkpoint,
        KvLayout,
        Sampling,
        Rule,
        Grammar,
        Stops,
        Session,
        Mate,
        Action,
    )
    text += "".join(_fields(kind) for kind in kinds)
    text += "\n## Actions of a session\n\n"
    return text + words.table(
        ("action", "what it does"), ((f"`{name}`", sentence) for name, sentence in ACTIONS.items())
    )


def trace_fields() -> str:
    """The fields of a trace."""
    from specverify.reference import trace
    from specverify.reference.session import Account, Event

    text = (
        "# Traces\n\nWhat one run reveals. A part that an engine does not show is `None`: it is unobserved, and never "
    )
    text += "counts as equal. `specverify trace schema` prints the JSON lines of a recorded trace.\n"
    kinds = (
        *(trace.Trace, trace.Step, trace.Drafted, trace.Lowered, trace.Attended, trace.Scored, trace.Accepted),
        *(trace.Emitted, trace.Committed, trace.Kv, trace.Accounting, trace.TargetCalls, trace.Speculated),
        *(Account, Event),
    )
    return text + "".join(_fields(kind) for kind in kinds)


def _fields(kind: type) -> str:
    return f"\n## {kind.__name__}\n\n{words.paragraphs(words.docstring(kind)[0])}\n{words.field_table(kind)}"


def drafts() -> str:
    """Every kind of draft with its fields, and the kinds of tree."""
    from specverify.commands.subjects import rows_of
    from specverify.reference.draft import KINDS

    text = "# Drafts\n\nThe `draft` of a case names its kind by `kind`. [Tree tables](../how_to/trees.md) says how to "
    text += "write shapes.\n\n"
    text += words.table(
        ("kind", "has a law to draw from", "in short"),
        (
            (f"[`{tag}`](#{tag})", "yes" if kind.has_law else "no", _first_sentence(kind))
            for tag, kind in sorted(KINDS.items())
        ),
    )
    for tag, kind in sorted(KINDS.items()):
        text += f"\n## {tag}\n\n{words.paragraphs(words.docstring(kind)[0])}\n{words.field_table(kind)}"
    text += "\n## Kinds of tree\n\nWhich draws of siblings keep a law that a rule can correct.\n\n"
    return text + words.table(
        ("tree", "draws", "why"), ((row["name"], row["state"], row["sentence"]) for row in rows_of("trees"))
    )


def _first_sentence(kind: object) -> str:
    return words.docstring(kind)[0].split("\n\n")[0].split(". ")[0].rstrip(".") + "."


def families() -> str:
    """Every model family, and the model types that are refused."""
    from specverify.commands.subjects import rows_of

    rows = rows_of("families")
    text = "# Model families\n\n`specverify list families` prints this list, and `--json` adds every field of "
    text += "config.json. A family that is *drawn alone* has seeded models and reads no checkpoint.\n\n"
    text += words.table(
        ("family", "model_type", "state", "what it reads and refuses"),
        (
            (f"`{row['name']}`", ", ".join(row["model_types"]), row["state"], row["sentence"])
            for row in rows
            if row["state"] != "not read"
        ),
    )
    text += "\n## Model types that are not read\n\n`--against transformers` judges them all the same.\n\n"
    unread = (row for row in rows if row["state"] == "not read")
    return text + words.table(
        ("model_type", "why"), ((f"`{row['model_types'][0]}`", row["sentence"]) for row in unread)
    )


def layouts() -> str:
    """Every KV layout and its settings."""
    from specverify.commands.subjects import rows_of
    from specverify.reference.layout import KINDS, KvLayout

    text = "# KV layouts\n\n`--layout NAME` draws one layout only. [Layouts and bits](../explanation/layouts.md) says "
    text += "which layouts agree bit for bit.\n\n"
    text += words.table(
        ("layout", "commits by", "pages", "what it does"),
        (
            (
                f"`{row['name']}`",
                ", ".join(KINDS[row["name"]].commits),
                "yes" if KINDS[row["name"]].pages else "no",
                row["sentence"],
            )
            for row in rows_of("layouts")
        ),
    )
    return text + "\n## Settings\n\n" + words.field_table(KvLayout)


def rules() -> str:
    """Every acceptance rule."""
    from specverify.commands.subjects import rows_of

    text = "# Acceptance rules\n\n`specverify law RULE` enumerates the law of a rule. "
    text += "[The law of an acceptance rule](../how_to/law.md) shows how.\n\n"
    return text + words.table(
        ("rule", "promise", "what it does", "source"),
        ((f"`{row['name']}`", row["state"], row["sentence"], row["source"]) for row in rows_of("rules")),
    )


def invariants() -> str:
    """Every invariant with its statement and the stages that it needs."""
    from specverify.commands.subjects import rows_of

    text = (
        "# Invariants\n\nWhat must hold, by room. `--invariant GLOB` asks some of them. An invariant is *unobserved* "
    )
    text += "where the engine does not show a stage that it needs.\n"
    room = ""
    rows: list[tuple[str, str, str]] = []
    for row in [*rows_of("invariants"), None]:
        name = "" if row is None else row["name"].partition(".")[0]
        if name != room:
            if rows:
                text += f"\n## {room}\n\n" + words.table(("invariant", "what must hold", "needs"), rows)
            room, rows = name, []
        if row is not None:
            rows.append((f"`{row['name']}`", row["sentence"], ", ".join(row["needs"]) or "the output"))
    return text


def faults() -> str:
    """Every fault that can be planted, by stage, and the public reports."""
    from specverify.commands.subjects import rows_of

    text = "# Faults\n\n`specverify diff --fault NAME` plants one of these in our own engine. Each reproduces a public "
    text += "report or stands for a whole kind of defect. `specverify list faults --json` adds sources and triggers.\n"
    rows = rows_of("faults")
    for stage in dict.fromkeys(row["stage"] for row in rows):
        text += f"\n## Shown at stage {stage}\n\n" + words.table(
            ("fault", "on", "what goes wrong"),
            ((f"`{row['name']}`", row["on"], row["sentence"]) for row in rows if row["stage"] == stage),
        )
    reports = rows_of("catalogue")
    text += "\n## Public reports\n\nWhich fault stands for which report, or why none can be planted.\n\n"
    return text + words.table(
        ("report", "what it reports", "source", "planted as, or why not"),
        ((row["name"], row["title"], row["source"], row["sentence"]) for row in reports),
    )


def backends() -> str:
    """The support matrix: every shipped backend, the ready adapters, and the forms of names for engines of a user."""
    from specverify.backends.adapters import ADAPTERS
    from specverify.backends.registry import FORMS
    from specverify.backends.shipped import ROWS

    text = "# Backends and what they support\n\n`specverify list backends` says which of them this machine can open. "
    text += "All of our backends run every KV layout, session, draft, rule and processing; the table has what differs. "
    text += (
        "Three settings of a layout need more: `latent` a backend with unequal widths, `left_pad` written-out "
        "attention, `mixed_prefill` one attention for trees and prompts in one process."
    )
    text += "\n\n"
    text += words.table(
        ("backend", "device", "dtypes", "soft caps", "sinks", "unequal widths", "ranks", "cases"),
        (
            (
                f"`{row.name}`",
                f"{row.device}, EMULATED" if row.emulated else row.device,
                ", ".join(row.dtypes),
                row.soft_caps,
                "yes" if row.sinks else "no",
                "yes" if row.unequal_widths else "no",
                ", ".join(map(str, row.ranks)),
                str(row.cases or "usual"),
            )
            for row in ROWS
        ),
    )
    text += "\n## What each is\n\n" + words.table(
        ("backend", "what it is", "its twin on the CPU"),
        ((f"`{row.name}`", row.sentence, f"`{row.twin}`" if row.twin else "") for row in ROWS),
    )
    text += "\n## Ready adapters\n\nEngines of others that need no adapter of yours.\n\n" + words.table(
        ("backend", "extra", "what it is"),
        ((f"`{row.name}`", f"`{row.extra}`" if row.extra else "none", row.sentence) for row in ADAPTERS),
    )
    text += (
        "\n## Known faults of their engines\n\nEach adapter leaves out the cases in which its engine is known to be "
    )
    text += "wrong, so that a run finds what is new; every verdict names what was left out. The scripts lie in "
    text += "`tests/strangers/found` and show each fault by itself.\n\n" + words.table(
        ("backend", "left out, and why"),
        ((f"`{row.name}`", sentence) for row in ADAPTERS for sentence in row.excluded),
    )
    text += "\nOther faults are met by runs. A page with such a difference names the fault.\n\n" + words.table(
        ("backend", "what it does"),
        ((f"`{row.name}`", fault.sentence) for row in ADAPTERS for fault in row.known),
    )
    return (
        text
        + "\n## Engines of your own\n\n"
        + words.table(
            ("name", "where it runs", "what it is"), ((f"`{form}`", where, sentence) for form, where, sentence in FORMS)
        )
    )


def schemas() -> str:
    """The JSON files that the program reads and writes, with the properties of their schemas."""
    text = "# Files and their schemas\n\nEvery JSON file that the program reads or writes has a JSON Schema.\n\n"
    text += words.table(
        ("schema", "what it describes"), ((f"`{path}`", sentence) for path, sentence in SCHEMAS.items())
    )
    for path in SCHEMAS:
        schema = json.loads((ROOT / path).read_text())
        text += f"\n## {Path(path).name}\n\n{words.escape_markup(schema['title'])}.\n"
        parts = {"": schema, **schema.get("$defs", {})} if "properties" not in schema else {"": schema}
        for name, part in parts.items():
            if part.get("properties"):
                text += (f"\n### {name}\n\n" if name else "\n") + _properties(part)
    return text


def _properties(schema: dict[str, Any]) -> str:
    required = schema.get("required", ())
    return words.table(
        ("key", "required", "type", "what it says"),
        (
            (f"`{key}`", "yes" if key in required else "no", _type(part), part.get("description", ""))
            for key, part in schema["properties"].items()
        ),
    )


def _type(part: dict[str, Any]) -> str:
    if "$ref" in part:
        return str(part["$ref"]).rsplit("/", 1)[-1]
    if "enum" in part:
        return " or ".join(f"`{json.dumps(value)}`" for value in part["enum"])
    if "const" in part:
        return f"`{json.dumps(part['const'])}`"
    kind = part.get("type", "")
    return " or ".join(kind) if isinstance(kind, list) else str(kind)
