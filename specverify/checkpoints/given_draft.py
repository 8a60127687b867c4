"""The draft that `--draft` names, for cases on a checkpoint.

A draft that cannot be used is an error: nothing else is drafted in its place. A table of trees by batch size, which
`dispatch learn` writes, or a tree that ends early comes from the file that `--draft-trees` names.
"""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from specverify.checkpoints.opening import directory_of, open_checkpoint
from specverify.checkpoints.prompts import tokenizer_of
from specverify.reference.abilities import Abilities
from specverify.reference.architecture import Checkpoint
from specverify.reference.case_json import Validator, dotted_path, schema, shorten
from specverify.reference.draft import Draft, LanguageModel, Ngram, Scripted
from specverify.reference.draft.head import Head
from specverify.reference.draft.layer_head import LayerHead
from specverify.reference.draft_files import open_head
from specverify.reference.draft_trees import Dispatch, Expansion, Stopped
from specverify.reference.files.fields import UnreadableCheckpoint
from specverify.reference.files.json_types import build
from specverify.reference.malformed import Malformed
from specverify.reference.oracle.parameters import check_modules
from specverify.reference.tree import RankTree
from specverify.setup.errors import UnusableInput
from specverify.setup.files import json_in

BUILT_IN = "builtin:"
MODEL = "model:"

BUILT_IN_HEADS: tuple[str, ...] = ()
"""Names of the heads that packages ship: none so far."""

NODES, TOP_K, DEPTH = 24, 4, 4
"""The dynamic tree that a head or a second model fills: its nodes, the children of a node, its levels."""

STATIC = RankTree((0, 0, 0, 1, 2, 3), (0, 0, 1, 0, 0, 0))
"""The tree where no dynamic one can be verified: a chain of three, and a chain of two beside it."""


def check_name(name: str) -> None:
    """Refuse a built-in name that there is not, before any worker starts.

    Raises:
        UnusableInput: with the forms that `--draft` takes.
    """
    if name.startswith(BUILT_IN) and name.removeprefix(BUILT_IN) not in BUILT_IN_HEADS:
        raise UnusableInput(
            f"--draft {name}: no package ships a draft head yet; known: {Ngram.TAG}, {Scripted.TAG}, {MODEL}DIR, or "
            "the directory of a head"
        )


def check_options(name: str | None, weights: str, table: str | None) -> None:
    """Refuse options of a draft that cannot be used together, before any worker starts.

    Raises:
        UnusableInput: with the option that has no draft to act on, or the file that holds no table.
    """
    if name is not None:
        check_name(name)
    if name in (None, Ngram.TAG, Scripted.TAG) and (weights or table):
        option = "--draft-weights" if weights else "--draft-trees"
        raise UnusableInput(f"{option} needs a --draft with weights: the directory of a head, or {MODEL}DIR")
    if table is not None:
        trees_in(Path(table))


def given_draft(
    name: str, checkpoint: Checkpoint, within: Abilities | None, weights: str = "", table: str | None = None
) -> Draft | None:
    """The draft called `name` for the target `checkpoint`; None for those that are made prompt by prompt.

    Args:
        name: The argument of `--draft`.
        checkpoint: The target.
        within: The abilities of the backend, where they are known.
        weights: The kind of quantised weights, one of QUANTISED; empty for the weights as they are stored.
        table: The file of a table of trees by batch size; None for one tree, dynamic where the backend grows them.

    Raises:
        UnusableInput: The draft cannot be read, is made for another target, cannot fill a tree of the table, or is not
            run by the backend.
        MissingInput: Its files are not on this machine.
    """
    check_name(name)
    if name in (Ngram.TAG, Scripted.TAG):
        _check_declared(name, name, within)
        return None
    draft = _model(name, checkpoint, within) if name.startswith(MODEL) else _head(name, checkpoint)
    _check_declared(name, draft.TAG, within)
    draft = _in_conventions(name, draft, within)
    if weights:
        draft = draft.in_weights(weights)
        if within is not None and not within.quantised:
            raise UnusableInput(f"--draft-weights {weights}: the backend declares no drafts of quantised weights")
    if table is not None:
        return _with_trees(draft, table, checkpoint, within)
    dynamic = within is None or "dynamic" in within.tree_kinds
    return with_own_tree(draft, dynamic)


def _in_conventions(name: str, draft: LanguageModel | Head, within: Abilities | None) -> LanguageModel | Head:
    """The draft; a head with rows in the first of the conventions that the backend declares."""
    if within is None or not isinstance(draft, LayerHead):
        return draft
    for field in ("first_tokens", "alignments"):
        if not getattr(within, field):
            raise UnusableInput(f"--draft {name}: the backend declares no {field}; a {draft.WORD} head has one of them")
    try:
        return replace(draft, first_token=within.first_tokens[0], alignment=within.alignments[0])
    except Malformed as why:
        raise UnusableInput(f"--draft {name}: in the conventions that the backend declares first, {why}") from None


def _check_declared(name: str, tag: str, within: Abilities | None) -> None:
    if within is not None and tag not in within.drafts:
        runs = ", ".join(within.drafts) or "none that a case describes"
        raise UnusableInput(f"--draft {name}: the backend declares no {tag} drafts (it declares {runs})")


def _head(name: str, checkpoint: Checkpoint) -> Head:
    try:
        opened_head = open_head(directory_of(name, "--draft"), checkpoint)
        check_modules(opened_head.words, checkpoint, opened_head.weights)
        return opened_head.words
    except UnreadableCheckpoint as why:
        raise UnusableInput(f"--draft: {why}") from None


def _model(name: str, checkpoint: Checkpoint, within: Abilities | None) -> LanguageModel:
    """A second model, whose tokens must be the target's, id by id.

    Models of one tokenizer may have other numbers of rows, since padding behind the last token follows their size. Such
    a draft is opened with the target's rows, as vLLM opens it (PR #42775), and names ids that have a token.
    """
    draft = open_checkpoint(name.removeprefix(MODEL), option="--draft model:")
    token_ids = check_same_tokens(checkpoint.source, draft.source)
    root = RankTree((0,), (0,))
    rows = draft.vocab_size
    if rows == checkpoint.vocab_size:
        return LanguageModel(draft, root)
    if within is not None and not within.draft_trees:
        raise UnusableInput(
            f"--draft {name}: it scores {rows} token ids and the target {checkpoint.vocab_size}; the backend declares "
            "no drafts that name a part of the vocabulary"
        )
    if max(token_ids) >= min(rows, checkpoint.vocab_size):
        raise UnusableInput(
            f"--draft {name}: it scores {rows} token ids and the target {checkpoint.vocab_size}, and its tokenizer "
            f"has the token {max(token_ids)}"
        )
    return LanguageModel(draft.with_rows(checkpoint.vocab_size), root, token_ids)


def check_same_tokens(target: str, draft: str) -> tuple[int, ...]:
    """The token ids of a second model's tokenizer, ascending, where it gives each the token that the target's gives it.

    Raises:
        UnusableInput: with the first id at which the two differ; also where one of them has no tokenizer.
    """
    draft_tokens, target_tokens = (
        {token_id: token for token, token_id in tokenizer_of(directory, "to compare tokens by").get_vocab().items()}
        for directory in (draft, target)
    )
    for token_id in sorted(draft_tokens.keys() | target_tokens.keys()):
        if draft_tokens.get(token_id) != target_tokens.get(token_id):
            words = [
                f"{token!r}"[:40] if token is not None else "no token"
                for token in (draft_tokens.get(token_id), target_tokens.get(token_id))
            ]
            raise UnusableInput(
                f"--draft model:{draft}: another vocabulary than the target's: id {token_id} is {words[0]} there and "
                f"{words[1]} in {target}"
            )
    return tuple(sorted(target_tokens))


def with_own_tree(draft: Head | LanguageModel, dynamic: bool) -> Draft:
    """The draft with a dynamic tree of NODES nodes, less where it can name fewer tokens or levels."""
    for depth in range(DEPTH if dynamic else 0, 0, -1):
        top_k = min(TOP_K, len(draft.vocabulary) or TOP_K)
        most = top_k + (depth - 1) * top_k**2 + 1
        with suppress(Malformed):  # fewer Medusa heads than levels
            return replace(draft, shape=Expansion(top_k, depth, min(NODES, most)))
    return with_static_tree(draft)


def _with_trees(draft: Head | LanguageModel, file: str, checkpoint: Checkpoint, within: Abilities | None) -> Draft:
    """The draft with the table of trees in `file`, or the tree that ends early."""
    try:
        filled = replace(draft, shape=trees_in(Path(file)))
        filled.check_target(checkpoint)
    except Malformed as why:
        raise UnusableInput(f"--draft-trees {file}: {why}") from None
    if within is not None and filled.tree_kind not in within.tree_kinds:
        kinds = ", ".join(within.tree_kinds) or "no trees that a draft fills"
        raise UnusableInput(
            f"--draft-trees {file}: the backend declares no {filled.tree_kind} trees (it declares {kinds})"
        )
    return filled


def with_static_tree(draft: Draft) -> Draft:
    """The draft with the tree STATIC, or the part of it that is no deeper than the draft can be."""
    for height in range(STATIC.height, 0, -1):
        kept_nodes = [node for node in range(len(STATIC)) if STATIC.depth[node] <= height]
        with suppress(Malformed):  # fewer Medusa heads than levels
            return draft.with_shapes((STATIC.subtree(kept_nodes),))
    return draft


def trees_in(path: Path) -> Dispatch | Stopped:
    """The table of a file, or the tree that ends early, in the form of a draft's `shape` in a case file.

    Raises:
        UnusableInput: The file cannot be read, or holds neither.
    """
    content = json_in(path)
    ends_early = isinstance(content, dict) and "stop_below" in content
    form = "stopped" if ends_early else "dispatch"
    validator = Validator({"$ref": f"#/$defs/{form}", "$defs": schema()["$defs"]})
    wrong = next(iter(validator.iter_errors(content)), None)
    if wrong is not None:
        raise UnusableInput(f"{path}: {dotted_path(wrong.absolute_path)}: {shorten(wrong.message)}")
    try:
        trees: Dispatch | Stopped = build(Stopped if ends_early else Dispatch, content)
    except Malformed as why:
        raise UnusableInput(f"{path}: {why}") from None
    return trees
