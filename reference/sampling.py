"""Sampling and Stops: how the next token is chosen, and where the output ends."""

from dataclasses import dataclass, field

from reference.malformed import Malformed
from reference.rules import DRAWS, OMIT_DEFAULT, Rule


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen at a node; scores pass the settings in this order (transformers').

    A node's scores see prompt, output and the path from the root to that node. Penalties, bad words, min_tokens and
    custom processors change logits; then temperature, top-k, top-p and min-p make the law. Each definition stands in
    `reference.oracle.processing`.

    Attributes:
        temperature: 0 is greedy: the arg-max of the processed logits, the lowest id among equals.
        tape: Uniforms in [0, 1), by the places that `reference.tape` gives them; beyond its end `seed` continues it.
        repetition_penalty: Divides positive and multiplies negative logits of tokens in prompt, output or path.
        presence_penalty: Subtracted from logits of tokens in output or path.
        frequency_penalty: Subtracted once for each time that a token is in output or path.
        bad_words: Token sequences that may not be completed.
        min_tokens: Output tokens before which neither eos nor a stop token may come; no stop string ends among them.
        processors: Custom processors, `pkg.module:function`, each a pure function of (tokens, logits).
        top_k: Tokens kept, equals of the last included; 0 keeps all.
        top_p: Smallest mass of the most probable tokens that is kept.
        min_p: Tokens below this share of the largest probability are dropped.
        rule: How drafted tokens are accepted.
        draws: How a model draft names siblings: one of DRAWS.
        seed: Of the uniforms that the tape does not hold.
    """

    temperature: float = 0.0
    tape: tuple[float, ...] = ()
    repetition_penalty: float = field(default=1.0, metadata=OMIT_DEFAULT)
    presence_penalty: float = field(default=0.0, metadata=OMIT_DEFAULT)
    frequency_penalty: float = field(default=0.0, metadata=OMIT_DEFAULT)
    bad_words: tuple[tuple[int, ...], ...] = field(default=(), metadata=OMIT_DEFAULT)
    min_tokens: int = field(default=0, metadata=OMIT_DEFAULT)
    processors: tuple[str, ...] = field(default=(), metadata=OMIT_DEFAULT)
    top_k: int = field(default=0, metadata=OMIT_DEFAULT)
    top_p: float = field(default=1.0, metadata=OMIT_DEFAULT)
    min_p: float = field(default=0.0, metadata=OMIT_DEFAULT)
    rule: Rule = field(default=Rule(), metadata=OMIT_DEFAULT)
    draws: str = field(default="top-k", metadata=OMIT_DEFAULT)
    seed: int = field(default=0, metadata=OMIT_DEFAULT)

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise Malformed("temperature", f"{self.temperature} is not a temperature (0 is greedy)")
        for at, coin in enumerate(self.tape):
            if not 0.0 <= coin < 1.0:
                raise Malformed(f"tape[{at}]", f"{coin} is not in [0, 1)")
        if not 0.0 < self.repetition_penalty < float("inf"):
            raise Malformed("repetition_penalty", f"{self.repetition_penalty} is not above 0 (1 changes nothing)")
        for name in ("presence_penalty", "frequency_penalty"):
            if not abs(getattr(self, name)) < float("inf"):
                raise Malformed(name, f"{getattr(self, name)} is not a number to subtract")
        if any(not word for word in self.bad_words):
            raise Malformed("bad_words", "an empty word bans nothing")
        if self.min_tokens < 0 or self.top_k < 0:
            raise Malformed("min_tokens" if self.min_tokens < 0 else "top_k", "is negative")
        if not 0.0 < self.top_p <= 1.0:
            raise Malformed("top_p", f"{self.top_p} is not in (0, 1]")
        if not 0.0 <= self.min_p <= 1.0:
            raise Malformed("min_p", f"{self.min_p} is not in [0, 1]")
        if self.draws not in DRAWS:
            raise Malformed("draws", f"{self.draws!r} is none of {', '.join(DRAWS)}")
        if not 0 <= self.seed < 2**63:
            raise Malformed("seed", f"{self.seed} is not in [0, 2^63)")

    @property
    def greedy(self) -> bool:
        """Whether no uniform is ever consumed."""
        return self.temperature == 0.0

    @property
    def processes(self) -> bool:
        """Whether logits are changed, or tokens dropped, beyond the temperature."""
        plain = Sampling()
        names = ("repetition_penalty", "presence_penalty", "frequency_penalty", "bad_words", "min_tokens", "processors")
        return any(getattr(self, name) != getattr(plain, name) for name in (*names, "top_k", "top_p", "min_p"))


@dataclass(frozen=True)
class Stops:
    """Where the output ends; each holds inside an accepted block, and nothing beyond it is emitted or kept.

    The first `Sampling.min_tokens` tokens of the output end it by length alone: a stop string that they complete is
    passed over, and does not end the output later (vLLM's rule, IncrementalDetokenizer.update).

    Attributes:
        max_new_tokens: Tokens emitted at most, at least 1.
        eos: Token ids that end the text (finish reason `eos`); the ending token is emitted.
        stop_tokens: Token ids of the request's own (finish reason `stop`); the ending token is emitted.
        stop_strings: Texts that end the output (finish reason `stop`) with the token that completes one; that token is
            emitted whole. The text is that of the output's tokens, the prompt's does not count.
        pieces: The text of every token id, there where stop strings are; a byte vocabulary has a character for a byte.
        max_length: Tokens of prompt and output together at most (finish reason `length`); 0 for no such limit.
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
            for at, text in enumerate(getattr(self, name)):
                if any("\ud800" <= one <= "\udfff" for one in text):
                    # JSON joins two halves into one character: the file would hold another text.
                    raise Malformed(f"{name}[{at}]", "holds half a surrogate pair, which is no character")
        if "" in self.stop_strings:
            raise Malformed(
                f"stop_strings[{self.stop_strings.index('')}]", "an empty text is complete before it starts"
            )
        if self.stop_strings and not self.pieces:
            raise Malformed("pieces", "missing; without the text of each token no stop string is ever complete")
        if self.pieces and not self.stop_strings:
            raise Malformed("pieces", "there is no stop string to look for in them")

    def room(self, prompt: int) -> int:
        """Tokens that may be emitted after a prompt of `prompt` tokens, by the two limits of length."""
        return min(self.max_new_tokens, self.max_length - prompt) if self.max_length else self.max_new_tokens
