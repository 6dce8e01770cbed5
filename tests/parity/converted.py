"""transformers' small models, and what our programs make of the folders that they were converted to."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from mtjax import config as configs
from mtjax.runtime.checkpoints.weights import find_weights, restore_weights
from mtjax.sharding.axes import use_rules
from mtjax.train.step import TrainStep, make_train_step
from tests.parity.compare import relative
from tests.tiny import final_hidden, mesh_of, model_logits

torch = pytest.importorskip("torch", reason="needs the extra parity: pip install '.[parity]'")
transformers = pytest.importorskip("transformers", reason="needs the extra parity: pip install '.[parity]'")


SIZES = {
    "vocab_size": 300,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 64,
}


def llama(**settings: Any) -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**(SIZES | settings)))


def mixtral(**settings: Any) -> Any:
    sizes = {"num_local_experts": 6, "num_key_value_heads": 2, **SIZES}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**(sizes | settings)))


def qwen3(kind: str, **settings: Any) -> Any:
    sizes = {"num_key_value_heads": 2, "head_dim": 12, **SIZES}
    theirs = getattr(transformers, f"{kind}Config")(**(sizes | settings))
    return getattr(transformers, f"{kind}ForCausalLM")(theirs)


def dots1(**settings: Any) -> Any:
    """One layer without experts and two with, whose routers have biases."""
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "n_shared_experts": 2}
    groups = {"n_group": 4, "topk_group": 2, "norm_topk_prob": True, "routed_scaling_factor": 2.5}
    sizes = {**SIZES, **experts, **groups, "num_key_value_heads": 6, "first_k_dense_replace": 1}
    network = transformers.Dots1ForCausalLM(transformers.Dots1Config(**(sizes | settings)))
    for name, buffer in network.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.linspace(-0.3, 0.3, len(buffer)))
    return network


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


def roberta(kind: str, head: str, **settings: Any) -> Any:
    """A RoBERTa with 16 positions."""
    return bert(kind, head, **{"max_position_embeddings": 18, "type_vocab_size": 1, **settings})


def without_unused_positions(network: Any) -> Any:
    """Zeros RoBERTa's first two rows of positions, which no token has, as mtjax writes them."""
    for name in ("roberta", "data2vec_text"):
        if hasattr(network, name):
            getattr(network, name).embeddings.position_embeddings.weight.data[:2] = 0
    return network


def distilbert(head: str, **settings: Any) -> Any:
    sizes = {"vocab_size": 300, "dim": 48, "hidden_dim": 80, "n_layers": 3, "n_heads": 6}
    config = transformers.DistilBertConfig(**sizes, max_position_embeddings=16, **settings)
    return getattr(transformers, f"DistilBert{head}")(config)


def program_of(folder: Path, mesh: str) -> tuple[TrainStep, Any]:
    """The float32 program of converted weights, and the weights on its mesh."""
    weights = find_weights(folder)
    config = configs.replace(weights.config, compute_dtype="float32", attention="xla")
    program = make_train_step(config, mesh_of(mesh))
    return program, restore_weights(weights, program.abstract_state.parameters)


def our_logits(folder: Path, tokens: np.ndarray, mesh: str = "1x1") -> np.ndarray:
    """Logits of converted weights, over the true vocabulary."""
    program, parameters = program_of(folder, mesh)

    def run(parameters: Any, tokens: Any) -> Any:
        with use_rules(program.layout.rules):
            model: Any = program.model(parameters)
            return model_logits(model, final_hidden(model, tokens))

    with jax.set_mesh(program.mesh):
        placed = jax.device_put(tokens, program.batch_sharding)
        return np.asarray(jax.jit(run)(parameters, placed))[..., : program.config.model.vocab_size]


def encoder_batch(size: int, length: int = 16, pad: int = 0) -> dict[str, np.ndarray]:
    """Two samples of two sentences, the second padded, with ids from 2 on."""
    random = np.random.default_rng(0)
    mask = np.ones((2, length), np.int32)
    mask[1, length - 5 :] = 0
    types = (np.arange(length) >= length // 2).astype(np.int32) * np.ones((2, 1), np.int32)
    tokens = np.where(mask, random.integers(2, size, (2, length)), pad)
    return {"tokens": tokens.astype(np.int32), "types": types, "mask": mask}


def our_encoder(folder: Path, batch: dict[str, np.ndarray], mesh: str = "1x1") -> dict[str, np.ndarray]:
    """Hidden states and both heads' logits of converted weights."""
    program, parameters = program_of(folder, mesh)

    def run(parameters: Any, batch: Any) -> Any:
        with use_rules(program.layout.rules):
            model: Any = program.model(parameters)
            hidden = model(batch["tokens"], batch["types"], batch["mask"])
            order = {} if model.order is None else {"order": model.order(hidden)}
            return {"hidden": hidden, "logits": model_logits(model, hidden), **order}

    with jax.set_mesh(program.mesh):
        placed = jax.device_put(batch, program.batch_sharding)
        found = {name: np.asarray(array) for name, array in jax.jit(run)(parameters, placed).items()}
    return found | {"logits": found["logits"][..., : program.config.model.vocab_size]}


def assert_same_encoder(found: dict[str, np.ndarray], network: Any, batch: dict[str, np.ndarray], limit: float) -> None:
    """Compares what transformers' model gives, on all tokens that are not padding."""
    with torch.no_grad():
        long = {name: torch.tensor(array).long() for name, array in batch.items()}
        asked = {"attention_mask": long["mask"], "output_hidden_states": True}
        asked |= {"token_type_ids": long["types"]} if getattr(network.config, "type_vocab_size", 0) > 1 else {}
        out = network(long["tokens"], **asked)
    real = batch["mask"].astype(bool)
    last = out.last_hidden_state if "last_hidden_state" in out else None
    if last is None and not isinstance(
        network, transformers.MegatronBertPreTrainedModel
    ):  # pre-LN's are taken before the final norm
        last = out.hidden_states[-1]
    if last is not None:
        assert relative(found["hidden"][real], last.numpy()[real]) < limit
    logits = out.get("prediction_logits", out.get("logits"))
    if logits is not None:
        assert relative(found["logits"][real], logits.numpy()[real]) < limit
    if "seq_relationship_logits" in out:
        assert relative(found["order"], out.seq_relationship_logits.numpy()) < limit
