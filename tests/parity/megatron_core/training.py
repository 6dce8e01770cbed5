"""Twenty steps of megatron-core's GPTModel with its own loss, gradient clipping, optimizer and scheduler."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from tests.parity.megatron_core.cases import MODELS, RUN, TOKENS, VOCAB
from tests.parity.megatron_core.models import logits_of, shaken
from tests.parity.megatron_core.world import world


def _optimizer(model: Any) -> tuple[Any, OptimizerParamScheduler]:
    """Its own; without Apex and Transformer Engine, what it wraps is torch's AdamW."""
    settings = OptimizerConfig(
        optimizer="adam",
        lr=RUN["max_lr"],
        min_lr=RUN["min_lr"],
        weight_decay=RUN["end_wd"],
        adam_beta2=RUN["beta2"],
        adam_eps=RUN["epsilon"],
        clip_grad=RUN["clip_grad"],
    )
    optimizer = get_megatron_optimizer(settings, [model])
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=RUN["max_lr"],
        min_lr=RUN["min_lr"],
        lr_warmup_steps=RUN["warmup"] * RUN["batch"],
        lr_decay_steps=RUN["steps"] * RUN["batch"],
        lr_decay_style="cosine",
        start_wd=RUN["start_wd"],
        end_wd=RUN["end_wd"],
        wd_incr_steps=RUN["steps"] * RUN["batch"],
        wd_incr_style="linear",
    )
    return optimizer, scheduler


def batches() -> dict[str, np.ndarray]:
    """Every step's texts, with one more token than a sample, and which labels count."""
    random = np.random.default_rng(2)
    size = (RUN["steps"], RUN["batch"])
    # Some tokens are more frequent than others, so that there is something to learn.
    tokens = random.geometric(0.02, (*size, TOKENS + 1)) % (VOCAB - 6)
    return {"text": tokens.astype(np.int32), "mask": (random.random((*size, TOKENS)) < 0.8).astype(np.float32)}


def _step(model: Any, optimizer: Any, scheduler: Any, text: np.ndarray, mask: np.ndarray) -> tuple[float, float, float]:
    """Loss, gradient norm before clipping, and the rate that the update took; as `train_step` of Megatron-LM."""
    model.zero_grad_buffer()
    optimizer.zero_grad()
    losses = logits_of(model, text[:, :-1], labels=torch.from_numpy(text[:, 1:]).long())
    weights = torch.from_numpy(mask)
    loss = (losses * weights).sum() / weights.sum()
    loss.backward()
    model.finish_grad_sync()
    rate = optimizer.param_groups[0]["lr"]
    _, norm, _ = optimizer.step()
    scheduler.step(increment=len(text))
    return loss.item(), norm, rate


def write_run(folder: Path, name: str) -> None:
    """`NAME run.npz`: the batches, and each step's loss, gradient norm and learning rate."""
    with world():
        a = MODELS[name]
        inner = shaken(a)
        model = DistributedDataParallel(inner.config, DistributedDataParallelConfig(), inner)
        optimizer, scheduler = _optimizer(model)
        given = batches()
        steps = [
            _step(model, optimizer, scheduler, text, mask)
            for text, mask in zip(given["text"], given["mask"], strict=True)
        ]
        loss, norm, rate = np.array(steps).T
        np.savez(folder / f"{name} run.npz", allow_pickle=False, **given, loss=loss, norm=norm, rate=rate)
