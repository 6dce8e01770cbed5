"""Answers of conversations against transformers: packed here, each in a row of its own there; five steps of AdamW."""

from typing import Any

import numpy as np
import pytest

from mtjax.finetune.chat_encoding import EncodedSample
from mtjax.finetune.chat_samples import PackedChats
from mtjax.sharding.global_batch import global_batch
from tests.parity.compare import shaken
from tests.parity.test_finetune import GPT2, LLAMA, check_five_steps, program_of

torch = pytest.importorskip("torch", reason="needs the extra parity: pip install '.[parity]'")
transformers = pytest.importorskip("transformers", reason="needs the extra parity: pip install '.[parity]'")

LENGTH, BATCH = 16, 8
SHARED = {"num_key_value_heads": 2}
CASES = {
    "gpt2": ("GPT2LMHeadModel", GPT2, "1x1", {}),
    "llama, fewer key heads than ways, split sequences": (
        "LlamaForCausalLM",
        LLAMA | SHARED,
        "2x4",
        {"sequence_parallel": True, "microbatch_size": 2, "zero": 1},
    ),
    "llama, stages": ("LlamaForCausalLM", LLAMA | SHARED, "data=2,stage=2,model=2", {"microbatch_size": 2}),
}


def network_of(kind: str, settings: dict[str, Any]) -> Any:
    """transformers' model with random weights."""
    model = getattr(transformers, kind)
    return shaken(lambda: model(model.config_class(**settings))).float()


def chats() -> list[EncodedSample]:
    """Conversations of different lengths, of two turns each."""
    random = np.random.default_rng(0)
    written = []
    while len(PackedChats.of(written, LENGTH, 0)) < BATCH:
        size = int(random.integers(5, LENGTH + 2))
        learnt = np.zeros(size, bool)
        learnt[2:4], learnt[size - int(random.integers(1, 3)) :] = True, True
        written.append(EncodedSample(random.integers(1, 250, size).astype(np.int32), learnt))
    return written


def packed_batch(written: list[EncodedSample]) -> dict[str, np.ndarray]:
    packed = PackedChats.of(written, LENGTH, 0)
    assert len(packed) == BATCH
    assert max(map(len, packed.packs)) > 1
    samples = [packed[i] for i in range(BATCH)]
    batch = {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}
    return batch | {"sample_index": np.arange(BATCH, dtype=np.uint32)}


def their_loss(network: Any, written: list[EncodedSample]) -> Any:
    """The mean over all tokens of answers, as their labels of -100 have it."""
    longest = max(len(chat.ids) for chat in written)
    ids = torch.zeros(len(written), longest, dtype=torch.long)
    labels, mask = torch.full_like(ids, -100), torch.zeros_like(ids)
    for row, chat in enumerate(written):
        size = len(chat.ids)
        ids[row, :size], mask[row, :size] = torch.tensor(chat.ids).long(), 1
        labels[row, :size] = torch.tensor(np.where(chat.trained, chat.ids, -100)).long()
    # A token of learned positions more than a sequence here has: the last is a label only.
    return network(ids[:, : longest - 1], attention_mask=mask[:, : longest - 1], labels=None).logits, labels


def mean_loss(network: Any, written: list[EncodedSample]) -> Any:
    logits, labels = their_loss(network, written)
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_packed_answers_give_the_losses_and_gradients_of_single_conversations(case, tmp_path):
    kind, settings, mesh, fields = case
    network, written = network_of(kind, settings), chats()
    network.save_pretrained(tmp_path)
    resets = {"reset_position_ids": True, "reset_attention_mask": True}
    program, trunk = program_of(tmp_path, mesh, fields | resets)
    state, host = program.initialize(0, trunk.read(program)), packed_batch(written)
    batch = global_batch(program.batch_sharding, {n: host[n] for n in program.batch_names}, BATCH)
    check_five_steps(program, state, batch, network, lambda: mean_loss(network, written), tmp_path)
