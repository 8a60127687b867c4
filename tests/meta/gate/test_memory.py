"""The memory of failures: a folder, a read-only artefact, a real Redis server, and bundles that cannot be used."""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from specverify.gate.memory import KEEP_S, PREFIX, Folder, RememberedBundles, open_memory
from specverify.properties.tally import Failure
from specverify.properties.verdict.finding import Verdict
from specverify.reports import bundle
from specverify.setup.errors import UnusableInput
from tests.cases import ONE_CHILD
from tests.meta.gate.conftest import Sample
from tests.meta.gate.test_ledger import make_finding


def save_bundle(folder: Path, fault: str | None = None) -> Path:
    """A bundle in `folder`."""
    failure = Failure(
        Verdict(ONE_CHILD, "b", {}, (make_finding(),)), make_finding(), ONE_CHILD.id, fault=fault, backend="b"
    )
    return bundle.save(folder, failure, {})


def test_a_folder_gives_back_what_it_keeps(tmp_path: Path) -> None:
    file = save_bundle(tmp_path / "reports")
    memory_folder = Folder(tmp_path / "memory")
    assert RememberedBundles([memory_folder], tmp_path).saved_bundles == []
    memory_folder.keep(file)
    remembered = RememberedBundles([memory_folder], tmp_path, [Folder(tmp_path / "reports")])
    ((place, content),) = remembered.saved_bundles
    assert place == tmp_path / "memory" / file.name
    assert (content.case, content.invariant) == (ONE_CHILD, "cache.isolation")
    assert remembered.notes == []


def test_a_folder_keeps_the_latest(tmp_path: Path) -> None:
    file = save_bundle(tmp_path / "reports")
    memory_folder = Folder(tmp_path / "memory", most=2)
    for number in range(4):
        other_file = file.with_name(f"{number:012x}.json")
        other_file.write_bytes(file.read_bytes())
        memory_folder.keep(other_file)
        os.utime(tmp_path / "memory" / other_file.name, (number, number))
    assert sorted(path.name for path in (tmp_path / "memory").iterdir()) == ["000000000002.json", "000000000003.json"]


def of_cause(file: Path, number: int, invariant: str) -> Path:
    """A copy of a bundle under another name, with another invariant, as old as its number says."""
    content = json.loads(file.read_text())
    content["finding"]["invariant"] = invariant
    other_file = file.with_name(f"{number:012x}.json")
    other_file.write_text(json.dumps(content))
    os.utime(other_file, (number, number))
    return other_file


def test_a_full_folder_keeps_most_causes_and_says_what_leaves(tmp_path: Path) -> None:
    file = save_bundle(tmp_path / "reports")
    folder = tmp_path / "memory"
    remembered = RememberedBundles([Folder(folder, most=3)], tmp_path / "got")
    for number, invariant in enumerate(
        ("cache.isolation", "attention.leakage", "attention.leakage", "attention.leakage")
    ):
        other_file = of_cause(file, number, invariant)
        assert remembered.keep(other_file) is None
        os.utime(folder / other_file.name, (number, number))
    # The oldest is the only one of its cause: a later one of the cause that fills the folder went in its place.
    assert sorted(int(path.stem, 16) for path in folder.iterdir()) == [0, 2, 3]
    assert remembered.notes == ["1 bundle left the memory (memory-size): 000000000001.json"]


def test_bundles_beyond_the_size_are_not_tried_and_that_is_said(tmp_path: Path) -> None:
    file = save_bundle(tmp_path / "reports")
    source = tmp_path / "source"
    source.mkdir()
    for number in range(5):
        of_cause(file, number, "cache.isolation").rename(source / f"{number:012x}.json")
    remembered = RememberedBundles([], tmp_path / "got", [Folder(source, most=2)])
    assert remembered.notes == ["3 remembered bundles not tried: memory-size is smaller than the memory"]


def test_a_source_is_never_written(tmp_path: Path) -> None:
    source = tmp_path / "artefact" / "nested"
    file = save_bundle(source)
    before = file.stat()
    remembered = RememberedBundles([], tmp_path, [Folder(tmp_path / "artefact")])
    assert len(remembered.saved_bundles) == 1
    assert remembered.keep(save_bundle(tmp_path / "new")) is None
    assert [path.name for path in source.iterdir()] == [file.name]
    assert file.stat().st_mtime_ns == before.st_mtime_ns


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda text: text.replace('"bundle": 1', '"bundle": 2'), "version 2 is newer than the 1 known here"),
        (lambda text: text.replace('"schema": 1', '"schema": 99'), "schema"),
        (lambda text: text[: len(text) // 2], "cut off?"),
        (lambda text: text.replace('"backend"', '"engine"'), "no field of a bundle"),
        (lambda text: "", "empty"),
    ],
)
def test_a_bundle_of_another_version_says_why_it_is_not_tried(tmp_path: Path, change: object, why: str) -> None:
    assert callable(change)
    file = save_bundle(tmp_path / "memory")
    file.write_text(change(file.read_text()))
    remembered = RememberedBundles([Folder(tmp_path / "memory")], tmp_path)
    assert remembered.saved_bundles == []
    (note,) = remembered.notes
    assert why in note
    assert file.name in note


def test_the_bundle_of_a_planted_fault_is_not_tried(tmp_path: Path) -> None:
    save_bundle(tmp_path / "memory", fault="kv-truncated-not-gathered")
    assert RememberedBundles([Folder(tmp_path / "memory")], tmp_path).saved_bundles == []


def test_a_memory_that_cannot_be_written_is_a_note_and_no_verdict(sample: Sample) -> None:
    (sample.folder / ".specverify").mkdir()
    (sample.folder / ".specverify" / "memory").write_text("a file in the way")
    sample.plant("unverified")
    assert sample("gate") == 1
    assert any("is not in the memory" in note for note in sample.result()["notes"])


def test_redis_without_its_package_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "redis", None)
    with pytest.raises(UnusableInput, match=r"specverify-decoding\[redis\]") as refused:
        open_memory("redis://user:secret@127.0.0.1:1/0", tmp_path)
    assert "secret" not in str(refused.value)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a Redis server of this test, on a socket."""
    pytest.importorskip("redis", reason="the package redis is not installed (pip install -e '.[redis]')")
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("redis-server is not installed (apt-get install redis-server)")
    folder = tmp_path_factory.mktemp("redis")
    words = [program, "--port", "0", "--unixsocket", str(folder / "s"), "--save", "", "--dir", str(folder)]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 20
    while not (folder / "s").exists() and process.poll() is None and time.monotonic() < until:
        time.sleep(0.02)
    yield f"unix://{folder / 's'}"
    process.terminate()
    process.wait()


def test_a_redis_server_gives_back_what_it_keeps(server: str, tmp_path: Path) -> None:
    memory = open_memory(server, tmp_path)
    assert RememberedBundles([memory], tmp_path / "got").saved_bundles == []
    memory.keep(save_bundle(tmp_path / "reports"))
    remembered = RememberedBundles([memory], tmp_path / "got")
    ((place, content),) = remembered.saved_bundles
    assert content.case == ONE_CHILD
    assert place == tmp_path / "got" / f"{ONE_CHILD.id}.json"
    import redis

    client = redis.Redis.from_url(server)
    (key,) = client.keys(f"{PREFIX}*")
    assert key == f"{PREFIX}{ONE_CHILD.id}".encode()
    assert 0 < client.ttl(key) <= KEEP_S
    client.set(f"{PREFIX}../../escape", b"{}")
    again = RememberedBundles([memory], tmp_path / "got")
    assert len(again.saved_bundles) == 1
    assert "bundle not tried" in again.notes[0]
    assert not list(tmp_path.parent.glob("escape*"))
    client.flushall()


def test_two_runners_share_a_failure_by_redis(server: str, sample: Sample) -> None:
    file = sample.folder / "pyproject.toml"
    file.write_text(file.read_text().replace(".specverify/memory", server))
    sample.plant("unverified")
    assert sample("gate") == 1
    shutil.rmtree(sample.folder / ".specverify")
    assert sample("gate", "--cases", "1") == 1
    assert sample.lines()[0]["outcome"] == "differ"


def test_a_server_that_is_gone_is_a_note_and_no_verdict(sample: Sample) -> None:
    pytest.importorskip("redis", reason="the package redis is not installed (pip install -e '.[redis]')")
    file = sample.folder / "pyproject.toml"
    file.write_text(file.read_text().replace(".specverify/memory", f"unix://{sample.folder}/none"))
    assert sample("gate") == 0
    assert any("memory not tried" in note for note in sample.result()["notes"])
