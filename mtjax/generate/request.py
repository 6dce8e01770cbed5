"""Requests to the engine: prompt, sampling parameters, and listeners for the generated tokens."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from mtjax.config.field_metadata import TOKENS, Bound, at_least, setting

FinishReason = Literal["stop", "length", "cancelled"]
"""Why a request ended: "stop" is a stop token or the listener's decision, "length" max_tokens or the context length,
"cancelled" a call of `Engine.cancel`."""

MOST_TOKENS = TOKENS


def _between(least: float, most: float, default: float) -> float:
    bound = Bound(lambda value: least <= value <= most, f"from {least:g} to {most:g}")
    return setting(default, bound=bound)


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters."""

    max_tokens: int = at_least(1, 128, most=MOST_TOKENS)
    """Maximum number of tokens to generate."""
    temperature: float = _between(0, 100, 0.0)
    """Divides the logits before sampling; 0 is greedy decoding."""
    top_k: int = at_least(0, 0, most=TOKENS)
    """Sample from the k most likely tokens only; 0 disables it."""
    top_p: float = setting(1.0, bound=Bound(lambda value: 0 < value <= 1, "above 0 and at most 1"))
    """Sample from the smallest set of most likely tokens whose probabilities add up to p (after top_k); 1 disables
    it."""
    min_p: float = _between(0, 1, 0.0)
    """Sample only from tokens with at least this fraction of the most likely token's probability."""
    repetition_penalty: float = setting(1.0, bound=Bound(lambda value: 0 < value <= 100, "above 0 and at most 100"))
    """Divides positive logits, and multiplies negative ones, of tokens in the prompt or the text so far."""
    presence_penalty: float = _between(-100, 100, 0.0)
    """Subtracted from the logits of tokens that are in the text so far."""
    frequency_penalty: float = _between(-100, 100, 0.0)
    """Subtracted from the logits of tokens in the text so far, once for each occurrence."""
    seed: int = setting(0, bound=Bound(lambda value: 0 <= value < 2**64, "from 0 to 2^64 - 1"))
    """Random seed. The same seed samples the same tokens, on any mesh and whatever else is in the batch."""


# 2^64 divided by the golden ratio, as in SplitMix64: its multiples are spread evenly over all seeds.
PROMPT_STEP = 0x9E3779B97F4A7C15
"""Difference between the seeds of two prompts: so large that the consecutive seeds of their samples do not collide."""


def with_text_seed(sampling: Sampling, sample: int, prompt: int = 0) -> Sampling:
    """Returns the sampling parameters of one text, with its own seed.

    Args:
      sampling: parameters of all texts.
      sample: index of the text among those of its prompt.
      prompt: index of the prompt; 0 if all prompts use the same seeds.
    """
    return replace(sampling, seed=(sampling.seed + sample + prompt * PROMPT_STEP) % 2**64)


class Token(NamedTuple):
    """A token of a prompt or of generated text, with natural log-probabilities if the request wants them."""

    id: int
    logprob: float | None = None
    """None for the first token of a prompt."""
    top_logprobs: Mapping[int, float] = {}
    """The most likely tokens at this position, in descending order: at most `mtjax.generate.sampling.MOST_LIKELY`."""


@dataclass(eq=False)
class Request:
    """A prompt to be continued. Its listeners are called in the engine's thread, and should be quick.

    Args:
      prompt: token ids, at least one.
      sampling: the sampling parameters.
      stop_ids: tokens that end the text; they are not passed to `on_token`.
      logprobs: whether tokens have log-probabilities.
      echo: whether the prompt's tokens are scored and passed to `on_prompt`.
      on_prompt: called once with the prompt's tokens, if `echo`.
      on_token: called with each generated token; returns whether the request ends there.
      on_end: called exactly once with the reason why the request ended.
    """

    prompt: tuple[int, ...]
    sampling: Sampling = Sampling()
    stop_ids: frozenset[int] = frozenset()
    logprobs: bool = False
    echo: bool = False
    on_prompt: Callable[[list[Token]], None] = field(default=lambda tokens: None, repr=False)
    on_token: Callable[[Token], bool] = field(default=lambda token: False, repr=False)
    on_end: Callable[[FinishReason], None] = field(default=lambda reason: None, repr=False)
