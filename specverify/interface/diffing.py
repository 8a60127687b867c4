"""`diff`: draw cases, run oracle and engine, judge, shrink; the result in place of pages."""

from collections.abc import Sequence
from pathlib import Path

from specverify.backends.base import Unavailable
from specverify.campaign import recorder
from specverify.interface.engines import Engine, named
from specverify.interface.planning import plan_of
from specverify.interface.progress import Calls, Progress, Silent
from specverify.interface.results import DiffResult
from specverify.properties.reference_names import NUMPY
from specverify.reference.sampling import Sampling
from specverify.setup.errors import MissingInput, UnusableInput


def diff(
    engine: Engine = "cpu-eager",
    *,
    cases: int | None = None,
    seed: int = 0,
    jobs: int | None = None,
    against: str | None = None,
    reference: str = NUMPY,
    model: str | None = None,
    draft: str | None = None,
    prompts: str | None = None,
    new_tokens: int = 64,
    steps: int | None = None,
    layers: tuple[int, int] | None = None,
    variants: int | None = None,
    sampling: Sampling = Sampling(),
    batch: int | None = None,
    concurrency: Sequence[int] = (),
    invariants: Sequence[str] = (),
    dtypes: Sequence[str] = (),
    layout: str | None = None,
    fault: str | None = None,
    mode: str | None = None,
    focus: str | None = None,
    time_budget: float | None = None,
    case_timeout: float | None = None,
    max_failures: int = 1,
    report: str | Path = ".specverify",
    progress: Progress | None = None,
) -> DiffResult:
    """Judge an engine on drawn cases, as `specverify diff` does.

    >>> import tempfile
    >>> from specverify import diff
    >>> result = diff("cpu-eager", cases=2, jobs=0, invariants=["structure.*"], report=tempfile.mkdtemp())
    >>> result.agrees, result.failures
    (True, ())

    Args:
        engine: A backend's name, a factory such as `open_`, a function from a prompt to tokens, or a backend. What has
            a name in a module runs in processes of its own; another object runs in this process.
        cases: Cases to draw, or prompts with `model`; by default as many as the command draws.
        seed: The seed of the whole run: the same seed draws the same cases.
        jobs: Worker processes; 0 searches in this process, which is sooner ready for a few cases.
        against: Another backend, or `transformers`, in the oracle's place.
        reference: What computes the oracle: `numpy`, or torch on a device, such as `torch:cuda`, of which NumPy
            certifies rows.
        model: A checkpoint's folder, a hub id, or `builtin:NAME`; by default cases draw built-in models.
        draft: The draft of `model`, as the option `--draft` names it.
        prompts: A file of prompts, or `builtin:humaneval`; needs `model`.
        new_tokens: Tokens for each prompt.
        steps: Steps of each prompt to judge, chosen by the seed; by default all are judged.
        layers: The first layer of `model` to judge on the engine's own inputs, and the one behind the last; by default
            the whole target.
        variants: Prompts of which variants run as well, such as with padding or in another layout; 3 by default.
        sampling: How prompts are sampled; drawn cases draw their own settings.
        batch: Prompts side by side in one session; needs `model`.
        concurrency: Numbers of requests that a server, or another engine that batches by itself, runs side by side;
            needs `model`.
        invariants: Globs of the invariants to judge; all of them by default.
        dtypes: Working dtypes; by default those that the engine declares.
        layout: The KV layout of every case; by default all are mixed.
        fault: A fault of the catalogue that is planted first.
        mode: `reference` or `performance`, for a backend of ours.
        focus: `distribution` asks every case for the law of sampled tokens.
        time_budget: Seconds after which no case begins.
        case_timeout: Seconds of one answer of the engine.
        max_failures: Distinct causes after which the run ends.
        report: The folder for results and bundles.
        progress: A function that is called with a `Progressed` whenever a case was judged.

    Raises:
        UnusableInput: An argument is wrong, or two contradict each other; nothing ran.
        MissingInput: The machine lacks a device or a package; nothing ran.
    """
    with named(engine) as name:
        plan = plan_of(
            backend=name,
            cases=cases,
            seed=seed,
            jobs=jobs,
            against=against,
            reference=reference,
            model=model,
            draft=draft,
            prompts=prompts,
            new_tokens=new_tokens,
            steps=steps,
            layers=layers,
            variants=variants,
            sampling=sampling,
            batch=batch,
            concurrency=tuple(concurrency),
            invariants=tuple(invariants),
            dtypes=tuple(dtypes),
            layout=layout,
            fault=fault,
            mode=mode,
            focus=focus,
            time_budget=time_budget,
            case_timeout=case_timeout,
            max_failures=max_failures,
        )
        total = plan.drawn_and_saved
        told = Silent(total) if progress is None else Calls(total, progress)
        here = jobs == 0
        try:
            tally, refused = recorder.run(plan, Path(report), told, here=here)
        except Unavailable as why:
            raise MissingInput(str(why)) from None
    if refused is not None and not (tally.failures if refused == 2 else tally.cases):
        line = "; ".join(" ".join(error.split()) for error in tally.errors)
        raise (UnusableInput if refused == 2 else MissingInput)(line)
    return DiffResult(tally)
