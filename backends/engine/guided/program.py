"""The plain matcher's program: an automaton over bytes with calls (Thompson 1968).

A state is a set of threads. A thread is a place in the code and the places to return to; threads stop at instructions
that read a byte, and at the end of the text.
"""

import json
from dataclasses import dataclass, replace

from specverify.backends.base import Unsupported
from specverify.backends.engine.guided.tokens import Spans, Token, regex_tokens, rule_tokens, schema_tokens
from specverify.reference.grammar import Grammar

Stack = tuple[int, "Stack"] | None
Thread = tuple[int, Stack]
State = frozenset[Thread]

DEEPEST = 10_000
"""Most threads of a state, and most calls; a rule that calls itself first would make more without end."""


@dataclass(frozen=True)
class Instruction:
    """An instruction of the automaton's program.

    Attributes:
        kind: `read` a byte from `low` to `high`, `go` to all of `targets`, `call` the code at `targets[0]`, `return`,
            or `match`.
        low: The first byte.
        high: The last byte.
        targets: Places in the code.
    """

    kind: str
    low: int = 0
    high: int = 0
    targets: tuple[int, ...] = ()


Code = list[Instruction]


class Program:
    """The compiled grammar.

    Attributes:
        start: The state of the empty text.
    """

    def __init__(self, grammar: Grammar) -> None:
        rules = _rules(grammar)
        self._code: Code = [Instruction("call"), Instruction("match")]
        self._entries: dict[str, int] = {}
        calls: list[tuple[int, str]] = [(0, "root")]
        for name, tokens in rules.items():
            self._entries[name] = len(self._code)
            self._code += _move(_Compiler(tokens).code(), len(self._code), calls)
            self._code.append(Instruction("return"))
        for place, name in calls:
            if name not in self._entries:
                raise Unsupported(f"the grammar has no rule {name}")
            self._code[place] = Instruction("call", targets=(self._entries[name],))
        self._steps: dict[tuple[State, int], State] = {}
        self.start = self._settle([(0, None)])

    def after(self, state: State, byte: int) -> State:
        """The state after one more byte; empty where no text goes on so."""
        key = (state, byte)
        if key not in self._steps:
            threads = [
                (place + 1, stack)
                for place, stack in state
                if self._code[place].kind == "read" and self._code[place].low <= byte <= self._code[place].high
            ]
            self._steps[key] = self._settle(threads)
        return self._steps[key]

    def complete(self, state: State) -> bool:
        """Whether the text may end in this state."""
        return any(self._code[place].kind == "match" for place, _ in state)

    def _settle(self, threads: list[Thread]) -> State:
        """The threads followed to instructions that read, or to the end."""
        visited: set[Thread] = set()
        pending = list(threads)
        while pending:
            thread = pending.pop()
            if thread in visited:
                continue
            visited.add(thread)
            if len(visited) > DEEPEST:
                raise Unsupported("the grammar has a rule that calls itself before it reads anything")
            (place, stack), instruction = thread, self._code[thread[0]]
            if instruction.kind == "go":
                pending += [(target, stack) for target in instruction.targets]
            elif instruction.kind == "call":
                pending.append((instruction.targets[0], (place + 1, stack)))
            elif instruction.kind == "return":
                assert stack is not None
                pending.append(stack)
        return frozenset(thread for thread in visited if self._code[thread[0]].kind in ("read", "match"))


def _rules(grammar: Grammar) -> dict[str, list[Token]]:
    if grammar.kind == "ebnf":
        return rule_tokens(grammar.text)
    if grammar.kind == "regex":
        return {"root": regex_tokens(grammar.text)}
    return {"root": schema_tokens(json.loads(grammar.text))}


def _move(code: Code, by: int, calls: list[tuple[int, str]]) -> Code:
    """The code with its places moved; calls, whose target is a name yet, are entered in `calls`."""
    moved = []
    for i, instruction in enumerate(code):
        if isinstance(instruction, _Call):
            calls.append((by + i, instruction.name))
            moved.append(Instruction("call"))
        else:
            moved.append(replace(instruction, targets=tuple(by + target for target in instruction.targets)))
    return moved


@dataclass(frozen=True)
class _Call(Instruction):
    name: str = ""


class _Compiler:
    """Compiles infix tokens into code whose places count from its own beginning."""

    def __init__(self, tokens: list[Token]) -> None:
        # Groups that are open: the options before, the parts of the option at hand.
        self._open: list[tuple[list[Code], list[Code]]] = [([], [])]
        for token in tokens:
            self._take(token)

    def code(self) -> Code:
        """The code of all tokens."""
        if len(self._open) != 1:
            raise Unsupported("the grammar has a group that is not closed")
        return self._closed()

    def _take(self, token: Token) -> None:
        options, parts = self._open[-1]
        if token.kind == "(":
            self._open.append(([], []))
        elif token.kind == ")":
            if len(self._open) == 1:
                raise Unsupported("the grammar closes a group that is not open")
            self._open[-2][1].append(self._closed())
        elif token.kind == "|":
            options.append(_join(parts))
            self._open[-1] = (options, [])
        elif token.kind == "count":
            if not parts:
                raise Unsupported("the grammar repeats nothing")
            parts[-1] = _repeat(parts[-1], token.least, token.most)
        else:
            parts.append([_Call("call", name=token.name)] if token.kind == "call" else _any(_utf8(token.spans)))

    def _closed(self) -> Code:
        options, parts = self._open.pop()
        return _any([*options, _join(parts)])


def _shift(code: Code, by: int) -> Code:
    return [
        instruction
        if isinstance(instruction, _Call)
        else Instruction(
            instruction.kind, instruction.low, instruction.high, tuple(by + target for target in instruction.targets)
        )
        for instruction in code
    ]


def _join(parts: list[Code]) -> Code:
    code: Code = []
    for part in parts:
        code += _shift(part, len(code))
    return code


def _any(options: list[Code]) -> Code:
    """A fork to each option; every option ends with a jump behind the last one."""
    if len(options) == 1:
        return options[0]
    if not options:  # a set without characters: no thread goes on
        return [Instruction("go")]
    end = 1 + sum(len(option) + 1 for option in options)
    code = [Instruction("go")]
    starts = []
    for option in options:
        starts.append(len(code))
        code += [*_shift(option, len(code)), Instruction("go", targets=(end,))]
    code[0] = Instruction("go", targets=tuple(starts))
    return code


def _repeat(part: Code, least: int, most: int) -> Code:
    code = _join([part] * least)
    if most < 0:
        loop_start = len(code)
        return [
            *code,
            Instruction("go", targets=(loop_start + 1, loop_start + len(part) + 2)),
            *_shift(part, loop_start + 1),
            Instruction("go", targets=(loop_start,)),
        ]
    end = len(code) + (most - least) * (len(part) + 1)
    for _ in range(most - least):
        code = [*code, Instruction("go", targets=(len(code) + 1, end)), *_shift(part, len(code) + 1)]
    return code


def _utf8(spans: Spans) -> list[Code]:
    """The byte sequences of the characters of `spans`, each a run of `read`."""
    sequences: list[Code] = []
    for first, last in spans:
        for low, high in ((0, 0x7F), (0x80, 0x7FF), (0x800, 0xD7FF), (0xE000, 0xFFFF), (0x10000, 0x10FFFF)):
            begin, end = max(first, low), min(last, high)
            if begin <= end:
                sequences += _split(begin, end, len(chr(begin).encode()))
    return sequences


def _split(first: int, last: int, size: int) -> list[Code]:
    """Runs for code points of one encoded size: split until only the last bytes run over all their values."""
    for tail in range(1, size):
        mask = (1 << 6 * tail) - 1
        if first & ~mask != last & ~mask:
            if first & mask:
                middle = first | mask
                return _split(first, middle, size) + _split(middle + 1, last, size)
            if last & mask != mask:
                middle = last & ~mask
                return _split(first, middle - 1, size) + _split(middle, last, size)
    lows, highs = chr(first).encode(), chr(last).encode()
    return [[Instruction("read", low, high) for low, high in zip(lows, highs, strict=True)]]
