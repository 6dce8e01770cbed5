"""Checks of the settings of attention."""

from mtjax.config.model import Model
from mtjax.errors import UserError

OF_QK_NORM = ("qk_norm_scope", "qk_norm_kind", "qk_norm_bias", "qk_norm_after_rope")


def check_attention(model: Model) -> None:
    """Checks that the settings of QK norm and of the first layer's norm are consistent.

    Raises:
      UserError: they are not; names two settings that do not go together.
    """
    if not model.first_attention_norm and (model.norm_placement != "pre" or model.parallel_residual != "no"):
        raise UserError(
            f"first_attention_norm false needs norm_placement pre and parallel_residual no, and they are "
            f"{model.norm_placement} and {model.parallel_residual}: remove first_attention_norm"
        )
    if model.family == "bert" and model.embedding_norm and model.norm_placement == "post":
        raise UserError("norm_placement post has a norm on the embeddings already: remove embedding_norm")
    default = Model()
    if not model.qk_norm:
        for name in OF_QK_NORM:
            if getattr(model, name) != getattr(default, name):
                raise UserError(f"{name} is {getattr(model, name)}, and qk_norm is off: set qk_norm, or remove {name}")
        return
    if model.qk_norm_bias and model.qk_norm_kind != "layernorm":
        raise UserError(
            f"qk_norm_bias needs qk_norm_kind layernorm, and it is {model.qk_norm_kind}: remove one of the two"
        )
    if model.qk_norm_scope == "width" and model.qk_norm_kind != "rmsnorm":
        raise UserError(
            f"qk_norm_scope width needs qk_norm_kind rmsnorm, and it is {model.qk_norm_kind}: remove one of the two"
        )
    if model.norm_weight == "none":
        raise UserError("qk_norm needs weights, and norm_weight is none: remove one of the two")
    if model.qk_norm_after_rope and model.position != "rope":
        raise UserError(
            f"qk_norm_after_rope needs position rope, and position is {model.position}: remove qk_norm_after_rope"
        )
