"""`specverify law` and the options of `bench`: closed forms exactly, promises kept and broken, every bad input."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction as F
from pathlib import Path
from typing import Any

import pytest

from specverify.cli import main
from specverify.laws.standard_worlds import worlds
from specverify.reference import rules
from specverify.reference.oracle import acceptance
from specverify.reference.oracle.coin_source import Chance

FIVE = "0.5,0.2,0.15,0.1,0.05"
ONE_SIBLING = ("--siblings", "1")


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str

    @property
    def rules(self) -> list[dict[str, Any]]:
        rule_entries: list[dict[str, Any]] = json.loads(self.out)["rules"]
        return rule_entries


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    """Run the command line in an empty folder from which modules can be imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def command(*arguments: str) -> Ended:
        with pytest.raises(SystemExit) as ended:
            main(list(arguments))
        assert isinstance(ended.value.code, int)
        return Ended(ended.value.code, *capfd.readouterr())

    return command


Run = Callable[..., Ended]


def off(run: Run, *arguments: str) -> F:
    """The exact total variation."""
    (rule_entry,) = run("law", *arguments, "--json", "-").rules
    assert rule_entry["exact"]
    assert rule_entry["total_variation"] == float(F(rule_entry["total_variation_exact"]))
    return F(rule_entry["total_variation_exact"])


# ------------------------------------------------------------------------------------------------ closed forms


def test_a_greedy_draft_treated_as_a_sample(run: Run) -> None:
    """The published counter-example, exactly: 3/4 and 1/4 where the target says 3/5 and 2/5."""
    arguments = ("chain", "--p", "0.6,0.4", "--q", "4/5,1/5", "--draws", "top-k", "--soft-q")
    ended = run("law", *arguments)
    assert ended.code == 0
    assert re.search(r"^  0 +0\.6 +0\.75 +\+0\.15 +3/5 +3/4$", ended.out, re.MULTILINE)
    assert re.search(r"^  1 +0\.4 +0\.25 +-0\.15 +2/5 +1/4$", ended.out, re.MULTILINE)
    words = " ".join(ended.out.split())
    assert "at the first token, token 0 gets 0.75 where the target gives 0.6" in words
    assert "LOSSY as declared a greedy draft treated as a sample: " in words
    ended = run("law", *arguments, *ONE_SIBLING, "--json", "-")
    (rule_entry,) = ended.rules
    assert rule_entry["first_token"] == {"law": [0.75, 0.25], "target": [0.6, 0.4]}
    assert (rule_entry["total_variation_exact"], rule_entry["expected_tokens"]) == ("3/20", 1.75)
    assert (rule_entry["rule"], rule_entry["draws"], rule_entry["lossless"]) == ("chain", "top-k", False)
    assert rule_entry["condition"] == "tokens are drawn from the q that is handed over"
    assert "LOSSY" in ended.err  # the page goes where it disturbs no reader of JSON


def test_one_hot_or_drawn_the_same_rule_is_lossless(run: Run) -> None:
    for draws in rules.DRAWS:
        ended = run("law", "chain", "--p", "0.6,0.4", "--q", "0.8,0.2", "--draws", draws)
        assert ended.code == 0
        assert "total variation 0 from" in ended.out
        assert "LOSSLESS as declared" in ended.out
        assert "nowhere: whatever was emitted" in ended.out


@pytest.mark.parametrize("rule", rules.RULES)
def test_a_soft_q_harms_the_rules_that_read_it_and_no_other(rule: str, run: Run) -> None:
    (rule_entry,) = run(
        "law", rule, "--p", "0.6,0.4", "--q", "0.8,0.2", "--draws", "top-k", "--soft-q", *ONE_SIBLING, "--json", "-"
    ).rules
    reads = rule in ("chain", "multi-round", "specinfer", "block", "traversal")
    lossy = reads or rule in ("typical", "ensemble", "fly", "synthetic")
    assert (rule_entry["total_variation"] > 0, rule_entry["lossless"]) == (lossy, not lossy)


def test_a_withdrawn_draw_is_lossy_and_a_length_read_before_is_not(run: Run) -> None:
    """Token 1 has q = 1/5: below 1/2 it is drawn and withdrawn, so that it comes from p alone, 1/5 * 2/5 + 4/5 * 0."""
    arguments = ("chain", "--p", "0.6,0.4", "--q", "0.8,0.2", *ONE_SIBLING, "--stop-below", "1/2")
    for when in ((), ("--stop", "before"), ("--stop", "after")):
        (rule_entry,) = run("law", *arguments, *when, "--json", "-").rules
        assert (rule_entry["total_variation"], rule_entry["lossless"]) == (0, True)
    ended = run("law", *arguments, "--stop", "drop")
    assert ended.code == 0
    words = " ".join(ended.out.split())
    assert "no drawn token below 1/2" in words
    assert "LOSSY as declared an unlikely draw is withdrawn" in words
    # Token 0 is drawn with 4/5 and accepted by 3/4; a rejection leaves token 1. A withdrawn draw leaves p.
    (rule_entry,) = run("law", *arguments, "--stop", "drop", "--json", "-").rules
    assert rule_entry["first_token"]["law"] == pytest.approx([0.8 * 0.75 + 0.2 * 0.6, 0.8 * 0.25 + 0.2 * 0.4])


def test_repeated_siblings_bias_target_only_and_distinct_ones_do_not(run: Run) -> None:
    """Twins count twice: the coin accepts below 2p(x), and the residual is spread over the rest."""
    for tokens, law, declared in (
        ("0,0,1", [0.5, 0.2, 0.15, 0.1, 0.05], True),
        ("0,1,1", [0.375, 0.4, 0.1125, 0.075, 0.0375], False),
        ("0,0,0", [1.0, 0.0, 0.0, 0.0, 0.0], False),
    ):
        arguments = ("--p", FIVE, "--tree", "0,0,0", "--tokens", tokens)
        ended = run("law", "target-only", *arguments, "--json", "-")
        (rule_entry,) = ended.rules
        assert ended.code == 0
        assert (rule_entry["lossless"], rule_entry["draws"]) == (declared, "given")
        assert rule_entry["first_token"]["law"] == law
        assert rule_entry["first_token"]["target"] == [float(p) for p in FIVE.split(",")]
        assert rule_entry["condition"].endswith("distinct siblings")
        assert rule_entry["verdict"] == ("LOSSLESS as declared" if declared else "LOSSY as declared")
    # P(x) = 2/5 for the twin and (3/5) p / (1 - 1/5) for the rest: the distance is p(x) itself.
    assert off(run, "target-only", "--p", FIVE, "--tree", "0,0,0", "--tokens", "0,1,1") == F(1, 5)


def test_the_thresholds_of_target_only(run: Run) -> None:
    """statistics-and-numerics, A.2: masses .2, .7, .8 of the siblings 1, 0, 3 of one level."""
    arguments = ("target-only", "--p", FIVE, "--tree", "0,0,0,0", "--tokens", "0,1,0,3")

    def off_at_threshold(name: str, value: str) -> F:
        return off(run, *arguments, f"--threshold-{name}", value)

    assert off(run, *arguments) == 0
    assert off_at_threshold("acc", "0.9") == F(8, 10) * (F(10, 9) - 1)  # nothing saturates: P_k (1/t - 1)
    assert off_at_threshold("acc", "3/4") == max(1 - F(8, 10), F(7, 10) * (F(4, 3) - 1))  # the third does
    assert off_at_threshold("acc", "0.5") == max(1 - F(7, 10), F(2, 10) * (2 - 1))  # the second does
    assert off_at_threshold("acc", "1.25") == F(8, 10) * (1 - F(4, 5))
    assert off_at_threshold("single", "0.9") == 0  # never reached
    assert off_at_threshold("single", "0.5") == 1 - F(7, 10)  # reached at equality: the decimal is no float
    assert off_at_threshold("single", "0.2") == 1 - F(2, 10)
    assert off_at_threshold("single", "0.2000001") == 1 - F(7, 10)
    assert off_at_threshold("single", "7") == 0
    (rule_entry,) = run("law", *arguments, "--threshold-single", "0.9", "--json", "-").rules
    assert (rule_entry["lossless"], rule_entry["verdict"]) == (False, "LOSSLESS here, though not declared")
    assert rule_entry["setting"] == "threshold_single 9/10"


def test_typical_is_measured_and_labelled(run: Run) -> None:
    """Above epsilon it is accepted for certain: TV 1 - p(x). Nothing is, if epsilon and delta ask for more than .5."""
    arguments = ("typical", "--p", FIVE, "--tree", "0,0", "--tokens", "0,0")
    assert off(run, *arguments) == F(1, 2)
    assert off(run, *arguments, "--epsilon", "0.5", "--delta", "9") == 0
    ended = run("law", *arguments)
    assert (ended.code, "LOSSY as declared  it promises no law" in ended.out) == (0, True)


def test_runs_and_cells_by_hand(run: Run) -> None:
    """Token 0 is drawn and accepted or not, token 1 always is: three runs; blocks 00, 01, 10, 11, and 1 alone."""
    arguments = ("law", "chain", "--p", "0.6,0.4", "--q", "0.8,0.2", *ONE_SIBLING, "--json", "-")
    (rule_entry,) = run(*arguments).rules
    assert (rule_entry["evaluations"], rule_entry["cells"], rule_entry["expected_tokens"]) == (3, 5, 1.8)
    assert run(*arguments, "--max-runs", "3").code == 0
    ended = run(*arguments, "--max-runs", "2")
    assert (ended.code, ended.out) == (2, "")
    assert "too large a world: more than 2 runs" in ended.err


# ------------------------------------------------------------------------------------------------ the page


@pytest.mark.parametrize("rule", rules.RULES)
def test_every_rule_without_a_word_more(rule: str, run: Run) -> None:
    ended = run("law", rule, "--picture")
    assert ended.code == 0
    assert max(map(len, ended.out.splitlines())) <= 80
    assert ("LOSSLESS as declared" in ended.out) == (rule not in ("typical", "ensemble", "fly", "synthetic"))
    assert ended.err == ""


def test_bars_are_as_long_as_probabilities(run: Run) -> None:
    ended = run("law", "target-only", "--p", "1/2,1/4,1/4", "--tree", "0,0,0,2", "--tokens", "0,1,1,0", "--picture")
    bars = [(float(match[2]), match[1].count("█")) for match in re.finditer(r"(█+)\S? +(\d\.\d{4})$", ended.out, re.M)]
    assert len(bars) == 6
    top = max(value for value, _ in bars)
    assert all(abs(length - 46 * value / top) < 1 for value, length in bars)
    # After the first twin nothing hangs; after the second the law is right, so no other context is drawn.
    assert "after tokens" not in ended.out
    world = {"parents": [0, 0, 1], "target": {"": [1, 0], "0": ["3/5", "2/5"]}, "draft": {"": [1, 0]}, "draws": "top-k"}
    Path("w.json").write_text(json.dumps(world))
    ended = run("law", "typical", "--world", "w.json", "--picture")
    assert re.search(r"^  after tokens 0\n +0 +target +█+", ended.out, re.MULTILINE)
    words = " ".join(ended.out.split())
    assert "after tokens 0, token 0 gets 1 where the target gives 0.6 (a block goes on from there with prob" in words


def test_a_large_vocabulary_is_cut(run: Run) -> None:
    p = ",".join(["1/40"] * 40)
    ended = run("law", "eagle", "--p", p, "--q", p)
    assert "28 tokens more, each less far off" in ended.out


def test_a_world_of_its_own_rows(run: Run) -> None:
    """Given tokens 0 and below it 1; threshold_single .3 forces 0 at the root (p .3) and not 1 below it (p .25)."""
    world = {
        "parents": [0, 0, 1],
        "target": {"": [0.3, 0.7], "0": ["3/4", 0.25], "0 1": [1, 0], "1": [0.1, 0.9]},
        "tokens": [0, 0, 1],
        "thresholds": {"threshold_single": 0.3},
    }
    Path("w.json").write_text(json.dumps(world))
    (rule_entry,) = run("law", "target-only", "--world", "w.json", "--json", "-").rules
    assert rule_entry["total_variation_exact"] == "7/10"
    (where,) = rule_entry["where_from"]
    assert (where["context"], where["law"], where["target"]) == ([], [1.0, 0.0], [0.3, 0.7])
    assert rule_entry["expected_tokens"] == 2.25
    # An option goes before the file.
    assert off(run, "target-only", "--world", "w.json", "--threshold-single", "1") == 0
    # Now both are forced: the block begins 0 1 for certain, which the target says with 3/10 * 1/4.
    assert off(run, "target-only", "--world", "w.json", "--threshold-single", "0.25") == 1 - F(3, 40)


def test_two_drafts(run: Run) -> None:
    """Each sibling is verified against the draft that named it."""
    world = {
        "parents": [0, 0, 0],
        "target": {"": [0.5, 0.3, 0.2]},
        "draft": [{"": [0.2, 0.3, 0.5]}, {"": [0.1, 0.8, 0.1], "0": [1, 0, 0]}],
        "draws": "with-replacement",
    }
    Path("w.json").write_text(json.dumps(world))
    ended = run("law", "specinfer", "--world", "w.json", "--json", "-")
    (rule_entry,) = ended.rules
    assert (rule_entry["total_variation_exact"], rule_entry["verdict"]) == ("0", "LOSSLESS as declared")
    assert off(run, "specinfer", "--world", "w.json", "--draws", "without-replacement") > 0
    # The best token of the first draft is the second best of the other: twins, though named by rank.
    world |= {"draft": [{"": [0.5, 0.3, 0.2]}, {"": [0.3, 0.5, 0.2]}], "draws": "top-k"}
    Path("w.json").write_text(json.dumps(world))
    (rule_entry,) = run("law", "target-only", "--world", "w.json", "--json", "-").rules
    assert (rule_entry["total_variation_exact"], rule_entry["verdict"]) == ("1/2", "LOSSY as declared")
    assert "one draft" in refusal_line(run("law", "multi-round", "--world", "w.json", "--soft-q"))


def test_a_row_that_nearly_sums_to_one_is_normalised(run: Run) -> None:
    third = ",".join(["0.3333333"] * 3)
    ended = run("law", "chain", "--p", third, "--q", third, *ONE_SIBLING)
    assert ended.code == 0
    assert len(re.findall(r"^  \d +0\.333333 +0\.333333 +0 +1/3 +1/3$", ended.out, re.MULTILINE)) == 3
    assert "--p: sums to 0.999, not to 1" in refusal_line(
        run("law", "chain", "--p", ",".join(["0.333"] * 3), "--q", third)
    )


def test_in_the_standard_worlds_contexts_differ() -> None:
    """Where all rows are equal, a residual or bonus from the wrong row is no bias."""
    for rule in rules.RULES:
        for tables in worlds(rule).values():
            for table in (tables.target, *tables.drafts):
                assert all(sum(row) == 1 for row in table.values())
                assert all(table[token,] != table[()] for token in range(1, tables.vocab))


def test_json_to_a_file(run: Run) -> None:
    ended = run("law", "eagle", "--json", "law.json")
    assert "LOSSLESS" in ended.out
    (rule_entry,) = json.loads(Path("law.json").read_text())["rules"]
    assert (rule_entry["rule"], rule_entry["lossless"], rule_entry["total_variation"]) == ("eagle", True, 0.0)


@pytest.mark.slow
def test_the_table(run: Run) -> None:
    """All rules and draws: what promises to be lossless is so exactly in every world, and nothing else is."""
    ended = run("law", "--table", "--json", "-")
    assert ended.code == 0
    rows = ended.rules
    assert {(row["rule"], row["draws"]) for row in rows} >= {(rule, d) for rule in rules.RULES for d in rules.DRAWS}
    for row in rows:
        assert row["exact"]
        assert (row["total_variation_exact"] == "0") == row["lossless"], row["rule"]
        assert row["cells"] > 15
        assert row["evaluations"] > 3
    lossy = {(row["rule"], row["draws"], row["setting"]) for row in rows if not row["lossless"]}
    assert {
        ("target-only", "top-k", "threshold_acc 9/10"),
        ("target-only", "top-k", "threshold_single 1/5"),
        ("target-only", "given", "repeated siblings"),
        ("specinfer", "without-replacement", ""),
    } <= lossy
    assert len(lossy) == 8
    assert max(map(len, ended.err.splitlines())) <= 80
    assert "target-only  given, repeated siblings     lossy *" in ended.err


# ------------------------------------------------------------------------------------------------ promises


OWN_RULES = """
import random
from fractions import Fraction
import numpy as np
from specverify.reference.oracle import acceptance

number = 3
calls = []

def good(chance, rule, draws, tree, target, proposal, sampled):
    assert len(tree.parent) == len(target) == len(proposal)
    return acceptance.multi_round(chance, rule, draws, tree, target, proposal, sampled)

def rounded(chance, rule, draws, tree, target, proposal, sampled):
    as_floats = [[float(value) for value in row] for row in target]
    return acceptance.target_only(chance, rule, draws, tree, as_floats, proposal, sampled)

def vector(chance, rule, draws, tree, target, proposal, sampled):
    return np.array([0]), np.array(target[0], dtype=float)

def hopeful(chance, rule, draws, tree, target, proposal, sampled):
    return (0, 1), target[1]

def stale(chance, rule, draws, tree, target, proposal, sampled):
    path, weights = acceptance.chain(chance, rule, draws, tree, target, proposal, sampled)
    return path, target[0] if len(path) == 2 else weights

def believes(chance, rule, draws, tree, target, proposal, sampled):
    assert sampled and proposal[1] == (Fraction(4, 5), Fraction(1, 5))
    return acceptance.chain(chance, rule, draws, tree, target, proposal, sampled)

def raises(*given): raise RuntimeError("no\\n license")
def leaves(*given): raise SystemExit(0)
def two(a, b): return a
def nothing(*given): return None
def words(*given): return "ab", [1] * 6
def halves(*given): return (0.5,), [1] * 6
def floating(*given): return (0,), 7
def few(*given): return (0,), [1.0]
def text(*given): return (0,), ["x"] * 6
def rows(*given): return (0,), np.ones((6, 2))
def nan(*given): return (0,), [float("nan")] * 6
def endless(*given): return (0,), [float("inf")] * 6
def negative(*given): return (0,), [2, -1, 0, 0, 0, 0]
def empty(*given): return (0,), [0] * 6
def astray(*given): return (0, 4), [1] * 6
def outside(*given): return (0, 99), [1] * 6
def rootless(*given): return (1,), [1] * 6
def changes(chance, rule, draws, tree, target, proposal, sampled): target[0][0] = 1
def asks(chance, rule, draws, tree, target, proposal, sampled): chance.below("accept", 1, float("nan"))

def fickle(chance, rule, draws, tree, target, proposal, sampled):
    calls.append(1)
    if len(calls) > 1:
        return (0,), target[0]
    return (0,), [chance.below("accept", 1, Fraction(1, 2))] + [1] * 5
"""


@pytest.fixture
def own_rules(tmp_path: Path) -> None:
    sys.modules.pop("mine_own", None)
    (tmp_path / "mine_own.py").write_text(OWN_RULES)
    (tmp_path / "broken_own.py").write_text("def rule(:\n")
    (tmp_path / "leaving_own.py").write_text("raise SystemExit(0)\n")


@pytest.mark.usefixtures("own_rules")
@pytest.mark.parametrize(
    ("function", "claims", "code", "verdict"),
    [
        ("good", True, 0, "LOSSLESS as declared"),
        ("good", False, 0, "LOSSLESS, nothing claimed"),
        ("hopeful", True, 1, "BROKEN PROMISE"),
        ("hopeful", False, 0, "LOSSY, nothing claimed"),
        ("rounded", True, 0, "LOSSLESS as declared"),
        ("vector", True, 0, "LOSSLESS as declared"),
    ],
)
def test_a_rule_of_the_users_own(function: str, claims: bool, code: int, verdict: str, run: Run) -> None:
    flag = ["--claims-lossless"] if claims else []
    ended = run("law", "--rule", f"mine_own:{function}", *flag, "--json", "-")
    (rule_entry,) = ended.rules
    assert (ended.code, rule_entry["verdict"], rule_entry["lossless"]) == (code, verdict, claims)
    assert rule_entry["rule"] == f"mine_own:{function}"
    assert rule_entry["exact"] == (function in ("good", "hopeful"))
    assert verdict in ended.err


@pytest.mark.usefixtures("own_rules")
def test_a_bias_of_the_last_token_alone(run: Run) -> None:
    """The bonus comes from the root's row: 3/5 of the blocks go on, from (3/5, 2/5) in place of (1/10, 9/10)."""
    world = {"parents": [0, 0], "target": {"": [0.6, 0.4], "0": [0.1, 0.9]}, "tokens": [0, 0]}
    Path("w.json").write_text(json.dumps(world))
    (rule_entry,) = run("law", "--rule", "mine_own:stale", "--world", "w.json", "--json", "-").rules
    assert rule_entry["first_token"]["law"] == rule_entry["first_token"]["target"] == [0.6, 0.4]
    assert rule_entry["total_variation_exact"] == str(F(3, 5) * F(1, 2))
    assert [where["context"] for where in rule_entry["where_from"]] == [[0]]


@pytest.mark.usefixtures("own_rules")
def test_a_soft_q_is_handed_over_as_if_tokens_had_been_drawn(run: Run) -> None:
    arguments = ("--rule", "mine_own:believes", "--p", "0.6,0.4", "--q", "0.8,0.2", "--soft-q", *ONE_SIBLING)
    assert off(run, *arguments) == F(3, 20)


@pytest.mark.usefixtures("own_rules")
def test_a_rule_of_the_users_own_is_told_its_thresholds(run: Run) -> None:
    arguments = (
        "--rule",
        "mine_own:rounded",
        "--p",
        FIVE,
        "--tree",
        "0,0",
        "--tokens",
        "0,0",
        "--threshold-acc",
        "0.8",
    )
    (rule_entry,) = run("law", *arguments, "--json", "-").rules
    assert rule_entry["total_variation"] == pytest.approx(0.5 * (1 / 0.8 - 1), abs=1e-15)
    assert (rule_entry["exact"], rule_entry["total_variation_exact"]) == (False, None)
    assert "computed in floats" in " ".join(run("law", *arguments).out.split())


def test_a_built_in_rule_that_broke_its_promise(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Residual forgotten: after a rejection the target's own row is sampled, as many engines once did."""

    def forgetful(chance: Chance, *arguments: Any) -> acceptance.Answer:
        path, _ = acceptance.chain(chance, *arguments)
        return path, list(arguments[3][path[-1]])

    monkeypatch.setitem(acceptance.RULES, "chain", forgetful)
    ended = run("law", "chain")
    assert ended.code == 1
    assert "BROKEN PROMISE  it promises the target's own law" in ended.out


def test_no_torch(tmp_path: Path) -> None:
    law = "from specverify.cli import main\ntry:\n    main(['law', 'chain', '--picture'])\n"
    script = f"import sys\n{law}finally:\n    assert 'torch' not in sys.modules"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")


# ------------------------------------------------------------------------------------------------ bad input


def refusal_line(ended: Ended) -> str:
    assert (ended.code, ended.out) == (2, "")
    assert re.fullmatch(r"specverify: [^\n]+\n", ended.err), ended.err
    assert "Traceback" not in ended.err
    assert len(ended.err) < 700
    return ended.err


PQ = ("--p", "0.6,0.4", "--q", "0.8,0.2")
USAGE: dict[str, tuple[tuple[str, ...], str]] = {
    "no rule": ((), "give RULE (chain, multi-round, eagle, specinfer, target-only, typical, block, traversal, "),
    "unknown rule": (("nope",), "'nope' is not one of 'chain', 'multi-round'"),
    "two rules": (("chain", "--rule", "a:b"), "--torch pkg.module:function, not both"),
    "sum": (("chain", "--p", "0.6,0.5", "--q", "0.8,0.2"), "--p: sums to 1.1, not to 1"),
    "sum of q": (("chain", "--p", "0.6,0.4", "--q", "0.333,0.333"), "--q: sums to 0.666, not to 1"),
    "negative": (("chain", "--p", "-0.1,1.1", "--q", "0.8,0.2"), "--p[0]: -0.1 is negative"),
    "above": (("chain", "--p", "1e99,0", "--q", "0.8,0.2"), "--p: sums to 1e+99, not to 1"),
    "nan": (("chain", "--p", "nan,1", "--q", "0.8,0.2"), "--p[0]: 'nan' is not a number"),
    "infinite": (("chain", "--p", "0.6,0.4", "--q", "inf,1"), "--q[0]: 'inf' is not a number"),
    "word": (("chain", "--p", "half,half", "--q", "0.8,0.2"), "--p[0]: 'half' is not a number"),
    "gap": (("chain", "--p", "0.6,,0.4", "--q", "0.8,0.2"), "--p[1]: '' is not a number"),
    "empty": (("chain", "--p", "", "--q", "0.8,0.2"), "--p[0]: '' is not a number"),
    "over zero": (("chain", "--p", "1/0,1", "--q", "0.8,0.2"), "--p[0]: '1/0' is not a number"),
    "bomb": (("chain", "--p", "1e-999999999,1", "--q", "0.8,0.2"), "--p[0]: '1e-999999999' is not a number"),
    "digits": (("chain", "--p", f"0.{'9' * 5000},0", "--q", "0.8,0.2"), "… is not a number"),
    "lengths": (("chain", "--p", "0.6,0.4", "--q", "0.5,0.3,0.2"), "--p has 2 probabilities and --q 3"),
    "p alone": (("chain", "--p", "0.6,0.4"), "--p and --q come together"),
    "q alone": (("chain", "--q", "0.6,0.4", "--tokens", "0,0,0"), "--p and --q come together"),
    "vocabulary": (("chain", "--p", ",".join(["1/300"] * 300), "--q", "1"), "--p: 300 tokens are too many"),
    "chain on a tree": (("chain", "--tree", "0,0,0"), "rule chain verifies chains; this tree branches"),
    "block on a tree": (("block", "--siblings", "2"), "rule block verifies chains; this tree branches"),
    "parents": (("eagle", "--tree", "0,0,7"), "--tree: parent[2]: 7 is not a node of this 3-node tree"),
    "root": (("eagle", "--tree", "1,0"), "--tree: parent[0]: the root is its own parent (0), not 1"),
    "circle": (("eagle", "--tree", "0,2,1"), "circle that never reaches the root"),
    "tree": (("eagle", "--tree", "0,x"), "--tree[1]: 'x' is not a whole number of 0 or more"),
    "minus": (("eagle", "--tree", "0,-1"), "--tree[1]: '-1' is not a whole number of 0 or more"),
    "long tree": (("eagle", "--tree", ",".join("0" * 33)), "--tree: 33 nodes are too many to enumerate; use 32"),
    "wide tree": (("eagle", "--siblings", "4", "--depth", "3"), "the tree has more than 32 nodes; make it smaller"),
    "siblings": (("eagle", "--siblings", "0"), "'--siblings': 0 is not in the range"),
    "two trees": (("eagle", "--tree", "0,0", "--depth", "2"), "--tree says it all: leave out --siblings and --depth"),
    "draws": (("eagle", "--draws", "nope"), "'--draws': 'nope' is not one of"),
    "soft": (("chain", "--soft-q", "--draws", "with-replacement"), "--soft-q needs --draws top-k"),
    "soft given": (("eagle", "--soft-q", "--tokens", "0,0,1,2,3"), "mean nothing where tokens are given"),
    "tokens": (("eagle", *PQ, "--tree", "0,0", "--tokens", "0,2"), "--tokens[1]: token 2 is outside the vocab"),
    "few tokens": (("eagle", *PQ, "--tree", "0,0", "--tokens", "0"), "--tokens: 1 tokens for 2 nodes"),
    "threshold": (("target-only", "--threshold-acc", "0"), "threshold_acc: 0 is not a threshold (above 0)"),
    "negative threshold": (("typical", "--delta", "-1/2"), "delta: -1/2 is not a threshold (above 0)"),
    "threshold word": (("typical", "--epsilon", "x"), "--epsilon: 'x' is not a number"),
    "stop alone": (("chain", "--stop", "drop"), "--stop says when a confidence is compared"),
    "stop and tokens": (("eagle", *PQ, "--tree", "0,0", "--tokens", "0,1", "--stop-below", "0.5"), "none is drawn"),
    "stop beyond": (("chain", "--stop-below", "1.5"), "--stop-below: 1.5 is not a probability"),
    "stop and soft": (("chain", "--draws", "top-k", "--soft-q", "--stop-below", "0.5"), "give one of them"),
    "share above 1": (("ensemble", "--weight", "1.5"), "weight: 3/2 is not a share (above 0, at most 1)"),
    "half a window": (("fly", "--window", "1.5"), "window: 3/2 is not a number of nodes"),
    "other threshold": (("chain", "--epsilon", "0.3"), "--epsilon means nothing to the rule chain"),
    "claims": (("chain", "--claims-lossless"), "--claims-lossless is for --rule"),
    "table": (("chain", "--table", "--p", "1"), "--table has rules and worlds of its own: leave out RULE, --p"),
    "two worlds": (("chain", "--world", "w.json", "--depth", "2"), "--world has it all: leave out --depth"),
    "too large": (("multi-round", "--siblings", "3", "--max-runs", "9"), "too large a world: more than 9 runs of the"),
    "json": (("chain", "--json", "gone/x.json"), "cannot write gone/x.json"),
    "own gone": (("--rule", "gone_own:f"),
     "--rule gone_own:f: cannot import 'gone_own' (No module named 'gone_own')"),
    "own form": (("--rule", "nope"), "--rule nope: is not of the form pkg.module:function"),
    "own relative": (("--rule", ".x:f"), "--rule .x:f: importing '.x' raised TypeError"),
    "own syntax": (("--rule", "broken_own:f"), "--rule broken_own:f: importing 'broken_own' raised SyntaxError"),
    "own exit": (("--rule", "leaving_own:f"), "importing 'leaving_own' raised SystemExit: 0"),
    "own nothing": (("--rule", "mine_own:gone"), "'mine_own' has no function called 'gone'"),
    "own number": (("--rule", "mine_own:number"), "'mine_own' has no function called 'number'"),
    "own raises": (("--rule", "mine_own:raises"),
     "mine_own:raises: raised RuntimeError: no license; a rule takes"),
    "own leaves": (("--rule", "mine_own:leaves"), "raised SystemExit: 0"),
    "own two": (("--rule", "mine_own:two"),
     "raised TypeError: two() takes 2 positional arguments but 7 were given"),
    "own nan coin": (("--rule", "mine_own:asks"),
     "raised ValueError: the accept coin of node 1 is compared with NaN"),
    "own changes": (("--rule", "mine_own:changes"), "raised TypeError: 'tuple' object does not support"),
    "own None": (("--rule", "mine_own:nothing"), "answered None, not (path of node indices, weights)"),
    "own words": (("--rule", "mine_own:words"), "not (path of node indices, weights)"),
    "own halves": (("--rule", "mine_own:halves"), "not (path of node indices, weights)"),
    "own floating": (("--rule", "mine_own:floating"), "answered ((0,), 7), not (path of node indices, weights)"),
    "own few": (("--rule", "mine_own:few"), "answered 1 weights for a vocabulary of 6"),
    "own text": (("--rule", "mine_own:text"), "answered the weight 'x', which is no number"),
    "own rows": (("--rule", "mine_own:rows"), "answered the weight array([1., 1.]), which is no number"),
    "own NaN": (("--rule", "mine_own:nan"), "answered weights that are no law: [nan"),
    "own endless": (("--rule", "mine_own:endless"), "answered weights that are no law: [inf"),
    "own negative": (("--rule", "mine_own:negative"), "answered weights that are no law: [2.0, -1.0"),
    "own empty": (("--rule", "mine_own:empty"), "answered weights that are no law"),
    "own astray": (("--rule", "mine_own:astray"), "answered path (0, 4): 4 is no child of the node before it"),
    "own outside": (("--rule", "mine_own:outside"),
     "answered path (0, 99): 99 is no child of the node before it"),
    "own rootless": (("--rule", "mine_own:rootless"), "which does not begin at the root (0)"),
    "own fickle": (("--rule", "mine_own:fickle", "--draws", "top-k"), "its runs add up to 1.5, not to 1: it may"),
}  # fmt: skip


@pytest.mark.usefixtures("own_rules")
@pytest.mark.parametrize("name", USAGE)
def test_what_law_refuses(name: str, run: Run) -> None:
    arguments, words = USAGE[name]
    assert words in refusal_line(run("law", *arguments))


GOOD = {"parents": [0, 0], "target": {"": [0.6, 0.4]}, "draft": {"": [0.8, 0.2]}}
WORLDS: dict[str, tuple[str | dict[str, object], str]] = {
    "not JSON": ("{", "--world w.json: not JSON at line 1, column 2"),
    "latin": ("latin", "--world w.json: not UTF-8 at byte 1"),
    "deep": ("[" * 100_000, "--world w.json: not JSON that can be read"),
    "list": ("[]", "--world w.json: a world is a JSON object, not a list"),
    "twice": ('{"parents": [0], "parents": [0]}', "the name 'parents' stands twice in one object"),
    "digits": ('{"parents": [' + "9" * 5000 + "]}", "not JSON that can be read"),
    "large": ('{"x": "' + "x" * 4_000_000, "too large a world to enumerate"),
    "unknown": ({**GOOD, "extra": 1}, "'extra' is no field of a world (known: parents, target, draft, draws, tok"),
    "no parents": ({"target": {"": [1]}}, "parents is missing"),
    "no target": ({"parents": [0]}, "target is missing"),
    "no draft": ({"parents": [0, 0], "target": {"": [1]}}, "draft is missing"),
    "parents": ({**GOOD, "parents": [0, 5]}, "parents: parent[1]: 5 is not a node of this 2-node tree"),
    "parents text": ({**GOOD, "parents": "0,0"}, "parents: is a string, not a list of whole numbers"),
    "parents half": ({**GOOD, "parents": [0, 0.5]}, "parents[1]: 0.5 is not a node or token"),
    "parents true": ({**GOOD, "parents": [0, True]}, "parents[1]: true is not a node or token"),
    "no nodes": ({**GOOD, "parents": []}, "parents: parent: a tree has at least its root"),
    "nodes": ({**GOOD, "parents": [0] * 40}, "parents: 40 nodes are too many to enumerate; use 32 at most"),
    "no table": ({**GOOD, "target": [0.6, 0.4]}, "target: is a list, not an object of rows by path"),
    "no root row": ({**GOOD, "draft": {"0": [1, 0]}},
     "draft: has no row '', which every path without one of its own"),
    "no drafts": ({**GOOD, "draft": []}, "draft: the list is empty"),
    "no row": ({**GOOD, "target": {"": 3}}, "target['']: is a number, not a list of probabilities"),
    "empty row": ({**GOOD, "target": {"": []}}, "target['']: sums to 0, not to 1"),
    "sum": ({**GOOD, "target": {"": [0.6, 0.3]}}, "target['']: sums to 0.9, not to 1"),
    "negative": ({**GOOD, "draft": {"": [1, 0], "1": [1.5, -0.5]}}, "draft['1'][1]: -0.5 is negative"),
    "NaN": ({**GOOD, "target": {"": [float("nan"), 1]}}, "target[''][0]: 'NaN' is not a number"),
    "null": ({**GOOD, "target": {"": [None, 1]}}, "target[''][0]: None is not a number"),
    "lengths": ({**GOOD, "draft": {"": [0.5, 0.3, 0.2]}}, "draft['']: 3 probabilities where 2 are needed"),
    "second draft": ({**GOOD, "draft": [{"": [1, 0]}, {"": [2, 0]}]}, "draft[1]['']: sums to 2, not to 1"),
    "vocabulary": ({**GOOD, "target": {"": [1] * 300}}, "target['']: 300 tokens are too many to enumerate"),
    "path": ({**GOOD, "target": {"": [1, 0], "a": [1, 0]}}, "target['a']: is no path (token ids with one blank"),
    "long path": ({**GOOD, "target": {"": [1, 0], "0 0": [1, 0]}}, "['0 0']: is longer than the tree is deep (1)"),
    "far path": ({**GOOD, "target": {"": [1, 0], "2": [1, 0]}}, "target['2']: token 2 is outside the vocabulary of 2"),
    "draws": ({**GOOD, "draws": "all"}, 'draws: "all" is none of top-k, without-replacement, with-replacement'),
    "tokens": ({**GOOD, "tokens": [0, 2]}, "tokens[1]: token 2 is outside the vocabulary of 2"),
    "token": ({**GOOD, "tokens": [0]}, "tokens: 1 tokens for 2 nodes (the root's is the first)"),
    "thresholds": ({**GOOD, "thresholds": [1]}, "thresholds: is a list, not an object"),
    "threshold": ({**GOOD, "thresholds": {"single": 1}}, "'single' is no threshold (known: threshold_single,"),
    "threshold text": ({**GOOD, "thresholds": {"epsilon": "x"}}, "thresholds.epsilon: 'x' is not a number"),
    "branches": ({**GOOD, "parents": [0, 0, 0]}, "rule chain verifies chains; this tree branches"),
}  # fmt: skip


@pytest.mark.parametrize("name", WORLDS)
def test_a_world_that_cannot_be_read(name: str, run: Run, tmp_path: Path) -> None:
    content, words = WORLDS[name]
    text = content if isinstance(content, str) else json.dumps(content)
    (tmp_path / "w.json").write_bytes(b"l\xe4" if text == "latin" else text.encode())
    assert words in refusal_line(run("law", "chain", "--world", "w.json"))


def test_the_good_world_is_good(run: Run, tmp_path: Path) -> None:
    (tmp_path / "w.json").write_text(json.dumps(GOOD))
    assert run("law", "chain", "--world", "w.json").code == 0


def test_a_world_that_is_not_there(run: Run, tmp_path: Path) -> None:
    assert "--world gone.json: No such file or directory" in refusal_line(run("law", "chain", "--world", "gone.json"))
    assert "Is a directory" in refusal_line(run("law", "chain", "--world", str(tmp_path)))
    assert "null" in refusal_line(run("law", "chain", "--world", "a\0b"))


# ------------------------------------------------------------------------------------------------ bench


@pytest.mark.parametrize("what", [[], ["throughput"]])
def test_bench_still_measures_throughput_by_itself(what: list[str], run: Run) -> None:
    ended = run("bench", *what, "--cases", "1", "--json", "-")
    assert ended.code == 0
    assert json.loads(ended.out)["backend"] == "cpu-eager"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("kv", "--backend", "cpu-eager"), "--backend is for bench throughput"),
        (("attention", "--cases", "3"), "--cases is for bench throughput"),
        (("kv", "--device", "cpu"), "--device is for bench attention"),
        (("--cases", "0"), "'--cases': 0 is not in the range"),
        (("nope",), "'nope' is not one of 'throughput', 'kv'"),
        (("kv", "--json", "gone/x.json"), "cannot write gone/x.json"),
    ],
)
def test_what_bench_refuses(arguments: tuple[str, ...], words: str, run: Run) -> None:
    assert words in refusal_line(run("bench", *arguments))
