"""Guided prompts: a given grammar over the words of a tokenizer."""

from dataclasses import replace

from specverify.checkpoints.prompts import tokenizer_of
from specverify.checkpoints.words import words_of
from specverify.reference.abilities import Abilities
from specverify.reference.architecture import Checkpoint
from specverify.reference.malformed import Malformed
from specverify.reference.sampling import Sampling
from specverify.setup.errors import UnusableInput
from specverify.setup.given_grammar import GivenGrammar


def check_guides(within: Abilities | None) -> None:
    """Raise UnusableInput if the backend, whose abilities are `within`, declares no grammars."""
    if within is not None and "grammar" not in within.processed:
        raise UnusableInput("--grammar: the backend declares no grammars, so that no prompt would be judged under one")


def guide(sampling: Sampling, grammar: GivenGrammar, checkpoint: Checkpoint) -> Sampling:
    """`sampling` under the grammar, over the words of the checkpoint's tokenizer.

    Raises:
        UnusableInput: The checkpoint has no tokenizer of bytes, or the settings already ban tokens.
    """
    words = words_of(
        tokenizer_of(checkpoint.source, "whose words a grammar reads"), checkpoint.vocab_size, str(checkpoint.source)
    )
    try:
        return replace(sampling, grammar=grammar.over(words))
    except Malformed as why:
        raise UnusableInput(f"--grammar {grammar.file}: {why}") from None
