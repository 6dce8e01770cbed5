"""`mtjax evaluate` beside transformers: windows and last words of random models, from a folder to the results."""

import json

import jax
import numpy as np
import pytest

from mtjax.commands.evaluate import main
from mtjax.data.tokens.tokenizer import open_tokenizer
from tests.convert.hf_folders import llama_tokenizer, small_tokenizer
from tests.parity.compare import shaken

torch = pytest.importorskip("torch", reason="needs the extra parity: pip install '.[parity]'")
transformers = pytest.importorskip("transformers", reason="needs the extra parity: pip install '.[parity]'")

LENGTH, OVERLAP = 24, 5
TEXT = "the cat and the dog went on , to the end of the road @-@ and there they rested . \n" * 9


def gpt2():
    sizes = {"n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": LENGTH}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=300, **sizes))


def llama():
    sizes = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 4, "num_attention_heads": 6}
    rest = {"num_key_value_heads": 2, "max_position_embeddings": LENGTH}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=300, **sizes, **rest))


def log_probabilities(network, ids: list[int]) -> np.ndarray:
    """[tokens - 1, vocabulary], float64."""
    with torch.no_grad():
        return torch.log_softmax(network(torch.tensor([ids[:-1]])).logits.double(), -1)[0].numpy()


@pytest.mark.parametrize(
    ("make", "mesh"), [(gpt2, "2x3"), (llama, "2x2x2"), pytest.param(llama, "1x1", marks=pytest.mark.exhaustive)]
)
def test_results_are_those_of_transformers(tmp_path, make, mesh: str) -> None:
    jax.devices()  # all eight, before the command asks for as many as its mesh needs
    network = shaken(make).eval()
    network.save_pretrained(tmp_path / "hf")
    small_tokenizer().save(str(tmp_path / "hf" / "tokenizer.json"))
    tokenizer = open_tokenizer(str(tmp_path / "hf" / "tokenizer.json"))

    def run(task: str, data: str) -> dict[str, float]:
        (tmp_path / "data").write_text(data)
        out = tmp_path / f"{task}.json"
        words = ["--task", task, "--data", str(tmp_path / "data"), "--from", f"hf:{tmp_path / 'hf'}", "--mesh", mesh]
        assert main([*words, "--overlap", str(OVERLAP), "--out", str(out)]) == 0
        return json.loads(out.read_text())["results"]

    found = run("wikitext103", TEXT)
    ids = tokenizer.encode(TEXT.replace(" , ", ", ").replace(" @-@ ", "-").replace(" . ", ". ").replace(" \n", "\n"))
    total = 0.0
    for target in range(1, len(ids)):  # the window that counts it, as the last of its own where several read it
        index = max(0, -(-(target - LENGTH) // OVERLAP))
        start = index * OVERLAP
        total += log_probabilities(network, ids[start : target + 1])[-1, ids[target]]
    assert found["tokens (T)"] == len(ids)
    assert found["loss"] == pytest.approx(-total / (len(ids) - 1), rel=1e-5)
    assert found["perplexity"] == pytest.approx(np.exp(-total / (len(TEXT.strip().split(" ")) - 1)), rel=1e-5)

    passages = ["the cat and the dog", "there they rested on the", "went on to the end of the road"]
    before = tokenizer.encode("the cat and the")
    favourite = tokenizer.decode([int(log_probabilities(network, [*before, 0])[-1].argmax())])
    if favourite.startswith(" ") and favourite.strip().isalpha():  # a passage that the model ends itself
        passages.append(f"the cat and the{favourite}")
    found = run("lambada", "".join(json.dumps({"text": text}) + "\n" for text in passages))
    likely, best = [], []
    for text in passages:
        start, word = tokenizer.encode(text.rsplit(" ", 1)[0]), tokenizer.encode(" " + text.rsplit(" ", 1)[1])
        table = log_probabilities(network, start + word)[-len(word) :]
        likely.append(sum(table[i, token] for i, token in enumerate(word)))
        best.append(all(table[i].argmax() == token for i, token in enumerate(word)))
    assert found["accuracy"] == np.mean(best)
    assert found["perplexity"] == pytest.approx(np.exp(-np.mean(likely)), rel=1e-5)


def test_texts_begin_and_end_with_the_tokens_of_transformers(tmp_path) -> None:
    """A tokenizer that marks words and puts `<s>` in front, as transformers reads it from the same folder."""
    network = shaken(llama).eval()
    network.save_pretrained(tmp_path / "hf")
    library = transformers.PreTrainedTokenizerFast(
        tokenizer_object=llama_tokenizer(), bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    library.save_pretrained(tmp_path / "hf")
    texts = ["the cat and the dog", "they rested on the road\n", "went on to the end of the road"]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))

    def run(task: str) -> dict[str, float]:
        out = tmp_path / f"{task}.json"
        words = ["--task", task, "--data", str(tmp_path / "data.jsonl"), "--from", f"hf:{tmp_path / 'hf'}"]
        assert main([*words, "--out", str(out)]) == 0
        return json.loads(out.read_text())["results"]

    losses, likely = [], []
    for text in texts:
        ids = library(text).input_ids
        assert ids[0] == library.bos_token_id
        losses += [-row[token] for row, token in zip(log_probabilities(network, ids), ids[1:], strict=True)]
        passage = library(text.strip(), return_offsets_mapping=True)
        begin = text.strip().rindex(" ")
        places = [i for i, (start, _) in enumerate(passage.offset_mapping) if start >= begin]
        table = log_probabilities(network, passage.input_ids)
        likely.append(sum(table[i - 1, passage.input_ids[i]] for i in places))
    found = run("perplexity")
    assert found["tokens"] == len(losses)
    assert found["perplexity"] == pytest.approx(np.exp(np.mean(losses)), rel=1e-5)
    assert run("lambada")["perplexity"] == pytest.approx(np.exp(-np.mean(likely)), rel=1e-5)
