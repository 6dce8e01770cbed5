"""`POST /v1/completions`: OpenAI's completions of strings and of ids."""

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
"""Written when a request doesn't say how many: OpenAI's default."""
ID_BOUND = 2**31


@dataclass(frozen=True)
class Prompt:
    """What is to be continued."""

    ids: Sequence[int]
    text: str


async def create_completion(service: Service, request: HttpRequest) -> Response:
    """Answers one.

    Raises:
      Refused: something is wrong with it.
    """
    fields = Fields(await service.read_object(request), IGNORED_FIELDS)
    common = CommonFields.of(service, fields)
    given = fields.take("prompt")
    tokens = fields.integer("max_tokens", 0, 2**31)
    most_likely = fields.integer("logprobs", 0, MOST_LIKELY)
    echo = fields.boolean("echo")
    fields.reject_unsupported("suffix", "this server writes at the end of texts only", "")
    fields.reject_unsupported("best_of", "this server writes n texts and keeps them all", common.samples)
    fields.reject_unknown()
    if tokens == 0 and not echo:
        raise ApiError(400, "max_tokens is 0, and without echo there is nothing to tell", "max_tokens")
    prompts = await read_prompts(service, given)
    longest = max(len(prompt.ids) for prompt in prompts)
    room = service.max_new_tokens(longest, tokens or (None if tokens is None else 1), "max_tokens", TOKENS)
    with_logprobs = most_likely is not None
    texts = Texts(
        service,
        common,
        [prompt.ids for prompt in prompts],
        replace(common.sampling, max_tokens=room),
        logprobs=with_logprobs,
        echo=echo and with_logprobs,
        # Whoever asks how likely a prompt is (lm-eval's harness does) counts on one token behind it, whatever it is.
        **({"stop_ids": frozenset[int]()} if echo and with_logprobs and room == 1 else {}),
    )
    form = CompletionFormat(service, prompts, common.samples, most_likely, echo, is_written=tokens != 0)
    return await texts.respond(request, form)


async def read_prompts(service: Service, given: Any) -> list[Prompt]:
    """A string, a list of strings, ids, or a list of ids.

    Raises:
      Refused: it is not one of these, or too many.
    """
    expected = "a string, a list of strings, a list of ids, or a list of lists of ids"
    if given is None:
        raise ApiError(400, f"prompt is missing: it is {expected}", "prompt")
    several = given if isinstance(given, list) and given and not _is_id(given[0]) else [given]
    if len(several) > service.host.max_texts:
        raise invalid_value("prompt", f"a list of {len(several)}", f"of at most {service.host.max_texts}")
    prompts = []
    for one in several:
        if isinstance(one, str):
            prompts.append(Prompt(await service.tokens.encode_prompt(checked_text(one, "prompt")), one))
        elif isinstance(one, list) and one and all(map(_is_id, one)):
            prompts.append(Prompt(one, await service.tokens.decode(one)))
        else:
            raise invalid_value("prompt", shortened(given), expected)
    if not all(prompt.ids for prompt in prompts):
        raise ApiError(400, "a prompt has no tokens: give at least one", "prompt")
    return prompts


def _is_id(value: Any) -> bool:
    return type(value) is int and 0 <= value < ID_BOUND


class CompletionFormat:
    """How completions are written."""

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
        is_written: bool,
    ) -> None:
        self._prompts = [prompt for prompt in prompts for _ in range(samples)]
        self._echo, self._is_written = echo, is_written
        self._logprobs: list[CompletionLogprobs] | None = None
        if most_likely is not None:
            starts = [self._start(service, prompt) if echo else 0 for prompt in self._prompts]
            self._logprobs = [CompletionLogprobs(service.tokens, most_likely, start) for start in starts]

    def _start(self, service: Service, prompt: Prompt) -> int:
        """Less than 0 where the tokenizer puts something before a text, such as `<s>`."""
        return min(len(prompt.text) - len(service.tokens.decoder.decode(prompt.ids)), 0)

    def full_choice(self, index: int, text: Completion) -> dict[str, Any]:
        """A choice: the text, and its tokens."""
        pieces = [*text.prompt_pieces, *(text.pieces if self._is_written else ())]
        words = (self._prompts[index].text if self._echo else "") + (text.text if self._is_written else "")
        return {"text": words, "logprobs": self._of(index, pieces)}

    def first_choice(self, index: int) -> dict[str, Any] | None:
        """The prompt, if it is to be told."""
        return {"text": self._prompts[index].text, "logprobs": None} if self._echo else None

    def piece_choice(self, index: int, piece: Piece, is_prompt: bool) -> dict[str, Any] | None:
        """Text behind the prompt; of the prompt, which was told as a whole, log-probabilities alone."""
        if not (is_prompt or self._is_written):
            return None
        text = "" if is_prompt else piece.text
        return {"text": text, "logprobs": self._of(index, [piece])} if text or self._logprobs else None

    def last_choice(self) -> dict[str, Any]:
        """No more text."""
        return {"text": "", "logprobs": None}

    def _of(self, index: int, pieces: Sequence[Piece]) -> dict[str, Any] | None:
        return None if self._logprobs is None else self._logprobs[index].of(pieces)
