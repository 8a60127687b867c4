"""Ranks of a bench are killed: no finished prompt is lost, and the run that goes on gives what an undisturbed one does.

The ranks are forks of this process, which has the imports, and meet through gloo.
"""

import json
import os
import random
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from specverify.cli import main
from specverify.records.merge import shard_folder
from tests.checkpoints import readable

WORLD, PROMPTS, TOKENS = 2, 6, 8
KILLS = 20
GRACE_S = 3.0
"""How long the other rank may take to notice; torchrun then ends it, and so do we."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return readable("llama", tmp_path_factory.mktemp("ranks"))


def bench_arguments(checkpoint: Path, folder: Path) -> list[str]:
    words = ["--model", checkpoint, "--cases", PROMPTS, "--new-tokens", TOKENS, "--trace", folder]
    return ["bench", "decode", *map(str, words)]


def launch_ranks(checkpoint: Path, folder: Path) -> list[int]:
    """The process ids of the ranks of one run, by rank."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    return [_rank(rank, port, checkpoint, folder) for rank in range(WORLD)]


def _rank(rank: int, port: int, checkpoint: Path, folder: Path) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of threads, which sleep here
        child = os.fork()
    if child:
        return child
    code = 70
    try:
        os.environ |= {
            "RANK": str(rank), "WORLD_SIZE": str(WORLD), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        }  # fmt: skip
        log = os.open(folder.parent / f"log-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.stdout = sys.stderr = os.fdopen(os.dup(log), "w")
        main(bench_arguments(checkpoint, folder))
    except SystemExit as stopped:
        code = int(stopped.code or 0)
    finally:
        sys.stderr.flush()
        os._exit(code)


def wait_for_ranks(children: list[int], seconds: float) -> list[int | None]:
    """The exit codes of the children that end within so many seconds, -9 for a killed one; the others are ended."""
    codes: dict[int, int] = {}
    deadline = time.monotonic() + seconds
    while len(codes) < len(children):
        late = time.monotonic() > deadline
        for child in (pid for pid in children if pid not in codes):
            if late:
                os.kill(child, signal.SIGKILL)
            ended_pid, status = os.waitpid(child, 0 if late else os.WNOHANG)
            if ended_pid:
                codes[child] = os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    return [codes[child] for child in children]


def turns_of(folder: Path, rank: int) -> dict[int, list[str]]:
    """The finished prompts of a rank, each with the lines of its turns."""
    shard = shard_folder(folder, rank, WORLD)
    if not (shard / "prompts.jsonl").exists():
        return {}
    whole_lines = [line for line in (shard / "prompts.jsonl").read_text().split("\n") if line.endswith("}")]
    turns = [line for line in (shard / "turns.jsonl").read_text().split("\n") if line.endswith("}")]
    numbers = [json.loads(line)["prompt"] for line in whole_lines]
    return {number: [line for line in turns if json.loads(line)["prompt"] == number] for number in numbers}


def killed_and_gone_on(checkpoint: Path, folder: Path, victim: int, wait: Callable[[], None]) -> list[int | None]:
    """Kill a rank when `wait` returns, launch the run again, and hold that nothing that was finished ran again."""
    children = launch_ranks(checkpoint, folder)
    wait()
    os.kill(children[victim], signal.SIGKILL)
    codes = wait_for_ranks(children, GRACE_S)
    before = [turns_of(folder, rank) for rank in range(WORLD)]
    assert wait_for_ranks(launch_ranks(checkpoint, folder), 60) == [0, 0], (folder.parent / "log-0").read_text()
    for rank, prompts in enumerate(before):
        after = turns_of(folder, rank)
        assert len(after) == PROMPTS // WORLD
        for number, lines in prompts.items():
            assert after[number] == lines
    return codes


def compare_records(first: Path, second: Path) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(["trace", "compare", str(first), str(second)])
    return int(stopped.value.code or 0)


@pytest.fixture(scope="module")
def undisturbed_record(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The record of the same run in one process."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    with pytest.raises(SystemExit) as stopped:
        main(bench_arguments(checkpoint, folder))
    assert not stopped.value.code
    return folder


@pytest.mark.slow
def test_a_rank_killed_between_two_prompts_loses_none(
    checkpoint: Path, undisturbed_record: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"

    def wait() -> None:
        deadline = time.monotonic() + 60
        while not turns_of(folder, 1) and time.monotonic() < deadline:
            time.sleep(0.005)

    codes = killed_and_gone_on(checkpoint, folder, 1, wait)
    # Rank 0 noticed, merged what was whole, and said what is missing.
    assert codes == [3, -9], (tmp_path / "log-0").read_text()
    assert "shard 1 of 2 is missing" in (tmp_path / "log-0").read_text()
    assert compare_records(undisturbed_record, folder) == 0


@pytest.fixture(scope="module")
def duration(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> float:
    """Seconds that the ranks take where nobody kills them."""
    folder, began = tmp_path_factory.mktemp("timed") / "run", time.monotonic()
    assert wait_for_ranks(launch_ranks(checkpoint, folder), 60) == [0, 0], (folder.parent / "log-0").read_text()
    return time.monotonic() - began


@pytest.mark.slow
@pytest.mark.parametrize("number", range(KILLS))
def test_any_rank_killed_at_any_moment(
    number: int, checkpoint: Path, undisturbed_record: Path, duration: float, tmp_path: Path
) -> None:
    rng = random.Random(number)
    moment = rng.uniform(0, duration)
    killed_and_gone_on(checkpoint, tmp_path / "run", rng.randrange(WORLD), lambda: time.sleep(moment))
    assert compare_records(undisturbed_record, tmp_path / "run") == 0
