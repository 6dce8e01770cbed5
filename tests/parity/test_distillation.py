"""Distillation against torch: the Kullback-Leibler divergence from transformers' teacher to transformers' student."""

from typing import Any

import jax
import numpy as np
import pytest

from mtjax.convert.saved_model import Hints
from mtjax.finetune.teacher import Teacher
from mtjax.sharding.global_batch import global_batch
from mtjax.train.step import TrainStep
from tests.parity.test_chats import chats, network_of, packed_batch, their_loss
from tests.parity.test_finetune import ANSWERING, BATCH, BERT, CHOICE, LENGTH, LLAMA, check_five_steps, program_of, rows
from tests.parity.test_finetune import network_of as classifier_of

torch = pytest.importorskip("torch", reason="needs the extra parity: pip install '.[parity]'")

SHARE, TEMPERATURE = 0.7, 3.0
WIDER = {"hidden_size": 48, "num_hidden_layers": 4}
TAUGHT = {"teacher_weight": SHARE, "teacher_temperature": TEMPERATURE, "teacher": "a test"}


def mixed(logits: Any, teacher: Any, labels: Any) -> Any:
    """(1 - w) cross-entropy + w T^2 KL, means over rows of logits."""
    log = [torch.log_softmax(a / TEMPERATURE, -1) for a in (logits, teacher.detach())]
    soft = torch.nn.functional.kl_div(*log, log_target=True, reduction="batchmean") * TEMPERATURE**2
    return (1 - SHARE) * torch.nn.functional.cross_entropy(logits, labels) + SHARE * soft


def taught(program: TrainStep, folder: Any, host: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    """A batch with what the teacher in a folder adds."""
    batch = global_batch(program.batch_sharding, {n: host[n] for n in program.batch_names}, BATCH)
    return Teacher(f"hf:{folder}", Hints(256)).load(program)(batch)


CHATS = [
    ("2x4", {"sequence_parallel": True, "microbatch_size": 2, "zero": 3}),
    pytest.param("1x1", {}, marks=pytest.mark.exhaustive),
    pytest.param("data=2,stage=2,model=2", {"microbatch_size": 2}, marks=pytest.mark.exhaustive),
]


@pytest.mark.parametrize("mesh, fields", CHATS)
def test_a_student_of_tokens_learns_as_torch_says(mesh, fields, tmp_path):
    student, teacher = (network_of("LlamaForCausalLM", LLAMA | more) for more in ({}, WIDER))
    for name, network in (("student", student), ("teacher", teacher)):
        network.save_pretrained(tmp_path / name)
    written = chats()
    resets = {"reset_position_ids": True, "reset_attention_mask": True, "teacher_width": WIDER["hidden_size"]}
    program, trunk = program_of(tmp_path / "student", mesh, fields | resets | TAUGHT)
    state, batch = (
        program.initialize(0, trunk.read(program)),
        taught(program, tmp_path / "teacher", packed_batch(written)),
    )

    def loss() -> Any:
        (logits, labels), (soft, _) = their_loss(student, written), their_loss(teacher, written)
        learnt = labels[:, 1:] != -100
        return mixed(logits[learnt], soft[learnt], labels[:, 1:][learnt])

    check_five_steps(program, state, batch, student, loss, tmp_path / "student")


@pytest.mark.parametrize(
    "labels", [3, *(pytest.param(kind, marks=pytest.mark.exhaustive) for kind in (CHOICE, ANSWERING))]
)
def test_a_student_of_labels_learns_as_torch_says(labels, tmp_path):
    student, teacher = (classifier_of("Bert", BERT | more, labels) for more in ({}, WIDER))
    for name, network in (("student", student), ("teacher", teacher)):
        network.save_pretrained(tmp_path / name)
    host = rows(labels, pad=0)
    program, trunk = program_of(tmp_path / "student", "2x2", {"sequence_parallel": True, "microbatch_size": 4} | TAUGHT)
    state, batch = program.initialize(0, trunk.read(program)), taught(program, tmp_path / "teacher", host)
    names = {"input_ids": "tokens", "attention_mask": "padding_mask", "token_type_ids": "token_types"}
    given = {theirs: torch.tensor(host[ours]).long() for theirs, ours in names.items()}
    wanted = torch.tensor(host["label"]).long()
    if labels == CHOICE:
        given, wanted = {name: array.reshape(-1, 4, LENGTH) for name, array in given.items()}, wanted[::4]

    def logits_of(network: Any) -> Any:
        found = network(**given)
        if labels != ANSWERING:
            return found.logits
        both = torch.stack([found.start_logits, found.end_logits], 1)
        return both.masked_fill((given["attention_mask"] == 0)[:, None], -1e30).flatten(0, 1)

    def loss() -> Any:
        return mixed(logits_of(student), logits_of(teacher), wanted.flatten())

    check_five_steps(program, state, batch, student, loss, tmp_path / "student")
