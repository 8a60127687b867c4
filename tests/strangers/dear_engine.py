"""An engine that is dear to open and changes its process thereby; other weights are loaded in place.

`DEAR_LOG` names the file that takes a line for each opening, reload and end. What goes wrong is a word in PLANTED. The
factories at the end put it there: no variable of the environment does, so one keeper forks the engines of all of them.
"""

import os
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from specverify.adapt import blackbox
from specverify.backends.adapt.models import open_network


def note(word: str) -> None:
    with Path(os.environ["DEAR_LOG"]).open("a") as file:
        file.write(f"{word}\n")


PLANTED: list[str] = []


def has_fault(name: str) -> bool:
    return name in PLANTED


class DearEngine:
    def __init__(self, network: Any) -> None:
        self.network = network

    @torch.no_grad()
    def continue_text(self, text: list[int], room: int) -> list[int]:
        tokens = list(text)
        for _ in range(room):
            tokens.append(int(self.network(torch.tensor([tokens])).logits[0, -1].argmax()))
        return tokens[len(text) :]


def open_engine(checkpoint: str, draft_checkpoint: str | None = None) -> DearEngine:
    note("open")
    if has_fault("never-open"):
        time.sleep(600)
    if has_fault("dies-open"):
        os._exit(9)
    # A change of the process that a run of a case must not make.
    torch.set_float32_matmul_precision("high")
    return DearEngine(open_network(checkpoint))


def reload_weights(engine: DearEngine, checkpoint: str) -> None:
    note("reload")
    if has_fault("reloads-nothing"):
        return
    engine.network.load_state_dict(load_file(Path(checkpoint) / "model.safetensors"), strict=False)


def close_engine(engine: DearEngine) -> None:
    note("close")


def generate(engine: DearEngine, prompt_ids: list[int], max_new_tokens: int) -> list[int]:
    if has_fault("changes-in-run"):
        torch.use_deterministic_algorithms(True)
    return engine.continue_text(prompt_ids, max_new_tokens)


def generate_with_variables(engine: DearEngine, prompt_ids: list[int], max_new_tokens: int) -> list[int]:
    assert b"DEAR_SINCE_START=1" in Path("/proc/self/environ").read_bytes()
    return engine.continue_text(prompt_ids, max_new_tokens)


DECLARED: dict[str, Any] = {
    "name": "dear", "families": ("llama",), "ropes": ("default",), "least_window": 0, "open": open_engine,
    "reload": reload_weights, "close": close_engine, "most_shapes": 2,
}  # fmt: skip

open_ = blackbox(generate, **DECLARED)
open_with_variables = blackbox(generate_with_variables, environment={"DEAR_SINCE_START": "1"}, **DECLARED)


def with_fault(name: str) -> Any:
    PLANTED.append(name)
    return open_()


def never_open() -> Any:
    return with_fault("never-open")


def dies_open() -> Any:
    return with_fault("dies-open")


def reloads_nothing() -> Any:
    return with_fault("reloads-nothing")


def changes_in_run() -> Any:
    return with_fault("changes-in-run")
