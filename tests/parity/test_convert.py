"""What is converted computes the same: transformers' logits from our weights, ours from transformers'."""

from typing import Any

import jax
import numpy as np
import pytest

from mtjax import config as configs
from mtjax.convert.__main__ import main
from mtjax.sharding.axes import use_rules
from mtjax.sharding.placement import batch_sharding
from mtjax.train.step import make_program
from mtjax.train.weights import find_weights, restore_weights
from tests.convert.hf_folders import small_tokenizer
from tests.tiny import mesh_of

torch = pytest.importorskip("torch", reason="needs the extra parity: pip install 'mtjax[parity]'")
transformers = pytest.importorskip("transformers", reason="needs the extra parity: pip install 'mtjax[parity]'")
# transformers' own progress bars and advice
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


def gpt2() -> Any:
    theirs = transformers.GPT2Config(
        vocab_size=300, n_positions=16, n_embd=48, n_layer=3, n_head=4, n_inner=80, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(theirs)


def gpt2_untied() -> Any:
    theirs = transformers.GPT2Config(
        vocab_size=300,
        n_positions=16,
        n_embd=48,
        n_layer=2,
        n_head=4,
        activation_function="gelu",
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.GPT2LMHeadModel(theirs)


def llama(**settings: Any) -> Any:
    sizes = {
        "vocab_size": 300,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "max_position_embeddings": 64,
    }
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**(sizes | settings)))


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
FAMILIES = {
    "gpt2": gpt2,
    "gpt2 untied, exact gelu": gpt2_untied,
    "llama": llama,
    "llama grouped, scaled rope, wide heads": lambda: llama(
        num_key_value_heads=2, head_dim=16, rope_theta=5e5, rope_scaling=LLAMA3_ROPE, rms_norm_eps=1e-5
    ),
    "llama with biases, tied": lambda: llama(attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
}


def model_of(make) -> Any:
    """transformers' model with weights large enough for every part to matter."""
    torch.manual_seed(0)
    network = make().eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return network


def our_logits(folder, tokens: np.ndarray, mesh: str = "1x1") -> np.ndarray:
    """Logits of converted weights, over the true vocabulary."""
    weights = find_weights(folder)
    config = configs.replace(weights.config, compute_dtype="float32", attention="xla")
    program = make_program(config, mesh_of(mesh))
    parameters = restore_weights(weights, program.abstract_state.parameters)

    def run(parameters: Any, tokens: Any) -> Any:
        with use_rules(program.layout.rules):
            model: Any = program.model(parameters)
            return model.logits(model(tokens))

    with jax.set_mesh(program.mesh):
        placed = jax.device_put(tokens, batch_sharding(program.mesh))
        return np.asarray(jax.jit(run)(parameters, placed))[..., : config.model.vocab_size]


def relative(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_transformers_own_there_and_back(family, tmp_path):
    network = model_of(FAMILIES[family])
    network.save_pretrained(tmp_path / "hf")
    small_tokenizer().save(str(tmp_path / "hf/tokenizer.json"))
    (tmp_path / "hf/tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    options = ["--vocab-multiple", "128"]
    assert main(["--from", f"hf:{tmp_path / 'hf'}", "--to", f"mtjax:{tmp_path / 'ours'}", *options]) == 0
    assert main(["--from", f"mtjax:{tmp_path / 'ours'}", "--to", f"hf:{tmp_path / 'back'}"]) == 0

    tokens = np.random.default_rng(0).integers(0, network.config.vocab_size, (2, 16))
    with torch.no_grad():
        expected = network(torch.tensor(tokens)).logits.numpy()
    assert relative(our_logits(tmp_path / "ours", tokens.astype(np.int32)), expected) < 1e-5

    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
    assert type(back) is type(network)
    for name, parameter in network.state_dict().items():
        assert torch.equal(back.state_dict()[name], parameter), name
    with torch.no_grad():
        np.testing.assert_array_equal(back(torch.tensor(tokens)).logits.numpy(), expected)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    assert tokenizer.decode(tokenizer("the cat")["input_ids"]) == "the cat"
