"""DeepSeek-V3's layer of multi-token prediction: losses by transformers' modules, and tensors there and back."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from mtjax.config import replace
from mtjax.convert.hugging_face import HuggingFaceSource
from mtjax.convert.saved_model import SavedModel
from mtjax.errors import UserError
from mtjax.layout.mesh import MeshShape
from mtjax.models.language_model import run_sections
from mtjax.models.sharded_model import ShardedModel
from mtjax.sharding.axes import use_rules
from mtjax.sharding.device_mesh import make_mesh
from tests.convert.hf_folders import tensors_in, write_back
from tests.parity.compare import relative
from tests.parity.decoder_types import CASES
from tests.parity.test_decoder_types import network_of, torch, transformers

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")]

CASE = CASES["deepseek_v3"]
LAYERS = CASE.config["num_hidden_layers"]
AHEAD = f"model.layers.{LAYERS}"


def layer_ahead(network: Any, folder: Path) -> tuple[Any, dict[str, Any]]:
    """A model of one layer, which is that of the prediction with its final norm, and the tensors that it adds."""
    settings = CASE.config | {"num_hidden_layers": 1, "first_k_dense_replace": 0}
    config = transformers.AutoConfig.for_model(CASE.model_type, **settings)
    torch.manual_seed(1)
    ahead = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=CASE.attention).eval()
    width = CASE.config["hidden_size"]
    added = {f"{AHEAD}.{name}.weight": 1 + 0.3 * torch.randn(width) for name in ("enorm", "hnorm")}
    added[f"{AHEAD}.eh_proj.weight"] = 0.3 * torch.randn(width, 2 * width)
    with torch.no_grad():
        for parameter in ahead.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    ahead.save_pretrained(folder)  # it writes experts one by one
    added |= {
        name.replace("model.layers.0", AHEAD).replace("model.norm", f"{AHEAD}.shared_head.norm"): torch.tensor(tensor)
        for name, tensor in tensors_in(folder).items()
        if name.startswith(("model.layers.0.", "model.norm."))
    }
    copies = network.state_dict()
    added[f"{AHEAD}.embed_tokens.weight"] = copies["model.embed_tokens.weight"].clone()
    added[f"{AHEAD}.shared_head.head.weight"] = copies["lm_head.weight"].clone()
    return ahead, added


def folder_with(network: Any, added: dict[str, Any], folder: Path) -> Path:
    from safetensors.torch import load_file, save_file

    network.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    if added:
        save_file({**load_file(folder / "model.safetensors"), **added}, folder / "model.safetensors")
    return folder


def expected_losses(network: Any, ahead: Any, added: dict[str, Any], text: Any) -> np.ndarray:
    """Of the token after the next, at all positions that have one."""

    def norm(x: Any, name: str) -> Any:
        epsilon = CASE.config.get("rms_norm_eps", 1e-6)
        return torch.nn.functional.rms_norm(x, x.shape[-1:], added[f"{AHEAD}.{name}.weight"], epsilon)

    tokens = text[:, :-1]
    with torch.no_grad():
        hidden = network.model(tokens[:, :-1], use_cache=False).last_hidden_state
        embedded = network.model.embed_tokens(tokens[:, 1:])
        both = torch.cat([norm(embedded, "enorm"), norm(hidden, "hnorm")], -1)
        out = ahead.model(inputs_embeds=both @ added[f"{AHEAD}.eh_proj.weight"].T, use_cache=False).last_hidden_state
        return torch.nn.functional.cross_entropy(network.lm_head(out).mT, text[:, 2:], reduction="none").numpy()


def our_losses(source: HuggingFaceSource, text: np.ndarray) -> np.ndarray:
    config = replace(source.origin.config, compute_dtype="float32", attention="xla", vocab_multiple=1)
    config = replace(config, hidden_dropout=0.0, attention_dropout=0.0)
    sharded = ShardedModel(config, make_mesh(MeshShape(), jax.devices("cpu")))
    arrays = SavedModel(Path(), source).parameters(sharded)

    def run(parameters: Any, tokens: Any, labels: Any) -> Any:
        with use_rules(sharded.layout.rules):
            model: Any = sharded.model(parameters)
            batch = {"tokens": tokens, "labels": labels}
            return model.losses(run_sections(model, batch, None)[0], batch, None, sharded.loss_options)["mtp_1_loss"]

    with jax.set_mesh(sharded.mesh):
        placed = (jax.device_put(part, sharded.batch_sharding) for part in (text[:, :-1], text[:, 1:]))
        return np.asarray(jax.jit(run)(arrays, *placed))


def test_the_layer_ahead_predicts_as_transformers_modules_do_there_and_back(tmp_path: Path) -> None:
    network = network_of(CASE)
    ahead, added = layer_ahead(network, tmp_path / "ahead")
    source = HuggingFaceSource(folder_with(network, added, tmp_path / "hf"), 1)
    assert source.origin.config.model.mtp_num_layers == 1
    text = np.random.default_rng(0).integers(3, CASE.config["vocab_size"], (2, CASE.length + 1)).astype(np.int32)
    expected = expected_losses(network, ahead, added, torch.tensor(text).long())
    assert relative(our_losses(source, text)[:, :-1], expected) < 1e-5

    write_back(source, tmp_path / "back")
    theirs, ours = (tensors_in(tmp_path / folder) for folder in ("hf", "back"))
    assert theirs.keys() == ours.keys()
    for tensor, array in theirs.items():
        np.testing.assert_array_equal(ours[tensor], array, err_msg=tensor)
    assert json.loads((tmp_path / "back/config.json").read_text())["num_nextn_predict_layers"] == 1

    added[f"{AHEAD}.embed_tokens.weight"][0, 0] += 1
    with pytest.raises(UserError, match=r"embed_tokens.weight differs from model.embed_tokens.weight"):
        HuggingFaceSource(folder_with(network, added, tmp_path / "other"), 1)
    without = HuggingFaceSource(folder_with(network, {}, tmp_path / "without"), 1)
    assert without.origin.config.model.mtp_num_layers == 0
    assert any("has no such layers" in note for note in without.origin.notes)
