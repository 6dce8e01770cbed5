"""Embeddings equal the mean of transformers' last hidden states, for any mesh, length and format of weights."""

from pathlib import Path

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from mtjax.cli import main  # noqa: E402
from mtjax.retrieval.embedder import Embedder  # noqa: E402
from tests.data.corpora import texts, write_bert_vocab  # noqa: E402

pytestmark = pytest.mark.torch
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
TEXTS = ["the river", "", " ", *texts(9, words=24), *texts(3, seed=1, words=90), "stone"]


def theirs(folder: Path, most: int) -> np.ndarray:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    rows = []
    for text in TEXTS:
        inputs = tokenizer(text, return_tensors="pt", truncation=True, max_length=most)
        with torch.no_grad():
            states = model(**inputs).last_hidden_state[0, 1:-1]
        rows.append(states.mean(0).numpy() if len(states) else np.zeros(SIZES["hidden_size"]))
    return np.array(rows)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Encoders alone, one with a head, pre-LN; and this one as mtjax writes it."""
    assert len(jax.devices()) >= 8  # in use: their number is fixed
    place = tmp_path_factory.mktemp("encoders")
    tokenizer = transformers.BertTokenizerFast(vocab=str(write_bert_vocab(place / "vocab.txt")))
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 80, "initializer_range": 0.3, "pad_token_id": 0}
    special = {"cls_token_id": 2, "sep_token_id": 3, "bos_token_id": 2, "eos_token_id": 3}
    kinds = {
        "bert": ("Bert", "Model", SIZES),
        "megatron": ("MegatronBert", "ForPreTraining", SIZES),
        "roberta": (
            "Roberta",
            "Model",
            SIZES | {"max_position_embeddings": 82, "type_vocab_size": 1, "pad_token_id": 1},
        ),
        "modern": ("ModernBert", "Model", SIZES | special),
    }
    for name, (kind, head, more) in kinds.items():
        torch.manual_seed(0)
        model = getattr(transformers, f"{kind}{head}")(getattr(transformers, f"{kind}Config")(**(sizes | more)))
        model.save_pretrained(place / name)
        tokenizer.save_pretrained(place / name)
    assert main(["convert", "--from", f"hf:{place / 'megatron'}", "--to", f"mtjax:{place / 'ours'}"]) == 0
    return {name: place / name for name in (*kinds, "ours")}


@pytest.mark.parametrize(
    ("name", "mesh", "most"),
    [
        ("bert", "1x1", 80),
        ("megatron", "2x4", 40),
        ("ours", "4x2", 40),
        ("bert", "1x2", 40),
        ("roberta", "1x1", 80),
        ("modern", "1x1", 80),
    ],
)
def test_an_embedding_is_the_mean_of_their_states(folders, name: str, mesh: str, most: int) -> None:
    source = str(folders[name]) if name == "ours" else f"hf:{folders[name]}"
    ours = Embedder(source, mesh=mesh, rows=4, max_tokens=most).embed(TEXTS)
    wanted = theirs(folders["megatron" if name == "ours" else name], most)
    assert ours.dtype == np.float16 and not ours[1:3].any()
    np.testing.assert_allclose(ours, wanted, atol=1.5e-3, rtol=1e-3)
