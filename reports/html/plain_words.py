"""Plain words for strangers: stages, groups of invariants, what to do next."""

from specverify.reference.trace import Stage

STAGES: dict[Stage, tuple[str, str]] = {
    Stage.DRAFTED: (
        "the draft proposes a tree of tokens",
        "the code of the draft: its cache, its positions, and how it ranks and keeps candidates",
    ),
    Stage.LOWERED: (
        "the tree becomes index arrays and a mask",
        "the code that builds masks, positions, parents and slots from the tree",
    ),
    Stage.ATTENDED: (
        "attention runs over the committed tokens and the tree",
        "the attention kernel and its call: mask, lengths, scale, heads and page tables",
    ),
    Stage.SCORED: (
        "the target model scores every node of the tree",
        "the forward after attention, and the processing of logits: temperature, top-p, penalties",
    ),
    Stage.ACCEPTED: (
        "drafted tokens are accepted or rejected",
        "the verify kernel or the sampler: the walk down the tree, and the draws at each node",
    ),
    Stage.EMITTED: (
        "accepted tokens go into the output",
        "the code that appends tokens and looks for stops, limits and end tokens",
    ),
    Stage.COMMITTED: (
        "the keys and values of accepted tokens are kept",
        "the commit of the KV cache: which rows are moved, where to, and which length is left",
    ),
}
"""For each stage what happens in it, and where in an engine to look when it goes wrong."""

GROUPS: dict[str, tuple[str, str]] = {
    "structure": ("lowered", "The tree, as index arrays and mask, says what the tree says."),
    "attention": ("attended and scored", "Each node computes what its own path gives, and nothing else."),
    "acceptance": ("accepted", "The right drafted tokens are accepted, or with the right probabilities."),
    "cache": ("committed", "The KV cache holds what was emitted, and nothing of what was rejected."),
    "draft": ("drafted", "The draft proposes what it proposes from scratch."),
    "lossless": ("the whole output", "The output is what the target alone would give."),
    "pair": ("the whole output", "The output is the one of the reference backend."),
}
"""For each prefix of invariants the stages that it looks at, and its promise in one sentence."""

VERDICTS = {
    "agree": ("Agrees", "{name} gives what the target model alone would give, wherever it could be judged."),
    "differ": ("Differs", "{name} does not give what the target model alone would give."),
    "unjudged": ("Could not judge", "Too little of {name} was compared to say yes or no. This is no pass."),
}
"""For each outcome its headline and one sentence."""

WHAT = (
    "A draft model proposes a tree of tokens, and the target model checks the whole tree at once. That must give the "
    "same text, or the same probabilities, as the target model alone."
)
"""The thing that is judged, for somebody who meets speculative decoding here."""


def steps_of(stage: Stage, is_known: bool = True) -> list[str]:
    """The advice on a failure that began at `stage`, after the command that replays it."""
    if not is_known:
        return ["Look at the last lines that the engine printed: it broke before a stage could be compared."]
    happens, look = STAGES[stage]
    return [
        f"The first difference is at the stage “{stage.word}”, where {happens}. Look at {look}.",
        "After the repair the replay says FIXED. Then run the whole command again: another fault may lie behind.",
    ]
