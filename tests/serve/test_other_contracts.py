"""Megatron-LM's PUT /api, and vLLM's tokenizer endpoints."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

from mtjax.commands.convert import main as convert
from mtjax.generate.weights import load_model
from mtjax.serve import answers
from mtjax.serve.tokens import Tokens
from mtjax.sharding.axes import use_rules
from tests.convert.hf_folders import GPT2_CONFIG, VOCAB, gpt2_shapes, llama_tokenizer, random_tensors, write_folder
from tests.serve.asking import ask
from tests.serve.conftest import CONTEXT
from tests.tiny import final_hidden, model_logits


def put(live, **fields) -> dict:
    status, answer = ask(live, "PUT", "/api", fields)
    assert status == 200, answer
    return answer


def test_texts_segments_and_logprobs(live) -> None:
    tokenizer = live.service.tokens.decoder
    short, long = "the cat", "the cat and the dog went on"
    answer = put(live, prompts=[short, long], tokens_to_generate=5, top_k=1, logprobs=True)
    assert set(answer) == {"text", "segments", "logprobs"}
    assert [text.startswith(prompt) for text, prompt in zip(answer["text"], (short, long), strict=True)] == [True] * 2
    # All end where the longest prompt and its tokens do: the shorter one is continued further.
    length = len(tokenizer.encode(long)) + 5
    assert [len(segments) for segments in answer["segments"]] == [length, length]
    assert ["".join(segments) for segments in answer["segments"]] == answer["text"]
    assert all(len(numbers) == length - 1 and max(numbers) <= 0 for numbers in answer["logprobs"])
    # Of the same numbers as the other contract's.
    ids = tokenizer.encode(long)
    body = {"prompt": [ids], "temperature": 0, "max_tokens": 5, "logprobs": 0, "echo": True}
    _, same = ask(live, "POST", "/v1/completions", body)
    choice = same["choices"][0]
    assert choice["text"] == answer["text"][1] and choice["logprobs"]["token_logprobs"][1:] == answer["logprobs"][1]
    # Scored only; drawn by a seed.
    scored = put(live, prompts=[long], tokens_to_generate=0, logprobs=True)
    assert scored["text"] == [long] and scored["logprobs"] == [answer["logprobs"][1][: len(ids) - 1]]
    drawn = [put(live, prompts=[short], tokens_to_generate=8, random_seed=seed)["text"] for seed in (3, 3, 4)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert put(live, prompts=[short], tokens_to_generate=1)["logprobs"] is None
    with_bos = put(live, prompts=["", short], tokens_to_generate=1, add_BOS=True)
    assert all(segments[0] == "<|endoftext|>" for segments in with_bos["segments"])


def test_text_includes_the_token_that_ends_it(live) -> None:
    """At a high temperature, some of the texts contain a newline."""
    tokenizer = live.service.tokens.decoder
    (line,) = tokenizer.encode("\n")
    newline = tokenizer.decode([line])
    ask_for = {"prompts": ["the cat"] * 12, "tokens_to_generate": 80, "temperature": 20.0, "random_seed": 0}
    texts = put(live, **ask_for, stop_on_eol=True)["segments"]
    stopped = [text for text in texts if text[-1] == newline]
    assert stopped and all(newline not in text[:-1] for text in texts)
    segments = put(live, **ask_for)["segments"]
    longer = [text for text in segments if newline in text[:-1]]
    most = max(map(len, segments))
    assert longer and all(text[-1] == "<|endoftext|>" for text in segments if len(text) < most)


@pytest.fixture(scope="module")
def log_probabilities(folder) -> Callable[[list[int]], np.ndarray]:
    """Returns a function for log-probabilities of the next token, float64, without a KV cache."""
    loaded = load_model(f"hf:{folder}")
    placed = loaded.sharded_model

    @jax.jit
    def logits(parameters, tokens):
        with use_rules(placed.layout.rules):
            model = placed.inference_model(parameters)
            return model_logits(model, final_hidden(model, tokens))

    def of(ids: list[int]) -> np.ndarray:
        tokens = np.zeros((1, CONTEXT), np.int32)
        tokens[0, : len(ids)] = ids
        batch = jax.device_put(tokens, placed.batch_sharding)
        found = np.asarray(placed.on_mesh(logits, loaded.parameters, batch), np.float64)[0, len(ids) - 1, :VOCAB]
        return found - found.max() - np.log(np.exp(found - found.max()).sum())

    return of


def searched(log_probabilities, prompt: list[int], tokens: int, width: int, penalty: float, stop: int):
    """Reference implementation of Megatron-LM's beam search; returns scores and ids."""
    beams, finished, done = [(0.0, prompt)], [], False
    for at in range(1, tokens + 1):
        found = [(score + p, ids, i) for score, ids in beams for i, p in enumerate(log_probabilities(ids))]
        found = sorted(found, key=lambda each: -each[0])[: 2 * width]
        beams = []
        for rank, (score, ids, i) in enumerate(found):
            if i == stop and rank < width:
                finished = sorted([*finished, (score / at**penalty, ids)], key=lambda each: -each[0])[:width]
            elif i != stop and len(beams) < width:
                beams.append((score, [*ids, i]))
        if done := len(finished) == width and finished[-1][0] >= found[0][0] / at**penalty:
            break
    finished += [] if done else [(score / tokens**penalty, ids) for score, ids in beams]
    return sorted(finished, key=lambda each: -each[0])[:width]


@pytest.mark.parametrize(("width", "penalty"), [(2, 2.0), pytest.param(4, -2.0, marks=pytest.mark.long)])
def test_beams_equal_megatron_search(live, log_probabilities, width: int, penalty: float) -> None:
    tokenizer = live.service.tokens.decoder
    prompt, tokens = tokenizer.encode("the cat and the dog"), 6
    written = {i for _, ids in searched(log_probabilities, prompt, tokens, 4, 1.0, -1) for i in ids[len(prompt) :]}
    ended = 0
    for stop in (*written, tokenizer.eod):
        expected = searched(log_probabilities, prompt, tokens, width, penalty, stop)
        fields = {"beam_width": width, "length_penalty": penalty, "stop_token": stop, "tokens_to_generate": tokens}
        answer = put(live, prompts=["the cat and the dog"], **fields)
        assert set(answer) == {"text", "segments", "scores"}
        assert answer["scores"] == pytest.approx([score for score, _ in expected], rel=1e-5)
        padded = [[*ids, *[tokenizer.eod] * (len(prompt) + tokens - len(ids))] for _, ids in expected]
        assert answer["text"] == [tokenizer.decode(ids) for ids in padded]
        assert ["".join(segments) for segments in answer["segments"]] == answer["text"]
        ended += any(ids[-1] == tokenizer.eod for ids in padded)
    assert ended


def test_beam_search_does_not_change_other_texts(live) -> None:
    """Texts in flight and concurrent searches have the same results as alone."""
    alone = [
        put(live, prompts=["the road"], tokens_to_generate=9, beam_width=2),
        put(live, prompts=["the"], random_seed=1),
    ]
    with ThreadPoolExecutor(6) as pool:
        requests = [
            {"prompts": ["the road"], "tokens_to_generate": 9, "beam_width": 2},
            {"prompts": ["the"], "random_seed": 1},
        ]
        assert list(pool.map(lambda fields: put(live, **fields), requests * 3)) == alone * 3
    assert ask(live, "GET", "/health", headers={}) == (200, "ok\n")


def test_errors_are_sentences(live) -> None:
    def error_of(**fields) -> str:
        status, answer = ask(live, "PUT", "/api", fields)
        assert status == 400
        return answer

    assert error_of(prompts=["x"], top_k=2, top_p=0.5) == "top_k is 2 and top_p is 0.5: send one of them"
    assert error_of(prompts=["x", "y"], beam_width=2) == "beam_width requires a single prompt, and there are 2"
    assert error_of(prompts=["x"], beam_width=11) == "beam_width: beam search with 11 beams: the maximum is 10"
    assert error_of(prompts=["x"], beam_width=2, length_penalty="1").startswith("length_penalty is")
    assert error_of(prompts=["x"], sentences=["x"]) == "sentences is no longer supported: use prompts"
    assert ask(live, "POST", "/api", {})[0] == 405


def test_vocabulary(live) -> None:
    def tokenize(**fields) -> dict:
        return ask(live, "POST", "/tokenize", fields)[1]

    known, end = tokenize(prompt="the cat", return_token_strs=True), live.service.tokens.decoder.eod
    assert known == {"count": 2, "max_model_len": 96, "tokens": known["tokens"], "token_strs": ["the", "\u0120cat"]}
    assert ask(live, "POST", "/detokenize", {"tokens": known["tokens"]}) == (200, {"prompt": "the cat"})
    assert tokenize(prompt="<|endoftext|>", add_special_tokens=False)["tokens"] == [end]
    assert end not in tokenize(prompt="<|endoftext|>")["tokens"]  # in a text it is text
    chat = tokenize(messages=[{"role": "user", "content": "the cat"}])
    assert ask(live, "POST", "/detokenize", {"tokens": chat["tokens"]})[1]["prompt"] == "user the cat\na"
    info = ask(live, "GET", "/tokenizer_info")[1]
    assert (info["eos_token"], info["max_model_len"]) == ("<|endoftext|>", 96) and "chat_template" in info


def logprobs_of(live, **more) -> dict:
    body = {"prompt": "the cat", "temperature": 0, "max_tokens": 12, "logprobs": 0, **more}
    status, answer = ask(live, "POST", "/v1/completions", body)
    assert status == 200, answer
    return answer["choices"][0]


@pytest.mark.parametrize("echo", [False, True])
def test_unmatched_stop_sequences_do_not_change_offsets(live, echo: bool) -> None:
    plain = logprobs_of(live, echo=echo)
    text = plain["text"].removeprefix("the cat" * echo)
    stops = [f"{text[:3]}\x00", f"{text[2:9]}\x00", f"{text[5]}\x00", f"{text[-4:]}\x00"]
    assert logprobs_of(live, echo=echo, stop=stops) == plain


def test_prompts_of_a_request_use_different_seeds(live, monkeypatch) -> None:
    def texts(prompts: list[str], **more) -> list[str]:
        body = {"prompt": prompts, "max_tokens": 6, **more}
        return [choice["text"] for choice in ask(live, "POST", "/v1/completions", body)[1]["choices"]]

    monkeypatch.setattr(answers, "random_seed", lambda: 2**64 - 2)
    drawn = texts(["the cat"] * 4, n=2)
    assert len(set(drawn)) == 8
    first = texts(["the cat", "the dog", "a road", "and"], temperature=100, max_tokens=1)
    assert len(set(first)) > 1  # the hottest draw is the noise alone
    # With a seed, a prompt draws what it draws alone.
    alone = [texts([prompt], seed=3, n=2) for prompt in ("the cat", "the dog")]
    assert texts(["the cat", "the dog", "the cat"], seed=3, n=2) == [*alone[0], *alone[1], *alone[0]]
    assert alone[0][0] != alone[0][1]


def test_add_bos_prepends_the_tokenizers_bos(live, tmp_path, monkeypatch) -> None:
    source = write_folder(tmp_path / "hf", random_tensors(gpt2_shapes()), GPT2_CONFIG | {"bos_token_id": 1})
    assert convert(["--from", f"hf:{source}", "--to", f"mtjax:{tmp_path / 'ours'}"]) == 0
    # Where the tokenizer adds nothing, the config of the weights names it, also after a conversion.
    for front in ("<s>", ""):
        for folder, kind in ((source, "hf:"), (tmp_path / "ours", "")):
            llama_tokenizer(front, "</s>").save(str(folder / "tokenizer.json"))
            model = load_model(f"{kind}{folder}")
            assert Tokens(model.tokenizer, model.folder, model.first_ids).first == [1]
    tokens = live.service.tokens
    (cat,) = tokens.decoder.encode(" cat")
    monkeypatch.setattr(tokens, "first", [cat])
    answer = put(live, prompts=["", "the"], tokens_to_generate=1, add_BOS=True)
    assert [segments[0] for segments in answer["segments"]] == [" cat", " cat"]
