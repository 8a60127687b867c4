"""A guest in pytest: projects of others run as if SpecVerify were not there, and get one that ask for it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from specverify.pytest_selection import Selection

ROOT = Path(__file__).resolve().parents[3]
RUN = 20

PYPROJECT = """
[tool.pytest.ini_options]
addopts = ["--strict-markers", "-W", "error"]
markers = ["slow: theirs", "cuda: theirs", "npu: theirs", "emulated: theirs", "cpu: theirs"]
pythonpath = ["."]
"""

CONFTEST = """
import pytest

def pytest_addoption(parser):
    parser.addoption("--backend", default="theirs")
    parser.addoption("--allow-absent-device", default="theirs")

@pytest.fixture
def backend(request):
    return request.config.getoption("--backend")
"""

TESTS = """
import sys
import pytest
from {folder} import answer

@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize(
    "mark", [pytest.param(m, marks=getattr(pytest.mark, m)) for m in ("slow", "cuda", "npu", "emulated", "cpu")]
)
def test_theirs(backend, mark, number):
    assert backend == "theirs"
    assert answer == 42
    assert "torch" not in sys.modules
"""

TEST_WITH_FIXTURE = """
def test_ours(specverify_backend):
    assert specverify_backend.name == "terse_engine:terse"
    assert specverify_backend.declaration.name
"""

PYTEST = """
import importlib.metadata, sys
every = importlib.metadata.distributions
def first_of_each(**which):
    return {one.metadata["Name"]: one for one in reversed(list(every(**which)))}.values()
importlib.metadata.distributions = first_of_each
import pytest
sys.exit(pytest.main())
"""
"""Of two installs of one package the first on the path counts: an earlier one of ours has entry points of its own."""

ASKING_OPTIONS = {
    "not asked": [],
    "asked, under xdist": ["-p", "specverify", "-n", "1"],
}


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder of installed packages in which this checkout's metadata lies, with the entry points it declares."""
    declared = re.search(r"\[project\.entry-points\.pytest11\]\n(.*?)\n\n", (ROOT / "pyproject.toml").read_text(), re.S)
    folder = tmp_path / "installed"
    metadata = folder / "specverify_decoding-0.1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: specverify-decoding\nVersion: 0.1.0\n")
    points = declared.group(1).replace('"', "") if declared else ""
    (metadata / "entry_points.txt").write_text(f"[pytest11]\n{points}\n")
    return folder


def project(folder: Path, package: str) -> Path:
    """A project of somebody else: marks, a fixture and options under the names of ours, and 20 tests that use them."""
    (folder / "tests").mkdir(parents=True)
    (folder / package).mkdir()
    (folder / package / "__init__.py").write_text("answer = 42\n")
    (folder / "pyproject.toml").write_text(PYPROJECT)
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "tests" / "test_theirs.py").write_text(TESTS.format(folder=package))
    return folder


def run_in(folder: Path, installed: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join(map(str, (installed, ROOT, ROOT / "tests" / "strangers")))
    return subprocess.run(
        [sys.executable, "-c", PYTEST, "-q", "-p", "no:cacheprovider", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize("asking", ASKING_OPTIONS)
def test_all_tests_of_another_project_run(asking: str, tmp_path: Path, installed: Path) -> None:
    """Where it did not ask, though a folder of it has the name of one of ours; torch is never imported."""
    theirs = project(tmp_path / "project", "answers" if ASKING_OPTIONS[asking] else "reports")
    ended = run_in(theirs, installed, *ASKING_OPTIONS[asking])
    assert f"{RUN} passed" in ended.stdout, ended.stdout + ended.stderr
    assert ended.returncode == 0
    assert not re.search("skipped|failed|error", ended.stdout)


@pytest.mark.slow
def test_a_project_that_asks_gets_the_fixture_beside_its_own(tmp_path: Path, installed: Path) -> None:
    theirs = project(tmp_path / "project", "answers")
    conftest = theirs / "conftest.py"
    conftest.write_text(f'pytest_plugins = ["specverify.pytest_plugin"]\n{conftest.read_text()}')
    (theirs / "tests" / "test_with_ours.py").write_text(TEST_WITH_FIXTURE)
    ended = run_in(theirs, installed, "--specverify-backend", "terse_engine:terse", "--backend", "theirs")
    assert f"{RUN + 1} passed" in ended.stdout, ended.stdout + ended.stderr
    assert ended.returncode == 0


@pytest.mark.parametrize(
    ("expression", "devices"),
    [("npu", []), ("cuda and not slow", []), ("specverify_npu", ["npu"]), ("specverify_cuda or cuda", ["cuda"])],
)
def test_marks_of_others_ask_for_no_device_of_ours(expression: str, devices: list[str]) -> None:
    assert Selection("specverify").demanded_devices(expression) == devices
