"""The contract of programs for EAGLE-3: what breaks it is refused in one line, also without ExecuTorch installed."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specverify.backends.adapt.eagle3_programs import (
    DraftMetadata,
    Method,
    TargetMetadata,
    UnusableProgram,
    load_program,
    open_pair,
)
from specverify.backends.base import Unavailable
from specverify.backends.registry import open_backend

TARGET = TargetMetadata((0, 2), 16, "position-overwrite", 64, 8, 3, 1, vocab_size=19, prefill_states="last")
DRAFT = DraftMetadata(
    (0, 2), 16, "position-overwrite", 64, 8, 3, 1, target_vocab_size=19, draft_vocab_size=3, d2t=(2, 4, 16)
)

Sizes = tuple[tuple[int, ...], ...]

TARGET_SIZES: dict[str, tuple[Sizes, Sizes]] = {
    "target_prefill": (((1, 8), (8,)), ((1, 19), (1, 32))),
    "target_decode": (((1, 1), (1,)), ((1, 19), (1, 32))),
    "target_verify": (((1, 4), (4,)), ((1, 4, 19), (1, 4, 32))),
}
DRAFT_SIZES: dict[str, tuple[Sizes, Sizes]] = {
    "draft_prefill": (((1, 8), (1, 8, 32), (8,)), ((1, 3), (1, 16))),
    "draft_decode": (((1, 1), (1, 16), (1,)), ((1, 3), (1, 16))),
}


@dataclass
class StandIn:
    """A program that says of itself what a test has it say, and computes nothing."""

    sizes: dict[str, tuple[Sizes, Sizes]]
    constants: dict[str, Sequence[Any]] = field(default_factory=dict)

    @property
    def method_names(self) -> set[str]:
        return {*self.sizes, *self.constants}

    def load_method(self, name: str) -> Method:
        return SimpleNamespace(execute=lambda inputs: self.constants[name])

    def metadata(self, method_name: str) -> Any:
        inputs, outputs = self.sizes[method_name]
        return SimpleNamespace(
            num_inputs=lambda: len(inputs),
            num_outputs=lambda: len(outputs),
            input_tensor_meta=lambda number: SimpleNamespace(sizes=lambda: inputs[number]),
            output_tensor_meta=lambda number: SimpleNamespace(sizes=lambda: outputs[number]),
        )


def methods_of(metadata: TargetMetadata | DraftMetadata) -> dict[str, Sequence[Any]]:
    """What ExecuTorch's runtime returns from the methods without inputs: a list is its elements, one output each."""
    values = {
        f"get_{metadata_field.name}": getattr(metadata, metadata_field.name) for metadata_field in fields(metadata)
    }
    return {name: list(value) if isinstance(value, tuple) else [value] for name, value in values.items()}


def target(metadata: TargetMetadata = TARGET, **sizes: tuple[Sizes, Sizes]) -> StandIn:
    return StandIn({**TARGET_SIZES, **sizes}, methods_of(metadata))


def draft(metadata: DraftMetadata = DRAFT, **sizes: tuple[Sizes, Sizes]) -> StandIn:
    return StandIn({**DRAFT_SIZES, **sizes}, methods_of(metadata))


def refusal(target: StandIn, draft: StandIn) -> str:
    programs = {"t.pte": target, "d.pte": draft}
    with pytest.raises(UnusableProgram) as refused:
        open_pair("t.pte", "d.pte", lambda file: programs[str(file)])
    line = str(refused.value)
    assert "\n" not in line
    return line


def without(program: StandIn, name: str) -> StandIn:
    return StandIn(
        {method: sizes for method, sizes in program.sizes.items() if method != name},
        {method: value for method, value in program.constants.items() if method != name},
    )


def test_programs_that_keep_the_contract_are_opened() -> None:
    programs = {"t.pte": target(), "d.pte": draft()}
    pair = open_pair("t.pte", "d.pte", lambda file: programs[str(file)])
    assert pair.target.metadata == TARGET
    assert pair.draft is not None
    assert pair.draft.metadata == DRAFT


def test_target_and_draft_may_be_one_file() -> None:
    both = StandIn({**TARGET_SIZES, **DRAFT_SIZES}, methods_of(TARGET) | methods_of(DRAFT))
    pair = open_pair("both.pte", "both.pte", lambda file: both)
    assert pair.draft is not None
    assert pair.draft.metadata == DRAFT


@pytest.mark.parametrize("name", [*TARGET_SIZES, *methods_of(TARGET)])
def test_a_method_that_a_target_lacks_is_named(name: str) -> None:
    line = refusal(without(target(), name), draft())
    assert line.startswith(f"t.pte: no method {name}; the plan (pytorch/executorch#19784) asks for ")


@pytest.mark.parametrize("name", [*DRAFT_SIZES, *methods_of(DRAFT)])
def test_a_method_that_a_draft_lacks_is_named(name: str) -> None:
    assert refusal(target(), without(draft(), name)).startswith(f"d.pte: no method {name}; ")


FOUR_REQUESTS: tuple[Sizes, Sizes] = (((4, 4), (4,)), ((4, 4, 19), (4, 4, 32)))


@pytest.mark.parametrize(
    ("programs", "line"),
    [
        ((target(replace(TARGET, max_batch_size=4)), draft()), "t.pte: get_max_batch_size is 4; the plan"),
        ((target(target_verify=FOUR_REQUESTS), draft()), "t.pte: target_verify takes a batch of 4; the plan"),
        ((target(), draft(replace(DRAFT, max_batch_size=2))), "d.pte: get_max_batch_size is 2; the plan"),
    ],
    ids=["metadata", "shape", "draft"],
)
def test_a_batch_above_one_is_refused_by_name(programs: tuple[StandIn, StandIn], line: str) -> None:
    assert refusal(*programs).startswith(line)


@pytest.mark.parametrize(
    ("metadata", "line"),
    [
        ({"kv_strategy": "copy"}, "t.pte: get_kv_strategy is 'copy'; position-overwrite alone is known"),
        ({"prefill_states": "none"}, "t.pte: get_prefill_states is 'none'; known are last, all"),
        (
            {"hidden_state_layers": ()},
            "t.pte: get_hidden_state_layers names no layer; a draft of EAGLE-3 reads at least",
        ),
        ({"max_seq_len": 0}, "t.pte: get_max_seq_len is 0, and no size"),
        ({"vocab_size": 1.5}, "t.pte: get_vocab_size holds [1.5], and not one int"),
        ({"vocab_size": True}, "t.pte: get_vocab_size holds [True], and not one int"),
        ({"hidden_state_layers": (0.5,)}, "t.pte: get_hidden_state_layers holds [0.5], and not a list of integers"),
        ({"vocab_size": 20}, "t.pte: target_prefill has output 0 of sizes [1, 19], and its metadata say [1, 20]"),
        ({"hidden_state_size": 8}, "t.pte: target_prefill has output 1 of sizes [1, 32], and its metadata say [1, 16]"),
        (
            {"num_speculative_tokens": 7},
            "t.pte: target_verify has input 0 of sizes [1, 4], and its metadata say [1, 8]",
        ),
    ],
    ids=lambda parameter: next(iter(parameter)) if isinstance(parameter, dict) else "",
)
def test_metadata_that_no_target_can_have_are_refused(metadata: dict[str, Any], line: str) -> None:
    assert refusal(target(replace(TARGET, **metadata)), draft()).startswith(line)


def test_a_target_without_states_is_refused() -> None:
    line = refusal(target(target_verify=(((1, 4), (4,)), ((1, 4, 19),))), draft())
    assert line == "t.pte: target_verify has 1 outputs; the plan (pytorch/executorch#19784) gives it 2"


@pytest.mark.parametrize(
    ("metadata", "sizes", "line"),
    [
        (
            {"hidden_state_layers": (0, 1)}, {},
            "get_hidden_state_layers is [0, 2] in t.pte and [0, 1] in d.pte: export both together",
        ),
        (
            {"target_vocab_size": 25}, {},
            "t.pte has a vocabulary of 19 and d.pte was made for one of 25: export both together",
        ),
        ({"num_speculative_tokens": 5}, {}, "get_num_speculative_tokens is 3 in t.pte and 5 in d.pte: export both"),
        ({"max_seq_len": 32}, {}, "get_max_seq_len is 64 in t.pte and 32 in d.pte: export both together"),
        (
            {"hidden_state_size": 8}, {"draft_prefill": (((1, 8), (1, 8, 16), (8,)), ((1, 3), (1, 16)))},
            "get_hidden_state_size is 16 in t.pte and 8 in d.pte: export both together",
        ),
        ({"d2t": (2, 4)}, {}, "d.pte: get_d2t maps 2 ids, get_draft_vocab_size says 3"),
        ({"d2t": (2, 4, 17)}, {}, "d.pte: get_d2t maps draft id 2 to 19, and get_target_vocab_size says 19"),
    ],
    ids=["layers", "vocabulary", "window", "slots", "width", "map-length", "map-range"],
)  # fmt: skip
def test_a_draft_of_another_target_is_refused(metadata: dict[str, Any], sizes: dict[str, Any], line: str) -> None:
    assert refusal(target(), draft(replace(DRAFT, **metadata), **sizes)).startswith(line)


@pytest.mark.skipif(find_spec("executorch") is not None, reason="executorch is installed")
def test_the_line_where_executorch_is_absent() -> None:
    with pytest.raises(Unavailable, match=r"^t.pte needs executorch, which is not installed: pip install executorch$"):
        load_program("t.pte")
    with pytest.raises(Unavailable, match=r"executorch-eagle3 needs executorch, which is not installed: pip install"):
        open_backend("executorch-eagle3")


@pytest.mark.skipif(find_spec("executorch") is None, reason="executorch is not installed")
def test_a_file_that_is_no_program_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnusableProgram, match="no such file"):
        load_program(tmp_path / "absent.pte")
    file = tmp_path / "text.pte"
    file.write_text("no program")
    with pytest.raises(UnusableProgram, match="no program of ExecuTorch"):
        load_program(file)
