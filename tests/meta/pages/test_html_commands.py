"""The option --html of commands, the log of a run behind its page, and the request that a picture shows."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specverify.campaign import campaign
from specverify.campaign.messages import Died, Done, Found, Located, Trouble, event_of
from specverify.cli import main
from specverify.properties.tally import Counts, Tally
from specverify.properties.verdict.finding import Finding, Verdict
from specverify.properties.verdict.run_log import Event, RunLog
from specverify.reference.draft import Scripted
from specverify.reference.session import Action, Mate, Session
from specverify.reference.trace import Accepted, Drafted, Shared, Stage, Step, Trace
from specverify.reference.tree import Tree
from specverify.reports.html.pages import diff_page
from specverify.reports.html.pictures.bars import share_bars
from specverify.reports.html.pictures.timeline import timeline
from specverify.reports.tree_scene import scene_of
from tests.cases import CORPUS, ONE_CHILD
from tests.inprocess import in_this_process
from tests.meta.pages.planted import FAULTS, failure_of, tally_of
from tests.meta.pages.test_html import sound


def exit_code_of(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    return int(ended.value.code or 0)


def test_diff_writes_the_page_of_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    failure = failure_of(FAULTS["lowered"])

    def fail(self: campaign.Campaign) -> None:
        self.tally = tally_of(failure)

    monkeypatch.setattr(campaign.Campaign, "run", fail)
    assert exit_code_of("diff", "--html", "page.html") == 1
    assert "Node 2 sees node 1 and must not." in sound((tmp_path / "page.html").read_bytes()).text


def test_replay_writes_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    in_this_process(monkeypatch)
    fault, page = FAULTS["lowered"], tmp_path / "page.html"
    assert exit_code_of("replay", str(CORPUS / f"{fault}.json"), "--fault", fault, "--html", str(page)) == 1
    assert (
        "Failed SpecVerify, one saved case run again The saved difference is still there."
        in sound(page.read_bytes()).text
    )


@pytest.mark.slow
def test_diff_writes_a_page_of_the_failure_that_it_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    in_this_process(monkeypatch)
    monkeypatch.chdir(tmp_path)
    arguments = (
        "--invariant",
        "structure.mask*",
        "--dtype",
        "float32",
        "--cases",
        "8",
        "--jobs",
        "1",
        "--html",
        "page.html",
    )
    assert exit_code_of("diff", "--fault", FAULTS["lowered"], *arguments) == 1
    text = sound((tmp_path / "page.html").read_bytes()).text
    assert "cpu-eager does not give what the target model alone would give." in text
    for part in ("The nearest case that agrees", "What was checked", "What was drawn", "The workers", "Where it ran"):
        assert part in text
    assert "conditions under which reported faults show" in text.lower()
    assert "worker 0" in text
    assert text.count("must not.") >= 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("law", "eagle", "--html", "no/page.html"), "cannot write no/page.html: No such file or directory"),
        (("law", "eagle", "--html", "x", "--json", "x"), "--json and --html would be one file, x"),
        (("diff", "--html", "x", "--json", "x"), "--json and --html would be one file, x"),
        (("selftest", "--html", "."), "cannot write .: it is a directory"),
        (("bench", "--html", "x", "--json", "./x"), "--json and --html would be one file, x"),
        (("replay", "case.json", "--html", "case.json"), "the saved case and --html would be one file, case.json"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_a_page_that_cannot_be_written_is_refused_before_the_work(
    words: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert exit_code_of(*words) in (2, 3)
    assert message in capfd.readouterr().err


def test_law_writes_a_page_of_the_rule_and_of_all_rules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert exit_code_of("law", "typical", "--html", "one.html") == 0
    assert (
        "does not give the target's probabilities, which it does not promise: token"
        in sound((tmp_path / "one.html").read_bytes()).text
    )
    assert exit_code_of("law", "multi-round", "--html", "-") == 0
    out = capsys.readouterr().out
    assert "gives every token exactly the target's probability." in sound(out[out.index("<!DOCTYPE") :].encode()).text


def test_a_log_counts_cases_and_tells_when_workers_did_what() -> None:
    log = RunLog()
    for count in (1, 40):
        log.add(replace(ONE_CHILD, prompt=(5,) * count))
    assert log.drawn["tokens before the first step"] == Counter({"up to 1": 1, "17 to 64": 1})
    assert log.drawn["KV layout"] == Counter({"branch": 2})
    for kind in ("opened", None, "ended", "died"):
        log.note(0, kind)
    assert [event.kind for event in log.events] == ["opened", "ended"]
    log.events = [
        Event(0, "opened", 1.0),
        *(Event(0, "judged", 2.0 + number / 10) for number in range(20)),
        Event(1, "opened", 1.0),
        Event(1, "differed", 2.0),
        Event(1, "found", 2.0),
        Event(1, "made smaller", 7.0),
        Event(1, "died", 8.0),
    ]
    picture = timeline(log, 10.0)
    assert picture is not None
    assert [(lane.judged, lane.differed, lane.deaths) for lane in picture.lanes] == [(20, 0, 0), (1, 1, 1)]
    assert picture.lanes[1].shrinking == "5 s"
    states = [block.state for block in picture.lanes[1].blocks]
    assert states == ["starting", "differs", "shrinking", "died"]
    assert timeline(RunLog(), 10.0) is None


def test_messages_of_workers_are_events() -> None:
    failure: Any = failure_of(FAULTS["lowered"])
    events = [
        event_of(message) for message in (Found(failure), Located(failure, 1.0), Died("signal 9"), Done(), Trouble("x"))
    ]
    assert events == ["found", "made smaller", "died", "ended", None]
    verdicts = [
        failure.verdict,
        Verdict(ONE_CHILD, "x", {"a": "checked"}),
        Verdict(ONE_CHILD, "x", {"a": "unobserved"}),
    ]
    assert [event_of(verdict) for verdict in verdicts] == ["differed", "judged", "not judged"]


def test_shares_have_intervals_that_hold_them() -> None:
    chart = share_bars("x", {"a": 3, "b": 1})
    assert chart is not None
    for _, (bar,) in chart.groups:
        assert 0 <= bar.low < bar.value < bar.high <= 1
    assert share_bars("x", {}) is None


def test_a_failure_of_another_request_shows_that_requests_tree() -> None:
    own_tree, other_tree = Tree((0, 0), (5, 7)), Tree((0, 0, 1), (4, 2, 3))
    session = Session((Mate((9, 4), Scripted((other_tree,))),), (Action("add", (0,)), Action("add", (1,))))
    case = replace(ONE_CHILD, session=session)
    steps = [
        (Step((3,), drafted=Drafted(tree), accepted=Accepted(path, 1)),)
        for tree, path in ((own_tree, (0, 1)), (other_tree, (0, 1, 2)))
    ]
    requests = tuple(Trace(request_steps, (1,), None) for request_steps in steps)
    trace = Trace(steps[0], (1,), None, shared=Shared(requests, ((3, 5), (9, 4))))
    finding = Finding("acceptance.greedy-walk", Stage.ACCEPTED, 0, {"request": 1, "node": 2}, 1, 2)
    scene = scene_of(Verdict(case, "x", {}, (finding,), trace=trace), finding)
    assert (scene.tree, scene.path, scene.node) == (other_tree, (0, 1, 2), 2)
    own_finding = replace(finding, where={"request": 0})
    assert scene_of(Verdict(case, "x", {}, (own_finding,), trace=trace), own_finding).tree == own_tree
    hidden = replace(trace, shared=None)
    assert scene_of(Verdict(case, "x", {}, (finding,), trace=hidden), finding).tree == other_tree


def test_a_run_without_any_case_has_a_page() -> None:
    text = sound(diff_page(Tally("x", invariants={"a.b": Counts()}, errors=["it broke"]), "0")).text
    assert "Could not judge" in text
    assert "it broke" in text
