"""Translates mesh, pipeline schedule, checkpoints and logging of a Megatron-LM run."""

from mtjax.convert.from_megatron.translated import Translation
from mtjax.convert.megatron_stages import EMBEDDING, LOSS, stage_layers, uneven_arguments
from mtjax.errors import UserError
from mtjax.layout.mesh import MeshShape
from mtjax.layout.stages import balanced_layers

_ZERO_STAGES = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}


def translate_mesh(to: Translation) -> MeshShape:
    """Adds the mesh, and the batch size that depends on it, to a translation; returns the mesh.

    Raises:
      UserError: the number of GPUs is not a multiple of the parallel degrees.
    """
    tensor, stages, context, experts = (
        to.get(f"{kind}_parallel_size") for kind in ("tensor_model", "pipeline_model", "context", "expert_model")
    )
    gpus_per_replica = tensor * stages * context
    gpus = to.given.gpus
    if gpus is None:
        gpus = gpus_per_replica * experts
        to.differences.append(
            f"--mesh: the number of GPUs is unknown; assuming {gpus}, the least possible: add --gpus N"
        )
    if gpus % gpus_per_replica:
        raise UserError(
            f"{to.given.source}: {gpus} GPUs are not a multiple of {gpus_per_replica} (tensor {tensor} x pipeline"
            f" {stages} x context {context}): add --gpus N with a multiple"
        )
    # Data-parallel ranks, which in mtjax include the expert-parallel ranks.
    replicas = gpus // gpus_per_replica
    if replicas % experts:
        raise UserError(
            f"{to.given.source} has {replicas} data-parallel ranks, not a multiple of --expert-model-parallel-size"
            f" {experts}: in mtjax, expert-parallel ranks are a subset of the data-parallel ranks"
        )
    groups = to.get("num_distributed_optimizer_instances")
    shard, remainder = divmod(replicas // experts, groups)
    if groups > 1 and (remainder or shard == 1):
        raise UserError(
            f"{to.given.source} has --num-distributed-optimizer-instances {groups}, and {replicas // experts} "
            "data-parallel ranks to divide into that many sharding groups of 2 or more: add --gpus N with a multiple"
        )
    data, shard = (groups, shard) if groups > 1 else (shard, 1)
    mesh = MeshShape(data=data, stage=stages, shard=shard, context=context, expert=experts, model=tensor)
    to.settings["mesh"] = str(mesh)
    # Megatron's default: one microbatch on each data parallel rank.
    if "global_batch_size" not in to.settings and "microbatch_size" in to.settings:
        to.set("global_batch_size", {"global_batch_size": to.settings["microbatch_size"] * replicas})
    if "global_batch_size" not in to.settings:
        raise UserError(f"{to.given.source}: --micro-batch-size and --global-batch-size are missing or can't be read")
    return mesh


def translate_layout(to: Translation, mesh: MeshShape) -> None:
    """Adds pipeline schedule, ZeRO stage and communication methods to a translation.

    Raises:
      UserError: the virtual stages do not divide the layers.
    """
    _pipeline(to, mesh)
    if to.has("sequence_parallel") and to.get("tensor_model_parallel_size") == 1:
        to.settings.pop("sequence_parallel")
        to.unneeded["sequence_parallel"] = "without tensor parallelism, Megatron ignores it, and it is not translated"
    if to.has("use_distributed_optimizer"):
        to.set("use_distributed_optimizer", {"zero": 1})
    if to.has("use_megatron_fsdp"):
        # After --use-distributed-optimizer, which Megatron FSDP needs beside it: the later setting wins.
        to.set("use_megatron_fsdp", {"zero": _ZERO_STAGES.get(to.get("data_parallel_sharding_strategy"), 0)})
    if to.has("use_torch_fsdp2"):
        to.set("use_torch_fsdp2", {"zero": 3})
    if to.get("context_parallel_size") > 1:
        kind = to.get("cp_comm_type")
        # Megatron takes one kind for each layer, mtjax one for all: ring attention only if no layer gathers.
        is_gather = "allgather" in (kind if isinstance(kind, tuple) else (kind,))
        to.set("cp_comm_type", {"context_method": "all-gather" if is_gather else "ring"})
    if "capacity_factor" in to.settings:
        to.unneeded["moe_token_dispatcher_type"] = "with --capacity-factor, tokens are always dispatched by all-to-all"
    elif to.get("expert_model_parallel_size") > 1:
        # Megatron's default.
        kind = to.given.values.get("moe_token_dispatcher_type", "allgather")
        to.set("moe_token_dispatcher_type", {"expert_dispatch": "all-gather" if kind == "allgather" else "all-to-all"})
    size = to.given.values.get("expert_tensor_parallel_size")
    if size == to.get("tensor_model_parallel_size"):
        to.unneeded["expert_tensor_parallel_size"] = "the same in mtjax"
    if to.has("deterministic_mode"):
        to.set("deterministic_mode", {"deterministic": True})
    if to.has("check_weight_hash_across_dp_replicas_interval"):
        steps = to.get("check_weight_hash_across_dp_replicas_interval")
        to.set("check_weight_hash_across_dp_replicas_interval", {"check_replicas": steps})


def _pipeline(to: Translation, mesh: MeshShape) -> None:
    """Adds the schedule, and the layers of each stage if they are uneven.

    Raises:
      UserError: the stages do not divide the layers.
    """
    stages, layers = to.get("pipeline_model_parallel_size"), to.get("num_layers")
    chunks = to.given.values.get("num_virtual_stages_per_pipeline_rank")
    if (per_chunk := to.given.values.get("num_layers_per_virtual_pipeline_stage")) is not None:
        counted = layers + to.has(EMBEDDING) + to.has(LOSS)
        if counted % (stages * per_chunk):
            raise UserError(
                f"{to.given.source}: --num-layers {layers} is not a multiple of --pipeline-model-parallel-size {stages}"
                f" x --num-layers-per-virtual-pipeline-stage {per_chunk}"
            )
        chunks = counted // stages // per_chunk
    if uneven := uneven_arguments(to.given.values):
        if stages > 1:
            chunks = _uneven(to, layers, stages, chunks or 1)
        else:
            to.unneeded |= dict.fromkeys(uneven, "without pipeline stages, Megatron ignores it")
    if chunks is not None and chunks > 1:
        to.settings |= {"pipeline_schedule": "interleaved", "chunks": chunks}
    if mesh.has_pipeline and to.settings.get("recompute") == "full":
        # In a pipeline mtjax saves the input of every layer, which is the method uniform with 1 layer.
        for setting in ("recompute_method", "recompute_num_layers"):
            value = to.settings.pop(setting, None)
            if value not in (None, "uniform", 1):
                to.unsupported[setting] = "with pipeline stages, mtjax recomputes every layer separately"


def _uneven(to: Translation, layers: int, stages: int, chunks: int) -> int:
    """Adds the layers of each stage, or where mtjax has no such stages, shares as equal as possible; returns the number
    of chunks.

    Raises:
      UserError: the arguments do not divide the layers.
    """
    arguments = {**to.given.values, "virtual_pipeline_model_parallel_size": chunks}
    theirs = [[len(part) for part in row] for row in stage_layers(arguments, layers, to.given.source)]
    chunks, ours = len(theirs[0]), tuple(map(sum, theirs))
    # mtjax stacks the chunks of a stage in one array, so all of them have the same number of layers.
    if any(len(set(row)) > 1 or not row[0] for row in theirs):
        shares = balanced_layers(layers, stages, chunks)
        chunks = chunks if shares else 1
        ours = shares or balanced_layers(layers, stages) or ours
        parts = "; ".join(", ".join(map(str, row)) for row in theirs)
        to.differences.append(
            f"--layers-per-stage {','.join(map(str, ours))}: Megatron's stages have {parts} layers; in mtjax all chunks"
            " of a stage have the same number, and at least one"
        )
    if len(set(ours)) > 1:
        to.settings["layers_per_stage"] = list(ours)
    return chunks
