"""Megatron-Core's hybrid model, with layers in torch for those of Transformer Engine, mamba-ssm and causal-conv1d.

`python -m tests.parity.megatron_core.hybrid MODE FOLDER`, in a process of its own. `save` writes each model for
several degrees in the format torch, in the format torch_dist, and its logits; `load` loads strictly, in `written`, what
mtjax wrote in the format torch_dist, and compares every tensor.
"""

import argparse
import re
import sys
import types
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from tests.parity.megatron_core.world import without_cuda


class GatedNorm(torch.nn.Module):
    """mamba-ssm's RMS norm over groups; its gate was applied before."""

    def __init__(self, size: int, eps: float, group_size: int, **_: Any) -> None:
        super().__init__()
        self.weight, self.eps, self.group_size = torch.nn.Parameter(torch.ones(size)), eps, group_size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        groups = x.unflatten(-1, (-1, self.group_size))
        return F.rms_norm(groups, (self.group_size,), eps=self.eps).flatten(-2) * self.weight


def scan(
    joined: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, dt_bias: torch.Tensor, A: torch.Tensor, **named: Any
) -> torch.Tensor:
    """mamba-ssm's fused kernel of convolution, scan and gate, as the recurrence that it computes, token by token."""
    heads, width, groups, (size, length, _) = len(A), named["headdim"], named["ngroups"], joined.shape
    inner, channels = heads * width, len(weight)
    z, mixed, dt = joined.split([inner, channels, heads], -1)
    padded = F.pad(mixed.transpose(1, 2), (weight.shape[1] - 1, 0))
    mixed = F.silu(F.conv1d(padded, weight[:, None], bias, groups=channels)).transpose(1, 2)
    x, b, c = mixed.split([inner, *[(channels - inner) // 2] * 2], -1)
    x = x.view(size, length, heads, width)
    b, c = (m.view(size, length, groups, -1).repeat_interleave(heads // groups, 2) for m in (b, c))
    dt, state, outputs = F.softplus(dt + dt_bias), torch.zeros(size, heads, width, b.shape[-1]), []
    for t in range(length):
        step = dt[:, t, :, None, None]
        state = torch.exp(step * A[:, None, None]) * state + step * x[:, t, ..., None] * b[:, t, :, None]
        outputs.append((state * c[:, t, :, None]).sum(-1) + named["D"][:, None] * x[:, t])
    return torch.stack(outputs, 1).flatten(-2) * F.silu(z)


def rearrange(x: torch.Tensor, how: str) -> torch.Tensor:
    """Those of einops that training needs."""
    return x[:, 0] if how == "d 1 w -> d w" else x.transpose(0, 1)


def l2norm(x: torch.Tensor) -> torch.Tensor:
    """That of flash-linear-attention."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def stand_ins() -> None:
    """Puts the above in the place of modules that are not installed; call it before Megatron is imported."""
    found = {
        "mamba_ssm.ops.triton.selective_state_update": {"selective_state_update": None},
        "mamba_ssm.ops.triton.layernorm_gated": {"RMSNorm": GatedNorm},
        "mamba_ssm.ops.triton.ssd_combined": {
            "mamba_chunk_scan_combined": None,
            "mamba_split_conv1d_scan_combined": scan,
        },
        "einops": {"rearrange": rearrange, "repeat": None},
        "fla.modules.l2norm": {"l2norm": l2norm},
        "fla.ops.gated_delta_rule": {"chunk_gated_delta_rule": None},
    }
    kernels = types.ModuleType("tensor_ops")  # of inference, in triton
    vars(kernels).update(dict.fromkeys(("tensor_get_slice_after", "tensor_masked_update", "tensor_merge")))
    sys.modules["megatron.core.inference.contexts.attention_context.triton.tensor_ops"] = kernels
    for path, members in found.items():
        for name in [path[: i or None] for i in (*(i for i, c in enumerate(path) if c == "."), 0)]:
            sys.modules.setdefault(name, types.ModuleType(name))
        vars(sys.modules[path]).update(members)


stand_ins()
without_cuda()
torch.cuda.synchronize = lambda *_: None  # pyright: ignore[reportAttributeAccessIssue]

from megatron.core import dist_checkpointing
from megatron.core.activations import squared_relu
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.models.mamba.mamba_layer_specs import mamba_stack_spec
from megatron.core.models.mamba.mamba_model import MambaModel
from megatron.core.ssm import mamba_block
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from tests.parity.megatron_core.cases import HYBRID_SPLITS, HYBRIDS, VOCAB
from tests.parity.megatron_core.models import config_of, fill, logits_of, save, sharded
from tests.parity.megatron_core.world import world


class NormedColumn(ColumnParallelLinear):
    """Transformer Engine's linear layer that begins with a norm."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **named: Any) -> None:
        super().__init__(input_size, output_size, config=config, **named)
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(input_size))
        self.eps = config.layernorm_epsilon

    def forward(self, input_: torch.Tensor, *rest: Any, **named: Any) -> Any:
        normed = F.rms_norm(input_, input_.shape[-1:], self.layer_norm_weight, self.eps)
        return super().forward(normed, *rest, **named)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        own = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(own, prefix, {"weight": 0}, sharded_offsets)


def mixer_of(pattern: str) -> Any:
    """What builds attention, or in the layers G of a pattern a gated delta net.

    Version 0.16 has both, and no letter G: that of 0.17 has a gated delta net in attention's place in a layer without
    an MLP, which this builds.
    """

    class Mixer:  # a function is not called
        def __new__(cls, submodules: Any, *, layer_number: int, **named: Any) -> Any:
            if pattern[layer_number - 1] != "G":
                return SelfAttention(submodules=submodules, layer_number=layer_number, **named)
            own = GatedDeltaNetSubmodules(in_proj=NormedColumn, out_norm=WrappedTorchNorm, out_proj=RowParallelLinear)
            return GatedDeltaNet(named["config"], own, layer_number, pg_collection=named["pg_collection"])

    return Mixer


def spec(pattern: str) -> Any:
    """Megatron's own, with layers that run on a CPU."""
    layers: Any = mamba_stack_spec.submodules
    layers.attention_layer.submodules.self_attention.module = mixer_of(pattern)
    layers.mamba_layer.submodules.mixer.submodules.in_proj = NormedColumn
    layers.mamba_layer.submodules.mixer.submodules.out_proj = RowParallelLinear
    attention = layers.attention_layer.submodules.self_attention.submodules
    attention.linear_qkv, attention.linear_proj = NormedColumn, RowParallelLinear
    attention.core_attention = DotProductAttention
    mlp = layers.mlp_layer.submodules.mlp.submodules
    mlp.linear_fc1, mlp.linear_fc2 = NormedColumn, RowParallelLinear
    experts = layers.moe_layer.submodules
    experts.pre_mlp_layernorm = WrappedTorchNorm
    experts.mlp = get_moe_module_spec(use_te=False, num_experts=8, moe_grouped_gemm=False)
    mamba_block.TENorm = WrappedTorchNorm
    return mamba_stack_spec


def build(a: dict[str, Any], tensor: int = 1, pipeline: int = 1, expert: int = 1) -> Any:
    """The model of the rank in the current process groups."""
    from megatron.core import parallel_state

    config = config_of(a, tensor, pipeline, expert)
    config.activation_func = squared_relu if a["squared_relu"] else F.silu
    config.deterministic_mode = "linear_num_key_heads" in a  # a gated delta net in torch
    for name in a:
        if name.startswith(("mamba_", "linear_")) or name == "attention_output_gate":
            setattr(config, name, a[name])
    model = MambaModel(
        config,
        spec(a["hybrid_override_pattern"]),
        vocab_size=a["padded_vocab_size"],
        max_sequence_length=a["max_position_embeddings"],
        hybrid_override_pattern=a["hybrid_override_pattern"].replace("G", "*"),
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
        position_embedding_type=a["position_embedding_type"],
    )
    return model.eval()


def shaken(a: dict[str, Any]) -> Any:
    """A whole model, of which every parameter matters; the same at every call."""
    torch.manual_seed(0)
    model = build(a)
    with torch.no_grad():
        for name, parameter in (*model.named_parameters(), *model.named_buffers()):
            if parameter.dim() == 1 and parameter.is_floating_point():
                parameter.add_(0.1 * torch.randn_like(parameter))
            elif name.endswith("conv1d.weight"):
                parameter.copy_(0.4 * torch.randn_like(parameter))
    return model


def save_all(a: dict[str, Any], folder: Path) -> None:
    """Writes a model's logits, its distributed checkpoint and the files of every split."""
    with world(), torch.no_grad():
        model = shaken(a)
        tokens = np.random.default_rng(1).integers(0, VOCAB - 6, (2, 25))
        target = folder / "distributed"
        target.mkdir(parents=True)
        np.savez(folder / "logits.npz", tokens=tokens, logits=logits_of(model, tokens).numpy())
        whole = sharded(model)
        args = argparse.Namespace(**a, layernorm_epsilon=a["norm_epsilon"])
        common = {"args": args, "checkpoint_version": 3.0, "iteration": 1}
        dist_checkpointing.save(common | {"model": model.sharded_state_dict()}, str(target))
    for split in HYBRID_SPLITS:
        for rank in range(prod(split)):
            with world(*split, rank), torch.no_grad():
                part = build(a, *split)
                fill(part, whole)
                save(part, a, folder / "x".join(map(str, split)), split)


def load(a: dict[str, Any], folder: Path) -> None:
    """Loads what mtjax wrote strictly, and compares with the model; the padding of the vocabulary may differ."""
    with world(), torch.no_grad():
        model, again = shaken(a), build(a)
        found: Any = dist_checkpointing.load(
            {"model": again.sharded_state_dict()}, str(folder / "written/release"), strict="return_all"
        )
        loaded, missing, unexpected = found
        # Transformer Engine's norms and attention have a state.
        unread = {key for key in (*missing, *unexpected) if not re.search("norm._extra|attention._extra", key)}
        assert not unread, unread
        again.load_state_dict(loaded["model"])
        for tensor, value in model.state_dict().items():
            if torch.is_tensor(value):
                rows = VOCAB - 6 if tensor in ("embedding.word_embeddings.weight", "output_layer.weight") else None
                assert torch.equal(again.state_dict()[tensor][:rows], value[:rows]), tensor


def main(mode: str, folder: Path) -> None:
    """See the module."""
    for name, a in HYBRIDS.items():
        {"save": save_all, "load": load}[mode](a, folder / name)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
