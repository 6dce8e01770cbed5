"""The arguments of Megatron-LM's tools/preprocess_data.py as those of `mtjax data preprocess`.

`--input`, `--json-keys`, `--append-eod`, `--split-sentences` and `--workers` are options themselves.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from mtjax.data.tokens.tokenizer import GPT2_PAIRS, gpt2_files, is_cased
from mtjax.errors import UserError, nearest

TOKENIZER = ("--tokenizer-type", "--tokenizer-model", "--vocab-file", "--merge-file")
SENTENCEPIECE = ("SentencePieceTokenizer", "Llama2Tokenizer", "GPTSentencePieceTokenizer")
BERT = {"BertWordPieceLowerCase": False, "BertWordPieceCase": True}
"""Megatron's name -> whether capitals are kept."""
TYPES = ("GPT2BPETokenizer", "HuggingFaceTokenizer", *BERT, *SENTENCEPIECE)
LANGUAGES = (
    "czech=cs danish=da dutch=nl english=en estonian=et finnish=fi french=fr german=de greek=el italian=it "
    "norwegian=no polish=pl portuguese=pt russian=ru slovene=sl spanish=es swedish=sv turkish=tr"
)
"""NLTK's names of languages, for Megatron's `--lang`, and those of ISO 639."""
NO_EQUAL = {
    "--partitions": "omit it: all cores work on one dataset; --part 1/N makes one of N parts on any machine",
    "--keep-sequential-samples": "omit it: documents always keep their order",
    "--keep-newlines": "omit it: --split-sentences keeps all characters of a text",
    "--log-interval": "omit it: the progress is shown by time",
    "--vocab-size": "omit it: the tokenizer's files say it",
    "--tiktoken-pattern": "convert the tokenizer to a tokenizer.json, and give --tokenizer hf:tokenizer.json",
}
"""Arguments without an equal -> what to do."""


def with_own_names(argv: Sequence[str]) -> tuple[list[str], str | None]:
    """Returns a command line with mtjax's names, and a note on what Megatron does differently; None for its own names.

    Raises:
      UserError: an argument or value has no equivalent; says what to do.
    """
    rest: list[str] = []
    found: dict[str, str] = {}
    words = iter(argv)
    for word in words:
        option, equals, value = word.partition("=")
        # tyro takes underscores for dashes, too.
        name = option.replace("_", "-")
        if name in NO_EQUAL:
            raise UserError(f"{option} is Megatron-LM's: {NO_EQUAL[name]}")
        if name == "--output-prefix":
            rest.append(f"--output{equals}{value}")
            continue
        if name not in (*TOKENIZER, "--lang"):
            rest.append(word)
            continue
        value = value if equals else next(words, "")
        if not value or value.startswith("--"):
            raise UserError(f"{option} needs a value")
        found[name] = value
    if language := found.pop("--lang", None):
        rest += ["--language", _language(language)]
    if not found:
        return rest, None
    if "--tokenizer" in {word.partition("=")[0] for word in rest}:
        raise UserError(f"--tokenizer and {next(iter(found))} both name the tokenizer: give one of them")
    tokenizer = tokenizer_of(found)
    note = f"the tokenizer is --tokenizer {tokenizer}"
    if not tokenizer.startswith(("bert:", "sentencepiece:")):
        note += "; names of special tokens in the text are plain text, and Megatron-LM's tokens with --parse-special"
    return [*rest, "--tokenizer", tokenizer], note


def tokenizer_of(given: Mapping[str, str]) -> str:
    """Returns KIND:PATH of the tokenizer that Megatron's arguments name.

    Raises:
      UserError: there is no equivalent, or an argument is missing.
    """
    vocabulary, merges = given.get("--vocab-file"), given.get("--merge-file")
    # Only GPT-2's tokenizer has a file of merges.
    kind = given.get("--tokenizer-type") or ("GPT2BPETokenizer" if merges else None)
    if kind is None:
        raise UserError(f"{next(iter(given))} needs --tokenizer-type: one of {', '.join(TYPES)}")
    if kind == "GPT2BPETokenizer":
        return f"gpt2:{_gpt2(_needed(kind, vocabulary, '--vocab-file'), _needed(kind, merges, '--merge-file'))}"
    if kind in BERT:
        path = _needed(kind, vocabulary, "--vocab-file")
        # `bert:` decides by the words of the file. Where the argument says otherwise, other tokens would come out than
        # Megatron's.
        if Path(path).is_file() and is_cased(Path(path)) != BERT[kind]:
            has = "has words with capitals" if is_cased(Path(path)) else "has no word with capitals"
            raise UserError(f"--tokenizer-type {kind}: {path} {has}, so it is read as {_other(kind)}: say that")
        return f"bert:{path}"
    if kind == "HuggingFaceTokenizer":
        path = _needed(kind, given.get("--tokenizer-model"), "--tokenizer-model")
        if not Path(path).expanduser().exists():
            raise UserError(
                f"--tokenizer-model {path} does not exist: if it is a name on the Hugging Face hub, say hf download "
                f"{path}, and give the folder"
            )
        return f"hf:{path}"
    if kind in SENTENCEPIECE:
        return f"sentencepiece:{_needed(kind, given.get('--tokenizer-model'), '--tokenizer-model')}"
    raise UserError(
        f"--tokenizer-type {kind} has no equivalent{nearest(kind, TYPES)}: convert the tokenizer to a tokenizer.json, "
        "and give --tokenizer hf:tokenizer.json"
    )


def _other(kind: str) -> str:
    return next(other for other in BERT if other != kind)


def _needed(kind: str, value: str | None, option: str) -> str:
    if value is None:
        raise UserError(f"--tokenizer-type {kind} needs {option}")
    return value


def _gpt2(vocabulary: str, merges: str) -> Path:
    """Returns the folder with the two files of GPT-2's vocabulary.

    Raises:
      UserError: they are not in one folder, or have other names.
    """
    files = (Path(vocabulary).absolute(), Path(merges).absolute())
    if missing := next((path for path in files if not path.is_file()), None):
        raise UserError(f"{missing} does not exist")
    folder = files[0].parent
    is_known = any((folder / one, folder / other) == files for one, other in GPT2_PAIRS)
    # `gpt2:FOLDER` takes the first pair of names that a folder has, which must be the two that were named.
    if not is_known or gpt2_files(folder) != files:
        raise UserError(
            f"--vocab-file {vocabulary} and --merge-file {merges} must be encoder.json and vocab.bpe, vocab.json and "
            "merges.txt, or gpt2-vocab.json and gpt2-merges.txt, in a folder without others of these: copy them there"
        )
    return Path(vocabulary).parent


def _language(name: str) -> str:
    languages = {name: code for name, _, code in (pair.partition("=") for pair in LANGUAGES.split())}
    if name not in languages and name not in languages.values():
        raise UserError(f"--lang {name} has no equivalent: give its ISO 639 code, such as --language en")
    return languages.get(name, name)
