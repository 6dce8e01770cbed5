"""An exported decoder with a classifier pools the token that mtjax pools: `mtjax predict` beside transformers."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from tokenizers import Tokenizer, processors

from mtjax.commands.convert import main as convert
from mtjax.commands.finetune import main as finetune
from mtjax.commands.predict import main as predict
from tests.convert.hf_folders import small_tokenizer
from tests.parity.compare import shaken

torch = pytest.importorskip("torch", reason="needs the extra parity: pip install '.[parity]'")
transformers = pytest.importorskip("transformers", reason="needs the extra parity: pip install '.[parity]'")

WORDS = ["the cat", "the dog walks and rests", "and", "there they rested by the road"]


def llama_tokenizer() -> Tokenizer:
    """Texts begin with <s> and end with </s>; <pad> fills rows."""
    tokenizer = small_tokenizer()
    tokenizer.add_special_tokens(["<s>", "</s>", "<pad>"])
    special = [(name, tokenizer.token_to_id(name)) for name in ("<s>", "</s>")]
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=special)
    return tokenizer


def write_base(folder: Path, pad: str | None) -> None:
    """A Llama of transformers, with or without a token for padding."""
    tokenizer = llama_tokenizer()
    ids = {name: tokenizer.token_to_id(name) for name in ("<s>", "</s>", "<pad>")}
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 64}
    shape |= {"vocab_size": tokenizer.get_vocab_size(), "num_attention_heads": 4, "num_key_value_heads": 2}
    named = {"bos_token_id": ids["<s>"], "eos_token_id": ids["</s>"], "pad_token_id": ids[pad] if pad else None}
    config = transformers.LlamaConfig(**shape, **named)
    shaken(lambda: transformers.LlamaForCausalLM(config)).save_pretrained(folder)
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    wrapped.chat_template = "{{ bos_token }}{{ messages[0].content }}"
    wrapped.save_pretrained(folder)


@pytest.mark.torch
@pytest.mark.parametrize("pad", ["<pad>", None])
def test_probabilities_are_those_of_transformers(tmp_path: Path, pad: str | None) -> None:
    """Rows of different lengths that end with </s>: together where there is a token for padding, else one by one."""
    jax.devices()
    write_base(tmp_path / "base", pad)
    rows = [{"text": f"{WORDS[i % 4]} {WORDS[i % 3]}", "label": "ab"[i % 2]} for i in range(24)]
    for name, some in (("train", rows), ("dev", rows[:12])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    begin = ["--task", "classify", "--data", str(tmp_path), "--init-from", f"hf:{tmp_path / 'base'}", "--mesh", "1x1"]
    shape = ["--global-batch-size", "8", "--compute-dtype", "float32", "--learning-rate", "1e-3", "--epochs", "1"]
    assert finetune([*begin, *shape, "--out", str(tmp_path / "run")]) == 0
    assert convert(["--from", f"mtjax:{tmp_path / 'run'}", "--to", f"hf:{tmp_path / 'hf'}"]) == 0
    data, out = str(tmp_path / "dev.jsonl"), tmp_path / "answers.jsonl"
    assert predict(["--from", str(tmp_path / "run"), "--data", data, "--out", str(out), "--mesh", "1x1"]) == 0
    found = [json.loads(line)["probabilities"] for line in out.read_text().splitlines()]
    ours = np.array([[answer["a"], answer["b"]] for answer in found])

    network = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    texts = [row["text"] for row in rows[:12]]
    batches = [texts] if pad else [[text] for text in texts]
    with torch.no_grad():
        logits = [network(**tokenizer(batch, padding=True, return_tensors="pt")).logits for batch in batches]
    theirs = torch.softmax(torch.cat(logits).double(), -1).numpy()
    assert np.ptp(theirs[:, 0]) > 1e-3, "rows that are alike would show nothing"
    np.testing.assert_allclose(ours, theirs, atol=1e-6, rtol=0)

    base, exported = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("base", "hf"))
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert exported.get(name) == base.get(name)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "hf" / name).read_bytes() == (tmp_path / "base" / name).read_bytes()


def write_roberta(folder: Path) -> None:
    """A RoBERTa of transformers, with a tokenizer that has its special tokens at its ids."""
    names = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    described = json.loads(small_tokenizer().to_str())
    vocab = described["model"]["vocab"]
    described["model"]["vocab"] = {
        **{name: index for index, name in enumerate(names)},
        **{token: index + len(names) for token, index in vocab.items()},
    }
    described["added_tokens"] = []
    tokenizer = Tokenizer.from_str(json.dumps(described))
    tokenizer.add_special_tokens(names)
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape |= {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 66, "type_vocab_size": 1}
    shaken(lambda: transformers.RobertaForMaskedLM(transformers.RobertaConfig(**shape))).save_pretrained(folder)
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "cls_token": "<s>", "sep_token": "</s>"}
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special, mask_token="<mask>")
    wrapped.save_pretrained(folder)


@pytest.mark.torch
@pytest.mark.long
def test_a_roberta_is_finetuned_on_pairs_of_texts_and_remains_one(tmp_path: Path) -> None:
    jax.devices()
    write_roberta(tmp_path / "base")
    rows = [{"text1": WORDS[i % 4], "text2": WORDS[i % 3], "label": "ab"[i % 2]} for i in range(24)]
    for name, some in (("train", rows), ("dev", rows[:12])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    begin = ["--task", "classify", "--data", str(tmp_path), "--init-from", f"hf:{tmp_path / 'base'}", "--mesh", "1x1"]
    shape = ["--global-batch-size", "8", "--compute-dtype", "float32", "--learning-rate", "1e-3", "--epochs", "1"]
    assert finetune([*begin, *shape, "--out", str(tmp_path / "run")]) == 0
    assert convert(["--from", f"mtjax:{tmp_path / 'run'}", "--to", f"hf:{tmp_path / 'hf'}"]) == 0
    data, out = str(tmp_path / "dev.jsonl"), tmp_path / "answers.jsonl"
    assert predict(["--from", str(tmp_path / "run"), "--data", data, "--out", str(out), "--mesh", "1x1"]) == 0
    found = [json.loads(line)["probabilities"] for line in out.read_text().splitlines()]
    ours = np.array([[answer["a"], answer["b"]] for answer in found])

    network = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf").eval()
    assert type(network) is transformers.RobertaForSequenceClassification
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    pairs = tokenizer(*([row[name] for row in rows[:12]] for name in ("text1", "text2")), padding=True)
    with torch.no_grad():
        logits = network(*(torch.tensor(pairs[name]) for name in ("input_ids", "attention_mask"))).logits
    theirs = torch.softmax(logits.double(), -1).numpy()
    assert np.ptp(theirs[:, 0]) > 1e-3, "rows that are alike would show nothing"
    np.testing.assert_allclose(ours, theirs, atol=1e-6, rtol=0)


@pytest.mark.torch
def test_what_the_base_says_of_tokens_outlives_trainings(tmp_path: Path) -> None:
    """Hugging Face's weights, a run from them, a run from that run: transformers reads the same ids and template."""
    from mtjax.commands.train import main as train

    jax.devices()
    write_base(tmp_path / "base", "<pad>")
    assert convert(["--from", f"hf:{tmp_path / 'base'}", "--to", f"mtjax:{tmp_path / 'ours'}"]) == 0
    (tmp_path / "text.txt").write_text("\n\n".join(f"{WORDS[i % 4]} {WORDS[i % 3]}." * 9 for i in range(60)))
    size = ["--steps", "1", "--global-batch-size", "8", "--sequence-length", "16", "--valid-every", "0"]
    for source, name in (("ours", "first"), ("first", "second")):
        words = ["--config", str(tmp_path / source / "config.toml"), "--init-from", str(tmp_path / source), *size]
        words += ["--data", str(tmp_path / "text.txt"), "--mesh", "1x1", "--out", str(tmp_path / name)]
        assert train([*words, "--cache-dir", str(tmp_path / "cache")]) == 0
    assert convert(["--from", f"mtjax:{tmp_path / 'second'}", "--to", f"hf:{tmp_path / 'hf'}"]) == 0
    before, after = (transformers.AutoTokenizer.from_pretrained(tmp_path / name) for name in ("base", "hf"))
    assert after.special_tokens_map == before.special_tokens_map
    assert after.chat_template == before.chat_template is not None
    assert after("the cat").input_ids == before("the cat").input_ids
    configs = [transformers.AutoConfig.from_pretrained(tmp_path / name) for name in ("base", "hf")]
    generation = [transformers.GenerationConfig.from_pretrained(tmp_path / name) for name in ("base", "hf")]
    for one, other in (configs, generation):
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            assert getattr(one, name) == getattr(other, name) is not None
