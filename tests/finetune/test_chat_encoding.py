"""Which tokens of a conversation are trained on, and behind which: those that the model is given when it is asked."""

import numpy as np
import pytest
from tokenizers import Tokenizer, models, trainers

from mtjax.data.tokens.tokenizer import FastTokenizer, byte_level
from mtjax.errors import UserError
from mtjax.finetune import chat_encoding
from mtjax.finetune.chat_encoding import ChatEncoder, EncodedSample
from mtjax.finetune.chat_rows import chat_of
from mtjax.finetune.chat_samples import truncation_notes
from mtjax.generate.chat import ChatTemplate, Message
from tests import chat_templates as chats
from tests.chat_templates import END, TEMPLATES, assistant, user

pytest.importorskip("jinja2", reason="needs the extra chat: pip install '.[chat]'")

BYTES = FastTokenizer(chats.byte_level_tokenizer(), "a test")
WORDS = FastTokenizer(chats.metaspace_tokenizer(), "a test")
NAMES = {"bos_token": "<s>", "eos_token": "</s>"}
EMPTY = "<think>\n\n</think>\n\n"
CASES = [
    # template, conversation, what is trained on of each answer, number of samples
    ("chatml", chats.TWO, [f"the dog{END}", f"on the road{END}"], 1),
    ("phi3", chats.TWO, [f"the dog{END}", f"on the road{END}"], 1),
    ("qwen3", chats.TWO, [f"{EMPTY}the dog{END}", f"{EMPTY}on the road{END}"], 2),
    ("qwen3", chats.REASONING, [f"<think>\nthe road\n</think>\n\nthe dog{END}"], 1),
    (
        "qwen3",
        chats.THOUGHTS,
        [f"<think>\nthe road\n</think>\n\nthe dog{END}", f"<think>\nthe end\n</think>\n\non{END}"],
        2,
    ),
    ("mistral", chats.TWO, [" the dog</s>", " on the road</s>"], 1),
    ("mistral", chats.WITH_SYSTEM, [" the dog</s>", " on the road</s>"], 2),
    ("r1", chats.THOUGHTS, [f"the road\n</think>\n\nthe dog{END}", f"the end\n</think>\n\non{END}"], 2),
    ("r1", chats.REASONING, [f"the road\n</think>\n\nthe dog{END}"], 1),
    ("r1", chats.SINGLE, [f"the dog{END}"], 1),
    ("only the last answer ends", chats.TWO, ["the dog</s>", "on the road</s>"], 2),
    ("no end", chats.TWO, ["the dog\n<|endoftext|>", "on the road\n<|endoftext|>"], 2),
    ("counts the messages", chats.TWO, [f"the dog{END}", f"on the road{END}"], 2),
    ("generation", chats.TWO, [f"the dog{END}", f"on the road{END}"], 1),
    (
        "generation",
        chats.WITH_CALL,
        [
            '\n<tool_call>\n{"name": "compare", "arguments": {"z": "3 < 4 && it\'s", "a": "Zürich"}}\n</tool_call>'
            + END,
            f"it is{END}",
        ],
        1,
    ),
]


def encoded(
    template: str, messages: list[Message], tokenizer: FastTokenizer = BYTES, **more
) -> tuple[list[EncodedSample], set[str], ChatTemplate]:
    """A conversation's samples, what is said about them, and the template."""
    compiled = ChatTemplate(TEMPLATES.get(template, template), NAMES, "a test")
    return *ChatEncoder(tokenizer, compiled).samples(chat_of({"messages": messages, **more})), compiled


def trained(tokenizer: FastTokenizer, sample: EncodedSample, start: int = 0) -> str:
    """The tokens from `start` on that are trained on, as text."""
    return tokenizer.decode(sample.ids[start:][sample.trained[start:]])


@pytest.mark.parametrize("tokenizer", [BYTES, WORDS], ids=["bytes", "words"])
@pytest.mark.parametrize(("name", "messages", "answers", "count"), CASES, ids=[case[0] for case in CASES])
def test_each_answer_is_trained_on_behind_the_tokens_by_which_it_is_asked_for(
    name, messages, answers, count, tokenizer
):
    if tokenizer is WORDS:
        ends = [answer.replace("<|endoftext|>", "</s>") for answer in answers]
        answers = [tokenizer.decode(tokenizer.encode_marked(answer)) for answer in ends]  # it knows few letters
    samples, _, template = encoded(name, messages, tokenizer)
    assert len(samples) == count
    places = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    total = 0
    for place, answer in zip(places, answers, strict=True):
        prompt = tokenizer.encode_marked(template.render(messages[:place]))
        own = [sample for sample in samples if sample.ids[: len(prompt)].tolist() == prompt]
        learnt = own[0].trained[len(prompt) :]
        size = int(np.argmin(learnt)) if not learnt.all() else len(learnt)
        assert tokenizer.decode(own[0].ids[len(prompt) : len(prompt) + size]).lstrip() == answer.lstrip()
        total += size
    assert sum(int(sample.trained.sum()) for sample in samples) == total  # and nothing else


def test_an_answer_whose_first_letters_would_be_one_token_with_the_prompt_is_encoded_apart():
    messages = [user("the dog?"), assistant("cat on"), user("and"), assistant("dog")]
    for tokenizer in (BYTES, WORDS):
        (first, second), _, template = encoded("no end", messages, tokenizer)
        for sample, place in ((first, 1), (second, 3)):
            asked = template.render(messages[:place])
            whole = template.render(messages[: place + 1], to_be_answered=False)
            prompt = tokenizer.encode_marked(asked)
            assert sample.ids[: len(prompt)].tolist() == prompt and not sample.trained[: len(prompt)].any()
            assert tokenizer.encode_marked(whole)[: len(prompt)] != prompt  # as one token, were it encoded at once
            assert tokenizer.decode(sample.ids[:-1]) == tokenizer.decode(tokenizer.encode_marked(whole))


def test_messages_without_weight_are_read_but_not_trained_on():
    light = [{**message, "weight": 0} if i == 1 else message for i, message in enumerate(chats.TWO)]
    (sample,), _, template = encoded("chatml", light)
    assert trained(BYTES, sample) == f"on the road{END}"
    assert BYTES.decode(sample.ids) == template.render(chats.TWO, to_be_answered=False)
    (sample,), _, _ = encoded("generation", [*chats.TWO[:3], {**chats.TWO[3], "train": False}])
    assert trained(BYTES, sample) == f"the dog{END}"
    (sample,), _, _ = encoded(
        "{% for m in messages %}{{ m | tojson }}{% endfor %}",
        [user("a"), {**assistant("b"), "weight": 1, "train": True}],
    )
    assert "weight" not in BYTES.decode(sample.ids) and "train" not in BYTES.decode(sample.ids)


def test_the_completion_of_a_conversation_is_trained_on_and_its_prompt_is_not():
    template = ChatTemplate(chats.CHATML, NAMES, "a test")
    row = {"prompt": chats.TWO[:3], "completion": chats.TWO[3:]}
    (sample,), _ = ChatEncoder(BYTES, template).samples(chat_of(row))
    assert trained(BYTES, sample) == f"on the road{END}"
    assert BYTES.decode(sample.ids) == template.render(chats.TWO, to_be_answered=False)


def test_tools_and_variables_of_a_row_reach_the_template():
    more = {"tools": [chats.TOOL], "chat_template_kwargs": {"date_string": "1 Jan 2000"}}
    (sample,), remarks, _ = encoded("llama3", chats.WITH_CALL, **more)
    text = BYTES.decode(sample.ids)
    assert "Environment: ipython" in text and "Today Date: 1 Jan 2000" in text and "a < b & c" in text
    assert trained(BYTES, sample) == (
        '{"name": "compare", "parameters": {"z": "3 < 4 && it\'s", "a": "Zürich"}}' + f"{END}it is{END}"
    )
    assert not remarks
    with pytest.raises(UserError, match="chat_template of a test does not use tools: remove it"):
        encoded("chatml", chats.TWO, tools=[chats.TOOL])
    with pytest.raises(UserError, match="does not use enable_thinkin - did you mean 'enable_thinking'"):
        encoded("qwen3", chats.TWO, chat_template_kwargs={"enable_thinkin": False})


def test_thoughts_switched_off_are_in_the_prompt():
    (sample,), _, _ = encoded("qwen3", chats.SINGLE, chat_template_kwargs={"enable_thinking": False})
    assert trained(BYTES, sample) == f"the dog{END}"
    assert BYTES.decode(sample.ids[: int(np.argmax(sample.trained))]).endswith(f"assistant\n{EMPTY}")


def test_what_may_surprise_is_said():
    assert encoded("r1", chats.SINGLE)[1] == {chat_encoding.NO_THOUGHT}
    assert encoded("llama3", chats.SINGLE)[1] == {chat_encoding.DATE}
    assert encoded("generation without the end", chats.SINGLE)[1] == {chat_encoding.NO_END}
    assert not encoded("chatml", chats.SINGLE)[1]
    encoder = ChatEncoder(WORDS, None)
    assert encoder.samples(chat_of({"prompt": "the cat ", "completion": "the dog"}))[1] == {chat_encoding.MERGED}
    assert not encoder.samples(chat_of({"prompt": "the cat", "completion": " the dog"}))[1]


def test_a_completion_goes_on_from_its_prompt():
    encoder = ChatEncoder(WORDS, None)
    for prompt, completion, learnt in (("the cat", " the dog", " the dog</s>"), ("the cat ", "the dog", "the dog</s>")):
        (sample,), _ = encoder.samples(chat_of({"prompt": prompt, "completion": completion}))
        assert sample.ids.tolist() == [*WORDS.encode("the cat the dog"), WORDS.eod]
        assert trained(WORDS, sample).strip() == learnt.strip()


def test_a_question_that_changes_with_its_answer_is_refused():
    shuffled = "{{ messages | length }} {{ messages[-1].content }}!{% if add_generation_prompt %}?{% endif %}"
    with pytest.raises(UserError, match="beginning of the answer can't be found"):
        encoded(shuffled, chats.SINGLE)


def test_the_token_that_ends_an_answer_is_found_behind_a_space():
    """Where the space before it would be one token with its first letter, were its name spelled out."""
    library = byte_level(Tokenizer(models.BPE()))
    letters = trainers.BpeTrainer(vocab_size=20, special_tokens=["</s>", END], show_progress=False)
    library.train_from_iterator(["a <|im_end|> a <|im_end|>"] * 4, letters)
    tokenizer = FastTokenizer(library, "a test")
    assert tokenizer.encode_marked(f" {END}")[0] not in tokenizer.encode(f" {END}")
    spaced = "{% for m in messages %}{{ m.content }} {{ eos_token }}{% endfor %}"
    encoder = ChatEncoder(tokenizer, ChatTemplate(spaced, {"eos_token": END}, "a test"))
    assert encoder.end == tokenizer.special(END)


def test_what_is_cut_and_what_has_nothing_left_is_counted():
    def sample(size: int, asked: int) -> EncodedSample:
        return EncodedSample(np.arange(size), np.arange(size) >= asked)

    samples = [sample(5, 2), sample(20, 4), sample(20, 9), sample(20, 15), sample(5, 5), sample(20, 20)]
    assert truncation_notes(samples, 8, "samples") == [
        "4 of 6 samples are longer than 8 tokens and are truncated; "
        "2 of these have no trained tokens left and are dropped",
        "2 of 6 samples have no trained tokens and are dropped",
    ]
    assert truncation_notes(samples[:1], 8, "samples") == []
