"""The tokenizer of a run and its files: on --resume the run's own, else that of its initial weights, else the one that
is named.

Checkpoints and weights are useless without the tokenizer whose ids they were trained on. So a run keeps its tokenizer,
even if the text or the file that it came from changes.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

from mtjax.config import Config
from mtjax.config.vocabulary import GPT2_VOCABULARY
from mtjax.data import vocabulary_size
from mtjax.data.cache import Cache
from mtjax.data.run_text import TRAINED, RunText
from mtjax.data.tokens.end_file import END_FILE, end_content, saved_end
from mtjax.data.tokens.folder import (
    DESCRIPTIONS,
    GENERATION_CONFIG,
    TOKENIZER_FILES,
    tokenizer_files,
    tokenizer_of,
    tokenizer_of_run,
)
from mtjax.data.tokens.identity import content_digest, difference, prompt_difference, same_path
from mtjax.data.tokens.template_files import template_names
from mtjax.data.tokens.tokenizer import Tokenizer, folder_of, open_tokenizer, path_of
from mtjax.errors import UserError
from mtjax.runtime.checkpoints.weights import SPECIAL_IDS, Weights, special_ids
from mtjax.runtime.processes.coordination import all_gather_text, num_processes
from mtjax.storage import names_in, read_bytes, shown, url_of
from mtjax.train.folder.run_folder import holds_run


class HasTokenizer(Protocol):
    """A tokenizer, and the files that a run's folder keeps with it: a dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer."""
        ...

    @property
    def files(self) -> Mapping[str, bytes]:
        """The files by name."""
        ...

    @property
    def is_saved(self) -> bool:
        """Whether the run's folder has all of it already."""
        ...


Found = TypeVar("Found", bound=HasTokenizer)


@dataclass(frozen=True)
class RunTokenizer:
    """The tokenizer of a run."""

    tokenizer: Tokenizer
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Files by name that are saved in the run's folder with it; a `tokenizer.json` among them is the tokenizer
    itself."""
    is_saved: bool = False
    """Whether the run's folder already has all of them."""
    notes: tuple[str, ...] = ()
    """Notes for the user."""
    name: str = TRAINED
    """What messages call it: as the user named it, or its file."""


@dataclass(frozen=True)
class Owned:
    """The tokenizer of a run or of weights."""

    name: str
    """Its name for `--tokenizer` on this machine."""
    shown: str
    """Its name for messages."""
    folder: Path
    """Folder of its files on this machine."""
    tokenizer: Tokenizer


def find_tokenizer(config: Config, run_folder: Path | None, weights: Weights | None) -> RunTokenizer:
    """Finds the tokenizer of a run, and checks that its corpora were built with it. All processes call it.

    Args:
      config: the run.
      run_folder: the folder of the run that is resumed, on this machine or in an object store; None for a new run.
      weights: the weights with which the run starts, if not random ones.

    Raises:
      UserError: there is none, it can't be read, or the settings or the corpora contradict it.
    """
    named = config.data.tokenizer
    owned = owned_by_run(config, run_folder) if run_folder is not None else None
    if owned is not None:
        note = check_resumed(owned, named)
        found, name = _of_run(owned, note), owned.shown
    elif weights is not None and (theirs := _owned_by_weights(weights, named, config.data.eod_token)):
        found, name = _from_weights(theirs, weights, named)
    else:
        return _named_or_trained(config, run_folder, weights)
    found = with_end(found, config.data.eod_token, name)
    check_processes(name, found.tokenizer)
    notes = RunText(config.data).check_corpora(name, found.tokenizer)
    return replace(found, notes=(*found.notes, *notes), name=name)


def with_end(found: Found, token: str | None, name: str) -> Found:
    """Returns the tokenizer with the end of document that the settings name.

    Raises:
      UserError: it has no such token, or belongs to a run whose documents end with another one.
    """
    if token is None:
        return found
    tokenizer, end = found.tokenizer.with_eod(token), found.tokenizer.token(found.tokenizer.eod)
    # The token that the run was begun with, named again on resume.
    if found.is_saved and end == token:
        return found
    if found.is_saved:
        raise UserError(
            f"the documents of the run end with {end} ({name}), and --eod-token is {token}: remove it, or start a new "
            "run in another --out"
        )
    return replace(found, tokenizer=tokenizer, files={**found.files, END_FILE: end_content(token)})


def _of_run(owned: Owned, note: str | None) -> RunTokenizer:
    files = read_files(owned.folder, (*DESCRIPTIONS, GENERATION_CONFIG, SPECIAL_IDS))
    return RunTokenizer(owned.tokenizer, files, is_saved=True, notes=(note,) if note else ())


def _named_or_trained(config: Config, run_folder: Path | None, weights: Weights | None) -> RunTokenizer:
    """Opens the tokenizer that the settings or the corpora name, or trains one on the text."""
    text = RunText(config.data)
    if text.name is None:
        _refuse_to_train_one(run_folder, weights)
    files = files_beside(text.name) if text.name else {}
    if weights is not None:
        files |= _descriptions_of(weights)
    tokenizer = text.tokenizer
    check_processes(text.name or TRAINED, tokenizer)
    unused = _unused_note(config, tokenizer) if text.name is None else None
    notes = (*text.notes, *([unused] if unused else []))
    return RunTokenizer(tokenizer, files, notes=notes, name=text.name or TRAINED)


def _unused_note(config: Config, tokenizer: Tokenizer) -> str | None:
    """Returns a note for a model whose vocabulary was chosen for another tokenizer than the one trained on its text;
    None where all of it is used."""
    size, trained = config.model.vocab_size, vocabulary_size(config, tokenizer)
    if size is None or size <= trained:
        return None
    named = "gpt2:FOLDER, which is GPT-2's" if size == GPT2_VOCABULARY else "hf:FOLDER, or remove vocab_size"
    return (
        f"no --tokenizer is given: one of {trained:,} tokens was trained on the text, and {size - trained:,} of the "
        f"vocabulary's {size:,} tokens are never used. Name the tokenizer for this vocab_size: --tokenizer {named}"
    )


def owned_by_run(config: Config, out: Path) -> Owned | None:
    """Opens the tokenizer in a run's folder, on this machine or in an object store; returns None if there is none.

    Raises:
      UserError: it can't be read.
    """
    url = url_of(out)
    present = names_in(url) if url else ()
    names = [name for name in (*TOKENIZER_FILES, SPECIAL_IDS) if name in present] if url else tokenizer_files(out)
    if tokenizer_of_run(names, out) is None:
        return None
    # Tokenizers are opened from files on this machine.
    folder = _copied(url, names, Cache.of(config.data)) if url else out
    name = str(tokenizer_of_run(names, folder))
    return Owned(name, name.replace(str(folder), shown(out)), folder, open_tokenizer(name))


def check_resumed(owned: Owned, named: str | None) -> str | None:
    """Checks that the tokenizer that is named for a resumed run is the run's own.

    Returns:
      A note if the named one does not exist; the run's own is sufficient.

    Raises:
      UserError: it is another tokenizer; names both.
    """
    if named is None:
        return None
    # A run that was moved to another machine resumes without the file from which its tokenizer came.
    if not path_of(named).exists():
        return f"the tokenizer {named} does not exist; the run's own is used, {owned.shown}"
    if why := prompt_difference(owned.tokenizer, _open_named(named, owned)):
        raise UserError(
            f"the run was trained with the tokenizer {owned.shown}, and --tokenizer {named} is another one ({why}): "
            "remove tokenizer from the command and the config to continue with the run's own, or start a new run in "
            "another --out"
        )
    return None


def _open_named(name: str, owned: Owned) -> Tokenizer:
    """Opens a tokenizer that may be that of a run or of weights, with the end-of-document token chosen for that one."""
    tokenizer, chosen = open_tokenizer(name), saved_end(path_of(owned.name))
    return tokenizer if chosen is None or tokenizer.special(chosen) is None else tokenizer.with_eod(chosen)


def files_beside(name: str) -> dict[str, bytes]:
    """Reads the files that describe a tokenizer, by name, from its folder.

    Raises:
      UserError: one can't be read.
    """
    path = path_of(name)
    # The files next to one with a custom name, such as vocabularies/large.json, may describe another tokenizer.
    if path.is_file() and path.name not in TOKENIZER_FILES:
        return {}
    folder = folder_of(name)
    return read_files(folder, (*DESCRIPTIONS, *template_names(folder)))


def files_of_weights(folder: Path, hugging_face: Mapping[str, object], *, vocabulary: bool) -> dict[str, bytes]:
    """Reads the files that a run copies from its initial weights: the tokenizer's, and the ids of special tokens.

    Args:
      folder: of the weights.
      hugging_face: their `config.json`, or the known entries of it.
      vocabulary: whether to copy the tokenizer itself, or only the files that describe it.

    Raises:
      UserError: a file can't be read.
    """
    # Chat template and settings of generation are still true with another tokenizer for the same weights.
    names = (*(TOKENIZER_FILES if vocabulary else (*DESCRIPTIONS, GENERATION_CONFIG)), *template_names(folder))
    ids = special_ids(hugging_face)
    return read_files(folder, names) | ({SPECIAL_IDS: (json.dumps(ids, indent=2) + "\n").encode()} if ids else {})


def readable_tokenizer(name: str) -> Tokenizer | None:
    """Opens a tokenizer that is to be replaced by another one; returns None if it can't be read, which may be the
    reason."""
    try:
        return open_tokenizer(name)
    except UserError:
        return None


def check_weights(shown: str, theirs: Tokenizer, named: str, tokenizer: Tokenizer) -> None:
    """Checks that a tokenizer gives weights the token ids that they were trained on; it may add tokens.

    Args:
      shown: name of the weights' tokenizer.
      theirs: the weights' tokenizer.
      named: name of the other tokenizer.
      tokenizer: the other tokenizer.

    Raises:
      UserError: an id stands for another token, or text is tokenized differently; names both.
    """
    if why := difference(theirs, tokenizer, may_add=True):
        raise UserError(
            f"the weights came with the tokenizer {shown}, and --tokenizer {named} is another one ({why}), with which "
            "rows of their embedding would stand for other tokens: remove --tokenizer, or use other weights"
        )


def _from_weights(theirs: Owned, weights: Weights, named: str | None) -> tuple[RunTokenizer, str]:
    """Returns the weights' tokenizer, or the named one if it is identical or adds tokens; and its name."""
    notes: tuple[str, ...] = ()
    if named is not None and not path_of(named).exists():
        notes = (f"the tokenizer {named} does not exist; the weights' own is used, {theirs.shown}",)
    elif named is not None and not same_path(named, theirs.name):
        tokenizer = _open_named(named, theirs)
        check_weights(theirs.shown, theirs.tokenizer, named, tokenizer)
        if prompt_difference(
            theirs.tokenizer, tokenizer
        ):  # it has more tokens, or adds other special tokens to a prompt
            return RunTokenizer(tokenizer, _descriptions_of(weights)), named
    files = files_of_weights(theirs.folder, weights.hugging_face, vocabulary=True)
    return RunTokenizer(theirs.tokenizer, files, notes=notes), theirs.shown


def _owned_by_weights(weights: Weights, named: str | None, eod_token: str | None) -> Owned | None:
    """Opens the tokenizer of weights; returns None if there is none that can be read."""
    folder, find = weights.root, tokenizer_of_run if weights.is_run else tokenizer_of
    name = find(tokenizer_files(folder), folder) or weights.config.data.tokenizer
    if name is None or not path_of(name).exists():
        return None
    tokenizer = open_tokenizer(name, eod_token) if named is None else readable_tokenizer(name)
    return None if tokenizer is None else Owned(name, name, folder, tokenizer)


def _descriptions_of(weights: Weights) -> dict[str, bytes]:
    return files_of_weights(weights.root, weights.hugging_face, vocabulary=False)


def _refuse_to_train_one(run_folder: Path | None, weights: Weights | None) -> None:
    """Refuses to train a tokenizer on the text if the checkpoints or weights were trained with another one."""
    if run_folder is not None and holds_run(run_folder):
        raise UserError(
            f"{shown(run_folder)} holds a run without its tokenizer.json, and a tokenizer trained on the text now may "
            "differ: restore the file, or name the run's tokenizer with --tokenizer"
        )
    if weights is not None:
        raise UserError(
            f"the weights in {weights.folder} came without a tokenizer, and one trained on the text would have "
            "other ids: name theirs with --tokenizer"
        )


def check_processes(name: str, tokenizer: Tokenizer) -> None:
    """Checks that all processes have the same tokenizer: each reads its own files, perhaps on another machine.

    Raises:
      UserError: in all processes, if that of one differs from that of process 0.
    """
    if num_processes() == 1:
        return
    digests = all_gather_text("the tokenizer", content_digest(tokenizer))
    if different := [process for process, digest in enumerate(digests) if digest != digests[0]]:
        raise UserError(
            f"process {different[0]} has another tokenizer than process 0 (here it is {name}): give all machines the "
            "same files, or name the same tokenizer on each with --tokenizer"
        )


def _copied(url: str, names: Sequence[str], cache: Cache) -> Path:
    """Copies the tokenizer's files of a run in an object store to a folder on this machine."""
    contents = {name: read_bytes(f"{url}/{name}") for name in names}

    def build(folder: Path) -> None:
        for name, content in contents.items():
            (folder / name).write_bytes(content)

    # The cache's key: a folder of other contents is another entry.
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    return cache.folder("run-tokenizer", {"files": digests}, build)


def read_files(folder: Path, names: Sequence[str]) -> dict[str, bytes]:
    """Reads the files of a folder that exist, by name.

    Raises:
      UserError: one can't be read.
    """
    try:
        return {name: (folder / name).read_bytes() for name in names if (folder / name).is_file()}
    except OSError as e:
        raise UserError(f"{e.filename}, which belongs to the tokenizer, can't be read: {e.strerror}") from e
