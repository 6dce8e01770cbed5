"""Megatron's torch_dist checkpoints, without torch: one of megatron-core 0.16.1 at TP2 x PP2, and damaged ones."""

import argparse
import dataclasses
import io
import itertools
import json
import os
import pickle
import shutil
import subprocess
import sys
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from mtjax.commands.convert import main
from mtjax.config import Parallel
from mtjax.convert.saved_model import SavedModel, model_of, without_training
from mtjax.convert.torch_dist import TorchDistCheckpoint
from mtjax.convert.torch_dist_files import Archive, DistributedCheckpoint, overlapping
from mtjax.convert.torch_dist_writer import Call, DistributedWriter
from mtjax.errors import UserError
from mtjax.models.sharded_model import ShardedModel
from mtjax.runtime.checkpoints.weights import find_weights
from mtjax.sharding.param_specs import dotted
from tests.tiny import mesh_of

DISTRIBUTED = ("--ckpt-format", "torch_dist")
STORED = Path(__file__).with_name("torch_dist.zip")
"""Of `python -m tests.parity.megatron_core.torch_dist tiny`: a Llama of two layers, in float32."""
ITERATION = "iter_0000010"
WITHOUT_TORCH = """
import sys
import tracemalloc
class Absent:
    @staticmethod
    def find_spec(name, *_):
        if name.partition(".")[0] in ("torch", "megatron"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent)
"""
NORM, TABLE = "decoder.final_layernorm.weight", "embedding.word_embeddings.weight"
CHUNKS = list[tuple[tuple[int, ...], np.ndarray]]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A new copy of the stored folder."""
    with zipfile.ZipFile(STORED) as archive:
        archive.extractall(tmp_path / "megatron")
    return tmp_path / "megatron"


def convert(source: Path | str, target: Path | str, *options: str) -> int:
    return main(["--from", str(source), "--to", str(target), *options])


def numbers(key: str, index: tuple[int, ...], shape: tuple[int, ...], half: int = 0) -> np.ndarray:
    """What `tiny` filled a tensor of the full model with."""
    first = zlib.crc32(f"{key} {index} {half}".encode()) % 1000
    return (np.arange(first, first + np.prod(shape)) % 1000).reshape(shape).astype(np.float32)


def test_every_tensor_is_what_megatron_core_saved(saved: Path) -> None:
    found = TorchDistCheckpoint(saved)
    assert found.dtype == "float32"
    assert found.arguments["num_layers"] == 2
    assert len(found.shapes) == 3 + 2 * 6
    for name in found.shapes:
        words = name.split(".")
        layer = (int(words.pop(2)),) if words[1] == "layers" else ()
        key, shape = ".".join(words), found.shapes[name]
        if key.endswith("linear_fc1.weight"):
            halves = (numbers(key, layer, (shape[0] // 2, shape[1]), half) for half in range(2))
            expected = np.concatenate(list(halves))
        else:
            expected = numbers(key, layer, shape)
        np.testing.assert_array_equal(found.shard(name, 0), expected, err_msg=name)


def test_it_is_converted_without_torch_and_back_to_the_bit(saved: Path, tmp_path: Path) -> None:
    """The iteration's folder is read as well as the one above it."""
    steps = (
        ("--from", f"megatron:{saved}", "--to", f"mtjax:{tmp_path / 'ours'}"),
        ("--from", f"mtjax:{tmp_path / 'ours'}", "--to", f"megatron:{tmp_path / 'again'}", *DISTRIBUTED),
    )
    code = f"{WITHOUT_TORCH}\nfrom mtjax.commands.convert import main\nsys.exit(max(map(main, {steps})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    old, new = TorchDistCheckpoint(saved / ITERATION), TorchDistCheckpoint(tmp_path / "again")
    assert old.shapes == {**new.shapes, **{n: (24, 8) for n in new.shapes if new.shapes[n] == (128, 8)}}
    for name in old.shapes:
        rows = 20 if old.shapes[name] == (24, 8) else None  # those that pad the vocabulary are zeros in ours
        np.testing.assert_array_equal(old.shard(name, 0)[:rows], new.shard(name, 0)[:rows], err_msg=name)
    assert convert(f"megatron:{tmp_path / 'again'}", f"mtjax:{tmp_path / 'ours again'}") == 0
    pages = [find_weights(tmp_path / name).metadata["fingerprints"] for name in ("ours", "ours again")]
    assert pages[0] == pages[1]


def test_keys_and_formats_are_those_of_megatron(saved: Path, tmp_path: Path) -> None:
    assert convert(f"megatron:{saved}", f"mtjax:{tmp_path / 'ours'}") == 0
    assert convert(f"mtjax:{tmp_path / 'ours'}", f"megatron:{tmp_path / 'again'}", *DISTRIBUTED) == 0
    old, new = (DistributedCheckpoint(f) for f in (saved / ITERATION, tmp_path / "again/release"))
    assert new.object("decoder.layers.mlp.linear_fc1._extra_state/shard_1_2") == [None]
    assert set(old.keys) == set(new.keys)
    assert json.loads((tmp_path / "again/release/metadata.json").read_text()) == json.loads(
        (saved / ITERATION / "metadata.json").read_text()
    )


def test_a_common_state_among_the_chunks_is_read(saved: Path, tmp_path: Path) -> None:
    """As megatron-core 0.19 saves it."""
    rewritten(saved, tmp_path / "new", common=True)
    assert not (tmp_path / "new" / ITERATION / "common.pt").exists()
    assert TorchDistCheckpoint(tmp_path / "new").arguments["hidden_size"] == 8


def test_tensors_of_an_optimizer_are_left_out(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Even those that mtjax does not read, here for a gap between its chunks."""
    moment = "optimizer.state.exp_avg.decoder.final_layernorm.weight"
    rewritten(saved, tmp_path / "new", edit=lambda writer: writer.chunk(moment, (8,), (0,), np.zeros(4, np.float32)))
    assert convert(f"megatron:{tmp_path / 'new'}", f"mtjax:{tmp_path / 'ours'}") == 0
    assert "float32; --with-optimizer converts the optimizer's state, too\n" in capsys.readouterr().out


def test_commands_that_take_weights_of_any_kind_take_it(saved: Path) -> None:
    """Such as `mtjax finetune --init-from` and `mtjax generate --from`."""
    text = f"megatron:{saved}"
    model = SavedModel.open(text)
    assert model.config.model == model_of(text, "--init-from")
    config = without_training(model.config, Parallel(mesh="1x2"))
    arrays = model.parameters(ShardedModel(config, mesh_of("1x2")))
    table = next(array for path, array in jax.tree_util.tree_leaves_with_path(arrays) if dotted(path) == "embedding")
    np.testing.assert_array_equal(np.asarray(table)[:20], numbers(TABLE, (), (24, 8))[:20])


def test_uneven_chunks_of_other_processes_are_the_same(saved: Path, tmp_path: Path) -> None:
    def staggered(key: str, chunks: CHUNKS) -> CHUNKS:
        return [part for offsets, array in chunks for part in halves(offsets, array)]

    def halves(offsets: tuple[int, ...], array: np.ndarray) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
        cut = max(1, array.shape[-1] // 3)
        for first, part in ((0, array[..., :cut]), (cut, array[..., cut:])):
            if part.size:
                yield (*offsets[:-1], offsets[-1] + first), part

    rewritten(saved, tmp_path / "new", staggered)
    old, new = TorchDistCheckpoint(saved), TorchDistCheckpoint(tmp_path / "new")
    for name in old.shapes:
        np.testing.assert_array_equal(old.shard(name, 0), new.shard(name, 0))


def rewritten(
    saved: Path,
    target: Path,
    change: Callable[[str, CHUNKS], CHUNKS] = lambda key, chunks: chunks,
    edit: Callable[[DistributedWriter], None] = lambda writer: None,
    *,
    common: bool = False,
) -> None:
    """A copy whose chunks are changed, and then what `.metadata` lists; with `common` the common state is an object."""
    old = DistributedCheckpoint(saved / ITERATION)
    folder = target / ITERATION
    writer = DistributedWriter(folder)
    for key in old.keys:
        tensor = old.tensor(key)
        whole = tensor.read()
        boxes = [tuple(slice(o, o + s) for o, s in zip(c.offsets, c.sizes, strict=True)) for c in tensor.chunks]
        chunks = [(c.offsets, whole[box]) for c, box in zip(tensor.chunks, boxes, strict=True)]
        for offsets, array in change(key, chunks):
            writer.chunk(key, tensor.shape, offsets, array)
    edit(writer)
    if common:
        state = Archive(saved / ITERATION / "common.pt").state()
        args = {name: value for name, value in vars(state["args"]).items() if isinstance(value, int | float | str)}
        state = {"args": argparse.Namespace(**args), "checkpoint_version": 3.0}
        writer.object("common_state/shard_0_1", [state])
    else:
        shutil.copy(saved / ITERATION / "common.pt", folder)
    writer.close()
    shutil.copy(saved / ITERATION / "metadata.json", folder)
    shutil.copy(saved / "latest_checkpointed_iteration.txt", target)


class Evil:
    """A pickle that would run a command."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


def refuses(folder: Path, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One sentence, exit code 2, and nothing half-written."""
    before = sorted(folder.parent.iterdir())
    assert convert(f"megatron:{folder}", f"mtjax:{folder.parent / 'never'}") == 2
    error = capsys.readouterr().err.strip()
    assert said in error
    assert error.startswith("error: ")
    assert "\n" not in error
    assert sorted(folder.parent.iterdir()) == before


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def zip_of(path: Path, value: Any) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("common/data.pkl", pickle.dumps(value))


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing shard": (lambda f: (f / "__2_0.distcp").unlink(), "lacks 1 of its files: __2_0.distcp"),
    "missing metadata": (lambda f: (f / ".metadata").unlink(), "lacks .metadata, which `cp"),
    "missing common state": (lambda f: (f / "common.pt").unlink(), "lacks common.pt, which holds Megatron's arguments"),
    "save that did not finish": (lambda f: (f / "metadata.json").unlink(), "the save did not finish"),
    "truncated shard": (lambda f: cut(f / "__0_1.distcp", 3000), "__0_1.distcp is truncated: it has 3000 bytes"),
    "empty shard": (lambda f: cut(f / "__1_0.distcp", 0), "__1_0.distcp is truncated: it has 0 bytes"),
    "shard of zeros": (
        lambda f: (f / "__0_0.distcp").write_bytes(bytes(9000)),
        "__0_0.distcp is corrupted: at byte",
    ),
    "truncated metadata": (lambda f: cut(f / ".metadata", 2000), ".metadata is corrupted: it is not a complete pickle"),
    "empty metadata": (lambda f: cut(f / ".metadata", 0), ".metadata is corrupted"),
    "metadata of something else": (
        lambda f: (f / ".metadata").write_bytes(pickle.dumps([1, 2])),
        ".metadata does not describe a checkpoint",
    ),
    "metadata that would run code": (
        lambda f: (f / ".metadata").write_bytes(pickle.dumps(Evil(f / "ran"))),
        "it names posix.system, which is not loaded: the file may be meant to run code",
    ),
    "common state that would run code": (
        lambda f: zip_of(f / "common.pt", {"args": Evil(f / "ran")}),
        "it names posix.system, which is not loaded",
    ),
    "common state that would evaluate code": (
        lambda f: (f / "common.pt").write_bytes(evaluating()),
        "it names builtins.eval, which is not loaded",
    ),
    "truncated common state": (lambda f: cut(f / "common.pt", 700), "common.pt is corrupted"),
    "common state that is a list": (lambda f: zip_of(f / "common.pt", [1]), "has a common state that is not a dict"),
    "common state without arguments": (lambda f: zip_of(f / "common.pt", {}), "is missing num_layers, hidden_size"),
    "zarr": (
        lambda f: (f / "metadata.json").write_text('{"sharded_backend": "zarr"}'),
        "is in Megatron's format zarr, which mtjax does not read: save it again with --ckpt-format torch_dist",
    ),
    "metadata.json of something else": (
        lambda f: (f / "metadata.json").write_text('{"other": 1}'),
        "metadata.json is corrupted: it does not name the format",
    ),
    "metadata.json that is no JSON": (lambda f: cut(f / "metadata.json", 5), "metadata.json is corrupted"),
}


def evaluating() -> bytes:
    """A common state whose pickle would call `eval`."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("common/data.pkl", b"\x80\x02cbuiltins\neval\nX\x05\x00\x00\x001 + 1\x85R.")
    return buffer.getvalue()


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_folder_is_one_sentence(name: str, saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage, said = DAMAGES[name]
    damage(saved / ITERATION)
    refuses(saved, said, capsys)
    assert not (saved / ITERATION / "ran").exists()


def listed_as(writer: DistributedWriter, dtype: str) -> None:
    """Lists another type than the file's."""
    writer._tensors[NORM] = (dtype, *writer._tensors[NORM][1:])


def listed_in(writer: DistributedWriter, file: str) -> None:
    """Lists another file."""
    writer._entries[NORM, (0,)] = dataclasses.replace(writer._entries[NORM, (0,)], file=file)


UNTRUE: dict[str, tuple[dict[str, Any], str]] = {
    "a gap": (
        {"change": lambda key, chunks: chunks[1:] if key == TABLE else chunks},
        f"{TABLE} has chunks with 96 of its 192 numbers: some are missing",
    ),
    "an overlap": (
        {"change": lambda key, chunks: [*chunks, ((2, 0), chunks[0][1][2:5])] if key == TABLE else chunks},
        f"{TABLE} has chunks that overlap: [12, 8] at [0, 0] and [3, 8] at [2, 0]",
    ),
    "a chunk outside": (
        {"change": lambda key, chunks: [((4,), chunks[0][1])] if key == NORM else chunks},
        f"{NORM} is [8], and has a chunk of [8] at [4]",
    ),
    "another type": (
        {"edit": lambda writer: listed_as(writer, "float16")},
        f"lists float16 [8] there, of {NORM}: the files are of different saves",
    ),
    "a type that is not read": ({"edit": lambda writer: listed_as(writer, "complex64")}, "names torch.complex64"),
    "8 bits": ({"edit": lambda writer: listed_as(writer, "int8")}, "holds int8; weights are converted from 16 or 32"),
    "a file elsewhere": ({"edit": lambda writer: listed_in(writer, "../secret")}, "in '../secret', which is outside"),
    "another file": ({"edit": lambda writer: listed_in(writer, "common.pt")}, "common.pt is truncated"),
    "a tensor that is missing": (
        {"change": lambda key, chunks: [] if key == NORM else chunks},
        f"missing:\n    {NORM}",
    ),
    "experts with keys of their own": (
        {"edit": lambda w: w.chunk("decoder.layers.mlp.linear_fc1.weight_w", (1,), (0,), np.zeros(1, np.float32))},
        "was saved with singleton_local_shards, which is not read",
    ),
}


@pytest.mark.parametrize("name", UNTRUE)
def test_lists_that_are_not_true_are_refused(name: str, saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes, said = UNTRUE[name]
    new = saved.parent / "new"
    rewritten(saved, new, **changes)
    assert convert(f"megatron:{new}", f"mtjax:{saved.parent / 'never'}") == 2
    assert said in capsys.readouterr().err
    assert not (saved.parent / "never").exists()


def test_a_tensor_that_would_run_code_is_refused(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    evil, append = Call("os.system", (f"touch {tmp_path / 'ran'}",)), DistributedWriter._append

    def append_evil(self: Any, key: str, offsets: Any, value: Any, arrays: Any = ()) -> None:
        append(self, key, offsets, evil, arrays)

    monkeypatch.setattr(DistributedWriter, "_append", append_evil)
    rewritten(saved, tmp_path / "new")
    refuses(tmp_path / "new", "it names os.system, which is not loaded: the file may be meant to run code", capsys)
    assert not (tmp_path / "ran").exists()


OTHERS = {
    "torchtitan": ("tok_embeddings.weight", "is a checkpoint of torchtitan: use torchtitan:"),
    "fsdp_dtensor": ("model.module.decoder.final_layernorm.weight", "such as Megatron's fsdp_dtensor or torch_dcp"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_distributed_formats_are_named(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key, said = OTHERS[name]
    writer = DistributedWriter(tmp_path / "other")
    writer.chunk(key, (2,), (0,), np.zeros(2, np.float32))
    writer.close()
    refuses(tmp_path / "other", said, capsys)


def test_16_bits_are_kept(saved: Path, tmp_path: Path) -> None:
    rewritten(saved, tmp_path / "new", lambda key, chunks: [(o, a.astype(ml_dtypes.bfloat16)) for o, a in chunks])
    assert TorchDistCheckpoint(tmp_path / "new").dtype == "bfloat16"
    assert convert(f"megatron:{tmp_path / 'new'}", f"mtjax:{tmp_path / 'ours'}") == 0
    assert convert(f"mtjax:{tmp_path / 'ours'}", f"megatron:{tmp_path / 'again'}", *DISTRIBUTED) == 0
    old, new = TorchDistCheckpoint(tmp_path / "new"), TorchDistCheckpoint(tmp_path / "again")
    assert new.dtype == "bfloat16"
    for name in old.shapes:
        np.testing.assert_array_equal(old.shard(name, 0)[:20], new.shard(name, 0)[:20])


def test_transformer_engine_s_norms_have_objects_too(saved: Path, tmp_path: Path) -> None:
    """Megatron-LM does not load a checkpoint that lacks one; those of `local` are what megatron-core saved."""
    assert convert(f"megatron:{saved}", f"mtjax:{tmp_path / 'ours'}") == 0
    local = ("--transformer-impl", "local")
    assert convert(f"mtjax:{tmp_path / 'ours'}", f"megatron:{tmp_path / 'local'}", *DISTRIBUTED, *local) == 0
    assert convert(f"mtjax:{tmp_path / 'ours'}", f"megatron:{tmp_path / 'te'}", *DISTRIBUTED) == 0
    folders = (saved / ITERATION, tmp_path / "local/release", tmp_path / "te/release")
    theirs, local_ones, te = (set(DistributedCheckpoint(folder).objects) for folder in folders)
    assert local_ones == theirs
    attention = {f"decoder.layers.self_attention.core_attention._extra_state/shard_{i}_2" for i in range(2)}
    assert te == theirs | attention | {"decoder.final_layernorm._extra_state/shard_0_1"}


def test_the_code_before_megatron_core_is_refused(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert(f"megatron:{saved}", f"mtjax:{tmp_path / 'ours'}") == 0
    legacy = ("--transformer-impl", "legacy")
    assert convert(f"mtjax:{tmp_path / 'ours'}", f"megatron:{tmp_path / 'never'}", *DISTRIBUTED, *legacy) == 2
    assert "is Megatron-Core's, and --transformer-impl is legacy: use --ckpt-format torch" in capsys.readouterr().err
    assert not (tmp_path / "never").exists()


def test_a_slice_of_a_large_tensor_takes_its_own_memory(tmp_path: Path) -> None:
    """However the chunks are cut: here all layers are one."""
    layers, size = 32, 128
    writer = DistributedWriter(tmp_path / "folder")
    for half in range(2):
        part = np.ones((layers, size // 2, size), np.float32)
        writer.chunk("x", (layers, size, size), (0, half * size // 2, 0), part)
    writer.close()
    tensor = DistributedCheckpoint(tmp_path / "folder").tensor("x")
    tracemalloc.start()
    assert tensor.read((5,)).sum() == size**2
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 3 * 4 * size**2 < 4 * layers * size**2


def test_options_that_have_no_effect_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert convert("mtjax:a", "megatron:b", "--ckpt-format", "torch_dist", "--tensor", "2") == 2
    assert "--tensor has no effect with --ckpt-format torch_dist" in capsys.readouterr().err
    assert convert("mtjax:a", "hf:b", "--ckpt-format", "torch_dist") == 2
    assert "--ckpt-format has no effect on a conversion from mtjax to hf: remove it" in capsys.readouterr().err


def test_the_kind_is_recognised_where_it_was_not_named(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in (saved, saved / ITERATION):
        assert convert(f"hf:{folder}", f"mtjax:{saved.parent / 'never'}") == 2
        assert f"it looks like megatron:{folder}" in capsys.readouterr().err
        with pytest.raises(UserError, match=r"Megatron-LM's: convert them first"):
            find_weights(folder)


def test_boxes_that_overlap_are_found_in_any_arrangement() -> None:
    grid = [((i, j, 0), (1, 3, 4)) for i in range(40) for j in range(0, 120, 3)]
    assert overlapping(grid) is None
    pinwheel = [((0, 0), (2, 1)), ((0, 1), (1, 2)), ((1, 2), (2, 1)), ((2, 0), (1, 2)), ((1, 1), (1, 1))]
    for order in itertools.permutations(pinwheel):
        assert overlapping(order) is None
        assert overlapping([*order, ((1, 1), (2, 1))]) is not None
    assert overlapping([*grid, ((20, 61, 3), (1, 1, 1))]) == (((20, 60, 0), (1, 3, 4)), ((20, 61, 3), (1, 1, 1)))
    assert overlapping([((), ()), ((), ())]) is not None


def test_a_scalar_and_a_large_integer_are_written_and_read(tmp_path: Path) -> None:
    writer = DistributedWriter(tmp_path / "folder")
    writer.chunk("scalar", (), (), np.array(2.5, np.float32))
    writer.object("object", {"large": -(2**40), "nested": ("a", [None, True, 1.5])})
    writer.close()
    found = DistributedCheckpoint(tmp_path / "folder")
    assert found.tensor("scalar").read() == 2.5
    assert found.object("object") == {"large": -(2**40), "nested": ("a", [None, True, 1.5])}
