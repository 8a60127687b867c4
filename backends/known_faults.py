"""Known faults of engines which their ready adapters leave in: runs meet them, and pages name them."""

import re
from collections.abc import Callable
from dataclasses import dataclass

from specverify.reference.case import Case
from specverify.reference.grammar import Grammar

ROOT = re.compile(r"\broot\b")
"""The name of the first rule of a grammar."""


def has_prompt(case: Case) -> bool:
    """Whether the case has a prompt, as every case has: for a fault that the text of its error alone tells."""
    return bool(case.prompt)


def has_sampled_request(case: Case) -> bool:
    """Whether the case's request samples, or one beside it."""
    mates = case.session.mates if case.session is not None else ()
    return not case.sampling.greedy or any(not mate.sampling.greedy for mate in mates)


def has_sampled_draft_model(case: Case) -> bool:
    """Whether a request samples and has a draft model, the case's own or one beside it."""
    mates = case.session.mates if case.session is not None else ()
    requests = [(case.sampling, case.draft), *((mate.sampling, mate.draft) for mate in mates)]
    return any(not sampling.greedy and draft.model is not None for sampling, draft in requests)


def has_greedy_beside_sampled(case: Case) -> bool:
    """Whether a request is greedy and another, in the same session, samples."""
    mates = case.session.mates if case.session is not None else ()
    return len({case.sampling.greedy, *(mate.sampling.greedy for mate in mates)}) == 2


def has_seed_in_chunks(case: Case) -> bool:
    """Whether a request samples in a session whose prompts are prefilled in chunks beside decodes."""
    return has_sampled_request(case) and case.session is not None and case.session.setting == "chunked-prefill"


def has_processed_logprobs_of_a_sample(case: Case) -> bool:
    """Whether a request samples in a session whose log-probabilities are those of the processed law."""
    return has_sampled_request(case) and case.session is not None and case.session.setting == "processed-logprobs"


RESUMING = ("prefix-cache", "chunked-prefill", "small-pool")
"""Settings of vLLM in which a request may have one token of a longer prompt left to prefill."""


def has_one_token_left(case: Case) -> bool:
    """Whether a request beside others may have a single token of its prompt left to prefill."""
    session = case.session
    if session is None or not session.mates:
        return False
    prompts = (case.prompt, *(mate.prompt for mate in session.mates))
    return session.setting in RESUMING or any(len(prompt) == 1 for prompt in prompts)


def has_sampled_and_one_token_left(case: Case) -> bool:
    """Whether a request samples in such a session."""
    return has_one_token_left(case) and has_sampled_request(case)


def grammars_of(case: Case) -> list[Grammar]:
    """The grammars of the case's request and of those beside it."""
    mates = case.session.mates if case.session is not None else ()
    grammars = [case.sampling.grammar, *(mate.sampling.grammar for mate in mates)]
    return [grammar for grammar in grammars if grammar is not None]


def has_root_that_calls_itself(case: Case) -> bool:
    """Whether a request has a grammar in EBNF that names its first rule a second time."""
    return any(grammar.kind == "ebnf" and len(ROOT.findall(grammar.text)) > 1 for grammar in grammars_of(case))


def has_grammar_by_guidance(case: Case) -> bool:
    """Whether a request has a grammar in a session in the setting `guidance`."""
    return case.session is not None and case.session.setting == "guidance" and bool(grammars_of(case))


@dataclass(frozen=True)
class KnownFault:
    """A fault of an engine that somebody has explained.

    Attributes:
        invariants: The invariants that fail where it shows.
        is_reached: Whether it can show in a case.
        sentence: What the engine does there, and the version with which it was seen: `region: what (version)`, with the
            script that shows it in `tests/strangers/found` where there is one.
        error_text: A text of the error with which a run breaks; empty for a fault that breaks no run.
    """

    invariants: tuple[str, ...]
    is_reached: Callable[[Case], bool]
    sentence: str
    error_text: str = ""

    def explains(self, case: Case, invariant: str, error: str) -> bool:
        """Whether it may be why a case fails an invariant; `error` is that with which a run broke, else empty."""
        return invariant in self.invariants and self.is_reached(case) and self.error_text in error
