"""`specverify law --torch`: a sampler in torch has its exact law printed, and what cannot be read is one line."""

import json
from pathlib import Path

import pytest

from specverify.cli import main

SAMPLERS = """
import torch

def verified(target, draft):
    block = ()
    q = draft(block).softmax(-1)
    token = int(torch.multinomial(q, 1))
    p = target(block).softmax(-1)
    if torch.rand(()) < p[token] / q[token]:
        return (token, int(torch.multinomial(target((token,)).softmax(-1), 1)))
    return [int(torch.multinomial((p - q).clamp(min=0), 1))]

def from_p(target, draft):
    block = ()
    q = draft(block).softmax(-1)
    token = int(torch.multinomial(q, 1))
    p = target(block).softmax(-1)
    if torch.rand(()) < p[token] / q[token]:
        return torch.tensor([token])
    return [int(torch.multinomial(p, 1))]

def unread(target, draft):
    return [int(torch.randn(1) < 0)]

def nothing(target, draft):
    return []

def text(target, draft):
    return "ab"

def breaks(target, draft):
    raise RuntimeError("no license")
"""


@pytest.fixture(autouse=True)
def samplers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch_samplers_of_mine.py").write_text(SAMPLERS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


def law(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["law", *words])
    assert isinstance(ended.value.code, int)
    return ended.value.code


WORLD = ("--p", "0.5,0.3,0.2", "--q", "0.2,0.2,0.6")


def test_a_right_sampler_keeps_its_promise_and_a_wrong_one_does_not(capfd: pytest.CaptureFixture[str]) -> None:
    assert law("--torch", "torch_samplers_of_mine:verified", *WORLD, "--claims-lossless") == 0
    assert "LOSSLESS as declared" in capfd.readouterr().out
    assert law("--torch", "torch_samplers_of_mine:from_p", *WORLD, "--claims-lossless", "--json", "-") == 1
    (entry,) = json.loads(capfd.readouterr().out)["rules"]
    # Accepted mass is q's overlap with p, and a rejection draws from p: sum |...| / 2 by hand.
    overlap = [min(p, q) for p, q in zip((0.5, 0.3, 0.2), (0.2, 0.2, 0.6), strict=True)]
    remainder = 1 - sum(overlap)
    by_hand = sum(abs(o + remainder * p - p) for o, p in zip(overlap, (0.5, 0.3, 0.2), strict=True)) / 2
    assert entry["total_variation"] == pytest.approx(by_hand, abs=1e-6)
    assert entry["verdict"] == "BROKEN PROMISE"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("unread", "not interceptable: "),
        ("nothing", "returned [], not tokens of the vocabulary of 3"),
        ("text", "raised TypeError"),
        ("breaks", "raised RuntimeError: no license; a sampler takes (target, draft)"),
        ("gone", "has no function called 'gone'"),
    ],
)
def test_what_cannot_be_read_is_one_line(name: str, words: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert law("--torch", f"torch_samplers_of_mine:{name}", *WORLD) == 2
    err = capfd.readouterr().err
    assert words in err
    assert len(err.splitlines()) == 1


def test_options_of_rules_mean_nothing_to_a_sampler(capfd: pytest.CaptureFixture[str]) -> None:
    assert law("--torch", "torch_samplers_of_mine:verified", "--siblings", "2") == 2
    assert "--torch has a tree and a rule of its own: leave out --siblings" in capfd.readouterr().err
