"""Checks of the settings of multi-head latent attention."""

from mtjax.config.families import LATENT
from mtjax.config.model import Model
from mtjax.config.sizes import attention_bias
from mtjax.errors import UserError


def check_latent_attention(model: Model) -> None:
    """Checks that the settings of latent attention are only set with it, and what it is not combined with.

    Raises:
      UserError: a setting has no effect without kv_lora_rank, or cannot be combined with it.
    """
    default, rank = Model(), model.kv_lora_rank
    if not rank:
        for name in sorted(LATENT - {"kv_lora_rank"}):
            if (value := getattr(model, name)) != getattr(default, name):
                raise UserError(f"{name} is {value}, and kv_lora_rank is 0: set kv_lora_rank, or remove {name}")
        return
    if (bias := attention_bias(model)) != "none":
        raise UserError(
            f"kv_lora_rank is {rank}, latent attention has no biases, and attention_bias is {bias}: set attention_bias "
            "none"
        )
    if model.qk_rope_head_dim % 2 and model.position == "rope":
        raise UserError(
            f"position rope rotates pairs of dimensions, and qk_rope_head_dim is {model.qk_rope_head_dim}: use an even "
            "number"
        )
    # Configs of transformers state as many as heads, which is allowed.
    if model.num_kv_heads not in (None, model.num_heads):
        raise UserError(
            f"num_kv_heads is {model.num_kv_heads}, and latent attention (kv_lora_rank {rank}) computes keys and "
            f"values of all num_heads {model.num_heads}: remove num_kv_heads"
        )
    for name, why in UNSUPPORTED.items():
        if (value := getattr(model, name)) != getattr(default, name):
            raise UserError(f"{name} is {value}, and latent attention (kv_lora_rank {rank}) {why}: remove {name}")


UNSUPPORTED = {
    "head_dim": "has heads of qk_nope_head_dim + qk_rope_head_dim",
    "attention_sinks": "has no sinks",
    "parallel_residual": "is not combined with parallel layers",
    "qk_norm": "normalizes latents instead of queries and keys",
    "qkv_clip": "does not clip queries, keys and values",
    "rope_fraction": "rotates qk_rope_head_dim of each head",
}
"""Setting -> why latent attention does not read it."""
