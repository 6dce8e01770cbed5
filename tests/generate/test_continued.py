"""The text sample at the end of a run equals the engine's text with the same weights, for any training mesh."""

from functools import cache
from typing import Any

import pytest

from mtjax.generate import training_sample as continued
from mtjax.generate.decoder import GenerationPrograms
from mtjax.generate.engine import Engine
from mtjax.generate.request import Request
from mtjax.generate.training_sample import SAMPLING, continue_text, lower_continuation, reshard_for_generation
from mtjax.models.sharded_model import ShardedModel
from tests.tiny import VOCAB, initial_state, program_of

LAYERS = {"num_layers": 5}
EXPERTS = {
    "num_layers": 4,
    "family": "llama",
    "num_experts": 4,
    "moe_every": 2,
    "first_dense_layers": 1,
    "router_linear_bias": True,
    "expert_bias": True,
    "shared_expert_size": 16,
    "shared_expert_gate": True,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
# model, mesh, how it is spread there: layers in another order with empty places, ZeRO-3, split sequences, samples that
# ranks share, and two stacks whose layers take turns.
CASES: list[Any] = [
    pytest.param(
        LAYERS,
        "2x2x2",
        {"layers_per_stage": (3, 2), "sequence_parallel": True, "zero": 3, "microbatch_size": 1},
        id="stages",
        marks=pytest.mark.long,
    ),
    pytest.param(
        EXPERTS, "data=1,stage=2,expert=2,model=2", {"microbatch_size": 1}, id="experts", marks=pytest.mark.long
    ),
    pytest.param(LAYERS, "data=2,context=2,model=2", {"zero": 1}, id="context", marks=pytest.mark.long),
]


class Numbers:
    """A tokenizer that encodes characters as their code points."""

    eod, vocab_size = 0, VOCAB - 100

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


TOKENIZER: Any = Numbers()


@cache
def written_alone(model: tuple[tuple[str, Any], ...]) -> str:
    """Returns the engine's text with weights on one device."""
    program = program_of("1x1", **dict(model))
    decoder = GenerationPrograms(program, initial_state(program).parameters, vocab_size=TOKENIZER.vocab_size)
    engine, ids = Engine(decoder, sequences=1), TOKENIZER.encode("hello")

    def on_token(token: Any) -> bool:
        ids.append(token.id)
        return False

    engine.submit(Request(tuple(ids), SAMPLING, frozenset({TOKENIZER.eod}), on_token=on_token))
    engine.run()
    assert len(ids) > 8 and max(ids) < TOKENIZER.vocab_size
    return TOKENIZER.decode(ids)


ALL_WRITE = {"stages": pytest.mark.long}
"""Stages have the most to move; the other models' weights are moved in the same way."""


@pytest.mark.parametrize(
    ("model", "mesh", "layout", "devices"),
    [
        pytest.param(
            *case.values,
            devices,
            id=f"{case.id}-{devices}",
            marks=[*case.marks, *([mark] if mark else [])],
        )
        for case in CASES
        for devices, mark in (
            ("one writes", None),
            ("all write", ALL_WRITE.get(str(case.id), pytest.mark.exhaustive)),
        )
    ],
)
def test_sample_equals_that_of_one_device(model, mesh, layout, devices, monkeypatch):
    program = program_of(mesh, **model, **layout)
    if devices == "all write":
        monkeypatch.setattr(continued, "generation_model", everywhere)
    text = continue_text(program, initial_state(program).parameters, TOKENIZER, "hello ")
    assert text == written_alone(tuple(model.items()))


def everywhere(trained: ShardedModel) -> ShardedModel:
    """Reshards over all devices, as on GPUs."""
    writer = reshard_for_generation(trained, list(trained.mesh.devices.flat))
    assert writer.mesh.size == trained.mesh.size > 1
    return writer


def test_long_prompt_is_truncated_to_its_end():
    program = program_of("1x1", **LAYERS)
    parameters = initial_state(program).parameters
    text = continue_text(program, parameters, TOKENIZER, "a long prompt, of which the second half is read: hello")
    assert text.startswith(TOKENIZER.decode(TOKENIZER.encode("d: hello")))
    assert len(text.split()) <= program.config.model.sequence_length


def test_programs_are_lowered_without_weights():
    """`mtjax compile` lowers as many programs as are run."""
    names = [lowered.as_text()[:60] for lowered in lower_continuation(program_of("1x1", **LAYERS), TOKENIZER, "hello")]
    assert len(names) == 7, names
