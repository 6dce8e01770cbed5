"""`mtjax convert --with-optimizer` on a run of megatron-core 0.16 at TP2 x PP2 in bfloat16, without torch or Megatron.

`resumed.zip` has one state in two layouts, of `python -m tests.parity.megatron_core.resumed tiny`: moments and float32
weights are random. `tests/parity/test_resumed.py` compares what comes next.
"""

import argparse
import json
import re
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtjax import config as configs
from mtjax.commands.convert import main
from mtjax.commands.from_megatron import main as from_megatron
from mtjax.convert.initial_weights import open_foreign
from mtjax.convert.megatron_buffers import bucket_sizes, ranges_of
from mtjax.convert.torch_dist_files import Archive, DistributedCheckpoint
from mtjax.convert.torch_dist_pickle import Record
from mtjax.convert.torch_dist_writer import DistributedWriter, write_archive
from mtjax.errors import UserError
from mtjax.runtime.checkpoints.arrays import open_array
from mtjax.runtime.checkpoints.checkpoint import fingerprints
from mtjax.runtime.checkpoints.weights import find_weights
from mtjax.train.objective import Pretraining
from mtjax.train.step import make_train_step
from tests.convert.test_torch_dist import Evil, cut
from tests.tiny import mesh_of

STORED = Path(__file__).with_name("resumed.zip")
ITERATION = "iter_0000010"
STATE = "optimizer.state."
FULL, BUCKETS = "fully_reshardable", "dp_reshardable"


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resumed")
    with zipfile.ZipFile(STORED) as archive:
        archive.extractall(folder)
    return folder


@pytest.fixture(scope="module")
def run(stored: Path) -> Path:
    """The run of mtjax that the first layout becomes."""
    assert convert(stored / FULL, stored / "run") == 0
    return stored / "run"


def convert(saved: Path, target: Path, *options: str) -> int:
    return main(["--from", f"megatron:{saved}", "--to", f"mtjax:{target}", "--with-optimizer", *options])


def arrays_of(run: Path) -> dict[str, int]:
    return find_weights(run).metadata["fingerprints"]


def test_both_layouts_are_the_same_state(stored: Path, run: Path, tmp_path: Path) -> None:
    assert convert(stored / BUCKETS, tmp_path / "run") == 0
    assert arrays_of(tmp_path / "run") == arrays_of(run)


def test_the_state_is_what_was_saved(stored: Path, run: Path) -> None:
    """Moments in the order of mtjax's dimensions, and counters."""
    saved = DistributedCheckpoint(stored / FULL / ITERATION)
    state = run / "checkpoints/10/state"
    names = {name.partition(".mu.")[2]: name for name in arrays_of(run) if ".mu." in name}
    for ours, theirs in (("exp_avg", ".mu."), ("exp_avg_sq", ".nu.")):
        read = lambda key: saved.tensor(f"{STATE}{ours}.{key}").read()  # noqa: B023, E731
        found = lambda name: open_array(state, names[name].replace(".mu.", theirs)).read().result()  # noqa: B023, E731
        np.testing.assert_array_equal(found("final_norm.scale"), read("decoder.final_layernorm.weight"))
        np.testing.assert_array_equal(found("embedding")[:20], read("embedding.word_embeddings.weight")[:20])
        down = read("decoder.layers.mlp.linear_fc2.weight").transpose(0, 2, 1)
        np.testing.assert_array_equal(found("stack.layers.mlp.down.weight"), down)
    weights = open_array(state, "parameters.final_norm.scale").read().result()
    np.testing.assert_array_equal(weights, saved.tensor(f"{STATE}param.decoder.final_layernorm.weight").read())
    counts = {name: open_array(state, name).read().result().item() for name in arrays_of(run) if "count" in name}
    assert list(counts.values()) == [10, 10]
    metadata = json.loads((run / "checkpoints/10/page/metadata").read_text())
    assert (metadata["step"], metadata["consumed_samples"]) == (10, 40)


def test_steps_that_megatron_skipped_do_not_count(stored: Path, tmp_path: Path) -> None:
    """Adam has its own count; rates and weight decay follow the samples that Megatron's schedule has seen."""
    shutil.copytree(stored / FULL, tmp_path / "saved")
    edited(tmp_path / "saved", lambda state: state["opt_param_scheduler"].update(num_steps=36))
    assert convert(tmp_path / "saved", tmp_path / "run") == 0
    state, names = tmp_path / "run/checkpoints/10/state", arrays_of(tmp_path / "run")
    assert [open_array(state, name).read().result().item() for name in names if "count" in name] == [10, 9]


def test_the_config_is_that_of_the_run(run: Path) -> None:
    found = configs.load(str(run / "config.toml"))
    assert (found.training.steps, found.training.global_batch_size, found.training.microbatch_size) == (20, 4, 2)
    assert found.training.compute_dtype == "bfloat16"
    options = found.optimizer
    assert (options.learning_rate, options.min_learning_rate, options.beta2) == (5e-3, 5e-4, 0.95)
    assert (options.warmup_steps, options.decay_steps, options.decay_style) == (5, 20, "cosine")
    assert (options.start_weight_decay, options.weight_decay, options.clip_grad_norm) == (0.02, 0.3, 2.0)
    assert (found.data.data, found.data.tokenizer) == ("/data/corpus", "hf:/data/tokenizer.json")
    assert (found.model.sequence_length, found.model.vocab_size) == (96, 20)
    assert found.output.out == run.resolve()


def rewritten(
    saved: Path, target: Path, change: Callable[[str, np.ndarray], tuple[tuple[int, ...], list[Any]] | None]
) -> Path:
    """A copy with some tensors replaced: `change` returns a shape and chunks, each offsets and numbers."""
    old = DistributedCheckpoint(saved / ITERATION)
    writer = DistributedWriter(target / ITERATION)
    for key in old.keys:
        whole = old.tensor(key).read()
        shape, chunks = change(key, whole) or (whole.shape, [((0,) * whole.ndim, whole)])
        for offsets, numbers in chunks:
            writer.chunk(key, shape, offsets, numbers)
    for key in old.objects:
        if "optimizer" in key:
            writer.object(key, plain(old.object(key)))
    writer.close()
    for name in ("common.pt", "metadata.json"):
        shutil.copy(saved / ITERATION / name, target / ITERATION)
    shutil.copy(saved / "latest_checkpointed_iteration.txt", target)
    return target


def plain(value: Any) -> Any:
    """What the writer takes."""
    if isinstance(value, dict):
        return {plain(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(plain, value))
    return None if isinstance(value, Record) else value


def test_parts_that_are_flattened_are_put_together(stored: Path, run: Path, tmp_path: Path) -> None:
    """As megatron-core up to 0.15 saves `fully_sharded_model_space`: a layer's and a rank's part, in one dimension."""

    def flattened(key: str, whole: np.ndarray) -> tuple[tuple[int, ...], list[Any]] | None:
        if not key.startswith(STATE):
            return None
        is_stacked = ".layers." in key
        grid = [whole.shape[0] if is_stacked else 1, *(1,) * (whole.ndim - 1)]
        grid[-1] = 2 if whole.ndim > 1 + is_stacked else grid[-1]
        part = [size // count for size, count in zip(whole.shape, grid, strict=True)]
        numbers = np.empty((*grid, int(np.prod(part))), np.float32)
        for at in np.ndindex(*grid):
            box = tuple(slice(i * size, (i + 1) * size) for i, size in zip(at, part, strict=True))
            numbers[at] = whole[box].reshape(-1)
        half = numbers.shape[-1] // 2  # of two data parallel ranks
        ends = ((0, half), (half, numbers.shape[-1]))
        return numbers.shape, [((*(0,) * len(grid), a), numbers[..., a:b]) for a, b in ends]

    saved = rewritten(stored / FULL, tmp_path / "saved", flattened)
    assert convert(saved, tmp_path / "run") == 0
    assert arrays_of(tmp_path / "run") == arrays_of(run)


def test_layers_with_keys_of_their_own_and_the_state_among_the_chunks(stored: Path, run: Path, tmp_path: Path) -> None:
    """As megatron-core saves layers that differ, and as its version 0.19 saves what is not a tensor."""
    old = DistributedCheckpoint(stored / FULL / ITERATION)
    folder = tmp_path / "saved" / ITERATION
    writer = DistributedWriter(folder)
    for key in old.keys:
        whole = old.tensor(key).read()
        if "decoder.layers." not in key:
            writer.chunk(key, whole.shape, (0,) * whole.ndim, whole)
            continue
        for layer, part in enumerate(whole):
            name = key.replace("decoder.layers.", f"decoder.layers.{layer}.")
            writer.chunk(name, part.shape, (0,) * part.ndim, part)
    state = Archive(stored / FULL / ITERATION / "common.pt").state()
    args = {name: value for name, value in plain(vars(state["args"])).items() if name != "params_dtype"}
    writer.object("common_state/shard_0_1", [plain(state) | {"args": argparse.Namespace(**args)}])
    writer.close()
    shutil.copy(stored / FULL / ITERATION / "metadata.json", folder)
    assert convert(folder, tmp_path / "run") == 0
    assert arrays_of(tmp_path / "run") == arrays_of(run)


def test_a_run_goes_back_and_comes_again_to_the_bit(run: Path, tmp_path: Path) -> None:
    back = ["--from", f"mtjax:{run}", "--to", f"megatron:{tmp_path / 'back'}", "--ckpt-format", "torch_dist"]
    assert main([*back, "--with-optimizer"]) == 0
    common = Archive(tmp_path / "back" / ITERATION / "common.pt").state()
    assert common["opt_param_scheduler"]["num_steps"] == 40
    assert common["content_metadata"]["distrib_optim_sharding_type"] == FULL
    assert convert(tmp_path / "back", tmp_path / "again") == 0
    assert arrays_of(tmp_path / "again") == arrays_of(run)
    then, now = (configs.load(str(folder / "config.toml")) for folder in (run, tmp_path / "again"))
    assert now.optimizer == then.optimizer
    assert now.training == then.training


def edited(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Changes the common state."""
    state = Archive(folder / ITERATION / "common.pt").state()
    state["args"] = argparse.Namespace(**{n: v for n, v in plain(vars(state["args"])).items() if n != "params_dtype"})
    state = plain(state)
    change(state)
    with (folder / ITERATION / "common.pt").open("wb") as file:
        write_archive(file, state, root="common")


def group_of(state: dict[str, Any]) -> dict[str, Any]:
    return state["optimizer"]["optimizer"]["param_groups"][0]


def without_optimizer(folder: Path, files: str) -> None:
    for path in (folder / ITERATION).glob(files):
        path.unlink()


DAMAGES: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "a missing file": (FULL, lambda f: without_optimizer(f, "__2_1*"), "lacks 1 of its files: __2_1.distcp"),
    "a file that is cut": (BUCKETS, lambda f: cut(f / ITERATION / "__3_0.distcp", 4000), "__3_0.distcp is truncated"),
    "no schedule": (FULL, lambda f: edited(f, lambda s: s.pop("opt_param_scheduler")), "has no opt_param_scheduler"),
    "no step of Adam": (
        FULL,
        lambda f: edited(f, lambda s: [g.pop("step") for g in s["optimizer"]["optimizer"]["param_groups"]]),
        "has no Adam's step, which --with-optimizer needs",
    ),
    "two steps of Adam": (FULL, lambda f: edited(f, lambda s: group_of(s).update(step=9.0)), "several steps of Adam"),
    "other betas": (
        FULL,
        lambda f: edited(f, lambda s: group_of(s).update(betas=(0.8, 0.95))),
        "has several betas of Adam",
    ),
    "another epsilon": (
        FULL,
        lambda f: edited(f, lambda s: [g.update(eps=1e-6) for g in s["optimizer"]["optimizer"]["param_groups"]]),
        "eps of Adam is 1e-06 in the optimizer's state, and 1e-08 in args",
    ),
    "L2 instead of weight decay": (
        FULL,
        lambda f: edited(f, lambda s: group_of(s).update(decoupled_weight_decay=False)),
        "has weight decay in Adam's gradients (L2), and mtjax's is decoupled (AdamW)",
    ),
    "a rate of its own": (
        FULL,
        lambda f: edited(f, lambda s: group_of(s).update(lr_mult=0.1)),
        "has parameters with a learning rate of their own, which mtjax has not",
    ),
    "rates of another schedule": (
        FULL,
        lambda f: edited(f, lambda s: s["opt_param_scheduler"].update(lr_decay_style="linear", lr_decay_steps=200)),
        "lr of the next step is 0.00387",
    ),
    "decay of another schedule": (
        FULL,
        lambda f: edited(f, lambda s: group_of(s).update(wd_mult=0.5)),
        "weight_decay of the next step is 0",
    ),
    "decay over other steps": (
        FULL,
        lambda f: edited(f, lambda s: s["opt_param_scheduler"].update(wd_incr_steps=400)),
        "weight decay grows over 400 samples, and the run has 20 steps of 4: mtjax's grows to the end of the run",
    ),
    "a schedule between batches": (
        FULL,
        lambda f: edited(f, lambda s: s["opt_param_scheduler"].update(num_steps=41)),
        "has done 41 samples, not a multiple of the batch of 4",
    ),
    "no consumed samples": (
        FULL,
        lambda f: edited(f, lambda s: delattr(s["args"], "consumed_train_samples")),
        "has no consumed_train_samples",
    ),
    "no batch": (
        FULL,
        lambda f: edited(f, lambda s: [delattr(s["args"], f"{kind}_batch_size") for kind in ("micro", "global")]),
        "--micro-batch-size and --global-batch-size are missing",
    ),
    "stages of other layers": (
        BUCKETS,
        lambda f: edited(f, lambda s: setattr(s["args"], "pipeline_model_parallel_layout", "Et|ttL")),
        "has 2 layers, and pipeline_model_parallel_layout Et|ttL of 2 pipeline stages do not add up to these",
    ),
    "stages that are not known": (
        BUCKETS,
        lambda f: edited(f, lambda s: setattr(s["args"], "standalone_embedding_stage", True)),
        "was saved with standalone_embedding_stage, with which the buffers' layout is not rebuilt",
    ),
    "other stages": (
        BUCKETS,
        lambda f: edited(f, lambda s: setattr(s["args"], "pipeline_model_parallel_size", 1)),
        "tensors do not fit these",
    ),
    "another order": (
        BUCKETS,
        lambda f: edited(f, lambda s: setattr(s["args"], "transformer_impl", "transformer_engine")),
        "do not fit these: save it again with --dist-ckpt-optim-fully-reshardable",
    ),
    "code in the common state": (
        FULL,
        lambda f: zip_with(f / ITERATION / "common.pt", {"optimizer": Evil(f / "ran")}),
        "it names posix.system, which is not loaded",
    ),
}


def zip_with(path: Path, value: Any) -> None:
    import pickle

    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("common/data.pkl", pickle.dumps(value))


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_state_is_one_sentence(
    name: str, stored: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layout, damage, said = DAMAGES[name]
    shutil.copytree(stored / layout, tmp_path / "saved")
    damage(tmp_path / "saved")
    refused(tmp_path, said, capsys)
    assert not (tmp_path / "saved" / "ran").exists()


def refused(folder: Path, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert convert(folder / "saved", folder / "run") == 2
    error = capsys.readouterr().err.strip()
    assert said in error
    assert "\n" not in error
    assert [path.name for path in folder.iterdir()] == ["saved"]


def shifted(whole: np.ndarray) -> np.ndarray:
    return np.roll(whole.reshape(-1), 1).reshape(whole.shape)


CHANGED: dict[str, tuple[Callable[[str, np.ndarray], np.ndarray | None], str]] = {
    "weights of another save": (
        lambda key, whole: shifted(whole) if key == f"{STATE}param.output_layer.weight" else None,
        "output of the optimizer's float32 weights is not that of the model: the files are of different saves, or "
        "megatron-core has shifted them",
    ),
    "negative squares": (
        lambda key, whole: -whole if key.startswith(f"{STATE}exp_avg_sq.output") else None,
        "exp_avg_sq of output has numbers that are not finite or are negative",
    ),
    "a moment in 16 bits": (
        lambda key, whole: whole.astype(np.float16) if key.startswith(f"{STATE}exp_avg.output") else None,
        "Adam's state is read from float32",
    ),
    "a moment of another shape": (
        lambda key, whole: whole[:-1] if key == f"{STATE}exp_avg.output_layer.weight" else None,
        "as [23, 8], and output_layer.weight is [24, 8]",
    ),
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_state_of_something_else_is_refused(
    name: str, stored: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change, said = CHANGED[name]

    def changed(key: str, whole: np.ndarray) -> tuple[tuple[int, ...], list[Any]] | None:
        new = change(key, whole)
        return None if new is None else (new.shape, [((0,) * new.ndim, new)])

    rewritten(stored / FULL, tmp_path / "saved", changed)
    refused(tmp_path, said, capsys)


def test_weights_without_a_state_and_other_formats_are_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with zipfile.ZipFile(STORED.with_name("torch_dist.zip")) as archive:
        archive.extractall(tmp_path / "saved")
    refused(tmp_path, "holds no optimizer's state", capsys)
    command = ["--from", f"mtjax:{run}", "--to", f"megatron:{tmp_path / 'new'}", "--with-optimizer"]
    assert main(command) == 2
    assert "--with-optimizer writes only --ckpt-format torch_dist: add it" in capsys.readouterr().err
    assert main([*command, "--ckpt-format", "torch_dist", "--expert", "2"]) == 2
    assert "the model has no experts: remove --expert" in capsys.readouterr().err
    assert main(["--from", f"mtjax:{run}", "--to", f"hf:{tmp_path / 'new'}", "--with-optimizer"]) == 2
    assert "--with-optimizer has no effect on a conversion from mtjax to hf" in capsys.readouterr().err


def test_buckets_are_megatrons() -> None:
    """Starts at multiples of 64, buckets that end after a tensor, and one of its own for a copied embedding."""
    tensors = {"embedding": 100, "a": 10, "b": 70, "c": 5}
    assert bucket_sizes(tensors, None, frozenset()) == [64 + 128 + 64 + 100]
    assert ranges_of(tensors, [356], "rank 0") == {"c": (0, 0), "b": (0, 64), "a": (0, 192), "embedding": (0, 256)}
    assert bucket_sizes(tensors, 100, frozenset()) == [134, 164]
    assert ranges_of(tensors, [134, 164], "rank 0")["a"] == (1, 0)
    assert bucket_sizes(tensors, None, frozenset(["embedding"])) == [256, 100]
    assert ranges_of(tensors, [256, 100], "rank 0")["embedding"] == (1, 0)
    with pytest.raises(UserError, match=re.escape("have 300 numbers, and its 4 tensors do not fit")):
        ranges_of(tensors, [300], "rank 0")


def test_the_arguments_of_a_checkpoint_are_translated(
    stored: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As those of its script: what follows from others or is Megatron's default is not listed."""
    shutil.copytree(stored / BUCKETS, tmp_path / "saved")
    more = {"fp8": None, "fp8_recipe": "delayed", "muon_momentum": 0.95, "decoupled_lr": 1e-4, "start_up": 1}
    more |= {"lr_decay_iters": None, "attention_backend": None, "lr_wsd_decay_style": "exponential", "kv_channels": 4}
    edited(tmp_path / "saved", lambda state: vars(state["args"]).update(more))
    assert from_megatron([str(tmp_path / "saved"), "--output", str(tmp_path / "run.toml")]) == 0
    found = configs.load(str(tmp_path / "run.toml"))
    script = ["--num-layers", "2", "--hidden-size", "8", "--num-attention-heads", "4", "--group-query-attention"]
    script += ["--num-query-groups", "2", "--kv-channels", "4", "--ffn-hidden-size", "12", "--seq-length", "96"]
    script += ["--max-position-embeddings", "16", "--vocab-size", "20", "--make-vocab-size-divisible-by", "12"]
    script += ["--swiglu", "--normalization", "RMSNorm", "--position-embedding-type", "rope", "--disable-bias-linear"]
    script += ["--norm-epsilon", "1e-6", "--untie-embeddings-and-output-weights", "--hidden-dropout", "0"]
    script += ["--attention-dropout", "0", "--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"]
    script += ["--micro-batch-size", "2", "--global-batch-size", "4", "--train-iters", "20", "--lr", "0.005"]
    script += ["--min-lr", "0.0005", "--lr-decay-style", "cosine", "--lr-warmup-iters", "5", "--weight-decay", "0.3"]
    script += ["--start-weight-decay", "0.02", "--end-weight-decay", "0.3", "--weight-decay-incr-style", "linear"]
    script += ["--clip-grad", "2.0", "--adam-beta2", "0.95", "--bf16", "--use-distributed-optimizer"]
    script += ["--data-path", "/data/corpus", "--split", "100,0,0", "--tokenizer-type", "HuggingFaceTokenizer"]
    script += ["--tokenizer-model", "/data/tokenizer.json", "--eval-iters", "0", "--log-interval", "1"]
    script += ["--save-interval", "10"]
    said = capsys.readouterr().err
    assert from_megatron(["--gpus", "4", "--output", str(tmp_path / "script.toml"), "--", *script]) == 0
    assert found == configs.load(str(tmp_path / "script.toml"))
    assert "--decoupled-lr 0.0001  embeddings and output layer have the learning rate of all other weights" in said
    assert "fp8" not in said
    assert "muon" not in said
    assert "other arguments of the checkpoint follow from these, or are not known to mtjax" in said


def test_a_run_starts_from_a_checkpoint_of_megatron(stored: Path, run: Path, tmp_path: Path) -> None:
    """`mtjax train --init-from megatron:DIR`, with another padding of the vocabulary than a conversion has."""
    assert main(["--from", str(stored / BUCKETS), "--to", f"mtjax:{tmp_path / 'ours'}", "--vocab-multiple", "64"]) == 0
    config = configs.load(str(run / "config.toml"))
    given = {"vocab_multiple": 64, "mesh": "1x2", "init_from": Path(f"megatron:{stored / BUCKETS}")}
    config = configs.replace(config, **given)
    program = make_train_step(config, mesh_of("1x2"))
    weights = Pretraining(open_foreign=open_foreign).initial_weights(config)
    assert weights is not None
    weights.check(program)
    state = program.initialize(0, weights.read(program))
    saved = arrays_of(tmp_path / "ours")
    assert {name: number for name, number in fingerprints(state).items() if name in saved} == saved
    other = make_train_step(configs.replace(config, mlp_size=16), mesh_of("1x2"))
    with pytest.raises(UserError, match="are of another model; use its settings:\n  mlp_size is 12 there and 16 here"):
        weights.check(other)
    assert open_foreign(str(tmp_path / "ours")) is None


def test_what_holds_no_arguments_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert from_megatron([str(tmp_path)]) == 2
    assert "is not a checkpoint of Megatron-LM" in capsys.readouterr().err
    assert from_megatron([str(tmp_path), "argument"]) == 2
    assert "is a checkpoint's folder: it takes no arguments and no --set" in capsys.readouterr().err
