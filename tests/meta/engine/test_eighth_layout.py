"""An eighth KV layout, added here and nowhere else: declared, drawn, judged, shrunk, told and timed like the others."""

from dataclasses import replace

import pytest
import torch
from hypothesis import find, given
from torch import Tensor

from specverify.backends.engine.kv.base import CacheSpec, KvCache, Pair, Poison
from specverify.backends.engine.kv.layouts import CACHES
from specverify.backends.registry import open_backend
from specverify.bench.kv import cells
from specverify.commands.subjects import rows_of
from specverify.properties.invariants import ALL
from specverify.properties.shrinking.cases import nearer
from specverify.properties.strategies import cases
from specverify.properties.strategies.settings import drawing_settings
from specverify.properties.verdict.judge import judge
from specverify.reference.case import Case
from specverify.reference.case_json import case_from_json, case_to_json
from specverify.reference.draft import Scripted
from specverify.reference.layout import KINDS, KvLayout, LayoutKind
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.sampling import Stops
from specverify.reference.tree import Tree
from specverify.setup.selection import check_layout
from specverify.setup.subjects import subject_of
from tests.models import LLAMA


class Ledger:
    """Columns lie in a list, one tensor each, in the order in which they were written; commits strike out the rest."""

    def __init__(self, room: CacheSpec) -> None:
        self._empty = [room.empty(0, layer) for layer in range(room.layers)]
        self._columns: list[list[Pair]] = [[] for _ in range(room.layers)]
        self.layers, self.length, self.rows, self.most_rows, self._last = room.layers, 0, 0, 0, 0
        self.latent, self.codec = room.latent, room.codec

    def open(self, rows: int) -> None:
        self.rows, self._last = self.rows + rows, rows

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        del self._columns[layer][self.length + self.rows - self._last :]
        self._columns[layer] += [
            (keys[:, [column]].clone(), values[:, [column]].clone()) for column in range(keys.shape[1])
        ]

    def _joined(self, layer: int, columns: list[Pair]) -> Pair:
        keys, values = (
            torch.cat([self._empty[layer][side], *(column[side] for column in columns)], 1) for side in (0, 1)
        )
        return keys, values

    def read(self, layer: int) -> Pair:
        return self._joined(layer, self._columns[layer])

    def first(self, layer: int) -> int:
        return 0

    def cell_mask(self, layer: int, visible: Tensor) -> Tensor:
        return visible

    def block(self, layer: int) -> Pair:
        return self._joined(layer, self._columns[layer][self.length :])

    def amend(self, layer: int, keys: Tensor, values: Tensor) -> None:
        self._last = self.rows
        self.write(layer, keys, values)

    def commit(self, path: list[int]) -> str | None:
        for columns in self._columns:
            columns[self.length :] = [columns[self.length + row] for row in path]
        self.length, self.rows = self.length + len(path), 0
        return None

    def crop(self, length: int) -> None:
        for columns in self._columns:
            del columns[length:]
        self.length, self.rows = length, 0

    def begin_as(self, other_cache: KvCache) -> None:
        for layer in range(self.layers):
            _, keys, values = other_cache.committed_columns(layer)
            self._columns[layer] = [(keys[:, [column]], values[:, [column]]) for column in range(other_cache.length)]
        self.length = other_cache.length

    def committed_columns(self, layer: int) -> tuple[int, Tensor, Tensor]:
        return 0, *self._joined(layer, self._columns[layer][: self.length])

    def poison(self, number: Poison) -> None:
        pass

    def release(self) -> None:
        self.crop(0)


class Careless(Ledger):
    """Keeps the first rows of the block, whatever was accepted."""

    def commit(self, path: list[int]) -> str | None:
        return super().commit(list(range(len(path))))


@pytest.fixture(autouse=True)
def ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, "ledger", LayoutKind("a list of columns"))
    monkeypatch.setitem(CACHES, "ledger", lambda seams, room, layout: Ledger(room))


ORACLE = Oracle()
TREES = (Tree((0, 0, 0, 1, 2, 2), (5, 1, 2, 3, 4, 6)), Tree((0, 0, 0), (0, 3, 2)))


def case_in(kind: str) -> Case:
    return Case(LLAMA, (3, 1, 4, 1, 5), Scripted(TREES), KvLayout(kind=kind), stops=Stops(6), dtype="float32")


@pytest.mark.slow
def test_drawn_cases_in_it_agree_and_some_are_drawn_without_asking() -> None:
    subject = subject_of(open_backend("cpu-eager"))

    @drawing_settings(3)
    @given(cases(layout="ledger"))
    def agree(case: Case) -> None:
        verdict = judge(case, ALL, ORACLE, subject)
        assert verdict.unsupported is None
        assert verdict.findings == ()

    agree()
    # It raises where no draw has the layout.
    find(cases(), lambda case: case.layout.kind == "ledger", settings=drawing_settings(600))


def test_a_wrong_commit_in_it_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CACHES, "ledger", lambda seams, room, layout: Careless(room))
    subject = subject_of(open_backend("cpu-eager"))
    accepting = replace(case_in("ledger"), draft=Scripted((accepted_second_child(),)))
    verdict = judge(accepting, ALL, ORACLE, subject)
    assert "cache.layout-equivalent" in {finding.invariant for finding in verdict.findings}


def accepted_second_child() -> Tree:
    """A tree whose accepted node is not the first row of its block."""
    case = case_in("ledger")
    (token,) = ORACLE(replace(case, draft=Scripted(), steps=1)).output[:1]
    return Tree((0, 0, 0), (case.prompt[-1], (token + 1) % LLAMA.vocab_size, token))


def test_it_is_declared_listed_saved_shrunk_and_timed() -> None:
    assert "ledger" in open_backend("cpu-eager").declaration.layouts
    check_layout("ledger", ())
    assert {"name": "ledger", "sentence": "a list of columns"}.items() <= rows_of("layouts")[-1].items()
    case = case_in("ledger")
    content = case_to_json(case)
    assert case_from_json(content) == case
    assert any(smaller_case.layout.kind == "branch" for smaller_case in nearer(case))
    assert {cell.name for cell in cells("ledger")} == {"ledger"}
