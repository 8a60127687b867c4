"""The listener of a gate's run: the recorder of `diff`, ledger and memory."""

from collections.abc import Callable
from pathlib import Path

from specverify.campaign.messages import Opened
from specverify.campaign.recorder import Recorder
from specverify.gate.memory import RememberedBundles
from specverify.plan import Plan
from specverify.properties.tally import Failure
from specverify.properties.verdict.finding import Verdict
from specverify.reports import record
from specverify.reports.progress import Progress
from specverify.reports.writing import Unwritable


class Listener(Recorder):
    """Records a run as `diff` does, keeps its failures in the memory, and remembers what the ledger asks.

    `keep` gets each message and its place before it is counted.

    Attributes:
        ids: Ids of the judged cases.
        watched: Verdicts on the cases of known failures, by the id of the case.
        devices: Devices on which the backend computes, without an emulated one.
    """

    def __init__(
        self,
        plan: Plan,
        folder: Path,
        lines: record.Lines,
        progress: Progress,
        *,
        remembered: RememberedBundles,
        ids: set[str],
        keep: Callable[[int, object], None] = lambda place, message: None,
    ) -> None:
        super().__init__(plan, folder, lines, progress)
        self._journal = keep
        self._remembered = remembered
        self._keeps_failures = plan.fault is None
        self._watch = ids
        self.ids: list[str] = []
        self.watched: dict[str, Verdict] = {}
        self.devices: set[str] = set()

    def backend_opened(self, news: Opened) -> None:
        """See `specverify.campaign.campaign.Listener`."""
        super().backend_opened(news)
        self.devices |= set() if news.emulated else {news.device}

    def message_heard(self, place: int, message: object) -> str | None:
        """See `specverify.campaign.campaign.Listener`."""
        try:
            self._journal(place, message)
        except Unwritable as why:
            return str(why)
        return None

    def case_counted(self, case_id: str) -> bool:
        """Note a case of which a shard's counts tell; returns whether someone asks for its verdict (`watched`)."""
        self.ids.append(case_id)
        return case_id in self._watch

    def verdict_arrived(self, verdict: Verdict) -> str | None:
        """See `specverify.campaign.campaign.Listener`."""
        self.ids.append(verdict.case.id)
        if verdict.case.id in self._watch:
            self.watched[verdict.case.id] = verdict
        return super().verdict_arrived(verdict)

    def failure_found(self, failure: Failure, before: Failure | None) -> tuple[Failure, str | None]:
        """See `specverify.campaign.campaign.Listener`."""
        saved, why = super().failure_found(failure, before)
        if saved.file is not None and self._keeps_failures:
            unkept = self._remembered.keep(Path(saved.file))
            if unkept is not None and unkept not in self._remembered.notes:
                self._remembered.notes.append(unkept)
        return saved, why
