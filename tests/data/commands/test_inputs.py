"""What is read, named in several ways: options that are repeated, commas, and Megatron-LM's names of arguments."""

import json
import shlex

import pytest

from mtjax.cli import main
from mtjax.config.repeated import with_joined_data
from mtjax.data.corpus.indexed import bin_path, idx_path
from mtjax.data.corpus.meta import read_meta
from mtjax.data.tokens.train_tokenizer import train_byte_level_bpe
from tests.data.corpora import texts, write_bert_vocab, write_jsonl


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_byte_level_bpe(texts(200), path, 400)
    return path


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b,c", "d e", "f"):
        write_jsonl(tmp_path / f"{name}.jsonl", texts(5, seed=len(name)))
    return tmp_path


NAMED = {
    "one after another": "--input a.jsonl b,c.jsonl 'd e.jsonl'",
    "repeated": "--input a.jsonl --input b,c.jsonl --workers 0 --input='d e.jsonl'",
    "commas and quotes": """--input "a.jsonl,'b,c.jsonl','d e.jsonl'" """,
    "both": """--input "a.jsonl,'b,c.jsonl'" --input 'd e.jsonl'""",
}


@pytest.mark.parametrize("name", NAMED)
def test_files_are_named_in_several_ways(name, files, tokenizer, capsys):
    def contents(words, command="preprocess", *more):
        assert main(["data", command, *shlex.split(words), "--workers", "0", "--overwrite", *more]) == 0
        if command == "clean":
            return (files / "out.jsonl").read_bytes()
        return [path(files / "out_text_document").read_bytes() for path in (bin_path, idx_path)]

    plain, preprocessing = NAMED["one after another"], ("--output", "out", "--tokenizer", str(tokenizer))
    assert contents(NAMED[name], "preprocess", *preprocessing) == contents(plain, "preprocess", *preprocessing)
    cleaning = ("--output", "out.jsonl", "--min-tokens", "0", "--jaccard", "1")
    assert contents(NAMED[name], "clean", *cleaning) == contents(plain, "clean", *cleaning)
    assert main(["data", "preprocess", "--input", "a.jsonl,no.jsonl", "--output", "x", "--tokenizer", "t.json"]) == 2
    assert "no file matches 'no.jsonl'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "joined"),
    [
        ("--data a.jsonl", "a.jsonl"),
        ("--data a.jsonl --seed 1 --data f.jsonl", "a.jsonl f.jsonl"),
        ("--data='d e.jsonl' --data b,c.jsonl", "'d e.jsonl' 'b,c.jsonl'"),
        ("--data '0.3 a.jsonl' --data '0.7 f.jsonl,a.jsonl'", "0.3 a.jsonl 0.7 f.jsonl,a.jsonl"),
        ("--data a.jsonl --data None --data f.jsonl", "f.jsonl"),
        ("--data a.jsonl --data None", "None"),
    ],
)
def test_data_that_is_named_several_times_is_a_blend(typed, joined, files):
    from mtjax.data.corpus.source import parse_sources

    argv, notes = with_joined_data(shlex.split(typed))
    assert argv[-2:] == ["--data", joined]
    assert len(notes) == (" " in joined)
    if joined != "None":
        paths = [path for source in parse_sources(joined) for path in source.paths]
        assert all((files / path).is_file() for path in paths)


def test_train_takes_data_several_times(files, capsys):
    from mtjax import cli
    from mtjax.train.options import Options

    words = ["--data", "a.jsonl", "--valid_data", "f.jsonl", "--data", "d e.jsonl"]
    data = cli.parse(words, "mtjax train", "", Options).config.data
    assert (data.data, data.valid_data) == ("a.jsonl 'd e.jsonl'", "f.jsonl")
    assert "note    the data are --data a.jsonl 'd e.jsonl'" in capsys.readouterr().err


def write_gpt2(tokenizer, folder, names=("gpt2-vocab.json", "gpt2-merges.txt")):
    model = json.loads(tokenizer.read_text())["model"]
    folder.mkdir()
    (folder / names[0]).write_text(json.dumps(model["vocab"]))
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    (folder / names[1]).write_text("#version: 0.2\n" + "\n".join(merges) + "\n")


MEGATRON = {
    "GPT-2": (
        "--tokenizer-type GPT2BPETokenizer --vocab-file g/gpt2-vocab.json --merge-file g/gpt2-merges.txt",
        "gpt2:g",
    ),
    "without a type": ("--vocab_file=g/gpt2-vocab.json --merge_file=g/gpt2-merges.txt", "gpt2:g"),
    "Hugging Face": ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model h", "hf:h"),
    "BERT": ("--tokenizer-type BertWordPieceLowerCase --vocab-file vocab.txt --lang english", "bert:vocab.txt"),
}


@pytest.mark.parametrize("name", MEGATRON)
def test_megatrons_command_is_understood(name, files, tokenizer, capsys):
    """The command of Megatron-LM's README, with the tokens of mtjax's own names."""
    write_gpt2(tokenizer, files / "g")
    write_bert_vocab(files / "vocab.txt")
    (files / "h").mkdir()
    (files / "h/tokenizer.json").write_bytes(tokenizer.read_bytes())
    words, own = MEGATRON[name]
    theirs = f"--input a.jsonl --output-prefix x --json-keys text {words} --workers 1 --append-eod"
    assert main(["data", "preprocess", *theirs.split()]) == 0
    assert f"note    the tokenizer is --tokenizer {own}" in capsys.readouterr().err
    ours = f"--input a.jsonl --output y --tokenizer {own} --workers 0 --append-eod"
    assert main(["data", "preprocess", *ours.split()]) == 0
    one, other = files / "x_text_document", files / "y_text_document"
    assert bin_path(one).read_bytes() == bin_path(other).read_bytes()
    assert read_meta(one) == read_meta(other)


NO_EQUAL = {
    "--partitions is Megatron-LM's: omit it: all cores work": "--partitions 4",
    "--tokenizer-type NullTokenizer has no equivalent": "--tokenizer-type NullTokenizer",
    "--tokenizer-type GPT2BPETokenizers has no equivalent - did you mean 'GPT2BPETokenizer'?": "--tokenizer-type "
    "GPT2BPETokenizers",
    "--tokenizer-type GPT2BPETokenizer needs --merge-file": "--tokenizer-type GPT2BPETokenizer --vocab-file v.json",
    "--vocab-file needs --tokenizer-type: one of GPT2BPETokenizer": "--vocab-file v.json",
    "--tokenizer-type needs a value": "--tokenizer-type --append-eod",
    "v.json does not exist": "--vocab-file v.json --merge-file m.txt",
    "must be encoder.json and vocab.bpe, vocab.json and merges.txt": "--vocab-file g/x.json --merge-file g/y.txt",
    "vocab.txt has no word with capitals, so it is read as BertWordPieceLowerCase": "--tokenizer-type "
    "BertWordPieceCase --vocab-file vocab.txt",
    "if it is a name on the Hugging Face hub, say hf download meta/x": "--tokenizer-type HuggingFaceTokenizer "
    "--tokenizer-model meta/x",
    "--tokenizer and --tokenizer-type both name the tokenizer": "--tokenizer t.json --tokenizer-type NullTokenizer",
    "--lang klingon has no equivalent": "--lang klingon",
}


@pytest.mark.parametrize("message", NO_EQUAL)
def test_what_has_no_equal_of_megatrons(message, files, tokenizer, capsys):
    write_gpt2(tokenizer, files / "g", ("x.json", "y.txt"))
    write_bert_vocab(files / "vocab.txt")
    assert main(["data", "preprocess", "--input", "a.jsonl", "--output", "x", *NO_EQUAL[message].split()]) == 2
    assert message in capsys.readouterr().err
    assert not list(files.glob("x*"))
