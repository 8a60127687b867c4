"""Sampling and Stops: how the next token is chosen, and where the output ends."""

from dataclasses import dataclass, field

from specverify.reference.grammar import Grammar
from specverify.reference.malformed import Malformed
from specverify.reference.rules import DRAWS, OMIT_DEFAULT, Rule


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen at a node.

    Processing at a node sees prompt, output and the path from the root to that node. The order is that of transformers:
    penalties, bad words, min_tokens, custom processors and the grammar change logits; then temperature, top-k, top-p
    and min-p make the law. `specverify.reference.oracle.processing` defines each of them.

    Attributes:
        temperature: 0 is greedy: the arg-max of the processed logits, the lowest id among equals.
        tape: Uniforms in [0, 1), in the places that `specverify.reference.tape` assigns; beyond the end of the tape,
            uniforms come from `seed`.
        repetition_penalty: Divides positive and multiplies negative logits of tokens in prompt, output or path.
        presence_penalty: Subtracted from logits of tokens in output or path.
        frequency_penalty: Subtracted once for each time that a token is in output or path.
        bad_words: Token sequences that may not be completed.
        min_tokens: Number of first output tokens among which no eos or stop token may occur and no stop string ends.
        grammar: The language of the output. Its mask is the last change of the logits, before the temperature.
        processors: Custom processors, `pkg.module:function`, each a pure function of (tokens, logits).
        top_k: Number of most probable tokens that are kept; tokens equal to the last one stay too. 0 keeps all.
        top_p: The most probable tokens are kept until their mass reaches this.
        min_p: Tokens below this share of the largest probability are dropped.
        rule: How drafted tokens are accepted.
        draws: How a model draft names siblings: one of DRAWS.
        seed: Seed of the uniforms that the tape does not hold.
        prompt_logprobs: Whether the request asks for the log-probability of each token of its prompt but the first.
    """

    temperature: float = 0.0
    tape: tuple[float, ...] = ()
    repetition_penalty: float = field(default=1.0, metadata=OMIT_DEFAULT)
    presence_penalty: float = field(default=0.0, metadata=OMIT_DEFAULT)
    frequency_penalty: float = field(default=0.0, metadata=OMIT_DEFAULT)
    bad_words: tuple[tuple[int, ...], ...] = field(default=(), metadata=OMIT_DEFAULT)
    min_tokens: int = field(default=0, metadata=OMIT_DEFAULT)
    processors: tuple[str, ...] = field(default=(), metadata=OMIT_DEFAULT)
    grammar: Grammar | None = field(default=None, metadata=OMIT_DEFAULT)
    top_k: int = field(default=0, metadata=OMIT_DEFAULT)
    top_p: float = field(default=1.0, metadata=OMIT_DEFAULT)
    min_p: float = field(default=0.0, metadata=OMIT_DEFAULT)
    rule: Rule = field(default=Rule(), metadata=OMIT_DEFAULT)
    draws: str = field(default="top-k", metadata=OMIT_DEFAULT)
    seed: int = field(default=0, metadata=OMIT_DEFAULT)
    prompt_logprobs: bool = field(default=False, metadata=OMIT_DEFAULT)

    def __post_init__(self) -> None:
        # `not (low <= x < high)` refuses NaN too, here and below.
        if not 0.0 <= self.temperature < float("inf"):
            raise Malformed("temperature", f"{self.temperature} is not a temperature (0 is greedy)")
        for i, coin in enumerate(self.tape):
            if not 0.0 <= coin < 1.0:
                raise Malformed(f"tape[{i}]", f"{coin} is not in [0, 1)")
        if not 0.0 < self.repetition_penalty < float("inf"):
            raise Malformed("repetition_penalty", f"{self.repetition_penalty} is not above 0 (1 changes nothing)")
        for name in ("presence_penalty", "frequency_penalty"):
            if not abs(getattr(self, name)) < float("inf"):
                raise Malformed(name, f"{getattr(self, name)} is not a number to subtract")
        if any(not word for word in self.bad_words):
            raise Malformed("bad_words", "an empty word bans nothing")
        if self.min_tokens < 0 or self.top_k < 0:
            raise Malformed("min_tokens" if self.min_tokens < 0 else "top_k", "is negative")
        if self.grammar is not None and (self.bad_words or self.min_tokens or self.processors):
            raise Malformed("grammar", "bad_words, min_tokens and processors may ban what it leaves: leave them out")
        if not 0.0 < self.top_p <= 1.0:
            raise Malformed("top_p", f"{self.top_p} is not in (0, 1]")
        if not 0.0 <= self.min_p <= 1.0:
            raise Malformed("min_p", f"{self.min_p} is not in [0, 1]")
        if self.draws not in DRAWS:
            raise Malformed("draws", f"{self.draws!r} is none of {', '.join(DRAWS)}")
        if not 0 <= self.seed < 2**63:
            raise Malformed("seed", f"{self.seed} is not in [0, 2^63)")

    @property
    def grammar_markers(self) -> tuple[tuple[int, ...], ...]:
        """The token sequences behind which the grammar begins; empty where it holds at once, and without a grammar."""
        return () if self.grammar is None else self.grammar.markers

    @property
    def greedy(self) -> bool:
        """Whether no uniform is ever consumed."""
        return self.temperature == 0.0

    @property
    def processes(self) -> bool:
        """Whether any setting beyond the temperature changes logits or drops tokens."""
        plain = Sampling()
        names = ("repetition_penalty", "presence_penalty", "frequency_penalty", "bad_words", "min_tokens", "processors")
        return any(
            getattr(self, name) != getattr(plain, name) for name in (*names, "grammar", "top_k", "top_p", "min_p")
        )


@dataclass(frozen=True)
class Stops:
    """Where the output ends; every stop also holds inside an accepted block, and no token after it is emitted or kept.

    An output after which a grammar leaves no token ends there (finish reason `grammar`), after eos and stop and before
    length.

    Only a limit of length ends the output within the first `Sampling.min_tokens` tokens. A stop string that these
    tokens complete is passed over and does not end the output later either (vLLM's rule,
    IncrementalDetokenizer.update).

    Attributes:
        max_new_tokens: Most tokens emitted, at least 1.
        eos: Token ids that end the text (finish reason `eos`); the ending token is emitted.
        stop_tokens: Token ids with which this request ends (finish reason `stop`); the ending token is emitted.
        stop_strings: Texts that end the output (finish reason `stop`) with the token that completes one of them; that
            token is emitted whole. Only the text of the output counts, not the prompt's.
        pieces: The text of every token id, given where stop strings are given; a byte vocabulary has one character a
            byte.
        max_length: Most tokens of prompt and output together (finish reason `length`); 0 for no such limit.
    """

    max_new_tokens: int = 16
    eos: tuple[int, ...] = ()
    stop_tokens: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = field(default=(), metadata=OMIT_DEFAULT)
    pieces: tuple[str, ...] = field(default=(), metadata=OMIT_DEFAULT)
    max_length: int = field(default=0, metadata=OMIT_DEFAULT)

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise Malformed("max_new_tokens", f"{self.max_new_tokens} leaves nothing to emit")
        if self.max_length < 0:
            raise Malformed("max_length", f"{self.max_length} is negative (0 is no limit)")
        for name in ("stop_strings", "pieces"):
            for i, text in enumerate(getattr(self, name)):
                if any("\ud800" <= char <= "\udfff" for char in text):
                    # JSON joins two halves into one character: the file would hold another text.
                    raise Malformed(f"{name}[{i}]", "holds half a surrogate pair, which is no character")
        if "" in self.stop_strings:
            raise Malformed(
                f"stop_strings[{self.stop_strings.index('')}]", "an empty text is complete before it starts"
            )
        if self.stop_strings and not self.pieces:
            raise Malformed("pieces", "missing; without the text of each token no stop string is ever complete")
        if self.pieces and not self.stop_strings:
            raise Malformed("pieces", "there is no stop string to look for in them")

    def room(self, prompt: int) -> int:
        """Number of tokens that the two limits of length allow after a prompt of `prompt` tokens."""
        return min(self.max_new_tokens, self.max_length - prompt) if self.max_length else self.max_new_tokens
