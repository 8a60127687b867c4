"""The plan of a `diff` from its arguments, and the refusal of arguments that contradict each other."""

from specverify.backends.servers.address import PREFIX as SERVER
from specverify.campaign.chosen_reference import check_reference
from specverify.isolation.limits import START_S
from specverify.plan import (
    DEVICES,
    EVERY_CAUSE,
    TRANSFORMERS,
    VARIED_PROMPTS,
    Plan,
    default_cases,
    default_dtypes,
    default_jobs,
)
from specverify.properties.reference_names import NUMPY
from specverify.reference.sampling import Sampling
from specverify.setup.errors import UnusableInput
from specverify.setup.given_grammar import GivenGrammar


def plan_of(
    *,
    backend: str | None = None,
    against: str | None = None,
    reference: str = NUMPY,
    model: str | None = None,
    draft: str | None = None,
    draft_weights: str | None = None,
    draft_trees: str | None = None,
    batch: int | None = None,
    concurrency: tuple[int, ...] = (),
    focus: str | None = None,
    prompts: str | None = None,
    invariants: tuple[str, ...] = (),
    cases: int | None = None,
    new_tokens: int = 64,
    steps: int | None = None,
    layers: tuple[int, int] | None = None,
    variants: int | None = None,
    sampling: Sampling = Sampling(),
    grammar: GivenGrammar | None = None,
    time_budget: float | None = None,
    dtypes: tuple[str, ...] = (),
    device: str | None = None,
    seed: int = 0,
    jobs: int | None = None,
    layout: str | None = None,
    ranks: int | None = None,
    fault: str | None = None,
    mode: str | None = None,
    processors: tuple[str, ...] = (),
    case_timeout: float | None = None,
    start_timeout: float = START_S,
    threads: int | None = None,
    memory_limit: int | None = None,
    keep_going: bool = False,
    max_failures: int | None = None,
) -> Plan:
    """The plan; its arguments are the options of the command `diff`, and None stands for an option that is not given.

    Raises:
        UnusableInput: Two arguments contradict each other, or one needs another.
        Unknown, UnknownBackend, Unavailable: A name is unknown, or its device is not here.
    """
    check_reference(reference, against)
    if prompts is not None and model is None:
        raise UnusableInput("--prompts needs --model: the built-in models have no tokenizer")
    if draft is not None and model is None:
        raise UnusableInput("--draft needs --model: drawn cases have drafts of their own")
    if draft or draft_weights or draft_trees:
        from specverify.checkpoints.given_draft import check_options

        check_options(draft, draft_weights or "", draft_trees)
    if batch is not None and (model is None or draft == "scripted"):
        raise UnusableInput("--batch needs --model, and a draft other than scripted, which is made for one prompt")
    if concurrency and (model is None or batch is not None):
        raise UnusableInput("--concurrency needs --model, and contradicts --batch")
    if steps is not None and (model is None or batch is not None or concurrency):
        raise UnusableInput("--steps needs --model, and contradicts --batch and --concurrency")
    if steps is not None and steps > new_tokens:
        raise UnusableInput(f"--steps {steps} is more than the {new_tokens} tokens of a prompt (--new-tokens)")
    if layers is not None:
        options: dict[str, object] = {
            "--against": against,
            "--draft": draft,
            "--batch": batch,
            "--concurrency": concurrency or None,
        }
        options |= {"--temperature": None if sampling.greedy else sampling, "--grammar": grammar, "--steps": steps}
        options |= {"--reference": None if reference == NUMPY else reference, "--focus": focus, "--ranks": ranks}
        contradicting = [name for name, value in options.items() if value is not None]
        if model is None:
            raise UnusableInput("--layers needs --model: it names layers of a checkpoint")
        if contradicting:
            raise UnusableInput(
                f"--layers and {contradicting[0]} contradict each other: layers are judged by NumPy on greedy trees of "
                "a head of their own"
            )
    if variants is not None and model is None:
        raise UnusableInput("--variants needs --model: drawn cases take turns with their variants")
    if variants is not None and invariants:
        raise UnusableInput("--variants and --invariant contradict each other: what is named is asked of every prompt")
    if model is not None and len(dtypes) > 1:
        raise UnusableInput(f"--dtype is given {len(dtypes)} times: prompts of --model run in one dtype")
    if model is not None and (jobs or 1) > 1:
        raise UnusableInput(f"--jobs {jobs} is for drawn cases: with --model one process uses all cores")
    name = backend or (DEVICES[device] if device else _backend_of(fault))
    _check_names(name, device, against, invariants, fault)
    if model is None and name.startswith(SERVER):
        raise UnusableInput(f"{SERVER}URL brings its own weights: name the same checkpoint's folder with --model")
    if model is not None and against == name and fault is None:
        raise UnusableInput(
            f"--against {against} is the backend itself, which agrees with itself whatever it computes: "
            f"name another, or --against {TRANSFORMERS}"
        )
    if focus is not None and model is not None and sampling.greedy:
        raise UnusableInput(f"--focus {focus} needs --temperature here: prompts are decoded greedily without it")
    if layout is not None:
        from specverify.setup.selection import check_layout

        names = (name, against) if against not in (None, TRANSFORMERS) else (name,)
        check_layout(layout, names, latent=model is not None)
    if ranks is not None:
        from specverify.setup.selection import check_ranks

        check_ranks(ranks, (name,))
    if keep_going and max_failures is not None:
        raise UnusableInput("--keep-going and --max-failures contradict each other: give one of them")
    if model is None:  # with a checkpoint, the worker tries the processors on the checkpoint's vocabulary
        from specverify.setup.processors import admit

        admit(processors)
    elif processors and sampling.greedy:
        raise UnusableInput("--processor needs --temperature here: prompts are sampled with it or decoded without")
    return Plan(
        backend=name,
        against=against,
        reference=reference,
        model=model,
        prompts=prompts,
        invariants=invariants,
        cases=cases or (default_cases(name) if model is None else 20),
        new_tokens=new_tokens,
        steps=steps or 0,
        layers=layers,
        variants=VARIED_PROMPTS if variants is None else variants,
        sampling=sampling,
        time_budget_s=time_budget or 0.0,
        open_ended=time_budget is not None and cases is None,
        dtypes=dtypes or (default_dtypes(name) if model is None else default_dtypes(name)[:1]),
        seed=seed,
        # A checkpoint uses all cores in one process.
        jobs=1 if model is not None else jobs or default_jobs(device or "cpu"),
        fault=fault,
        processors=processors,
        layout=layout,
        ranks=ranks or 0,
        mode=mode,
        case_timeout_s=case_timeout,
        start_timeout_s=start_timeout,
        threads=threads or 0,
        memory=memory_limit,
        max_failures=EVERY_CAUSE if keep_going else max_failures or 1,
        focus=focus,
        draft=draft,
        draft_weights=draft_weights or "",
        draft_trees=draft_trees,
        batch=batch or 0,
        concurrency=concurrency,
        grammar=grammar,
    )


def _backend_of(fault: str | None) -> str:
    """The backend if none is named: the fault's own, or the eager backend on the CPU without a fault."""
    if fault is None:
        return DEVICES["cpu"]
    from specverify.setup.subjects import fault_named  # brings torch, which this process needs for nothing else

    return fault_named(fault).on


def _check_names(
    backend: str, device: str | None, against: str | None, invariants: tuple[str, ...], fault: str | None
) -> None:
    """Refuse unknown names before any worker starts; the workers look for the device itself."""
    from specverify.backends.adapters import SHIPPED_BACKENDS
    from specverify.backends.base import Unavailable
    from specverify.backends.shipped import ROWS
    from specverify.setup.selection import check_backend, check_globs

    if device is not None and device not in [row.device for row in ROWS]:
        raise Unavailable(
            f"--device {device}: no backend here runs on it: `specverify list backends` names those we have"
        )
    check_globs(invariants)
    if fault is not None:
        from specverify.setup.subjects import fault_named  # brings torch, which this process needs for nothing else

        fault_named(fault)
    for name in filter(None, (backend, against)):
        if name is against and name == TRANSFORMERS:
            continue
        check_backend(name)
    if device is not None:
        backend_device = next((row.device for row in SHIPPED_BACKENDS if row.name == backend), device)
        if backend_device != device:
            raise UnusableInput(f"--device {device} contradicts --backend {backend}, which runs on {backend_device}")
