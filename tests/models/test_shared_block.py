"""Layers that read a shared block, beside their formulas in float64, and what shared blocks do not support."""

from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from scipy.special import erf

from mtjax.config import validate
from mtjax.errors import UserError
from mtjax.models.language_model import HiddenStates
from mtjax.sharding.axes import use_rules
from mtjax.train.step import make_train_step
from tests.families.hybrid.test_model import SHARED, hybrid_config
from tests.parity.compare import relative
from tests.tiny import batch_of, final_hidden, mesh_of


def normed(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.square(x).mean(-1, keepdims=True) + 1e-5) * scale


def block_output(block: Any, layer: Any, x: np.ndarray, embedded: np.ndarray, scale: float) -> np.ndarray:
    """What a layer computes with its block."""
    n = normed(np.concatenate([x, embedded], -1), block["attention_norm"]["scale"])
    low = np.einsum("bse,ecr->bscr", n, layer["attention_adapter"]["a"])
    qkv = np.einsum("bse,echd->cbshd", n, block["attention"]["qkv"]["weight"])
    qkv += np.einsum("bscr,crhd->cbshd", low, layer["attention_adapter"]["b"])
    scores = scale * np.einsum("bqhd,bkhd->bhqk", qkv[0], qkv[1])
    scores = np.where(np.tri(scores.shape[-1], dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    mixed = np.einsum("bhqk,bkhd->bqhd", weights / weights.sum(-1, keepdims=True), qkv[2])
    n = normed(np.einsum("bshd,hde->bse", mixed, block["attention"]["output"]["weight"]), block["mlp_norm"]["scale"])
    up = np.einsum("bse,egf->gbsf", n, block["mlp"]["up"]["weight"])
    up += np.einsum("bsr,rgf->gbsf", n @ layer["mlp_adapter"]["a"], layer["mlp_adapter"]["b"])
    gate = up[0] * (1 + erf(up[0] / np.sqrt(2))) / 2
    return (gate * up[1]) @ block["mlp"]["down"]["weight"] @ layer["projection"]["weight"]


@pytest.mark.long
def test_layers_with_shared_blocks_are_their_formulas() -> None:
    """Mamba-2 itself is the layer's own; the first and the third layer read the same block."""
    config = hybrid_config("ZzZ", **{**SHARED, "position": "none"})
    program, draw = make_train_step(config, mesh_of("1x1")), np.random.default_rng(0)
    parameters = jax.tree.map(
        lambda a: a + 0.1 * draw.standard_normal(a.shape, np.float32), program.initialize(0).parameters
    )
    exact = jax.tree.map(lambda a: np.asarray(a, np.float64), parameters)
    tokens = batch_of(program, 0)["tokens"]

    def embed(model: Any, tokens: Any) -> tuple[Any, Any]:
        batch = {"tokens": tokens}
        hidden = model.sections["shared_1"].embed(batch, None, None)
        return hidden.x, final_hidden(model, tokens)

    def mamba(stack: str, index: int, model: Any, x: Any) -> Any:
        layer = jax.tree.map(lambda a: a[index], getattr(model, stack).layers)
        context = model.sections["shared_1"].context({"tokens": tokens}, None, HiddenStates(x, x))
        return layer.mamba(layer.mamba_norm(x), context, None)[0]

    def run(function: Any, *inputs: Any) -> Any:
        with jax.set_mesh(program.mesh), use_rules(program.layout.rules):
            return jax.jit(lambda p, *i: function(program.model(p), *i))(parameters, *inputs)

    embedded, found = (np.asarray(a) for a in run(embed, tokens))
    x = np.asarray(embedded, np.float64)
    for stack, index, block in (("shared_1", 0, "block_1"), ("shared_2", 0, "block_2"), ("shared_1", 1, "block_1")):
        layer = jax.tree.map(lambda a, index=index: a[index], exact[stack]["layers"])
        read = block_output(exact[block], layer, x, np.asarray(embedded, np.float64), config.model.attention_scale or 0)
        x = x + np.asarray(run(partial(mamba, stack, index), np.asarray(x + read, np.float32)))
    assert relative(found, normed(x, exact["final_norm"]["scale"])) < 1e-5


@pytest.mark.parametrize(
    ("pattern", "fields", "why"),
    [
        ("MZ*", {}, r"has shared blocks \(Z\) and layers \*, and shared blocks support M beside them alone"),
        ("Mz", {}, r"has the second shared block \(z\) without the first: use Z"),
        ("MZ", {"num_kv_heads": 2}, "needs as many key heads as query heads, and num_kv_heads is 2 and num_heads 4"),
        ("MZ", {"qk_norm": True}, "qk_norm is True, and shared blocks"),
        ("MZ", {"activation": "relu2"}, "has shared blocks, whose MLP has a gate, and activation relu2 has none"),
    ],
)
def test_what_shared_blocks_do_not_support(pattern: str, fields: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError, match=why):
        validate(hybrid_config(pattern, **{**SHARED, **fields}))
