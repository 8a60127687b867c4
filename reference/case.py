"""Case: everything that decides a run, so that the run replays anywhere.

The id of a case is a digest of its content.
"""

import hashlib
import json
from dataclasses import dataclass, field, replace
from functools import cached_property

from specverify.reference.adapters import Adapter
from specverify.reference.architecture import Checkpoint, Model, Seeded
from specverify.reference.draft import Draft, Scripted, largest_tree_size
from specverify.reference.draft.head import Head
from specverify.reference.files.json_types import plain
from specverify.reference.images import Images, check_inside
from specverify.reference.layout import KvLayout
from specverify.reference.malformed import Malformed, under
from specverify.reference.parallel import RANKS, draft_refusal
from specverify.reference.rules import OMIT_DEFAULT
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.session import Session
from specverify.reference.tree import Tree

DTYPES = ("float64", "float32", "bfloat16", "float16")
SCHEMA = 1
"""Version of the case file format; a reader refuses later versions."""


@dataclass(frozen=True)
class Case:
    """One generation by tree speculation, with every choice already made.

    The last token of `prompt` is the pending root of the first step. The tokens before it are prefilled; the first
    verify forward writes the root's own KV.

    Attributes:
        model: The target.
        prompt: Token ids, at least one.
        draft: The draft that proposes the trees.
        layout: How KV is held and committed.
        sampling: How tokens are chosen.
        stops: Where the output ends.
        dtype: Working dtype of the engine; the oracle rounds the weights to it and computes in float64.
        steps: Most verify steps; 0 runs until a stop.
        session: Other requests beside this one, and the actions on all of them; None runs this request alone.
        ranks: Number of ranks over which heads, inner width and vocabulary of the target are sharded.
        spread: Whether in place of this every rank holds the whole target, and the requests are shared out among them.
        draft_ranks: Number of the first ranks that have the draft, each with a part of it: they alone draft and hold
            its KV, and rank 0 sends the tree and the draft's laws to all (vLLM's `draft_tensor_parallel_size`). A draft
            without weights is rank 0's. 0 where every rank has the whole draft and asks it for itself.
    """

    model: Model
    prompt: tuple[int, ...]
    draft: Draft = Scripted()
    layout: KvLayout = KvLayout()
    sampling: Sampling = Sampling()
    stops: Stops = Stops()
    dtype: str = "float32"
    steps: int = 0
    # Cases that differ in nothing else are few, and the hash of a session takes as long as that of all other fields.
    session: Session | None = field(default=None, hash=False, metadata=OMIT_DEFAULT)
    ranks: int = field(default=1, metadata=OMIT_DEFAULT)
    spread: bool = field(default=False, metadata=OMIT_DEFAULT)
    draft_ranks: int = field(default=0, metadata=OMIT_DEFAULT)

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise Malformed("dtype", f"{self.dtype!r} is none of {', '.join(DTYPES)}")
        if self.steps < 0:
            raise Malformed("steps", f"{self.steps} is negative")
        self._check_ranks()
        self._check_rounding()
        if not self.prompt:
            raise Malformed("prompt", "empty; the pending root is its last token")
        vocab = self.model.vocab_size
        for field_path, tokens in self._token_fields():
            for i, token in enumerate(tokens):
                if not 0 <= token < vocab:
                    raise Malformed(f"{field_path}[{i}]", f"{token} is not in the vocabulary of {vocab}")
        if self.session is None:
            with under("model"):
                check_inside(self.model.images, self.prompt)
        self._check_sampling()
        self._check_stops()
        with under("draft"):
            self.draft.check(self.prompt[-1])
            self.draft.check_target(self.model)
        drafter = self.draft.model
        if drafter is not None and drafter.vocab_size != vocab:
            raise Malformed("draft.model", f"its vocabulary of {drafter.vocab_size} is not the target's {vocab}")
        self._check_reads()
        if drafter is not None and (drafter.adapter is not None or drafter.images):
            raise Malformed("draft.model", "has an adapter or images; only targets have them")
        if self.longest > self.max_positions:
            raise Malformed("prompt", f"needs up to {self.longest} positions; the model admits {self.max_positions}")
        if drafter is not None and self.longest > max_positions(drafter):
            raise Malformed(
                "draft.model", f"needs up to {self.longest} positions; the draft admits {max_positions(drafter)}"
            )
        self._check_pages()
        if self.session is not None:
            self._check_session(self.session)

    def _check_rounding(self) -> None:
        """Refuse stored dtypes where ranks share out the columns, and where keys have others behind them."""
        if self.layout.kv_dtype and self.ranks > 1:
            raise Malformed("layout.kv_dtype", f"{self.layout.kv_dtype} on {self.ranks} ranks; one rank stores so")
        if self.layout.kv_dtype and self.model.indexed:
            raise Malformed("layout.kv_dtype", f"{self.layout.kv_dtype} of a model with index keys behind its keys")

    def _check_ranks(self) -> None:
        """Refuse numbers of ranks that no engine has, and a draft that cannot be cut into so many parts."""
        numbers = ", ".join(map(str, RANKS))
        if self.ranks not in RANKS:
            raise Malformed("ranks", f"{self.ranks} is none of {numbers}")
        if self.spread and self.ranks == 1:
            raise Malformed("spread", "one rank has all requests: name more ranks")
        if self.spread and self.layout.state_slots:
            raise Malformed("layout.state_slots", "requests spread over ranks share no pool of recurrent states")
        if not self.draft_ranks:
            return
        if self.draft_ranks not in RANKS:
            raise Malformed("draft_ranks", f"{self.draft_ranks} is none of 0, {numbers}")
        if self.ranks == 1 or self.spread:
            owner = "requests spread over ranks take their drafts along" if self.spread else "one rank has the draft"
            raise Malformed("draft_ranks", f"{owner}: shard the target over more ranks")
        if self.draft_ranks > self.ranks:
            raise Malformed("draft_ranks", f"{self.draft_ranks} is more than the {self.ranks} ranks of the target")
        if (refused := draft_refusal(self.draft, self.draft_ranks)) is not None:
            raise Malformed("draft_ranks", refused)

    def _check_reads(self) -> None:
        """Refuse a draft that reads hidden states of layers that the target does not have."""
        reads = self.draft.reads
        if reads is not None and isinstance(self.model, Seeded):
            layers = self.model.architecture.layers
            if max(reads.layers, default=0) >= layers:
                raise Malformed("draft.reads", f"{reads}: the target has layers 0 to {layers - 1}")

    def _check_pages(self) -> None:
        """Refuse a free list that is too short for this request even when it runs alone."""
        layout = self.layout
        if layout.pages and layout.pages_for(self.longest + 1) > len(layout.pages):
            raise Malformed(
                "layout.pages",
                f"out of pages: {len(layout.pages)} of {layout.page_size} columns, the request may need "
                f"{layout.pages_for(self.longest + 1)}",
            )

    def _check_session(self, session: Session) -> None:
        """Check that every mate, and every request after a switch of drafts, is a valid case of its own."""
        for number in range(1, len(session.mates) + 1):
            with under(f"session.mates[{number - 1}]"):
                self.alone(number)
                _check_no_batches(session.mates[number - 1].draft)
        _check_no_batches(self.draft)
        unlike = next((i for i, mate in enumerate(session.mates) if mate.draft != self.draft), None)
        if session.continuous and unlike is not None:
            # Such an engine is opened with its draft.
            raise Malformed(f"session.mates[{unlike}].draft", "requests of an engine that batches by itself share one")
        if self.spread and (
            session.overlapped or any(draft.shared or draft.dispatch is not None for draft in self._drafts)
        ):
            # Such a step, or draft, follows from requests that other ranks hold.
            raise Malformed("spread", "a draft shares a trie or has trees by batch size, or steps are launched")
        if session.early and any(draft.shared or draft.dispatch is not None for draft in self._drafts):
            # Such a draft needs the texts, or the batches, of steps whose results are still on the way.
            raise Malformed("session.actions", "launch, first: a draft shares a trie, or has trees by batch size")
        for i, action in enumerate(session.actions):
            if action.draft is not None:
                request = self.alone(action.requests[0])
                # The draft's tree size sets the stride of the tape (`specverify.reference.tape`): another draft would
                # move every later coin.
                if not request.sampling.greedy:
                    raise Malformed(f"session.actions[{i}]", "a request that samples keeps its draft: its coins do")
                if action.draft.shared:
                    raise Malformed(f"session.actions[{i}].draft", "a request shares a trie from its start, or never")
                with under(f"session.actions[{i}]"):
                    replace(request, draft=action.draft)
                    _check_no_batches(action.draft)

    def alone(self, number: int = 0, before: tuple[int, ...] = ()) -> "Case":
        """Request `number` of the session as a case of its own, with the tokens `before` in front of its prompt."""
        if number == 0 or self.session is None:
            text = before + self.prompt
            model = model_of_request(self.model, self.model.adapter, self.model.images, text)
            return replace(self, model=model, prompt=text, session=None)
        mate = self.session.mates[number - 1]
        text = before + mate.prompt
        return replace(
            self,
            model=model_of_request(self.model, mate.adapter, mate.images, text),
            prompt=text,
            draft=mate.draft,
            sampling=mate.sampling,
            stops=mate.stops,
            steps=0,
            session=None,
        )

    def _check_sampling(self) -> None:
        """Raise Malformed where every token may be banned, or the rule cannot verify a tree of this draft."""
        grammar = self.sampling.grammar
        if grammar is not None and len(grammar.words) != self.model.vocab_size:
            mismatch = f"{len(grammar.words)} words for a vocabulary of {self.model.vocab_size}"
            raise Malformed("sampling.grammar.words", mismatch)
        if any(token in self.stops.eos for marker in self.sampling.grammar_markers for token in marker):
            raise Malformed("sampling.grammar.markers", "an end token stands in a marker, and nothing would follow it")
        banned = {word[-1] for word in self.sampling.bad_words}
        banned |= {*self.stops.eos, *self.stops.stop_tokens} if self.sampling.min_tokens else set()
        if len(banned) >= self.model.vocab_size:
            raise Malformed("sampling", "bad_words and min_tokens may ban the whole vocabulary at once")
        if not self.sampling.greedy:
            if (refused := self.sampling.rule.refuses(self.draft.branches)) is not None:
                raise Malformed("sampling.rule", refused)
            if (lossy := self.draft.refuses_draws(self.sampling.draws)) is not None:
                raise Malformed("sampling.draws", lossy)

    def _check_stops(self) -> None:
        """Raise Malformed where no token may be emitted, or a token of the vocabulary has no text."""
        stops, vocab = self.stops, self.model.vocab_size
        if stops.pieces and len(stops.pieces) != vocab:
            raise Malformed("stops.pieces", f"{len(stops.pieces)} texts for a vocabulary of {vocab}")
        if stops.max_length and stops.max_length <= len(self.prompt):
            raise Malformed(
                "stops.max_length", f"{stops.max_length} leaves nothing to emit after a prompt of {len(self.prompt)}"
            )
        if stops.max_length > self.max_positions:
            raise Malformed("stops.max_length", f"{stops.max_length} is more than the model's {self.max_positions}")

    @property
    def drafting_ranks(self) -> int:
        """Number of the first ranks that ask the request's draft for a tree; the others follow it."""
        if not self.draft_ranks:
            return self.ranks
        return self.draft_ranks if self.draft.has_weights else 1

    @property
    def most_nodes(self) -> int:
        """Number of nodes of the largest tree of any step."""
        return largest_tree_size(self.draft)

    @property
    def checkpoints(self) -> tuple[Checkpoint, ...]:
        """The checkpoints that a run opens, the target's first, then those of drafts; each digest once."""
        models = [self.model, *(draft.model for draft in self._drafts)]
        checkpoints: dict[str, Checkpoint] = {}
        for model in models:
            if isinstance(model, Checkpoint):
                checkpoints.setdefault(model.digest, model)
        return tuple(checkpoints.values())

    @property
    def heads(self) -> tuple[Head, ...]:
        """The heads with stored weights that a run opens; each digest once."""
        heads: dict[str, Head] = {}
        for draft in self._drafts:
            if isinstance(draft, Head) and draft.files is not None:
                heads.setdefault(draft.files.digest, draft)
        return tuple(heads.values())

    @property
    def _drafts(self) -> tuple[Draft, ...]:
        """The drafts of all requests, and those to which a session switches."""
        if self.session is None:
            return (self.draft,)
        switched = (action.draft for action in self.session.actions if action.draft is not None)
        return (self.draft, *(mate.draft for mate in self.session.mates), *switched)

    def _token_fields(self) -> list[tuple[str, tuple[int, ...]]]:
        fields = [("prompt", self.prompt), ("stops.eos", self.stops.eos), ("stops.stop_tokens", self.stops.stop_tokens)]
        fields += [(f"sampling.bad_words[{k}]", word) for k, word in enumerate(self.sampling.bad_words)]
        fields += [(f"draft.{field_path}", tokens) for field_path, tokens in self.draft.token_fields()]
        return fields

    @property
    def max_positions(self) -> int:
        """Longest sequence that the target admits, in tokens."""
        return max_positions(self.model)

    @property
    def longest(self) -> int:
        """Most positions that the run may touch: prompt, output, and a tree below the last token."""
        return len(self.prompt) + self.stops.room(len(self.prompt)) + self.draft.height

    @property
    def drafting_model(self) -> Model | None:
        """The model of the draft, with the images of the prompt where it sees them; None without a model."""
        model = self.draft.model
        if not self.draft.sees_images or not self.model.images or not isinstance(model, Seeded):
            return model
        return replace(model, images=self.model.images)

    @property
    def drafting_case(self) -> "Case":
        """The request with the model of its draft as the target, which sees what the draft sees, and no draft.

        Such a model stores its columns as they are.
        """
        model = self.drafting_model
        assert model is not None, "a draft with a model"
        return replace(self, model=model, draft=Scripted(), layout=replace(self.layout, kv_dtype=""))

    @property
    def may_wait(self) -> bool:
        """Whether requests of the session may wait: the pages of the pool are listed, or there are fewer slots."""
        requests = 1 + len(self.session.mates if self.session is not None else ())
        return bool(self.layout.pages) or 0 < self.layout.state_slots < requests

    @property
    def prefix(self) -> tuple[int, ...]:
        """The tokens that are prefilled: the prompt without the pending root."""
        return self.prompt[:-1]

    @cached_property
    def id(self) -> str:
        """First 12 hex digits of the SHA-256 of the case's canonical JSON, without the path of a checkpoint."""
        content = plain(self)
        # Checkpoints and heads are known by their digests: the same files in another directory make the same case.
        for holder in (content, content["draft"]):
            if isinstance(holder.get("model"), dict):
                holder["model"].pop("source", None)
        if "files" in content["draft"]:
            content["draft"]["files"].pop("source")
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]

    def rebased(self, context: tuple[int, ...], tree: Tree) -> "Case":
        """One step of this case from a state reached on the way: `context` committed, `tree` proposed.

        Only the model's longest sequence limits the step, so the whole accepted block is emitted. The step decodes
        greedily.
        """
        tokens = (*context, tree.token[0])
        # `longest` counts output and tree after the prompt: near the model's last position fewer tokens may be emitted.
        room = self.max_positions - len(tokens) - tree.height
        stops = Stops(max_new_tokens=max(1, min(tree.height + 1, room)))
        # An empty free list means as many pages as are needed: the case's own was drawn for another length. `tree` is
        # judged as it was drafted, so nothing cuts it to its chunk.
        return replace(
            self,
            prompt=tokens,
            draft=Scripted((tree,)),
            layout=replace(self.layout, pages=(), stay_in_chunk=False),
            sampling=Sampling(),
            stops=stops,
            steps=1,
            session=None,
        )

    def plain_decode(self) -> "Case":
        """The same request without speculation: every step proposes the bare root."""
        return replace(self, draft=Scripted(), steps=0, session=None)


def _check_no_batches(draft: Draft) -> None:
    """Refuse the batch sizes of a draft in a session."""
    if draft.dispatch is not None and draft.dispatch.batches:
        raise Malformed("draft.shape.batches", "in a session the actions decide how many requests step together")


def max_positions(model: Model) -> int:
    """Longest sequence that `model` admits, in tokens."""
    if isinstance(model, Checkpoint):
        return model.max_positions
    assert isinstance(model, Seeded)
    return model.architecture.max_positions


def model_of_request(model: Model, adapter: Adapter | None, images: Images, text: tuple[int, ...]) -> Model:
    """`model` with this adapter, and with those of `images` that end before the last token of `text`.

    A fork's twin has a text that begins with its source's: its images are told by their places in that text.
    """
    images = tuple(image for image in images if image.end < len(text))
    if (model.adapter, model.images) == (adapter, images):
        return model
    if not isinstance(model, Seeded):
        raise Malformed("adapter", "only built-in models have adapters and images")
    return replace(model, adapter=adapter, images=images)


def marks(model: Model) -> object:
    """What beside tokens the keys and values of a request on `model` depend on; None for tokens alone."""
    return (model.adapter, model.images) if model.images else model.adapter
