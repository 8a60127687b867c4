"""Trace: what a run reveals, stage by stage.

The first stage that differs from the oracle's is the address of the fault.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from specverify.reference.draft.hidden import HeadInput
from specverify.reference.family.recurrent import RecurrentState
from specverify.reference.parallel import RankRun
from specverify.reference.rules import OMIT_DEFAULT
from specverify.reference.session import Account, Event
from specverify.reference.tree import Tree

Array = npt.NDArray[Any]
DENSE_MASK = "a dense mask"
"""The beginning of fallbacks that say of a mask that it was dense, whatever attention then read it."""

CHOSEN = "chosen: "
"""The beginning of entries of `Trace.fallbacks` that name a way which attention chose, and no fallback."""


class Stage(enum.IntEnum):
    """The stages of one speculative step, in the order in which they happen and in which findings are ranked."""

    DRAFTED = 0
    LOWERED = 1
    ATTENDED = 2
    SCORED = 3
    ACCEPTED = 4
    EMITTED = 5
    COMMITTED = 6

    @property
    def word(self) -> str:
        """The stage as reports and JSON write it."""
        return self.name.lower()


@dataclass(frozen=True)
class Drafted:
    """The draft's proposal.

    Attributes:
        tree: The proposed tree, its node 0 the pending root.
        logits: [nodes, draft vocabulary] scores that ranked each node's children, NaN for leaves; None without scores.
        draft_ids: The id of each node's token in the draft's own vocabulary (0 for the root), where it has one.
        proposal: [nodes, vocabulary] the law that the verifier is given for each node: that from which its token was
            drawn, before earlier siblings were removed (one-hot if not drawn; row 0 is not used). None if greedy.
        given: The rows of committed tokens that the draft's head ran; None for a draft without such a head.
        confidence: [nodes] log-probability that the draft's confidence head gives the children of each node, NaN where
            they were not scored; None for a draft without such a head.
    """

    tree: Tree
    logits: Array | None = None
    draft_ids: tuple[int, ...] | None = None
    proposal: Array | None = None
    given: HeadInput | None = None
    confidence: Array | None = None


UNKNOWN_POSITION = -(2**31)
"""The position on an axis of a column whose row is not known; a wrong position may be negative, too."""

WITHOUT_ROWS = ("visible", "retrieve_index", "axes")
"""The arrays of a lowered tree whose first axis is not that of its rows."""


@dataclass(frozen=True)
class Lowered:
    """The tree as index arrays over R rows (padding included) and C = committed + R columns of KV.

    Row 0 is the root and its own parent; entries that do not exist hold 0, so no negative index exists anywhere. Each
    array may be None, for an engine that does not have it or does not show it: it is then unobserved, and the others
    are judged.

    Attributes:
        token, parent, depth, position: int [R]; position is the row's position in rotary embedding.
        valid: bool [R]; False for padding rows.
        ancestor: int [R, height + 1]; column d is the row's ancestor at depth d, 0 beyond the row's own depth.
        visible: bool [R, C] for each layer; layers with equal windows share one array.
        slot: int [R]; the column that each row writes.
        next_token, next_sibling: int [R]; first child, and next sibling in row order; 0 for none.
        retrieve_index: int [nodes]; the row of the flattened forward that scores each node.
        axes: int [3, C], of a target with three axes the positions in rotary embedding on time, height and width: of
            each committed column as the row that wrote it had them, and of the rows. UNKNOWN_POSITION where they are
            not known.
    """

    token: Array | None = None
    parent: Array | None = None
    depth: Array | None = None
    position: Array | None = None
    valid: Array | None = None
    ancestor: Array | None = None
    visible: tuple[Array, ...] | None = None
    slot: Array | None = None
    next_token: Array | None = None
    next_sibling: Array | None = None
    retrieve_index: Array | None = None
    axes: Array | None = None

    @property
    def rows(self) -> int | None:
        """R, read off the first array that has a row for each; None if only `retrieve_index` is there."""
        arrays = (getattr(self, field_.name) for field_ in fields(self) if field_.name not in WITHOUT_ROWS)
        masks = self.visible or ()
        return next((len(array) for array in (*arrays, *masks) if array is not None), None)

    @property
    def array_names(self) -> tuple[str, ...]:
        """The names of the arrays that are there."""
        return tuple(field_.name for field_ in fields(self) if getattr(self, field_.name) is not None)


@dataclass(frozen=True)
class Attended:
    """The output of attention for each node: float [layers, heads, nodes, value_dim], before the output projection."""

    output: Array


@dataclass(frozen=True)
class Scored:
    """The target's logits at each node, float [nodes, vocabulary], and the law made of them where the target samples.

    Attributes:
        logits: The model's logits, before any processing.
        law: The law of the next token at each node, after temperature and all processing; None if greedy.
        hidden: The hidden states that the draft reads (`Draft.reads`), float [nodes, width]; None where it reads none.
        legal, refused: bool [nodes, vocabulary] and [nodes]; the tokens that the request's grammar allows after each
            node, and the nodes with a token that it does not allow on their path, whose rows of `legal` say nothing.
        routed: The experts that each row took, int [layers, context + nodes, taken]; the rows of the context come
            first, with the experts of the forward that wrote their KV. -1 stands in a layer without experts, and in
            every place of a row whose experts are not known. None where the backend shows none, or has none.
        indexed: The columns that each row attends to where an indexer chooses them, int [layers, context + nodes, k],
            the rows in the same order; a layer that follows the one before shows its columns. A column is named by the
            position of its token in the row's own text, from 0 to the row's own position, as all that a row sees lies
            on its path. Positions ascend, and -1 fills the places behind them: all places of a row whose columns are
            not known, and of a layer without an indexer. None where the backend shows none, or has none.
        stored: The codes of each row's keys and values where the cache rounds them (`KvLayout.kv_dtype`), int [layers,
            context + nodes, codes], the rows in the same order. A code is a byte, 0 to 255: those of the keys come
            first, head after head, then those of the values, and -1 fills the places behind them. None where the
            backend shows none, or stores keys and values as they are.
    """

    logits: Array
    law: Array | None = None
    hidden: Array | None = None
    legal: Array | None = None
    refused: Array | None = None
    routed: Array | None = None
    indexed: Array | None = None
    stored: Array | None = None


@dataclass(frozen=True)
class Accepted:
    """The accepted nodes from the root downwards, root included, and the token chosen after the last of them.

    `coins` lists the places (`specverify.reference.tape`) of the coins that decided the step, in order, draft coins
    included.
    """

    path: tuple[int, ...]
    bonus: int
    coins: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Emitted:
    """The tokens that this step added to the output, and why the run ended with this step (`Trace.finish`), or None.

    `logprobs` holds each token's log-probability under the target's unprocessed logits, where the backend reports it.
    """

    tokens: tuple[int, ...]
    finish: str | None = None
    logprobs: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Kv:
    """Rotated keys and values of committed tokens: float [layers, kv_heads, length, head_dim] each.

    `first` holds, for each layer, the first column that the layer still has; columns before it are NaN. Empty: every
    layer has all columns.
    """

    keys: Array
    values: Array
    first: tuple[int, ...] = ()

    @property
    def length(self) -> int:
        """Number of committed tokens."""
        return int(self.keys.shape[2])


@dataclass(frozen=True)
class Committed:
    """The committed caches around one step; None stands for a cache that the backend does not reveal.

    Attributes:
        length: Number of tokens whose target KV is committed after the step.
        before: Target cache at the start of the step.
        verified: Target cache after the verify forward and before the commit.
        after: Target cache after the commit.
        draft: The draft model's own cache after the step.
        fallback: Why a faster commit was not used, or None.
        way: The way that the commit took (`specverify.reference.layout.COMMITS`); None if untold, or if its layout has
            one.
        matched: Number of output tokens that the matcher of the grammar has read after the step.
        recurrent_before: The target's recurrent state at the start of the step; None for a model without any.
        recurrent: The same after the commit.
        recurrent_root: The same after the root's row of the verify forward, before the commit.
    """

    length: int
    before: Kv | None = None
    verified: Kv | None = None
    after: Kv | None = None
    draft: Kv | None = None
    fallback: str | None = None
    way: str | None = None
    matched: int | None = None
    recurrent_before: RecurrentState | None = None
    recurrent: RecurrentState | None = None
    recurrent_root: RecurrentState | None = None


@dataclass(frozen=True)
class Step:
    """One speculative step. A stage that the backend does not reveal is None, and None never counts as equal.

    `context` is the tokens whose KV was committed when the step began.
    """

    context: tuple[int, ...]
    drafted: Drafted | None = None
    lowered: Lowered | None = None
    attended: Attended | None = None
    scored: Scored | None = None
    accepted: Accepted | None = None
    emitted: Emitted | None = None
    committed: Committed | None = None


@dataclass(frozen=True)
class TargetCalls:
    """Forwards of the target for one request, by kind; forwards that other requests share count for each.

    Attributes:
        prefill: Forwards that append several tokens, whose logits nobody needs but those of the last one.
        decode: Forwards that append one token.
        verify: Forwards over a tree, or over the root alone, with the logits of every row.
    """

    prefill: int
    decode: int
    verify: int


@dataclass(frozen=True)
class Accounting:
    """Counters of a run, as the backend keeps them.

    Attributes:
        verify_calls: Forwards over a tree.
        draft_calls: Forwards of the draft model.
        proposed: Drafted tokens, roots not counted.
        accepted: Drafted tokens on accepted paths.
        rejected: The other drafted tokens.
        accept_lengths: Accepted drafted tokens of each step.
        target_calls: Forwards of the target by kind; None where they are not counted.
    """

    verify_calls: int
    draft_calls: int
    proposed: int
    accepted: int
    rejected: int
    accept_lengths: tuple[int, ...]
    target_calls: TargetCalls | None = field(default=None, metadata=OMIT_DEFAULT)


@dataclass(frozen=True)
class Speculated:
    """Counts of drafted tokens over a run that shows no steps.

    Attributes:
        proposed: Drafted tokens that the target verified.
        accepted: Those of them that it accepted.
        by_position: Of all chains, how many accepted their first token, their second, ...; empty where that is not
            told. The numbers add up to `accepted`.
    """

    proposed: int
    accepted: int
    by_position: tuple[int, ...] = ()


@dataclass(frozen=True)
class Draw:
    """Consecutive random numbers of one stream, read by one call.

    A stream is the sequence of numbers that follows one seed, or one state, of a generator. Two generators with equal
    seeds are one stream: they give the same numbers.

    Attributes:
        stream: The stream by name: its library, and the seed or state from which its offsets count.
        offset: The number of the first number that was read, from 0.
        size: How many numbers were read.
        site: The frames of the call, the innermost last, each `file:line in function: source line`.
        call: The function that was called and its generator, in words.
        step: Index of the speculative step, where it is known.
    """

    stream: str
    offset: int
    size: int
    site: tuple[str, ...]
    call: str = ""
    step: int = 0

    @property
    def end(self) -> int:
        """The number behind the last one that was read."""
        return self.offset + self.size

    @property
    def numbers(self) -> str:
        """The place in words: `number 3 of torch, seed 7`, or `numbers 3 to 5 of torch, seed 7`."""
        span = f"number {self.offset}" if self.size == 1 else f"numbers {self.offset} to {self.end - 1}"
        return f"{span} of {self.stream}"


@dataclass(frozen=True)
class Trace:
    """A whole run.

    Attributes:
        steps: In order.
        output: Every emitted token.
        finish: Why the run ended: eos, stop, grammar, length, or None when it ran out of steps.
        accounting: The backend's counters, if it keeps any.
        forward_s: Seconds inside the backend's own forwards; never compared.
        shared: The traces of all requests, where the case has a session; the other fields are request 0's.
        fallbacks: Reasons why attention took a slower path, and ways that it chose (CHOSEN), each with its calls.
        attention_calls: Calls of attention, one for each layer of each forward; 0 where the backend does not count.
        speculated: Counts of drafted tokens, where the backend tells them and no `accounting`.
        ranks: The runs of all ranks, rank 0's first, where the target is sharded; other fields are rank 0's.
        prompt_logprobs: Those of the prompt's tokens but the first, by the target's unprocessed logits, if asked for.
        draws: The random numbers that the run read, in order, where they were recorded. Numbers of the case's tape are
            not among them (`Accepted.coins`).
    """

    steps: tuple[Step, ...]
    output: tuple[int, ...]
    finish: str | None
    accounting: Accounting | None = None
    forward_s: float = 0.0
    shared: "Shared | None" = None
    fallbacks: Mapping[str, int] = field(default_factory=dict)
    attention_calls: int = 0
    speculated: Speculated | None = None
    ranks: tuple[RankRun, ...] | None = None
    prompt_logprobs: tuple[float, ...] | None = None
    draws: tuple[Draw, ...] | None = None


@dataclass(frozen=True)
class Shared:
    """The part of a trace that shows all requests of a session.

    Attributes:
        requests: Each request's own trace, by number; None for a request that never entered.
        prompts: The prompt of each request as it entered, or empty; a fork's begins with the text of its source.
        accounts: Pages and columns after each action.
        events: What happened to launched steps, in order.
    """

    requests: tuple[Trace | None, ...]
    prompts: tuple[tuple[int, ...], ...]
    accounts: tuple[Account, ...] = ()
    events: tuple[Event, ...] = ()


def frozen(array: Any, dtype: Any = None) -> Array:
    """A read-only copy of `array`; traces hold such copies because they are cached and shared."""
    copy = np.array(array, dtype=dtype)
    copy.flags.writeable = False
    return copy
