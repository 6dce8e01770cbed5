"""What is said about weights that are not there, or of a network that mtjax does not have."""

from pathlib import Path

import pytest

from mtjax import cli
from mtjax.convert.families.registry import FAMILIES, family_of_config
from mtjax.convert.saved_model import parse_named
from mtjax.convert.stream import check_folder, understood
from mtjax.errors import UserError


@pytest.mark.parametrize("name", ["mistal", "qwen", "gemma3", "phimoe", "modernbert"])
def test_a_network_that_mtjax_lacks_has_no_neighbour(name: str) -> None:
    """Names that are spelled alike are other networks."""
    with pytest.raises(UserError) as refused:
        family_of_config({"model_type": name}, "config.json")
    said = str(refused.value)
    reason = ": its first layer has no norm before attention, unlike the others" if name == "modernbert" else ""
    assert said.startswith(f"config.json: model_type '{name}' is not supported{reason}; supported are gpt2, ")
    assert "did you mean" not in said


def test_a_name_of_the_hub_is_answered_with_the_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["convert", "--from", "hf:gpt2", "--to", "mtjax:new"]) == 2
    advice = "hf: needs a folder, or OWNER/NAME on the Hugging Face hub: download the model with `hf download gpt2 "
    advice += "--local-dir gpt2`"
    assert capsys.readouterr().err == f"error: gpt2 does not exist. {advice}\n"
    with pytest.raises(UserError, match="on the Hugging Face hub, use --init-from hf:HuggingFaceTB/SmolLM2-135M"):
        parse_named("HuggingFaceTB/SmolLM2-135M", "--init-from")
    for path in ("a/b/c", "/nowhere", "../a"):
        with pytest.raises(UserError, match=f"{Path(path)} does not exist$"):
            check_folder(Path(path), "hf")


def test_what_a_file_lacks_is_named() -> None:
    with (
        pytest.raises(UserError, match="config.json does not describe .*: it is missing n_embd"),
        understood("config.json"),
    ):
        raise KeyError("n_embd")


OUTPUT = frozenset({"shared.weight", "lm_head.weight"})


@pytest.mark.parametrize(
    ("kind", "config", "names", "is_tied"),
    [
        ("t5", {}, OUTPUT - {"lm_head.weight"}, True),
        ("t5", {"tie_word_embeddings": False}, OUTPUT, False),
        ("t5", {"tie_word_embeddings": True, "scale_decoder_outputs": False}, OUTPUT, False),  # transformers 5's T5 1.1
        ("umt5", {"tie_word_embeddings": True, "scale_decoder_outputs": True}, OUTPUT, True),
        ("mt5", {"tie_word_embeddings": True}, OUTPUT, False),
        ("t5", {"scale_decoder_outputs": False}, OUTPUT - {"lm_head.weight"}, None),
        ("mt5", {}, OUTPUT - {"lm_head.weight"}, None),
    ],
)
def test_a_t5_s_output_is_tied_where_it_is_scaled(
    kind: str, config: dict, names: frozenset, is_tied: bool | None
) -> None:
    if is_tied is None:
        with pytest.raises(UserError, match=f"this {kind} has no lm_head.weight, and its outputs are not scaled"):
            FAMILIES[kind].model_settings(config, names, "config.json")
    else:
        assert FAMILIES[kind].model_settings(config, names, "config.json")["tie_embeddings"] == is_tied
