"""The reference that a command names: opened if its memory is free, and certified by NumPy.

`--reference` says what computes the oracle. `--against` puts another engine in its place.
"""

from collections.abc import Callable
from contextlib import ExitStack

from specverify.campaign.against import free_device_bytes, open_on_device, open_reference
from specverify.checkpoints.given_draft import BUILT_IN, MODEL
from specverify.checkpoints.opening import directory_of
from specverify.properties.reference_names import NUMPY, REFERENCES
from specverify.properties.verdict.finding import Verdict
from specverify.properties.verdict.invariant import Oracle
from specverify.reference.architecture import Checkpoint
from specverify.reference.case import Case
from specverify.reference.draft import Ngram, Scripted
from specverify.reference.files.fields import UnreadableCheckpoint
from specverify.references.certificate import CASES_IN_DOUBT, Certificate, RecordingOracle
from specverify.references.memory import (
    ELSEWHERE,
    EnginePlace,
    WeightSizes,
    check_memory,
    drafted_sizes,
    free_bytes,
    trace_bytes,
    weight_sizes,
)
from specverify.setup.errors import UnusableInput

CERTIFIED_BY = 0
"""The seed by which the rows of one case are chosen for NumPy's certificate; a run has a seed of its own."""


def check_reference(reference: str, against: str | None) -> None:
    """Refuse a reference that there is not, or one in whose place `against` stands.

    Raises:
        UnusableInput: with one line.
    """
    if reference not in REFERENCES:
        raise UnusableInput(f"--reference {reference}: it is {' or '.join(REFERENCES)}")
    if reference != NUMPY and against is not None:
        raise UnusableInput(f"--reference {reference} computes the oracle, in whose place --against puts {against}")


def open_for_case(reference: str, against: str | None, stack: ExitStack, case: Case, device: str) -> Oracle:
    """The NumPy oracle, or the one that `--reference` or `--against` names, for one case on an engine on `device`.

    Raises:
        Unavailable: This machine lacks the device of `--reference`.
        Unsupported: The reference cannot run the case's checkpoint.
        MissingInput: The machine has not the memory for the checkpoint.
        UnusableInput: The checkpoint cannot be read.
    """
    checkpoint = case.model if isinstance(case.model, Checkpoint) else None
    if checkpoint is not None and against is None:
        memory_words(checkpoint.source, reference, _draft_of(case), EnginePlace(device, case.dtype))
    if reference != NUMPY:
        return open_on_device(reference, on_checkpoint=checkpoint is not None)
    return open_reference(against, stack, checkpoint, case.dtype)


def _draft_of(case: Case) -> str | None:
    """The draft of a case as `--draft` would name it, where it has weights in files."""
    if isinstance(case.draft.model, Checkpoint):
        return MODEL + case.draft.model.source
    return next((head.files.source for head in case.heads if head.files is not None), None)


def memory_words(model: str, reference: str, draft: str | None = None, engine: EnginePlace = ELSEWHERE) -> str:
    """The words on what a run takes in memory on the checkpoint `model` with the draft that `--draft` names.

    Raises:
        MissingInput: This machine, or the device, has not as much.
        UnusableInput: The checkpoint cannot be read.
        Unavailable: This machine lacks the device.
    """
    free_on_device = None if reference in (NUMPY, "torch:cpu") else free_device_bytes(reference)
    try:
        return check_memory(model, _sizes(model, draft), reference, engine, free_on_device)
    except UnreadableCheckpoint as why:
        raise UnusableInput(str(why)) from None


def bytes_of_traces(model: str, reference: str, draft: str | None = None, engine: EnginePlace = ELSEWHERE) -> int:
    """The bytes of traces that oracle and engine each remember on the checkpoint `model`; see `trace_bytes`."""
    return trace_bytes(free_bytes(), _sizes(model, draft).taken_by(reference, engine), reference)


def _sizes(model: str, draft: str | None) -> WeightSizes:
    directory = directory_of(model)
    if draft is None or draft in (Ngram.TAG, Scripted.TAG) or draft.startswith(BUILT_IN):
        return weight_sizes(directory)
    if draft.startswith(MODEL):
        return drafted_sizes(directory, directory_of(draft.removeprefix(MODEL), "--draft model:"), None)
    return drafted_sizes(directory, None, directory_of(draft, "--draft"))


def certificate_of(reference: str, oracle: Oracle, seed: int, runs: int = 1) -> Callable[[Verdict], Verdict]:
    """The function that certifies the rows of a reference on a device, by each verdict; for NumPy none is needed."""
    if not isinstance(oracle, RecordingOracle):
        return lambda verdict: verdict
    return Certificate(reference, oracle, seed, runs).certify


def certify_alone(verdict: Verdict, reference: str, oracle: Oracle) -> Verdict:
    """The verdict on a case that is judged alone, with as many runs certified as those of a doubtful case in a run.

    Raises:
        ReferenceDisagrees: NumPy computes other numbers.
    """
    return certificate_of(reference, oracle, CERTIFIED_BY, CASES_IN_DOUBT)(verdict)
