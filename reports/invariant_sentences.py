"""The sentence of each invariant whose findings need only one sentence."""

PLAIN: dict[str, str] = {
    "structure.parent-range": "The parent of {row} is given as {observed}; it must be {expected}.",
    "structure.depth-consistent": "{Row} is given depth {observed}; its parent puts it at depth {expected}.",
    "structure.validity-closed": (
        "{Row} is wrongly marked as valid or as padding: real rows are valid, and no valid row hangs from padding."
    ),
    "structure.ancestor-table": (
        "The ancestor table names {observed} as the ancestor of {row} at {depth}; walking up its parents gives "
        "{expected}."
    ),
    "structure.positions-are-depth": (
        "{Row} is placed at position {observed}; the committed length plus its depth is {expected}."
    ),
    "structure.positions-on-axes": (
        "{Column}{which} has the positions {observed} on time, height and width; the prompt's images put it at "
        "{expected}."
    ),
    "structure.links-walk-the-tree": (
        "The first-child and next-sibling links do not walk the tree: at {row} they lead to {observed} instead of "
        "{expected}."
    ),
    "attention.no-leakage": (
        "Changing only what {node} may not see changed its result: something leaks into it from outside its path."
    ),
    "attention.experts-best": (
        "{Row} went through the experts {observed}; by its own scores the best are {expected}{by}."
    ),
    "attention.columns-best": (
        "{Row} attended to the columns at positions {observed} of its text; by its own index scores the best are "
        "{expected}{by}."
    ),
    "attention.order-equivariant": "The same tree with its rows in another order gave {node} another result{by}.",
    "attention.tree-equals-chain": "Decoding {node} alone, after the tokens of its path, gave another result{by}.",
    "attention.subtree-removal": "Taking away nodes that {node} cannot see changed its result{by}.",
    "attention.padding-inert": (
        "Padding the tree with empty rows changed {node}{by}: padding must read and write nothing."
    ),
    "attention.prefix-split": (
        "The same tokens, split otherwise between what is cached already and what the forward computes, gave {node} "
        "another result{by}."
    ),
    "acceptance.greedy-walk": (
        "Walking the tree by the arg-max of the backend's own logits accepts {expected}; it accepted {observed}."
    ),
    "acceptance.support": (
        "At {node} the backend chose token {observed}, to which the target gives no probability; it allows {expected}."
    ),
    "acceptance.path-in-tree": (
        "The accepted nodes are no path of the tree: {node} must be {expected}; it is {observed}."
    ),
    "acceptance.superset-accepts-no-less": (
        "With further candidates in the tree the accepted path must be {expected}; it was {observed}."
    ),
    "acceptance.chain-degenerate": (
        "On a tree that is a single chain, acceptance must be that of plain speculation, {expected}; it was {observed}."
    ),
    "acceptance.vocabulary-permutation": (
        "Renaming the token ids must rename the outcome to {expected} and change nothing else; it gave {observed}."
    ),
    "acceptance.sampled-walk": (
        "By the coins of the tape, its own laws and its own proposals, the step must accept {expected}; it accepted "
        "{observed}."
    ),
    "acceptance.law-exact": (
        "Over all coins, acceptance of this step's tree gives {block} probability {observed}; its rule "
        "gives it {expected}{by}."
    ),
    "acceptance.law-joint": (
        "Over all coins, on a world of tables drawn for this case, the probability of {token} {context} is "
        "{observed}; it must be {expected}{by}."
    ),
    "acceptance.support-at-edges": (
        "With a coin at the end of its range, {token} was emitted at {position} though its probability is 0."
    ),
    "acceptance.renamed-law": (
        "Renaming the token ids of a world changed its law: {block} has probability {observed} instead "
        "of {expected}{by}."
    ),
    "acceptance.coins-once": ("What each coin decides must be {expected}; {coin} made {observed}."),
    "acceptance.streams-disjoint": (
        "Two draws for different purposes read the same random numbers ({side}): {observed}. Each needs {expected}; an "
        "engine that shares them by promise declares same_seed."
    ),
    "acceptance.proposal-consistent": (
        "The verifier is told that {node} was drawn with probability {observed} for {token}; it was drawn with "
        "{expected}{by}."
    ),
    "cache.isolation": (
        "The verify forward changed the {kind} at {slot} of the committed cache, which it may only read until the "
        "commit."
    ),
    "cache.untouched-slots": "The step changed the {kind} at {slot}, which it neither wrote nor moved.",
    "cache.stale-unreachable": (
        "Filling free, padded and stale cells with other numbers changed what came out{by}: {observed}. Something "
        "reads a cell that holds nothing."
    ),
    "attention.page-permutation": "The same columns in other pages gave other bits{by}: {observed}.",
    "cache.page-boundary": "The same columns, cut into pages elsewhere, gave other bits{by}: {observed}.",
    "cache.layout-equivalent": "This layout does not give what {expected} gives{by}: {observed}.",
    "attention.batch-mate-independent": (
        "In its session the request is not what it is alone: expected {expected}, got {observed}{by}."
    ),
    "lossless.schedule-independent": (
        "With the requests of each batch in another order, the request gave {expected} instead of {observed}."
    ),
    "lossless.interruption-isolated": (
        "What was done to another request changed this one: expected {expected}, got {observed}{by}."
    ),
    "lossless.takes-part": "The request did not take part as the actions say: expected {expected}, got {observed}.",
    "cache.allocator-conserves": (
        "The pages or slots do not add up after this action: expected {expected}, found {observed}."
    ),
    "cache.prefix-reuse": (
        "With a reused prefix the request gave {observed}; computing the prefix anew gives {expected}{by}."
    ),
    "draft.hidden-state-descriptor": (
        "The draft was given another hidden state at {position} than its descriptor names: expected {expected}, got "
        "{observed}{by}."
    ),
    "draft.switched": (
        "The request switched drafts; the draft that it has then scores {node} otherwise from scratch than it did{by}."
    ),
    "draft.shared": (
        "By the texts that entered the shared trie the request drafts {expected}; at {node} it drafted {observed}{by}."
    ),
    "draft.rollback": (
        "After its rejected nodes were rolled back, the draft is not as one that never saw them: expected {expected}, "
        "got {observed}{by}."
    ),
    "draft.dispatch": (
        "The table of trees by batch size gives {expected} to this step; the engine drafted {observed}."
    ),
    "draft.tree-top-m": (
        "By the scores of its draft a dynamic tree has {expected}; this one has, at {node}, {observed}{by}."
    ),
    "draft.stops": ("By the confidence of the draft, {node} has {expected}; in this tree it has {observed}{by}."),
    "draft.candidates": (
        "Below {node} the selector chose between the tokens {observed}; by the scores of their slot the best are "
        "{expected}{by}."
    ),
    "draft.vocabulary-map": (
        "The draft's own id at {node} stands for target token {expected}, but the node carries {observed}."
    ),
    "lossless.greedy-match": (
        "The output leaves the target's own greedy text at {position}: token {observed} instead of {expected}, and no "
        "near-tie excuses it{by}."
    ),
    "lossless.draft-independent": (
        "Another draft changed the text: at {position} the output is {observed} instead of {expected}; drafts may "
        "change only the speed."
    ),
    "lossless.stops": "The output does not end where the request says: expected {expected}, got {observed}.",
    "lossless.state-isolated": (
        "After another request on the same engine the same case gave {observed} instead of {expected}: state survives "
        "between requests."
    ),
    "lossless.accounting": (
        "The backend's counters do not add up to the steps it shows: expected {expected}, counted {observed}."
    ),
    "lossless.deterministic": "The same case run twice gave {observed} after {expected}: runs must repeat bit for bit.",
    "lossless.processors-per-node": (
        "At {node} the law gives {token} probability {observed}; temperature and processors, seeing that node's own "
        "path, give it {expected}{by}."
    ),
    "lossless.grammar-per-node": (
        "The grammar does not hold at {node}: {token} is {expected} there, and the backend made it {observed}."
    ),
    "serving.hand-over": (
        "After its hand-over the request gave {observed}; where it stays with one server it gives {expected}{by}."
    ),
    "cache.recurrent-rows": (
        "After the root's row the recurrent state of {layer}, its {kind}, is {observed}; running the same tokens in "
        "sequence leaves {expected}{by}."
    ),
    "cache.recurrent-equivalence": (
        "After the step the recurrent state of {layer}, its {kind}, is {observed}; running the emitted "
        "tokens in sequence leaves {expected}{by}."
    ),
    "lossless.ranks-agree": "Out of step: {rank} has {observed} where rank 0 has {expected}.",
    "serving.matcher-in-step": (
        "After the step the grammar's matcher has read {observed} output tokens; it must have read {expected}."
    ),
    "serving.frames-in-epoch": (
        "When the host met the results of a launched step, they were not taken as its request says: expected "
        "{expected}, got {observed}."
    ),
    "serving.writes-in-owned-pages": (
        "The request owned pages {expected} when its step was launched, and the step wrote to pages {observed} as well."
    ),
    "serving.no-placeholder": "A launched step read {observed}, which is no token: expected {expected}.",
    "serving.steps-after-finish": ("A request that had ended went on: expected {expected}, got {observed}."),
    "lossless.logprobs": (
        "The log-probability reported for {token} at {position} is {observed}; the target's is {expected}{by}."
    ),
    "lossless.logprobs-draft-independent": (
        "The log-probability reported for {token} at {position} is {observed}, and {expected} for the same request "
        "without a draft{by}."
    ),
    "lossless.support": (
        "At {position} the output has token {observed}, which the request's sampling excludes: it allows {expected}."
    ),
    "lossless.same-seed": (
        "The same seed without a draft gives {expected} at {position}, with a draft {observed}: the engine promises "
        "the same tokens."
    ),
    "lossless.own-seed": (
        "The seed of {request} gives {expected} at {position} where it runs alone, and {observed} in its batch: the "
        "engine promises the same tokens."
    ),
    "lossless.interrupted": ("A run was ended early; {side} must give {expected}, and gave {observed}."),
    "acceptance.rate": (
        "On these texts {side}: {observed} of {tried} were accepted, and target and draft give {expected}."
    ),
    "acceptance.company-independent": (
        "The text of {request} is right, but {side}: {observed}, and {expected} where it runs alone."
    ),
    "lossless.distribution": (
        "On its own random numbers, {draws} are not from the law of the rule: the evidence against it, {side}, is "
        "e^{observed}."
    ),
    "lossless.seeded": (
        "The output of {request} must follow from its own seed, {expected}; among other neighbours it was {observed}."
    ),
    "pair.greedy-match": (
        "The greedy text leaves the reference's at {position}: token {observed} instead of {expected}, and no near tie "
        "excuses it{by}."
    ),
    "pair.same-law": (
        "{draws} and the reference's draws after the same texts are not from one law: the evidence against it is "
        "e^{observed}."
    ),
    "layers.between-taps": (
        "The layers of --layers make another row of {node} than the engine has behind them{by}; it begins {expected}, "
        "and here {observed}."
    ),
    "layers.experts-best": (
        "{Row} went through the experts {observed}; by the scores of --layers on the engine's own rows the best are "
        "{expected}{by}."
    ),
    "layers.columns-best": (
        "{Row} attended to the columns at positions {observed} of its text; by the scores of --layers the best are "
        "{expected}{by}."
    ),
    "lossless.completes": "The backend did not finish the case, or its own check stopped it: {observed}.",
}
"""The sentence of each invariant.

`{node}`, `{expected}` and other names in braces are facts of the finding, which `specverify.reports.vocabulary` fills
in.
"""
