"""An engine as a backend of SpecVerify: one method, from a case to a trace.

The engine below decodes without speculation, so that this file runs as it stands and shows the stages of a tree that
is a bare root. Put your engine's steps in its place, show further stages one by one, and run after each change:

    specverify check-adapter MODULE:open_
"""

import torch

from specverify.adapt import (
    Accepted,
    Case,
    Declaration,
    Drafted,
    Emitted,
    Scored,
    Stage,
    Step,
    Trace,
    Tree,
    transformers_model,
)


class MyEngine:
    """The engine. It may keep weights between runs, and nothing else that a later run could notice."""

    declaration = Declaration(
        name="mine",
        device="cpu",
        # Stages that every step below shows. Others: LOWERED (masks, positions), ATTENDED, COMMITTED (KV caches).
        reveals=frozenset({Stage.DRAFTED, Stage.SCORED, Stage.ACCEPTED, Stage.EMITTED}),
        dtypes=("float32",),
        # () says: the engine drafts in its own way. ("scripted",) says: it verifies the trees of `case.draft`.
        drafts=(),
        # () says: the engine has a KV cache of its own. `specverify.reference.layout` names those that a case may ask
        # for.
        layout_settings=(),
        # Add "eos", "stop_tokens" and further fields of `specverify.reference.sampling.Stops` that the engine obeys.
        stops=("max_new_tokens",),
        # Models with a soft cap of attention: transformers computes those of the families that were published with one.
        soft_caps="published",
        # 0.0: greedy only. A temperature above 0 asks for sampling, by a lossless rule of the engine's own.
        max_temperature=0.0,
    )

    def run(self, case: Case) -> Trace:
        """Run one request. Shapes have no batch axis: `specverify trace schema` describes every stage."""
        model, tokens, steps = transformers_model(case.model, case.dtype), list(case.prompt), []
        for number in range(case.stops.max_new_tokens):
            # From here on: one step of your engine.
            context, root = tuple(tokens[:-1]), tokens[-1]
            # The tree that the engine verified: node 0 is the last token so far, and its own parent.
            tree = Tree(parent=(0,), token=(root,))
            logits = model(torch.tensor([tokens]), use_cache=False).logits[0, -1:]  # [nodes, vocabulary]
            path: tuple[int, ...] = (0,)
            bonus = int(logits[0].argmax())
            block = (*(tree.token[node] for node in path[1:]), bonus)
            finish = "length" if number + 1 == case.stops.max_new_tokens else None
            # Up to here. A stage that the engine cannot show is left out.
            steps.append(
                Step(
                    context,
                    drafted=Drafted(tree),
                    scored=Scored(logits),
                    accepted=Accepted(path, bonus),
                    emitted=Emitted(block, finish),
                )
            )
            tokens += block
        return Trace(tuple(steps), tuple(tokens[len(case.prompt) :]), "length")


open_ = MyEngine
