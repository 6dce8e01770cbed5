"""What the engine is asked for, and what it tells while it works."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from mtjax.config.field_metadata import TOKENS, Bound, at_least, setting

ENDED = Literal["stop", "length", "cancelled"]
"""Why a request ended: a stop id, or what its listener said; max_tokens, or the end of the context; `Engine.cancel`."""

MOST_TOKENS = TOKENS


def _between(least: float, most: float, default: float) -> float:
    bound = Bound(lambda value: least <= value <= most, f"from {least:g} to {most:g}")
    return setting(default, bound=bound)


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen."""

    max_tokens: int = at_least(1, 128, most=MOST_TOKENS)
    """Tokens to write at most."""
    temperature: float = _between(0, 100, 0.0)
    """By which logits are divided before drawing; 0 takes the most likely token each time."""
    top_k: int = at_least(0, 0, most=TOKENS)
    """Draw from the k most likely tokens only; 0 draws from all."""
    top_p: float = setting(1.0, bound=Bound(lambda value: 0 < value <= 1, "above 0 and at most 1"))
    """Draw from the fewest most likely tokens whose probabilities reach p together (behind top_k); 1 draws from all."""
    min_p: float = _between(0, 1, 0.0)
    """Draw only from tokens at least this share as likely as the most likely one."""
    repetition_penalty: float = setting(1.0, bound=Bound(lambda value: 0 < value <= 100, "above 0 and at most 100"))
    """Divides positive logits, and multiplies negative ones, of tokens in the prompt or written before."""
    presence_penalty: float = _between(-100, 100, 0.0)
    """Subtracted from logits of tokens written before."""
    frequency_penalty: float = _between(-100, 100, 0.0)
    """Subtracted from logits of tokens written before, once for each time."""
    seed: int = setting(0, bound=Bound(lambda value: 0 <= value < 2**64, "from 0 to 2^64 - 1"))
    """The same seed draws the same tokens, on any mesh and beside any other requests."""


PROMPT_STEP = 0x9E3779B97F4A7C15
"""Between the seeds of two prompts: so far apart that those of their texts, which are side by side, don't meet."""


def for_text(sampling: Sampling, sample: int, prompt: int = 0) -> Sampling:
    """Returns the settings of one text, with a seed of its own.

    Args:
      sampling: of all texts.
      sample: number of the text among those for its prompt, from 0.
      prompt: number of the prompt, from 0; 0 where all prompts have the same noise.
    """
    return replace(sampling, seed=(sampling.seed + sample + prompt * PROMPT_STEP) % 2**64)


class Token(NamedTuple):
    """A token of a prompt or one that was written, with natural log-probabilities where they were asked for."""

    id: int
    logprob: float | None = None
    """None for the first token of a prompt."""
    likely: Mapping[int, float] = {}
    """The most likely tokens in its place, the first one first: at most `mtjax.generate.sampling.MOST_LIKELY`."""


@dataclass(eq=False)
class Request:
    """A prompt to be continued. Its listeners are called in the thread of the engine, and should be quick.

    Args:
      prompt: ids, at least one.
      sampling: how tokens are chosen.
      stop_ids: tokens that end it; they are not told.
      logprobs: whether tokens come with log-probabilities.
      echo: whether the prompt's tokens are told too, with their log-probabilities.
      on_prompt: told the prompt's tokens, once, if `echo`.
      on_token: told each token that is written; what it returns is whether the request ends there.
      on_end: told why it ended, once, in any case.
    """

    prompt: tuple[int, ...]
    sampling: Sampling = Sampling()
    stop_ids: frozenset[int] = frozenset()
    logprobs: bool = False
    echo: bool = False
    on_prompt: Callable[[list[Token]], None] = field(default=lambda tokens: None, repr=False)
    on_token: Callable[[Token], bool] = field(default=lambda token: False, repr=False)
    on_end: Callable[[ENDED], None] = field(default=lambda why: None, repr=False)
