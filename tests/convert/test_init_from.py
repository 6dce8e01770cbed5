"""A run starts from converted weights or another run's: their very bits, on any mesh, and nothing else of theirs."""

import json
import shutil

import jax
import numpy as np
import pytest

from mtjax.commands.convert import main
from mtjax.config import replace
from mtjax.convert.saved_model import Hints, SavedModel
from mtjax.errors import UserError
from mtjax.runtime.checkpoints.checkpoint import Checkpoints, fingerprint_of_slice, fingerprints
from mtjax.runtime.checkpoints.weights import check_same_weights, find_weights, restore_weights
from mtjax.runtime.processes import coordination
from mtjax.sharding.param_specs import dotted
from mtjax.train.loop import train
from mtjax.train.objective import SavedWeights
from mtjax.train.setup import restore_or_initialize
from tests.convert.hf_folders import (
    GPT2_CONFIG,
    gpt2_shapes,
    random_tensors,
    small_tokenizer,
    tensors_in,
    write_folder,
)
from tests.tiny import program_of, run_steps

SAME = {
    "num_layers": 3,
    "mlp_size": 80,
    "vocab_size": 300,
    "vocab_multiple": 256,
    "norm_epsilon": 1e-6,
    "learning_rate": 1e-2,
}
"""What the folder's model has beside the tiny one's settings."""


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    pytest.importorskip("safetensors", reason="needs the extra convert: pip install '.[convert]'")
    folder = tmp_path_factory.mktemp("init")
    hf = write_folder(folder / "hf", random_tensors(gpt2_shapes()), GPT2_CONFIG, tokenizer=True)
    assert main(["--from", f"hf:{hf}", "--to", f"mtjax:{folder / 'ours'}", "--vocab-multiple", "256"]) == 0
    return folder / "ours"


@pytest.fixture(scope="module")
def a_run(tmp_path_factory):
    """The checkpoints of two steps of the tiny model, and its last state."""
    folder, program = tmp_path_factory.mktemp("run"), program_of("2x4")
    state, _ = run_steps(program, 2)
    checkpoints = Checkpoints(folder / "checkpoints", keep_last=1)
    checkpoints.save(state, program.config, 16)
    checkpoints.close()
    return folder, jax.tree.map(np.asarray, state.parameters), fingerprints(state)


def start(folder, mesh="2x4", **settings):
    """What the trainer does at its start, but for the data."""
    program, weights = program_of(mesh, **settings), find_weights(folder)
    check_same_weights(weights, program.abstract_parameters, program.config)
    parameters = restore_weights(weights, program.abstract_state.parameters)
    return program, program.initialize(0, parameters)


def test_converted_weights_arrive_bit_by_bit_where_they_belong(converted):
    program, state = start(converted, **SAME)
    table = state.parameters["embedding"]
    assert table.sharding == program.state_sharding.parameters["embedding"]
    tensors = tensors_in(converted.parent / "hf")
    np.testing.assert_array_equal(np.asarray(table)[:300], tensors["transformer.wte.weight"])
    up = np.asarray(state.parameters["stack"]["layers"]["mlp"]["up"]["weight"])
    np.testing.assert_array_equal(up[2], tensors["transformer.h.2.mlp.c_fc.weight"])
    assert int(state.step) == 0
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(state.optimizer))


@pytest.mark.parametrize("mesh", ["2x4", "1x1"])
@pytest.mark.parametrize("place", [".", "checkpoints", "checkpoints/2"])
def test_another_run_s_weights_start_a_run_without_its_step_and_moments(a_run, mesh, place):
    folder, parameters, _ = a_run
    _, state = start(folder / place, mesh)
    jax.tree.map(np.testing.assert_array_equal, state.parameters, parameters)
    assert int(state.step) == 0
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(state.optimizer))


def test_the_rest_is_as_if_the_weights_were_drawn(a_run):
    fresh = program_of("2x4").initialize(0)
    _, state = start(a_run[0])
    np.testing.assert_array_equal(state.random, fresh.random)


class Silent:
    def say(self, text: str) -> None:
        pass


def test_a_run_s_own_checkpoint_goes_before_the_weights_it_once_started_from(a_run, tmp_path):
    """So that a job which is started again and again with the same command starts once, and then goes on."""
    program, weights = program_of("2x4"), find_weights(a_run[0])
    config = replace(program.config, resume=True)
    found = {}
    for name, folder in (("first", tmp_path), ("later", a_run[0] / "checkpoints")):
        checkpoints = Checkpoints(folder, keep_last=1)
        found[name] = restore_or_initialize(program, checkpoints, SavedWeights(weights), config, Silent())
        checkpoints.close()
        jax.tree.map(np.testing.assert_array_equal, found[name].state.parameters, a_run[1])
    assert (found["first"].step, found["later"].step) == (0, 2)
    assert (found["first"].consumed_samples, found["later"].consumed_samples) == (0, 16)


def test_processes_with_other_weights_do_not_begin_together(converted, a_run, monkeypatch):
    """Each reads its shards from its own folder: half of a model would be another's."""
    said = []

    def gather(name, text):
        said.append(text)
        return [json.dumps(["0" * 64, "/scratch/weights"]), text]

    monkeypatch.setattr(coordination, "all_gather_text", gather)
    program, folder = program_of("2x4"), a_run[0] / "checkpoints" / "2"
    refused = rf"process 1 has read other weights than process 0: {folder} \(digest \w{{8}}\), and /scratch/weights \("
    with pytest.raises(UserError, match=refused):
        restore_weights(find_weights(folder), program.abstract_state.parameters)
    # Of other formats what is read counts: files may have other times, or lie beside others.
    hf = converted.parent / "hf"
    tensors = {name: 2 * array for name, array in random_tensors(gpt2_shapes()).items()}
    other = write_folder(converted.parent / "other", tensors, GPT2_CONFIG, tokenizer=True)
    moved = shutil.copytree(hf, converted.parent / "moved", copy_function=shutil.copy)
    program, name = program_of("2x4", **SAME), "final_norm.scale"
    for source in (hf, moved, other):
        with pytest.raises(UserError, match=rf"process 1 has read other weights than process 0: {source} \(digest"):
            SavedModel.open(f"hf:{source}", Hints(256)).read({name: dict(targets(program))[name]}, program)
    own, same, another = (json.loads(text)[0] for text in said[-3:])
    assert own == same != another


def targets(program):
    """The parameters of a program by name."""
    leaves = jax.tree_util.tree_leaves_with_path(program.restore_target)
    return [(dotted(path), leaf) for path, leaf in leaves]


def test_all_differences_are_listed(converted, a_run):
    with pytest.raises(UserError) as caught:
        start(converted, num_layers=2, hidden_dropout=0.3)
    said = str(caught.value)
    for line in ("num_layers is 3 there and 2 here", "mlp_size is 80 there and 128 here", "vocab_size is 300 there"):
        assert line in said
    assert "norm_epsilon is 1e-06 there and 1e-05 here" in said
    assert "dropout" not in said, "dropout may differ"
    start(a_run[0], hidden_dropout=0.0, mlp_size=128)  # 128 is 4 x hidden_size, written out


def test_damaged_weights_are_refused(converted, tmp_path):
    folder = shutil.copytree(converted, tmp_path / "damaged")
    (folder / "weights/state/parameters.positions/0.0").unlink()
    with pytest.raises(UserError, match=r"corrupted: parameters\.positions"):
        start(folder, **SAME)
    (folder / "weights/state/parameters.stack.layers.mlp.up.weight/1.0.0").write_bytes(b"no zstd")
    with pytest.raises(UserError, match="are corrupted: FAILED_PRECONDITION"):
        start(folder, **SAME)


@pytest.mark.parametrize(("config", "said"), [("hf", "mtjax convert --from hf:"), ("nowhere", "it does not exist")])
def test_folders_without_weights_of_ours_say_what_to_do(converted, config, said):
    with pytest.raises(UserError, match=said):
        find_weights(converted.parent / config)


def test_a_run_does_not_begin_in_a_converted_folder(converted):
    config = replace(program_of("1x1").config, out=converted, init_from=converted)
    with pytest.raises(UserError, match="holds converted weights: start from them with --init-from"):
        train(config, "tiny")


def test_fingerprints_of_parts_add_up_to_the_whole(a_run):
    _, parameters, prints = a_run
    weight = parameters["stack"]["layers"]["attention"]["qkv"]["weight"]
    parts = [fingerprint_of_slice(part, i * part.size) for i, part in enumerate(weight)]
    assert sum(parts) % 2**32 == prints["parameters.stack.layers.attention.qkv.weight"]
    assert sum(parts[::-1]) % 2**32 != fingerprint_of_slice(weight[::-1], 0)


def test_a_run_is_exported(a_run, tmp_path):
    """Checkpoints hold several layers in one chunk, cut over the mesh."""
    pytest.importorskip("safetensors", reason="needs the extra convert: pip install '.[convert]'")
    folder, parameters, _ = a_run
    assert main(["--from", f"mtjax:{folder}", "--to", f"hf:{tmp_path / 'hf'}"]) == 0
    found = tensors_in(tmp_path / "hf")
    np.testing.assert_array_equal(found["transformer.wte.weight"], parameters["embedding"][:250])
    for i in range(2):
        expected = parameters["stack"]["layers"]["attention"]["qkv"]["weight"][i].reshape(32, 96)
        np.testing.assert_array_equal(found[f"transformer.h.{i}.attn.c_attn.weight"], expected)


def test_an_exported_run_says_which_tokens_are_special(a_run, tmp_path):
    pytest.importorskip("safetensors", reason="needs the extra convert: pip install '.[convert]'")
    folder = shutil.copytree(a_run[0], tmp_path / "run")
    small_tokenizer().save(str(folder / "tokenizer.json"))  # as the trainer leaves it: no tokenizer_config.json
    assert main(["--from", f"mtjax:{folder}", "--to", f"hf:{tmp_path / 'hf'}"]) == 0
    said = json.loads((tmp_path / "hf/tokenizer_config.json").read_text())
    assert said["eos_token"] == "<|endoftext|>"
    assert json.loads((tmp_path / "hf/config.json").read_text())["eos_token_id"] == 0
