"""What a folder holds is recognised by its content, and its arrays are listed; torchtitan's Llama is read."""

import json
import shutil
import zipfile
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from mtjax.commands.convert import main
from mtjax.convert.torch_dist_writer import DistributedWriter
from mtjax.runtime.checkpoints.weights import find_weights
from tests.convert.test_torch_dist import STORED, cut

pytestmark = pytest.mark.torch  # of Megatron-LM's format torch

SIZES = {"hidden": 16, "heads": 4, "kv_heads": 2, "mlp": 24, "layers": 2, "vocab": 32}
CONFIG = """[model]
family = "llama"
num_layers = 2
hidden_size = 16
num_heads = 4
num_kv_heads = 2
mlp_size = 24
sequence_length = 32
vocab_size = 32
rope_theta = 500000.0
"""
HUGGING_FACE = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
    "vocab_size": 32,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}


def llama() -> dict[str, np.ndarray]:
    """A Llama in transformers' names."""
    random = np.random.default_rng(0)
    draw = lambda *shape: random.standard_normal(shape).astype(np.float32)  # noqa: E731
    found = {"model.embed_tokens.weight": draw(32, 16), "model.norm.weight": draw(16), "lm_head.weight": draw(32, 16)}
    for layer in range(2):
        shapes = {"self_attn.q_proj": (16, 16), "self_attn.k_proj": (8, 16), "self_attn.v_proj": (8, 16)}
        shapes |= {"self_attn.o_proj": (16, 16), "mlp.gate_proj": (24, 16), "mlp.up_proj": (24, 16)}
        shapes |= {"mlp.down_proj": (16, 24), "input_layernorm": (16,), "post_attention_layernorm": (16,)}
        found |= {f"model.layers.{layer}.{name}.weight": draw(*shape) for name, shape in shapes.items()}
    return found


TITAN = {
    "model.embed_tokens": "tok_embeddings",
    "model.norm": "norm",
    "self_attn.q_proj": "attention.qkv_linear.wq",
    "self_attn.k_proj": "attention.qkv_linear.wk",
    "self_attn.v_proj": "attention.qkv_linear.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.layers": "layers",
}


def in_pairs(weight: np.ndarray, heads: int) -> np.ndarray:
    """A query's or key's rows in Meta's order, in which RoPE turns neighbours: of transformers' own conversion script
    the inverse."""
    width = weight.shape[0] // heads
    halves = weight.reshape(heads, 2, width // 2, weight.shape[1])
    return halves.transpose(0, 2, 1, 3).reshape(weight.shape)


def titan(*, is_old: bool = False) -> dict[str, np.ndarray]:
    """The same in torchtitan's names; older ones are in `model.`, without `qkv_linear`, and with `output`."""
    found = {}
    for name, weight in llama().items():
        heads = 4 if ".q_proj" in name else 2 if ".k_proj" in name else 0
        new = name
        for theirs, its in TITAN.items():
            new = new.replace(theirs, its)
        if is_old:
            new = "model." + new.replace("qkv_linear.", "").replace("lm_head", "output")
        found[new] = in_pairs(weight, heads) if heads else weight
    return found


def write_distributed(folder: Path, tensors: dict[str, np.ndarray]) -> Path:
    """A folder of torch.distributed.checkpoint, sharded by rows over two ranks, with an optimizer's state."""
    writer = DistributedWriter(folder)
    for name, whole in tensors.items():
        half = whole.shape[0] // 3
        for start, part in ((0, whole[:half]), (half, whole[half:])):
            writer.chunk(name, whole.shape, (start, *(0,) * (whole.ndim - 1)), part)
    writer.chunk("optimizer.state.tok_embeddings.weight.exp_avg", (4,), (0,), np.zeros(4, np.float32))
    writer.object("train_state", {"step": 3})
    writer.close()
    return folder


def write_hugging_face(folder: Path) -> Path:
    from safetensors.numpy import save_file

    folder.mkdir()
    save_file(llama(), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(HUGGING_FACE))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of each kind."""
    base = tmp_path_factory.mktemp("folders")
    with zipfile.ZipFile(STORED) as archive:
        archive.extractall(base / "torch_dist")
    write_hugging_face(base / "hf")
    write_distributed(base / "torchtitan" / "step-3", titan())
    write_distributed(base / "torchtitan" / "step-20", titan())
    write_distributed(base / "old titan", titan(is_old=True))
    write_distributed(base / "fsdp", {"net.weight": np.zeros((6, 2), np.float32)})
    tree = {"params": {"params": {"decoder": {"norm": jax.numpy.ones(8)}, "token_embedder": jax.numpy.ones((4, 8))}}}
    ocp.StandardCheckpointer().save((base / "maxtext" / "7" / "items").resolve(), tree)
    ocp.StandardCheckpointer().save((base / "orbax").resolve(), {"net": jax.numpy.ones((4, 8))})
    (base / "config.toml").write_text(CONFIG)
    convert(base / "hf", base / "mtjax")
    assert main(["--from", str(base / "hf"), "--to", f"megatron:{base / 'torch'}"]) == 0
    (base / "other").mkdir()
    (base / "other" / "notes.txt").write_text("weights are elsewhere")
    return base


def convert(source: Path | str, target: Path, *options: str) -> None:
    assert main(["--from", str(source), "--to", f"mtjax:{target}", *options]) == 0


SHOWN: dict[str, tuple[str, str, str]] = {
    "hf": ("hf is a model of Hugging Face, model_type llama", "model.norm.weight", "float32  [16]      model.safet"),
    "mtjax": (
        "mtjax is a folder that mtjax convert wrote",
        "parameters.final_norm.scale",
        "float32  [16]",
    ),
    "torch": (
        "torch is a checkpoint of Megatron-LM in the format torch, a file for each rank (in release)",
        "decoder.final_layernorm.weight",
        "float32  [16]",
    ),
    "torch_dist": (
        "torch_dist is a checkpoint of Megatron-LM in the format torch_dist, iteration 10 (in iter_0000010)",
        "embedding.word_embeddings.weight",
        "float32  [24, 8]",
    ),
    "torchtitan": (
        "torchtitan is a checkpoint of torchtitan, iteration 20 (in step-20)",
        "tok_embeddings.weight",
        "float32  [32, 16]  2 chunks in 1 files",
    ),
    "old titan": ("old titan is a checkpoint of torchtitan", "model.norm.weight", "float32  [16]      2 chunks"),
    "fsdp": (
        "fsdp is a checkpoint of torch.distributed.checkpoint of another program, with arrays such as net.weight",
        "net.weight",
        "float32  [6, 2]  2 chunks",
    ),
    "maxtext": (
        "maxtext is a checkpoint of Orbax, of MaxText, iteration 7 (in items)",
        "params.params.token_embedder",
        "float32  [4, 8]",
    ),
    "orbax": ("orbax is a checkpoint of Orbax, of another program", "net", "float32  [4, 8]  1 chunks"),
}


@pytest.mark.parametrize("name", SHOWN)
def test_a_folder_and_its_arrays_are_shown(name: str, folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    what, array, described = SHOWN[name]
    capsys.readouterr()
    assert main(["--show", str(folders / name)]) == 0
    first, *rows, last = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{folders}/{what}")
    line = next(row for row in rows if row.split()[0] == array)
    assert described.split() == line.split()[1:][: len(described.split())] or described in line
    assert f"{len(rows)} arrays with " in last


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("fsdp", "of another program, with arrays such as net.weight, which mtjax does not read"),
        ("maxtext", "is a checkpoint of Orbax, of MaxText, iteration 7 (in items), which mtjax does not read"),
        (
            "other",
            "holds no weights of a known format: Hugging Face, Megatron-LM, torchtitan, or Orbax of mtjax or MaxText",
        ),
        ("absent", "'absent' is not KIND:DIR"),
    ],
)
def test_what_is_not_read_is_named(
    name: str, said: str, folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = folders / name if (folders / name).exists() else name
    assert main(["--from", str(source), "--to", f"mtjax:{tmp_path / 'new'}"]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["torchtitan", "torchtitan/step-3", "old titan"])
def test_torchtitan_s_llama_is_the_same_weights(name: str, folders: Path, tmp_path: Path) -> None:
    """Named with its kind, or recognised."""
    kind = "torchtitan:" if name == "old titan" else ""
    convert(f"{kind}{folders / name}", tmp_path / "ours", "--config", str(folders / "config.toml"))
    old, new = (find_weights(folder) for folder in (folders / "mtjax", tmp_path / "ours"))
    assert new.metadata["fingerprints"] == old.metadata["fingerprints"]


def test_torchtitan_needs_a_config_of_its_model(
    folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["--from", f"torchtitan:{folders / 'torchtitan'}", "--to", f"mtjax:{tmp_path / 'new'}"]
    other = tmp_path / "other.toml"
    other.write_text(CONFIG.replace("num_layers = 2", "num_layers = 3"))
    wider = tmp_path / "wider.toml"
    wider.write_text(CONFIG.replace("mlp_size = 24", "mlp_size = 48"))
    for options, said in (
        ([], "has 2 layers, hidden size 16 and a vocabulary of 32, but torchtitan's checkpoints do not describe"),
        (["--config", str(other)], "describes another model than"),
        (["--config", str(wider)], "feed_forward.w1.weight is 24x16, but should be 48x16"),
    ):
        assert main([*command, *options]) == 2
        assert said in capsys.readouterr().err
    assert main(["--from", f"mtjax:{folders / 'mtjax'}", "--to", f"torchtitan:{tmp_path / 'new'}"]) == 2
    assert "torchtitan can be read, and not written: write hf or mtjax or megatron" in capsys.readouterr().err


def test_damaged_folders_are_one_sentence(folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def damaged(name: str, file: str, size: int | None) -> Path:
        shutil.copytree(folders / name, tmp_path / file.replace("/", "-"))
        path = tmp_path / file.replace("/", "-") / file
        path.unlink() if size is None else cut(path, size)
        return tmp_path / file.replace("/", "-")

    for name, file, size, said in (
        ("torchtitan/step-3", ".metadata", 100, ".metadata is corrupted: it is not a complete pickle"),
        ("hf", "model.safetensors", 40, "is not a safetensors file, or is incomplete: it has no header"),
        ("orbax", "_METADATA", 20, "_METADATA does not list arrays: it is damaged"),
        ("mtjax", "weights/page/metadata", 30, "metadata does not list arrays: it is damaged"),
    ):
        assert main(["--show", str(damaged(name, file, size))]) == 2
        error = capsys.readouterr().err.strip()
        assert said in error
        assert "\n" not in error
    lacking = damaged("torchtitan/step-3", "__0_0.distcp", None)
    assert main(["--show", str(lacking)]) == 0
    assert "missing files: __0_0.distcp" in capsys.readouterr().out
    config = ("--config", str(folders / "config.toml"))
    assert main(["--from", str(lacking), "--to", f"mtjax:{tmp_path / 'new'}", *config]) == 2
    assert "lacks 1 of its files: __0_0.distcp" in capsys.readouterr().err


def test_show_takes_no_other_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--show", "a", "--to", "mtjax:b"]) == 2
    assert "--to has no effect with --show: remove it" in capsys.readouterr().err
    assert main([]) == 2
    assert "give --from [KIND:]DIR and --to KIND:DIR, or --show DIR" in capsys.readouterr().err
    assert main(["--show", "absent"]) == 2
    assert "absent does not exist" in capsys.readouterr().err
