"""Beside transformers: the same tokens, and the same log-probabilities; from its folders, on several meshes."""

import copy

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from mtjax.generate.decoder import Decoder  # noqa: E402
from mtjax.generate.engine import Engine  # noqa: E402
from mtjax.generate.request import Request, Sampling, Token  # noqa: E402
from mtjax.generate.weights import load_model  # noqa: E402
from tests.convert.hf_folders import small_tokenizer  # noqa: E402

NEW = 24


def gpt2():
    config = transformers.GPT2Config(
        vocab_size=301, n_positions=80, n_embd=48, n_layer=3, n_head=4, n_inner=72, initializer_range=0.15
    )
    return transformers.GPT2LMHeadModel(config)


def llama():
    config = transformers.LlamaConfig(
        vocab_size=301,
        hidden_size=40,
        intermediate_size=56,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=6,
        max_position_embeddings=80,
        rope_theta=5000.0,
        initializer_range=0.15,
        eos_token_id=None,
    )
    return transformers.LlamaForCausalLM(config)


PROMPTS = [np.random.default_rng(n).integers(0, 301, n).tolist() for n in (1, 7, 33)]


def theirs(model, prompt: list[int]) -> tuple[list[int], np.ndarray]:
    """Greedy tokens, and their log-probabilities by one pass over all of them."""
    tokens = torch.tensor([prompt])
    with torch.no_grad():
        out = model.generate(tokens, max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0)
        logprobs = torch.log_softmax(copy.deepcopy(model).double()(out).logits[0], -1)
    ids = out[0].tolist()
    own = [logprobs[at - 1, ids[at]].item() for at in range(1, len(ids))]
    return ids[len(prompt) :], np.array(own)


@pytest.mark.parametrize("family", [gpt2, llama])
def test_greedy_texts_and_log_probabilities_are_transformers(family, tmp_path) -> None:
    torch.manual_seed(0)
    model = family().eval()
    model.save_pretrained(tmp_path)
    small_tokenizer().save(str(tmp_path / "tokenizer.json"))
    assert len(jax.devices()) >= 4  # in use: their number is fixed
    expected = [theirs(model, prompt) for prompt in PROMPTS]
    for mesh in ("1x1", "1x2", "1x4", "2x2"):
        loaded = load_model(f"hf:{tmp_path}", mesh)
        engine = Engine(Decoder(loaded.placed, loaded.parameters), 2, chunks=(8, 16), shortest_cache=32)
        for prompt, (ids, logprobs) in zip(PROMPTS, expected, strict=True):
            told: list[Token] = []
            listen = {"on_prompt": told.extend, "on_token": told.append, "logprobs": True, "echo": True}
            engine.submit(Request(tuple(prompt), Sampling(NEW), **listen))
            engine.run()
            assert [token.id for token in told] == [*prompt, *ids], mesh
            np.testing.assert_allclose([t.logprob for t in told[1:]], logprobs, atol=1e-5)
