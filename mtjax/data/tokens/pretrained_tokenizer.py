"""Tokenizers in Hugging Face folders without a `tokenizer.json`, built as transformers 5 builds them.

transformers turns the vocabulary's file and the settings into a `Tokenizer` of the `tokenizers` library, by a class for
each kind of model. The same is done here for the classes of the models that mtjax has. Other classes are refused: they
would be read in another way than the weights were trained with.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from mtjax.data.tokens.pretrained_settings import BACKEND, PretrainedSettings, Token
from mtjax.data.tokens.sentencepiece_model import SPACE, SentencePieceModel
from mtjax.errors import UserError

QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Qwen2 cuts text into words; numbers digit by digit."""
END = "<|endoftext|>"


def build_pretrained(folder: Path) -> tuple[Tokenizer, str | None]:
    """Builds the tokenizer of a folder.

    Args:
      folder: has a vocabulary, and `tokenizer_config.json` or `config.json`.

    Returns:
      The tokenizer, and its `eos_token`, if it has one.

    Raises:
      UserError: mtjax does not support its class or a setting, a file is missing, or is not what its name says.
    """
    settings = PretrainedSettings.read(folder)
    try:
        tokenizer, special = BUILDERS[settings.kind](settings)
    except UserError:
        raise
    except Exception as e:  # the tokenizers library raises bare Exceptions
        raise UserError(f"the {settings.kind} of {folder} can't be built: {e}") from e
    end = special.get("eos_token")
    return tokenizer, None if end is None else str(end)


def _llama(settings: PretrainedSettings) -> tuple[Tokenizer, dict[str, Token]]:
    model = SentencePieceModel.read(settings.files[0])
    tokenizer = Tokenizer(
        models.BPE(vocab=model.ids, merges=model.merges_by_id(), fuse_unk=True, byte_fallback=True, dropout=None)  # pyright: ignore[reportCallIssue]
    )
    prefix = settings.values.get("add_prefix_space")
    prefix = True if prefix is None else prefix
    # With `legacy`, each part of a text between special tokens begins with a space.
    scheme = ("always" if settings.values.get("legacy", False) else "first") if prefix else "never"
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme=scheme, split=False)
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(content=" ", left=1)] if prefix else steps)
    special = settings.special({"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"})
    _add_tokens(tokenizer, settings.added, special, settings.extra(model.declared))
    _add_ends(tokenizer, settings, special)
    return tokenizer, special


def _backend(settings: PretrainedSettings) -> tuple[Tokenizer, dict[str, Token]]:
    model = SentencePieceModel.read(settings.files[0])
    trained, added = model.proto.trainer_spec, settings.added
    names = {index: token.content for index, token in added.items()}
    tokenizer = model.tokenizer(names, legacy=bool(settings.values.get("legacy", True)))
    if model.proto.normalizer_spec.add_dummy_prefix:  # text between added tokens begins with a space
        added = {index: _unnormalized(token) for index, token in added.items()}
    ids = {"bos_token": trained.bos_id, "eos_token": trained.eos_id, "unk_token": trained.unk_id}
    pieces = {"bos_token": trained.bos_piece, "eos_token": trained.eos_piece, "unk_token": trained.unk_piece}
    special = settings.special({name: pieces[name] for name, index in ids.items() if index >= 0})
    declared: list[Token] = [token for token in model.declared if token.special]
    _add_tokens(tokenizer, added, special, settings.extra(declared))
    _add_ends(tokenizer, settings, special)
    return tokenizer, special


def _t5(settings: PretrainedSettings) -> tuple[Tokenizer, dict[str, Token]]:
    model = SentencePieceModel.read(settings.files[0])
    count = settings.values.get("extra_ids", 100)
    sentinels = [f"<extra_id_{index}>" for index in range(count)]
    declared: list[Token] = list(model.declared)
    in_model = sum("<extra_id_" in str(token) for token in declared)
    if in_model and count and in_model != count:
        raise UserError(
            f"{settings.folder} has extra_ids {count}, and its {settings.files[0].name} has {in_model} sentinels: "
            "correct extra_ids in its tokenizer_config.json"
        )
    # T5's sentinels count down: <extra_id_0> has the highest id.
    vocabulary = [*model.scores, *((name, 0.0) for name in reversed(sentinels))]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=2, byte_fallback=False))
    if model.character_map:
        tokenizer.normalizer = normalizers.Precompiled(model.character_map)
    spaces = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="always", split=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), spaces])
    tokenizer.decoder = decoders.Metaspace(replacement=SPACE, prepend_scheme="always", split=True)
    special = settings.special({"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"})
    _add_tokens(tokenizer, settings.added, special, settings.extra(declared if in_model else [*declared, *sentinels]))
    end = _id(tokenizer, special, "eos_token")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=["$A", "</s>"], pair=["$A", "</s>", "$B", "</s>"], special_tokens=[("</s>", end)]
    )
    return tokenizer, special


def _gpt2(settings: PretrainedSettings) -> tuple[Tokenizer, dict[str, Token]]:
    vocabulary, merges = _byte_level(settings)
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, dropout=None, continuing_subword_prefix="", end_of_word_suffix="")  # pyright: ignore[reportCallIssue]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=settings.values.get("add_prefix_space", False))
    tokenizer.decoder = decoders.ByteLevel()
    special = settings.special({"unk_token": END, "bos_token": END, "eos_token": END})
    _add_tokens(tokenizer, settings.added, special, settings.extra())
    _add_ends(tokenizer, settings, special)
    return tokenizer, special


def _qwen2(settings: PretrainedSettings) -> tuple[Tokenizer, dict[str, Token]]:
    vocabulary, merges = _byte_level(settings)
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, dropout=None, continuing_subword_prefix="", end_of_word_suffix="")  # pyright: ignore[reportCallIssue]
    )
    tokenizer.normalizer = normalizers.NFC()
    prefix = bool(settings.values.get("add_prefix_space"))
    words = pre_tokenizers.Split(Regex(QWEN2_PATTERN), behavior="isolated", invert=False)
    bytes_of_words = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, bytes_of_words])
    tokenizer.decoder = decoders.ByteLevel()
    special = settings.special({"unk_token": END, "eos_token": END, "pad_token": END})
    extra = settings.extra()
    _add_tokens(tokenizer, settings.added, special, extra)
    _add_ends(tokenizer, settings, special)
    # Like the last line of transformers' Qwen2Tokenizer, this makes tokens special that were added with other flags.
    tokenizer.add_tokens([AddedToken(str(token), special=True) for token in (*special.values(), *extra)])
    return tokenizer, special


def _bert(settings: PretrainedSettings) -> tuple[Tokenizer, dict[str, Token]]:
    values = settings.values
    names = {f"{kind}_token": f"[{kind.upper()}]" for kind in ("unk", "sep", "pad", "cls", "mask")}
    special = settings.special(names)
    vocabulary = models.WordPiece.read_file(str(settings.files[0]))
    unknown = str(settings.token("unk_token", names["unk_token"]))
    if unknown not in vocabulary:
        raise UserError(f"{settings.files[0]} is not a BERT vocabulary: it has no {unknown}")
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token=unknown))  # pyright: ignore[reportCallIssue]
    tokenizer.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=values.get("tokenize_chinese_chars", True),
        strip_accents=values.get("strip_accents"),
        lowercase=values.get("do_lower_case", True),
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    _add_tokens(tokenizer, settings.added, special, settings.extra())
    first, last = str(special.get("cls_token")), str(special.get("sep_token"))
    # transformers' numbers where the vocabulary lacks the tokens.
    ids = {"cls_token": 2, "sep_token": 3}
    ids |= {name: _id(tokenizer, special, name) for name in ids if name in special}
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{first}:0 $A:0 {last}:0",
        pair=f"{first}:0 $A:0 {last}:0 $B:1 {last}:1",
        special_tokens=[(first, ids["cls_token"]), (last, ids["sep_token"])],
    )
    return tokenizer, special


BUILDERS: Mapping[str, Callable[[PretrainedSettings], tuple[Tokenizer, dict[str, Token]]]] = {
    "LlamaTokenizer": _llama,
    "T5Tokenizer": _t5,
    "GPT2Tokenizer": _gpt2,
    "Qwen2Tokenizer": _qwen2,
    "BertTokenizer": _bert,
    BACKEND: _backend,
}
"""What builds the tokenizer of a class: returns it, and its named special tokens."""


def _byte_level(settings: PretrainedSettings) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Reads `vocab.json` and `merges.txt`."""
    vocabulary, merges = map(str, settings.files)
    return models.BPE.read_file(vocabulary, merges)


def _add_tokens(
    tokenizer: Tokenizer, added: Mapping[int, AddedToken], special: Mapping[str, Token], extra: list[Token]
) -> None:
    """Adds tokens in transformers' order, on which the ids of those depend that the vocabulary does not have."""
    # Sorted by id, as in the constructor of transformers' TokenizersBackend: tokens that the vocabulary lacks get the
    # next free ids in this order.
    tokens: list[Token] = [token for _, token in sorted(added.items())]
    known = {str(token) for token in tokens}
    for token in (*special.values(), *extra):
        if str(token) not in known and token not in tokens:
            tokens.append(token)
    names = {str(token) for token in special.values()}
    for token in tokens:
        if isinstance(token, AddedToken) and token.content in names:
            # A special token whose entry does not say so would be decoded as text.
            token.special = True
    tokenizer.add_tokens([AddedToken(t, special=True) if isinstance(t, str) else t for t in tokens])


def _add_ends(tokenizer: Tokenizer, settings: PretrainedSettings, special: Mapping[str, Token]) -> None:
    """Makes the tokenizer add the tokens that `add_bos_token` and `add_eos_token` request."""
    first, last = (
        str(special[f"{name}_token"]) if settings.values.get(f"add_{name}_token") and f"{name}_token" in special else ""
        for name in ("bos", "eos")
    )
    begin, end = f"{first}:0 " if first else "", f" {last}:0" if last else ""
    single = f"{begin}$A:0{end}"
    pair = f"{single}{begin and f' {first}:1'} $B:1{end and f' {last}:1'}"
    named = [("bos_token", first), ("eos_token", last)]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single,
        pair=pair,
        special_tokens=[(text, _id(tokenizer, special, name)) for name, text in named if text],
    )


def _id(tokenizer: Tokenizer, special: Mapping[str, Token], name: str) -> int:
    """Returns the id of a special token; that of `unk_token` where the vocabulary does not have it."""
    if name not in special:
        raise UserError(f"the tokenizer has no {name}, which its class adds to texts")
    for token in (special[name], special.get("unk_token")):
        index = None if token is None else tokenizer.token_to_id(str(token))
        if index is not None:
            return index
    raise UserError(f"the vocabulary has no {special[name]}, the {name}")


def _unnormalized(token: AddedToken) -> AddedToken:
    return AddedToken(**{**token.__getstate__(), "normalized": False})  # pyright: ignore[reportAttributeAccessIssue]
