"""One import package: no module of ours has a second name, and engines may have packages called as our folders are."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.namesake_repository import MODULE, command_file, installed_variables, write_repository
from tests.tiers import first

ROOT = Path(__file__).resolve().parents[3]
ROOMS = ("backends", "properties", "reference", "reports")


@pytest.fixture
def variables(tmp_path: Path) -> dict[str, str]:
    """The environment of a process that has `specverify` installed."""
    return installed_variables(tmp_path / "site")


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    """The root of an engine's repository with packages of our names."""
    return write_repository(tmp_path / "engine")


def run_program(command: list[str], folder: Path, variables: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=500)


DIFF = ("diff", "--cases", "4", "--jobs", "1", "--dtype", "float32")


RIGHT, WRONG = ("open_", 0, "AGREE"), ("wrong", 1, "lossless.greedy-match")


@pytest.mark.parametrize(
    ("start", "name", "code", "line"),
    first([("command", *WRONG), ("module", *RIGHT), ("module", *WRONG), ("command", *RIGHT)], 1),
)
def test_an_engine_with_packages_of_our_names_is_judged_from_its_root(
    start: str, name: str, code: int, line: str, engine: Path, tmp_path: Path, variables: dict[str, str]
) -> None:
    command = MODULE if start == "module" else [sys.executable, command_file(tmp_path)]
    judged = run_program([*command, *DIFF, "--backend", f"adapter:{name}"], engine, variables)
    assert judged.returncode == code, judged.stdout + judged.stderr
    assert line in judged.stdout


@pytest.mark.slow
def test_it_is_judged_under_pytest(engine: Path, variables: dict[str, str]) -> None:
    words = ["-q", "-p", "no:cacheprovider", "-p", "specverify", "--pyargs", "specverify.conformance"]
    chosen = ["-k", "every_drawn_case or lossless.greedy-match", "--backend", "adapter:open_"]
    judged = run_program([sys.executable, "-m", "pytest", *words, *chosen], engine, variables)
    assert judged.returncode == 0, judged.stdout + judged.stderr
    assert "2 passed" in judged.stdout


@pytest.mark.slow
def test_a_gate_of_it_passes(engine: Path, variables: dict[str, str]) -> None:
    profile = (
        'backends = ["adapter:open_"]\ncases = 3\nseeds = [0]\nfresh-seed = false\ndtypes = ["float32"]\njobs = 1\n'
    )
    (engine / "specverify.toml").write_text(f'{profile}invariants = ["lossless.*"]\n')
    passed = run_program([*MODULE, "gate"], engine, variables)
    assert passed.returncode == 0, passed.stdout + passed.stderr


AFTER_A_RUN = """
import json, sys
from specverify.cli import main
try:
    main(json.loads(sys.argv[1]))
except SystemExit as end:
    assert end.code == 0, end.code
print(json.dumps({name: getattr(module, "__file__", None) for name, module in list(sys.modules.items())}))
"""


@pytest.mark.slow
def test_no_module_has_two_names(tmp_path: Path) -> None:
    """From the checkout's own root, where `import backends` would find a folder of that name."""
    words = ["diff", "--cases", "2", "--jobs", "1", "--report", str(tmp_path)]
    process = run_program([sys.executable, "-c", AFTER_A_RUN, json.dumps(words)], ROOT, dict(os.environ))
    assert process.returncode == 0, process.stdout + process.stderr
    files = json.loads(process.stdout.splitlines()[-1])
    assert [name for name in files if name.partition(".")[0] in ROOMS] == []
    our_files = [Path(file).resolve() for file in files.values() if file]
    our_files = [file for file in our_files if file.is_relative_to(ROOT) and "site-packages" not in file.parts]
    assert len(our_files) > 100
    assert len(our_files) == len(set(our_files))


@pytest.mark.parametrize("room", ROOMS)
def test_a_bare_name_reaches_nothing_of_ours(room: str, tmp_path: Path, variables: dict[str, str]) -> None:
    program = [sys.executable, "-c", f"import specverify, {room}"]
    assert f"No module named '{room}'" in run_program(program, tmp_path, variables).stderr
    refused = run_program(program, ROOT, variables).stderr
    assert f"{ROOT / room / '__init__.py'} is the package specverify.{room}, which has no other import name" in refused


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_is_a_link_to_its_folder(room: str) -> None:
    """Relative, so that it holds in every clone."""
    assert (ROOT / "specverify" / room).readlink() == Path("..") / room


def test_a_checkout_whose_links_became_files_works(tmp_path: Path) -> None:
    """Git on Windows writes the path of a link into a file of its name."""
    (tmp_path / "specverify").mkdir()
    for path in (ROOT / "specverify").iterdir():
        if path.name in ROOMS:
            (tmp_path / "specverify" / path.name).write_text(f"../{path.name}")
        elif path.name != "__pycache__":
            (tmp_path / "specverify" / path.name).symlink_to(path)
    program = "from specverify.backends import base; import specverify; print(specverify.__file__, base.__file__)"
    process = run_program([sys.executable, "-c", program], tmp_path, installed_variables(tmp_path / "none"))
    assert process.stdout.split() == [str(tmp_path / "specverify/__init__.py"), str(ROOT / "backends/base.py")]


BUILD = "from setuptools import build_meta as backend; print(backend.build_{what}({folder!r}))"


def build_archive(what: str, sources: Path, folder: Path) -> Path:
    """What setuptools makes of `sources`, as pip asks for it."""
    program = [sys.executable, "-c", BUILD.format(what=what, folder=str(folder))]
    process = subprocess.run(program, cwd=sources, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stdout + process.stderr
    return folder / process.stdout.splitlines()[-1]


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {entry.filename: archive.read(entry) for entry in archive.infolist()}


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources, links kept: a build leaves folders beside them."""
    if int(version("setuptools").partition(".")[0]) < 77:
        pytest.skip("setuptools is older than pyproject.toml asks for")
    folder = tmp_path_factory.mktemp("sources")
    for name in ("specverify", *ROOMS):
        left_out = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=left_out)
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.mark.slow
def test_a_wheel_holds_one_package_and_a_source_archive_builds_the_same(sources: Path, tmp_path: Path) -> None:
    wheel = contents(build_archive("wheel", sources, tmp_path))
    tops = {name.split("/")[0] for name in wheel}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"specverify"}
    modules = {f"specverify/{file.relative_to(ROOT)}" for room in ROOMS for file in (ROOT / room).rglob("*.py")}
    modules |= {str(file.relative_to(ROOT)) for file in (ROOT / "specverify").rglob("*.py")}
    assert {name for name in wheel if name.endswith(".py")} == modules
    with tarfile.open(build_archive("sdist", sources, tmp_path)) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    assert contents(build_archive("wheel", unpacked, tmp_path / "again")) == wheel


@pytest.mark.slow
def test_a_source_archive_passes_tests_of_its_own(sources: Path, tmp_path: Path) -> None:
    """A few of them: they import the package, read shared files of the tests, and need no git."""
    for name in ("MANIFEST.in", "constraints.txt", "CHANGELOG.md", "LICENSE", "tests", "docs", "examples", ".ci"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, sources / name)
    with tarfile.open(build_archive("sdist", sources, tmp_path)) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    archived_files = {str(file.relative_to(unpacked)) for file in unpacked.rglob("*") if file.is_file()}
    listing = subprocess.run(
        ["git", "ls-files", "tests", "docs"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert {*listing.stdout.split()} - archived_files == set()
    assert "constraints.txt" in archived_files
    own_tests = ["tests/meta/pages/test_drawing.py", "tests/meta/pages/test_token_rows.py", "tests/meta/words"]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *own_tests]
    passed = subprocess.run(command, cwd=unpacked, capture_output=True, text=True, timeout=1200, check=False)
    assert passed.returncode == 0, passed.stdout[-3000:] + passed.stderr


@pytest.mark.slow
def test_an_unpacked_wheel_judges_an_engine_with_packages_of_our_names(
    sources: Path, engine: Path, tmp_path: Path
) -> None:
    variables = installed_variables(tmp_path / "site")
    (tmp_path / "site" / "specverify").unlink()
    with zipfile.ZipFile(build_archive("wheel", sources, tmp_path)) as archive:
        archive.extractall(tmp_path / "site")
    for backend in ("cpu-eager", "adapter:open_"):
        judged = run_program([*MODULE, *DIFF, "--backend", backend], engine, variables)
        assert judged.returncode == 0, judged.stdout + judged.stderr
    program = [sys.executable, "-c", "import specverify.reports as ours; print(ours.__file__)"]
    assert run_program(program, engine, variables).stdout.strip() == str(
        tmp_path / "site/specverify/reports/__init__.py"
    )
