"""What 2D tensor parallelism is not compatible with."""

from collections.abc import Iterator

from mtjax.config import Model
from mtjax.config.families import is_decoder
from mtjax.config.sizes import embedding_width
from mtjax.layout.plan import Plan
from mtjax.layout.rules import MODEL


def width_problems(model: Model, plan: Plan) -> Iterator[str]:
    """Yields what a plan whose residual stream is sharded along its width is not compatible with."""
    mesh, ways, width = plan.mesh, plan.mesh.model, model.hidden_size
    if ways == 1:
        yield f"tensor_layout 2d needs tensor parallelism, and mesh {mesh} has model=1: use model=2 or more, or 1d"
    elif width % ways:
        yield f"hidden_size {width} is not divisible by the {mesh.degree_text((MODEL,))}, as tensor_layout 2d needs"
    if plan.zero != 3:
        yield f"tensor_layout 2d shards matrices in blocks, by --zero 3, and zero is {plan.zero}: use --zero 3, or 1d"
    if plan.sequence_parallel:
        yield "tensor_layout 2d and sequence_parallel both shard the residual stream over model: remove one of the two"
    for name, value in _unsupported(model, plan):
        yield f"tensor_layout 2d does not support {name} ({value}): use 1d, with sequence_parallel"


def _unsupported(model: Model, plan: Plan) -> Iterator[tuple[str, object]]:
    """Yields what of a run 2D tensor parallelism does not support, with its value."""
    mesh, width = plan.mesh, model.hidden_size
    if not is_decoder(model):
        yield "the family", model.family
    if model.head != "language":
        yield "a task's head", model.head
    settings = {
        "pipeline parallelism": ("stage", mesh.stage, 1),
        "context parallelism": ("context", mesh.context, 1),
        "experts": ("num_experts", model.num_experts, 0),
        "latent attention": ("kv_lora_rank", model.kv_lora_rank, 0),
        "layers of several kinds": ("layer_pattern", model.layer_pattern, ""),
        "products in 8 bits": ("fp8", plan.fp8, "none"),
        "LoRA": ("lora_rank", model.lora_rank, 0),
        "multi-token prediction": ("mtp_num_layers", model.mtp_num_layers, 0),
        "a teacher": ("teacher_width", plan.teacher_width, 0),
        "groups of recomputed layers": ("recompute_num_layers", plan.recompute_group, 1),
        "recompute of some layers": ("recompute_method block, recompute_num_layers", plan.recompute_first, None),
        "offloading": ("recompute_offload", plan.recompute_offload, False),
        "other places of norms": ("norm_placement", model.norm_placement, "pre"),
        "parallel sublayers": ("parallel_residual", model.parallel_residual, "no"),
        "embeddings of another width": ("embedding_size", embedding_width(model), width),
        "a norm of the embeddings": ("embedding_norm", model.embedding_norm, False),
        "a first layer without a norm": ("first_attention_norm", model.first_attention_norm, True),
    }
    for what, (name, value, supported) in settings.items():
        if value is not None and value != supported:
            yield what, f"{name} {value}"
