"""Megatron-LM's checkpoints compute what transformers' models of the same weights do."""

from typing import Any

import numpy as np
import pytest

from mtjax.commands.convert import main
from tests.convert.megatron_folders import HEADS, write_bert, write_gpt
from tests.convert.megatron_llama import NAMES, write_llama
from tests.parity.compare import relative, shaken
from tests.parity.converted import assert_same_encoder, bert, encoder_batch, llama, our_encoder, our_logits

torch = pytest.importorskip("torch", reason="needs the extra parity: pip install '.[parity]'")
transformers = pytest.importorskip("transformers", reason="needs the extra parity: pip install '.[parity]'")
# transformers' own progress bars and advice
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


@pytest.mark.parametrize("version", [0.0, 1.0, 2.0, 3.0])
def test_megatron_s_checkpoints_give_transformers_logits(version, tmp_path):
    """The same GPT as Megatron splits it over 2 x 2 ranks and as transformers computes it."""
    sizes = {"vocab_size": 300, "n_positions": 16, "n_embd": 32, "n_layer": 4, "n_head": HEADS, "n_inner": 80}
    config = transformers.GPT2Config(**sizes, layer_norm_epsilon=1e-6, bos_token_id=0, eos_token_id=0)
    network = shaken(lambda: transformers.GPT2LMHeadModel(config)).eval()
    tensors = {n: t.numpy() for n, t in network.state_dict().items() if n != "lm_head.weight"}
    write_gpt(tmp_path / "megatron", tensors, version, tensor=2, pipeline=2)
    options = ["--vocab-size", "300"]
    if version < 2:  # does not say the MLP's width
        (tmp_path / "model.toml").write_text(
            "[model]\nnum_layers = 4\nhidden_size = 32\nnum_heads = 8\nsequence_length = 16\nmlp_size = 80\n"
            "norm_epsilon = 1e-6\n"
        )
        options += ["--config", str(tmp_path / "model.toml")]
    assert main(["--from", f"megatron:{tmp_path / 'megatron'}", "--to", f"mtjax:{tmp_path / 'ours'}", *options]) == 0
    tokens = np.random.default_rng(0).integers(0, 300, (2, 16))
    with torch.no_grad():
        expected = network(torch.tensor(tokens)).logits.numpy()
    assert relative(our_logits(tmp_path / "ours", tokens.astype(np.int32)), expected) < 1e-5


@pytest.mark.parametrize("split", [(1, 1), (2, 2)])
def test_megatron_s_bert_gives_transformers_logits(split, tmp_path):
    sizes = {"hidden_size": 32, "num_attention_heads": HEADS, "num_hidden_layers": 4}
    network = shaken(lambda: bert("MegatronBert", "ForPreTraining", **sizes)).eval()
    named = {name: tensor.numpy() for name, tensor in network.state_dict().items()}
    write_bert(tmp_path / "megatron", named, *split)
    options = ["--vocab-size", "300"]
    assert main(["--from", f"megatron:{tmp_path / 'megatron'}", "--to", f"mtjax:{tmp_path / 'ours'}", *options]) == 0
    batch = encoder_batch(300)
    assert_same_encoder(our_encoder(tmp_path / "ours", batch), network, batch, 1e-5)
    again, both = tmp_path / "again", ["--tensor", "4", "--pipeline", "2"]
    assert main(["--from", f"mtjax:{tmp_path / 'ours'}", "--to", f"megatron:{again}", *both]) == 0
    assert main(["--from", f"megatron:{again}", "--to", f"hf:{tmp_path / 'back'}"]) == 0
    back = type(network).from_pretrained(tmp_path / "back")
    for name, tensor in back.state_dict().items():
        assert torch.equal(tensor, network.state_dict()[name]), name


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize("impl", NAMES)
def test_megatron_s_llama_gives_transformers_logits(impl, tmp_path):
    """Grouped queries, wide heads, an untied output; written as Megatron splits it over 2 x 2 ranks; and back."""
    sizes = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16}
    # The old code has RoPE's first base alone.
    scaled = {} if impl == "legacy" else {"rope_theta": 5e5, "rope_scaling": LLAMA3}
    network = shaken(lambda: llama(**sizes, **scaled, rms_norm_eps=1e-5)).eval()
    named = {name: tensor.numpy() for name, tensor in network.state_dict().items()}
    said: dict[str, Any] = network.config.to_dict() | {"rope_theta": 10_000.0} | scaled
    write_llama(tmp_path / "megatron", named, said, impl, (2, 2))
    options = ["--vocab-size", "300", "--vocab-multiple", "128"]
    assert main(["--from", f"megatron:{tmp_path / 'megatron'}", "--to", f"mtjax:{tmp_path / 'ours'}", *options]) == 0

    tokens = np.random.default_rng(0).integers(0, 300, (2, 16))
    with torch.no_grad():
        expected = network(torch.tensor(tokens)).logits.numpy()
    for mesh in ("1x1", "2x4"):
        assert relative(our_logits(tmp_path / "ours", tokens.astype(np.int32), mesh), expected) < 1e-5

    again, back = tmp_path / "again", tmp_path / "back"
    split = ["--tensor", "2", "--pipeline", "4", "--transformer-impl", impl]
    assert main(["--from", f"mtjax:{tmp_path / 'ours'}", "--to", f"megatron:{again}", *split]) == 0
    assert main(["--from", f"megatron:{again}", "--to", f"hf:{back}"]) == 0
    loaded = transformers.AutoModelForCausalLM.from_pretrained(back).eval()
    assert type(loaded) is type(network)
    for name, tensor in network.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    with torch.no_grad():
        np.testing.assert_array_equal(loaded(torch.tensor(tokens)).logits.numpy(), expected)
