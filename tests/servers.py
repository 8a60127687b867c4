"""A real HTTP server on this machine that runs a checkpoint, in each dialect, with faults to choose from."""

import json
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from specverify.adapt import Request
from specverify.backends.adapt import save_checkpoint
from specverify.properties.strategies.models import GALLERY
from specverify.reference.architecture import Seeded
from tests.strangers.batching_engine import BatchingEngine

MODEL = Seeded(GALLERY[1], 0)
"""The model that the servers have."""

OWNER = {"openai": "somebody", "vllm": "vllm", "llama.cpp": "llamacpp", "sglang": "sglang"}


def checkpoint(folder: Path, eos: int | None = None) -> Path:
    """A directory with MODEL, whose texts end at `eos`."""
    save_checkpoint(MODEL, "float32", folder)
    for file in (folder / "config.json", folder / "generation_config.json"):
        file.write_text(json.dumps({**json.loads(file.read_text()), "eos_token_id": eos}))
    return folder


Fault = Callable[["Handler", dict[str, Any]], bool]
"""Called with a handler and the JSON of a generation; True if it has answered, so that nothing more is done."""


IsGone = Callable[[], bool]
"""Whether the client of a request has gone."""

STEP_S = 0.004
"""Seconds of a step of all requests inside."""


class SteppingEngine:
    """Steps all requests that are inside together, in a thread of its own that lives while requests are inside."""

    def __init__(self, network: Any, mix_up: str) -> None:
        self._network = network
        self._mix_up = mix_up
        self._turn = threading.Condition()
        self._engine: BatchingEngine | None = None
        self.num_cancelled = 0

    def answer(self, request: Request, is_gone: IsGone) -> list[int]:
        """The text of a request, once nobody is inside any more; cancelled where its client has gone."""
        with self._turn:
            is_first = self._engine is None
            engine = self._engine = self._engine or BatchingEngine(self._network, self._mix_up)
            place = len(engine.lanes)
            engine.add(request)
            if is_first:
                threading.Thread(target=self._step, args=(engine,), daemon=True).start()
            while self._engine is engine:
                if not engine.lanes[place].is_over and is_gone():
                    engine.cancel(place)
                    self.num_cancelled += 1
                self._turn.wait(STEP_S)
        answers = engine.answers()
        return answers[place] if place < len(answers) else []

    @torch.no_grad()
    def _step(self, engine: BatchingEngine) -> None:
        while engine.inside:
            time.sleep(STEP_S)
            with self._turn:
                engine.step()
                if not engine.inside:
                    self._engine = None
                    self._turn.notify_all()


@dataclass
class Served:
    """A server's settings and what it was asked.

    Attributes:
        checkpoint: The directory that it runs.
        dialect: The dialect in which it answers.
        fault: What goes wrong, or None.
        change: A function of the generated tokens, which are right without it.
        mix_up: The mix-up of requests that step together, empty for none; None where each has a text by itself.
        edit: A function of the JSON of an answer.
        ids: Whether it takes token ids as prompts.
        seeded: Whether draws follow the seed.
        models: Names of its models.
        asked: The JSON of every generation that it was asked for.
        keys: The authorisation of every request.
    """

    checkpoint: Path
    dialect: str = "vllm"
    fault: Fault | None = None
    change: Callable[[list[int]], list[int]] = lambda tokens: tokens
    mix_up: str | None = None
    edit: Callable[[Any], Any] = lambda content: content
    ids: bool = True
    seeded: bool = True
    models: tuple[str, ...] = ("tiny",)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    url: str = ""

    def __post_init__(self) -> None:
        self.network = AutoModelForCausalLM.from_pretrained(self.checkpoint, dtype=torch.float32).eval()
        self.end = json.loads((self.checkpoint / "config.json").read_text())["eos_token_id"]
        self.draws = torch.Generator().manual_seed(0)
        self.stepping = None if self.mix_up is None else SteppingEngine(self.network, self.mix_up)

    def generated(
        self, prompt: list[int], most: int, temperature: float, seed: int, ends: list[int], is_gone: IsGone
    ) -> list[int]:
        """Tokens from scratch, one after the other; beside those of other requests where the engine steps them."""
        if self.stepping is not None:
            return self.stepping.answer(Request(prompt, most, temperature, seed=seed, stops=tuple(ends)), is_gone)
        tokens, draws = list(prompt), torch.Generator().manual_seed(seed) if self.seeded else self.draws
        with torch.no_grad():
            while len(tokens) < len(prompt) + most:
                row = self.network(torch.tensor([tokens]), use_cache=False).logits[0, -1].double()
                law = (row / temperature).softmax(-1) if temperature else row
                token = int(torch.multinomial(law, 1, generator=draws) if temperature else law.argmax())
                tokens.append(token)
                if token in ends:
                    break
        return self.change(tokens[len(prompt) :])

    def answer(self, path: str, body: dict[str, Any], is_gone: IsGone) -> Any:
        """The JSON of an answer in the server's dialect."""
        if path == "/generate":
            how = body["sampling_params"]
            ends = how["stop_token_ids"]
            prompt = body["input_ids"]
            tokens = self.generated(prompt, how["max_new_tokens"], how["temperature"], 0, ends, is_gone)
            ended = tokens[-1] in ends
            reason = {"type": "stop", "matched": tokens[-1]} if ended else {"type": "length"}
            return {"output_ids": tokens, "text": "", "meta_info": {"finish_reason": reason}}
        prompt = body["prompt"] if isinstance(body["prompt"], list) else [int(word) for word in body["prompt"].split()]
        ends = body.get("stop_token_ids", [] if self.end is None else [self.end])
        most = body["max_tokens"] if "max_tokens" in body else body["n_predict"]
        tokens = self.generated(prompt, most, body["temperature"], body["seed"], ends, is_gone)
        ended = bool(tokens) and tokens[-1] in ends
        if path == "/completion":
            return {"tokens": tokens, "tokens_predicted": len(tokens), "stop_type": "eos" if ended else "limit"}
        shown_tokens = tokens[: len(tokens) - ended] if self.dialect == "openai" else tokens
        choice: dict[str, Any] = {
            "text": " ".join(map(str, shown_tokens)),
            "finish_reason": "stop" if ended else "length",
            "logprobs": None,
        }
        if body.get("return_token_ids"):
            choice |= {"token_ids": tokens, "stop_reason": tokens[-1] if ended else None}
        return {"choices": [choice], "usage": {"completion_tokens": len(tokens)}}


class Handler(BaseHTTPRequestHandler):
    """One request."""

    served: Served

    def log_message(self, *_: Any) -> None: ...

    def do_GET(self) -> None:
        owner = OWNER[self.served.dialect]
        self.send(200, {"data": [{"id": name, "owned_by": owner} for name in self.served.models]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.served.bodies.append(body)
        self.served.keys.append(self.headers.get("Authorization"))
        if self.served.fault is not None and self.served.fault(self, body):
            return
        if not self.served.ids and isinstance(body.get("prompt"), list):
            self.send(400, {"error": {"message": "prompt must be a string"}})
            return
        self.send(200, self.served.edit(self.served.answer(self.path, body, self.is_gone)))

    def is_gone(self) -> bool:
        """Whether the client has closed its connection."""
        readable, _, _ = select.select([self.connection], [], [], 0)
        return bool(readable) and not self.connection.recv(1, socket.MSG_PEEK)

    def send(self, status: int, content: Any, **headers: str) -> None:
        """Answer JSON, or the bytes that are given."""
        raw = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)


class Quiet(ThreadingHTTPServer):
    """Says nothing of clients that went away."""

    daemon_threads = True

    def handle_error(self, *_: Any) -> None: ...


@contextmanager
def serving(served: Served) -> Iterator[Served]:
    """The server, on a port of its own; its `url` is set."""
    handler = type("Bound", (Handler,), {"served": served})
    with Quiet(("127.0.0.1", 0), handler) as server:
        served.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield served
        finally:
            server.shutdown()
            thread.join()
