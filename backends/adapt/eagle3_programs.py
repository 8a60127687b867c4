"""The contract of ExecuTorch's plan for EAGLE-3, and the reader of programs that follow it.

The plan is pytorch/executorch#19784. Two programs speculate together: the target's and the draft's. They may be one
file.

The target has `target_prefill`, `target_decode` and `target_verify`. Each takes tokens [1, T] and their positions
[T]. The first two return the logits of the last token, [1, vocabulary], and its hidden states, [1, width]. The third
returns the logits of all tokens, [1, T, vocabulary], and the states of all, [1, T, width].

The draft has `draft_prefill`, which takes tokens [1, T], the target's states beside them [1, T, width] and positions
[T]; and `draft_decode`, which takes one token, the state that the draft put out before, [1, hidden], and a position.
Both return the scores of the last row, [1, draft vocabulary], and its state.

A row is written to the slot of its position and sees the slots up to it (`position-overwrite`). A rejected token is
thus overwritten before any row may see it. Methods without inputs hold the metadata, all of which is checked when a
program is opened: alone, against the shapes of its methods, and against the other program.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from specverify.backends.adapters import EXECUTORCH
from specverify.backends.base import Unavailable

PLAN = "pytorch/executorch#19784"
"""Where the contract is written down."""

KV_STRATEGY = "position-overwrite"
"""The one strategy that is known for rejected tokens."""

PREFILL_STATES = ("last", "all")
"""The tokens of which `target_prefill` hands over states: the last one, or every one."""

TARGET_METHODS = ("target_prefill", "target_decode", "target_verify")
DRAFT_METHODS = ("draft_prefill", "draft_decode")


class UnusableProgram(Unavailable):
    """A program that breaks the contract; the message is one line that names the file and what to export anew."""


class Method(Protocol):
    """A method of an open program."""

    def execute(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """The outputs for `inputs`; the runtime may write the next outputs to the same memory."""


class Program(Protocol):
    """An open program, such as `executorch.runtime.Program`."""

    @property
    def method_names(self) -> set[str]:
        """The names of all methods, those of the metadata among them."""

    def load_method(self, name: str) -> Method | None:
        """The method `name`, ready to run."""

    def metadata(self, method_name: str) -> Any:
        """The numbers and sizes of the inputs and outputs of a method, as `executorch.runtime.MethodMeta` has them."""


@dataclass(frozen=True)
class Metadata:
    """Facts that both programs state of themselves; the method `get_NAME` holds the field NAME.

    Attributes:
        hidden_state_layers: Layers after which the residual stream is taken, from 0; -1 means the embeddings.
        hidden_state_size: The width of one state; those of all layers stand side by side.
        kv_strategy: How rejected tokens are kept from later ones.
        max_seq_len: Slots of the cache.
        max_prefill_chunk: The most tokens of a call of the prefill method.
        num_speculative_tokens: The most drafted tokens of a step.
        max_batch_size: Requests of a call.
    """

    hidden_state_layers: tuple[int, ...]
    hidden_state_size: int
    kv_strategy: str
    max_seq_len: int
    max_prefill_chunk: int
    num_speculative_tokens: int
    max_batch_size: int

    @property
    def width(self) -> int:
        """The width of the states of all layers, side by side."""
        return len(self.hidden_state_layers) * self.hidden_state_size


@dataclass(frozen=True)
class TargetMetadata(Metadata):
    """The metadata of a target.

    Attributes:
        vocab_size: Token ids of the target.
        prefill_states: One of PREFILL_STATES.
    """

    vocab_size: int
    prefill_states: str


@dataclass(frozen=True)
class DraftMetadata(Metadata):
    """The metadata of a draft.

    Attributes:
        target_vocab_size: Token ids of the target that the draft was made for.
        draft_vocab_size: Token ids that the draft can name.
        d2t: The target id of each draft id, less the draft id.
    """

    target_vocab_size: int
    draft_vocab_size: int
    d2t: tuple[int, ...]


MetadataT = TypeVar("MetadataT", bound=Metadata)


def constants(metadata: Metadata) -> dict[str, Any]:
    """The methods without inputs that hold `metadata`, by name, as ExecuTorch's `constant_methods` takes them."""
    values = {f"get_{field.name}": getattr(metadata, field.name) for field in fields(metadata)}
    return {name: torch.tensor(value) if isinstance(value, tuple) else value for name, value in values.items()}


def load_program(file: str | Path) -> Program:
    """The program in `file`, opened by ExecuTorch's runtime.

    Raises:
        UnusableProgram: The file cannot be read, or is no program.
        Unavailable: executorch is not installed.
    """
    try:
        from executorch.runtime import Runtime
    except ImportError:
        raise Unavailable(f"{file} needs {EXECUTORCH[0]}, which is not installed: pip install executorch") from None
    if not Path(file).is_file():
        raise UnusableProgram(f"{file}: no such file; give a program of ExecuTorch (.pte)")
    try:
        program: Program = Runtime.get().load_program(Path(file))
    except RuntimeError as error:
        raise UnusableProgram(f"{file}: no program of ExecuTorch ({' '.join(str(error).split())[:120]})") from None
    return program


class _Opened:
    """The methods of an open program, loaded."""

    def __init__(self, program: Program, name: str, methods: Sequence[str]) -> None:
        self.name = name
        self._program = program  # a method does not keep its program alive
        self._methods = {method: load_method(program, name, method, methods) for method in methods}

    def call(self, method: str, *inputs: Tensor) -> list[Tensor]:
        """Copies of the outputs of a method."""
        return [output.clone() for output in self._methods[method].execute(inputs)]


class TargetProgram(_Opened):
    """An open target.

    Attributes:
        metadata: What it says of itself.
    """

    def __init__(self, program: Program, name: str) -> None:
        super().__init__(program, name, TARGET_METHODS)
        self.metadata = meta = read_metadata(program, name, TargetMetadata)
        if meta.prefill_states not in PREFILL_STATES:
            raise UnusableProgram(
                f"{name}: get_prefill_states is {meta.prefill_states!r}; known are {', '.join(PREFILL_STATES)}"
            )
        chunk, window = meta.max_prefill_chunk, meta.num_speculative_tokens + 1
        states_of_prefill = 1 if meta.prefill_states == "last" else chunk
        check_shapes(
            program,
            name,
            "target_prefill",
            ((1, chunk), (chunk,)),
            ((1, meta.vocab_size), (states_of_prefill, meta.width)),
        )
        check_shapes(program, name, "target_decode", ((1, 1), (1,)), ((1, meta.vocab_size), (1, meta.width)))
        check_shapes(
            program,
            name,
            "target_verify",
            ((1, window), (window,)),
            ((1, window, meta.vocab_size), (1, window, meta.width)),
        )

    def prefill(self, tokens: Sequence[int], first: int, needs_states: bool) -> Tensor:
        """Write the rows of `tokens`, the first of which stands at position `first`; return their states.

        A target whose prefill returns the states of the last token alone is asked for one token at a time where the
        states of all are needed: the first by `target_prefill`, the others by `target_decode`.

        Returns:
            [tokens, width]; nothing meaningful where no states are needed.
        """
        only_last = self.metadata.prefill_states == "last"
        if needs_states and only_last:
            return torch.cat(
                [
                    self.call("target_decode" if first + i else "target_prefill", *_rows([token], first + i))[1]
                    for i, token in enumerate(tokens)
                ]
            )
        chunk = self.metadata.max_prefill_chunk
        return torch.cat(
            [
                self.call("target_prefill", *_rows(tokens[start : start + chunk], first + start))[1]
                for start in range(0, len(tokens), chunk)
            ]
        )

    def score(self, tokens: Sequence[int], first: int) -> tuple[Tensor, Tensor]:
        """Logits [tokens, vocabulary] and states [tokens, width] of a root at position `first` and drafts behind it.

        A root alone is run by `target_decode`, any more by `target_verify`.
        """
        if len(tokens) == 1:
            logits, states = self.call("target_decode", *_rows(tokens, first))
            return logits, states
        logits, states = self.call("target_verify", *_rows(tokens, first))
        return logits[0], states[0]


class DraftProgram(_Opened):
    """An open draft.

    Attributes:
        metadata: What it says of itself.
    """

    def __init__(self, program: Program, name: str) -> None:
        super().__init__(program, name, DRAFT_METHODS)
        self.metadata = meta = read_metadata(program, name, DraftMetadata)
        if len(meta.d2t) != meta.draft_vocab_size:
            raise UnusableProgram(
                f"{name}: get_d2t maps {len(meta.d2t)} ids, get_draft_vocab_size says {meta.draft_vocab_size}"
            )
        outside = [i for i, offset in enumerate(meta.d2t) if not 0 <= i + offset < meta.target_vocab_size]
        if outside:
            raise UnusableProgram(
                f"{name}: get_d2t maps draft id {outside[0]} to {outside[0] + meta.d2t[outside[0]]}, and "
                f"get_target_vocab_size says {meta.target_vocab_size}"
            )
        chunk = meta.max_prefill_chunk
        state = output_sizes(program, "draft_decode", 1)
        outputs = ((1, meta.draft_vocab_size), state)
        check_shapes(program, name, "draft_prefill", ((1, chunk), (1, chunk, meta.width), (chunk,)), outputs)
        check_shapes(program, name, "draft_decode", ((1, 1), state, (1,)), outputs)

    def run_rows(self, tokens: Sequence[int], states: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """Write rows that hold the target's `states` [rows, width], the first at `first`; scores and state of the last.

        Returns:
            Scores [draft vocabulary], and the state [1, hidden] that a row below holds.
        """
        chunk = self.metadata.max_prefill_chunk
        scores, state = torch.empty(0), torch.empty(0)
        for start in range(0, len(tokens), chunk):
            ids, positions = _rows(tokens[start : start + chunk], first + start)
            scores, state = self.call("draft_prefill", ids, states[None, start : start + chunk].contiguous(), positions)
        return scores[0], state

    def step(self, token: int, state: Tensor, position: int) -> tuple[Tensor, Tensor]:
        """Write the row of a drafted token beside `state` [1, hidden]; see `run_rows` for what is returned."""
        ids, positions = _rows([token], position)
        scores, next_state = self.call("draft_decode", ids, state, positions)
        return scores[0], next_state


def _rows(tokens: Sequence[int], first: int) -> tuple[Tensor, Tensor]:
    """Token ids [1, T] and positions [T] of `tokens`, the first at position `first`."""
    return torch.tensor([list(tokens)]), torch.arange(first, first + len(tokens))


def load_method(program: Program, name: str, method: str, methods: Sequence[str]) -> Method:
    """The method of the program `name`.

    Raises:
        UnusableProgram: The program has no such method, or the runtime cannot load it.
    """
    if method not in program.method_names:
        raise UnusableProgram(
            f"{name}: no method {method}; the plan ({PLAN}) asks for {', '.join(methods)}: export it anew"
        )
    try:
        loaded = program.load_method(method)
    except RuntimeError as error:
        raise UnusableProgram(f"{name}: {method} cannot be loaded ({' '.join(str(error).split())[:120]})") from None
    assert loaded is not None, "load_method returns a method that is named"
    return loaded


def read_metadata(program: Program, name: str, kind: type[MetadataT]) -> MetadataT:
    """The metadata of the program `name`.

    Raises:
        UnusableProgram: A method of the metadata is missing or holds a value of another type, or the value is none that
            the plan admits.
    """
    types = {field.name: field.type for field in fields(kind)}
    values = {}
    for field_name in types:
        method = f"get_{field_name}"
        outputs = load_method(program, name, method, [f"get_{other_field}" for other_field in types]).execute(())
        values[field_name] = _value(outputs, types[field_name], f"{name}: {method}")
    metadata = kind(**values)
    if metadata.max_batch_size != 1:
        raise UnusableProgram(
            f"{name}: get_max_batch_size is {metadata.max_batch_size}; the plan ({PLAN}) speculates with a batch of 1"
        )
    if metadata.kv_strategy != KV_STRATEGY:
        raise UnusableProgram(f"{name}: get_kv_strategy is {metadata.kv_strategy!r}; {KV_STRATEGY} alone is known")
    if not metadata.hidden_state_layers:
        raise UnusableProgram(f"{name}: get_hidden_state_layers names no layer; a draft of EAGLE-3 reads at least one")
    for field_name, value in values.items():
        if isinstance(value, int) and value < 1:
            raise UnusableProgram(f"{name}: get_{field_name} is {value}, and no size")
    return metadata


def _value(outputs: Sequence[Any], kind: Any, place: str) -> Any:
    """The one value of a metadata method, or the tuple of a list of them."""
    if kind == tuple[int, ...]:
        flat = outputs[0].flatten().tolist() if len(outputs) == 1 and isinstance(outputs[0], Tensor) else list(outputs)
        if all(isinstance(number, int) for number in flat):
            return tuple(flat)
        raise UnusableProgram(f"{place} holds {flat!r}, and not a list of integers")
    if len(outputs) == 1 and isinstance(outputs[0], kind) and not isinstance(outputs[0], bool):
        return outputs[0]
    raise UnusableProgram(f"{place} holds {list(outputs)!r}, and not one {kind.__name__}")


def output_sizes(program: Program, method: str, number: int) -> tuple[int, ...]:
    """The sizes of an output of a method, the largest ones where they may vary; () where there is no such output."""
    meta = program.metadata(method)
    return tuple(meta.output_tensor_meta(number).sizes()) if number < meta.num_outputs() else ()


def check_shapes(
    program: Program,
    name: str,
    method: str,
    inputs: Sequence[tuple[int, ...]],
    outputs: Sequence[tuple[int, ...]],
) -> None:
    """Refuse a method whose shapes are not those that the metadata tell.

    Raises:
        UnusableProgram: Another number of inputs or outputs, a batch above 1, or other sizes.
    """
    meta = program.metadata(method)
    found_inputs = [tuple(meta.input_tensor_meta(number).sizes()) for number in range(meta.num_inputs())]
    found_outputs = [tuple(meta.output_tensor_meta(number).sizes()) for number in range(meta.num_outputs())]
    batches = [sizes[0] for sizes in found_inputs if len(sizes) > 1 and sizes[0] > 1]
    if batches:
        raise UnusableProgram(f"{name}: {method} takes a batch of {batches[0]}; the plan ({PLAN}) speculates with 1")
    for kind, found, expected in (("input", found_inputs, inputs), ("output", found_outputs, outputs)):
        if len(found) != len(expected):
            raise UnusableProgram(
                f"{name}: {method} has {len(found)} {kind}s; the plan ({PLAN}) gives it {len(expected)}"
            )
        for number, (sizes, expected_sizes) in enumerate(zip(found, expected, strict=True)):
            if sizes != expected_sizes:
                raise UnusableProgram(
                    f"{name}: {method} has {kind} {number} of sizes {list(sizes)}, and its metadata say "
                    f"{list(expected_sizes)}"
                )


def check_pair(target: TargetProgram, draft: DraftProgram) -> None:
    """Refuse a draft that was not made for the target.

    Raises:
        UnusableProgram: The two disagree on the hidden states, on the target's vocabulary, or on a length.
    """
    ours, theirs = target.metadata, draft.metadata
    for fact, at_target, at_draft in (
        ("get_hidden_state_layers", list(ours.hidden_state_layers), list(theirs.hidden_state_layers)),
        ("get_hidden_state_size", ours.hidden_state_size, theirs.hidden_state_size),
        ("get_num_speculative_tokens", ours.num_speculative_tokens, theirs.num_speculative_tokens),
        ("get_max_seq_len", ours.max_seq_len, theirs.max_seq_len),
    ):
        if at_target != at_draft:
            raise UnusableProgram(
                f"{fact} is {at_target} in {target.name} and {at_draft} in {draft.name}: export both together"
            )
    if ours.vocab_size != theirs.target_vocab_size:
        raise UnusableProgram(
            f"{target.name} has a vocabulary of {ours.vocab_size} and {draft.name} was made for one of "
            f"{theirs.target_vocab_size}: export both together"
        )


@dataclass(frozen=True)
class Eagle3Pair:
    """A target and its draft, open; `draft` is None where no draft is asked for."""

    target: TargetProgram
    draft: DraftProgram | None


def open_pair(
    target_file: str | Path, draft_file: str | Path | None, load: Callable[[str | Path], Program] = load_program
) -> Eagle3Pair:
    """Open the programs of a target and of its draft, which may be one file.

    Raises:
        UnusableProgram: A program breaks the contract, or the draft was not made for the target.
        Unavailable: executorch is not installed.
    """
    program = load(target_file)
    target = TargetProgram(program, str(target_file))
    if draft_file is None:
        return Eagle3Pair(target, None)
    is_same = Path(draft_file) == Path(target_file)
    draft = DraftProgram(program if is_same else load(draft_file), str(draft_file))
    check_pair(target, draft)
    return Eagle3Pair(target, draft)
