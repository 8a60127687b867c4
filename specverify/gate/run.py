"""The runs of a gate: each backend of the profile in turn."""

import hashlib
import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

from specverify import __version__
from specverify.agenda import Agenda
from specverify.backends.shipped import ROWS
from specverify.campaign import campaign
from specverify.campaign.messages import Ended
from specverify.fleet.cluster import Cluster, retell
from specverify.fleet.facts import to_json
from specverify.fleet.journal import GATE, Head, Journal, Writer, counted, killed_journal
from specverify.fleet.shards import Shard, common_head, missing
from specverify.gate.changes import changed_since, matching
from specverify.gate.known_states import KnownStates
from specverify.gate.ledger import Entry
from specverify.gate.ledger import load as ledger_of
from specverify.gate.listener import Listener
from specverify.gate.memory import RememberedBundles, open_memory
from specverify.gate.merging import copy_results, merge_run, places_of
from specverify.gate.profile import Floors, OnModel, Profile, Wishes, check_models, chosen_backends
from specverify.gate.saved_cases import SavedCases, saved_cases
from specverify.isolation.limits import START_S
from specverify.lanes import MOST_LANES, lanes_of
from specverify.plan import EVERY_CAUSE, Plan, default_cases, default_dtypes, default_jobs
from specverify.properties.gate_result import GateResult, GateRun
from specverify.properties.speculation import was_seen
from specverify.properties.tally import Tally
from specverify.properties.verdict.finding import Verdict
from specverify.reference.sampling import Sampling
from specverify.reports import record
from specverify.reports.progress import Progress
from specverify.reports.writing import Unwritable, as_json
from specverify.setup.errors import MissingInput, UnusableInput

SHORTENED = 10
"""A run that no changed file concerns draws one case in this many."""

LEAST = 10
"""Fewest cases of a shortened run: what did not run is no pass."""

DECIDING = ("lanes", "time_budget", "dtypes", "layouts", "invariants", "against", "reference", "processors", "models")
"""The keys of a profile that decide on the cases, beside backends, their number and the seeds."""

RunPlan = Callable[[Plan, Listener], tuple[Tally, int | None]]
"""The judge of a plan: it returns the tally, and the exit code if a start failed."""

Keep = Callable[[int, object], None]


class Gate:
    """One gate: made from a profile, run once.

    Args:
        profile: The profile.
        wishes: What the command line asks.
        folder: The folder of reports.

    Raises:
        UnusableInput, MissingInput: The ledger, a bundle, the corpus or a wish cannot be used.
    """

    def __init__(self, profile: Profile, wishes: Wishes, folder: Path) -> None:
        first_wishes = wishes
        before = None if wishes.ray is None else killed_journal(folder)
        if before is not None and wishes.seed is None:
            wishes = replace(wishes, seed=before.head.fresh)  # the killed gate's new seed, with which it goes on
        self._profile = profile
        self._wishes = wishes
        self._folder = folder
        self._results = record.results_file(folder, record.run_fact(__version__, 0, None))
        self._backends = chosen_backends(profile, wishes)
        check_models(profile, self._backends)
        self.ledger: list[Entry] = [] if profile.ledger_file is None else ledger_of(profile.ledger_file)
        own_memories = (
            [] if profile.memory is None else [open_memory(profile.memory, profile.folder, profile.memory_size)]
        )
        sources = [open_memory(name, profile.folder, profile.memory_size) for name in profile.memory_sources]
        self._remembered = RememberedBundles(own_memories, folder / "memory", sources)
        self._saved: SavedCases = saved_cases(profile, self.ledger, self._remembered)
        self.result = GateResult(shard=wishes.shard)
        self._seeds()
        self._shortened = self._shorten()
        for backend in self._backends:
            self._check_lanes(backend)
        self._cluster = None if wishes.ray is None else self._open_cluster(wishes.ray, before)
        self._before = before if before is not None and before.head == self.head else None
        if self._before is not None:
            self._resume(self._before)
        elif before is not None:  # of another gate: this one has a new seed of its own
            self._wishes = first_wishes
            self._seeds()
        self._devices: set[str] = set()
        self._watched: dict[tuple[str, str], Verdict] = {}

    def _check_lanes(self, backend: str) -> None:
        """Refuse more shards than there are lanes, and note workers for which there is none.

        Raises:
            UnusableInput: A shard would have no lane.
        """
        cases = self._cases(backend)
        count = lanes_of(cases, self._profile.lanes)
        shards = self._wishes.shard[1]
        if shards > count:
            more = f"; --lanes {shards} makes more" if lanes_of(cases, MOST_LANES) >= shards else ""
            raise UnusableInput(f"--shard: {cases} cases of {backend} make at most {count} shards{more}")
        workers = self._jobs(backend) * shards
        if workers > count:
            idle = f"{workers - count} of {workers} workers of {backend} are idle: {cases} cases are {count} lanes"
            advice = f" (--lanes {workers})" if lanes_of(cases, MOST_LANES) >= workers else " (more cases make more)"
            self.result.notes.append(f"{idle}{advice}")

    def _jobs(self, backend: str) -> int:
        """The number of worker processes of a backend."""
        device = next((row.device for row in ROWS if row.name == backend), "cpu")
        return self._profile.jobs or default_jobs(device)

    def _open_cluster(self, address: str, before: Journal | None) -> Cluster:
        """The cluster that judges the cases, in as many slices as before unless told otherwise."""
        slices = self._wishes.slices
        if slices is None and before is not None:
            slices = max(before.head.slices, default=None)
        return Cluster(address, self._profile.folder, slices, self._profile.devices)

    def _resume(self, before: Journal) -> None:
        """Take the saved cases that the killed gate had: what the memory got since then is tried by the next one."""
        self._saved.shared = [saved for saved in self._saved.shared if saved.case.id in before.head.saved]
        judged = sum(len(run.verdicts) for run in before.runs.values())
        self.result.notes.append(f"went on behind {judged} cases of a gate that was killed: {before.path}")

    def _seeds(self) -> None:
        profile, wishes = self._profile, self._wishes
        if wishes.shard[1] > 1 and profile.fresh_seed and wishes.seed is None:
            raise UnusableInput(
                "--shard with a fresh seed needs --seed N, the same for all shards, such as CI's number"
            )
        if profile.fresh_seed or wishes.seed is not None:
            self.result.fresh = secrets.randbelow(2**31) if wishes.seed is None else wishes.seed
        fresh = () if self.result.fresh is None else (self.result.fresh,)
        self.result.seeds = tuple(dict.fromkeys((*profile.seeds, *fresh)))

    def _shorten(self) -> bool:
        reference = self._wishes.changed_since
        if reference is None:
            return False
        if not self._profile.paths:
            raise UnusableInput(
                f"{self._profile.file}: --changed-since needs the key paths: globs of your engine's files"
            )
        changed = changed_since(reference, self._profile.folder.resolve())
        if matching(changed, self._profile.paths):
            return False
        self.result.notes.append(
            f"shortened: of {len(changed)} files changed since {reference}, none matches paths; "
            f"saved cases and one drawn case in {SHORTENED} were judged"
        )
        return True

    def _cases(self, backend: str) -> int:
        cases = self._profile.cases or default_cases(backend)
        return max(min(cases, LEAST), cases // SHORTENED) if self._shortened else cases

    def run(self) -> GateResult:
        """Run every backend, write the journal, and return the result."""
        began = time.monotonic()
        self._require_devices()
        earlier = {} if self._before is None else self._before.runs
        journal = Writer(self._folder, self.head, goes_on=self._before is not None)
        try:
            for name, backend, model in self._pairs:
                if self._is_interrupted:
                    self.result.complaints.append(f"{backend} did not run: interrupted")
                    continue
                plan = self._plan(backend, model)
                earlier_run = earlier.get(name)
                if earlier_run is not None and earlier_run.ended is not None and earlier_run.ended.interrupted is None:
                    plan = replace(plan, jobs=1 if self._cluster is None else self._cluster.slices(plan))
                    self.result.runs.append(self._judge(plan, model, partial(retell, earlier_run)))
                    continue
                run_plan = campaign.run if self._cluster is None else partial(self._cluster.judge, earlier_run)
                self.result.runs.append(self._judge(plan, model, run_plan, partial(journal.add, name)))
                journal.add(name, 0, counted(self.result.runs[-1].tally))
            self.result.seconds = time.monotonic() - began
            if not self._is_interrupted:
                journal.add(GATE, 0, Ended(self.result.seconds, 0))
        except Unwritable as why:
            self.result.complaints.append(str(why))
        finally:
            journal.close()
            if self._cluster is not None:
                self._cluster.close()
        return self._conclude()

    def merge(self, shards: list[Shard]) -> GateResult:
        """Make the result that `shards` have together.

        Raises:
            UnusableInput: They are no shards of this profile's gate.
        """
        if common_head(shards) != self.head:
            raise UnusableInput(
                f"{shards[0].path} is of another gate: the profile has changed since, or other options were given"
            )
        self.result.complaints += missing(shards)
        fact = record.run_fact(__version__, self.result.seeds[-1], self._wishes.fault)
        with record.RunLines(self._folder, fact, file=self._results) as lines:
            for shard in shards:
                copy_results(shard, lines)
        for name, backend, model in self._pairs:
            plan = replace(self._plan(backend, model), jobs=places_of(shards, name))
            self.result.runs.append(self._judge(plan, model, partial(merge_run, shards, name)))
            self.result.seconds = max(self.result.seconds, self.result.runs[-1].tally.seconds)
        return self._conclude()

    @property
    def head(self) -> Head:
        """The first line of the gate's journal."""
        profile = self._profile
        deciding = [self._backends, self._wishes.fault, [self._cases(backend) for backend in self._backends]]
        deciding += [getattr(profile, name) for name in DECIDING]
        digest = hashlib.sha256(as_json(to_json(deciding)).encode()).hexdigest()[:12]
        result = self.result
        slices = [] if self._cluster is None else [self._cluster.slices(self._plan(*pair[1:])) for pair in self._pairs]
        saved = tuple(saved.case.id for saved in self._saved.shared)
        return Head(__version__, result.seeds, result.fresh, self._wishes.shard, digest, tuple(slices), saved)

    @property
    def _pairs(self) -> list[tuple[str, str, OnModel | None]]:
        """Every backend, alone and on each checkpoint of the profile, with the name of its run in the journal."""
        models = [
            ("", None),
            *((f" on {number}: {model.model}", model) for number, model in enumerate(self._profile.models, 1)),
        ]
        return [(f"{backend}{name}", backend, model) for backend in self._backends for name, model in models]

    def _conclude(self) -> GateResult:
        """Add what only all runs show: the known failures, required devices, notes."""
        if self._wishes.shard[1] > 1 and self._profile.floors != Floors():
            self.result.notes.append("floors hold for all shards together: `specverify gate --merge` applies them")
        self.result.known = KnownStates(self.result, self.ledger, self._saved, self._backends, self._watched).all()
        missing = [device for device in self._profile.devices if device not in self._devices]
        self.result.complaints += [
            f"required device {device}: no backend of this run computed on it" for device in missing
        ]
        self.result.notes += self._remembered.notes
        return self.result

    @property
    def _is_interrupted(self) -> bool:
        return any((run.tally.stopped or "").startswith("interrupted") for run in self.result.runs)

    def _require_devices(self) -> None:
        """Refuse at once a required device on which no backend of the profile runs.

        Raises:
            MissingInput: There is such a device.
        """
        devices = {row.name: row.device for row in ROWS if not row.emulated}
        our_devices = {devices.get(backend) for backend in self._backends}
        unknown = any(backend not in {row.name for row in ROWS} for backend in self._backends)
        missing = next((device for device in self._profile.devices if device not in our_devices and not unknown), None)
        if missing is not None:
            raise MissingInput(f"required device {missing}: none of {', '.join(self._backends)} runs on it")

    def _plan(self, backend: str, model: OnModel | None) -> Plan:
        profile = self._profile
        known_failures = tuple(entry.known_failure for entry in self.ledger if entry.backend == backend)
        number, count = self._wishes.shard
        saved = self._saved.cases_of(backend, self.ledger) if model is None else ()
        layouts = profile.layouts
        agenda = Agenda(saved, self.result.seeds, layouts, known_failures, number - 1, count, profile.lanes)
        plan = Plan(
            backend=backend,
            against=profile.against,
            reference=profile.reference,
            invariants=profile.invariants,
            cases=self._cases(backend),
            time_budget_s=profile.time_budget or 0.0,
            open_ended=profile.time_budget is not None and profile.cases is None,
            dtypes=profile.dtypes or default_dtypes(backend),
            seed=self.result.seeds[-1],
            jobs=self._jobs(backend),
            fault=self._wishes.fault,
            processors=profile.processors,
            layout=layouts[0] if len(layouts) == 1 else None,
            case_timeout_s=profile.case_timeout,
            start_timeout_s=profile.start_timeout or START_S,
            threads=profile.threads or 0,
            max_failures=EVERY_CAUSE,
            agenda=agenda,
        )
        if model is None:
            return plan
        return replace(
            plan,
            model=model.model,
            prompts=model.prompts,
            cases=model.cases,
            new_tokens=model.new_tokens,
            variants=model.variants,
            sampling=Sampling(temperature=model.temperature),
            dtypes=(profile.dtypes or default_dtypes(backend))[:1],
            layout=model.layout,
            draft=model.draft,
            draft_weights=model.draft_weights,
            draft_trees=model.draft_trees,
            batch=model.batch,
            jobs=1,
        )

    def _judge(
        self, plan: Plan, model: OnModel | None, run_plan: RunPlan, keep: Keep = lambda place, message: None
    ) -> GateRun:
        """Have `run_plan` judge one run, record it, and hand each message to `keep`."""
        backend = plan.backend
        ids = {saved.case.id for saved in self._saved.entries.values()}
        fact = record.run_fact(__version__, plan.seed, plan.fault)
        lines = record.RunLines(self._folder, fact, file=self._results)
        with lines, Progress(plan.drawn_and_saved) as progress:
            listener = Listener(plan, self._folder, lines, progress, remembered=self._remembered, ids=ids, keep=keep)
            tally, code = run_plan(plan, listener)
        self._devices |= listener.devices
        self._watched |= {(backend, case_id): verdict for case_id, verdict in listener.watched.items()}
        drawn = hashlib.sha256("\n".join(sorted(listener.ids)).encode()).hexdigest()[:12]
        run = GateRun(backend, plan.model, tally, code, drawn=drawn)
        if model is None and self._wishes.shard[1] == 1:
            run.short = below_floors(tally, self._profile.floors)
        return run


def below_floors(tally: Tally, floors: Floors) -> list[str]:
    """Reasons why a run that agrees compared less than the profile asks; empty for one that compared enough."""
    if tally.outcome != "agree":
        return []
    checked = [name for name, counts in tally.invariants.items() if counts.checked]
    share = tally.judged / tally.cases if tally.cases else 0.0
    short = []
    if share < floors.judged:
        short.append(f"{tally.judged} of {tally.cases} cases were judged, below the floor of {floors.judged:g}")
    if len(checked) < floors.invariants:
        short.append(f"{len(checked)} invariants compared something, below the floor of {floors.invariants}")
    if tally.pairs is None and floors.pairs:
        short.append(
            f"no pairs of what a request may have were counted, and the floor asks for {floors.pairs:g} of them"
        )
    if tally.pairs is not None and tally.pairs.share < floors.pairs:
        met = f"{tally.pairs.num_met:,} of {tally.pairs.num_possible:,} pairs"
        short.append(f"{met} of what a request may have were judged, below the floor of {floors.pairs:g}")
    if floors.speculation and not was_seen(tally.speculation, tally.accept_lengths):
        short.append(
            "no drafted token was seen to be accepted, and the profile's floor `speculation` asks for one: "
            "plain decoding would have agreed as well"
        )
    short += [
        f"no invariant that matches {glob} compared anything, and the profile's floor asks for one"
        for glob in floors.reached
        if not any(fnmatchcase(name, glob) for name in checked)
    ]
    return short
