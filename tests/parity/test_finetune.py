"""Finetuning against transformers' own heads: gradients, and the losses of five steps of AdamW."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from mtjax.commands.convert import main as convert
from mtjax.config import replace
from mtjax.convert.hugging_face import HuggingFaceSource
from mtjax.convert.saved_model import Hints
from mtjax.convert.table import name_of, with_vocab
from mtjax.finetune.pretrained_trunk import PretrainedTrunk
from mtjax.sharding.global_batch import global_batch
from mtjax.sharding.param_specs import dotted
from mtjax.train.step import State, TrainStep, make_train_step
from tests.parity.compare import relative, shaken
from tests.parity.converted import without_unused_positions
from tests.tiny import mesh_of, tiny_config

torch = pytest.importorskip("torch", reason="needs the extra parity: pip install '.[parity]'")
transformers = pytest.importorskip("transformers", reason="needs the extra parity: pip install '.[parity]'")

WORDS, LENGTH, BATCH, TOLERANCE = 250, 16, 8, 1e-5
BERT = {"vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
BERT |= {"num_attention_heads": 4, "max_position_embeddings": LENGTH, "pad_token_id": 0}
BERT |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "attn_implementation": "eager"}
ROBERTA = BERT | {"max_position_embeddings": LENGTH + 2, "pad_token_id": 1, "type_vocab_size": 1}
DISTILBERT = {"vocab_size": WORDS, "dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 4}
DISTILBERT |= {"max_position_embeddings": LENGTH, "attn_implementation": "eager"}
DISTILBERT |= dict.fromkeys(("dropout", "attention_dropout", "qa_dropout", "seq_classif_dropout"), 0.0)
GPT2 = {"vocab_size": WORDS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": LENGTH, "pad_token_id": 0}
GPT2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "attn_implementation": "eager"}
LLAMA = {"vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "pad_token_id": 0}
LLAMA |= {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": LENGTH}
CHOICE, ANSWERING = "MultipleChoice", "QuestionAnswering"
CASES = {
    "bert": ("Bert", BERT, 3, "1x1", {}),
    "bert, split sequences": ("Bert", BERT, 3, "2x4", {"sequence_parallel": True}),
    "megatron-bert, numbers, layers computed again": ("MegatronBert", BERT, 1, "2x2", {"recompute": "full"}),
    "gpt2, split sequences": ("GPT2", GPT2, 2, "2x4", {"sequence_parallel": True}),
    "llama, stages": ("Llama", LLAMA, 1, "data=2,stage=2,model=2", {"microbatch_size": 2}),
    "bert, choices": ("Bert", BERT, CHOICE, "2x2", {"microbatch_size": 4, "sequence_parallel": True}),
    "roberta, split sequences": ("Roberta", ROBERTA, 3, "2x4", {"sequence_parallel": True}),
    "roberta, choices": ("Roberta", ROBERTA, CHOICE, "1x1", {}),
    "roberta, spans": ("Roberta", ROBERTA, ANSWERING, "1x1", {}),
    "distilbert, split sequences": ("DistilBert", DISTILBERT, 3, "2x4", {"sequence_parallel": True}),
    "distilbert, spans": ("DistilBert", DISTILBERT, ANSWERING, "1x1", {}),
    "bert, spans": ("Bert", BERT, ANSWERING, "1x1", {}),
    "bert, spans of split sequences": ("Bert", BERT, ANSWERING, "2x4", {"sequence_parallel": True}),
}


SELDOM = ("bert, split sequences", "bert, choices", "bert, spans")
SELDOM += ("roberta, split sequences", "roberta, spans", "distilbert, spans")
"""Another type has their head, or another head of their type is computed on their mesh: for `make test-layouts`."""


def network_of(kind: str, settings: dict[str, Any], labels: int | str) -> Any:
    """transformers' model with random weights and a head: of so many classes, or the one of that name."""
    more = {"num_labels": labels} if isinstance(labels, int) else {}
    config = getattr(transformers, f"{kind}Config")(**settings, **more)
    head = "SequenceClassification" if isinstance(labels, int) else labels
    network = shaken(lambda: getattr(transformers, f"{kind}For{head}")(config))
    return network.float()


def labels_of(labels: int | str, random: np.random.Generator) -> np.ndarray:
    """Classes, numbers, the right one of each four rows, or the ends of answers."""
    if labels == 1:
        return random.normal(size=BATCH).astype(np.float32)
    if labels == ANSWERING:
        return random.integers(0, 3, (BATCH, 2)).astype(np.int32)
    each, most = (4, 4) if isinstance(labels, str) else (1, labels)
    return np.repeat(random.integers(0, most, BATCH // each), each).astype(np.int32)


def rows(labels: int | str, pad: int) -> dict[str, np.ndarray]:
    """Rows of different lengths, with ids from 2 on."""
    random = np.random.default_rng(0)
    place, lengths = np.arange(LENGTH), random.integers(3, LENGTH + 1, (BATCH, 1))
    mask = (place < lengths).astype(np.int32)
    return {
        "tokens": np.where(mask, random.integers(2, WORDS, (BATCH, LENGTH)), pad).astype(np.int32),
        "token_types": ((place >= lengths // 2) * mask).astype(np.int32),
        "padding_mask": mask,
        "label": labels_of(labels, random),
        "weight": np.ones(BATCH, np.float32),
        "sample_index": np.arange(BATCH, dtype=np.uint32),
    }


def their_loss(network: Any, batch: dict[str, np.ndarray]) -> Any:
    names = {"input_ids": "tokens", "attention_mask": "padding_mask"}
    names |= {"token_type_ids": "token_types"} if hasattr(network, "bert") else {}
    given = {theirs: torch.tensor(batch[ours]).long() for theirs, ours in names.items()}
    labels = torch.tensor(batch["label"])
    labels = labels.long() if labels.dtype == torch.int32 else labels
    if type(network).__name__.endswith(ANSWERING):
        found = network(**given)  # their own loss gives padding a probability, so that it depends on its length
        logits = torch.stack([found.start_logits, found.end_logits], 1)
        is_padding = (given["attention_mask"] == 0)[:, None]
        return torch.nn.functional.cross_entropy(
            logits.masked_fill(is_padding, -torch.inf).flatten(0, 1), labels.flatten()
        )
    if type(network).__name__.endswith(CHOICE):
        given = {name: array.reshape(-1, 4, LENGTH) for name, array in given.items()}
        labels = labels[::4]
    return network(**given, labels=labels).loss


def as_theirs(folder: Path, tree: Any) -> dict[str, np.ndarray]:
    """Arrays like our parameters under transformers' names."""
    named = {dotted(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
    found = {}
    for parameter, layer, tensor in HuggingFaceSource(folder)._weights.selection.tensors():
        array = named[parameter.name] if layer is None else named[parameter.name][layer]
        array = tensor.extract(with_vocab(array, parameter, WORDS), parameter)
        found[name_of(tensor, layer)] = np.pad(array, [(tensor.skip, 0)] + [(0, 0)] * (array.ndim - 1))
    return found


def program_of(folder: Path, mesh: str, fields: dict[str, Any]) -> tuple[TrainStep, PretrainedTrunk]:
    trunk = PretrainedTrunk(f"hf:{folder}", Hints(256))
    model = vars(trunk.saved.config.model)
    config = replace(tiny_config(), **model | {"hidden_dropout": 0.0, "attention_dropout": 0.0, "attention": "xla"})
    rates = {"learning_rate": 3e-4, "warmup_steps": 0, "initial_learning_rate": 0.0, "min_learning_rate": 3e-4}
    rates |= {"decay_style": "constant", "weight_decay": 0.0, "epsilon": 1e-4}
    return make_train_step(replace(config, mesh=mesh, **rates, **fields), mesh_of(mesh)), trunk


def check_steps(program: TrainStep, state: State, batch: Any, learnt: list[Any], loss: Callable[[], Any]) -> State:
    """Five steps of AdamW on their `learnt` tensors and on ours: losses and norms. Returns the state after them."""
    optimizer = torch.optim.AdamW(learnt, lr=3e-4, eps=1e-4, weight_decay=0.0)
    for step in range(5):
        optimizer.zero_grad()
        theirs = loss()
        theirs.backward()
        norm = torch.nn.utils.clip_grad_norm_(learnt, 1.0)
        optimizer.step()
        state, results = program.step(state, batch)
        assert abs(float(results["loss"]) / theirs.item() - 1) < TOLERANCE, step
        assert abs(float(results["grad_norm"]) / norm.item() - 1) < TOLERANCE, step
    return state


def check_five_steps(
    program: TrainStep, state: Any, batch: Any, network: Any, loss: Callable[[], Any], folder: Path
) -> dict[str, np.ndarray]:
    """Gradients, and five steps of AdamW, beside transformers' `network` and its `loss`; returns our gradients."""
    mine, _, gradients = program.on_mesh(jax.jit(lambda p, b: program.gradients(p, b, None)), state.parameters, batch)
    theirs = loss()
    theirs.backward()
    assert abs(float(mine) / theirs.item() - 1) < TOLERANCE
    expected = {name: p.grad.numpy() for name, p in network.named_parameters()}
    found = as_theirs(folder, gradients)
    largest = max(np.abs(array).max() for array in expected.values())
    for name, array in expected.items():
        tiny = np.abs(array).max() < 1e-6 * largest  # keys' biases have no effect: theirs are rounding errors
        assert tiny or relative(found[name], array) < TOLERANCE, name

    check_steps(program, state, batch, list(network.parameters()), loss)
    return found


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=[pytest.mark.exhaustive] if name in SELDOM else [])
        for name, case in CASES.items()
    ],
)
def test_losses_and_gradients_are_those_of_transformers_own_head(case, tmp_path):
    kind, settings, labels, mesh, fields = case
    network = network_of(kind, settings, labels)
    network.save_pretrained(tmp_path)
    program, trunk = program_of(tmp_path, mesh, fields)
    trunk.check(program)
    state, host = program.initialize(0, trunk.read(program)), rows(labels, network.config.pad_token_id)
    batch = global_batch(program.batch_sharding, {n: host[n] for n in program.batch_names}, BATCH)

    found = check_five_steps(program, state, batch, network, lambda: their_loss(network, host), tmp_path)
    assert set(found) == {name for name, _ in network.named_parameters()}


def test_a_base_model_lends_its_trunk_and_pooler_and_the_head_comes_from_the_seed(tmp_path):
    network = network_of("Bert", BERT, 3)
    network.bert.save_pretrained(tmp_path)
    trunk = PretrainedTrunk(f"hf:{tmp_path}", Hints(256))
    config = replace(
        tiny_config(),
        **vars(trunk.saved.config.model) | {"head": "classification", "num_labels": 3, "attention": "xla"},
    )
    drawn = []
    for seed in (1, 1, 2):
        program = make_train_step(replace(config, seed=seed, sequence_length=8), mesh_of("1x1"))
        trunk.check(program)
        parameters = trunk.read(program)
        pooler = network.bert.pooler.dense.weight.detach().numpy()
        np.testing.assert_array_equal(parameters["head"]["pooler"]["weight"], pooler.T)
        positions = network.bert.embeddings.position_embeddings.weight.detach().numpy()
        np.testing.assert_array_equal(parameters["positions"], positions[:8])
        drawn.append(np.asarray(parameters["head"]["classifier"]["weight"]))
    assert (drawn[0] == drawn[1]).all()
    assert (drawn[0] != drawn[2]).all()


@pytest.mark.parametrize(
    ("kind", "settings", "labels"),
    [
        *(("Bert", BERT, 3), ("GPT2", GPT2, 1), ("Llama", LLAMA, 4), ("Bert", BERT, CHOICE), ("Bert", BERT, ANSWERING)),
        *(("Roberta", ROBERTA, 3), ("XLMRoberta", ROBERTA, CHOICE), ("DistilBert", DISTILBERT, 1)),
    ],
)
def test_heads_travel_to_transformers_and_back(kind, settings, labels, tmp_path):
    network = network_of(kind, settings, labels)
    without_unused_positions(network)
    if isinstance(labels, int):
        network.config.id2label = {i: f"name {i}" for i in range(labels)}
    network.save_pretrained(tmp_path / "theirs")
    assert convert(["--from", f"hf:{tmp_path / 'theirs'}", "--to", f"mtjax:{tmp_path / 'ours'}"]) == 0
    assert convert(["--from", f"mtjax:{tmp_path / 'ours'}", "--to", f"hf:{tmp_path / 'back'}"]) == 0
    head = labels if isinstance(labels, str) else "SequenceClassification"
    back = getattr(transformers, f"AutoModelFor{head}").from_pretrained(tmp_path / "back")
    assert type(back) is type(network)
    if isinstance(labels, int) and labels > 1:
        assert back.config.id2label == network.config.id2label
    tensors = back.state_dict()
    for name, tensor in network.state_dict().items():
        assert torch.equal(tensors[name], tensor), name
