"""The runner of ExecuTorch's plan for EAGLE-3 on the chains of a case, shown step by step.

The programs score and the runner decides, as the plan's runner does: chains of the head, or of another draft that needs
no states; the greedy walk, or rejection sampling against the draft's law; and a cache that is rewound by its length
alone.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from specverify.backends.adapt.drafting import Proposal, TreeDraft
from specverify.backends.adapt.eagle3_programs import DraftProgram, Eagle3Pair, open_pair
from specverify.backends.adapt.export.executorch_eagle3 import Lengths
from specverify.backends.adapt.export.executorch_program import ROPES
from specverify.backends.adapt.greedy_trees import cut_block, greedy_walk
from specverify.backends.adapt.rounds import Round, array, needs_round, trace_of_rounds
from specverify.backends.base import Declaration, Unsupported
from specverify.backends.engine.sampling.processing import truncate
from specverify.reference.case import Case
from specverify.reference.draft.eagle3 import Eagle3
from specverify.reference.draft.hidden import HeadInput
from specverify.reference.sampling import Sampling
from specverify.reference.trace import Stage, Trace
from specverify.reference.tree import RankTree, Tree

LENGTHS = Lengths()
"""The lengths of programs that are exported for a case."""

DECLARATION = Declaration(
    name="executorch-eagle3",
    device="cpu",
    reveals=frozenset({Stage.DRAFTED, Stage.SCORED, Stage.ACCEPTED, Stage.EMITTED}),
    dtypes=("float32",),
    drafts=("scripted", "ngram", "eagle3"),
    trees="chains",
    layout_settings=(),
    max_temperature=float("inf"),
    rules=("chain", "multi-round"),
    processes=("top_k", "top_p", "min_p"),
    stops=("max_new_tokens", "eos", "stop_tokens"),
    families=("llama", "pangu", "qwen2", "qwen3", "mistral"),
    ropes=ROPES,
    least_window=0,
    soft_caps="none",
    sinks=False,
    indexed=False,
    longest=LENGTHS.max_seq_len,
    variant_interval=8,  # a variant with other names of tokens is another target and another head to export
)


def draft_law(scores: Tensor, sampling: Sampling) -> Tensor:
    """The law of scores [..., vocabulary], float64, after temperature, top-k, top-p and min-p."""
    return truncate(scores.double() / sampling.temperature, sampling)


@dataclass
class HeadChain:
    """Chains of the head of a case, by the draft's program.

    Attributes:
        program: The draft's program.
        case: The case, whose draft is an EAGLE-3 head with a chain.
        rows: Rows of the cache that hold the target's states.
    """

    program: DraftProgram
    case: Case
    rows: int = 0

    def propose(self, tokens: list[int], hidden: Tensor, coins: torch.Generator) -> Proposal:
        """The chain under `tokens[-1]`, given the target's states `hidden` [tokens - 1, width].

        Rows of tokens that the target has verified since are run anew beside its states. Without a token that has a
        state, the root stays alone.
        """
        root = len(tokens) - 1
        if not root:
            return Proposal(Tree((0,), (tokens[-1],)))
        draft, sampling = self.case.draft, self.case.sampling
        assert isinstance(draft, Eagle3)
        (shape,) = draft.shapes
        assert isinstance(shape, RankTree)
        vocab_size = self.program.metadata.target_vocab_size
        target_ids = torch.tensor(self.program.metadata.d2t) + torch.arange(self.program.metadata.draft_vocab_size)
        first = self.rows
        head_input = HeadInput(draft.reads, first, tuple(tokens[first + 1 :]), array(hidden[first:]))
        scores, state = self.program.run_rows(tokens[first + 1 :], hidden[first:], first)
        self.rows = root
        draws = not sampling.greedy and sampling.draws != "top-k"
        token, draft_ids = [tokens[-1]], [0]
        logits = torch.full((len(shape), len(target_ids)), torch.nan)
        logits[0] = scores  # the root is scored where no token is drafted as well
        law = torch.zeros(len(shape), vocab_size)
        for node in range(1, len(shape)):
            if node > 1:
                scores, state = self.program.step(token[-1], state, root + node - 2)
                logits[node - 1] = scores
            drafted = torch.full((vocab_size,), -torch.inf).index_copy_(0, target_ids, scores)
            if draft.fixed:
                token.append(draft.fixed[node])
            elif draws:
                token.append(int(torch.multinomial(draft_law(drafted, sampling), 1, generator=coins)))
            else:
                token.append(int(torch.sort(drafted, descending=True, stable=True).indices[shape.rank[node]]))
            draft_ids.append(int((target_ids == token[-1]).nonzero()[0]))
            law[node] = draft_law(drafted, sampling) if draws else torch.eye(vocab_size)[token[-1]]
        proposal = None if sampling.greedy else law
        return Proposal(Tree(shape.parent, tuple(token)), logits, tuple(draft_ids), proposal, given=head_input)


class PlainChain:
    """Chains of a draft that reads no states."""

    def __init__(self, case: Case) -> None:
        self._draft = TreeDraft(case)

    def propose(self, tokens: list[int], hidden: Tensor, coins: torch.Generator) -> Proposal:
        """The chain under `tokens[-1]`."""
        return self._draft.propose(tokens)


def rejection_walk(
    tree: Tree, target_law: Tensor, proposal: Tensor | None, coins: torch.Generator
) -> tuple[list[int], int]:
    """The accepted nodes below the root of a chain, and the token after them, by rejection sampling.

    Args:
        tree: The chain.
        target_law: float64 [nodes, vocabulary].
        proposal: The law from which each node's token was drawn, [nodes, vocabulary]; None where none was.
        coins: The random numbers.
    """
    path = list[int]()
    for node in range(1, len(tree)):
        law, token = target_law[node - 1], tree.token[node]
        offered = torch.zeros_like(law) if proposal is None else proposal[node].double()
        if proposal is None:
            offered[token] = 1.0
        if float(torch.rand((), dtype=torch.float64, generator=coins)) * offered[token] >= law[token]:
            residual = (law - offered).clamp(min=0.0)
            return path, int(torch.multinomial(residual, 1, generator=coins))
        path.append(node)
    return path, int(torch.multinomial(target_law[len(path)], 1, generator=coins))


class Eagle3Runner:
    """A pair of programs on the chains of a case, one request at a time.

    Attributes:
        declaration: What it can do.
    """

    def __init__(self, declaration: Declaration, open_programs: Callable[[Case], Eagle3Pair]) -> None:
        self.declaration = declaration
        self._open_programs = open_programs

    def run(self, case: Case) -> Trace:
        """Decode `case`; each chain is one call of the target.

        Raises:
            Unsupported: A chain is longer than the programs verify, or the programs are those of other models.
            UnusableProgram: A program breaks the contract.
        """
        pair = self._open_programs(case)
        self._check(case, pair)
        head = isinstance(case.draft, Eagle3)
        assert pair.draft is not None or not head
        draft = HeadChain(pair.draft, case) if head and pair.draft is not None else PlainChain(case)
        coins = torch.Generator().manual_seed(case.sampling.seed)
        ends = {*case.stops.eos, *case.stops.stop_tokens}
        room = case.stops.room(len(case.prompt))
        tokens = list(case.prompt)
        rounds = list[Round]()
        output = list[int]()
        hidden = torch.zeros(0, pair.target.metadata.width)
        if case.prefix:
            prefix_states = pair.target.prefill(case.prefix, 0, head)
            hidden = prefix_states if head else hidden
        while needs_round(case, rounds, output):
            now = Round(draft.propose(tokens, hidden, coins))
            tree = now.tree
            now.logits, states = pair.target.score(tree.token, len(tokens) - 1)
            if case.sampling.greedy:
                now.path, now.bonus = greedy_walk(tree, now.logits)
            else:
                now.law = draft_law(now.logits, case.sampling)
                now.path, now.bonus = rejection_walk(tree, now.law, now.proposal.proposal, coins)
            if head:
                now.hidden = states
                hidden = torch.cat([hidden, states[: len(now.path) + 1]])
            emitted_tokens = cut_block([*(tree.token[node] for node in now.path), now.bonus], room - len(output), ends)
            rounds.append(now)
            output += emitted_tokens
            tokens += emitted_tokens
        return trace_of_rounds(case, rounds, tuple(output))

    def _check(self, case: Case, pair: Eagle3Pair) -> None:
        """Refuse a case that is not of these programs."""
        meta = pair.target.metadata
        reads = case.draft.reads
        if meta.vocab_size != case.model.vocab_size:
            raise Unsupported(
                f"{pair.target.name} has a vocabulary of {meta.vocab_size}, and the model has one of "
                f"{case.model.vocab_size}"
            )
        if reads is not None and reads.layers != meta.hidden_state_layers:
            raise Unsupported(
                f"{pair.target.name} hands over states of layers {list(meta.hidden_state_layers)}, and the head reads "
                f"{list(reads.layers)}"
            )
        if case.most_nodes > meta.num_speculative_tokens + 1:
            raise Unsupported(
                f"a chain of {case.most_nodes - 1} drafted tokens; {pair.target.name} verifies "
                f"{meta.num_speculative_tokens} (get_num_speculative_tokens)"
            )
        if case.longest > meta.max_seq_len:
            raise Unsupported(
                f"{case.longest} tokens; the cache of {pair.target.name} has {meta.max_seq_len} slots (get_max_seq_len)"
            )


def executorch_eagle3(
    target: str | Path, draft: str | Path, name: str = "executorch-eagle3"
) -> Callable[[], Eagle3Runner]:
    """A factory of the backend that runs two programs of yours, for `--model` and `--draft` of what they were made of.

    The programs follow ExecuTorch's plan for EAGLE-3 (pytorch/executorch#19784); `save_executorch_eagle3` writes such
    ones. The target has the methods `target_prefill`, `target_decode` and `target_verify`, the draft `draft_prefill`
    and `draft_decode`. Both have methods without inputs that say what they are: `get_hidden_state_layers`,
    `get_hidden_state_size`, `get_kv_strategy` (`position-overwrite`), `get_max_seq_len`, `get_max_prefill_chunk`,
    `get_num_speculative_tokens` and `get_max_batch_size` (1). The target adds `get_vocab_size` and
    `get_prefill_states` (`last` or `all`), the draft `get_target_vocab_size`, `get_draft_vocab_size` and `get_d2t`.
    `specverify.backends.adapt.eagle3_programs` has the shapes. All are checked when the backend is opened: a method
    that is missing, a mismatch and a batch above one end the command with one line and exit code 3.

    Args:
        target: The target's program.
        draft: The draft's program; it may be the same file.
        name: The name of the backend.
    """

    def open_() -> Eagle3Runner:
        pair = open_pair(target, draft)
        declaration = replace(
            DECLARATION,
            name=name,
            families=None,
            ropes=None,
            longest=pair.target.metadata.max_seq_len,
            variant_interval=1,
        )
        return Eagle3Runner(declaration, lambda case: pair)

    return open_
