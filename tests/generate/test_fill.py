"""Mask filling equals transformers' pipeline: the same tokens in the same order with the same probabilities."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from mtjax.cli import main  # noqa: E402

WORDS = [f"w{i}" for i in range(60)] + ["paris", "the", "of", "is", "a", "city", "##s", "."]
TEXTS = ["the city of [MASK] is a w7 [MASK].", "[MASK] citys", " ".join(["w3 [MASK] w5 the"] * 7)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("bert")
    vocabulary = place / "vocab.txt"
    vocabulary.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]) + "\n")
    tokenizer = transformers.BertTokenizerFast(vocab=str(vocabulary))
    config = transformers.BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=40,
        initializer_range=0.3,
    )
    torch.manual_seed(0)
    model = transformers.BertForMaskedLM(config).eval()
    with torch.no_grad():
        model.cls.predictions.bias.normal_()
    model.save_pretrained(place)
    tokenizer.save_pretrained(place)
    return place


def theirs(folder: Path, text: str, number: int) -> list[list[tuple[int, str, float]]]:
    tokenizer = transformers.BertTokenizerFast.from_pretrained(folder)
    model = transformers.BertForMaskedLM.from_pretrained(folder).eval()
    found = transformers.pipeline("fill-mask", model=model, tokenizer=tokenizer, top_k=number)(text)
    found = found if isinstance(found[0], list) else [found]
    return [[(entry["token"], entry["token_str"], entry["score"]) for entry in mask] for mask in found]


@pytest.mark.parametrize("mesh", ["1x1", pytest.param("2x2", marks=pytest.mark.long)])
def test_masks_are_filled_as_by_transformers(folder, mesh: str, tmp_path, capsys) -> None:
    assert len(jax.devices()) >= 4  # in use: their number is fixed
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in TEXTS))
    files = ["--input", str(source), "--output", str(target)]
    assert main(["generate", "--from", f"hf:{folder}", "--mesh", mesh, "--fillings", "7", *files]) == 0
    lines = [json.loads(line) for line in target.read_text().splitlines()]
    assert [line["prompt"] for line in lines] == TEXTS and [len(line["masks"]) for line in lines] == [2, 1, 7]
    for text, line in zip(TEXTS, lines, strict=True):
        for own, expected in zip(line["masks"], theirs(folder, text, 7), strict=True):
            assert [(each["token"], each["text"]) for each in own] == [(token, word) for token, word, _ in expected]
            np.testing.assert_allclose(
                [each["probability"] for each in own], [score for _, _, score in expected], rtol=1e-4
            )
    capsys.readouterr()
    if mesh == "1x1":
        assert main(["generate", "--from", f"hf:{folder}", TEXTS[1]]) == 0
        shown = capsys.readouterr().out.splitlines()
        (expected,) = theirs(folder, TEXTS[1], 5)
        assert shown[0] == f"--- {TEXTS[1]!r}, mask 1"
        assert [line.split("\t")[1] for line in shown[1:]] == [word for _, word, _ in expected]


def test_what_is_wrong_is_said(folder, capsys) -> None:
    assert len(jax.devices()) >= 4
    wrong = {
        ("the city",): "has no [MASK]",
        ("--samples", "2", "[MASK]"): "does not support --samples",
        ("--temperature", "1", "[MASK]"): "does not support sampling parameters such as --temperature",
        ("[MASK]" * 40,): "has 42 tokens, and the model's maximum is 40",
    }
    for arguments, why in wrong.items():
        assert main(["generate", "--from", f"hf:{folder}", *arguments]) == 2
        assert why in capsys.readouterr().err


def test_encoder_without_head_is_rejected(folder, tmp_path, capsys) -> None:
    """Embedding models have no head; a randomly initialized one would fill masks with arbitrary tokens."""
    transformers.BertModel.from_pretrained(folder, add_pooling_layer=False).save_pretrained(tmp_path)
    transformers.BertTokenizerFast.from_pretrained(folder).save_pretrained(tmp_path)
    capsys.readouterr()
    assert main(["generate", "--from", f"hf:{tmp_path}", TEXTS[1]]) == 2
    assert "without the masked language model head: it lacks head.bias, head.dense" in capsys.readouterr().err
