"""Placing of a saved case's checkpoints at the directories that the user names.

A name in a file alone opens nothing.
"""

import shlex
from dataclasses import replace

from reference.architecture import Checkpoint, Model
from reference.case import Case
from reference.draft import Draft
from reference.draft.head import Head
from reference.draft_files import open_head, stored_head
from reference.files.fields import UnreadableCheckpoint
from reference.files.head_files import HeadFiles
from reference.malformed import Malformed
from reports.bundle import Bundle
from reports.format import clean, cut
from specverify.checkpoints.opening import directory_of, open_checkpoint
from specverify.setup.errors import UnusableInput

BUILT_IN = "builtin:"
"""Prefix of built-in names; they are safe in a file, since they name a closed list of packages, no path or network."""


def placed(
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
    wanted = saved.case.checkpoints
    if not wanted and not saved.case.heads:
        return saved.case
    if not models and saved.model is not None and saved.model.startswith(BUILT_IN):
        models = (saved.model,)
    found = {one.digest: one for one in (open_checkpoint(name, understood) for name in models)}
    for checkpoint in wanted:
        if checkpoint.digest not in found:
            target = checkpoint == saved.case.model
            # One wrong model: the likely mistake is other weights, which deserves its own message.
            if len(found) == 1 and not found.keys() & {one.digest for one in wanted}:
                raise UnusableInput(_other(checkpoint, *found.values()))
            raise UnusableInput(_unnamed(checkpoint, (saved.model if target else None), file))
    try:
        case = _moved(saved.case, found, {})
        return _moved(case, found, _heads(case, heads, file)) if case.heads else case
    except Malformed as why:
        raise UnusableInput(f"the case does not fit its checkpoint: {why}") from None


def _heads(case: Case, heads: tuple[str, ...], file: str) -> dict[str, HeadFiles]:
    """Where the heads of `case` lie, by digest; MTP modules lie in the target's own directory."""
    found: dict[str, HeadFiles] = {}
    try:
        for name in heads:
            words = open_head(directory_of(name, "--draft"), case.model).words
            assert words.files is not None
            found[words.files.digest] = words.files
        for head in case.heads:
            assert head.files is not None
            if isinstance(case.model, Checkpoint) and case.model.digest == head.files.digest:
                found[head.files.digest] = HeadFiles(case.model.source, head.files.digest)
            elif head.files.digest not in found:
                name = cut(clean(head.files.source), 200)
                raise UnusableInput(
                    f"{file}: runs the {head.WORD} head {name} ({head.files.digest[:19]}...), and a name in a file "
                    f"opens nothing: add --draft {shlex.quote(name)}, or the folder where these weights lie"
                )
            # The words of the file are compared with those of the weights before anything runs.
            stored_head(replace(head, files=found[head.files.digest]).weights, case.model)
    except UnreadableCheckpoint as why:
        raise UnusableInput(f"--draft: {why}") from None
    return found


def _other(wanted: Checkpoint, found: Checkpoint) -> str:
    """The message for a user who named one checkpoint that is not a checkpoint of the case."""
    return (
        f"{found.source}: other weights ({found.digest[:19]}...) than the case was saved with "
        f"({wanted.digest[:19]}...); give the right checkpoint with --model"
    )


def _unnamed(wanted: Checkpoint, asked: str | None, file: str) -> str:
    """The message for a user who did not name the checkpoint `wanted`; `asked` is its `--model` in the saved run."""
    name = cut(clean(asked or wanted.source), 200)
    return (
        f"{file}: runs the checkpoint {name} ({wanted.digest[:19]}...), and a name in a file opens nothing: "
        f"add --model {shlex.quote(name)}, or the folder where these weights lie"
    )


def _moved(case: Case, found: dict[str, Checkpoint], heads: dict[str, HeadFiles]) -> Case:
    """`case` with every checkpoint and every head replaced by the one in `found` or `heads` that has its digest."""

    def model_of(model: Model) -> Model:
        return found[model.digest] if isinstance(model, Checkpoint) else model

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
