"""GPTs and Llamas of megatron-core: built as Megatron-LM builds them of its arguments, and saved as it saves them."""

import argparse
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

from tests.parity.megatron_core.cases import MODELS, TOKENS, VOCAB, splits_of
from tests.parity.megatron_core.world import world

ITERATION = 10


EXPERTS = (
    *("moe_layer_freq", "moe_router_topk", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"),
    *("moe_router_score_function", "moe_router_pre_softmax", "moe_router_topk_scaling_factor"),
    *("moe_router_num_groups", "moe_router_group_topk", "moe_router_enable_expert_bias"),
    "moe_shared_expert_gate",
)
"""Arguments that its config has under the same names."""


STAGES = {
    "decoder_first_pipeline_num_layers": "num_layers_in_first_pipeline_stage",
    "decoder_last_pipeline_num_layers": "num_layers_in_last_pipeline_stage",
    **{name: name for name in ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")},
    "pipeline_model_parallel_layout": "pipeline_model_parallel_layout",
}
"""Arguments of uneven pipeline stages, and their names in its config."""


def config_of(
    a: dict[str, Any], tensor: int = 1, pipeline: int = 1, expert: int = 1, chunks: int | None = None
) -> TransformerConfig:
    """As `core_transformer_config_from_args` makes it; everything that CUDA alone has is off."""
    return TransformerConfig(
        num_layers=a["num_layers"],
        hidden_size=a["hidden_size"],
        num_attention_heads=a["num_attention_heads"],
        num_query_groups=a["num_query_groups"] if a["group_query_attention"] else None,
        kv_channels=a["kv_channels"],
        ffn_hidden_size=a["ffn_hidden_size"],
        add_bias_linear=a["add_bias_linear"],
        gated_linear_unit=a["swiglu"],
        activation_func=F.silu if a["swiglu"] else F.gelu,
        bias_activation_fusion=a["bias_gelu_fusion"],
        normalization=a["normalization"],
        layernorm_epsilon=a["norm_epsilon"],
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method_std=a.get("init_method_std", 0.2),
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        virtual_pipeline_model_parallel_size=chunks,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        qk_layernorm=a.get("qk_layernorm", False),
        expert_model_parallel_size=expert,
        num_moe_experts=a.get("num_experts"),
        **({name: a[name] for name in EXPERTS} if "num_experts" in a else {}),
        **({theirs: a[name] for name, theirs in STAGES.items() if name in a} if pipeline > 1 else {}),
    )


def build(
    a: dict[str, Any],
    tensor: int = 1,
    pipeline: int = 1,
    expert: int = 1,
    chunks: int | None = None,
    chunk: int | None = None,
) -> GPTModel:
    """The model of the rank in the current process groups; with interleaved stages the model of one chunk."""
    rope = {"rotary_base": a["rotary_base"], "rope_scaling": a["use_rope_scaling"]} if "rotary_base" in a else {}
    rope |= {"rope_scaling_factor": a["rope_scaling_factor"]} if a.get("use_rope_scaling") else {}
    config, norm = config_of(a, tensor, pipeline, expert, chunks), a["normalization"]
    interleaved: dict[str, Any] = {"ignore_virtual": False, "vp_stage": chunk}
    if "num_experts" in a:
        layers: Any = get_gpt_decoder_block_spec(
            config, use_transformer_engine=False, normalization=norm, vp_stage=chunk
        )
    else:
        layers = get_gpt_layer_local_spec(normalization=norm)
    model = GPTModel(
        config,
        layers,
        vocab_size=a["padded_vocab_size"],
        max_sequence_length=a["max_position_embeddings"],
        pre_process=parallel_state.is_pipeline_first_stage(**interleaved),
        post_process=parallel_state.is_pipeline_last_stage(**interleaved),
        share_embeddings_and_output_weights=not a["untie_embeddings_and_output_weights"],
        position_embedding_type=a["position_embedding_type"],
        vp_stage=chunk,
        **rope,
    )
    return model.eval()


def shaken(a: dict[str, Any]) -> GPTModel:
    """A whole model, whose norms and biases matter too; the same at every call."""
    torch.manual_seed(0)
    model = build(a)
    with torch.no_grad():
        for parameter in (*model.parameters(), *model.buffers()):
            if parameter.dim() == 1 and parameter.is_floating_point():
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def logits_of(model: GPTModel, tokens: np.ndarray, labels: Any = None) -> torch.Tensor:
    """[batch, tokens, vocabulary], or with `labels` the loss of each, [batch, tokens]."""
    size, length = tokens.shape
    positions = torch.arange(length)[None].expand(size, -1)
    hidden = torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool), 1)
    return model(torch.from_numpy(tokens).long(), positions, hidden, labels=labels)


def sharded(model: GPTModel) -> dict[Any, ShardedTensor]:
    """Where each of a rank's tensors stands in the whole model, by the rules of Megatron's distributed checkpoints.

    Keyed by the name there, the layer, and 0 or 1 for the gate and the other half of a gated layer, which stand one
    after the other on every rank.
    """
    found: dict[Any, ShardedTensor] = {}
    for entry in model.sharded_state_dict().values():
        halves = entry.build() if isinstance(entry, ShardedTensorFactory) else [entry]
        for half, part in enumerate(halves):
            if isinstance(part, ShardedTensor):
                found[part.key, part.global_offset[: part.prepend_axis_num], half] = part
    return found


def fill(model: GPTModel, whole: Mapping[Any, ShardedTensor]) -> None:
    """Gives a rank's model its parts of the whole model's tensors."""
    for place, part in sharded(model).items():
        ahead, source = part.prepend_axis_num, whole[place]
        starts = [a - b for a, b in zip(part.global_offset, source.global_offset, strict=True)][ahead:]
        at = tuple(slice(start, start + size) for start, size in zip(starts, part.data.shape, strict=True))
        part.data.copy_(source.data[at])


def save(model: GPTModel, a: dict[str, Any], folder: Path, split: tuple[int, int, int]) -> None:
    """As Megatron-LM's `--ckpt-format torch` names files and what is in them."""
    tensor, pipeline, expert = split
    ranks = f"_{parallel_state.get_pipeline_model_parallel_rank():03}" if pipeline > 1 else ""
    ranks += f"_{parallel_state.get_expert_model_parallel_rank():03}" if expert > 1 else ""
    path = folder / f"iter_{ITERATION:07}" / f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02}{ranks}"
    path.mkdir(parents=True)
    sizes = {"tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": pipeline}
    sizes |= {"expert_model_parallel_size": expert, "expert_tensor_parallel_size": tensor} if "num_experts" in a else {}
    content = {
        "args": argparse.Namespace(**a, **sizes, params_dtype=torch.float32, layernorm_epsilon=a["norm_epsilon"]),
        "checkpoint_version": 3.0,
        "iteration": ITERATION,
        "model": model.state_dict_for_save_checkpoint(),
    }
    torch.save(content, path / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text(str(ITERATION))


def write_models(folder: Path) -> None:
    """For every model: `NAME/TENSORxPIPELINExEXPERT`, a checkpoint, and `NAME.npz`, its logits."""
    tokens = np.random.default_rng(1).integers(0, VOCAB - 6, (2, TOKENS))
    for name, a in MODELS.items():
        with world():
            model = shaken(a)
            whole = sharded(model)
            with torch.no_grad():
                np.savez(folder / f"{name}.npz", tokens=tokens, logits=logits_of(model, tokens).numpy())
        for split in splits_of(name):
            for rank in range(prod(split)):
                with world(*split, rank):
                    part = build(a, *split)
                    with torch.no_grad():
                        fill(part, whole)
                    save(part, a, folder / name / "x".join(map(str, split)), split)
