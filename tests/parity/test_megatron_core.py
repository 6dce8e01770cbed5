"""The real megatron-core: its checkpoints, samples, schedules and training, held against ours.

It runs in one process of its own, for its process groups and what stands in for CUDA there are of the whole process.
Where there is neither Apex nor Transformer Engine, its local layers compute, and torch's AdamW is in its optimizer.
"""

import json
import subprocess
import sys
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from mtjax import config as configs
from mtjax.commands.convert import main
from mtjax.convert.megatron_experts import by_expert
from mtjax.convert.mtjax_folder import MtjaxSource
from mtjax.data.corpus.indexed import IndexedDataset
from mtjax.data.corpus.writer import IndexedWriter
from mtjax.data.samples.blend import BlendedDataset, normalize, samples_of_each
from mtjax.data.samples.split import SPLITS as PARTS
from mtjax.data.samples.split import split_bounds
from mtjax.families.gpt.samples import GPTDataset, GPTOptions
from mtjax.runtime.checkpoints.weights import find_weights, restore_weights
from mtjax.sharding.global_batch import global_batch
from mtjax.train.step import make_train_step
from tests.parity.compare import relative
from tests.parity.converted import our_logits
from tests.parity.megatron_core.cases import (
    AHEAD,
    CORPORA,
    COUNTS,
    DATASETS,
    EOD,
    MODELS,
    RUN,
    SCHEDULES,
    SEQUENCE,
    VOCAB,
    splits_of,
)
from tests.tiny import mesh_of

NEEDED = [name for name in ("torch", "transformers", "safetensors") if find_spec(name) is None]
# Not `find_spec("megatron.core")`, which imports the parent: `megatron` is a name that other packages have too.
NEEDED += [] if find_spec("megatron") else ["megatron-core"]
pytestmark = [
    pytest.mark.skipif(bool(NEEDED), reason=f"needs the extra parity, which has {', '.join(NEEDED)}"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning"),
]
ROOT = Path(__file__).parents[2]
TABLE = ROOT / "tests/train/megatron_schedules.json"
SPLIT_MODELS = pytest.mark.parametrize(
    ("name", "split"),
    [
        pytest.param(name, split, id=f"{name}-{'x'.join(map(str, split))}")
        for name in MODELS
        for split in splits_of(name)
    ],
)
MODEL = pytest.mark.parametrize("name", MODELS)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What megatron-core wrote; `ours` in it holds corpora that we did."""
    folder = tmp_path_factory.mktemp("megatron")
    (folder / "ours").mkdir()
    for name in CORPORA:
        write_corpus(folder / "ours" / name)
    command = [sys.executable, "-O", "-W", "ignore", "-m", "tests.parity.megatron_core", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def write_corpus(prefix: Path) -> None:
    """Texts of one and of several sequences."""
    random = np.random.default_rng(len(prefix.name))
    with IndexedWriter(prefix, np.dtype("<u2")) as writer:
        for _ in range(9):
            lengths = random.integers(1, 30, random.integers(1, 4))
            writer.add(random.integers(0, VOCAB, lengths.sum()), lengths, np.array([len(lengths)]))
        writer.finish()


@pytest.fixture(scope="module")
def converted(theirs: Path) -> dict[str, Path]:
    """Their models, each of one file, as our weights."""
    for name in MODELS:
        convert(f"megatron:{theirs / 'models' / name / '1x1x1'}", f"mtjax:{theirs / 'converted' / name}")
    return {name: theirs / "converted" / name for name in MODELS}


def convert(source: str, target: str, *options: str) -> None:
    padded = ("--vocab-multiple", "512") if source.startswith("megatron:") and target.startswith("mtjax:") else ()
    assert main(["--from", source, "--to", target, *padded, *options]) == 0


def fingerprints(folder: Path) -> dict[str, int]:
    return find_weights(folder).metadata["fingerprints"]


def logits_of(theirs: Path, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Texts, and their logits of them without the padding of the vocabulary."""
    saved = np.load(theirs / "models" / f"{name}.npz")
    return saved["tokens"].astype(np.int32), saved["logits"][..., : VOCAB - 6]


@MODEL
def test_their_models_give_their_logits_in_ours(name: str, theirs: Path, converted: dict[str, Path]) -> None:
    tokens, logits = logits_of(theirs, name)
    assert relative(our_logits(converted[name], tokens, "2x4"), logits) < 1e-5


@SPLIT_MODELS
def test_any_split_of_theirs_is_the_same_model(
    name: str, split: tuple[int, int, int], theirs: Path, converted: dict[str, Path], tmp_path: Path
) -> None:
    """The ranks' parts are those of Megatron's distributed checkpoints: each of its modules says where they stand."""
    folder = theirs / "models" / name / "x".join(map(str, split))
    assert len(list(folder.rglob("model_optim_rng.pt"))) == prod(split)
    convert(f"megatron:{folder}", f"mtjax:{tmp_path / 'ours'}")
    assert fingerprints(tmp_path / "ours") == fingerprints(converted[name])


@SPLIT_MODELS
def test_what_we_write_is_what_they_do(
    name: str, split: tuple[int, int, int], theirs: Path, converted: dict[str, Path], tmp_path: Path
) -> None:
    """File by file and tensor by tensor, to the bit, under the same names."""
    import torch

    sizes = (f"--{kind}={count}" for kind, count in zip(("tensor", "pipeline", "expert"), split, strict=True))
    sizes = (*sizes, "--transformer-impl", "local")
    convert(f"mtjax:{converted[name]}", f"megatron:{tmp_path / 'ours'}", *sizes)
    folder = theirs / "models" / name / "x".join(map(str, split)) / "iter_0000010"
    files = [path.relative_to(folder) for path in folder.rglob("*.pt")]
    assert sorted(path.relative_to(tmp_path / "ours/release") for path in tmp_path.rglob("*.pt")) == sorted(files)
    for place in files:
        expected = torch.load(folder / place, weights_only=False)
        found = torch.load(tmp_path / "ours/release" / place, weights_only=False)
        tensors = {n: t for n, t in expected["model"].items() if torch.is_tensor(t)}
        assert found["model"].keys() == tensors.keys()
        for tensor, value in tensors.items():
            real = real_rows(tensor, split, place, len(value))  # the padding of the vocabulary is zeros in ours
            assert torch.equal(found["model"][tensor][:real], value[:real]), f"{place} {tensor}"
            assert found["model"][tensor].shape == value.shape
        for argument in MODELS[name]:
            assert getattr(found["args"], argument) == MODELS[name][argument], argument


def real_rows(tensor: str, split: tuple[int, ...], place: Path, rows: int) -> int:
    """Rows of a rank's tensor that are not padding."""
    if tensor not in ("embedding.word_embeddings.weight", "output_layer.weight"):
        return rows
    rank = int(place.parts[0].split("_")[2])
    return min(rows, VOCAB - 6 - rank * (VOCAB // split[0]))


def test_experts_of_one_tensor_are_what_it_computes_with(theirs: Path) -> None:
    import torch

    saved = {name: torch.from_numpy(a) for name, a in np.load(theirs / "grouped.npz").items()}
    hidden, router = saved["tokens"].shape[1], "0.mlp.router.weight"
    rank = {router: torch.zeros(8, hidden)} | {f"0.mlp.experts.{n}": saved[n] for n in ("weight1", "weight2")}
    weights, start, parts = dict(by_expert(rank, 0, 1)), 0, []
    for expert, count in enumerate(COUNTS):
        up, down = (weights[f"0.mlp.experts.local_experts.{expert}.linear_fc{n}.weight"] for n in (1, 2))
        gate, value = (saved["tokens"][start : start + count] @ up.T).chunk(2, -1)
        gates = saved["gates"][start : start + count, None]
        parts.append((torch.nn.functional.silu(gate) * value * gates) @ down.T)
        start += count
    assert relative(torch.cat(parts).numpy(), saved["out"].numpy()) < 1e-6


@pytest.mark.parametrize("name", ["gpt untied, exact gelu", "llama", "llama tied, scaled rope"])
def test_their_models_give_their_logits_in_transformers(
    name: str, theirs: Path, converted: dict[str, Path], tmp_path: Path
) -> None:
    import torch
    import transformers

    convert(f"mtjax:{converted[name]}", f"hf:{tmp_path / 'hf'}")
    network = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    tokens, logits = logits_of(theirs, name)
    with torch.no_grad():
        assert relative(network(torch.tensor(tokens).long()).logits.numpy(), logits) < 1e-5


@pytest.mark.parametrize("corpus", CORPORA)
def test_their_files_are_read_and_ours_by_them(corpus: str, theirs: Path) -> None:
    read, ours = np.load(theirs / "ours.npz"), IndexedDataset(theirs / "ours" / corpus)
    np.testing.assert_array_equal(read[f"{corpus} documents"], ours.documents)
    np.testing.assert_array_equal(read[f"{corpus} lengths"], ours.lengths)
    np.testing.assert_array_equal(read[f"{corpus} tokens"], ours.flat(0, ours.num_tokens))

    found = IndexedDataset(theirs / "corpora" / corpus)
    with IndexedWriter(theirs / f"again-{corpus}", found.dtype) as writer:
        for i in range(len(found)):
            writer.add(found[i], np.array([len(found[i])]), np.ones(1))
        writer.finish()
    for suffix in ("bin", "idx"):
        again, written = theirs / f"again-{corpus}.{suffix}", theirs / f"corpora/{corpus}.{suffix}"
        assert again.read_bytes() == written.read_bytes()


def our_dataset(case: dict[str, Any], part: str, corpora: Path) -> Any:
    """The same as ours; None where the split has nothing."""
    is_reset = case.get("reset", False)
    options = GPTOptions(SEQUENCE, EOD, VOCAB, case.get("seed", 1234), is_reset, is_reset, is_reset)
    samples = case["samples"][PARTS.index(part)]  # pyright: ignore[reportArgumentType]
    weights = case.get("weights")
    counts = samples_of_each(normalize(weights), samples) if weights else [samples]
    datasets = []
    for name, count in zip(case["blend"], counts, strict=True):
        tokens = IndexedDataset(corpora / name)
        bounds = split_bounds(case.get("split", "60,25,15"), len(tokens))[part]  # pyright: ignore[reportArgumentType]
        if bounds is None:
            return None
        datasets.append(GPTDataset(tokens, bounds, count, options, None))
    return BlendedDataset(datasets, weights, samples, None) if weights else datasets[0]


@pytest.mark.parametrize("name", DATASETS)
def test_the_order_of_samples_and_every_token_are_theirs(name: str, theirs: Path) -> None:
    """A blend of theirs may have a sample more than it was asked for, as many as its shares rounded up."""
    saved = np.load(theirs / "datasets" / f"{name}.npz")
    for part in PARTS:
        ours = our_dataset(DATASETS[name], part, theirs / "corpora")
        expected = {kind.removeprefix(f"{part} "): saved[kind] for kind in saved.files if kind.startswith(f"{part} ")}
        assert (ours is None) == (not expected)
        if isinstance(ours, BlendedDataset):
            assert len(ours) == DATASETS[name]["samples"][PARTS.index(part)] <= len(expected["tokens"])
            np.testing.assert_array_equal(ours.dataset_index, expected["dataset_index"][: len(ours)])
            np.testing.assert_array_equal(ours.sample_index, expected["dataset_sample_index"][: len(ours)])
        elif ours is not None:
            assert len(ours) == len(expected["tokens"])
            for index in ("document_index", "sample_index", "shuffle_index"):
                np.testing.assert_array_equal(getattr(ours, index), expected[index], err_msg=f"{part} {index}")
        if ours is not None:
            assert_same_samples(ours, expected)


def assert_same_samples(ours: Any, expected: dict[str, np.ndarray]) -> None:
    """Every array of every sample; their mask is true where there is no attention, ours counts segments."""
    samples = [ours[i] for i in range(len(ours))]
    for kind in ("tokens", "labels", "loss_mask", "position_ids"):
        np.testing.assert_array_equal([s[kind] for s in samples], expected[kind][: len(samples)], err_msg=kind)
    for sample, hidden in zip(samples, expected["attention_mask"], strict=False):
        segments = sample.get("segment_ids", np.zeros(SEQUENCE))
        seen = (segments[:, None] == segments[None]) & np.tri(SEQUENCE, dtype=bool)
        np.testing.assert_array_equal(hidden[0], ~seen)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_table_of_schedules_is_theirs(name: str, theirs: Path) -> None:
    found, saved = (json.loads(path.read_text())[name] for path in (theirs / "schedules.json", TABLE))
    for kind in ("learning_rate", "weight_decay"):
        np.testing.assert_allclose(saved[kind], found[kind], rtol=1e-8)


@pytest.mark.parametrize(("name", "mesh"), [("gpt", "2x4"), ("llama", "1x1")])
def test_twenty_steps_have_their_losses(name: str, mesh: str, theirs: Path, tmp_path: Path) -> None:
    """Its loss, gradient clipping, AdamW and schedules of both; losses, gradient norms and rates of every step.

    Their loss takes the padding of the vocabulary for tokens, and so does ours when it is told that they are.
    """
    source = theirs / "models" / name / "1x1x1"
    convert(f"megatron:{source}", f"mtjax:{tmp_path / 'ours'}", "--vocab-size", str(VOCAB))
    weights = find_weights(tmp_path / "ours")
    program = make_train_step(run_config(weights.config), mesh_of(mesh))
    state = program.initialize(0, restore_weights(weights, program.abstract_state.parameters))
    saved, size = np.load(theirs / f"{name} run.npz"), RUN["batch"]
    for step in range(RUN["steps"]):
        text, number = saved["text"][step], np.arange(step * size, (step + 1) * size, dtype=np.uint32)
        batch = {"tokens": text[:, :-1], "labels": text[:, 1:], "loss_mask": saved["mask"][step]}
        state, metrics = program.step(
            state, global_batch(program.batch_sharding, batch | {"sample_index": number}, size)
        )
        assert float(metrics["loss"]) == pytest.approx(saved["loss"][step], rel=1e-5), step
        assert float(metrics["grad_norm"]) == pytest.approx(saved["norm"][step], rel=1e-4), step
        assert float(metrics["learning_rate"]) == pytest.approx(saved["rate"][step], rel=1e-5), step
    assert saved["loss"][-1] < 0.8 * saved["loss"][0]


@pytest.mark.parametrize(("name", "mesh"), [("gpt", "1x1"), ("llama", "2x2")])
def test_tokens_further_ahead_have_their_losses_and_gradients(
    name: str, mesh: str, theirs: Path, tmp_path: Path
) -> None:
    """Two layers of multi-token prediction; the masks leave other shares of each text."""
    saved, numbers = np.load(theirs / f"{name} ahead.npz"), range(1, AHEAD["layers"] + 1)
    parts = []
    for number in (0, *numbers):
        folder = tmp_path / str(number)
        source = theirs / f"{name} ahead" / str(number)
        convert(f"megatron:{source}", f"mtjax:{folder}", "--vocab-size", str(VOCAB))
        parts.append(MtjaxSource(folder))
    model = parts[0].origin.config.model
    settings = {"mtp_num_layers": AHEAD["layers"], "mtp_loss_scaling_factor": AHEAD["factor"]}
    config = configs.replace(parts[0].origin.config, **settings, compute_dtype="float32", attention="xla")
    size = len(saved["text"])
    program = make_train_step(configs.replace(config, global_batch_size=size, mesh=mesh), mesh_of(mesh))

    def read(parameter: str) -> np.ndarray:
        """Ours of that name, from the checkpoint it is in."""
        module, _, inner = parameter.partition(".")
        if not module.startswith("mtp_"):
            return np.stack(list(of(0, parameter))) if ".layers." in parameter else next(of(0, parameter))
        number = int(module.removeprefix("mtp_"))
        if inner.startswith("layer."):
            return next(of(number, inner.replace("layer.", "stack.layers.", 1)))
        kind, _, vector = inner.partition(".")
        names = {"embedding_norm": "enorm", "hidden_norm": "hnorm", "final_norm": "final_layernorm"}
        where = f"mtp.layers.{number - 1}"
        if kind == "projection":
            return saved[f"{where}.eh_proj.weight"].T.reshape(2, model.hidden_size, model.hidden_size)
        return saved[f"{where}.{names[kind]}.{'weight' if vector == 'scale' else 'bias'}"]

    def of(number: int, parameter: str) -> Any:
        return parts[number].slices(parts[number].parameters[parameter])

    records, tree = jax.tree.flatten(program.records)
    parameters = [
        jax.device_put(read(record.name), leaf.sharding)
        for record, leaf in zip(records, jax.tree.leaves(program.restore_target), strict=True)
    ]
    parameters = jax.tree.unflatten(tree, parameters)
    batch = {"tokens": saved["text"][:, :-1], "labels": saved["text"][:, 1:], "loss_mask": saved["mask"]}
    batch = {n: a.astype(np.float32 if n == "loss_mask" else np.int32) for n, a in batch.items()}
    batch = global_batch(program.batch_sharding, batch | {"sample_index": np.arange(size, dtype=np.uint32)}, size)
    loss, losses, gradients = program.on_mesh(jax.jit(lambda p, b: program.gradients(p, b, None)), parameters, batch)
    assert float(losses["loss"]) == pytest.approx(float(saved["loss"]), rel=1e-5)
    for number in numbers:
        assert float(losses[f"mtp_{number}_loss"]) == pytest.approx(float(saved["ahead"][number - 1]), rel=1e-5)
    expected = float(saved["loss"]) + AHEAD["factor"] * float(saved["ahead"].mean())
    assert float(loss) == pytest.approx(expected, rel=1e-5)
    assert relative(gradients["embedding"], saved["gradient embedding.word_embeddings.weight"]) < 1e-5
    assert relative(gradients["final_norm"]["scale"], saved["gradient decoder.final_layernorm.weight"]) < 1e-5
    for number in numbers:
        ours, where = gradients[f"mtp_{number}"], f"gradient mtp.layers.{number - 1}"
        projection = np.asarray(ours["projection"]["weight"]).reshape(-1, model.hidden_size).T
        assert relative(projection, saved[f"{where}.eh_proj.weight"]) < 1e-5
        for kind, theirs_name in (("embedding", "enorm"), ("hidden", "hnorm"), ("final", "final_layernorm")):
            assert relative(ours[f"{kind}_norm"]["scale"], saved[f"{where}.{theirs_name}.weight"]) < 1e-5
        output = np.asarray(ours["layer"]["attention"]["output"]["weight"]).reshape(-1, model.hidden_size).T
        assert relative(output, saved[f"{where}.transformer_layer.self_attention.linear_proj.weight"]) < 1e-5


def run_config(config: configs.Config) -> configs.Config:
    """The run of `RUN`."""
    return configs.replace(
        config,
        compute_dtype="float32",
        attention="xla",
        steps=RUN["steps"],
        global_batch_size=RUN["batch"],
        learning_rate=RUN["max_lr"],
        min_learning_rate=RUN["min_lr"],
        warmup_steps=RUN["warmup"],
        start_weight_decay=RUN["start_wd"],
        weight_decay=RUN["end_wd"],
        weight_decay_style="linear",
        clip_grad_norm=RUN["clip_grad"],
        beta2=RUN["beta2"],
        epsilon=RUN["epsilon"],
    )
