"""The command `init-adapter`: an adapter that runs, and a test beside it."""

from importlib.resources import files
from pathlib import Path

import click

KINDS = {
    "blackbox": "a function from a prompt to tokens",
    "stepper": "a generator of steps, which shows any parts of its stages",
    "backend": "an engine that shows its stages, as one method from a case to a trace",
    "component": "one function, such as a verify kernel, in SpecVerify's own engine",
    "command": "a program in any language, asked in lines of JSON",
}
"""The kinds of adapters that can be written, each in a few words."""

TEST = '''"""The engine in {file} keeps what its adapter declares: `pytest {test}`."""

from specverify.conformance import agrees


def test_twenty_drawn_cases_agree() -> None:
    """Fails with the page of the first case that differs, and where a case was not compared with anything."""
    agrees({name!r}, cases=20)
'''
"""The test that is written beside an adapter."""


@click.command("init-adapter")
@click.argument("kind", type=click.Choice(list(KINDS)))
@click.argument("file", type=click.Path(path_type=Path), default=Path("my_engine.py"))
def init_adapter(kind: str, file: Path) -> int:
    """Write an adapter of KIND to FILE (my_engine.py by default), and a test beside it; both run as they stand.

    Kinds: blackbox, a function from a prompt to tokens; stepper, a generator of steps that shows parts of its stages;
    backend, one method from a case to a trace; component, one function of an engine, such as a verify kernel; command,
    a program in any language. Nothing is overwritten.
    """
    from specverify.setup.errors import UnusableInput

    if file.suffix != ".py" or not file.stem.isidentifier():
        raise UnusableInput(f"{file}: an adapter is imported by its name: give a file such as my_engine.py")
    test = file.with_name(f"test_{file.name}")
    present = next((path for path in (file, test) if path.exists() or path.is_symlink()), None)
    if present is not None:
        raise UnusableInput(f"{present}: it is there already, and nothing is overwritten: name another file")
    name = f"command:python {file.name}" if kind == "command" else f"{file.stem}:open_"
    source = (files("specverify.adapters.templates") / f"{kind}.py").read_text()
    _write(file, source.replace("MODULE:open_", name).replace("command:python FILE", name))
    _write(test, TEST.format(file=file.name, test=test.name, name=name))
    quoted_name = f"'{name}'" if " " in name else name
    folder = "" if file.parent == Path() else f"in {file.parent}: "
    click.echo(f"wrote {file} and {test}: {KINDS[kind]}")
    click.echo(f"next  {folder}specverify check-adapter {quoted_name}")
    click.echo(f"      {folder}specverify diff --backend {quoted_name}")
    click.echo(f"      {folder}pytest {test.name}")
    return 0


def _write(file: Path, content: str) -> None:
    """Write a new file.

    Raises:
        Unwritable: The system refuses, or the file came into being meanwhile.
    """
    from specverify.reports.writing import Unwritable

    try:
        with file.open("x") as opened:
            opened.write(content)
    except OSError as why:
        raise Unwritable.from_os_error(file, why) from None
