"""Megatron-LM's `PUT /api`: the contract of `megatron/inference/text_generation_server.py` (docs/serve.md).

Kept as it is there: a wrong field is answered with a sentence in JSON, the texts begin with their prompts, and what
ends a text is part of it; `tokens_to_generate` counts from the end of the longest prompt, so shorter ones are continued
further; without top_k and top_p tokens are drawn from all, and top_k 1 takes the most likely. Different: there many
wrong fields are answered with status 200; here with 400.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from mtjax.errors import shortened
from mtjax.generate.jsonl import with_sample
from mtjax.generate.request import Request, Sampling, Token
from mtjax.serve.fields import Fields, checked_text, wrong
from mtjax.serve.refused import Refused, json_response
from mtjax.serve.service import Service, random_seed, unless_gone

MOST_PROMPTS = 128
TOKENS = 64
MOST_TOP_K = 1000
WITHOUT_EFFECT = ("no_log", "stop_token", "length_penalty")
"""Of logging, and of beams alone."""


@dataclass(frozen=True)
class Asked:
    """A request."""

    prompts: Sequence[str]
    tokens: int
    logprobs: bool
    with_bos: bool
    stops_at_line: bool
    stops_at_empty_line: bool
    sampling: Sampling
    """Without the number of tokens."""


async def answer(service: Service, request: HttpRequest) -> Response:
    """Answers one.

    Raises:
      Refused: something is wrong with it.
    """
    asked = read(Fields(await service.read_object(request), WITHOUT_EFFECT))
    tokens = service.tokens
    start = [tokens.decoder.eod] if asked.with_bos else []
    prompts = [start + await tokens.encode(prompt) for prompt in asked.prompts]
    longest = max(map(len, prompts))
    service.room(longest, asked.tokens or 1, "tokens_to_generate")
    ends = await _ends(service, asked)
    texts = [
        Text(prompt, with_sample(asked.sampling, i), longest - len(prompt) + asked.tokens, asked.logprobs, ends)
        for i, prompt in enumerate(prompts)
    ]
    ticket = service.ticket()
    service.host.submit(ticket, [text.request() for text in texts])

    async def whole() -> Response:
        await ticket.done()
        ids = [text.ids for text in texts]
        return json_response(
            {
                "text": [await tokens.decode(own) for own in ids],
                "segments": [[tokens.text_of(index) for index in own] for own in ids],
                "logprobs": [text.logprobs for text in texts] if asked.logprobs else None,
            }
        )

    try:
        return await unless_gone(request.receive, whole())
    finally:
        service.host.cancel(ticket)


def read(fields: Fields) -> Asked:
    """Reads a request.

    Raises:
      Refused: a field is wrong.
    """
    given = fields.take("prompts")
    if given is None:
        raise Refused(400, "prompts is missing: give a list of strings", "prompts")
    for old, new in (("max_len", "tokens_to_generate"), ("sentences", "prompts")):
        if fields.take(old) is not None:
            raise Refused(400, f"{old} is no longer used: say {new}", old)
    if not isinstance(given, list) or not all(isinstance(prompt, str) for prompt in given):
        raise wrong("prompts", shortened(given), "a list of strings")
    if not 1 <= len(given) <= MOST_PROMPTS:
        raise wrong("prompts", f"a list of {len(given)}", f"of 1 to {MOST_PROMPTS}")
    prompts = [checked_text(prompt, "prompts") for prompt in given]
    tokens = fields.whole("tokens_to_generate", 0, 2**31)
    tokens, logprobs = TOKENS if tokens is None else tokens, fields.flag("logprobs")
    if tokens == 0 and not logprobs:
        raise Refused(400, "tokens_to_generate is 0, which makes sense with logprobs only", "tokens_to_generate")
    sampling = _sampling(fields)
    with_bos = fields.flag("add_BOS")
    if not (all(prompts) or with_bos):
        raise Refused(400, "a prompt is empty, which needs add_BOS", "prompts")
    stops = fields.flag("stop_on_eol"), fields.flag("stop_on_double_eol")
    fields.without("prevent_newline_after_colon", "this server lets any token come", False)
    fields.without("beam_width", "this server searches no beams")
    fields.close()
    return Asked(prompts, tokens, logprobs, with_bos, *stops, sampling)


def _sampling(fields: Fields) -> Sampling:
    temperature = fields.number("temperature", lambda value: 0 < value <= 100, "above 0 and at most 100")
    top_k = fields.whole("top_k", 0, MOST_TOP_K) or 0
    top_p = fields.number("top_p", lambda value: 0 <= value <= 1, "from 0 to 1") or 0.0
    if top_k and top_p:
        raise Refused(400, f"top_k is {top_k} and top_p {top_p:g}: give one of them", "top_p")
    for name in ("top_p_decay", "top_p_bound"):
        fields.without(name, "this server keeps top_p as it is", 0, 0.0)
    seed = fields.whole("random_seed", 0, 2**64 - 1)
    greedy = top_k == 1
    return Sampling(
        temperature=0.0 if greedy else 1.0 if temperature is None else temperature,
        top_k=0 if greedy else top_k,
        top_p=top_p or 1.0,
        seed=random_seed() if seed is None else seed,
    )


async def _ends(service: Service, asked: Asked) -> Callable[[Sequence[int]], bool]:
    """Whether ids end a text: with the end of a document, of a line, or with an empty line (GPT-2's 198 and 628)."""

    async def alone(text: str) -> int | None:
        ids = await service.tokens.encode(text)
        return ids[0] if len(ids) == 1 else None

    eod, line, empty = service.tokens.decoder.eod, await alone("\n"), await alone("\n\n")

    def ends(ids: Sequence[int]) -> bool:
        last = ids[-1]
        if last == eod or (asked.stops_at_line and last == line):
            return True
        return asked.stops_at_empty_line and (last == empty or (last == line and ids[-2] == line))

    return ends


@dataclass
class Text:
    """One prompt, and what is written behind it.

    Attributes:
      ids: of both.
      logprobs: of all but the first.
    """

    prompt: Sequence[int]
    sampling: Sampling
    tokens: int
    """To write; 0 for none."""
    with_logprobs: bool
    ends: Callable[[Sequence[int]], bool]
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def request(self) -> Request:
        """For the engine: no token is left out."""
        self.ids += self.prompt
        sampling = replace(self.sampling, max_tokens=max(self.tokens, 1))
        told = {"on_prompt": self._told_prompt, "on_token": self._told_token}
        return Request(tuple(self.prompt), sampling, frozenset(), self.with_logprobs, self.with_logprobs, **told)

    def _told_prompt(self, tokens: list[Token]) -> None:
        self.logprobs += [token.logprob for token in tokens if token.logprob is not None]

    def _told_token(self, token: Token) -> bool:
        if not self.tokens:
            return True
        self.ids.append(token.id)
        self.logprobs += [] if token.logprob is None else [token.logprob]
        return self.ends(self.ids)
