"""The options of `diff --model` for sampled prompts, and for guided ones.

Without them prompts are decoded greedily, and no grammar holds their outputs.
"""

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import click

from specverify.reference.files.fields import UnreadableCheckpoint
from specverify.reference.files.generation_settings import generation_settings
from specverify.reference.grammar import LIBRARIES
from specverify.reference.malformed import Malformed
from specverify.reference.rules import DRAWS, PLAIN, RULES, Rule
from specverify.reference.sampling import Sampling
from specverify.setup.errors import UnusableInput
from specverify.setup.given_grammar import GivenGrammar, read_grammar

NAMES = ("temperature", "top_k", "top_p", "rule", "draws", "lossy")
"""The names of the options that `options` adds to a command."""


def options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options to a click command; the command passes their values to `sampling_of`."""
    # Reversed, since click lists the option that was added last first.
    for added in reversed(
        (
            click.option(
                "--temperature",
                type=click.FloatRange(min=0, min_open=True),
                help="With --model: sample every prompt at this temperature (default: greedy).",
            ),
            click.option("--top-k", type=click.IntRange(min=1), help="With --temperature: tokens kept."),
            click.option(
                "--top-p", type=click.FloatRange(0, 1, min_open=True), help="With --temperature: mass that is kept."
            ),
            click.option(
                "--own-settings",
                is_flag=True,
                help="With --model: the settings of its generation_config.json, in place of the options above.",
            ),
            click.option(
                "--grammar",
                metavar="FILE",
                help="With --model: hold every output to a JSON schema (.json), .regex or .ebnf.",
            ),
            click.option(
                "--grammar-library",
                type=click.Choice(LIBRARIES),
                help=f"What computes the masks of --grammar (default {LIBRARIES[0]}).",
            ),
            click.option(
                "--grammar-after",
                metavar="TEXT",
                multiple=True,
                help="--grammar holds behind this text, such as </think>; repeatable (default: from the first token).",
            ),
            click.option(
                "--thinking-budget",
                type=click.IntRange(min=1),
                help="Output tokens before the first --grammar-after is forced (default: never).",
            ),
            click.option("--rule", type=click.Choice(list(RULES)), help=f"Acceptance rule (default {PLAIN})."),
            click.option(
                "--draws", type=click.Choice(DRAWS), help="How a model draft names siblings (default: as the rule)."
            ),
            click.option(
                "--lossy", is_flag=True, default=None, help="Run a --rule that is lossy for siblings named by --draws."
            ),
        )
    ):
        command = added(command)
    return command


def sampling_of(model: str | None, typed: dict[str, Any]) -> Sampling:
    """The sampling settings of the options; greedy if no option was given.

    Raises:
        UsageError: An option was given without --model (drawn cases draw their own settings) or without --temperature;
            or the rule is lossy for the draws, and --lossy does not say that this is meant.
    """
    if typed.get("own_settings"):
        return _own_settings(model, typed)
    named = [f"--{name.replace('_', '-')}" for name in NAMES if typed.get(name) is not None]
    if named and model is None:
        raise click.UsageError(f"{named[0]} needs --model: the built-in models' cases draw their own settings")
    if named and typed.get("temperature") is None:
        raise click.UsageError(f"{named[0]} needs --temperature: without one, prompts are decoded greedily")
    if not named:
        return Sampling()
    rule, draws = _rule_of(typed)
    try:
        return Sampling(
            typed["temperature"],
            top_k=typed.get("top_k") or 0,
            top_p=typed.get("top_p") or 1.0,
            rule=rule,
            draws=draws,
        )
    except Malformed as why:  # a value that click's ranges cannot refuse, such as a temperature of NaN
        raise click.UsageError(str(why)) from None


def grammar_of(
    model: str | None, file: str | None, library: str | None, after: tuple[str, ...] = (), budget: int | None = None
) -> GivenGrammar | None:
    """The grammar of the options, or None.

    Raises:
        UsageError: --grammar without --model (drawn cases draw their own grammars), or an option of a grammar alone.
        UnusableInput: The grammar cannot be used.
        MissingInput: The library is not installed.
    """
    if file is None:
        alone = {"--grammar-library": library, "--grammar-after": after, "--thinking-budget": budget}
        for name, value in alone.items():
            if value:
                raise click.UsageError(f"{name} needs --grammar")
        return None
    if budget is not None and not after:
        raise click.UsageError("--thinking-budget needs --grammar-after, the text that it forces")
    if model is None:
        raise click.UsageError("--grammar needs --model: the built-in models' cases draw their own grammars")
    return replace(read_grammar(file, library or LIBRARIES[0]), after=after, budget=budget or 0)


def _rule_of(typed: dict[str, Any]) -> tuple[Rule, str]:
    """The acceptance rule of the options, and how a model draft names siblings.

    Raises:
        UsageError: The rule is lossy for these draws, and --lossy does not say that this is meant.
    """
    rule = Rule(typed["rule"] or Rule().name)
    draws = typed.get("draws") or rule.promise.draws
    # A rule that is lossy for every tree, such as typical, says so by its own promise.
    if rule.promise.lossless and not rule.lossless(draws, draws != "with-replacement") and not typed.get("lossy"):
        lossless_draws = [
            draws_name for draws_name in DRAWS if rule.lossless(draws_name, draws_name != "with-replacement")
        ]
        choices = " or ".join(lossless_draws)
        raise click.UsageError(
            f"rule {rule.name} is lossy for siblings drawn {draws}: use --draws {choices}, or --lossy"
        )
    return rule, draws


def _own_settings(model: str | None, typed: dict[str, Any]) -> Sampling:
    """The settings that the checkpoint `model` states; `--rule` and `--draws` may stand beside them."""
    from specverify.checkpoints.opening import directory_of

    if model is None:
        raise click.UsageError("--own-settings needs --model")
    clash = next((name for name in ("temperature", "top_k", "top_p") if typed.get(name) is not None), None)
    if clash is not None:
        option = f"--{clash.replace('_', '-')}"
        raise click.UsageError(f"--own-settings and {option} contradict each other: give one of them")
    rule, draws = _rule_of(typed)
    try:
        stated = generation_settings(directory_of(model))
        settings = Sampling(**asdict(stated))
        return settings if settings.greedy else replace(settings, rule=rule, draws=draws)
    except UnreadableCheckpoint as why:
        raise UnusableInput(str(why)) from None
    except Malformed as why:
        raise UnusableInput(f"{model}: generation_config.json: {why}") from None
