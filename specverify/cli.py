"""The command line: the group of commands, and exit codes 0 to 3.

Every expected error becomes one line on standard error and an exit code.
"""

import contextlib
import io
import os
import stat
import sys
from collections.abc import Iterator
from typing import Any, TextIO

from specverify.campaign import threads

# Before the imports below, which import NumPy: BLAS reads the thread count at that time.
threads.set_one_thread()

import click  # noqa: E402

import specverify  # noqa: E402
from specverify.adapters.check_command import check_adapter  # noqa: E402
from specverify.adapters.init_command import init_adapter  # noqa: E402
from specverify.commands.bench import bench  # noqa: E402
from specverify.commands.compare import compare  # noqa: E402
from specverify.commands.diff import diff  # noqa: E402
from specverify.commands.doctor import doctor  # noqa: E402
from specverify.commands.first_contact import first_contact  # noqa: E402
from specverify.commands.law import law  # noqa: E402
from specverify.commands.list_command import list_  # noqa: E402
from specverify.commands.replay import replay  # noqa: E402
from specverify.commands.selftest import selftest  # noqa: E402
from specverify.commands.train import train, vocabulary  # noqa: E402
from specverify.dispatch.command import dispatch  # noqa: E402
from specverify.gate.command import gate  # noqa: E402
from specverify.gate.ledger_command import ledger  # noqa: E402
from specverify.traces.command import trace  # noqa: E402


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(specverify.__version__)
def cli() -> None:
    """Verify tree speculative decoding: the target's own output, faster, or a case that shows where it breaks.

    Exit codes: 0 agree, 1 differ, 2 wrong usage or unreadable input, 3 could not judge.
    """


for _command in (
    diff,
    replay,
    gate,
    ledger,
    compare,
    selftest,
    law,
    list_,
    doctor,
    first_contact,
    bench,
    trace,
    dispatch,
    train,
    vocabulary,
    init_adapter,
    check_adapter,
):
    cli.add_command(_command)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; every expected error becomes one line on standard error and an exit code."""
    with _pipes_without_readers():
        code = _run(arguments)
    sys.exit(code)


def _run(arguments: list[str] | None) -> int:
    from specverify.reports.writing import Unwritable
    from specverify.setup.refusals import ABSENT, UNUSABLE

    if not (sys.argv[1:] if arguments is None else arguments):
        # click shows the help here too, but 8.1 then exits with 0, and 8.2 raises an error that 8.1 does not name.
        click.echo(cli.get_help(click.Context(cli, info_name="specverify")), err=True)
        return 2
    try:
        # Without standalone mode click raises its exceptions to us, and returns the command's exit code.
        code = cli.main(args=arguments, prog_name="specverify", standalone_mode=False)
    except click.exceptions.Abort:
        code = _complain("interrupted", 3)
    except click.ClickException as why:
        code = _complain(why.format_message(), 2)
    except (*UNUSABLE, Unwritable) as why:
        code = _complain(str(why), 2)
    except ABSENT as why:
        code = _complain(str(why), 3)
    return code if isinstance(code, int) else 0


@contextlib.contextmanager
def _pipes_without_readers() -> Iterator[None]:
    """Inside the `with`, a pipe on standard output or error may lose its reader, as in `specverify diff | head -1`.

    Without it, click answers the system's error with exit code 1, which says that something differs.
    """
    out = _lasting(sys.stdout)
    err = _lasting(sys.stderr)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        yield
        for stream in filter(None, (out, err)):
            stream.flush()


def _lasting(stream: TextIO) -> TextIO:
    """The same stream over a `_Pipe` if it is a pipe or a socket, else the stream itself."""
    try:
        mode = os.fstat(stream.fileno()).st_mode
    except (AttributeError, OSError, ValueError):  # absent, replaced in a test, or closed
        return stream
    if not isinstance(stream, io.TextIOWrapper) or not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
        return stream
    stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_Pipe(stream.fileno(), "wb", closefd=False)),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


class _Pipe(io.FileIO):
    """A pipe that drops what is written after its reader has gone."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            return memoryview(data).nbytes


def _complain(why: str, code: int) -> int:
    click.echo(f"specverify: {' '.join(why.split())}", err=True)
    return code
