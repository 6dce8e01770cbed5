"""Multi-token prediction of megatron-core's GPTModel: losses, and gradients of their sum with the model's loss."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

from tests.parity.megatron_core.cases import AHEAD, MODELS, TOKENS, VOCAB
from tests.parity.megatron_core.models import build, config_of, save
from tests.parity.megatron_core.world import world


def _predicting(a: dict[str, Any]) -> GPTModel:
    config = config_of(a)
    config.mtp_num_layers, config.mtp_loss_scaling_factor = AHEAD["layers"], AHEAD["factor"]
    layer = get_gpt_layer_local_spec(normalization=a["normalization"])
    ahead: Any = get_gpt_mtp_block_spec(config, layer, use_transformer_engine=False)  # its own type is too narrow
    return GPTModel(
        config,
        layer,
        vocab_size=a["padded_vocab_size"],
        max_sequence_length=a["max_position_embeddings"],
        share_embeddings_and_output_weights=not a["untie_embeddings_and_output_weights"],
        position_embedding_type=a["position_embedding_type"],
        mtp_block_spec=ahead,
        **({"rotary_base": a["rotary_base"]} if "rotary_base" in a else {}),
    )


def write_predictions(folder: Path, name: str) -> None:
    """`NAME ahead.npz`: batch, losses, gradients by name, and what is not in a layer; `NAME ahead/K`, a checkpoint of a
    model of one layer: that of the K-th layer ahead, or of the model itself for 0."""
    a = MODELS[name]
    random = np.random.default_rng(3)
    text = random.integers(0, VOCAB, (4, TOKENS + 1))
    mask = (random.random((4, TOKENS)) < [[0.9], [0.5], [0.2], [0.7]]).astype(np.float32)
    with world():
        torch.manual_seed(1)
        model = _predicting(a)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(0.1 * torch.randn_like(parameter))
        weights, length = torch.from_numpy(mask), TOKENS
        positions = torch.arange(length)[None].expand(4, -1)
        hidden = torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool), 1)
        tokens, labels = (torch.from_numpy(part).long() for part in (text[:, :-1], text[:, 1:]))
        losses = model.train()(tokens, positions, hidden, labels=labels, loss_mask=weights)
        loss = (losses * weights).sum() / weights.sum()
        loss.backward()
        state = {n: p.detach().numpy() for n, p in model.named_parameters()}
        found = {f"gradient {n}": p.grad.numpy() for n, p in model.named_parameters() if p.grad is not None}
        found |= {n: value for n, value in state.items() if n.startswith("mtp.") and "transformer_layer" not in n}
        ahead = MTPLossLoggingHelper.tracker["values"].numpy()
        found |= {"text": text, "mask": mask, "loss": np.array(loss.item()), "ahead": ahead}
        np.savez(folder / f"{name} ahead.npz", allow_pickle=False, **found)
        for number in range(AHEAD["layers"] + 1):
            one = a if number == 0 else a | {"num_layers": 1}
            part = build(one)
            into = dict(part.named_parameters())
            for theirs, value in state.items():
                target = theirs
                if number:
                    target = theirs.replace(f"mtp.layers.{number - 1}.transformer_layer.", "decoder.layers.0.")
                    if theirs.startswith("decoder.") or (target == theirs and theirs.startswith("mtp.")):
                        continue
                elif theirs.startswith("mtp."):
                    continue
                with torch.no_grad():
                    into[target].copy_(torch.from_numpy(value))
            save(part, one, folder / f"{name} ahead" / str(number), (1, 1, 1))
