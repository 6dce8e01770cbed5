"""The JSON files of a tokenizer's folder: its class and its special and added tokens, as transformers 5 reads them.

A folder is what `save_pretrained` wrote or what was downloaded from the Hugging Face Hub. `tokenizer_config.json` goes
first; `special_tokens_map.json` and `added_tokens.json` are read where it has no `added_tokens_decoder`, as older
versions of transformers wrote them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from mtjax.errors import UserError, parse_json_object

CONFIG, SPECIAL, ADDED, MODEL = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "config.json",
)
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
"""Keys of a config.json with ids of tokens that are read, or exported for a model of another type."""
BACKEND = "TokenizersBackend"
"""The general class of transformers, which it takes where no other class applies."""
CLASSES = {
    "LlamaTokenizer": ("tokenizer.model",),
    "T5Tokenizer": ("spiece.model",),
    "GPT2Tokenizer": ("vocab.json", "merges.txt"),
    "Qwen2Tokenizer": ("vocab.json", "merges.txt"),
    "BertTokenizer": ("vocab.txt",),
    BACKEND: ("tokenizer.model",),
}
"""The classes that mtjax can build, and the files of their vocabularies."""
# Older names of the class, which files keep.
NAMES_OF_BACKEND = ("PreTrainedTokenizerFast", "PreTrainedTokenizer", "PythonBackend")
CLASS_OF_MODEL: dict[str, str | None] = {
    **dict.fromkeys(("bert", "distilbert", "electra", "megatron-bert"), "BertTokenizer"),
    **dict.fromkeys(("gpt2", "gpt_neo", "gptj", "opt", "phi", "starcoder2"), "GPT2Tokenizer"),
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"), "Qwen2Tokenizer"),
    "t5": "T5Tokenizer",
    **dict.fromkeys(("mistral", "mixtral"), BACKEND),
    **dict.fromkeys(("dots1", "llama")),
}
"""The class that transformers registers for the `model_type` of config.json; None where it registers none."""
OVERRULED = ("mistral", "mixtral", "qwen2")
"""Model types for which transformers takes the registered class whatever class the folder names."""
ATTRIBUTES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Special tokens that every class knows, in the order in which transformers adds them to the vocabulary."""
UNSUPPORTED = ("auto_map", "init_inputs", "fast_tokenizer_files", "split_special_tokens", "fix_mistral_regex")
"""Fields of tokenizer_config.json that change how text is read, in ways that mtjax does not have."""
FOREIGN = ("tekken.json", "tiktoken.model")
"""Vocabularies that transformers would take before the others."""
Token = str | AddedToken


def remedy(folder: Path) -> str:
    """Returns what to do with a folder that can't be read: transformers writes what it reads into one file."""
    return (
        "write its tokenizer.json with transformers: "
        f"AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"
    )


@dataclass
class PretrainedSettings:
    """What a folder's JSON files say of its tokenizer.

    Attributes:
      folder: where it is.
      kind: the class of transformers that reads it, a key of `CLASSES`.
      files: of the vocabulary.
      values: fields of `tokenizer_config.json`, with those of `special_tokens_map.json`.
      added: tokens that were added to the vocabulary, by id.
      named: special tokens with separate names, such as `image_token`.
    """

    folder: Path
    kind: str
    files: tuple[Path, ...]
    values: dict[str, Any]
    added: dict[int, AddedToken]
    named: dict[str, Token]

    @classmethod
    def read(cls, folder: Path) -> "PretrainedSettings":
        """Reads the JSON files of a folder.

        Raises:
          UserError: a file can't be read, or names a class or has a field that mtjax does not support.
        """
        config = read_object(folder / CONFIG)
        if field := next((name for name in UNSUPPORTED if config.get(name)), None):
            raise UserError(f"{folder / CONFIG} has {field}, which mtjax does not support: {remedy(folder)}")
        kind = class_of(folder, config)
        self = cls(folder, kind, _vocabulary_files(folder, kind), config, {}, {})
        try:
            self._read_tokens()
        except (TypeError, ValueError, AttributeError) as e:
            raise UserError(f"the special tokens of {folder} can't be read: {e}") from e
        return self

    def token(self, name: str, default: str | None = None) -> Token | None:
        """Returns a special token such as `bos_token`: the class's default where the files don't mention it."""
        return self.values.get(name, default)

    def special(self, defaults: Mapping[str, str | None]) -> dict[str, Token]:
        """Returns all named special tokens, in the order in which they are added.

        Args:
          defaults: those of the class.

        Raises:
          UserError: one is not a token.
        """
        tokens = {name: self.token(name, defaults.get(name)) for name in ATTRIBUTES}
        others = {k: v for k, v in self.values.items() if k.endswith("_token") and isinstance(v, AddedToken)}
        tokens |= {name: token for name, token in others.items() if name not in ATTRIBUTES} | self.named
        for name, token in tokens.items():
            if not isinstance(token, str | AddedToken | None):
                raise UserError(
                    f"{self.folder / CONFIG}: {name} is {token!r}, and must be a token: {remedy(self.folder)}"
                )
        return {name: token for name, token in tokens.items() if token is not None}

    def extra(self, of_vocabulary: Sequence[Token] | None = None) -> list[Token]:
        """Returns the special tokens without a name.

        Args:
          of_vocabulary: those that the vocabulary's file declares, taken where the settings have none.

        Raises:
          UserError: they are not a list of tokens.
        """
        others = self.values.get("additional_special_tokens") if of_vocabulary is None else of_vocabulary
        tokens = self.values.get("extra_special_tokens", others)
        tokens = [] if tokens is None else tokens
        if not isinstance(tokens, list | tuple) or not all(isinstance(token, str | AddedToken) for token in tokens):
            raise UserError(
                f"the extra special tokens of {self.folder} are not a list of tokens: {remedy(self.folder)}"
            )
        return list(tokens)

    def _read_tokens(self) -> None:
        values = self.values
        # The steps are in the order of `_from_pretrained` in transformers' tokenization_utils_base.py: later ones
        # override what earlier ones have read.
        if "additional_special_tokens" in values and not values.get("extra_special_tokens"):
            values["extra_special_tokens"] = values.pop("additional_special_tokens")
        # transformers takes only strings for tokens with names of their own; objects are converted below.
        named = [k for k, v in values.items() if k not in ATTRIBUTES and k.endswith("_token") and isinstance(v, str)]
        self.named = {name: values.pop(name) for name in named}
        self._name_extra()
        if "added_tokens_decoder" in values:
            self.added = {int(i): _added(token) for i, token in values.pop("added_tokens_decoder").items()}
        else:
            self._read_older_files()
        self.values = values = {name: _converted(value) for name, value in values.items()}
        self.named = {name: _converted(token) for name, token in self.named.items()}
        # The settings may give a plain string for a token of which `added_tokens_decoder` has the flags, such as
        # lstrip.
        known = {token.content: token for token in self.added.values()}
        for name in ATTRIBUTES:
            if values.get(name) is not None:
                values[name] = known.get(str(values[name]), values[name])

    def _name_extra(self) -> None:
        """Takes `extra_special_tokens` for named tokens where it is an object from names to tokens."""
        if isinstance(self.values.get("extra_special_tokens"), dict):
            self.named |= self.values.pop("extra_special_tokens")

    def _read_older_files(self) -> None:
        """Reads `special_tokens_map.json`, which overrides the configuration, and `added_tokens.json`."""
        values = self.values
        for name, value in read_object(self.folder / SPECIAL).items():
            if name == "extra_special_tokens" and isinstance(value, list):
                values[name] = _merged(values.get(name) or [], value)
            elif isinstance(value, dict) and name != "extra_special_tokens":
                values[name] = _special(value)
            else:
                values[name] = value
        self._name_extra()
        special = {str(values[name]) for name in ATTRIBUTES if values.get(name)}
        special |= {str(token) for token in values.get("extra_special_tokens") or []}
        for text, index in read_object(self.folder / ADDED).items():
            # added_tokens.json has no flags: as in transformers, a token is special if the settings name it.
            self.added[int(index)] = AddedToken(text, normalized=text not in special, special=text in special)


def is_pretrained(folder: Path) -> bool:
    """Returns whether a folder has files that determine how transformers reads its tokenizer."""
    return any((folder / name).is_file() for name in (CONFIG, SPECIAL, ADDED, MODEL))


def files_read(folder: Path) -> list[Path]:
    """Returns the files in a folder that decide how its tokenizer reads text."""
    vocabularies = {name for names in CLASSES.values() for name in names}
    return [
        folder / name for name in (*sorted(vocabularies), CONFIG, SPECIAL, ADDED, MODEL) if (folder / name).is_file()
    ]


def class_of(folder: Path, config: Mapping[str, Any]) -> str:
    """Returns the class with which transformers' AutoTokenizer reads a folder.

    Args:
      folder: has a `config.json`, or not.
      config: the fields of its `tokenizer_config.json`.

    Raises:
      UserError: mtjax does not support the class, or does not know which it is.
    """
    model = read_object(folder / MODEL)
    model_type = model.get("model_type")
    source = next((path for path, fields in ((CONFIG, config), (MODEL, model)) if fields.get("tokenizer_class")), None)
    named = str(config.get("tokenizer_class") or model.get("tokenizer_class") or "").removesuffix("Fast")
    named = BACKEND if named in {name.removesuffix("Fast") for name in NAMES_OF_BACKEND} else named
    # transformers may have registered a class for it, which would read the same files in another way.
    if model_type and model_type not in CLASS_OF_MODEL:
        raise UserError(
            f"{folder} has no tokenizer.json, and mtjax does not know which tokenizer transformers takes for the "
            f"model_type {model_type!r} of its config.json: {remedy(folder)}"
        )
    registered = CLASS_OF_MODEL.get(model_type) if model_type else None
    # The folder's word wins over the registered class, but for types whose published files name a wrong one.
    kind = registered if registered and (not named or model_type in OVERRULED) else named or BACKEND
    if kind not in CLASSES:
        raise UserError(
            f"{folder} has no tokenizer.json, and the tokenizer_class {kind} of its {source} is not one that mtjax can "
            f"read without it ({', '.join(CLASSES)}): {remedy(folder)}"
        )
    return kind


def read_object(path: Path) -> dict[str, Any]:
    """Reads a JSON object; an empty one where there is no file.

    Raises:
      UserError: it is not a JSON object.
    """
    return parse_json_object(path.read_bytes(), path) if path.is_file() else {}


def ids_in(settings: Mapping[str, Any], key: str, source: object) -> list[int]:
    """Returns the token ids that a file's settings give under a key: a number, a list of numbers, or null.

    Null in a list counts for nothing, except among the ends of texts, where it would leave out one.

    Raises:
      UserError: it is something else, such as a number in quotes; `source` names the file.
    """
    value = settings.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if key != "eos_token_id":
        ids = [index for index in ids if index is not None]
    if any(type(index) is not int for index in ids):
        raise UserError(f"{source}: {key} is {value!r}, and must be a token's id, a list of them, or null")
    return ids


def special_names_in(folder: Path) -> dict[str, str]:
    """Reads which tokens the settings in a folder call `bos_token` and the like.

    Raises:
      UserError: a file of settings is not a JSON object.
    """
    return special_names(read_object(folder / CONFIG), read_object(folder / SPECIAL))


def special_names(settings: Mapping[str, Any], legacy: Mapping[str, Any]) -> dict[str, str]:
    """Reads `bos_token` and the like, which are strings or objects with a `content`.

    Args:
      settings: of tokenizer_config.json.
      legacy: of special_tokens_map.json, which older folders have; the settings of newer ones hold all tokens.
    """
    # As in `_read_older_files`, the older file counts only if the settings lack the list of all tokens.
    known = dict(settings) if "added_tokens_decoder" in settings else {**settings, **legacy}
    more = known.get("extra_special_tokens")
    named = {name: value for name, value in known.items() if name.endswith("_token")}
    named |= more if isinstance(more, dict) else {}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in named.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _vocabulary_files(folder: Path, kind: str) -> tuple[Path, ...]:
    wanted = CLASSES[kind]
    # transformers takes a tokenizer.model for the vocabulary of any class
    if (folder / "tokenizer.model").is_file() and kind == "T5Tokenizer":
        wanted = ("tokenizer.model",)
    missing = [name for name in wanted if not (folder / name).is_file()]
    if missing and not is_pretrained(folder):
        raise UserError(f"{folder} has no tokenizer.json, and no {CONFIG} that says how its tokenizer is read")
    if missing:
        raise UserError(f"{folder} has neither tokenizer.json nor {missing[0]}, from which a {kind} is read")
    others = [name for name in ("tokenizer.model", *FOREIGN) if name not in wanted and (folder / name).is_file()]
    if others:
        raise UserError(
            f"{folder} has {others[0]} besides {' and '.join(wanted)} of its {kind}, and mtjax can't tell which is its "
            f"vocabulary: {remedy(folder)}"
        )
    return tuple(folder / name for name in wanted)


def _added(token: Any) -> AddedToken:
    if not isinstance(token, dict):
        raise TypeError(f"added_tokens_decoder has {token!r}, which is not an object")
    return AddedToken(**token)


def _special(value: Mapping[str, Any]) -> AddedToken:
    return AddedToken(**{name: field for name, field in value.items() if name != "special"}, special=True)


def _merged(tokens: Sequence[Any], more: Sequence[Any]) -> list[Any]:
    merged = list(tokens)
    for token in more:
        token = AddedToken(**token, special=True) if isinstance(token, dict) else token
        if token not in merged:
            merged.append(token)
    return merged


def _converted(value: Any) -> Any:
    """Returns a value of a JSON file with the objects that describe tokens as tokens."""
    if isinstance(value, dict) and value.get("__type") == "AddedToken":
        return AddedToken(**{name: field for name, field in value.items() if name != "__type"})
    if isinstance(value, list):
        return [_converted(item) for item in value]
    if isinstance(value, dict):
        return {name: _converted(item) for name, item in value.items()}
    return value
