"""Every command that reads JSON lines reads the same ones, and says where a text is not text."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from mtjax.commands.select import Options, _rows
from mtjax.data.cleaning.removal_list import read_removal_list
from mtjax.data.corpus.documents import text_of
from mtjax.data.corpus.reader import chunks
from mtjax.data.json_lines import surrogate_in
from mtjax.errors import UserError
from mtjax.evaluate.continuations import read_prompts
from mtjax.evaluate.tasks.text_file import json_lines
from mtjax.finetune.chat_rows import read_chats
from mtjax.finetune.rows import Examples, FieldNames, read_examples
from mtjax.finetune.tasks.race import RACE
from mtjax.generate.jsonl import JsonLines
from mtjax.generate.output_record import OutputRecord
from mtjax.generate.request import Sampling
from mtjax.serve.command import read_keys
from tests.finetune.test_race import config_of

TEXTS = ["one\u2028two\u2029three", "\u0085four\x1cfive\x0b\x0c", "\ufeffsix\rseven \U0001f600"]
"""With ends of lines that `str.splitlines` knows, and JSON lines don't."""


def row(text: str) -> dict:
    race = {"article": text, "questions": ["q"], "options": [list("abcd")], "answers": ["A"]}
    return {"text": text, "prompt": text, "completion": "c", "sentence": text, "label": "a", **race}


def of_examples(examples: Examples) -> list[str]:
    if examples.bad:
        raise UserError(examples.note)
    return [getattr(example, "prompt", None) or example.texts[-1] for example in examples.rows]


def of_corpus(path: Path) -> list[str]:
    documents = [document for chunk in chunks([str(path)]) for document in chunk.documents if document.strip()]
    return [text for document in documents for text in text_of(document, True, ["text"])["text"]]


def of_generate(path: Path) -> list[str]:
    target = path.with_suffix(".out")
    with JsonLines(path, target, OutputRecord(target, {}), 1, Sampling(), ()) as lines:
        return [line.prompt for line in lines.remaining()]


READERS: dict[str, Callable[[Path], list[str]]] = {
    "evaluate": lambda path: [text for _, text in json_lines(path, "text")],
    "finetune on rows": lambda path: of_examples(read_examples(path, FieldNames((("sentence",),), ("label",)))),
    "finetune on chats": lambda path: of_examples(read_chats(path)),
    "finetune on RACE": lambda path: of_examples(RACE.examples(path, config_of(path))),
    "generate": of_generate,
    "preprocess": of_corpus,
    "select": lambda path: [row["text"] for row in _rows(Options(path, path, scorer="any"))],
    "continuations": read_prompts,
}
TOOLS = [reader for reader in READERS if reader != "preprocess"]
"""What tests/data/test_datasets.py does not try."""


@pytest.mark.parametrize("reader", READERS)
def test_lines_end_in_a_line_feed_alone_and_a_byte_order_mark_is_skipped(reader, tmp_path):
    lines = [json.dumps(row(text), ensure_ascii=False) for text in TEXTS]
    text = "\r\n".join([lines[0], "", *lines[1:]]).replace('{"text"', '{\r "text"')  # a space where JSON has it
    (tmp_path / "x.jsonl").write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert READERS[reader](tmp_path / "x.jsonl") == TEXTS


@pytest.mark.parametrize("reader", TOOLS)
def test_half_a_surrogate_pair_is_refused_with_its_line(reader, tmp_path):
    lines = [json.dumps(row(text)) for text in ("good", "good", "ba \ud83d")]
    (tmp_path / "x.jsonl").write_text("\n".join(lines))
    with pytest.raises(
        UserError, match=r"x\.jsonl.*(line 3|:3) has the lone surrogate \\ud83d at character 3, which"
    ) as e:
        READERS[reader](tmp_path / "x.jsonl")
    str(e.value).encode()  # it can be printed


def test_halves_are_found_wherever_they_are():
    assert surrogate_in({"a": ["whole \U0001f600", 1, None, {"b": "x"}]}) is None
    assert surrogate_in({"a": [{"b": "x\udc00"}]}) == (
        "the lone surrogate \\udc00 at character 1, which isn't text (in 'a')"
    )
    assert surrogate_in({"\ud800": 1}) is not None


def test_lists_of_ids_and_keys_skip_a_byte_order_mark(tmp_path):
    (tmp_path / "list").write_bytes(b"\xef\xbb\xbfone\r\n two \xe2\x80\xa8 three\n\n")
    assert read_removal_list([tmp_path / "list"]).texts == {"one", "two \u2028 three"}
    assert read_keys(tmp_path / "list", {}) == ["one", "two \u2028 three"]


def test_what_is_not_a_text_file_is_named(tmp_path):
    (tmp_path / "x.jsonl").write_bytes(b"\xff\xfe")
    for path, why in ((tmp_path / "x.jsonl", "is not UTF-8 text"), (tmp_path / "none.jsonl", "can't be read: No such")):
        for reader in TOOLS:
            with pytest.raises(UserError, match=f"{path} {why}"):
                READERS[reader](path)
