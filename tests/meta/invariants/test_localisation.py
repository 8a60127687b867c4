"""A fault planted in attention is named by layer, head, row and column, with its eager twin's word beside it."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
from torch import Tensor

from specverify.backends.engine.attention.eager import eager
from specverify.backends.engine.attention.sdpa import Sdpa
from specverify.backends.engine.backend import EngineBackend
from specverify.backends.engine.columns import AttentionInputs
from specverify.backends.engine.composition import SEAMS
from specverify.properties.strategies.models import GALLERY
from specverify.properties.tally import Failure
from specverify.properties.tolerance.mask_column import EXTRA, MISSING, NO_COLUMN, mask_column
from specverify.properties.verdict.finding import Finding, Verdict
from specverify.properties.verdict.judge import judge
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.draft import Scripted
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.oracle.model import PathByPath
from specverify.reference.sampling import Stops
from specverify.reference.trace import Stage
from specverify.reference.tree import Tree
from specverify.reports.pages.terminal import failure_page
from specverify.setup.subjects import subject_of
from tests.corruption import BY_NAME, ORACLE
from tests.tiers import first

PROMPT = (3, 14, 15, 92, 6)
CONTEXT = len(PROMPT) - 1
TREE = Tree((0, 0, 0, 2, 2, 3), (6, 11, 12, 13, 14, 15))
MODELS = ((7, "float32"), (17, "float64"), (12, "float32"))
"""Of the gallery: three layers with two heads on each KV head; windows; one KV head."""

Change = Callable[[Tensor, AttentionInputs, float], Tensor]


@dataclass
class AtLayer:
    """Attention that is right but in one head of one layer of verify forwards, where it is what `change` makes."""

    layers: int
    layer: int
    head: int
    change: Change
    right: Callable[[Tensor, AttentionInputs, float], Tensor] = eager
    calls: int = 0

    def __call__(self, query: Tensor, columns: AttentionInputs, scaling: float) -> Tensor:
        mixed = self.right(query, columns, scaling)
        layer, self.calls = self.calls % self.layers, self.calls + 1
        if layer == self.layer and columns.prefix.any():
            mixed = mixed.clone()
            mixed[:, self.head] = self.change(query, columns, scaling)[:, self.head]
        return mixed


def turn_cell(row: int, cell: int) -> Change:
    """One cell of the mask turned over."""

    def change(query: Tensor, columns: AttentionInputs, scaling: float) -> Tensor:
        visible = columns.visible.clone()
        visible[:, :, row, cell] = ~visible[:, :, row, cell]
        return eager(query, replace(columns, visible=visible), scaling)

    return change


def next_kv_head(query: Tensor, columns: AttentionInputs, scaling: float) -> Tensor:
    """Every query head reads the KV head after its own."""
    return eager(query, replace(columns, key=columns.key.roll(1, 1), value=columns.value.roll(1, 1)), scaling)


def half_scale(query: Tensor, columns: AttentionInputs, scaling: float) -> Tensor:
    return eager(query, columns, scaling / 2)


def case_on(model: int, dtype: str = "float32") -> Case:
    return Case(Seeded(GALLERY[model], 0), PROMPT, Scripted((TREE,)), stops=Stops(2), steps=1, dtype=dtype)


def verdict_of(case: Case, layer: int, head: int, change: Change, oracle: Oracle = ORACLE) -> Verdict:
    layers = case.model.architecture.layers if isinstance(case.model, Seeded) else 0
    backend = EngineBackend("x", "cpu", replace(SEAMS, attend=AtLayer(layers, layer, head, change)))
    return judge(case, (BY_NAME["attention.context-exact"],), oracle, subject_of(backend))


def located_finding(verdict: Verdict) -> Finding:
    assert verdict.first is not None
    assert verdict.first.stage is Stage.ATTENDED
    return verdict.first


@pytest.mark.parametrize(("model", "dtype"), first(MODELS, 2))
def test_a_cell_of_one_head_is_named_whichever_it_is(model: int, dtype: str) -> None:
    case, causes = case_on(model, dtype), set()
    true = ORACLE(case).steps[0]
    assert true.lowered is not None
    assert true.lowered.visible is not None
    heads = GALLERY[model].heads
    for layer in range(GALLERY[model].layers):
        for row in range(len(TREE)):
            for cell in range(CONTEXT + len(TREE)):
                visible = bool(true.lowered.visible[layer][row, cell])
                if visible and true.lowered.visible[layer][row].sum() == 1:
                    continue  # a row that sees nothing is not a number
                if (3 * layer + row + cell) % 4:
                    continue  # a quarter of the cells, each of a head in turn
                head = (row + cell) % heads
                finding = located_finding(verdict_of(case, layer, head, turn_cell(row, cell)))
                cause = MISSING if visible else EXTRA
                expected = {"layer": layer, "head": head, "node": row, "column": cell, "cause": cause}
                assert finding.where == expected
                causes.add(cause)
    assert causes == {EXTRA, MISSING}


def test_another_fault_of_a_head_is_named_without_a_column() -> None:
    for change in (next_kv_head, half_scale):
        finding = located_finding(verdict_of(case_on(7), 1, 4, change))
        assert (finding.where["layer"], finding.where["head"], finding.where["cause"]) == (1, 4, NO_COLUMN)
        assert "column" not in finding.where


def test_columns_that_explain_it_alike_are_all_named() -> None:
    twins = replace(case_on(7), draft=Scripted((Tree((0, 0, 0, 1), (6, 11, 11, 12)),)))
    finding = located_finding(verdict_of(twins, 0, 0, turn_cell(3, CONTEXT + 2)))
    assert finding.where["cause"] == EXTRA  # node 3 sees node 1, its twin: only one of them can be shown in addition
    alike = located_finding(
        verdict_of(replace(twins, draft=Scripted((Tree((0, 0, 0, 0), (6, 11, 11, 12)),))), 0, 0, turn_cell(3, 5))
    )
    assert alike.where["cause"] == f"one of columns {CONTEXT + 1}, {CONTEXT + 2}"


def test_both_oracles_name_the_same_column_and_another_backend_names_none() -> None:
    case = case_on(7)
    for oracle in (Oracle(), Oracle(PathByPath)):
        finding = located_finding(verdict_of(case, 1, 2, turn_cell(3, CONTEXT + 1), oracle))
        assert finding.where["column"] == CONTEXT + 1
    true = ORACLE(case).steps[0]
    assert true.attended is not None
    assert (
        mask_column(case, lambda asked_case: ORACLE(asked_case), true, true.attended.output[0, 0, 0], (0, 0, 0), 1.0)
        == {}
    )
    nan = np.full(8, np.nan)
    assert mask_column(case, ORACLE, true, nan, (0, 0, 0), 1.0) == {"cause": NO_COLUMN}


def test_the_page_says_who_attended_to_what() -> None:
    case = case_on(7)
    for row, cell, words in (
        (3, CONTEXT + 1, "Node 3 attended to column 5 (node 1), which it may not see: that alone explains its output"),
        (3, 2, "Node 3 did not attend to column 2 (position 2 of the context), which it must see"),
    ):
        verdict = verdict_of(case, 1, 2, turn_cell(row, cell))
        page = " ".join(failure_page(Failure(verdict, located_finding(verdict), case.id)).split())
        assert f"began at stage attended, step 0, layer 1, head 2, node {row}, column {cell}" in page
        text = "".join(char for char in page if char not in "│├└─◀")
        assert all(word in text for word in words.split())


def test_a_fused_attention_is_located_as_an_eager_one_is() -> None:
    case = case_on(7)
    wrong = AtLayer(3, 1, 2, turn_cell(3, CONTEXT + 1), right=Sdpa())
    backend = EngineBackend("x", "cpu", replace(SEAMS, attend=wrong))
    verdict = judge(case, (BY_NAME["attention.context-exact"],), ORACLE, subject_of(backend))
    assert located_finding(verdict).where == {"layer": 1, "head": 2, "node": 3, "column": 5, "cause": EXTRA}


def scale_scores(by: float) -> Change:
    """Scores that are too large or too small: they move weight between the columns that are seen."""
    return lambda query, columns, scaling: eager(query, columns, scaling * by)


def prefix_shifted(by: float) -> Change:
    """Scores of the prefix shifted against those of the block, as when their parts are merged wrongly."""

    def change(query: Tensor, columns: AttentionInputs, scaling: float) -> Tensor:
        groups = query.shape[1] // columns.key.shape[1]
        key, value = (tensor.repeat_interleave(groups, 1) for tensor in (columns.key, columns.value))
        scores = query @ key.transpose(-1, -2) * scaling
        scores[..., : int(columns.prefix[0])] += by
        return scores.masked_fill(~columns.visible, float("-inf")).softmax(-1) @ value

    return change


@pytest.mark.parametrize(
    ("model", "head", "width", "dtype", "change"),
    [
        (5, 1, 8, "bfloat16", prefix_shifted(1.5)),
        (16, 1, 3, "bfloat16", prefix_shifted(-3.0)),
        (11, 1, 5, "float16", scale_scores(2.0)),
        (17, 0, 8, "float16", scale_scores(4.0)),
        (23, 0, 8, "float16", scale_scores(2.0)),
    ],
)
def test_in_16_bits_wrong_scores_are_not_told_as_a_column(
    model: int, head: int, width: int, dtype: str, change: Change
) -> None:
    prompt = tuple((7 * index + width) % GALLERY[model].vocab_size for index in range(width))
    tree = Tree((0, 0, 0, 2, 2), (prompt[-1], 6, 11, 12, 5))
    case = Case(Seeded(GALLERY[model], 0), prompt, Scripted((tree,)), stops=Stops(2), steps=1, dtype=dtype)
    finding = located_finding(verdict_of(case, GALLERY[model].layers - 1, head, change))
    assert (finding.where["layer"], finding.where["head"]) == (GALLERY[model].layers - 1, head)
    assert "column" not in finding.where
    assert finding.where.get("cause", NO_COLUMN) == NO_COLUMN


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_in_16_bits_most_cells_are_named_and_none_wrongly(dtype: str) -> None:
    case, named, num_cells = case_on(7, dtype), 0, 0
    for row in range(len(TREE)):
        for cell in range(CONTEXT + len(TREE)):
            first = verdict_of(case, 1, row, turn_cell(row, cell)).first if (row + cell) % 2 else None
            if first is None or first.stage is not Stage.ATTENDED or first.where["node"] != row:
                continue
            num_cells += 1
            named += first.where.get("column") == cell
            assert first.where.get("column", cell) == cell
    assert named >= 0.75 * num_cells > 5
