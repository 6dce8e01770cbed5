"""Every decoder type of transformers gives its own logits here, and comes back to the bit."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from mtjax.config import Config, replace
from mtjax.config.model_identity import effective_settings
from mtjax.convert.hugging_face import HuggingFaceSource
from mtjax.convert.model_types.missing import MISSING
from mtjax.convert.model_types.registry import MODEL_TYPES
from mtjax.convert.saved_model import SavedModel
from mtjax.convert.stream import WeightSource
from mtjax.errors import UserError
from mtjax.layout.mesh import MeshShape
from mtjax.models.sharded_model import ShardedModel
from mtjax.sharding.axes import use_rules
from mtjax.sharding.device_mesh import make_mesh
from tests.convert.hf_folders import tensors_in, write_back
from tests.parity.compare import relative
from tests.parity.decoder_types import CASES, Case
from tests.tiny import final_hidden, model_logits

torch = pytest.importorskip("torch", reason="needs the extra parity: pip install '.[parity]'")
transformers = pytest.importorskip(
    "transformers", minversion="5", reason="needs the extra parity: pip install '.[parity]'"
)
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")]

TOLERANCE = 1e-5
LESS_COMPILING = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def network_of(case: Case, noise: float = 0.2) -> Any:
    """transformers' network with random weights, norms, biases and buffers of routers."""
    config = transformers.AutoConfig.for_model(case.model_type, **case.config)
    torch.manual_seed(0)
    network = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=case.attention).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(noise * torch.randn_like(parameter))
        for name, buffer in network.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.linspace(-0.3, 0.3, len(buffer)))
    return network


def tokens_of(case: Case) -> np.ndarray:
    return np.random.default_rng(0).integers(3, case.config["vocab_size"], (2, case.length)).astype(np.int32)


def logits_of(network: Any, tokens: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return network(torch.tensor(tokens).long(), use_cache=False).logits.float().numpy()


def our_logits(source: WeightSource, tokens: np.ndarray, dtype: str = "float32") -> np.ndarray:
    """Logits of weights as they are read, computed in this type."""
    return logits_of_source(source, tokens, final_hidden, dtype)


def logits_of_source(
    source: WeightSource, batch: Any, forward: Callable[[Any, Any], Any], dtype: str = "float32"
) -> Any:
    """Logits of what `forward` returns of a source's model and a batch, computed in this type."""
    config = replace(source.origin.config, compute_dtype=dtype, attention="xla", vocab_multiple=1)
    config = replace(config, hidden_dropout=0.0, attention_dropout=0.0)
    sharded = ShardedModel(config, make_mesh(MeshShape(), jax.devices("cpu")))
    arrays = SavedModel(Path(), source).parameters(sharded)

    def run(parameters: Any, batch: Any) -> Any:
        with use_rules(sharded.layout.rules):
            model: Any = sharded.model(parameters)
            return model_logits(model, forward(model, batch))

    with jax.set_mesh(sharded.mesh):
        placed = jax.device_put(batch, sharded.batch_sharding)
        compiled = jax.jit(run).lower(arrays, placed).compile(compiler_options=LESS_COMPILING)
        return np.asarray(compiled(arrays, placed), np.float32)


OF_5 = {"rope_parameters"}
OF_4 = {"rope_theta", "rope_scaling", "partial_rotary_factor", "rotary_pct", "rotary_emb_base", "rope_local_base_freq"}


def model_of(model_type: str, config: dict[str, Any]) -> dict[str, Any]:
    """Our settings of a config.json."""
    settings = MODEL_TYPES[model_type].model_settings(config, frozenset(), "")
    return effective_settings(replace(Config(), **settings).model)


@pytest.mark.parametrize("name", CASES)
def test_logits_are_transformers_own_there_and_back(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    network, tokens = network_of(case), tokens_of(case)
    network.save_pretrained(tmp_path / "hf")
    expected = logits_of(network, tokens)
    source = HuggingFaceSource(tmp_path / "hf", 1)
    error = relative(our_logits(source, tokens), expected)
    print(f"{name}: {error:.1e}")
    assert error < TOLERANCE

    write_back(source, tmp_path / "back")
    theirs, ours = (tensors_in(tmp_path / folder) for folder in ("hf", "back"))
    assert theirs.keys() == ours.keys()
    for tensor, array in theirs.items():
        if "embed_positions" in tensor:  # rows that no token reads
            array[:2] = 0
        np.testing.assert_array_equal(ours[tensor], array, err_msg=tensor)

    written = json.loads((tmp_path / "back/config.json").read_text())
    # What versions 4 and 5 write of RoPE says the same; two types are in 5 alone.
    for keys in ([] if name in ("ministral3", "mellum") else [OF_5]) + [OF_4]:
        kept = {key: value for key, value in written.items() if key not in keys}
        assert model_of(case.model_type, kept) == model_of(case.model_type, written)
    config = transformers.AutoConfig.from_pretrained(tmp_path / "back")
    assert config.model_type == case.model_type
    again = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=case.attention).eval()
    again.load_state_dict(network.state_dict())
    np.testing.assert_array_equal(logits_of(again, tokens), expected)


IN_BFLOAT16 = ("gemma3_text", "cohere2", "olmo2")
MORE_IN_BFLOAT16 = ("granite", "bloom", "opt", "nemotron")
"""Whose multipliers, ALiBi, learned positions and norms of 1 + w those above have not."""
RARE_IN_BFLOAT16 = ("qwen2", "phi", "gpt_neox", "glm4", "gptj", "stablelm", "mpt")


@pytest.mark.parametrize(
    "name",
    [
        *IN_BFLOAT16,
        *(pytest.param(name, marks=pytest.mark.long) for name in MORE_IN_BFLOAT16),
        *(pytest.param(name, marks=pytest.mark.exhaustive) for name in RARE_IN_BFLOAT16),
    ],
)
def test_logits_in_bfloat16_are_as_near_to_float32_as_transformers_own(name: str, tmp_path: Path) -> None:
    """Both differ from the float32 logits of the same weights by their rounding errors. If ours are not larger than
    theirs, of size d, both logits are at most 2 d apart."""
    case = CASES[name]
    network, tokens = network_of(case).bfloat16(), tokens_of(case)
    network.save_pretrained(tmp_path)
    theirs = logits_of(network, tokens)
    exact = logits_of(network.float(), tokens)
    ours = our_logits(HuggingFaceSource(tmp_path, 1), tokens, "bfloat16")
    distance = rms(theirs - exact)
    print(f"{name}: {rms(exact):.2f}, theirs {distance:.1e}, ours {rms(ours - exact):.1e}, {rms(ours - theirs):.1e}")
    assert rms(ours - theirs) < 2 * distance


def rms(array: np.ndarray) -> float:
    return float(np.sqrt(np.square(array, dtype=np.float64).mean()))


@pytest.mark.parametrize("model_type", sorted({case.model_type for case in CASES.values()}))
def test_missing_keys_have_transformers_defaults_and_all_keys_are_known(model_type: str) -> None:
    family = MODEL_TYPES[model_type]
    needed = (
        {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2}
        if model_type in ("dots1", "deepseek_v2")
        else {}
    )
    needed |= {"head_dim": 128} if model_type in ("ministral", "hunyuan_v1_dense") else {}
    full = transformers.AutoConfig.for_model(model_type, **needed).to_dict()
    assert model_of(model_type, {"model_type": model_type, **needed}) == model_of(model_type, full)
    assert set(full) - family.keys <= HARMLESS


@pytest.mark.parametrize("model_type", sorted({case.model_type for case in CASES.values()}))
def test_other_names_of_keys_are_read_and_must_not_contradict(model_type: str) -> None:
    case = next(case for case in CASES.values() if case.model_type == model_type)
    made = transformers.AutoConfig.for_model(model_type, **case.config)
    config = {key: value for key, value in made.to_dict().items() if key not in type(made).attribute_map}
    expected = model_of(model_type, config)
    for other, key in type(made).attribute_map.items():
        value = config.get(key)
        if value is None or hasattr(type(made), key):  # one that transformers computes
            continue
        without = {name: each for name, each in config.items() if name != key}
        assert model_of(model_type, {**without, other: value}) == expected
        if key not in ("num_nextn_predict_layers", "attention_head_dim"):  # not read by all types
            with pytest.raises(UserError, match=f"{other}.* the same setting|{key}.* the same setting"):
                model_of(model_type, {**config, other: _another(value)})


def _another(value: Any) -> Any:
    """Returns another value of the same kind."""
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int | float) else "another"


def test_every_type_of_transformers_is_read_or_has_a_reason() -> None:
    from transformers.models.auto import modeling_auto

    kinds = ("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM")
    types = {name for kind in kinds for name in getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING_NAMES")}
    assert len(types) > 200
    assert types - {*MODEL_TYPES, *MISSING} == set()
    assert {*MODEL_TYPES} & {*MISSING} == set()


HARMLESS = {
    *transformers.PreTrainedConfig().to_dict(),
    *("bos_token_id", "eos_token_id", "pad_token_id", "eod_token_id", "sep_token_id", "use_cache", "pretraining_tp"),
    *("embd_pdrop", "emb_pdrop", "embedding_dropout", "classifier_dropout", "layerdrop", "is_decoder", "n_ctx"),
    *("activation_dropout", "chunk_size", "mamba_chunk_size", "embed_dropout"),
    *("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout"),
    *("init_device", "slow_but_exact", "output_router_logits", "router_aux_loss_coef", "router_jitter_noise"),
}
"""Keys that do not change logits: of training, of generation and of other classes."""
