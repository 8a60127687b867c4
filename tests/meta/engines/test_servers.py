"""Servers: every dialect is judged, what is wrong is found, and what cannot be judged ends the run in one line."""

import json
import math
import re
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specverify.backends.base import Unavailable
from specverify.backends.registry import UnknownBackend, open_backend
from specverify.backends.servers import web
from specverify.backends.servers.address import DIALECTS, KEY, address_of
from specverify.backends.servers.dialects import BY_NAME, counts_of
from specverify.backends.servers.web import WrongAnswer
from specverify.cli import main
from specverify.isolation.backend_spec import BackendSpec
from specverify.isolation.isolated import Isolated
from specverify.properties.invariants import ALL
from specverify.properties.verdict.judge import judge
from specverify.reference.architecture import Checkpoint
from specverify.reference.case import Case
from specverify.reference.oracle.checkpoint import identify
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.trace import Speculated
from specverify.setup.subjects import subject_of
from tests.inprocess import in_this_process
from tests.servers import MODEL, Handler, Served, checkpoint, serving
from tests.tiers import first

SECRET = "sk-do-not-tell-0123456789"

WAITED: list[float] = []
"""Seconds that a client would have waited between two tries."""


@pytest.fixture(autouse=True)
def waits(monkeypatch: pytest.MonkeyPatch) -> None:
    WAITED.clear()
    monkeypatch.setattr(web, "sleep", WAITED.append)
    monkeypatch.delenv(KEY, raising=False)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("server") / "tiny")


@pytest.fixture(scope="session")
def ending(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model, whose texts end at a token that greedy texts hold."""
    return checkpoint(tmp_path_factory.mktemp("server") / "ending", eos=7)


Diff = Callable[..., tuple[int, dict[str, Any], str]]


@pytest.fixture
def diff(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Diff:
    """Runs `diff` on a server: exit code, result, and all that was printed, on one line."""
    in_this_process(monkeypatch)
    monkeypatch.chdir(tmp_path)

    def run(served: Served, options: str = "", *words: str) -> tuple[int, dict[str, Any], str]:
        arguments = ["--backend", f"openai:{served.url}{options}", "--model", str(served.checkpoint)]
        with pytest.raises(SystemExit) as ended:
            main(["diff", *arguments, "--cases", "3", "--new-tokens", "8", "--json", "result.json", *words])
        assert isinstance(ended.value.code, int)
        output = capfd.readouterr()
        page = " ".join((output.out + output.err).split())
        # A run without a case has one line, and nothing to report.
        result = {"judged": 0, "findings": [], "errors": [page.partition("specverify: ")[2]]}
        if Path("result.json").exists():
            result = json.loads(Path("result.json").read_text())
        return ended.value.code, result, page

    return run


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("temperature", ["0", "1"])
def test_every_dialect_is_judged(dialect: str, temperature: str, tiny: Path, diff: Diff) -> None:
    sampled = () if temperature == "0" else ("--temperature", temperature)
    with serving(Served(tiny, dialect, seeded=dialect != "sglang")) as served:
        code, result, _ = diff(served, "", *sampled)
    assert (code, result["judged"], result["declined"]) == (0, 3, {})
    counted = result["invariants"]
    assert counted["lossless.distribution" if sampled else "lossless.greedy-match"]["checked"] == 3
    # Two requests of a server whose draws follow no seed may differ.
    assert (counted["lossless.deterministic"]["checked"] == 0) == bool(sampled and dialect == "sglang")


def test_the_dialects_of_an_address_are_those_that_there_are() -> None:
    assert set(DIALECTS) == set(BY_NAME)


def test_the_tutorial_names_every_dialect_with_its_route_and_the_bounds() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "tutorials" / "server.md").read_text()
    rows = dict(re.findall(r"^\| `([\w.]+)` \| `(/[\w/]+)`", page, re.MULTILINE))
    assert rows == {name: dialect.PATH for name, dialect in BY_NAME.items()}
    address = address_of("openai:http://127.0.0.1:1")
    assert f"`timeout=SECONDS` ({address.timeout:g}), `tries=N` ({address.tries})" in page
    assert KEY in page


def test_a_server_that_takes_texts_alone_is_asked_in_texts(tiny: Path, diff: Diff) -> None:
    with serving(Served(tiny, "openai", ids=False)) as served:
        code, result, _ = diff(served)
    assert (code, result["judged"]) == (0, 3)
    assert all(isinstance(body["prompt"], str) for body in served.bodies[-3:])


@pytest.mark.parametrize("dialect", first(DIALECTS, 1))
def test_texts_end_at_the_checkpoints_end_token(dialect: str, ending: Path) -> None:
    model = identify(ending)
    with serving(Served(ending, dialect)) as served:
        backend = open_backend(f"openai:{served.url}")
        traces = [backend.run(Case(model, (start,), stops=Stops(40, eos=(7,)))) for start in range(12)]
    ended = [trace for trace in traces if trace.finish == "eos"]
    assert ended
    assert all(trace.output[-1] == 7 and 7 not in trace.output[:-1] for trace in ended)
    assert all(len(trace.output) == 40 for trace in traces if trace.finish == "length")


def test_another_end_than_the_servers_is_declined(ending: Path, diff: Diff) -> None:
    with serving(Served(ending, "llama.cpp")) as served:
        backend = open_backend(f"openai:{served.url}")
        from specverify.backends.base import Unsupported

        with pytest.raises(Unsupported, match="ends a text at the model's own end tokens alone"):
            backend.run(Case(identify(ending), (3,), stops=Stops(4)))


def test_every_setting_of_a_request_is_sent(tiny: Path) -> None:
    sampling = Sampling(0.5, top_k=3, top_p=0.5, min_p=0.1, seed=2**40)
    case = Case(identify(tiny), (3, 1, 4), sampling=sampling, stops=Stops(6))
    sent = {}
    for dialect in ("vllm", "llama.cpp", "sglang"):
        with serving(Served(tiny, dialect)) as served:
            open_backend(f"openai:{served.url}").run(case)
        body = served.bodies[-1]
        sent[dialect] = body.get("sampling_params", body)
        for name, value in (("temperature", 0.5), ("top_k", 3), ("top_p", 0.5), ("min_p", 0.1)):
            assert sent[dialect][name] == value
        assert body.get("prompt", body.get("input_ids")) == [3, 1, 4]
    assert sent["vllm"]["seed"] == sent["llama.cpp"]["seed"] == 2**40 % (2**31 - 1)
    assert sent["llama.cpp"]["samplers"][0] == "temperature"


def test_logprobs_are_compared(tiny: Path, diff: Diff) -> None:
    def certain(content: Any) -> Any:
        choice = content["choices"][0]
        choice["logprobs"] = {"token_logprobs": [0.0] * len(choice["token_ids"])}
        return content

    with serving(Served(tiny, edit=certain)) as served:
        code, result, _ = diff(served)
        assert code == 1
        assert {finding["invariant"] for finding in result["findings"]} == {"lossless.logprobs"}
        assert diff(served, "#logprobs=no")[0] == 1, "a server that tells them all the same is believed"
    assert "logprobs" not in served.bodies[-1]


@pytest.mark.parametrize(
    ("change", "invariant"),
    [
        (lambda tokens: [*tokens[:-1], (tokens[-1] + 1) % MODEL.vocab_size], "lossless.greedy-match"),
        (lambda tokens: [*tokens, 3, 1], "lossless.stops"),
        (lambda tokens: tokens[: max(1, len(tokens) - 2)], "lossless.stops"),
    ],
    ids=["wrong", "too many", "too few"],
)
def test_wrong_tokens_are_found(
    change: Callable[[list[int]], list[int]], invariant: str, tiny: Path, diff: Diff
) -> None:
    with serving(Served(tiny, change=change)) as served:
        code, result, _ = diff(served, "", "--invariant", invariant)
    assert code == 1
    assert [finding["invariant"] for finding in result["findings"]] == [invariant]


def answers(status: int, content: Any, **headers: str) -> Callable[[Handler, dict[str, Any]], bool]:
    """A fault: generations of more than one token are answered with `content`."""

    def fault(handler: Handler, body: dict[str, Any]) -> bool:
        if len(handler.served.bodies) <= 7:  # what the opening asks
            return False
        handler.send(status, content, **headers)
        return True

    return fault


def drips(handler: Handler, body: dict[str, Any]) -> bool:
    if len(handler.served.bodies) <= 7:
        return False
    handler.send_response(200)
    handler.end_headers()
    for _ in range(40):
        handler.wfile.write(b"data: {}\n\n")
        time.sleep(0.05)
    return True


def hangs(handler: Handler, body: dict[str, Any]) -> bool:
    if len(handler.served.bodies) <= 7:
        return False
    handler.rfile.read(1)  # until the client gives up
    return True


def breaks_off(handler: Handler, body: dict[str, Any]) -> bool:
    if len(handler.served.bodies) <= 7:
        return False
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 400\r\n\r\n{")
    return True


def babbles(handler: Handler, body: dict[str, Any]) -> bool:
    if len(handler.served.bodies) <= 7:
        return False
    handler.wfile.write(b"\x00\xff nonsense without a head\r\n\r\n")
    return True


CHOICE = {"text": "3 1", "finish_reason": "length"}
BAD: dict[str, tuple[Any, str]] = {
    "500": (answers(500, {"error": {"message": "out of memory"}}), "answers 500: out of memory (4 tries)"),
    "503 without a message": (answers(503, b"<html>"), "answers 503 (4 tries)"),
    "429": (answers(429, {"message": "slow down"}, Retry_After="2"), "answers 429: slow down (4 tries)"),
    "429 for an hour": (answers(429, {}, Retry_After="3600"), "answers 429 and asks to wait 3600 s, which is too long"),
    "400": (answers(400, {"error": {"message": "too long"}}), "answers 400: too long"),
    "redirect": (answers(307, {}, Location="http://127.0.0.1:9/"), "answers 307, a redirect: give the new address"),
    "no JSON": (answers(200, b"data: [DONE]"), "answers what is no JSON (4 tries)"),
    "no object": (answers(200, [1]), "answers JSON whose field choices is missing or of the wrong type (4 tries)"),
    "no choice": (answers(200, {"choices": []}), "answers JSON with 0 choices, expected 1 (4 tries)"),
    "no ids": (
        answers(200, {"choices": [{**CHOICE, "token_ids": [1, "2"]}]}),
        "answers JSON whose token_ids[1] is no token id (4 tries)",
    ),
    "another count": (
        answers(200, {"choices": [{**CHOICE, "token_ids": [1]}], "usage": {"completion_tokens": 8}}),
        "answers 1 tokens and counts 8 (4 tries)",
    ),
    "fewer logprobs": (
        answers(200, {"choices": [{**CHOICE, "token_ids": [1, 2, 3], "logprobs": {"token_logprobs": [0.0]}}]}),
        "answers 3 tokens and 1 log-probabilities (4 tries)",
    ),
    "merged": (
        answers(200, {"choices": [CHOICE], "usage": {"completion_tokens": 8}}),
        "answers a text of 2 tokens by the checkpoint's tokenizer and of 8 by its own count: tokens merge as text, so "
        "that they cannot be judged (4 tries)",
    ),
    "text alone": (answers(200, {"choices": [CHOICE]}), "tells neither tokens nor their number"),
    "drips": (drips, "gave no whole answer within 0.3 s (4 tries)"),
    "hangs": (hangs, "gave no whole answer within 0.3 s (4 tries)"),
    "breaks off": (breaks_off, "broke the connection off in its answer (4 tries)"),
    "babbles": (babbles, "broke the connection off (BadStatusLine) (4 tries)"),
}
"""What a server does after it was opened, and what the one line says of it."""


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_judged_ends_the_run_in_one_line(name: str, tiny: Path, diff: Diff) -> None:
    fault, line = BAD[name]
    with serving(Served(tiny, fault=fault)) as served:
        code, result, page = diff(served, "#timeout=0.3" if "whole answer" in line else "")
    assert (code, result["judged"], result["findings"]) == (3, 0, [])
    (error,) = result["errors"]
    assert line in error
    assert error.startswith(f"the server {served.url} at /v1/completions: ")
    assert "Traceback" not in page


def test_what_was_judged_before_the_server_went_is_told(tiny: Path, diff: Diff) -> None:
    def goes(handler: Handler, body: dict[str, Any]) -> bool:
        if len(handler.served.bodies) > 12:
            handler.send(500, {})
        return len(handler.served.bodies) > 12

    with serving(Served(tiny, fault=goes)) as served:
        code, result, page = diff(served, "", "--cases", "20", "--invariant", "lossless.greedy-match")
    assert code == 3
    assert 0 < result["judged"] < 20
    assert result["invariants"]["lossless.greedy-match"]["checked"] == result["judged"]
    assert len(result["errors"]) == 1
    assert "AGREE" not in page


def test_a_server_that_recovers_is_judged_and_its_retry_after_is_kept(tiny: Path, diff: Diff) -> None:
    def once(handler: Handler, body: dict[str, Any]) -> bool:
        number = len(handler.served.bodies)
        if number in (9, 12):
            handler.send(429 if number == 9 else 500, {}, Retry_After="7")
        return number in (9, 12)

    with serving(Served(tiny, fault=once)) as served:
        code, result, _ = diff(served)
    assert (code, result["judged"]) == (0, 3)
    assert WAITED == [7.0, web.FIRST_WAIT_S]


def test_a_server_that_is_down_is_said_so(tiny: Path, diff: Diff) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    code, result, _ = diff(Served(tiny, url=f"http://127.0.0.1:{port}"))
    assert (code, result["judged"]) == (3, 0)
    (error,) = result["errors"]
    assert (
        error == f"the server http://127.0.0.1:{port} at /v1/models: cannot be reached (Connection refused) (4 tries)"
    )
    assert sum(WAITED) == web.FIRST_WAIT_S * (2**3 - 1)


@pytest.mark.slow
def test_a_server_that_goes_is_no_finding_in_a_process_of_its_own_either(tiny: Path) -> None:
    case = Case(identify(tiny), (3, 1), stops=Stops(4))
    with serving(Served(tiny)) as served, Isolated(BackendSpec(f"openai:{served.url}#tries=1")) as apart:
        subject = apart.subject()
        assert len(subject(case).output) == 4
        served.fault = answers(500, {})
        with pytest.raises(Unavailable, match="answers 500"):
            subject.run_again(case)


def texts(folder: Path) -> str:
    """All that lies in the files below a folder."""
    return "".join(file.read_text(errors="replace") for file in folder.rglob("*") if file.is_file())


def test_the_key_reaches_the_server_and_nothing_else(
    tiny: Path, tmp_path: Path, diff: Diff, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY, SECRET)
    echo = {"error": {"message": f"Incorrect API key provided: {SECRET}"}}
    pages = []
    for fault in (answers(401, echo), answers(500, echo), answers(200, b"x"), None):
        with serving(Served(tiny, fault=fault, change=lambda tokens: [*tokens, 1])) as served:
            code, result, page = diff(served)
            pages.append(page + json.dumps(result))
        assert code == (3 if fault else 1)
        assert set(served.keys) == {f"Bearer {SECRET}"}
    assert f"the key in {KEY} is refused" in pages[0]
    assert list((tmp_path / ".specverify").glob("*.json")), "a bundle of the failure"
    assert SECRET not in texts(tmp_path)
    assert all(SECRET not in page for page in pages)


def test_a_key_that_no_header_may_hold_is_not_shown(tiny: Path, diff: Diff, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, f"{SECRET}\nX-Injected: 1")
    with serving(Served(tiny)) as served:
        code, result, page = diff(served)
    assert (code, served.bodies) == (3, [])
    assert result["errors"] == [f"{KEY} holds a blank or a character that no HTTP header may hold"]
    assert SECRET not in page


def test_a_server_that_wants_a_key_is_told_where_to_put_it(tiny: Path, diff: Diff) -> None:
    with serving(Served(tiny, fault=answers(403, {}))) as served:
        assert f"it wants a key: put it into {KEY}" in diff(served)[1]["errors"][0]


@pytest.mark.parametrize("message", ["invalid: [3, 1, 4, 1]", "your prompt was: 3 1 4 1 5 9 2 6"])
def test_no_prompt_is_shown_that_a_server_echoes(message: str, tiny: Path, diff: Diff) -> None:
    with serving(Served(tiny, fault=answers(400, {"error": {"message": message}}))) as served:
        (error,) = diff(served)[1]["errors"]
    assert "[numbers]" in error
    assert "3, 1" not in error
    assert "3 1" not in error


def test_a_text_prompt_is_not_shown_either(tiny: Path) -> None:
    client = web.Web(address_of("openai:http://127.0.0.1:1#tries=1"))
    raw = json.dumps({"detail": "no: 'tell me of the secret plan'"}).encode()
    assert client._message(raw, "Please tell me of the secret plan at once") == ""
    assert client._message(raw, "Another text altogether") == ": no: 'tell me of the secret plan'"


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("openai:localhost:8000", "no URL of a server"),
        ("openai:http://127.0.0.1:port", "no URL of a server"),
        (f"openai:http://me:{SECRET}@127.0.0.1/v1", f"put the key into {KEY}"),
        (f"openai:http://127.0.0.1/v1?key={SECRET}", f"put a key into {KEY}"),
        ("openai:http://127.0.0.1#dialect=klingon", "dialect=klingon is none of dialect=openai|vllm|llama.cpp|sglang"),
        ("openai:http://127.0.0.1#timeout=0", "timeout=0 is none of"),
    ],
)
def test_an_address_that_cannot_be_used_is_refused(name: str, line: str, diff: Diff, tmp_path: Path) -> None:
    with pytest.raises(UnknownBackend) as refused:
        open_backend(name)
    assert line in str(refused.value)
    with pytest.raises(SystemExit) as ended:
        main(["diff", "--backend", name, "--model", str(tmp_path)])
    assert ended.value.code == 2
    assert SECRET not in str(refused.value) + texts(tmp_path)


def test_options_of_an_address() -> None:
    address = address_of("openai:https://host:1/v1/#dialect=sglang,model=a/b,timeout=1.5,tries=2,logprobs=no")
    assert (address.root, address.dialect, address.model) == ("https://host:1", "sglang", "a/b")
    assert (address.timeout, address.tries, address.logprobs) == (1.5, 2, False)


def test_a_server_needs_the_checkpoint_beside_it(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["diff", "--backend", "openai:http://127.0.0.1:1"])
    assert ended.value.code == 2
    assert "name the same checkpoint's folder with --model" in " ".join(capfd.readouterr().err.split())


def test_one_of_several_models_is_named(tiny: Path) -> None:
    with serving(Served(tiny, models=("one", "two"))) as served:
        with pytest.raises(Unavailable, match=r"has 2 models \(one, two\): name one with #model=NAME"):
            open_backend(f"openai:{served.url}")
        open_backend(f"openai:{served.url}#model=two")
    assert served.bodies[-1]["model"] == "two"


def test_the_last_bits_of_logprobs_may_differ_from_run_to_run(tiny: Path) -> None:
    calls: list[int] = []

    def nearly(content: Any) -> Any:
        calls.append(1)
        choice = content["choices"][0]
        choice["logprobs"] = {"token_logprobs": [-1.0 - 1e-7 * len(calls)] * len(choice["token_ids"])}
        return content

    with serving(Served(tiny, edit=nearly)) as served:
        subject = subject_of(open_backend(f"openai:{served.url}"))
        verdict = judge(Case(identify(tiny), (3, 1), stops=Stops(4)), ALL, Oracle(), subject)
    assert verdict.outcomes["lossless.deterministic"] == "checked"
    assert verdict.outcomes["lossless.state-isolated"] == "checked"
    assert verdict.outcomes["lossless.logprobs"] == "failed"


def test_infinite_logprobs_are_no_crash(tiny: Path, diff: Diff) -> None:
    def never(content: Any) -> Any:
        choice = content["choices"][0]
        choice["logprobs"] = {"token_logprobs": [-math.inf] * len(choice["token_ids"])}
        return content

    with serving(Served(tiny, edit=never)) as served:
        code, result, _ = diff(served)
    assert code == 1
    assert {finding["invariant"] for finding in result["findings"]} == {"lossless.logprobs"}


def test_a_checkpoint_of_cases_is_named_by_its_directory(tiny: Path) -> None:
    assert isinstance(identify(tiny), Checkpoint)


SPECULATION_FIELDS: dict[str, tuple[dict[str, Any], Speculated | None]] = {
    "timings": ({"timings": {"draft_n": 7, "draft_n_accepted": 4}}, Speculated(7, 4)),
    "meta_info": ({"meta_info": {"spec_draft_token_num": 6, "spec_accept_token_num": 0}}, Speculated(6, 0)),
    "usage": (
        {"usage": {"completion_tokens_details": {"accepted_prediction_tokens": 2, "rejected_prediction_tokens": 3}}},
        Speculated(5, 2),
    ),
    "none": ({"usage": {"completion_tokens": 4}, "timings": {"predicted_n": 4}}, None),
}
"""Parts of answers that tell counts of drafted tokens, and what they say."""


@pytest.mark.parametrize("place", SPECULATION_FIELDS)
def test_counts_of_drafted_tokens_are_read_where_a_server_tells_them(place: str, tiny: Path) -> None:
    part, counts = SPECULATION_FIELDS[place]

    with serving(Served(tiny, edit=lambda content: {**content, **part})) as served:
        trace = open_backend(f"openai:{served.url}").run(Case(identify(tiny), (3, 1), stops=Stops(4)))
    assert trace.speculated == counts


@pytest.mark.parametrize(
    ("timings", "line"),
    [
        ({"draft_n": 3, "draft_n_accepted": 4}, "answers 4 accepted tokens of 3 drafted ones"),
        ({"draft_n": 3, "draft_n_accepted": "2"}, "whose count draft_n_accepted is no whole number"),
        ({"draft_n": -3, "draft_n_accepted": 0}, "whose count draft_n is no whole number"),
    ],
)
def test_counts_that_make_no_sense_are_a_wrong_answer(timings: Any, line: str) -> None:
    with pytest.raises(WrongAnswer, match=line):
        counts_of({"timings": timings})


def test_a_server_that_accepts_no_draft_was_not_tested(tiny: Path, diff: Diff) -> None:
    fields = {"timings": {"draft_n": 3, "draft_n_accepted": 0}}
    with serving(Served(tiny, edit=lambda content: {**content, **fields})) as served:
        code, _, page = diff(served)
    assert code == 3
    assert "speculation was not tested" in page
