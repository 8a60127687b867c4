"""A server that completes token ids, in vLLM's dialect: `python server.py CHECKPOINT PORT`. It stands for yours."""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch
from transformers import AutoModelForCausalLM


class Completions(BaseHTTPRequestHandler):
    """Answers `GET /v1/models` and `POST /v1/completions`."""

    model = None

    def log_message(self, *_):
        pass

    def do_GET(self):
        self.answer({"data": [{"id": "tiny", "owned_by": "vllm"}]})

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        tokens = list(request["prompt"])
        ends = request["stop_token_ids"]
        finish = "length"
        for _ in range(request["max_tokens"]):  # your engine's steps go here: this server speculates nothing
            tokens.append(self.next_token(tokens, request))
            if tokens[-1] in ends:
                finish = "stop"
                break
        new_tokens = tokens[len(request["prompt"]) :]
        choice = {
            "text": " ".join(map(str, new_tokens)),
            "token_ids": new_tokens,
            "finish_reason": finish,
            "logprobs": None,
        }
        choice["stop_reason"] = new_tokens[-1] if finish == "stop" else None
        self.answer({"choices": [choice], "usage": {"completion_tokens": len(new_tokens)}})

    def next_token(self, tokens, request):
        with torch.no_grad():
            scores = self.model(torch.tensor([tokens]), use_cache=False).logits[0, -1].double()
        if request["temperature"] == 0:
            return int(scores.argmax())
        torch.manual_seed(request["seed"] + len(tokens))
        return int(torch.multinomial((scores / request["temperature"]).softmax(-1), 1))

    def answer(self, content):
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def serve(checkpoint, port):
    """The server, which listens; call its `serve_forever`."""
    Completions.model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    return ThreadingHTTPServer(("127.0.0.1", port), Completions)


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2])).serve_forever()
