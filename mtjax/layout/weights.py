"""The weights of models: their names and the names and sizes of their dimensions, which models draw and the analysis
counts."""

from collections.abc import Mapping
from typing import NamedTuple

from mtjax.config import Model
from mtjax.config.ssm import ssm_groups, ssm_heads

Sizes = Mapping[str, int]
"""Logical name of a dimension -> its size."""


class ProductSizes(NamedTuple):
    """Dimensions of a weight [*inputs, *outputs]; a bias has `outputs`."""

    inputs: Sizes
    outputs: Sizes

    @property
    def weight(self) -> dict[str, int]:
        """Dimensions of the weight."""
        return {**self.inputs, **self.outputs}


def embedding_weights(
    width: int, *, rows: int = 0, positions: int = 0, token_types: int = 0
) -> dict[str, dict[str, int]]:
    """Returns the dimensions of tables with a vector for each row of the vocabulary, position or token type, by name;
    of none whose number is 0."""
    counts = {"embedding": {"vocab": rows}, "positions": {"positions": positions}}
    counts["token_types"] = {"token_types": token_types}
    return {name: {**count, "embed": width} for name, count in counts.items() if any(count.values())}


def output_weights(rows: int, width: int) -> dict[str, Sizes]:
    """Returns the dimensions of a table of its own for the output, and of the bias of logits, by name."""
    return {"output": embedding_weights(width, rows=rows)["embedding"], "output_bias": {"vocab": rows}}


def relative_table(buckets: int, heads: int) -> Sizes:
    """Returns the dimensions of the table of relative positions."""
    return {"buckets": buckets, "heads": heads}


def replicated_product(inputs: int, outputs: int, *, sources: int = 0) -> ProductSizes:
    """Returns a product that every tensor parallel rank computes entirely, of so many vectors side by side, or of one.

    Its outputs are named `features`, also where they are hidden states: a weight has `embed` once.
    """
    stacked = {"sources": sources} if sources else {}
    return ProductSizes({**stacked, "embed": inputs}, {"features": outputs})


def head_products(width: int, classes: int = 0) -> dict[str, ProductSizes]:
    """Returns the products of heads other than the output table, by name; `classes` is the number of logits of a
    classifier."""
    dense, embed = replicated_product(width, width), {"embed": width}
    logits = {"classifier": {"classes": classes}, "spans": {"classes": 2}}
    return {"dense": dense, "pooler": dense, **{name: ProductSizes(embed, sizes) for name, sizes in logits.items()}}


def mlp_products(hidden: int, inner: int, *, is_gated: bool) -> dict[str, ProductSizes]:
    """Returns an MLP's products, by name; a gated one has one for gate and up."""
    embed, mlp, gate = {"embed": hidden}, {"mlp": inner}, {"gate": 2} if is_gated else {}
    return {"up": ProductSizes(embed, {**gate, **mlp}), "down": ProductSizes(mlp, embed)}


def expert_products(hidden: int, inner: int, count: int, *, is_gated: bool) -> dict[str, ProductSizes]:
    """Returns the products of all experts, by name: those of an MLP each."""
    each, of_mlp = {"expert": count}, mlp_products(hidden, inner, is_gated=is_gated)
    return {name: ProductSizes({**each, **sizes.inputs}, sizes.outputs) for name, sizes in of_mlp.items()}


def expert_biases(products: Mapping[str, ProductSizes]) -> dict[str, Sizes]:
    """Returns the dimensions of the biases of `expert_products`, by the product's name: every rank has all of the last
    product's, which it adds to its own tokens."""
    up, down = products["up"], products["down"]
    count = up.inputs["expert"]
    # Those of the last product are added to sums over experts, after the dispatch, so each rank needs all of them.
    return {"up": {"expert": count, **up.outputs}, "down": {"every_expert": count, **down.outputs}}


def router_weights(hidden: int, count: int, *, bias: bool, linear_bias: bool) -> dict[str, Sizes]:
    """Returns the dimensions of a router's parameters, by name; `bias` is for one that affects the choice alone,
    `linear_bias` for one of the logits."""
    routes = {"routes": count}
    biases = {"bias": routes} if bias else {}
    return {"weight": {"embed": hidden, **routes}, **biases, **({"linear_bias": routes} if linear_bias else {})}


def shared_gate(hidden: int) -> Sizes:
    """Returns the dimensions of the weight of a shared expert's gate."""
    return router_weights(hidden, 1, bias=False, linear_bias=False)["weight"]


def attention_products(
    hidden: int, num_heads: int, kv_heads: int, head_dim: int, *, is_gated: bool = False
) -> dict[str, ProductSizes]:
    """Returns the products of self-attention, by name: query, key and value are one, or with fewer KV heads two;
    `is_gated` adds `gate`, with an output for each channel of the heads."""
    embed, width = {"embed": hidden}, {"head_dim": head_dim}
    heads = {"heads": num_heads, **width}
    # Two parameters where the numbers differ: KV heads may be fewer than tensor parallel ranks, and then are
    # replicated.
    if kv_heads == num_heads:
        inputs = {"qkv": ProductSizes(embed, {"qkv": 3, **heads})}
    else:
        inputs = {
            "qkv.query": ProductSizes(embed, heads),
            "qkv.key_value": ProductSizes(embed, {"kv": 2, "kv_heads": kv_heads, **width}),
        }
    gate = {"gate": ProductSizes(embed, heads)} if is_gated else {}
    return {**inputs, **gate, "output": ProductSizes(heads, embed)}


def head_norm_weights(
    num_heads: int, kv_heads: int, head_dim: int, *, is_shared: bool, bias: bool
) -> dict[str, dict[str, Sizes]]:
    """Returns the dimensions of the vectors of QK norm, by the norm's name and their own: one for all heads, or
    (`is_shared` false) one for each."""
    counts = {"query_norm": {"heads": num_heads}, "key_norm": {"kv_heads": kv_heads}}
    vectors = ("scale", "bias") if bias else ("scale",)
    sizes = {norm: {**({} if is_shared else count), "head_dim": head_dim} for norm, count in counts.items()}
    return {norm: dict.fromkeys(vectors, sizes[norm]) for norm in counts}


def attention_sinks(num_heads: int) -> Sizes:
    """Returns the dimensions of attention's sinks: a logit of each head."""
    return {"heads": num_heads}


def cross_products(hidden: int, num_heads: int, head_dim: int) -> dict[str, ProductSizes]:
    """Returns the products of cross-attention, by name: of the decoder's tokens, and of the encoder's."""
    embed, heads = {"embed": hidden}, {"heads": num_heads, "head_dim": head_dim}
    return {
        "query": ProductSizes(embed, heads),
        "key_value": ProductSizes(embed, {"kv": 2, **heads}),
        "output": ProductSizes(heads, embed),
    }


def block_products(hidden: int, num_heads: int, head_dim: int) -> dict[str, ProductSizes]:
    """Returns the products of a shared block's attention, by name, which reads two vectors of the width of hidden
    states, side by side; a layer's own adapter of query, key and value has the inputs and outputs of theirs."""
    qkv, output = (attention_products(width, num_heads, num_heads, head_dim) for width in (2 * hidden, hidden))
    return {"qkv": qkv["qkv"], "output": output["output"]}


def latent_products(
    hidden: int, heads: int, *, latent: int, query_latent: int, still: int, rotated: int, value: int
) -> dict[str, ProductSizes]:
    """Returns the products of latent attention, by name, in the order in which their parameters are drawn.

    Args:
      hidden: width of hidden states.
      heads: number of heads.
      latent: width of the latent of keys and values; its norm has the inputs of `key_value_up`.
      query_latent: width of the latent of queries, whose norm has the inputs of `query_up`; 0 for queries from the
        hidden states.
      still: width of the part of a query and key head that is not rotated.
      rotated: width of the part that is.
      value: width of a value head.
    """
    embed, query = {"embed": hidden}, {"heads": heads, "head_dim": still + rotated}
    low, of_latent = {"latent": query_latent}, {"latent": latent}
    queries = {"query_down": ProductSizes(embed, low), "query_up": ProductSizes(low, query)}
    return {
        **(queries if query_latent else {"query": ProductSizes(embed, query)}),
        "key_value_down": ProductSizes(embed, {"latent": latent + rotated}),
        "key_value_up": ProductSizes(of_latent, {"heads": heads, "head_dim": still + value}),
        "output": ProductSizes({"heads": heads, "head_dim": value}, embed),
    }


def mamba_weights(model: Model) -> dict[str, Sizes]:
    """Returns the dimensions of Mamba-2's parameters, by name; its output is `recurrent_output`."""
    sizes = _RecurrentSizes.of(model)
    return {
        **sizes.inputs("b_c", "rate"),
        "conv": {**sizes.taps, **sizes.inner},
        "conv_bias": sizes.inner,
        # Apart from `conv`: groups may be replicated where heads are sharded.
        "conv_b_c": {**sizes.taps, **sizes.shared},
        "conv_b_c_bias": sizes.shared,
        "rate_bias": sizes.heads,
        "a_log": sizes.heads,
        "skip": sizes.heads,
        **({"norm_scale": sizes.inner} if model.ssm_norm else {}),
    }


def delta_weights(model: Model) -> dict[str, Sizes]:
    """Returns the dimensions of a gated delta net's parameters, by name; its output is `recurrent_output`."""
    sizes = _RecurrentSizes.of(model)
    return {
        **sizes.inputs("query_key", "beta", "rate"),
        "conv": {**sizes.taps, **sizes.inner},
        "conv_query_key": {**sizes.taps, **sizes.shared},
        "rate_bias": sizes.heads,
        "a_log": sizes.heads,
        "norm_scale": {"head_dim": model.ssm_head_dim},
    }


def recurrent_inputs(weights: Mapping[str, Sizes]) -> dict[str, ProductSizes]:
    """Selects the parts of the first product of `mamba_weights` or `delta_weights`, by their own names."""
    parts = {name.removeprefix(_INPUTS): dict(sizes) for name, sizes in weights.items() if name.startswith(_INPUTS)}
    return {name: ProductSizes({"embed": sizes.pop("embed")}, sizes) for name, sizes in parts.items()}


def recurrent_output(model: Model) -> ProductSizes:
    """Returns the dimensions of the last product of a mixer with a recurrent state."""
    return ProductSizes(_RecurrentSizes.of(model).inner, {"embed": model.hidden_size})


_INPUTS = "inputs."


class _RecurrentSizes(NamedTuple):
    """Dimensions of a mixer with a recurrent state."""

    embed: Sizes
    heads: Sizes
    inner: Sizes
    """Of all heads' values."""
    shared: Sizes
    """Of the two vectors that a group of heads shares."""
    taps: Sizes
    """Of the convolution."""

    @classmethod
    def of(cls, model: Model) -> "_RecurrentSizes":
        """Reads a model's settings."""
        heads = {"heads": ssm_heads(model)}
        shared = {"kv": 2, "groups": ssm_groups(model), "state": model.ssm_state}
        inner = {**heads, "head_dim": model.ssm_head_dim}
        return cls({"embed": model.hidden_size}, heads, inner, shared, {"taps": model.ssm_conv})

    def inputs(self, shared: str, *of_heads: str) -> dict[str, Sizes]:
        """Returns the parts of the first product: gate and value, the shared vectors, numbers of each head."""
        outputs = {"gate_value": {"gate": 2, **self.inner}, shared: self.shared, **dict.fromkeys(of_heads, self.heads)}
        return {f"{_INPUTS}{name}": {**self.embed, **sizes} for name, sizes in outputs.items()}
