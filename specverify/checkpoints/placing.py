"""Placing of a saved case's checkpoints at the directories that the user names.

A name in a file alone opens nothing.
"""

import shlex
from dataclasses import replace

from specverify.checkpoints.opening import directory_of, open_checkpoint
from specverify.reference.architecture import Checkpoint, Model
from specverify.reference.case import Case
from specverify.reference.draft import Draft
from specverify.reference.draft.head import Head, HeadFiles
from specverify.reference.draft_files import open_head, stored_head
from specverify.reference.files.fields import UnreadableCheckpoint
from specverify.reference.malformed import Malformed
from specverify.reports.bundle import Bundle
from specverify.reports.format import clean, cut
from specverify.setup.errors import UnusableInput

BUILT_IN = "builtin:"
"""Prefix of built-in names; they are safe in a file, since they name a closed list of packages, no path or network."""


def place_checkpoints(
    saved: Bundle, models: tuple[str, ...], file: str, understood: bool = True, heads: tuple[str, ...] = ()
) -> Case:
    """The case of a bundle, with each of its checkpoints and heads at a place that the user named.

    A hub id in the file would send the user's token to the hub, and a path in it would open any folder of this machine.
    So only `models` and `heads` are opened, and each replaces the one of the case that has the same digest.

    Args:
        saved: The bundle.
        models: Every `--model` of the command line: a directory, a hub id or `builtin:NAME`. If there is none and the
            bundle was saved with a built-in model, the built-in model is opened.
        file: The bundle's file, for messages.
        understood: Whether the oracle must be able to run the models.
        heads: Every `--draft` of the command line: a directory or a hub id.

    Raises:
        UnusableInput: A checkpoint of the case is not among `models`; the line says what to type.
        MissingInput: A model that the user named is not on this machine.
    """
    checkpoints = saved.case.checkpoints
    if not checkpoints and not saved.case.heads:
        return saved.case
    if not models and saved.model is not None and saved.model.startswith(BUILT_IN):
        models = (saved.model,)
    named = {checkpoint.digest: checkpoint for checkpoint in (open_checkpoint(name, understood) for name in models)}
    for checkpoint in checkpoints:
        if checkpoint.digest not in named:
            target = checkpoint == saved.case.model
            # One wrong model: the likely mistake is other weights, which deserves its own message.
            if len(named) == 1 and not named.keys() & {checkpoint.digest for checkpoint in checkpoints}:
                raise UnusableInput(_wrong_weights(checkpoint, *named.values()))
            raise UnusableInput(_missing_option(checkpoint, (saved.model if target else None), file))
    try:
        case = _move(saved.case, named, {})
        return _move(case, named, _heads(case, heads, file)) if case.heads else case
    except Malformed as why:
        raise UnusableInput(f"the case does not fit its checkpoint: {why}") from None


def _heads(case: Case, heads: tuple[str, ...], file: str) -> dict[str, HeadFiles]:
    """Where the heads of `case` lie, by digest; MTP modules lie in the target's own directory."""
    files_of_digest: dict[str, HeadFiles] = {}
    try:
        for name in heads:
            words = open_head(directory_of(name, "--draft"), case.model).words
            assert words.files is not None
            files_of_digest[words.files.digest] = words.files
        for head in case.heads:
            assert head.files is not None
            if isinstance(case.model, Checkpoint) and case.model.digest == head.files.digest:
                files_of_digest[head.files.digest] = HeadFiles(case.model.source, head.files.digest)
            elif head.files.digest not in files_of_digest:
                name = cut(clean(head.files.source), 200)
                raise UnusableInput(
                    f"{file}: runs the {head.WORD} head {name} ({head.files.digest[:19]}...), and a name in a file "
                    f"opens nothing: add --draft {shlex.quote(name)}, or the folder where these weights lie"
                )
            # The words of the file are compared with those of the weights before anything runs.
            stored_head(replace(head, files=files_of_digest[head.files.digest]).weights, case.model)
    except UnreadableCheckpoint as why:
        raise UnusableInput(f"--draft: {why}") from None
    return files_of_digest


def _wrong_weights(saved: Checkpoint, named: Checkpoint) -> str:
    """The message for a user who named one checkpoint that is not a checkpoint of the case."""
    return (
        f"{named.source}: other weights ({named.digest[:19]}...) than the case was saved with "
        f"({saved.digest[:19]}...); give the right checkpoint with --model"
    )


def _missing_option(checkpoint: Checkpoint, saved_name: str | None, file: str) -> str:
    """The message for a user who did not name `checkpoint`; `saved_name` is its `--model` in the saved run."""
    name = cut(clean(saved_name or checkpoint.source), 200)
    return (
        f"{file}: runs the checkpoint {name} ({checkpoint.digest[:19]}...), and a name in a file opens nothing: "
        f"add --model {shlex.quote(name)}, or the folder where these weights lie"
    )


def _move(case: Case, named: dict[str, Checkpoint], heads: dict[str, HeadFiles]) -> Case:
    """`case` with every checkpoint and every head replaced by the one in `named` or `heads` that has its digest."""

    def model_of(model: Model) -> Model:
        return named[model.digest] if isinstance(model, Checkpoint) else model

    def draft_of(draft: Draft) -> Draft:
        if isinstance(draft, Head) and draft.files is not None:
            return replace(draft, files=heads.get(draft.files.digest, draft.files))
        return draft if draft.model is None else draft.with_model(model_of(draft.model))

    session = case.session
    if session is not None:
        mates = tuple(replace(mate, draft=draft_of(mate.draft)) for mate in session.mates)
        actions = tuple(
            replace(action, draft=None if action.draft is None else draft_of(action.draft))
            for action in session.actions
        )
        session = replace(session, mates=mates, actions=actions)
    return replace(case, model=model_of(case.model), draft=draft_of(case.draft), session=session)
