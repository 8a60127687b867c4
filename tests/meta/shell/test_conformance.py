"""Conformance ships: from any project, one command judges its engine, and nothing that could not run is green."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from specverify.backends.compositions import open_engine
from specverify.conformance.drawn import NARROWED, why_undeclared
from tests.tiers import first

ROOT = Path(__file__).resolve().parents[3]

ENGINE = """
import torch
from specverify.adapt import blackbox


def generate(prompt_ids, max_new_tokens, model, stops=()):
    tokens = list(prompt_ids)
    while len(tokens) < len(prompt_ids) + max_new_tokens and not (tokens[len(prompt_ids):] and tokens[-1] in stops):
        tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt_ids):]


def off_by_one(prompt_ids, max_new_tokens, model):
    tokens = generate(prompt_ids, max_new_tokens, model)
    return [*tokens[:-1], (tokens[-1] + 1) % model.config.vocab_size]


open_, wrong = blackbox(generate), blackbox(off_by_one)
"""

GREEDY = "every_drawn_case or lossless.greedy-match or structure.parent-range"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project of somebody else: one file with an engine, and nothing of pytest."""
    (tmp_path / "my_engine.py").write_text(ENGINE)
    return tmp_path


def run(project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, timeout=500)


SHIPPED = ("-p", "specverify", "--pyargs", "specverify.conformance")


@pytest.mark.slow
def test_an_engine_of_any_project_is_judged_by_one_command(project: Path) -> None:
    ended = run(project, *SHIPPED, "--backend", "my_engine:open_", "-k", GREEDY)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "2 passed, 1 skipped" in ended.stdout
    assert "my_engine:open_ reveals no lowered" in ended.stdout


def test_a_wrong_engine_fails_with_its_page(project: Path) -> None:
    ended = run(project, *SHIPPED, "--backend", "my_engine:wrong", "-k", "every_drawn_case")
    assert ended.returncode == 1
    assert "DIFFER  off_by_one  lossless.greedy-match" in ended.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "line"),
    first(
        [
            ((), 2, "needs an engine: --specverify-backend pkg.module:factory"),
            (("--backend", "absent_engine:open_"), 2, "cannot import 'absent_engine'"),
            (("--backend", "my_engine:opened"), 2, "'my_engine' has no factory called 'opened'"),
            (("--backend", "npu-eager"), 2, "no backend is called 'npu-eager'"),
        ],
        1,
    ),
)
def test_what_cannot_be_opened_ends_the_run_with_one_line(
    arguments: tuple[str, ...], code: int, line: str, project: Path
) -> None:
    ended = run(project, *SHIPPED, *arguments)
    output = ended.stdout + ended.stderr
    assert ended.returncode == code, output
    assert output.count(line) == 1
    assert "Traceback" not in output


@pytest.mark.slow
def test_an_option_of_the_project_stays_the_projects(project: Path) -> None:
    (project / "conftest.py").write_text(
        "def pytest_addoption(parser):\n    parser.addoption('--backend', default='theirs')\n"
    )
    named = ("--backend", "theirs", "--specverify-backend", "my_engine:open_")
    ended = run(project, *SHIPPED, *named, "-k", "lossless.greedy-match")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "1 passed" in ended.stdout


TEST = """
from specverify.conformance import agrees


def test_engine():
    agrees("my_engine:{name}", cases=5)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "line"),
    [("open_", "1 passed"), ("wrong", "DIFFER  off_by_one"), ("absent", "'my_engine' has no factory called 'absent'")],
)
def test_a_test_of_the_project_needs_one_call_and_no_plugin(name: str, line: str, project: Path) -> None:
    (project / "test_engine.py").write_text(TEST.format(name=name))
    ended = run(project, "test_engine.py")
    assert ended.returncode == (0 if name == "open_" else 1), ended.stdout + ended.stderr
    assert line in ended.stdout


def test_an_invariant_of_cases_that_no_declaration_admits_says_so() -> None:
    """The backend of two processes shards no target; a backend that does is never excused."""
    sharded, unsharded = open_engine("cpu-eager").declaration, open_engine("cpu-handed-over").declaration
    for name in NARROWED:
        assert why_undeclared(name, sharded) == ""
    assert why_undeclared("lossless.ranks-agree", unsharded) == (
        "declares no ranks of 2, of which lossless.ranks-agree speaks"
    )
    assert why_undeclared("draft.shared", unsharded) == ""
