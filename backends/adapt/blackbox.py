"""The black box: a function from a prompt to tokens, as a backend.

A module with `open_ = blackbox(generate)` is a backend: `--backend my_module:open_`. The names of the function's
parameters say what it can do, and cases ask for nothing else.
"""

import inspect
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from specverify.backends.adapt.batches import batch_of, batch_parameters_of, request_of, shared_trace
from specverify.backends.adapt.generated import Block, WrongCount, block_of, blocks_of, steps_of, total
from specverify.backends.adapt.models import checkpoint_of, transformers_model
from specverify.backends.adapt.pool import MOST_SHAPES, EnginePool
from specverify.backends.base import BrokenContract, Declaration, Unavailable, Unsupported
from specverify.backends.places import function_at
from specverify.reference.abilities import GRAMMAR_WORDS, Chains
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.family import FAMILIES
from specverify.reference.session import CONTINUOUS
from specverify.reference.spelling import spelling_of
from specverify.reference.trace import Stage, Trace

NEEDED_PARAMETERS = ("prompt_ids", "max_new_tokens")
"""The parameters that every function takes: token ids of the prompt, and the most tokens to return."""

PARAMETERS = {
    "prompt_ids": "the token ids of the prompt, a list of at least one int",
    "engine": "the engine that `open` returned, with the case's models loaded",
    "max_new_tokens": "the most tokens to return",
    "model": "the target, as transformers' class; shared by all calls, so do not change it",
    "draft_model": "a draft of the same vocabulary, likewise; None in runs without a draft",
    "checkpoint": "a directory with the target's config.json, safetensors and tokenizer, of a grammar's words if any",
    "draft_checkpoint": "the same with the draft; None in runs without a draft",
    "temperature": "0.0 for greedy decoding",
    "top_k": "the number of most probable tokens to keep; 0 for all",
    "top_p": "the mass of the most probable tokens to keep; 1.0 for all",
    "min_p": "the share of the largest probability below which tokens are dropped; 0.0 for none",
    "seed": "the seed of the call; without it, random, NumPy and torch are seeded before the call",
    "stops": "token ids that end the text; the ending token is returned",
    "grammar": "the `Grammar` of the text, or None: it may end where it is complete, by `stops`, and nowhere else",
}
"""The parameters that a function may take, each with what it is given."""

PROCESSING = ("top_k", "top_p", "min_p", "grammar")
"""The parameters that are processing of logits."""


def blackbox(
    generate: Callable[..., Any],
    *,
    name: str = "",
    device: str = "cpu",
    dtypes: tuple[str, ...] = ("float32",),
    families: tuple[str, ...] | None = None,
    least_window: int = 1,
    ropes: tuple[str, ...] | None = None,
    head_multiple: int = 2,
    longest: int = 0,
    least_prompt: int = 1,
    max_temperature: float = float("inf"),
    logprobs: str = "raw",
    processed_settings: tuple[str, ...] = (),
    seeded: bool = True,
    same_seed: bool = False,
    chains: Chains | None = None,
    excluded: tuple[str, ...] = (),
    generate_many: Callable[..., Any] | None = None,
    most_requests: int = 8,
    own_seed: bool = False,
    own_drafts: bool = False,
    cutting_settings: tuple[str, ...] = (),
    settings: tuple[str, ...] = (),
    open: Callable[..., Any] | None = None,
    reload: Callable[..., Any] | None = None,
    close: Callable[[Any], Any] | None = None,
    most_shapes: int = MOST_SHAPES,
    environment: dict[str, str] | None = None,
) -> Callable[[], "BlackBox"]:
    """A backend's factory, from a function that returns tokens.

    A function that yields its tokens, one by one or in blocks, is also judged where it is closed before its end.

    Args:
        generate: Takes any of PARAMETERS by name, at least NEEDED_PARAMETERS, and returns the generated token ids
            without the prompt: a list, a NumPy array or a torch tensor. It may return them with their
            log-probabilities, as a pair, or a `Generated` with counts of drafted tokens.
        name: The backend's name; by default the function's.
        device: The device on which the function computes: cpu, cuda, npu.
        dtypes: Working dtypes of the models that the function is given.
        families: Families of models that it loads (`specverify.reference.family.FAMILIES` has their names); None for
            all but hybrids: cropping keys and values leaves a recurrent state behind, and `generate` refuses to draft.
        least_window: The narrowest sliding window of the models that it runs, in tokens; 0 if it runs no such models.
        ropes: Kinds of rotary embedding of the models that it runs (`specverify.reference.architecture.ROPE_KINDS`);
            None for all.
        head_multiple: What the width of a head is a multiple of in the models that it runs, such as 16.
        longest: Most tokens of prompt and output together; 0 for what the model admits.
        least_prompt: Fewest tokens of a prompt.
        max_temperature: The highest temperature, where the function takes one.
        logprobs: The law of returned log-probabilities: `raw`, of the model's own logits; `masked`, of these behind the
            mask of a grammar; `processed`, after temperature, top-k, top-p and min-p too.
        processed_settings: Those of `settings` in which they are `processed`.
        seeded: Whether the same request with the same seed gets the same tokens each time; False where what was
            answered before decides what is drafted.
        same_seed: Whether the function promises that the same seed gives the same tokens with and without a draft.
        chains: The chains that the function drafts with the draft model, where each has the same number of tokens: its
            counts in `Generated` are then compared with what target and draft give (`acceptance.rate`).
        excluded: What is left out although the engine has it, a sentence each, such as `top_p: ignored (1.2.0)`; every
            verdict names it.
        generate_many: Answers several requests in one call, from `requests` and any of
            `specverify.backends.adapt.batches.BATCH_PARAMETERS`: a list with an answer for each, in a form that
            `generate` may return. Sessions are then drawn, whose requests must each be what they are alone; tests of a
            law ask for many generations at once. One that takes `actions` lets requests enter and be cancelled while
            others run; a cancelled request's answer is what it had by then.
        most_requests: Most requests of a call of `generate_many`; 0 for any number.
        own_seed: Whether the same seed gives a request the same tokens whatever requests are in its batch.
        own_drafts: Whether a greedy request drafts the same tokens whatever requests are in its batch, and in each of
            `settings` but `cutting_settings`. Its counts in `Generated` are then what they are alone
            (`acceptance.company-independent`).
        cutting_settings: Those of `settings` in which drafts are cut or left out, by a budget of tokens or for want of
            memory.
        settings: Settings in which sessions may run beside the plain one, such as `prefix-cache`: `open` or
            `generate_many` takes the drawn one as `setting`. Single requests run in the plain setting, and each request
            of a session must be what it is there.
        open: Opens an engine that is dear to open, from any of `checkpoint`, `draft_checkpoint` (None without a draft),
            `dtype` and `setting`; `generate` then takes it as `engine`. One is opened for each shape of models and each
            setting. The time of opening has a limit of its own, and what opening changes in the process is no residue
            of a case.
        reload: Loads other weights of the same shape into an `engine`, from `checkpoint` and `draft_checkpoint`;
            without it, or where it returns False, an engine is closed, and another opened.
        close: Closes an engine.
        most_shapes: Most engines that are open at once.
        environment: Variables that a library reads when it is imported, such as `{"TORCH_COMPILE_DISABLE": "1"}`: the
            engine's process is then a fresh interpreter that has them from its start.

    Raises:
        TypeError: The function lacks one of NEEDED_PARAMETERS, or has a parameter without default that is none of
            PARAMETERS; `open`, `reload` or `generate_many` needs one that it is not given; nothing takes the
            `setting` of `settings`; or `generate` takes an `engine` and there is no `open`, or the other way round.
    """
    parameters = _parameters_of(generate)
    batch_parameters = frozenset() if generate_many is None else batch_parameters_of(generate_many)
    if ("engine" in parameters) != (open is not None):
        lacking = "an `engine`, and there is no `open`" if open is None else "no `engine`, and there is an `open`"
        raise TypeError(f"blackbox: {getattr(generate, '__name__', generate)} takes {lacking}")
    opening = frozenset() if open is None else frozenset(inspect.signature(open).parameters)
    if settings and "setting" not in opening | batch_parameters:
        raise TypeError("blackbox: settings, and neither `open` nor `generate_many` takes a `setting`")
    backend_name = name or getattr(generate, "__name__", type(generate).__name__)
    declaration = Declaration(
        name=backend_name,
        device=device,
        reveals=frozenset({Stage.EMITTED}),
        dtypes=dtypes,
        drafts=("model",) if (parameters | opening) & {"draft_model", "draft_checkpoint"} else (),
        draft_trees=False,
        layout_settings=(),
        max_temperature=max_temperature if "temperature" in parameters else 0.0,
        draws=(),
        processes=tuple(parameter for parameter in PROCESSING if parameter in parameters),
        grammar_words=GRAMMAR_WORDS[1],
        stops=("max_new_tokens", *(("eos", "stop_tokens") if "stops" in parameters else ())),
        families=tuple(name for name, family in FAMILIES.items() if not family.hybrid)
        if families is None
        else families,
        soft_caps="published",
        least_window=least_window,
        ropes=ropes,
        head_multiple=head_multiple,
        longest=longest,
        least_prompt=least_prompt,
        logprobs=logprobs,
        processed_settings=processed_settings,
        seeded=seeded,
        same_seed=same_seed,
        chains=chains,
        excluded=excluded,
        environment=tuple((environment or {}).items()),
        interruptible=inspect.isgeneratorfunction(generate),
        sessions=generate_many is not None,
        continuous=generate_many is not None,
        actions=CONTINUOUS if "actions" in batch_parameters else CONTINUOUS[:1],
        most_requests=most_requests,
        own_seed=own_seed,
        own_drafts=own_drafts,
        cutting_settings=cutting_settings,
        settings=settings,
    )
    functions = Functions(generate, parameters, generate_many, batch_parameters)
    if open is None:
        return lambda: BlackBox(functions, declaration)
    EnginePool(open, reload, close, most_shapes)  # a wrong signature is an error here, where the user's line stands
    return lambda: PooledBlackBox(functions, declaration, EnginePool(open, reload, close, most_shapes))


def _parameters_of(generate: Callable[..., Any]) -> frozenset[str]:
    """The names of PARAMETERS that the function takes."""
    signature_parameters = inspect.signature(generate).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature_parameters.values())
    missing_names = [name for name in NEEDED_PARAMETERS if name not in signature_parameters and not takes_any]
    line = f"blackbox: {getattr(generate, '__name__', generate)}"
    if missing_names:
        raise TypeError(f"{line} takes no {missing_names[0]}; it needs {' and '.join(NEEDED_PARAMETERS)}")
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    for parameter in signature_parameters.values():
        if parameter.name not in PARAMETERS and parameter.default is parameter.empty and parameter.kind not in variable:
            raise TypeError(f"{line} needs {parameter.name}, which is none of {', '.join(PARAMETERS)}")
    return frozenset(NEEDED_PARAMETERS) | (frozenset(PARAMETERS) & frozenset(signature_parameters))


@dataclass(frozen=True)
class Functions:
    """A user's functions, each with the names of the parameters that it takes; `generate_many` may be None."""

    generate: Callable[..., Any]
    parameters: frozenset[str]
    generate_many: Callable[..., Any] | None = None
    batch_parameters: frozenset[str] = frozenset()


class BlackBox:
    """A function that returns tokens, as a backend that reveals what it emits and nothing else.

    Attributes:
        declaration: What the function's parameters say that it can do.
    """

    def __init__(self, functions: Functions, declaration: Declaration) -> None:
        self.declaration = declaration
        self._functions = functions

    def run(self, case: Case) -> Trace:
        """Call the function on `case`; what it returns is one step of the trace, and each block that it yields too.

        After `case.steps` blocks a function that yields is closed. A session is one call of `generate_many`.
        """
        if case.session is not None:
            return self._run_batch(case)
        functions = self._functions
        arguments = {**vars(request_of(case)), **self._models(case, functions.parameters)}
        if "seed" not in functions.parameters:
            seed_all(case.sampling.seed)
        with torch.no_grad():
            try:
                answer = functions.generate(**{name: arguments[name] for name in functions.parameters})
                blocks = list(blocks_of(answer, case.steps))
            except BrokenContract as why:
                raise type(why)(f"{why} ({function_at(functions.generate)})") from None
            except TypeError as why:
                raise TypeError(f"{why} ({function_at(functions.generate)})") from None
        return trace_of_blocks(case, blocks)

    def _run_batch(self, case: Case) -> Trace:
        """Call `generate_many` on the session of `case`.

        Raises:
            WrongCount: It returns another number of answers than it was given requests.
        """
        functions = self._functions
        assert functions.generate_many is not None
        batch = batch_of(case)
        arguments: dict[str, Any] = {
            "requests": batch.requests,
            "actions": list(batch.actions),
            "setting": case.session.setting if case.session is not None else "",
            **self._models(case, functions.batch_parameters),
        }
        if "seed" not in functions.parameters:
            seed_all(case.sampling.seed)
        with torch.no_grad():
            answers = functions.generate_many(**{name: arguments[name] for name in functions.batch_parameters})
        if not isinstance(answers, (list, tuple)) or len(answers) != len(batch.cases):
            count = f"{len(answers)} answers" if isinstance(answers, (list, tuple)) else type(answers).__name__
            raise WrongCount(f"generate_many returned {count}, expected a list of {len(batch.cases)}")
        runs = []
        for place, (alone, answer) in enumerate(zip(batch.cases, answers, strict=True)):
            is_bare = place in batch.cancelled and answer is None
            runs.append(trace_of_blocks(alone, [] if is_bare else [block_of(answer)]))
        return shared_trace(case, batch, runs)

    def _models(self, case: Case, parameters: frozenset[str]) -> dict[str, Any]:
        """The models of a case; they are opened only for a function that takes them."""
        draft = case.draft.model
        models: dict[str, Any] = {}
        if "model" in parameters:
            models["model"] = transformers_model(case.model, case.dtype)
        if "checkpoint" in parameters:
            models["checkpoint"] = self._target_folder(case)
        # Invariants also ask for the same request without speculation: then there is no draft.
        if "draft_model" in parameters:
            models["draft_model"] = None if draft is None else transformers_model(draft, case.dtype, "draft")
        if "draft_checkpoint" in parameters:
            models["draft_checkpoint"] = None if draft is None else str(checkpoint_of(draft, case.dtype))
        return models

    def _target_folder(self, case: Case) -> str:
        """The directory of the target, with a tokenizer of the case's words for a function that takes grammars."""
        spelling = spelling_of(case) if "grammar" in self._functions.parameters else None
        return str(checkpoint_of(case.model, case.dtype, spelling if isinstance(case.model, Seeded) else None))


class PooledBlackBox(BlackBox):
    """A black box whose function takes an engine that stays open between cases."""

    def __init__(self, functions: Functions, declaration: Declaration, pool: EnginePool) -> None:
        super().__init__(functions, declaration)
        self._pool = pool

    def prepare(self, case: Case) -> None:
        """Open an engine for the case's models, or load them into one of their shape."""
        self._engine_for(case)

    def run(self, case: Case) -> Trace:
        """Call the function on `case`; if one fails at it, all engines are closed: no later case meets them."""
        try:
            return super().run(case)
        except (BrokenContract, Unavailable, Unsupported):
            raise
        except Exception:
            self._pool.close_all()
            raise

    def _models(self, case: Case, parameters: frozenset[str]) -> dict[str, Any]:
        return {**super()._models(case, parameters), "engine": self._engine_for(case)}

    def _engine_for(self, case: Case) -> Any:
        draft = case.draft.model
        draft_checkpoint = None if draft is None else str(checkpoint_of(draft, case.dtype))
        setting = "" if case.session is None else case.session.setting
        return self._pool.engine_for(self._target_folder(case), draft_checkpoint, case.dtype, setting)


def trace_of_blocks(case: Case, blocks: list[Block]) -> Trace:
    """The trace of a request: a step for each block."""
    tokens = tuple(token for block in blocks for token in block.tokens)
    steps = steps_of(blocks, case.prefix, case.prompt[-1])
    return Trace(steps, tokens, finish_of(case, tokens), speculated=total(blocks))


def seed_all(seed: int) -> None:
    """Seed every generator that a function without a `seed` may draw from."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - the global generator is the one that such a function uses
    torch.manual_seed(seed)


def finish_of(case: Case, tokens: tuple[int, ...]) -> str | None:
    """Why the output ended, as its tokens tell."""
    last = tokens[-1] if tokens else None
    if last in case.stops.eos:
        return "eos"
    if last in case.stops.stop_tokens:
        return "stop"
    return "length" if len(tokens) >= case.stops.room(len(case.prompt)) else None
