"""PyTorch's side: models of the same shape, with torch.compile, flash attention and fused AdamW.

Parameters in float32, matrix products in bfloat16 by autocast, as in mtjax; accumulated gradients, clipping.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpu_kit.child import Child, next_tokens
from gpu_kit.clock import seconds_of
from gpu_kit.shapes import SHAPES, config_of
from mtjax.analysis.anatomy import anatomy_of
from mtjax.analysis.flops import model_flops
from mtjax.config import Config
from mtjax.config.sizes import padded_vocab_size
from mtjax.errors import UserError


def run(child: Child, name: str, memory: float) -> dict[str, Any]:
    """Times the step of a shape on one GPU.

    Raises:
      UserError: torch is built without CUDA, or finds no GPU.
    """
    if not (torch.cuda.is_available() or child.rehearse):
        raise UserError(f"torch {torch.__version__} finds no GPU: PyTorch's side is skipped")
    config = config_of(SHAPES[name], memory, rehearse=child.rehearse)
    torch.set_float32_matmul_precision("high")
    device = "cpu" if child.rehearse else "cuda"
    network: nn.Module = Decoder(config).to(device)
    step = Step(config, network, device)
    step()  # compiles
    child.wait_for_turn()
    found = seconds_of(step, step.wait)
    flops = model_flops(anatomy_of(config.model)) * config.training.global_batch_size
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else None
    count = sum(p.numel() for p in network.parameters())
    tflops = flops / found["seconds"] / 1e12
    return found | {"parameters": count, "tflops": tflops, "peak_bytes": peak, "loss": float(step.loss)}


class Step:
    """An optimizer step: gradient accumulation, clipping, AdamW."""

    def __init__(self, config: Config, network: nn.Module, device: str) -> None:
        optimizer, size = config.optimizer, config.training.microbatch_size
        self.network, self.device, self.clip = network, device, optimizer.clip_grad_norm
        self.optimizer = torch.optim.AdamW(
            network.parameters(), lr=optimizer.learning_rate, weight_decay=optimizer.weight_decay, fused=True
        )
        self.forward = torch.compile(network)
        batch = next_tokens(config, 0)
        arrays = (torch.tensor(batch[key], dtype=torch.long, device=device) for key in ("tokens", "labels"))
        self.microbatches = list(zip(*(array.split(size or len(array)) for array in arrays), strict=True))
        self.loss = torch.zeros(())

    def __call__(self) -> None:
        """Starts a step; returns before the GPU has finished it."""
        for tokens, labels in self.microbatches:
            with torch.autocast(self.device, dtype=torch.bfloat16):
                self.loss = self.forward(tokens, labels) / len(self.microbatches)
            self.loss.backward()
        nn.utils.clip_grad_norm_(self.network.parameters(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def wait(self) -> None:
        """Blocks until the GPU has finished."""
        if self.device == "cuda":
            torch.cuda.synchronize()


class Decoder(nn.Module):
    """Embedding, layers, norm, output and loss."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        model = config.model
        rows, width = padded_vocab_size(model), model.hidden_size
        self.is_llama = model.family == "llama"
        self.tokens = nn.Embedding(rows, width)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.positions = None if self.is_llama else nn.Embedding(model.sequence_length, width)
        self.dropout = nn.Dropout(model.hidden_dropout)
        block = LlamaBlock if self.is_llama else GPTBlock
        self.blocks = nn.ModuleList(block(config) for _ in range(model.num_layers))
        self.norm = nn.RMSNorm(width, eps=1e-5) if self.is_llama else nn.LayerNorm(width)
        self.output = nn.Linear(width, rows, bias=False)
        if not self.is_llama:
            self.output.weight = self.tokens.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Computes the mean loss of tokens [batch, sequence]."""
        hidden = self.tokens(tokens)
        if self.positions is not None:
            hidden = self.dropout(hidden + self.positions.weight[: tokens.shape[1]])
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.output(self.norm(hidden))
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


class GPTBlock(nn.Module):
    """Pre-norm attention and GELU MLP, with biases."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width, self.heads = config.model.hidden_size, config.model.num_heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.of_scores, self.dropout = config.model.attention_dropout, nn.Dropout(config.model.hidden_dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        """Returns the hidden states after the layer, [batch, sequence, width]."""
        query, key, value = (
            x.unflatten(-1, (self.heads, -1)).transpose(1, 2) for x in self.qkv(self.norm_1(hidden)).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=self.of_scores, is_causal=True)
        hidden = hidden + self.dropout(self.output(mixed.transpose(1, 2).flatten(2)))
        return hidden + self.dropout(self.down(F.gelu(self.up(self.norm_2(hidden)), approximate="tanh")))


class LlamaBlock(nn.Module):
    """Pre-norm grouped-query attention with rotary embeddings and SwiGLU MLP, without biases."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        model = config.model
        width, self.heads, self.groups = model.hidden_size, model.num_heads, model.num_kv_heads or model.num_heads
        head, inner = width // self.heads, model.mlp_size or 4 * width
        self.norm_1, self.norm_2 = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.query, self.output = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.key, self.value = (nn.Linear(width, self.groups * head, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)
        angles = torch.outer(
            torch.arange(model.sequence_length), torch.exp(-math.log(1e4) * torch.arange(0, head, 2) / head)
        )
        self.register_buffer("cosines", angles.cos(), persistent=False)
        self.register_buffer("sines", angles.sin(), persistent=False)

    def rotate(self, x: Tensor) -> Tensor:
        """Applies rotary embeddings to [batch, heads, sequence, head]."""
        cosines, sines = self.get_buffer("cosines"), self.get_buffer("sines")
        first, second = x.chunk(2, dim=-1)
        rotated = (first * cosines - second * sines, second * cosines + first * sines)
        return torch.cat(rotated, dim=-1).to(x.dtype)

    def forward(self, hidden: Tensor) -> Tensor:
        """Returns the hidden states after the layer, [batch, sequence, width]."""
        normed = self.norm_1(hidden)
        query = self.query(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        key, value = (f(normed).unflatten(-1, (self.groups, -1)).transpose(1, 2) for f in (self.key, self.value))
        mixed = F.scaled_dot_product_attention(
            self.rotate(query), self.rotate(key), value, is_causal=True, enable_gqa=self.groups < self.heads
        )
        hidden = hidden + self.output(mixed.transpose(1, 2).flatten(2))
        normed = self.norm_2(hidden)
        return hidden + self.down(F.silu(self.gate(normed)) * self.up(normed))
