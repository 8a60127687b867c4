"""Abilities: the cases that an engine takes.

Cases are drawn within the abilities of the engine under test, and a case outside them is declined with a reason in one
line. The declaration of a backend (`specverify.backends.base.Declaration`) is its abilities and a few facts on the
backend itself.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from specverify.reference.architecture import Architecture, Seeded
from specverify.reference.case import Case
from specverify.reference.draft.layer_head import ALIGNMENTS, FIRST_TOKENS, LayerHead
from specverify.reference.draft_trees import TREE_KINDS
from specverify.reference.family import FAMILIES
from specverify.reference.layout import PAGE_STATES, KvLayout
from specverify.reference.parallel import sharding_refusal
from specverify.reference.rules import DRAWS
from specverify.reference.sampling import Sampling
from specverify.reference.session import ACTIONS, EARLY

PROCESSING = (
    "repetition_penalty", "presence_penalty", "frequency_penalty", "bad_words", "min_tokens", "processors", "grammar",
    "grammar_markers", "top_k", "top_p", "min_p",
)  # fmt: skip
"""The fields of `Sampling` that process logits, and grammars that begin behind a marker."""

LAYOUT_SETTINGS = (
    "padded_nodes", "prefill_chunk", "overhang", "draft_sync", "stay_in_chunk", "poison", "latent", "first_tier",
    "second_tier", "branches", "left_pad", "mixed_prefill", "draft_page_size", "state_slots",
    "kv_dtype",
)  # fmt: skip
"""The fields of `KvLayout` that an engine may obey in any kind of layout, or in any with pages."""

SOFT_CAPS = ("any", "published", "none")
"""The values of `Abilities.soft_caps`."""

LOGPROBS = ("raw", "masked", "processed")
"""The values of `Abilities.logprobs`."""

GRAMMAR_WORDS = ("any", "tokenizer")
"""The values of `Abilities.grammar_words`."""

TREES = ("any", "ordered", "chains")
"""The values of `Abilities.trees`."""

ENDS = ("eos", "stop_tokens", "stop_strings", "max_length")
"""The fields of `Stops` that end an output before its budget of tokens."""


CHOICES = ("best", "tempered", "law")
"""How an engine chooses the tokens of its own drafts: the draft's best token; a draw from the draft's law at the
request's temperature; or a draw from that law after all processing of the request."""

CHAIN_RULES = ("rejection", "match")
"""How an engine of chains accepts a drafted token: by rejection sampling, or where the target draws the same token."""


@dataclass(frozen=True)
class Chains:
    """The chains that an engine drafts with a draft model in its own way, which decide how many tokens it accepts.

    Attributes:
        tokens: Drafted tokens of a chain, in every step the same number.
        choice: One of CHOICES.
        rule: One of CHAIN_RULES.
    """

    tokens: int
    choice: str = "best"
    rule: str = "rejection"


@dataclass(frozen=True, kw_only=True)
class Abilities:
    """The cases that an engine takes.

    An empty tuple of drafts, rules or draws says that the engine proposes and accepts tokens in its own way: its cases
    then hold the plain value, which the engine ignores.

    Attributes:
        dtypes: Working dtypes, the default first.
        bare_rows: Whether in a step or a launch some requests may go without their drafts (`Action.bare`).
        spread: Whether requests are shared out among ranks that hold the whole target.
        ranks: Numbers of ranks over which the engine shards a target (`specverify.reference.parallel.RANKS`).
        draft_ranks: Whether the first of a target's ranks may have the draft alone (`Case.draft_ranks`).
        drafts: Kinds of draft that the engine runs (scripted, ngram, model, ...); empty if the engine brings its own
            draft, or has none. Its cases then propose no tree.
        draft_trees: Whether the engine fills the tree of a draft model, from the part of the vocabulary that the draft
            names. False for one that takes the model alone and proposes in its own way: such drafts are near the
            target, so that many of their tokens are accepted.
        chains: The chains of an engine that shows tokens and counts of drafted tokens; None where their length is not
            fixed or not known.
        tree_kinds: Kinds of tree that the engine's drafts fill, of `specverify.reference.draft_trees.TREE_KINDS`.
        first_tokens: What becomes of the first token in the engine's heads with rows, of
            `specverify.reference.draft.layer_head.FIRST_TOKENS`.
        alignments: The rows that such a head runs anew after a verification, of ALIGNMENTS there.
        page_states: How a draft that reads hidden states comes by those of known pages, of
            `specverify.reference.layout.PAGE_STATES`.
        trees: Trees that the engine verifies: `any`; `ordered`, where each parent comes before its children; or
            `chains`, which are ordered and have no siblings.
        commits: KvLayout.commit values that the engine implements.
        layouts: KvLayout.kind values that the engine implements; an engine with a cache of its own declares `branch`
            and no `layout_settings`.
        layout_settings: Fields of KvLayout beside kind, commit and pages that the engine obeys.
        sessions: Whether the engine runs several requests at once and plays a case's session.
        actions: Kinds of action that its sessions know; add is always among them, and step where a caller can step.
        most_requests: Most requests of a session; 0 for any number.
        continuous: Whether the engine batches by itself (`specverify.reference.session.Session.continuous`); its
            sessions are of no other kind.
        settings: Settings in which an engine that batches by itself can be opened beside the plain one, in its own
            words (`specverify.reference.session.Session.setting`).
        own_seed: Whether the engine promises that a request's tokens follow its own seed, whatever requests run beside
            it.
        own_drafts: Whether the engine promises that a greedy request drafts by its own text, the same tokens whatever
            requests run beside it and in every setting but `cutting_settings`.
        cutting_settings: Settings in which chains are cut or left out, by a budget of tokens or for want of pages.
        takes_tape: Whether every uniform comes from the case's tape, at the places that `specverify.reference.tape`
            gives.
        greedy: Whether greedy cases are drawn; False where sampling alone is under test. Variants of a case may be
            greedy all the same, and none is declined for it.
        max_temperature: The highest temperature; 0.0 for an engine that decodes greedily only.
        rules: Acceptance rules for temperatures above 0; empty if the engine has a lossless rule of its own.
        draws: How a draft names siblings; empty as with `rules`.
        processes: The processing of logits that the engine applies: True for all of PROCESSING, or some of its names.
        grammar_words: The words over which the engine takes grammars: `any`; or `tokenizer`, where it reads them from
            the tokenizer of the target's directory. Words of built-in models are then distinct, and those of all cases
            with so many tokens alike (`specverify.reference.spelling`); a text's end is the only stop of a request
            with a grammar, since an engine with one list of stops cannot tell an end from a token that stops.
        stops: Fields of `Stops` that the engine obeys.
        families: Families of built-in models that the engine loads; None for all.
        quantised: Whether the engine runs targets, draft models and heads with quantised weights.
        adapters: Whether a request of the engine may name a low-rank adapter of the target.
        prompt_logprobs: Whether the engine tells the log-probabilities of a prompt's tokens where a request asks for
            them.
        images: Whether a prompt may have blocks of tokens with positions on three axes, and embeddings of their own.
        draft_images: Whether drafts may see these blocks (`Draft.sees_images`).
        soft_caps: Models with a soft cap of attention that the engine runs: `any`; `published`, where the family has
            one (no class of transformers computes the others); or `none`.
        sinks: Whether the engine runs models whose heads have attention sinks (gpt-oss).
        indexed: Whether the engine runs models whose rows attend to columns that an indexer chooses (DeepSeek-V3.2,
            GLM-5), and takes the first of columns with equal scores, by position. Nobody is asked who does not say so:
            the order of equal scores is left open by torch's topk.
        unequal_widths: Whether the engine runs models whose heads of values have another width than those of keys
            (latent attention).
        least_window: The narrowest sliding window, in tokens, of the models that the engine runs; 0 if it runs no model
            with a window or with chunks.
        ropes: Kinds of rotary embedding (`specverify.reference.architecture.ROPE_KINDS`) of the built-in models that
            the engine runs; None for all.
        head_multiple: What the width of a head of the built-in models that the engine runs is a multiple of; above 2,
            models with wider heads are drawn.
        longest: Most tokens of prompt, output and a tree below the last token; 0 for what the model admits.
        least_prompt: Fewest tokens of a prompt.
        seeded: Whether a request's seed decides what it draws, so that the same request again gives the same tokens.
        logprobs: The law whose log-probabilities the engine reports, if it reports any: `raw`, of the model's own
            logits; `masked`, of these behind the mask of the request's grammar; or `processed`, after temperature and
            processing, of which a greedy request has what changes logits, and nothing that drops tokens.
        processed_settings: Those of `settings` in which they are `processed`, whatever `logprobs` says.
        same_seed: Whether the engine promises that the same seed gives the same tokens with and without a draft.
        interruptible: Whether a single run can be ended after any of its steps (`Case.steps`), as by a caller who
            closes a stream. An engine with sessions names its interruptions in `actions`.
        same_bits: Whether the same request again gives the same bits of every number; False where a server's load or
            its cache of prompts may choose other kernels, which leaves tokens the same and rounds elsewhere.
    """

    dtypes: tuple[str, ...]
    ranks: tuple[int, ...] = (1,)
    bare_rows: bool = False
    spread: bool = False
    draft_ranks: bool = False
    drafts: tuple[str, ...] = ()
    draft_trees: bool = True
    chains: Chains | None = None
    tree_kinds: tuple[str, ...] = TREE_KINDS[:1]
    first_tokens: tuple[str, ...] = FIRST_TOKENS[:1]
    alignments: tuple[str, ...] = ALIGNMENTS[:1]
    page_states: tuple[str, ...] = PAGE_STATES[:1]
    trees: str = "any"
    commits: tuple[str, ...] = ("path",)
    layouts: tuple[str, ...] = ("branch",)
    layout_settings: tuple[str, ...] = LAYOUT_SETTINGS
    sessions: bool = False
    actions: tuple[str, ...] = tuple(action for action in ACTIONS if action not in EARLY)
    most_requests: int = 0
    continuous: bool = False
    settings: tuple[str, ...] = ()
    own_seed: bool = False
    own_drafts: bool = False
    cutting_settings: tuple[str, ...] = ()
    takes_tape: bool = False
    greedy: bool = True
    max_temperature: float = 0.0
    rules: tuple[str, ...] = ()
    draws: tuple[str, ...] = DRAWS
    processes: bool | tuple[str, ...] = False
    grammar_words: str = "any"
    stops: tuple[str, ...] = ("max_new_tokens", "eos", "stop_tokens")
    families: tuple[str, ...] | None = None
    quantised: bool = False
    adapters: bool = False
    prompt_logprobs: bool = False
    images: bool = False
    draft_images: bool = False
    soft_caps: str = "any"
    sinks: bool = True
    indexed: bool = False
    unequal_widths: bool = True
    least_window: int = 1
    ropes: tuple[str, ...] | None = None
    head_multiple: int = 2
    longest: int = 0
    least_prompt: int = 1
    seeded: bool = True
    logprobs: str = "raw"
    processed_settings: tuple[str, ...] = ()
    same_seed: bool = False
    interruptible: bool = False
    same_bits: bool = True

    @property
    def processed(self) -> tuple[str, ...]:
        """The fields of `Sampling` that the engine applies to logits."""
        if isinstance(self.processes, bool):
            return PROCESSING if self.processes else ()
        return tuple(self.processes)

    def logprobs_in(self, setting: str) -> str:
        """The law of log-probabilities in one of `settings`, or in the plain one: one of LOGPROBS."""
        return "processed" if setting in self.processed_settings else self.logprobs

    def outside(self, case: Case) -> str | None:
        """The first thing that the case asks beyond the abilities, as the end of "it declares no ...", or None.

        In a session every request is checked, and a request that switches drafts with each later draft too.
        """
        if case.session is None:
            return next(self._beyond(case), None)
        session = case.session
        if not self.sessions:
            return "sessions"
        if session.continuous != self.continuous:
            return "continuous batching" if session.continuous else "session whose steps name their batch"
        if session.setting and session.setting not in self.settings:
            return f"setting {session.setting}"
        if self.most_requests and 1 + len(session.mates) > self.most_requests:
            return f"session of {1 + len(session.mates)} requests"
        unknown_kind = next((action.kind for action in session.actions if action.kind not in self.actions), None)
        if unknown_kind is not None:
            return f"action {unknown_kind}"
        if not self.bare_rows and any(action.bare for action in session.actions):
            return "step in which some drafts are not asked"
        requests = [case.alone(number) for number in range(1 + len(session.mates))]
        switched_requests = [
            replace(requests[action.requests[0]], draft=action.draft) for action in session.actions if action.draft
        ]
        vocabularies = {request.sampling.grammar.words for request in requests if request.sampling.grammar is not None}
        if self.grammar_words == "tokenizer" and len(vocabularies) > 1:
            return "grammars over several tokenizers"
        return next((excess for request in (*requests, *switched_requests) for excess in self._beyond(request)), None)

    def not_loaded(self, architecture: Architecture) -> str | None:
        """The first thing that a built-in model has beyond the abilities, or None."""
        family = architecture.family
        if self.families is not None and family not in self.families:
            return f"model family {family}"
        capped = architecture.score_cap > 0
        if capped and (self.soft_caps == "none" or (self.soft_caps == "published" and not FAMILIES[family].soft_caps)):
            return f"soft cap of attention in a {family} model"
        if FAMILIES[family].sinks and not self.sinks:
            return f"attention sinks in a {family} model"
        if FAMILIES[family].indexed and not self.indexed:
            return f"columns that an indexer chooses in a {family} model"
        if architecture.value_dim != architecture.head_dim and not self.unequal_widths:
            return f"heads of values of another width than keys in a {family} model"
        if any(architecture.chunks) and not self.least_window:
            return "chunked attention"
        narrowest = min((window for window in architecture.windows if window), default=None)
        if narrowest is not None and (not self.least_window or narrowest < self.least_window):
            return f"sliding window of {narrowest} tokens"
        if self.ropes is not None and architecture.rope.kind not in self.ropes:
            return f"rotary embedding {architecture.rope.kind}"
        for layer in range(architecture.layers):
            if (width := architecture.layer_heads(layer).head_dim) % self.head_multiple:
                return f"head of width {width}"
        return None

    def _beyond(self, case: Case) -> Iterator[str]:
        """Each thing that a single request asks beyond the abilities."""
        if case.dtype not in self.dtypes:
            yield f"dtype {case.dtype}"
        if case.ranks not in self.ranks:
            yield f"run on {case.ranks} ranks"
        if case.spread and not self.spread:
            yield "requests spread over ranks"
        if case.draft_ranks and not self.draft_ranks:
            yield "draft on ranks of its own"
        if (
            isinstance(case.model, Seeded)
            and (alone := sharding_refusal(case.model.architecture, 1 if case.spread else case.ranks)) is not None
        ):
            yield alone
        if case.model.adapter is not None and (not self.adapters or case.ranks > 1):
            yield f"adapter on {case.ranks} ranks" if self.adapters else "adapter"
        if case.sampling.prompt_logprobs and (not self.prompt_logprobs or case.ranks > 1):
            yield f"prompt_logprobs on {case.ranks} ranks" if self.prompt_logprobs else "prompt_logprobs"
        if case.model.images and not self.images:
            yield "positions on three axes"
        if case.draft.sees_images and not self.draft_images:
            yield "a draft that sees images"
        if case.draft.TAG not in self.drafts and case.draft.shapes:
            yield f"{case.draft.TAG} draft"
        if case.draft.tree_kind not in self.tree_kinds:
            yield f"{case.draft.tree_kind} trees"
        yield from self._beyond_head(case)
        if case.draft.vocabulary and not self.draft_trees:
            yield "draft with a part of the vocabulary"
        if self.trees == "chains" and case.draft.branches:
            yield "trees that branch"
        if self.trees != "any" and any(not shape.ordered for shape in case.draft.shapes):
            yield "trees with a parent behind its child"
        if isinstance(case.model, Seeded) and (excess := self.not_loaded(case.model.architecture)) is not None:
            yield excess
        draft = case.draft.model
        if case.model.quantised and not self.quantised:
            yield f"target of {case.model.quantised} weights"
        if case.draft.in_bits and not self.quantised:
            yield f"draft of {case.draft.in_bits} weights"
        if isinstance(draft, Seeded) and (excess := self.not_loaded(draft.architecture)) is not None:
            yield f"draft model with {excess}"
        if self.longest and case.longest > self.longest:
            yield f"length of {case.longest} tokens"
        if len(case.prompt) < self.least_prompt:
            yield f"prompt of fewer than {self.least_prompt} tokens"
        yield from self._beyond_layout(case.layout)
        yield from self._beyond_sampling(case.sampling)
        yield from self._beyond_grammar(case)
        for name in ENDS:
            if getattr(case.stops, name) and name not in self.stops:
                yield name

    def _beyond_head(self, case: Case) -> Iterator[str]:
        draft = case.draft
        if draft.reads is not None and case.layout.page_states not in self.page_states:
            yield f"hidden states of known pages {case.layout.page_states}"
        if not isinstance(draft, LayerHead):
            return
        if draft.first_token not in self.first_tokens:
            yield f"head with its first token {draft.first_token}"
        if draft.alignment not in self.alignments:
            yield f"head with the alignment {draft.alignment}"
        if draft.own_rows:
            yield "prompt with rows of a head's own"

    def _beyond_layout(self, layout: KvLayout) -> Iterator[str]:
        if layout.kind not in self.layouts:
            yield f"KV layout {layout.kind}"
        if layout.commit not in self.commits:
            yield f"commit by {layout.commit}"
        default = {option.name: option.default for option in fields(layout)}
        for name in LAYOUT_SETTINGS:
            if name not in self.layout_settings and getattr(layout, name) != default[name]:
                yield f"KV layout with {name}"

    def _beyond_grammar(self, case: Case) -> Iterator[str]:
        grammar = case.sampling.grammar
        if grammar is None or self.grammar_words == "any":
            return
        if isinstance(case.model, Seeded) and len({*grammar.words}) < len(grammar.words):
            yield "grammar with two words alike"
        if not case.stops.eos:
            yield "grammar without an end token"
        if case.stops.stop_tokens:
            yield "grammar beside stop tokens"

    def _beyond_sampling(self, sampling: Sampling) -> Iterator[str]:
        # An engine that decodes greedily alone declares a maximum of 0.
        if sampling.temperature > self.max_temperature:
            yield f"sampling at temperature {sampling.temperature:g}"
        if not sampling.greedy:
            if self.rules and sampling.rule.name not in self.rules:
                yield f"acceptance rule {sampling.rule.name}"
            if self.draws and sampling.draws not in self.draws:
                yield f"draws {sampling.draws}"
        plain = Sampling()
        for name in PROCESSING:
            if getattr(sampling, name) != getattr(plain, name) and name not in self.processed:
                yield f"processing by {name}" if self.processed else "processing of logits"
