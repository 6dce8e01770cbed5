"""`POST /v1/completions`: OpenAI's completions of strings and of token ids."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from mtjax.errors import shortened
from mtjax.generate.completion import Completion, Piece
from mtjax.generate.sampling import MOST_LIKELY
from mtjax.serve.answers import IGNORED_FIELDS, CommonFields, Texts
from mtjax.serve.api_error import ApiError
from mtjax.serve.fields import Fields, checked_text, invalid_value
from mtjax.serve.logprobs import CompletionLogprobs
from mtjax.serve.service import Service

TOKENS = 16
"""Default of `max_tokens`, as in OpenAI's API."""
ID_BOUND = 2**31


@dataclass(frozen=True)
class Prompt:
    """A prompt, as token ids and as text."""

    ids: Sequence[int]
    text: str


async def create_completion(service: Service, request: HttpRequest) -> Response:
    """Handles a completion request.

    Raises:
      ApiError: the request is invalid.
    """
    fields = Fields(await service.read_object(request), IGNORED_FIELDS)
    common = CommonFields.of(service, fields)
    given = fields.take("prompt")
    tokens = fields.integer("max_tokens", 0, 2**31)
    most_likely = fields.integer("logprobs", 0, MOST_LIKELY)
    echo = fields.boolean("echo")
    fields.reject_unsupported("suffix", "this server does not insert text before a suffix", "")
    # `best_of` equal to `n` asks for what the server does.
    fields.reject_unsupported("best_of", "this server returns all n texts", common.samples)
    fields.reject_unknown()
    if tokens == 0 and not echo:
        raise ApiError(
            400, "max_tokens is 0, which requires echo: set echo to true, or generate at least one token", "max_tokens"
        )
    prompts = await read_prompts(service, given)
    # One limit for all prompts of a request: each must have space for as many tokens.
    longest = max(len(prompt.ids) for prompt in prompts)
    # With max_tokens 0 one token is generated, which ends the request, and not returned.
    max_new_tokens = service.max_new_tokens(longest, tokens or (None if tokens is None else 1), "max_tokens", TOKENS)
    with_logprobs = most_likely is not None
    texts = Texts(
        service,
        common,
        [prompt.ids for prompt in prompts],
        replace(common.sampling, max_tokens=max_new_tokens),
        logprobs=with_logprobs,
        # Without log-probabilities the prompt's text is known: nothing needs to be scored.
        echo=echo and with_logprobs,
        # Clients that score a prompt, such as lm-eval, expect exactly one token after it, even if it is a stop token.
        **({"stop_ids": frozenset[int]()} if echo and with_logprobs and max_new_tokens == 1 else {}),
    )
    form = CompletionFormat(service, prompts, common.samples, most_likely, echo, has_text=tokens != 0)
    return await texts.respond(request, form)


async def read_prompts(service: Service, given: Any) -> list[Prompt]:
    """Reads a string, a list of strings, a list of token ids, or a list of lists of token ids.

    Raises:
      ApiError: the value is none of these, or has too many prompts.
    """
    expected = "a string, a list of strings, a list of token ids, or a list of lists of token ids"
    if given is None:
        raise ApiError(400, f"prompt is missing: send {expected}", "prompt")
    # A list that begins with a number is one prompt of ids.
    several = given if isinstance(given, list) and given and not _is_id(given[0]) else [given]
    if len(several) > service.host.max_texts:
        raise invalid_value("prompt", f"a list of {len(several)}", f"of at most {service.host.max_texts}")
    prompts = []
    for one in several:
        if isinstance(one, str):
            prompts.append(Prompt(await service.tokens.encode_prompt(checked_text(one, "prompt")), one))
        elif isinstance(one, list) and one and all(map(_is_id, one)):
            # The text of ids is what `echo` returns.
            prompts.append(Prompt(one, await service.tokens.decode(one)))
        else:
            raise invalid_value("prompt", shortened(given), expected)
    if not all(prompt.ids for prompt in prompts):
        raise ApiError(400, "a prompt has no tokens: give at least one", "prompt")
    return prompts


def _is_id(value: Any) -> bool:
    return type(value) is int and 0 <= value < ID_BOUND


class CompletionFormat:
    """The JSON format of completions."""

    prefix = "cmpl"
    names = ("text_completion", "text_completion")

    def __init__(
        self,
        service: Service,
        prompts: Sequence[Prompt],
        samples: int,
        most_likely: int | None,
        echo: bool,
        *,
        has_text: bool,
    ) -> None:
        # In the order of OpenAI's choices: the n texts of the first prompt, then those of the second.
        self._prompts = [prompt for prompt in prompts for _ in range(samples)]
        self._echo, self.has_text = echo, has_text
        self._logprobs: list[CompletionLogprobs] | None = None
        if most_likely is not None:
            starts = [self._start(service, prompt) if echo else 0 for prompt in self._prompts]
            self._logprobs = [CompletionLogprobs(service.tokens, most_likely, start) for start in starts]

    def _start(self, service: Service, prompt: Prompt) -> int:
        """Returns the text offset of a prompt's first token: below 0 if the tokenizer adds a token such as `<s>`."""
        # So that the first token of the prompt's own text has the offset 0.
        return min(len(prompt.text) - len(service.tokens.decoder.decode(prompt.ids)), 0)

    def full_choice(self, index: int, text: Completion) -> dict[str, Any]:
        """Returns a choice with the text and its log-probabilities."""
        pieces = [*text.prompt_pieces, *(text.pieces if self.has_text else ())]
        content = (self._prompts[index].text if self._echo else "") + (text.text if self.has_text else "")
        return {"text": content, "logprobs": self._choice_logprobs(index, pieces)}

    def first_choice(self, index: int) -> dict[str, Any] | None:
        """Returns the prompt's text if it is echoed."""
        return {"text": self._prompts[index].text, "logprobs": None} if self._echo else None

    def piece_choice(self, index: int, piece: Piece, is_prompt: bool) -> dict[str, Any] | None:
        """Returns a piece of text; for the prompt, whose text is in the first choice, log-probabilities only."""
        if not (is_prompt or self.has_text):
            return None
        text = "" if is_prompt else piece.text
        return {"text": text, "logprobs": self._choice_logprobs(index, [piece])} if text or self._logprobs else None

    def last_choice(self) -> dict[str, Any]:
        """Returns an empty text."""
        return {"text": "", "logprobs": None}

    def _choice_logprobs(self, index: int, pieces: Sequence[Piece]) -> dict[str, Any] | None:
        return None if self._logprobs is None else self._logprobs[index].of(pieces)
