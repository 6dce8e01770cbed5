"""Small Hugging Face folders without a tokenizer.json, of every class that mtjax reads, and texts to try them with."""

import json
from pathlib import Path
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel

END, SPACE = "<|endoftext|>", "\N{LOWER ONE EIGHTH BLOCK}"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
MERGES = ["b a", "k e", "\u0120 b", "\u0120b a", "\u0120 k", "\u0120k e", "1 2", "\u0120 12", "' S", "i t"]
PLAIN_TEXTS = (
    "bake ba ke",
    " ba",
    "  ba   ke  ",
    "",
    "ba 12 ke37, it'S 2",
    "a\nb\r\n\n ke\t",
    "\u65e5\u672c ba\u65e5\u672cke \U0001f600",
    "Ba kE CAF\u00c9 caf\u00e9 cafe\u0301 \u00c5ngstr\u00f6m",
    "\u00a0ba\u3000ke\u2028\ufb01",
    f"{SPACE}ba {SPACE}{SPACE}ke",
)
NAMES = ("<s>", "</s>", "<pad>", "<X>", "<Y>", END, "<|im_start|>", "<|im_end|>", "[MASK]", "[SEP]", "<extra_id_0>")
MARKED_TEXTS = (
    "<s>ba</s>ke </s> <s> ba",
    "<|im_start|>user\nba 12<|im_end|>\n<|endoftext|>ke",
    "ba <X>ke <X> ba<Y>ke <Y>",
    "ba <extra_id_0> ke<extra_id_1>.",
    "[CLS] ba [MASK]ke[SEP]",
)


def special(content: str, **fields: Any) -> dict[str, Any]:
    """A token as `added_tokens_decoder` has it."""
    flags = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
    return {"content": content, **flags, **fields}


def typed(content: str, **fields: Any) -> dict[str, Any]:
    """A token as older versions wrote it into tokenizer_config.json."""
    return {"__type": "AddedToken", **{k: v for k, v in special(content, **fields).items() if k != "special"}}


ENDS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
LLAMA = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "add_eos_token": False, **ENDS}
IM = {"266": special(END), "267": special("<|im_start|>"), "268": special("<|im_end|>")}
QWEN2 = {
    "tokenizer_class": "Qwen2Tokenizer",
    "added_tokens_decoder": IM,
    "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
    "bos_token": None,
    "eos_token": "<|im_end|>",
    "pad_token": END,
    "unk_token": None,
}
T5 = {
    "tokenizer_class": "T5Tokenizer",
    "extra_ids": 4,
    "additional_special_tokens": [f"<extra_id_{i}>" for i in range(4)],
}

Files = dict[str, dict[str, Any]]
CASES: dict[str, tuple[str, Files]] = {
    "llama": ("bpe", {"tokenizer_config": {**LLAMA, "legacy": False}, "config": {"model_type": "llama"}}),
    "llama legacy": ("bpe", {"tokenizer_config": {**LLAMA, "legacy": True, "add_eos_token": True}}),
    "llama without prefix": ("bpe", {"tokenizer_config": {**LLAMA, "add_prefix_space": False}}),
    "llama with defaults": ("bpe", {"tokenizer_config": {"tokenizer_class": "LlamaTokenizerFast"}}),
    "llama with added tokens": (
        "bpe",
        {
            "tokenizer_config": {
                **LLAMA,
                "legacy": True,
                "pad_token": "<pad>",
                "added_tokens_decoder": {
                    **{str(i): special(name, normalized=True) for i, name in enumerate(["<unk>", "<s>", "</s>"])},
                    "275": special("<pad>"),
                    "276": special("<X>", special=False, normalized=True),
                    "277": special("<Y>", lstrip=True, rstrip=True),
                },
            }
        },
    ),
    "llama as of old": (
        "bpe",
        {
            "tokenizer_config": {**LLAMA, **{name: typed(token) for name, token in ENDS.items()}},
            "special_tokens_map": {"bos_token": special("<s>"), "pad_token": "<X>"},
            "added_tokens": {"<X>": 275, "<Y>": 276},
        },
    ),
    "llama with user's symbols": ("bpe defined", {"tokenizer_config": LLAMA}),
    "mixtral": ("bpe", {"tokenizer_config": LLAMA, "config": {"model_type": "mixtral"}}),
    "mixtral with user's symbols": (
        "bpe defined",
        {"tokenizer_config": {**LLAMA, "legacy": False}, "config": {"model_type": "mixtral"}},
    ),
    "llama that names no class": ("bpe", {"config": {"model_type": "llama"}}),
    "qwen2": ("byte level", {"tokenizer_config": QWEN2, "config": {"model_type": "qwen3"}}),
    "qwen2 as of old": (
        "byte level",
        {
            "tokenizer_config": {"tokenizer_class": "Qwen2Tokenizer", "add_prefix_space": True},
            "special_tokens_map": {"eos_token": END, "additional_special_tokens": ["<|im_start|>"]},
            "added_tokens": {END: 266, "<|im_start|>": 267, "<X>": 268},
        },
    ),
    "gpt2": ("byte level", {"config": {"model_type": "gpt2"}}),
    "gpt2 with settings": (
        "byte level",
        {
            "tokenizer_config": {
                "tokenizer_class": "GPT2Tokenizer",
                "add_prefix_space": True,
                "add_bos_token": True,
                "pad_token": typed("<pad>", lstrip=True),
                "image_token": "<X>",
            }
        },
    ),
    "bert": ("bert", {"config": {"model_type": "bert"}}),
    "bert cased": ("bert", {"tokenizer_config": {"tokenizer_class": "BertTokenizer", "do_lower_case": False}}),
    "bert with accents": (
        "bert",
        {"tokenizer_config": {"tokenizer_class": "BertTokenizer", "strip_accents": False}},
    ),
    "bert with words of Chinese": (
        "bert",
        {"tokenizer_config": {"tokenizer_class": "BertTokenizer", "tokenize_chinese_chars": False}},
    ),
    "bert with added tokens": (
        "bert",
        {
            "tokenizer_config": {"do_lower_case": True, "mask_token": typed("[MASK]", lstrip=True)},
            "added_tokens": {"<X>": 40},
            "config": {"model_type": "megatron-bert"},
        },
    ),
    "t5": ("unigram", {"tokenizer_config": T5, "config": {"model_type": "t5"}}),
    "t5 with defaults": ("unigram", {"config": {"model_type": "t5"}}),
}
"""By name: which vocabulary, and the JSON files beside it."""


def write_pretrained(folder: Path, case: str) -> Path:
    """Writes the folder of a case."""
    vocabulary, files = CASES[case]
    folder.mkdir(parents=True, exist_ok=True)
    write_vocabulary(folder, vocabulary)
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def write_vocabulary(folder: Path, kind: str) -> None:
    """Writes the files of a vocabulary; SentencePiece's need its library."""
    if kind == "byte level":
        alphabet = sorted(ByteLevel.alphabet())
        tokens = [*alphabet, *(merge.replace(" ", "") for merge in MERGES), END]
        (folder / "vocab.json").write_text(json.dumps({token: index for index, token in enumerate(tokens)}))
        (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(MERGES) + "\n")
    elif kind == "bert":
        letters = "abcdefghijklmnopqrstuvwxyz0123456789.,'"
        words = [
            "[PAD]",
            "[UNK]",
            "[CLS]",
            "[SEP]",
            "[MASK]",
            "ba",
            "ke",
            "cafe",
            "caf\u00e9",
            "\u65e5",
            "\u672c",
            "Ba",
        ]
        words += ["\u65e5\u672c", *letters, *(f"##{letter}" for letter in letters), "##ke"]
        (folder / "vocab.txt").write_text("\n".join(words) + "\n")
    else:
        name = "spiece.model" if kind == "unigram" else "tokenizer.model"
        (folder / name).write_bytes(_unigram() if kind == "unigram" else _bpe(has_defined=kind == "bpe defined"))


def _bpe(*, has_defined: bool) -> bytes:
    """Llama's kind: bytes for what the pieces don't cover, text as it is."""
    proto = _model()
    trained = proto.trainer_spec
    trained.model_type, trained.byte_fallback, trained.bos_id, trained.eos_id, trained.unk_id = 2, True, 1, 2, 0
    proto.normalizer_spec.add_dummy_prefix, proto.normalizer_spec.remove_extra_whitespaces = True, False
    _add(proto, "<unk>", UNKNOWN), _add(proto, "<s>", CONTROL), _add(proto, "</s>", CONTROL)
    for piece in ("<X>", "ake", "<|im_start|>") if has_defined else ():
        _add(proto, piece, USER_DEFINED)
    for byte in range(256):
        _add(proto, f"<0x{byte:02X}>", BYTE)
    merged = ("ba", "ke", f"{SPACE}b", f"{SPACE}ba", f"{SPACE}ke", f"{SPACE}{SPACE}", "12")
    for number, piece in enumerate((*merged, SPACE, *"bake12<s>/")):
        _add(proto, piece, NORMAL, -float(number))
    return proto.SerializeToString()


def _unigram() -> bytes:
    """T5's kind."""
    proto = _model()
    proto.trainer_spec.model_type = 1
    proto.trainer_spec.pad_id, proto.trainer_spec.eos_id, proto.trainer_spec.unk_id, proto.trainer_spec.bos_id = (
        0,
        1,
        2,
        -1,
    )
    _add(proto, "<pad>", CONTROL), _add(proto, "</s>", CONTROL), _add(proto, "<unk>", UNKNOWN)
    for number, piece in enumerate((f"{SPACE}ba", "ke", f"{SPACE}ke", "ba", SPACE, *"abek12.<>_xtrid0"), start=2):
        _add(proto, piece, NORMAL, -number / 2)
    return proto.SerializeToString()


def _model() -> Any:
    from sentencepiece import sentencepiece_model_pb2

    return sentencepiece_model_pb2.ModelProto()


def _add(proto: Any, piece: str, kind: int, score: float = 0.0) -> None:
    proto.pieces.add(piece=piece, score=score, type=kind)
