"""The command `compare`: two result files, and what the second does worse."""

import json
from pathlib import Path
from typing import Any

import click

from specverify.commands.shared_options import ALPHA

LARGEST = 256 * 2**20
"""The largest result that is read, in bytes."""


@click.command()
@click.argument("before", type=click.Path(path_type=Path))
@click.argument("after", type=click.Path(path_type=Path))
@ALPHA
@click.option("--json", "json_file", metavar="FILE|-", help="Write the differences as one JSON object.")
@click.option("--markdown", metavar="FILE", help="Write them as Markdown, for a merge request.")
def compare(before: Path, after: Path, alpha: float, json_file: str | None, markdown: str | None) -> int:
    """Compare two results of `gate` or `diff --json`: exit code 1 if AFTER fails where BEFORE did not.

    Exit code 1 too if it accepts drafted tokens otherwise on the same cases, which share model, draft and seeds.
    """
    from specverify.reports.gate.comparison import compare_results
    from specverify.reports.gate.markdown import comparison_summary
    from specverify.reports.writing import write_json, write_whole
    from specverify.setup.errors import UnusableInput

    first, second = read(before), read(after)
    try:
        comparison = compare_results(first, second, alpha)
    except (ValueError, LookupError, TypeError, AttributeError) as why:
        file = after if _is_result(first) else before
        raise UnusableInput(f"{file}: {why if isinstance(why, ValueError) else 'not a whole result'}") from None
    to_stderr = json_file == "-"
    for name, lines in comparison.sections():
        for line in lines:
            click.echo(f"{name:16} {line}", err=to_stderr)
    if not comparison.sections():
        click.echo("no difference", err=to_stderr)
    if markdown is not None:
        write_whole(markdown, comparison_summary(comparison).encode())
    if json_file is not None:
        write_json(
            json_file, {"schema": 1, "kind": "comparison", "exit_code": comparison.exit_code, **vars(comparison)}
        )
    return comparison.exit_code


def _is_result(result: dict[str, Any]) -> bool:
    from specverify.reports.gate.comparison import compare_results

    try:
        compare_results(result, result)
    except (ValueError, LookupError, TypeError, AttributeError):
        return False
    return True


def read(file: Path) -> dict[str, Any]:
    """The JSON object in `file`.

    Raises:
        UnusableInput: There is none.
    """
    from specverify.setup.errors import UnusableInput

    try:
        with file.open("rb") as handle:
            raw = handle.read(LARGEST + 1)
        if len(raw) > LARGEST:
            raise UnusableInput(f"{file}: larger than {LARGEST // 2**20} MiB: it is no result")
        content = json.loads(raw)
    except OSError as why:
        raise UnusableInput(f"{file}: {why.strerror or why}") from None
    except (ValueError, RecursionError) as why:
        raise UnusableInput(f"{file}: not JSON: {why}") from None
    if not isinstance(content, dict):
        raise UnusableInput(f"{file}: a JSON object stands in a result")
    return content
