"""Each kind of `train` with its defaults, as a user runs it: `diff` judges the head, and `bench decode` times it."""

import json
import os
from pathlib import Path
from typing import Any

import click
import pytest

from specverify.commands.train import train
from specverify.training.plan import KINDS
from tests.inprocess import exit_code_of, in_this_process
from tests.meta.training import targets
from tests.tiers import first

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return targets.make_folder(tmp_path_factory.mktemp("as-a-user"))


def kinds() -> list[str]:
    """The kinds that the command lists."""
    (argument,) = (parameter for parameter in train.params if isinstance(parameter, click.Argument))
    assert isinstance(argument.type, click.Choice)
    return list(argument.type.choices)


def test_the_kinds_of_the_command_are_those_of_a_plan() -> None:
    assert sorted(kinds()) == sorted(KINDS)


ONLINE = [pytest.param(kind, ("--online",), marks=pytest.mark.slow) for kind in kinds()]


@pytest.mark.parametrize(
    ("kind", "options"),
    [*first([(kind, ()) for kind in kinds()], 1), *ONLINE],
    ids=[*(f"{kind}-cached" for kind in kinds()), *(f"{kind}-online" for kind in kinds())],
)
def test_the_defaults_of_a_training_make_a_head_that_is_judged_and_timed(
    kind: str, options: tuple[str, ...], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    in_this_process(monkeypatch)
    # The default is a thread for each core; workers of pytest that share two cores would wait for each other.
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    model = str(folder / "model")
    arguments = ["--model", model, "--text", str(folder / "prompts.jsonl"), "--minutes", "0.03", "--out", "head"]
    code = exit_code_of("train", kind, *arguments, *options, "--json", "figures.json", "--html", "page.html")
    out, err = capfd.readouterr()
    assert code == 0, err
    figures = json.loads(Path("figures.json").read_text())
    assert figures["kind"] == kind
    assert figures["online"] == bool(options)
    assert figures["curve"][0]["step"] == 0
    assert f"{figures['curve'][-1]['step']:>8}" in out
    assert "tokens per call over the training" in Path("page.html").read_text()
    drafted = ["--model", model, "--draft", "head", "--cases", "1", "--new-tokens", "4"]
    judged = ("--invariant", "draft.fidelity", "--invariant", "lossless.greedy-match", "--dtype", "float64")
    code = exit_code_of("diff", *drafted, *judged)
    out, err = capfd.readouterr()
    assert code == 0, out + err
    assert exit_code_of("bench", "decode", *drafted, "--json", "bench.json") == 0
    ways = json.loads(Path("bench.json").read_text())["ways"]
    assert any("head" in way["way"] and way["accepted"] is not None for way in ways)
