"""Your engine as a backend, from a function of your own module.

`blackbox(generate)` makes a backend of a function that returns tokens:

    from specverify.adapt import blackbox

    def generate(prompt_ids, max_new_tokens, model, temperature=0.0):
        ...  # your engine; return the new token ids

    open_ = blackbox(generate)

`specverify diff --backend my_module:open_` then judges it. `component` takes one function of an engine, such as its
attention kernel, in place of ours; `tables` a sampler of rounds on given laws; `stepper` a generator of steps that show
some of their stages. `specverify.backends.adapt` holds the code, which the adapters that we ship use as well. An engine
that shows
every stage implements `Backend` itself: `run(case) -> Trace`.

`save_gguf(checkpoint, file)` writes the `checkpoint` that a function is given in the form that its engine eats, and
`exported(save_gguf, checkpoint)` does so once for each checkpoint.
"""

from specverify.backends.adapt import (
    CONTRACTS,
    PARTS,
    Generated,
    Request,
    blackbox,
    checkpoint_of,
    component,
    executorch_eagle3,
    exported,
    save_checkpoint,
    save_executorch,
    save_executorch_eagle3,
    save_gguf,
    save_onnx,
    save_openvino,
    stepper,
    tables,
    transformers_model,
    words_tokenizer,
)
from specverify.backends.base import Backend, Declaration, StageFailure, Unavailable, Unsupported
from specverify.reference.abilities import Chains
from specverify.reference.case import Case
from specverify.reference.grammar import Grammar
from specverify.reference.recorded.lines import trace_lines
from specverify.reference.trace import Accepted, Drafted, Emitted, Scored, Stage, Step, Trace
from specverify.reference.tree import Tree

__all__ = [
    "CONTRACTS",
    "PARTS",
    "Accepted",
    "Backend",
    "Case",
    "Chains",
    "Declaration",
    "Drafted",
    "Emitted",
    "Generated",
    "Grammar",
    "Request",
    "Scored",
    "Stage",
    "StageFailure",
    "Step",
    "Trace",
    "Tree",
    "Unavailable",
    "Unsupported",
    "blackbox",
    "checkpoint_of",
    "component",
    "executorch_eagle3",
    "exported",
    "save_checkpoint",
    "save_executorch",
    "save_executorch_eagle3",
    "save_gguf",
    "save_onnx",
    "save_openvino",
    "stepper",
    "tables",
    "trace_lines",
    "transformers_model",
    "words_tokenizer",
]
