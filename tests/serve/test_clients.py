"""The openai package against a live server, compared with the engine's texts."""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

openai = pytest.importorskip("openai", reason="needs the package openai")

from mtjax.cli import main  # noqa: E402
from mtjax.generate.engine import Engine  # noqa: E402
from tests.serve.asking import send  # noqa: E402
from tests.serve.conftest import CONTEXT, KEY, SLOTS, TEMPLATE, WAITING, Live  # noqa: E402


@pytest.fixture(scope="module")
def client(live):
    with openai.OpenAI(base_url=f"{live.address}/v1", api_key=KEY, max_retries=0) as client:
        yield client


def generated(capsys, live, *arguments: str) -> str:
    """Returns the output of `mtjax generate`."""
    assert (
        main(["generate", "--from", f"hf:{live.folder}", "--batch", str(SLOTS), "--max-tokens", "6", *arguments]) == 0
    )
    return capsys.readouterr().out.removesuffix("\n")


def test_texts_are_those_of_mtjax_generate(live, client, capsys) -> None:
    drawn = ("--temperature", "0.8", "--top-p", "0.9", "--seed", "7", "the cat")
    ask = {"model": "tiny", "prompt": "the cat", "max_tokens": 6}
    greedy = client.completions.create(**ask, temperature=0)
    assert greedy.choices[0].finish_reason == "length"
    assert (greedy.usage.completion_tokens, greedy.object) == (6, "text_completion")
    warm = client.completions.create(**ask, temperature=0.8, top_p=0.9, seed=7, n=2)
    assert warm.choices[0].text == generated(capsys, live, *drawn)
    assert [choice.index for choice in warm.choices] == [0, 1] and warm.choices[1].text != warm.choices[0].text
    # As ids, in a batch, streamed: the same again.
    ids = live.service.tokens.decoder.encode("the cat")
    both = client.completions.create(**{**ask, "prompt": [ids, "the dog"]}, temperature=0)
    assert both.choices[0].text == greedy.choices[0].text and len(both.choices) == 2
    options = {"stream": True, "stream_options": {"include_usage": True}}
    events = list(client.completions.create(**ask, temperature=0.8, top_p=0.9, seed=7, n=2, **options))
    texts = ["".join(c.text for event in events for c in event.choices if c.index == i) for i in range(2)]
    assert texts == [choice.text for choice in warm.choices]
    assert events[-1].usage == warm.usage and not any(event.usage for event in events[:-1])
    ends = [c.finish_reason for event in events for c in event.choices if c.finish_reason]
    assert ends == ["length", "length"]
    # Drawn without a seed, texts differ.
    assert len({client.completions.create(**ask).choices[0].text for _ in range(3)}) > 1


def test_options_and_stops(live, client) -> None:
    def text(**options) -> str:
        own = {name: options.pop(name) for name in ("top_k", "min_p", "repetition_penalty") if name in options}
        made = client.completions.create(model="tiny", prompt="the cat", max_tokens=12, **options, extra_body=own)
        assert made.choices[0].finish_reason == ("stop" if "stop" in options else "length")
        return made.choices[0].text

    greedy = text(temperature=0)
    assert text(temperature=3, top_k=1) == text(temperature=3, min_p=1) == greedy
    assert text(temperature=0, repetition_penalty=50) != greedy and text(temperature=0, presence_penalty=90) != greedy
    cut = greedy[2:4]
    assert text(temperature=0, stop=["never", cut]) == greedy[: greedy.index(cut)]
    echoed = client.completions.create(model="tiny", prompt="the cat", max_tokens=2, temperature=0, echo=True)
    assert echoed.choices[0].text.startswith("the cat") and greedy.startswith(echoed.choices[0].text[7:])


def test_logprobs_of_a_prompt_as_lm_eval_requests(live, client) -> None:
    ids = live.service.tokens.decoder.encode("the cat and the dog went on")
    ask = {"model": "tiny", "prompt": [ids], "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234}
    choice = client.completions.create(**ask, echo=True).choices[0]
    numbers = choice.logprobs
    assert len(numbers.tokens) == len(ids) + 1 and numbers.token_logprobs[0] is None  # exactly one token more
    assert numbers.top_logprobs[0] is None
    # "".join(tokens) is the text, and offsets count its characters.
    assert "".join(numbers.tokens) == choice.text
    assert numbers.text_offset == [len("".join(numbers.tokens[:i])) for i in range(len(numbers.tokens))]
    # What was written is the most likely token, by the very same number.
    assert max(numbers.top_logprobs[-1].values()) == numbers.token_logprobs[-1]
    pairs = zip(numbers.token_logprobs[1:], numbers.top_logprobs[1:], strict=True)
    assert all(own <= max(top.values()) for own, top in pairs)
    # Streamed, and without a token behind it: the same numbers.
    answer = client.completions.create(**{**ask, "max_tokens": 0}, echo=True)
    alone = answer.choices[0]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(ids), 0)
    assert alone.text == "the cat and the dog went on" and alone.logprobs.token_logprobs == numbers.token_logprobs[:-1]
    events = list(client.completions.create(**ask, echo=True, stream=True))
    pieces = [c.logprobs for event in events for c in event.choices if c.logprobs]
    assert [p for piece in pieces for p in piece.token_logprobs] == numbers.token_logprobs
    assert [o for piece in pieces for o in piece.text_offset] == numbers.text_offset
    assert "".join(c.text for event in events for c in event.choices) == choice.text


def test_chats(live, client) -> None:
    messages = [{"role": "system", "content": "road"}, {"role": "user", "content": "the cat"}]
    written = "system road\nuser the cat\na"
    ask = {"model": "tiny", "messages": messages, "temperature": 0, "max_completion_tokens": 6}
    made = client.chat.completions.create(**ask, logprobs=True, top_logprobs=3)
    choice = made.choices[0]
    same = client.completions.create(model="tiny", prompt=written, temperature=0, max_tokens=6)
    assert choice.message.content == same.choices[0].text and choice.message.role == "assistant"
    content = choice.logprobs.content
    assert len(content) == 6 and all(len(token.top_logprobs) == 3 for token in content)
    assert all(token.logprob == token.top_logprobs[0].logprob for token in content)
    assert all(token.bytes == list(token.token.encode()) for token in content if token.bytes is not None)
    parts = [{"role": "developer", "content": [{"type": "text", "text": "road"}]}, messages[1]]
    events = list(client.chat.completions.create(**{**ask, "messages": parts}, stream=True))
    assert events[0].choices[0].delta.role == "assistant" and events[-1].choices[0].finish_reason == "length"
    assert "".join(c.delta.content or "" for event in events for c in event.choices) == choice.message.content
    # Without a number of tokens: up to the end of the context, or of the text.
    completion = client.chat.completions.create(model="tiny", messages=messages, temperature=0)
    assert completion.usage.total_tokens == CONTEXT or completion.choices[0].finish_reason == "stop"
    assert live.service.tokens.settings["chat_template"] == TEMPLATE


def test_many_at_once_asynchronously(live) -> None:
    async def several() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{live.address}/v1", api_key=KEY) as client:
            made = [
                client.completions.create(model="tiny", prompt="the cat", max_tokens=8, seed=i % 3) for i in range(12)
            ]
            return [one.choices[0].text for one in await asyncio.gather(*made)]

    texts = asyncio.run(several())
    assert [texts.index(text) for text in texts] == [0, 1, 2] * 4  # the same seed, the same text, in any company


def test_models_and_errors(live, client) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"] and client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="unknown model 'gpt'"):
        client.completions.create(model="gpt", prompt="x")
    with pytest.raises(openai.NotFoundError, match="unknown path '/v1/responses'"):
        client.responses.create(model="tiny", input="x")
    for key in ("none", "secret-ke", "secret-key2"):
        with pytest.raises(openai.AuthenticationError, match="API key"):
            client.with_options(api_key=key).models.list()
    assert client.with_options(api_key="other").models.list().data
    with pytest.raises(openai.BadRequestError, match="top_p is 2") as error:
        client.completions.create(model="tiny", prompt="x", top_p=2)
    assert error.value.param == "top_p"
    with pytest.raises(openai.BadRequestError, match="chat_template of .* does not use tools"):
        tool = {"type": "function", "function": {"name": "f"}}
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x"}], tools=[tool])


def test_full_queue_is_a_429_and_disconnects_free_slots(live, client) -> None:
    ask = {"model": "tiny", "prompt": "the cat", "max_tokens": 80}
    most = SLOTS + WAITING
    with pytest.raises(openai.BadRequestError, match="maximum is"):
        client.completions.create(**ask, n=most + 1)
    with engine_at_rest(live):
        streams = [client.completions.create(**ask, n=most // 2, stream=True) for _ in range(2)]
        with pytest.raises(openai.RateLimitError, match=f"{most} texts in flight") as error:
            client.completions.create(**ask)
        assert error.value.response.headers["retry-after"] == "1"
        for stream in streams:
            stream.close()
    until_idle(live)
    with engine_at_rest(live), pytest.raises(openai.APITimeoutError):  # one that does not stream
        client.with_options(timeout=0.2).completions.create(**ask, n=most)
    until_idle(live)
    assert client.completions.create(**{**ask, "max_tokens": 2}, n=6, temperature=0).usage.completion_tokens == 12
    page = send(live.address, "GET", "/metrics").text.splitlines()
    numbers = dict(line.rsplit(" ", 1) for line in page if not line.startswith("#"))
    assert float(numbers['mtjax_texts_total{ended="cancelled"}']) > most / 2
    assert float(numbers['mtjax_requests_total{code="429",path="/v1/completions"}']) >= 1
    assert float(numbers["mtjax_slots"]) == SLOTS and float(numbers["mtjax_tokens_per_second"]) > 0
    assert float(numbers["mtjax_time_to_first_token_seconds_count"]) > 4
    assert float(numbers["mtjax_time_per_token_seconds_count"]) > 4


@contextmanager
def engine_at_rest(live: Live) -> Iterator[None]:
    """Blocks the engine with a job, so that no text ends meanwhile."""
    engine, over = live.service.host._engine, threading.Event()
    assert isinstance(engine, Engine)

    def rest() -> None:
        over.wait(300)

    engine.submit_job(rest)
    try:
        yield
    finally:
        over.set()


def until_idle(live: Live) -> None:
    """Waits until the server has noticed that clients disconnected."""
    end = time.monotonic() + 300
    while not live.service.host.idle.is_set():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_token_after_a_scored_prompt_is_returned_even_if_it_is_a_stop_token(live, client) -> None:
    """Evaluation harnesses remove the last token."""
    ask = {"model": "tiny", "max_tokens": 1, "temperature": 100, "logprobs": 1, "prompt": "the cat"}
    for first in range(0, 2000, 16):  # of 40 texts at most, some of the last responses may still be in flight
        texts = client.completions.create(**ask, seed=first, n=16).choices
        if ends := [first + text.index for text in texts if text.finish_reason == "stop"]:
            break
    (ended, *_) = ends
    assert not client.completions.create(**ask, seed=ended).choices[0].logprobs.tokens, first
    logprobs = client.completions.create(**ask, seed=ended, echo=True).choices[0].logprobs
    assert logprobs.tokens[2:] == ["<|endoftext|>"] and len(logprobs.token_logprobs) == 3
