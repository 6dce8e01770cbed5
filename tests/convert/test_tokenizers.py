"""Tokenizers that come with weights and have no tokenizer.json: what becomes of them when weights are converted."""

import json
import tomllib
from dataclasses import replace

import pytest

from mtjax.commands.convert import main
from mtjax.convert.saved_model import SavedModel
from mtjax.data.tokens.tokenizer import open_tokenizer
from tests.convert.hf_folders import LLAMA_CONFIG, llama_shapes, random_tensors, write_folder
from tests.data.tokens.pretrained_folders import QWEN2, write_vocabulary

TEXT, IDS = "<|im_start|>ba 12<|im_end|>", [267, 256, 220, 16, 17, 268]
"""Ids of Qwen2's tokenizer: GPT-2's keeps " 12" together and knows no <|im_start|>."""


@pytest.fixture
def folder(tmp_path):
    folder = write_folder(tmp_path / "hf", random_tensors(llama_shapes()), LLAMA_CONFIG)
    write_vocabulary(folder, "byte level")
    (folder / "tokenizer_config.json").write_text(json.dumps(QWEN2))
    return folder


def test_converted_folders_carry_one_that_reads_alike(folder, tmp_path):
    assert SavedModel.open(f"hf:{folder}").tokenizer()[1].encode_marked(TEXT) == IDS
    assert main(["--from", f"hf:{folder}", "--to", f"mtjax:{tmp_path}/ours"]) == 0
    named = tomllib.loads((tmp_path / "ours/config.toml").read_text())["data"]["tokenizer"]
    assert named == str(tmp_path / "ours/tokenizer.json")
    assert open_tokenizer(named).encode_marked(TEXT) == IDS
    assert SavedModel.open(f"mtjax:{tmp_path}/ours").tokenizer()[1].encode_marked(TEXT) == IDS


def test_its_files_are_copied_as_they_are_to_another_folder_of_this_kind(folder, tmp_path):
    assert main(["--from", f"hf:{folder}", "--to", f"hf:{tmp_path}/again"]) == 0
    names = {path.name for path in folder.iterdir()}
    assert {path.name for path in (tmp_path / "again").iterdir()} == names
    assert SavedModel.open(f"hf:{tmp_path}/again").tokenizer()[1].encode_marked(TEXT) == IDS


def test_one_that_cannot_be_read_is_refused_before_weights_are_written(folder, tmp_path, capsys):
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "CTRLTokenizer"}')
    assert main(["--from", f"hf:{folder}", "--to", f"mtjax:{tmp_path}/ours"]) == 2
    assert "the tokenizer_class CTRLTokenizer of its tokenizer_config.json" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "ours").exists()


def test_a_run_keeps_the_sentencepiece_model_that_it_was_trained_with(folder, tmp_path):
    """Its chat template's settings lie beside the model, and make another tokenizer of it."""
    library = pytest.importorskip("sentencepiece", reason="needs the extra data: pip install '.[data]'")
    main(["--from", f"hf:{folder}", "--to", f"mtjax:{tmp_path}/ours"])
    run = tmp_path / "ours"
    for name in ("tokenizer.json", "vocab.json", "merges.txt"):
        (run / name).unlink()
    write_vocabulary(run, "bpe")
    (run / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer", "add_bos_token": true}')
    saved = SavedModel.open(f"mtjax:{run}")
    assert (
        saved.tokenizer()[1].encode_prompt("ba </s>")[0] == 1
    )  # converted weights are read as transformers reads them
    saved.source.origin = replace(saved.source.origin, is_run=True)
    theirs = library.SentencePieceProcessor(model_file=str(run / "tokenizer.model"))
    assert saved.tokenizer()[1].encode_prompt("ba </s>") == theirs.encode("ba </s>")
