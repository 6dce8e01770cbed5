"""Megatron-LM's `PUT /api`: the API of `megatron/inference/text_generation_server.py` (docs/serve.md).

The same as there: an error is a JSON string, texts include their prompts and the token that ended them;
`tokens_to_generate` counts from the end of the longest prompt, so that shorter prompts are continued further; without
top_k and top_p, sampling is over all tokens, and top_k 1 is greedy. Different: there many invalid fields are answered
with status 200; here with 400.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from mtjax.errors import UserError, shortened
from mtjax.generate.beams import BeamSearch
from mtjax.generate.request import Request, Sampling, Token, with_text_seed
from mtjax.serve.api_error import ApiError, json_response
from mtjax.serve.fields import Fields, checked_text, invalid_value
from mtjax.serve.service import Service, answered, random_seed

MOST_PROMPTS = 128
TOKENS = 64
MOST_TOP_K = 1000
MOST_PENALTY = 100
IGNORED_FIELDS = ("no_log",)
"""Fields for Megatron-LM's logging, which have no effect here."""


@dataclass(frozen=True)
class MegatronRequest:
    """A parsed request."""

    prompts: Sequence[str]
    tokens: int
    logprobs: bool
    with_bos: bool
    stops_at_line: bool
    stops_at_empty_line: bool
    sampling: Sampling
    """Sampling parameters without `max_tokens`."""
    beams: "Beams | None"


@dataclass(frozen=True)
class Beams:
    """Parameters of a beam search."""

    width: int
    length_penalty: float
    stop_token: int


async def generate(service: Service, request: HttpRequest) -> Response:
    """Handles a request.

    Raises:
      ApiError: the request is invalid.
    """
    tokens = service.tokens
    parsed = read(Fields(await service.read_object(request), IGNORED_FIELDS), tokens.decoder.eod)
    if service.host.is_encoder_decoder:
        raise ApiError(400, "this API needs a decoder-only model: use /v1/completions", "prompts")
    start = tokens.first if parsed.with_bos else []
    # Without the tokens that a tokenizer adds: add_BOS says whether there is one.
    prompts = [start + await tokens.encode(prompt) for prompt in parsed.prompts]
    longest = max(map(len, prompts))
    service.max_new_tokens(longest, parsed.tokens or 1, "tokens_to_generate")
    if parsed.beams is not None:
        return await respond_with_beams(service, request, parsed.beams, prompts[0], parsed.tokens)
    ends = await _ends(service, parsed)
    texts = [
        # As in Megatron-LM, all texts end at the same position: shorter prompts get more tokens.
        ContinuedText(
            prompt, with_text_seed(parsed.sampling, i), longest - len(prompt) + parsed.tokens, parsed.logprobs, ends
        )
        for i, prompt in enumerate(prompts)
    ]
    pending = service.pending_response()
    service.host.submit(pending, [text.request() for text in texts])

    async def full_response() -> Response:
        await pending.done()
        ids = [text.ids for text in texts]
        return json_response(
            {
                "text": [await tokens.decode(each) for each in ids],
                "segments": [[tokens.text_of(index) for index in each] for each in ids],
                "logprobs": [text.logprobs for text in texts] if parsed.logprobs else None,
            }
        )

    return await answered(service.host, pending, request.receive, full_response())


async def respond_with_beams(
    service: Service, request: HttpRequest, beams: Beams, prompt: Sequence[int], tokens: int
) -> Response:
    """Responds with the best texts of a beam search and their scores.

    As in Megatron-LM, each has all requested tokens: a text that ended before is padded with end-of-document tokens.

    Raises:
      ApiError: there are too many beams, or the engine does not support beam search.
    """
    host, tokenizer = service.host, service.tokens
    if host.decoder is None:
        raise ApiError(400, "beam search needs a replica within one process: remove beam_width", "beam_width")
    try:
        ends = frozenset([beams.stop_token])
        search = BeamSearch(host.decoder, beams.width, beams.length_penalty, ends, megatron_stopping=True)
    except UserError as e:
        raise ApiError(400, f"beam_width: {e}", "beam_width") from e
    pending = service.pending_response()
    found = host.search(pending, search, tuple(prompt), tokens)

    async def full_response() -> Response:
        await pending.done()
        texts = [beam.ids[: len(beam.ids) - beam.is_stopped] for beam in found]
        # Megatron-LM returns the whole row of its batch.
        ids = [[*prompt, *text, *[tokenizer.decoder.eod] * (tokens - len(text))] for text in texts]
        return json_response(
            {
                "text": [await tokenizer.decode(each) for each in ids],
                "segments": [[tokenizer.text_of(index) for index in each] for each in ids],
                "scores": [beam.score for beam in found],
            }
        )

    return await answered(host, pending, request.receive, full_response())


def read(fields: Fields, eod: int) -> MegatronRequest:
    """Parses a request; `eod` is the default stop token of beam search.

    Raises:
      ApiError: a field is invalid.
    """
    given = fields.take("prompts")
    if given is None:
        raise ApiError(400, "prompts is missing: send a list of strings", "prompts")
    # Megatron-LM refuses both names, too.
    for old, new in (("max_len", "tokens_to_generate"), ("sentences", "prompts")):
        if fields.take(old) is not None:
            raise ApiError(400, f"{old} is no longer supported: use {new}", old)
    if not isinstance(given, list) or not all(isinstance(prompt, str) for prompt in given):
        raise invalid_value("prompts", shortened(given), "a list of strings")
    if not 1 <= len(given) <= MOST_PROMPTS:
        raise invalid_value("prompts", f"a list of {len(given)}", f"of 1 to {MOST_PROMPTS}")
    prompts = [checked_text(prompt, "prompts") for prompt in given]
    tokens = fields.integer("tokens_to_generate", 0, 2**31)
    tokens, logprobs = TOKENS if tokens is None else tokens, fields.boolean("logprobs")
    if tokens == 0 and not logprobs:
        raise ApiError(
            400,
            "tokens_to_generate is 0, which requires logprobs: set logprobs to true, or generate at least one token",
            "tokens_to_generate",
        )
    sampling = _sampling(fields)
    with_bos = fields.boolean("add_BOS")
    if not (all(prompts) or with_bos):
        raise ApiError(400, "a prompt is empty, which requires add_BOS: set add_BOS to true", "prompts")
    stops = fields.boolean("stop_on_eol"), fields.boolean("stop_on_double_eol")
    fields.reject_unsupported("prevent_newline_after_colon", "this server does not exclude tokens", False)
    beams = _beams(fields, len(prompts), tokens, eod)
    fields.reject_unknown()
    return MegatronRequest(prompts, tokens, logprobs, with_bos, *stops, sampling, beams)


def _beams(fields: Fields, prompts: int, tokens: int, eod: int) -> Beams | None:
    width = fields.integer("beam_width", 1, 2**31)
    expected = f"from -{MOST_PENALTY} to {MOST_PENALTY}"
    penalty = fields.number("length_penalty", lambda value: abs(value) <= MOST_PENALTY, expected)
    stop = fields.integer("stop_token", 0, 2**31)
    if width is None:
        return None
    if prompts > 1:
        raise ApiError(400, f"beam_width requires a single prompt, and there are {prompts}", "beam_width")
    if not tokens:
        raise ApiError(400, "tokens_to_generate is 0, and beam_width requires at least 1", "tokens_to_generate")
    return Beams(width, 1.0 if penalty is None else penalty, eod if stop is None else stop)


def _sampling(fields: Fields) -> Sampling:
    temperature = fields.number("temperature", lambda value: 0 < value <= 100, "above 0 and at most 100")
    top_k = fields.integer("top_k", 0, MOST_TOP_K) or 0
    top_p = fields.number("top_p", lambda value: 0 <= value <= 1, "from 0 to 1") or 0.0
    # Megatron-LM's sampling refuses both, too.
    if top_k and top_p:
        raise ApiError(400, f"top_k is {top_k} and top_p is {top_p:g}: send one of them", "top_p")
    for name in ("top_p_decay", "top_p_bound"):
        fields.reject_unsupported(name, "this server uses a constant top_p", 0, 0.0)
    seed = fields.integer("random_seed", 0, 2**64 - 1)
    greedy = top_k == 1
    return Sampling(
        temperature=0.0 if greedy else 1.0 if temperature is None else temperature,
        top_k=0 if greedy else top_k,
        top_p=top_p or 1.0,
        seed=random_seed() if seed is None else seed,
    )


async def _ends(service: Service, parsed: MegatronRequest) -> Callable[[Sequence[int]], bool]:
    """Builds a predicate of ids that is true if they end with EOD or a requested newline (GPT-2's 198 and 628)."""

    async def single_token(text: str) -> int | None:
        ids = await service.tokens.encode(text)
        # With other tokenizers a line break may be several tokens; then no single one ends a text.
        return ids[0] if len(ids) == 1 else None

    eod, line, empty = service.tokens.decoder.eod, await single_token("\n"), await single_token("\n\n")

    def ends(ids: Sequence[int]) -> bool:
        last = ids[-1]
        if last == eod or (parsed.stops_at_line and last == line):
            return True
        # An empty line is one token "\n\n", or the token "\n" twice.
        return parsed.stops_at_empty_line and (last == empty or (last == line and ids[-2] == line))

    return ends


@dataclass
class ContinuedText:
    """A prompt and its continuation.

    Attributes:
      ids: tokens of both.
      logprobs: log-probabilities of all tokens but the first.
    """

    prompt: Sequence[int]
    sampling: Sampling
    tokens: int
    """Number of tokens to generate; may be 0."""
    with_logprobs: bool
    ends: Callable[[Sequence[int]], bool]
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def request(self) -> Request:
        """Builds the engine's request, without stop tokens: `ends` decides, and the text includes the last token."""
        self.ids += self.prompt
        # The engine generates at least one token; with tokens 0 `_on_token` drops it.
        sampling = replace(self.sampling, max_tokens=max(self.tokens, 1))
        listeners = {"on_prompt": self._on_prompt, "on_token": self._on_token}
        return Request(tuple(self.prompt), sampling, frozenset(), self.with_logprobs, self.with_logprobs, **listeners)

    def _on_prompt(self, tokens: list[Token]) -> None:
        self.logprobs += [token.logprob for token in tokens if token.logprob is not None]

    def _on_token(self, token: Token) -> bool:
        if not self.tokens:  # one token is generated in any case, and dropped here
            return True
        self.ids.append(token.id)
        self.logprobs += [] if token.logprob is None else [token.logprob]
        return self.ends(self.ids)
