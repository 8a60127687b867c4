"""HTML pages by their parser: structure, words for pictures, size, and nothing but our own markup."""

import base64
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest

from specverify.laws.command import Options, laws_of
from specverify.properties.gate_result import GateResult, GateRun
from specverify.properties.tally import Failure
from specverify.reference.case_json import case_from_json
from specverify.reference.tree import Tree
from specverify.reports import bundle
from specverify.reports.format import clean
from specverify.reports.html import document
from specverify.reports.html.law import law_page
from specverify.reports.html.pages import diff_page, gate_page, replay_page
from specverify.reports.html.pictures.grid import shown_indices
from specverify.reports.html.pictures.heat import heat_maps
from specverify.reports.html.pictures.mask import mask_picture
from specverify.reports.html.pictures.slots import slots_picture
from specverify.reports.html.pictures.step_truth import step_truth
from specverify.reports.html.pictures.tree import tree_picture
from specverify.reports.html.selftest import figures_page, selftest_page
from specverify.reports.pages.selftest import CleanRun, FaultHunt, SelfTest
from specverify.reports.tree_scene import Scene
from specverify.setup.subjects import open_planted, subject_of
from tests.cases import CORPUS
from tests.meta.gate.hostile import strings
from tests.meta.gate.test_reports import UNSAFE, result_of
from tests.meta.pages.planted import FAULTS, failure_of, tally_of

VOID = {"meta", "br"}
"""Elements of our pages that have no end."""


class Read(HTMLParser):
    """The elements of a page with their attributes, in order, and its text; it fails on a wrong nesting."""

    def __init__(self, page: bytes) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.feed(page.decode())
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(dict(attrs)) == len(attrs)
        self.elements.append((tag, dict(attrs)))
        self.open += [] if tag in VOID else [tag]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def handle_comment(self, data: str) -> None:
        raise AssertionError(f"a comment: {data[:60]}")

    @property
    def shape(self) -> list[tuple[str, tuple[str, ...]]]:
        """Elements with the names of their attributes."""
        return [(tag, tuple(attributes)) for tag, attributes in self.elements]

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def sound(page: bytes) -> Read:
    """The page, after what every page must hold."""
    read = Read(page)
    ids = [attributes["id"] for _, attributes in read.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert read.elements[0][0] == "html"
    assert not {"script", "link", "img", "iframe", "object", "form"} & {tag for tag, _ in read.elements}
    for tag, attributes in read.elements:
        assert not any(name.startswith("on") or name == "style" for name in attributes)
        assert tag != "svg" or set(str(attributes["aria-labelledby"]).split()) <= set(ids)
        assert tag != "th" or attributes.get("scope")
        if "href" in attributes:
            assert tag == "a"
            assert re.match(r"#failure-\d+$|data:application/json;base64,[A-Za-z0-9+/]*=*$", str(attributes["href"]))
    assert not UNSAFE.search(page.decode())
    assert len(page) < document.LARGEST
    return read


def test_a_page_begins_with_sentences_that_need_no_glossary() -> None:
    text = sound(diff_page(tally_of(failure_of(FAULTS["lowered"])), "0.1")).text
    opening = text[text.index("Differs SpecVerify") :]
    assert opening.startswith(
        "Differs SpecVerify on cpu-eager cpu-eager does not give what the target model alone would give. A draft model "
        "proposes a tree of tokens, and the target model checks the whole tree at once."
    )
    for name in (
        "What was judged 1 of 1 case judged",
        "What went wrong The mask lets row 2 see column 1",
        "What to do",
    ):
        assert name in opening
    assert "specverify replay .specverify/" in opening


@pytest.mark.parametrize(("stage", "sentence"), [
    ("lowered", "Node 2 sees node 1 and must not."),
    ("attended", "Node 2 sees node 1 and must not."),
    ("committed", "Slot 1 must hold node 2 and holds node 1."),
])  # fmt: skip
def test_the_wrong_cell_of_a_planted_fault_is_marked_and_told(stage: str, sentence: str) -> None:
    read = sound(diff_page(tally_of(failure_of(FAULTS[stage])), "0"))
    assert sentence in read.text
    marked = [
        str(attributes["class"]).split() for tag, attributes in read.elements if tag == "td" and "class" in attributes
    ]
    assert sum({"wrong", "here"} <= set(names) for names in marked) >= 1
    assert "The nearest case that agrees" in read.text
    assert "heat" in {name for _, attributes in read.elements for name in str(attributes.get("class")).split()}


def test_the_bundle_in_the_page_is_the_case() -> None:
    failure = failure_of(FAULTS["committed"])
    read = sound(diff_page(tally_of(failure), "0"))
    (link,) = [attributes for tag, attributes in read.elements if tag == "a" and "download" in attributes]
    content = json.loads(base64.b64decode(str(link["href"]).partition(",")[2]))
    assert link["download"] == f"{failure.verdict.case.id}.json"
    assert case_from_json(content["case"]) == failure.verdict.case
    assert content["fault"] == FAULTS["committed"]


def test_without_the_fault_the_same_pictures_mark_nothing() -> None:
    """The pictures show the trace: of a sound trace no cell is wrong."""
    failure = failure_of(FAULTS["committed"])
    case = bundle.load(CORPUS / f"{FAULTS['committed']}.json").case
    clean = replace(failure, verdict=replace(failure.verdict, trace=None))
    assert mask_picture(step_truth(clean)) is None
    trace = subject_of(open_planted("cpu-eager", None, None), 8)(case)
    # Without the finding's measure, by which its own cell sets the scale of its heat map.
    finding = replace(failure.finding, measure=None)
    truth = step_truth(replace(failure, verdict=replace(failure.verdict, trace=trace), finding=finding))
    mask = mask_picture(truth)
    assert mask is not None
    assert mask.wrong == 0
    assert len(heat_maps(truth)) == 4
    assert not any(heat_map.off for heat_map in heat_maps(truth))
    sound_slots = slots_picture(truth)
    assert sound_slots is not None
    assert not sound_slots.words
    # The same pictures of the fault's own trace: keys and values are off, attention and logits before them are not.
    assert [heat_map.off for heat_map in heat_maps(step_truth(failure))] == [False, False, True, True]
    slots = slots_picture(step_truth(failure))
    assert slots is not None
    assert slots.words


def hostile_failure(text: str) -> Failure:
    """A failure with a trace, all of whose foreign words are `text`."""
    failure = failure_of(FAULTS["attended"])
    where = {**failure.finding.where, "variant": text}
    finding = replace(failure.finding, invariant=text, where=where, expected=text, observed=text, said=(text, text))
    assert failure.verdict.trace is not None
    trace = replace(failure.verdict.trace, fallbacks={text: 1})
    verdict = replace(failure.verdict, backend=text, findings=(finding,), trace=trace)
    name = text[:200]
    return replace(failure, verdict=verdict, finding=finding, drawn=text, file=name, fault=name, backend=name)


def pages_of(text: str) -> list[bytes]:
    """Every kind of page, all foreign words of which are `text`."""
    caught = [
        FaultHunt(text, text, "lowered", backend=text, caught=True, by=text, stage_named="scored", cases=3, case=text),
        FaultHunt(text, "", "lowered", missing=text),
        FaultHunt(text, "", "lowered", cases=3),
    ]
    report = SelfTest(caught, [CleanRun(text, 2, text, text)], [text], [text])
    laws = [replace(law, rule=text, sentence=text, why=text, world=text) for law in laws_of(Options(rule="typical"))]
    failure = hostile_failure(text)
    tally = tally_of(failure)
    tally.backend, tally.environment, tally.stopped, tally.errors = text, {text: text}, text, [text]
    return [
        gate_page(result_of(text), text),
        diff_page(tally, text),
        replay_page("FAILED", text, failure, False, {text: text}, text),
        selftest_page(report, text),
        law_page(laws, text),
        law_page(laws * 2, text),
        figures_page(text, text, {text: text, "rows": [{text: text}]}, text),
    ]


HOSTILE = strings()


@pytest.mark.parametrize("step", [20, pytest.param(1, marks=pytest.mark.slow)], ids=["one in twenty", "all"])
def test_no_foreign_word_makes_an_element_or_an_attribute(step: int) -> None:
    plain = [sound(page).shape for page in pages_of("word")]
    for text in (*HOSTILE[:-1][::step], HOSTILE[-1][:3000]):
        shapes = [sound(page).shape for page in pages_of(text)]
        # A text of blanks is left out with its label.
        blank = not clean(text)
        assert blank or shapes == plain, text[:200]
        assert all(set(shape) <= set(sought) for shape, sought in zip(shapes, plain, strict=True))


def test_a_megabyte_in_every_word_leaves_a_page_small() -> None:
    for page in pages_of(HOSTILE[-1]):
        sound(page)
        assert len(page) < 300_000


def test_the_parser_sees_what_a_raw_word_would_do() -> None:
    page = diff_page(tally_of(failure_of(FAULTS["lowered"])), "0")
    broken = page.replace(b"cpu-eager", b"<script>1</script>", 1)
    with pytest.raises(AssertionError):
        sound(broken)
    assert Read(b'<p title="a" onclick="b">x</p>').shape == [("p", ("title", "onclick"))]


def test_a_large_tree_is_drawn_in_part_and_a_long_context_too() -> None:
    chain = Tree(tuple(max(0, node - 1) for node in range(3000)), (1,) * 3000)
    picture = tree_picture(Scene(chain, (0, 1, 2), 2999), "chain")
    assert picture is not None
    assert len(picture.nodes) <= 20
    assert any(node.here for node in picture.nodes)
    assert picture.left_out + len(picture.nodes) == 3000
    assert len(shown_indices(5000, [7, 4000])) == 24
    assert {7, 4000} <= set(shown_indices(5000, [7, 4000]))


def test_a_run_that_agrees_says_so_and_what_it_did_not_judge() -> None:
    tally: Any = tally_of(failure_of(FAULTS["lowered"]))
    tally.failures, tally.differed = [], 0
    text = sound(diff_page(tally, "0")).text
    assert "Agrees" in text
    assert "What to do Nothing." in text
    assert "not judged: draft.rollback (not applicable to 1 case)" in text


def test_many_failures_and_several_backends_stay_on_one_sound_page() -> None:
    failures = [failure_of(fault) for fault in FAULTS.values()] * 5
    read = sound(diff_page(tally_of(*failures), "0"))
    assert "5 further failures not shown here" in read.text
    assert sum(tag == "section" for tag, _ in read.elements) == 10
    runs = [GateRun(name, None, tally_of(*failures[:7])) for name in ("one", "two", "three")]
    page = gate_page(GateResult(runs, seconds=3.0), "0")
    read = sound(page)
    assert sum(tag == "section" for tag, _ in read.elements) == 10
    assert "three: 7 further failures not shown here" in read.text
