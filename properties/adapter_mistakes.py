"""Mistakes of adapters: each as a rule that tells, from the right text, the wrong one that it makes.

A mistake is named only where it explains every text that was seen, the right ones too, and no other mistake does.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

Tokens = tuple[int, ...]

Ask = Callable[..., Tokens | None]
"""The reference's greedy text of a changed request: keywords are `prompt`, `most` (tokens) and `ends` (token ids)."""


@dataclass(frozen=True)
class Sample:
    """A request, with the text that it must have and the text that it has.

    Attributes:
        prompt: Token ids.
        most: Most tokens that the request asks for.
        ends: Token ids that end the output.
        must_be: The target's own greedy text.
        observed: The backend's output.
        other: The backend's output for the same request with another seed; None where it has none.
        draws: Whether the request asks for tokens drawn at a temperature; `must_be` is then no promise.
        target: The target's greedy text of a changed request, or None where the reference has none.
        draft: The draft model's own greedy text, or None without a model draft.
        specials: Token ids that may have been added: those below the vocabulary's size that are worth a try.
    """

    prompt: Tokens
    most: int
    ends: Tokens
    must_be: Tokens
    observed: Tokens
    target: Ask
    other: Callable[[], Tokens | None] = lambda: None
    draws: bool = False
    draft: Callable[[], Tokens | None] = lambda: None
    specials: Tokens = ()

    @property
    def ended(self) -> bool:
        """Whether the right text ends with one of `ends`."""
        return bool(self.must_be) and self.must_be[-1] in self.ends

    @property
    def is_right(self) -> bool:
        """Whether the text is the one that must be."""
        return self.observed == self.must_be


Predict = Callable[[Sample], Tokens | None]
"""The text that a mistake makes of a sample; None where the mistake says nothing about it."""

Fit = Callable[[Sample], Iterator[Predict]]
"""The predictions of a mistake that has a constant of its own, such as a padding token, read off one wrong sample."""


Explains = Callable[[Sequence[Sample]], bool]
"""Whether a mistake makes exactly the texts of the samples."""


@dataclass(frozen=True)
class Mistake:
    """A mistake of an adapter.

    Attributes:
        name: Its name in JSON, under which `reports/hints.py` has its sentence.
        explains: Whether it makes the texts that were seen.
        of_draws: Whether it is about requests at a temperature, and not about greedy ones.
    """

    name: str
    explains: Explains
    of_draws: bool = False


LEAST = 2
"""Fewest wrong texts that a mistake must explain before it is named."""


def by(*rules: Predict) -> Explains:
    """Whether one of `rules` gives every text of which it speaks, and at least LEAST wrong ones."""
    return lambda samples: any(_explains_all(rule, samples) for rule in rules)


def by_constant(fit: Fit) -> Explains:
    """As `by`, for rules with a constant, which is read off the first wrong text."""

    def explains(samples: Sequence[Sample]) -> bool:
        wrong = next((sample for sample in samples if not sample.is_right), None)
        return wrong is not None and any(_explains_all(rule, samples) for rule in fit(wrong))

    return explains


def _explains_all(rule: Predict, samples: Sequence[Sample]) -> bool:
    """Whether `rule` gives every text of which it speaks, and at least LEAST wrong ones."""
    explained = 0
    for sample in samples:
        predicted = rule(sample)
        if predicted is None:
            continue
        if predicted != sample.observed:
            return False
        explained += not sample.is_right
    return explained >= LEAST


def _longer(sample: Sample, more: int) -> Tokens | None:
    """The right text of the same request with `more` further tokens to go; one that has ended stays as it is."""
    return sample.must_be if sample.ended else sample.target(most=sample.most + more)


def _without_first(sample: Sample) -> Tokens | None:
    longer = _longer(sample, 1)
    return None if longer is None else longer[1:]


def _with_prompt_and_without_ending(sample: Sample) -> Tokens | None:
    """Two mistakes of a first adapter at once: it returns `model.generate`'s sequence and passes it no ending."""
    unended = sample.target(ends=())
    return None if unended is None else sample.prompt + unended


def _paddings(sample: Sample) -> Iterator[Predict]:
    """The right text, filled up to the limit with one token."""
    if len(sample.observed) > len(sample.must_be):
        pad = sample.observed[-1]
        yield lambda next_sample: next_sample.must_be + (pad,) * (next_sample.most - len(next_sample.must_be))


def _leading_outputs(sample: Sample) -> Iterator[Predict]:
    """One constant token before the right text, which may be cut at the limit."""
    first = sample.observed[:1]
    if first:
        yield lambda next_sample: first + next_sample.must_be
        yield lambda next_sample: (first + next_sample.must_be)[: next_sample.most]


def _leading_prompts(sample: Sample) -> Iterator[Predict]:
    """One constant token before the prompt."""
    for special in sample.specials:
        if sample.target(prompt=(special, *sample.prompt)) == sample.observed:
            yield lambda next_sample, token=special: next_sample.target(prompt=(token, *next_sample.prompt))  # type: ignore[misc]


def _trailing_prompts(sample: Sample) -> Iterator[Predict]:
    """One constant token behind the prompt."""
    for special in sample.specials:
        if sample.target(prompt=(*sample.prompt, special)) == sample.observed:
            yield lambda next_sample, token=special: next_sample.target(prompt=(*next_sample.prompt, token))  # type: ignore[misc]


def _is_renamed(samples: Sequence[Sample]) -> bool:
    """Whether one renaming of tokens, which is not the identity, makes every output of the right one.

    Three tokens at least must have new names, and each of them must have been seen twice: a text that went wrong in
    one place is no renaming.
    """
    names: dict[int, int] = {}
    counts: dict[int, int] = {}
    for sample in samples:
        if sample.draws or len(sample.must_be) != len(sample.observed):
            return False
        for due, observed_token in zip(sample.must_be, sample.observed, strict=True):
            if names.setdefault(due, observed_token) != observed_token:
                return False
            counts[due] = counts.get(due, 0) + 1
    renamed = [token for token, name in names.items() if token != name]
    return len(set(names.values())) == len(names) and sum(counts[token] > 1 for token in renamed) >= 3


def _draws_unasked(samples: Sequence[Sample]) -> bool:
    """Whether greedy requests get other texts with other seeds."""
    wrong = [sample for sample in samples if not sample.draws and not sample.is_right]
    return sum(sample.other() not in (None, sample.observed) for sample in wrong) >= LEAST


def _is_greedy_though_drawn(samples: Sequence[Sample]) -> bool:
    """Whether every drawn request got the greedy text, in each of its runs."""
    drawn = [sample for sample in samples if sample.draws]
    return len(drawn) > LEAST and all(
        sample.observed == sample.must_be and sample.other() in (None, sample.must_be) for sample in drawn
    )


def _ends_twice(samples: Sequence[Sample]) -> bool:
    """Whether the ending token stands twice; of a text that it fills up to the limit this cannot be told."""
    has_room = any(sample.ended and len(sample.must_be) + 1 < sample.most for sample in samples)
    return has_room and by(lambda sample: sample.must_be + sample.must_be[-1:] * sample.ended)(samples)


MISTAKES = (
    Mistake(
        "prompt-returned",
        by(
            lambda sample: sample.prompt + sample.must_be,
            lambda sample: (sample.prompt + sample.must_be)[: sample.most],
            _with_prompt_and_without_ending,
        ),
    ),
    Mistake(
        "last-prompt-token-returned",
        by(
            lambda sample: sample.prompt[-1:] + sample.must_be,
            lambda sample: (sample.prompt[-1:] + sample.must_be)[: sample.most],
        ),
    ),
    Mistake("first-token-missing", by(lambda sample: sample.must_be[1:], _without_first)),
    Mistake("ending-token-missing", by(lambda sample: sample.must_be[:-1] if sample.ended else sample.must_be)),
    Mistake("ending-token-twice", _ends_twice),
    Mistake("ending-ignored", by(lambda sample: sample.target(ends=()) if sample.ended else sample.must_be)),
    Mistake("padding-returned", by_constant(_paddings)),
    Mistake("token-too-many", by(lambda sample: _longer(sample, 1))),
    Mistake("token-too-few", by(lambda sample: sample.must_be[: sample.most - 1])),
    Mistake("limit-counts-prompt", by(lambda sample: sample.must_be[: max(0, sample.most - len(sample.prompt))])),
    Mistake("token-before-prompt", by_constant(_leading_prompts)),
    Mistake("token-behind-prompt", by_constant(_trailing_prompts)),
    Mistake("token-before-output", by_constant(_leading_outputs)),
    Mistake("first-prompt-token-missing", by(lambda sample: sample.target(prompt=sample.prompt[1:]))),
    Mistake("last-prompt-token-missing", by(lambda sample: sample.target(prompt=sample.prompt[:-1]))),
    Mistake("draft-in-place-of-target", by(lambda sample: sample.draft())),
    Mistake("tokens-renamed", _is_renamed),
    Mistake("drawn-though-greedy", _draws_unasked),
    Mistake("greedy-though-drawn", _is_greedy_though_drawn, of_draws=True),
)
"""The mistakes that are known, in the order of the pages that explain them."""


def mistake_in(samples: Sequence[Sample], of_draws: bool = False) -> str | None:
    """The name of the one mistake that explains all `samples`; None where none does, or several do.

    `of_draws` says that the finding is about tokens drawn at a temperature.
    """
    named = [mistake.name for mistake in MISTAKES if mistake.of_draws == of_draws and mistake.explains(samples)]
    return named[0] if len(named) == 1 else None
