"""Megatron-LM's PUT /api, by its contract, and vLLM's tokenizer over HTTP."""

from tests.serve.asking import ask


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


def test_what_ends_a_text_is_part_of_it(live) -> None:
    """Drawn hot, of 300 tokens: in some text a line ends."""
    tokenizer = live.service.tokens.decoder
    (line,) = tokenizer.encode("\n")
    newline = tokenizer.decode([line])
    ask_for = {"prompts": ["the cat"] * 12, "tokens_to_generate": 80, "temperature": 20.0, "random_seed": 0}
    texts = put(live, **ask_for, stop_on_eol=True)["segments"]
    stopped = [text for text in texts if text[-1] == newline]
    assert stopped and all(newline not in text[:-1] for text in texts)
    whole = put(live, **ask_for)["segments"]
    longer = [text for text in whole if newline in text[:-1]]
    most = max(map(len, whole))
    assert longer and all(text[-1] == "<|endoftext|>" for text in whole if len(text) < most)


def test_errors_are_sentences(live) -> None:
    def said(**fields) -> str:
        status, answer = ask(live, "PUT", "/api", fields)
        assert status == 400
        return answer

    assert said(prompts=["x"], top_k=2, top_p=0.5) == "top_k is 2 and top_p 0.5: give one of them"
    assert said(prompts=["x"], sentences=["x"]) == "sentences is no longer used: say prompts"
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
