"""What tensor parallelism and pipeline stages must divide in the layers of a model, by the kinds of layers it has."""

from collections.abc import Iterator

from mtjax.config import Model
from mtjax.config.sizes import dense_layers, expert_size, mlp_size
from mtjax.config.ssm import has_attention, has_state_space, letters_of, ssm_groups, ssm_heads
from mtjax.layout.plan import Plan


def split_heads(model: Model) -> list[tuple[str, str, int]]:
    """Returns (logical axis, setting, size) of the heads of attention and of layers with a recurrent state."""
    heads = [("heads", "num_heads", model.num_heads)] if has_attention(model) else []
    return [*heads, ("heads", "ssm_heads", ssm_heads(model))] if has_state_space(model) else heads


def inner_widths(model: Model) -> list[tuple[str, str, int]]:
    """Returns (logical axis, setting, size) of the inner width of MLPs and of experts."""
    letters = letters_of(model)
    # Layers that are an MLP, and shared blocks, which have one.
    has_mlp = bool(set("-Zz") & set(letters)) if letters else not model.num_experts or dense_layers(model)
    dense = [("mlp", "mlp_size", mlp_size(model))] if has_mlp else []
    if not model.num_experts:
        return dense
    experts = [("mlp", "expert_size", expert_size(model)), ("mlp", "shared_expert_size", model.shared_expert_size)]
    return [experts[0], *dense, experts[1]]


def state_space_problems(model: Model, plan: Plan) -> Iterator[str]:
    """Yields groups of heads that can neither be sharded nor shared by tensor parallel ranks, and pieces of samples on
    context parallel ranks that are shorter than the convolution."""
    if not has_state_space(model):
        return
    # A piece's first tokens read the last of the piece before it, and of no other.
    pieces, taps = 2 * plan.mesh.context, model.ssm_conv - 1
    if pieces > 2 and model.sequence_length // pieces < taps:
        yield (
            f"sequence_length {model.sequence_length} in {pieces} pieces, 2 for each of {plan.mesh.context} context "
            f"parallel ranks, is shorter than the {taps} tokens before a token that ssm_conv {model.ssm_conv} reads: "
            f"use {pieces * taps} or more"
        )
    yield from sharing_problems("ssm_groups", ssm_groups(model), model, plan)


def sharing_problems(name: str, count: int, model: Model, plan: Plan) -> Iterator[str]:
    """Yields a number of key heads, or of groups of heads, that tensor parallel ranks can neither shard nor share."""
    heads = plan.layout(model).rules.heads
    degree = plan.mesh.degree(heads)
    if count % degree and degree % count:
        yield (
            f"{name} {count} is neither a multiple nor a divisor of the {plan.mesh.degree_text(heads)}; choose a "
            f"tensor parallel degree that divides {count} or is a multiple of it"
        )
