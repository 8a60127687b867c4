"""Sampling and Stops: how the next token is chosen, with the tape of uniforms, and where the output ends."""

from dataclasses import dataclass

from reference.malformed import Malformed


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen at a node.

    Attributes:
        temperature: 0 is greedy: the arg-max, the lowest id among equals.
        tape: The uniforms in [0, 1) in the order in which they are consumed; greedy decoding consumes none.
    """

    temperature: float = 0.0
    tape: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise Malformed("temperature", f"{self.temperature} is not a temperature (0 is greedy)")
        for at, coin in enumerate(self.tape):
            if not 0.0 <= coin < 1.0:
                raise Malformed(f"tape[{at}]", f"{coin} is not in [0, 1)")

    @property
    def greedy(self) -> bool:
        """Whether no uniform is ever consumed."""
        return self.temperature == 0.0


@dataclass(frozen=True)
class Stops:
    """Where the output ends; each holds inside an accepted block, and nothing beyond it is emitted or kept.

    Attributes:
        max_new_tokens: Tokens emitted at most, at least 1.
        eos: Token ids that end the text (finish reason `eos`); the ending token is emitted.
        stop_tokens: Token ids of the request's own (finish reason `stop`); the ending token is emitted.
    """

    max_new_tokens: int = 16
    eos: tuple[int, ...] = ()
    stop_tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise Malformed("max_new_tokens", f"{self.max_new_tokens} leaves nothing to emit")
