"""Dialogues of several turns, read from a file and timed with the cache kept from turn to turn.

The plain generation of transformers takes the cache of the turn before. Its assisted generation, of which prompt lookup
is a kind, does not: transformers 5.23 runs the whole prompt behind the columns that the cache has, so that the text is
another. So assisted generation and prompt lookup begin every turn with an empty cache.
"""

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from specverify.backends.engine.backend import EngineBackend
from specverify.backends.engine.dialogue import DialogueServer
from specverify.backends.engine.two_modes import in_mode
from specverify.bench.agreement import Agreement, compare_turn, first_difference, logit_rows, noise_between
from specverify.bench.decode_run import Run, step_at
from specverify.bench.hugging_face import PLAIN, continue_turn
from specverify.bench.turn import TARGET, Turn, Way
from specverify.checkpoints.opening import directory_of
from specverify.checkpoints.prompts import LARGEST_PROMPTS, json_of, tokenizer_of
from specverify.reference.case import Case
from specverify.reference.draft import Draft
from specverify.reference.files.regular import read_whole
from specverify.reference.malformed import Malformed
from specverify.reference.trace import Array, Trace
from specverify.setup.errors import UnusableInput

Tokens = tuple[int, ...]


BUILT_IN = "builtin:two-turns"
"""The name of the dialogues of two turns that the package ships (`two_turns.json`)."""


def shape_dialogues(
    dialogues: Sequence[list[Tokens]], prefixes: Sequence[int], histories: Sequence[int]
) -> tuple[list[list[Tokens]], list[tuple[int, int]]]:
    """The dialogues once for each prefix and each history, and the lengths of each; as they are where none is given.

    A prefix is the beginning that all dialogues share, such as a system prompt. A history is what a dialogue says
    before its last message, the prefix and the answers left out. Both are made of the texts of the dialogues.
    """
    filler = [token for turns in dialogues for turn in turns for token in turn]
    shaped_dialogues, lengths = [], []
    for prefix, history in itertools.product(prefixes or (0,), histories or (0,)):
        beginning = tuple(itertools.islice(itertools.cycle(filler), prefix))
        for turns in dialogues:
            *earlier_turns, last_turn = turns
            if history:
                earlier_turns = [_brought_to(earlier_turns, history, filler)]
            first_turn, *other_turns = [*earlier_turns, last_turn]
            shaped_dialogues.append([beginning + first_turn, *other_turns])
            lengths.append((prefix, history))
    return shaped_dialogues, lengths


def _brought_to(turns: Sequence[Tokens], length: int, filler: Sequence[int]) -> Tokens:
    """One message of `length` tokens that ends as `turns` do; what they lack stands in front."""
    tokens = [token for turn in turns for token in turn]
    missing = max(0, length - len(tokens))
    return (*itertools.islice(itertools.cycle(filler), missing), *tokens[max(0, len(tokens) - length) :])


def dialogues_of(source: str, model: str, most: int) -> list[list[Tokens]]:
    """Token ids of the turns of the first `most` dialogues of a file, or of BUILT_IN.

    Each line of the file is an object with `turns`, a list of texts. The target answers each of them; the next one is
    appended to its answer as it stands, so that a file may hold the marks of a chat template.

    Raises:
        UnusableInput: The file cannot be read, or a line is no dialogue.
    """
    tokenizer = tokenizer_of(directory_of(model))
    dialogues = []
    for where, texts in _texts(source)[:most]:
        turns = [tuple(tokenizer(text, add_special_tokens=place == 0).input_ids) for place, text in enumerate(texts)]
        if not all(turns):
            raise UnusableInput(f"--dialogues {where}: turn {turns.index(()) + 1} holds no token")
        dialogues.append(turns)
    return dialogues


def _texts(source: str) -> list[tuple[str, list[str]]]:
    """The place and the turns of every dialogue."""
    if source == BUILT_IN:
        content = json.loads((files("specverify.bench") / "two_turns.json").read_text())
        return [(f"{source}:{number}", line["turns"]) for number, line in enumerate(content["dialogues"], 1)]
    if source.startswith("builtin:"):
        raise UnusableInput(f"--dialogues {source}: no such built-in dialogues (known: {BUILT_IN})")
    try:
        text = read_whole(Path(source), LARGEST_PROMPTS).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError, Malformed) as why:
        reason = f"not UTF-8 at byte {why.start}" if isinstance(why, UnicodeDecodeError) else str(why)
        raise UnusableInput(f"--dialogues {source}: {getattr(why, 'strerror', None) or reason}") from None
    lines = [(f"{source}:{number}", line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise UnusableInput(f"--dialogues {source}: holds no dialogue")
    return [(where, _turns(json_of(line, f"--dialogues {where}"), where)) for where, line in lines]


def _turns(content: Any, where: str) -> list[str]:
    turns = content.get("turns") if isinstance(content, dict) else None
    if not isinstance(turns, list) or not turns:
        raise UnusableInput(f"--dialogues {where}: no object with `turns`, a list of texts")
    for number, text in enumerate(turns, 1):
        if not isinstance(text, str) or not text or any("\ud800" <= letter <= "\udfff" for letter in text):
            raise UnusableInput(f"--dialogues {where}: turn {number} is no text")
    return turns


KEEPING = (PLAIN,)
"""Ways of transformers that go on with a cache."""


class TransformersDialogue:
    """A way of transformers through the turns of a dialogue.

    Args:
        way: The way.
        eager: Whether it runs transformers' eager attention.
    """

    def __init__(self, way: str, eager: bool = False) -> None:
        self._way = way
        self._eager = eager
        self._cache: Any = None
        self._tokens: tuple[int, ...] = ()

    def turn(self, case: Case, number: int, repeat: int) -> Turn:
        """The next turn; it begins with an empty cache where its prompt does not begin with the text of the last."""
        follows = len(case.prompt) > len(self._tokens) and case.prompt[: len(self._tokens)] == self._tokens
        cache = self._cache if follows and self._way in KEEPING else None
        turn, self._cache = continue_turn(self._way, case, number, repeat, cache, self._eager)
        self._tokens = case.prompt + turn.tokens
        return turn


ANEW = "target-anew"
"""The way of the target alone that prefills each prompt whole."""


def with_room(case: Case, turns: Sequence[Tokens]) -> Case:
    """`case`, whose prompt is the first of `turns`, with stops that allow all later turns and answers.

    Raises:
        Malformed: The model has not as many positions.
    """
    most = len(turns) * case.stops.max_new_tokens + sum(map(len, turns[1:]))
    return replace(case, stops=replace(case.stops, max_new_tokens=most))


class DialogueRun(Run):
    """The open models and the ways of one bench of dialogues.

    Args:
        backend: The engine.
        dialogues: The tokens of each dialogue, turn by turn, without the answers.
        bases: For each dialogue the case of the target alone, with its first turn as the prompt.
        drafts: The ways with a draft.
        transformers_ways: The ways of transformers.
        shapes: For each dialogue the lengths of its prefix and of its history; empty for dialogues as they are.
    """

    def __init__(
        self,
        backend: EngineBackend,
        dialogues: list[list[Tokens]],
        bases: list[Case],
        drafts: dict[str, tuple[Way, Draft]],
        transformers_ways: Sequence[str] = (),
        shapes: Sequence[tuple[int, int]] = (),
    ) -> None:
        super().__init__(backend, bases, drafts, [TARGET, ANEW, *drafts, *transformers_ways])
        self._transformers_ways = transformers_ways
        self._dialogues = dialogues
        self._shapes = shapes or [(0, 0)] * len(dialogues)
        self.prompts = dialogues
        self.facts |= {"dialogues": len(dialogues), "prompts": sum(map(len, dialogues))}

    def run_prompt(self, number: int, repeats: int) -> Iterator[Turn]:
        """Every way on each turn of the dialogue `number`, `repeats` times; the texts of the first time are compared.

        The target's own text goes on in all ways, so that a way whose text parts from it at a tie begins its next turn
        with empty caches.
        """
        agreements = list[Agreement]()
        for repeat in range(repeats):
            servers = {way: self._server(way, number) for way in (TARGET, *self._drafts)}
            their_dialogues = {
                way: TransformersDialogue(way, self._backend.mode.aligned) for way in self._transformers_ways
            }
            history: Tokens = ()
            for place, message in enumerate(self._dialogues[number]):
                case = replace(self.base(number, repeat), prompt=history + message)
                other_ways = self.ways[1:]
                turning = (number + repeat + place) % len(other_ways)
                traces = dict[str, tuple[Turn, Trace | None]]()
                for way in (TARGET, *other_ways[turning:], *other_ways[:turning]):
                    if way in their_dialogues:
                        turn = their_dialogues[way].turn(self.transformers_case(way, case), number, repeat)
                        traces[way] = replace(turn, place=place + 1), None
                    else:
                        traces[way] = self._play_turn(
                            way, case, servers.get(way), prompt=number, repeat=repeat, place=place + 1
                        )
                    prefix, history_length = self._shapes[number]
                    shaped_turn = replace(traces[way][0], prefix=prefix, history=history_length)
                    traces[way] = self.with_peak(shaped_turn), traces[way][1]
                    yield traces[way][0]
                if repeat == 0 and self.compares:
                    agreements += self._compare_turns(traces)
                history = case.prompt + traces[TARGET][0].tokens
        self.agreements[number] = agreements

    def longest_case(self) -> Case:
        """The case whose prompt is the longest dialogue, without the answers."""
        base, turns = max(zip(self._bases, self._dialogues, strict=True), key=lambda pair: sum(map(len, pair[1])))
        return replace(base, prompt=tuple(token for turn in turns for token in turn))

    def turns_of(self, number: int) -> int:
        """The turns of the dialogue `number`."""
        return len(self._dialogues[number])

    def _server(self, way: str, number: int) -> DialogueServer:
        """The server of a way, with room for the whole dialogue `number`."""
        base, turns = self._bases[number], self._dialogues[number]
        case = base if way == TARGET else replace(base, draft=self._drafts[way])
        return DialogueServer(
            with_room(case, turns), self._backend.models, in_mode(self._backend.seams, self._backend.mode)
        )

    def _play_turn(
        self, way: str, base: Case, server: DialogueServer | None, *, prompt: int, repeat: int, place: int
    ) -> tuple[Turn, Trace]:
        """One turn of one way; without a server every token of it is prefilled."""
        case = replace(base, draft=self._drafts[way]) if way in self._drafts else base
        turn, trace = self.time_turn(way, case, self._backend.run if server is None else server.turn, prompt, repeat)
        return replace(turn, place=place, kept=0 if server is None else server.num_shared), trace

    def _compare_turns(self, traces: dict[str, tuple[Turn, Trace | None]]) -> list[Agreement]:
        """The comparisons of the texts of the ways with that of the target alone, by rule T."""
        target, trace = traces[TARGET]
        assert trace is not None
        rows = logit_rows(trace)
        noise = 0.0
        for turn, turn_trace in traces.values():
            if turn_trace is None:  # transformers shows no logits
                continue
            position = first_difference(target.tokens, turn.tokens)
            if position is not None:
                self.strays[turn.prompt, turn.way, turn.place, 0] = step_at(turn_trace, position)
            num_equal = min(len(turn.tokens), len(rows)) if position is None else position
            turn_rows: list[Array] = rows if turn_trace is trace else logit_rows(turn_trace)
            noise = max(noise, noise_between(rows, turn_rows, num_equal))
        return [compare_turn(target, rows, turn, noise) for way, (turn, _) in traces.items() if way != TARGET]
