"""ModernBERT as transformers computes it: masked-LM logits, loss and every gradient, and its files to the bit."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from mtjax.config import replace
from mtjax.convert.hugging_face import HuggingFaceSource
from mtjax.convert.saved_model import SavedModel
from mtjax.errors import UserError
from mtjax.sharding.axes import use_rules
from mtjax.sharding.param_specs import dotted
from mtjax.train.step import make_train_step
from tests.convert.hf_folders import tensors_in, write_back
from tests.parity.compare import gradients_of, relative, shaken
from tests.tiny import batch_of, host_batch, mesh_of

torch = pytest.importorskip("torch", reason="needs the extra parity: pip install '.[parity]'")
transformers = pytest.importorskip(
    "transformers", minversion="5", reason="needs the extra parity: pip install '.[parity]'"
)
pytestmark = pytest.mark.torch

SIZES: dict[str, Any] = {
    "vocab_size": 250,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "max_position_embeddings": 32,
    "local_attention": 6,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id")),
    "attn_implementation": "eager",
}
WITH_BIASES = {"norm_bias": True, "attention_bias": True, "mlp_bias": True, "classifier_bias": True}
WITHOUT_EFFECT = "stack.layers.attention_norm."
"""Parameters whose first layer is not used."""


def modernbert(**settings: Any) -> Any:
    return shaken(lambda: transformers.ModernBertForMaskedLM(transformers.ModernBertConfig(**(SIZES | settings))))


def save(network: Any, folder: Path, tensors: Any = None) -> HuggingFaceSource:
    network.save_pretrained(folder)
    if tensors is not None:
        named = {name: torch.tensor(array).contiguous() for name, array in tensors.items()}
        from safetensors.torch import save_file

        save_file(named, folder / "model.safetensors", metadata={"format": "pt"})
    return HuggingFaceSource(folder, 256)


def by_name(tree: Any) -> dict[str, np.ndarray]:
    return {dotted(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


@pytest.mark.parametrize(
    ("mesh", "settings"),
    [
        ("1x1", WITH_BIASES),
        ("2x2", {}),
        pytest.param("2x2x2", {}, marks=pytest.mark.long),
        pytest.param("data=1,context=2,model=2", {}, marks=pytest.mark.long),
        pytest.param("1x1", {"layer_types": ["sliding_attention"] * 4, "local_attention": 100}, marks=pytest.mark.long),
    ],
)
def test_logits_loss_and_gradients_equal_transformers(mesh: str, settings: dict[str, Any], tmp_path: Path) -> None:
    network = modernbert(**settings)
    source = save(network, tmp_path / "weights")
    config = replace(source.origin.config, compute_dtype="float32", attention="xla", global_batch_size=8)
    config = replace(config, hidden_dropout=0.0, attention_dropout=0.0, microbatch_size=2)
    batch = host_batch(config, 0)
    long = {name: torch.tensor(batch[name]).long() for name in ("tokens", "padding_mask", "labels")}
    logits = network(long["tokens"], attention_mask=long["padding_mask"]).logits
    mask = torch.tensor(batch["loss_mask"]).flatten()
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), long["labels"].clamp(min=0).flatten(), reduction="none"
    )
    loss = (losses * mask).sum() / mask.sum()
    loss.backward()

    program = make_train_step(config, mesh_of(mesh))
    weights = SavedModel(Path(), source).parameters(program)
    placed = batch_of(program, 0)
    with jax.set_mesh(program.mesh):
        if mesh in ("1x1", "2x2"):  # where a rank has all layers and all of a sample

            def run(parameters: Any, batch: Any) -> Any:
                with use_rules(program.layout.rules):
                    model: Any = program.model(parameters)
                    return model.logits(model(batch["tokens"], None, batch["padding_mask"]))

            found = np.asarray(jax.jit(run)(weights, placed))[..., :250]
            real = batch["padding_mask"].astype(bool)
            assert relative(found[real], logits.detach().numpy()[real]) < 1e-5
        ours, _, gradients = jax.jit(lambda p, b: program.gradients(p, b, None))(weights, placed)
    assert abs(float(ours) / loss.item() - 1) < 1e-5
    # transformers' gradients, in a folder like its weights, come under our names.
    of_theirs = SavedModel(Path(), save(network, tmp_path / "gradients", gradients_of(network)))
    expected, found = by_name(of_theirs.parameters(program)), by_name(gradients)
    for name, array in expected.items():
        if name.startswith(WITHOUT_EFFECT):
            assert (found[name][:1] == 0).all(), name
            array, found[name] = array[1:], found[name][1:]
        assert relative(found[name], array) < 1e-5, name


@pytest.mark.parametrize("settings", [{}, WITH_BIASES | {"num_hidden_layers": 5, "tie_word_embeddings": False}])
def test_files_come_back_to_the_bit(settings: dict[str, Any], tmp_path: Path) -> None:
    network = modernbert(**settings)
    source = save(network, tmp_path / "hf")
    write_back(source, tmp_path / "back")
    theirs, ours = (tensors_in(tmp_path / folder) for folder in ("hf", "back"))
    assert theirs.keys() == ours.keys()
    for name, array in theirs.items():
        np.testing.assert_array_equal(ours[name], array, err_msg=name)
    again = transformers.ModernBertForMaskedLM.from_pretrained(tmp_path / "back", attn_implementation="eager").eval()
    tokens = torch.arange(3, 27)[None]
    with torch.no_grad():
        np.testing.assert_array_equal(again(tokens).logits.numpy(), network.eval()(tokens).logits.numpy())


def test_another_head_is_refused(tmp_path: Path) -> None:
    config = transformers.ModernBertConfig(**SIZES)
    transformers.ModernBertForSequenceClassification(config).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="architectures is ModernBertForSequenceClassification, but must be"):
        HuggingFaceSource(tmp_path, 1)
