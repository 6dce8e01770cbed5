"""Windows and positions that differ between layers, with a KV cache: log-probabilities are those of training."""

from typing import Any

import jax
import numpy as np
import pytest

from mtjax.errors import UserError
from mtjax.generate.decoder import GenerationPrograms
from mtjax.generate.engine import Engine
from mtjax.generate.request import Request, Sampling, Token
from mtjax.models.sharded_model import ShardedModel
from mtjax.sharding.axes import spec, use_rules
from tests.tiny import VOCAB, drawn_parameters, final_hidden, mesh_of, model_logits, program_of, tiny_config

LLAMA: dict[str, Any] = {"family": "llama", "num_kv_heads": 2, "num_layers": 3, "sequence_length": 48, "init_std": 0.3}
LONG = {"rope_short_factors": (1.0, 2.0), "rope_long_factors": (4.0, 4.0)}
FIELDS: dict[str, dict[str, Any]] = {
    "windows, local base, no RoPE in a layer": LLAMA
    | {"attention_window": 7, "window_layers": "SFF", "rope_layers": "RRN", "rope_local_theta": 100.0},
    "longrope's short factors, windows in all layers": LLAMA
    | {"attention_window": 9, "rope_scaling": "longrope", "rope_original_length": 40, **LONG},
    "ALiBi": {"position": "alibi", "num_layers": 3, "sequence_length": 48, "init_std": 0.3},
}


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param(fields, id=name, marks=[pytest.mark.long] if name != next(iter(FIELDS)) else [])
        for name, fields in FIELDS.items()
    ],
)
def test_cached_logprobs_are_those_of_the_model_without_a_cache(fields: dict[str, Any]) -> None:
    config = tiny_config(**fields)
    placed = ShardedModel(config, mesh_of("1x4"))
    parameters = drawn_parameters(placed)
    engine = Engine(
        GenerationPrograms(placed, parameters), 2, chunks=(8, 16), prefill_tokens_per_step=8, min_cache_length=16
    )
    prompt, out = np.random.default_rng(0).integers(0, VOCAB, 21).tolist(), list[Token]()
    read: list[Token] = []
    sampling = Sampling(12, temperature=1.5)
    engine.submit(
        Request(tuple(prompt), sampling, logprobs=True, echo=True, on_prompt=read.extend, on_token=out.append)
    )
    engine.run()

    program = program_of("1x1", **fields)
    tokens = np.array([prompt + [token.id for token in out]])
    places = program.state_sharding.parameters
    whole = jax.tree.map(lambda array, place: jax.device_put(np.asarray(array), place), parameters, places)

    def forward(parameters: Any, tokens: Any) -> Any:
        with use_rules(program.layout.rules):
            model: Any = program.model(parameters)
            return model_logits(model, final_hidden(model, jax.sharding.reshard(tokens, spec("batch", None))))

    with jax.set_mesh(program.mesh):
        logits = jax.jit(forward)(whole, tokens)
    logprobs = np.asarray(jax.nn.log_softmax(logits[0, :, :VOCAB]))
    expected = [logprobs[i, token] for i, token in enumerate(tokens[0, 1:])]
    found = [token.logprob for token in [*read[1:], *out]]
    np.testing.assert_allclose(np.array(found, float), expected, atol=5e-5)


def test_longrope_generates_up_to_the_original_length() -> None:
    fields = FIELDS["longrope's short factors, windows in all layers"]
    placed = ShardedModel(tiny_config(**fields), mesh_of("1x1"))
    engine = Engine(GenerationPrograms(placed, drawn_parameters(placed)), 1, chunks=(16,), min_cache_length=16)
    with pytest.raises(UserError, match="context length is 40"):
        engine.submit(Request(tuple(range(40)), Sampling(1)))
