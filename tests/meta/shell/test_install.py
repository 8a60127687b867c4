"""README's install command: pins that an index can satisfy, the check that says so, and the lowest click."""

import importlib.util
import re
import sys
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path
from types import ModuleType

import click
import pytest

from specverify.cli import main

ROOT = Path(__file__).resolve().parents[3]
NEEDED_BY_TORCH = {"torch-2.13.0": ["triton==3.7.1"], "triton-3.7.1": [], "triton-3.9.0": [], "pytest-8.0": []}
"""A small index in place of the public one: torch wants one version of triton, as torch 2.13.0 there does."""


@pytest.fixture
def installable() -> Iterator[ModuleType]:
    """The check of `.ci`, which is no package."""
    spec = importlib.util.spec_from_file_location("installable", ROOT / ".ci" / "installable.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["installable"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["installable"]


class Quiet(SimpleHTTPRequestHandler):
    """Serves a folder and writes no line for each request."""

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of an index on this machine that holds the wheels of NEEDED_BY_TORCH."""
    for stem, needs in NEEDED_BY_TORCH.items():
        name, version = stem.split("-")
        folder = tmp_path / "simple" / name
        folder.mkdir(parents=True, exist_ok=True)
        wheel(folder / f"{stem}-py3-none-any.whl", name, version, needs)
        links = "".join(f'<a href="{file.name}">{file.name}</a>' for file in folder.glob("*.whl"))
        (folder / "index.html").write_text(f"<!DOCTYPE html><html><body>{links}</body></html>")
    (tmp_path / "simple" / "pip").mkdir()
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    server = HTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path)))
    serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    serving.start()
    yield f"http://127.0.0.1:{server.server_port}/simple"
    server.shutdown()
    serving.join()
    server.server_close()


def wheel(file: Path, name: str, version: str, needs: list[str]) -> None:
    """A wheel that holds nothing but its metadata."""
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(f"{info}/METADATA", metadata + "".join(f"Requires-Dist: {need}\n" for need in needs))
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


def project(folder: Path, triton: str) -> Path:
    """A project that needs torch, and pins triton to the version given."""
    folder.mkdir()
    (folder / "pyproject.toml").write_text(
        '[project]\nname = "small"\nversion = "1"\nrequires-python = ">=3.10"\n'
        'dependencies = [\n  "torch>=2.13",\n]\n'
        '[project.optional-dependencies]\ntriton = ["triton>=3.7.1"]\ntest = ["pytest>=8", "small[triton]"]\n'
    )
    (folder / "constraints.txt").write_text(f"torch==2.13.0\ntriton=={triton}\n")
    return folder


@pytest.fixture
def only_this_python(installable: ModuleType, monkeypatch: pytest.MonkeyPatch) -> str:
    """Have the check ask for this process' Python alone, and a closed door for those of pip and uv."""
    if importlib.util.find_spec("uv") is None:
        pytest.skip("uv is not installed (pip install -e '.[dev]')")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    monkeypatch.setattr(installable, "SUPPORTED", (version,))
    for name in ("PIP_FIND_LINKS", "UV_FIND_LINKS", "PIP_INDEX_URL", "UV_INDEX_URL", "UV_DEFAULT_INDEX"):
        monkeypatch.setenv(name, "file:///nowhere")
    return version


def test_pins_that_the_index_satisfies_pass(
    installable: ModuleType, only_this_python: str, index: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert installable.main(["--index-url", index, "--project", str(project(tmp_path / "good", "3.7.1"))]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"Python {only_this_python}, constraints.txt: 3 packages",
        f"Python {only_this_python}, lowest versions: 3 packages",
    ]


def test_pins_that_contradict_each_other_fail(
    installable: ModuleType, only_this_python: str, index: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert installable.main(["--index-url", index, "--project", str(project(tmp_path / "bad", "3.9.0"))]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert f"Python {only_this_python}, constraints.txt: CANNOT BE INSTALLED: " in out
    # Which way round uv tells the contradiction differs from run to run.
    assert "torch" in out
    assert "triton==3.9.0" in out


def test_constraints_that_cannot_be_read_fail_although_no_resolution_ran(
    installable: ModuleType, only_this_python: str, index: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = project(tmp_path / "torn", "3.7.1")
    (where / "constraints.txt").write_text("torch==\n")
    assert installable.main(["--index-url", index, "--project", str(where)]) == 1
    assert "constraints.txt: CANNOT BE INSTALLED:\n" in capsys.readouterr().out


def test_a_closed_network_is_not_checked_and_no_pass(
    installable: ModuleType, only_this_python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(installable, "resolve", lambda *_: (2, "error: Failed to fetch"))
    outcomes = [*installable.check("http://127.0.0.1:9/simple", project(tmp_path / "closed", "3.7.1"))]
    assert {outcome.code for outcome in outcomes} == {3}
    assert all(
        "not checked: the index http://127.0.0.1:9/simple cannot be reached: " in outcome.sentence
        for outcome in outcomes
    )
    assert installable.main(["--index-url", "http://127.0.0.1:9/simple", "--project", str(tmp_path / "closed")]) == 3


def test_an_absent_python_is_named_and_no_pass(
    installable: ModuleType,
    only_this_python: str,
    index: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(installable, "SUPPORTED", ("3.99", only_this_python))
    assert installable.main(["--index-url", index, "--project", str(project(tmp_path / "good", "3.7.1"))]) == 3
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "Python 3.99: not checked: there is no such interpreter here"
    assert len(out) == 3


def test_a_file_that_only_bears_the_name_of_an_interpreter_is_none(
    installable: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shim = tmp_path / "python3.99"
    shim.write_text("#!/bin/sh\necho 'python3.99: command not found' >&2\nexit 127\n")
    shim.chmod(0o755)
    folder = tmp_path / "versions" / "3.99.2" / "bin"
    folder.mkdir(parents=True)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    assert installable.interpreter("3.99") is None
    real = folder / "python"
    real.write_text("#!/bin/sh\necho 3.99.2 $0\n")
    real.chmod(0o755)
    assert installable.interpreter("3.99") == real


def test_the_lowest_versions_are_those_of_pyproject(installable: ModuleType) -> None:
    pins = installable.lowest_bounds((ROOT / "pyproject.toml").read_text())
    assert [pin.split("==")[0] for pin in pins] == [
        *("numpy", "scipy", "hypothesis", "torch", "transformers", "safetensors", "jsonschema", "click", "rich"),
        *("junitparser", "jinja2", "tomli", "triton", "setuptools", "pytest", "pytest-xdist"),
    ]


def test_every_lower_bound_has_its_pin_on_every_python(installable: ModuleType) -> None:
    """Each package of `.[test]` is pinned exactly once for each supported Python, so that installs are reproducible."""
    from packaging.requirements import Requirement

    lines = [line.split("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    pins = [Requirement(line) for line in lines if line]
    names = sorted(pin.split("==")[0] for pin in installable.lowest_bounds((ROOT / "pyproject.toml").read_text()))
    for version in installable.SUPPORTED:
        here = {"python_version": version, "python_full_version": f"{version}.0", "sys_platform": "linux"}
        # The standard library reads TOML from 3.11 on.
        expected_names = [name for name in names if name != "tomli" or version == "3.10"]
        assert sorted(pin.name for pin in pins if pin.marker is None or pin.marker.evaluate(here)) == expected_names


def test_the_docs_name_the_torch_that_is_pinned() -> None:
    """Another CPU build than the pinned version would be replaced by the CUDA build of the pinned one."""
    named = re.findall(r"torch==([\d.]+) --index-url", (ROOT / "docs" / "how_to" / "install.md").read_text())
    pinned = re.findall(r"^torch==([\d.]+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert len(pinned) == 1
    assert named == pinned


def test_ci_asks_the_check_and_stops_where_it_fails() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    assert "python .ci/installable.py" in script


@pytest.mark.slow
def test_the_public_index_satisfies_the_constraints_of_this_checkout(
    installable: ModuleType, only_this_python: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = installable.main([])
    out = capsys.readouterr().out
    if code == 3:
        pytest.skip(out)
    assert code == 0, out


def test_wrong_usage_is_exit_code_2_where_click_has_no_error_for_no_arguments(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """click 8.1 has no NoArgsIsHelpError; naming that class turned every complaint into an AttributeError."""
    monkeypatch.delattr(click.exceptions, "NoArgsIsHelpError", raising=False)
    with pytest.raises(SystemExit) as ended:
        main(["diff", "--backend", "nope"])
    assert ended.value.code == 2
    assert "specverify: " in capfd.readouterr().err
