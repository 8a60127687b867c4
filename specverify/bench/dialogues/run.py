"""The generations of a bench of dialogues: every way on every turn."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from backends.engine.backend import EngineBackend
from backends.engine.dialogue.server import DialogueServer
from backends.engine.two_modes import in_mode
from reference.case import Case
from reference.draft import Draft
from reference.trace import Array, Trace
from specverify.bench.agreement import Agreement, compared, first_difference, noise_between, rows_of
from specverify.bench.decode_run import Run, step_at
from specverify.bench.dialogues.reading import Tokens
from specverify.bench.dialogues.theirs import TheirDialogue
from specverify.bench.turn import TARGET, Turn, Way

ANEW = "target-anew"
"""The way of the target alone that prefills each prompt whole."""


def roomy(case: Case, turns: Sequence[Tokens]) -> Case:
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
        theirs: The ways of transformers.
    """

    def __init__(
        self,
        backend: EngineBackend,
        dialogues: list[list[Tokens]],
        bases: list[Case],
        drafts: dict[str, tuple[Way, Draft]],
        theirs: Sequence[str] = (),
    ) -> None:
        super().__init__(backend, bases, drafts, [TARGET, ANEW, *drafts, *theirs])
        self._theirs = theirs
        self._dialogues = self.given = dialogues
        self.facts |= {"dialogues": len(dialogues), "prompts": sum(map(len, dialogues))}

    def prompt(self, number: int, repeats: int) -> Iterator[Turn]:
        """Every way on each turn of the dialogue `number`, `repeats` times; the texts of the first time are compared.

        The target's own text goes on in all ways, so that a way whose text parts from it at a tie begins its next turn
        with empty caches.
        """
        agreements = list[Agreement]()
        for repeat in range(repeats):
            servers = {way: self._server(way, number) for way in (TARGET, *self._drafts)}
            others_of = {way: TheirDialogue(way) for way in self._theirs}
            history: Tokens = ()
            for place, said in enumerate(self._dialogues[number]):
                case = replace(self._bases[number], prompt=history + said)
                others = self.ways[1:]
                turning = (number + repeat + place) % len(others)
                traces = dict[str, tuple[Turn, Trace | None]]()
                for way in (TARGET, *others[turning:], *others[:turning]):
                    if way in others_of:
                        turn = others_of[way].turn(self.theirs(way, case), number, repeat)
                        traces[way] = replace(turn, place=place + 1), None
                    else:
                        traces[way] = self._played(way, case, servers.get(way), number, repeat, place + 1)
                    yield traces[way][0]
                if repeat == 0:
                    agreements += self._compared(traces)
                history = case.prompt + traces[TARGET][0].tokens
        self.agreements[number] = agreements

    def turns_of(self, number: int) -> int:
        """The turns of the dialogue `number`."""
        return len(self._dialogues[number])

    def _server(self, way: str, number: int) -> DialogueServer:
        """The server of a way, with room for the whole dialogue `number`."""
        base, turns = self._bases[number], self._dialogues[number]
        case = base if way == TARGET else replace(base, draft=self._drafts[way])
        return DialogueServer(
            roomy(case, turns), self._backend.models, in_mode(self._backend.seams, self._backend.mode)
        )

    def _played(
        self, way: str, base: Case, server: DialogueServer | None, prompt: int, repeat: int, place: int
    ) -> tuple[Turn, Trace]:
        """One turn of one way; without a server every token of it is prefilled."""
        case = replace(base, draft=self._drafts[way]) if way in self._drafts else base
        turn, trace = self.timed(way, case, self._backend.run if server is None else server.turn, prompt, repeat)
        return replace(turn, place=place, kept=0 if server is None else server.num_shared), trace

    def _compared(self, traces: dict[str, tuple[Turn, Trace | None]]) -> list[Agreement]:
        """The comparisons of the texts of the ways with that of the target alone, by rule T."""
        target, trace = traces[TARGET]
        assert trace is not None
        rows, noise = rows_of(trace), 0.0
        for other, found in traces.values():
            if found is None:  # transformers shows no logits
                continue
            at = first_difference(target.tokens, other.tokens)
            if at is not None:
                self.strayed[other.prompt, other.way, other.place] = step_at(found, at)
            same = min(len(other.tokens), len(rows)) if at is None else at
            theirs: list[Array] = rows if found is trace else rows_of(found)
            noise = max(noise, noise_between(rows, theirs, same))
        return [compared(target, rows, other, noise) for way, (other, _) in traces.items() if way != TARGET]
