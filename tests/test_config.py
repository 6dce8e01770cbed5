"""The config: TOML in and out, names, types and values."""

import dataclasses
import math
import tomllib
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from mtjax import config
from mtjax.config import Config, sizes
from mtjax.config.families import family_of
from mtjax.config.field_metadata import setting_of
from mtjax.config.model_identity import differences
from mtjax.errors import UserError, nearest
from mtjax.families.registry import FAMILIES
from tests.families.dummy import ROW

BOUNDED = [
    (section, field)
    for section, cls in get_type_hints(Config).items()
    for field in dataclasses.fields(cls)
    if setting_of(field).bound
]
SHIPPED = sorted(path.stem for path in config.shipped_folder().glob("*.toml"))


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    """Any value that an annotation allows; NaN is left out, which does not equal itself."""
    if get_origin(hint) is Literal:
        return st.sampled_from(get_args(hint))
    if get_args(hint)[1:] == (...,):
        return st.lists(values_of(get_args(hint)[0])).map(tuple)
    if get_origin(hint) is tuple:
        return st.tuples(*map(values_of, get_args(hint)))
    kinds = {
        int: st.integers(-(2**63), 2**63 - 1),
        float: st.floats(allow_nan=False),
        bool: st.booleans(),
        str: st.text(st.characters(codec="utf-8")),
        Path: st.text("abc/._-", min_size=1).map(Path),
        type(None): st.none(),
    }
    return st.one_of(*(kinds[k] if k in kinds else values_of(k) for k in get_args(hint) or (hint,)))


def configs() -> st.SearchStrategy[Config]:
    groups = {
        group: st.builds(cls, **{name: values_of(hint) for name, hint in get_type_hints(cls).items()})
        for group, cls in get_type_hints(Config).items()
    }
    return st.builds(Config, **groups)


@given(configs())
def test_any_config_survives_toml(given_config: Config) -> None:
    for text in (tomli_w.dumps(config.to_dict(given_config)), config.written(given_config)):
        assert config.from_dict(tomllib.loads(text)) == given_config


def test_saved_and_loaded(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    changed = config.replace(
        Config(), hidden_size=64, out=Path("runs/a b"), rampup_batch_size=(8, 8, 100), prompt="'\"é"
    )
    config.save(changed, path)
    assert config.load(path) == changed
    assert [p.name for p in tmp_path.iterdir()] == ["config.toml"]  # no temporary file stays


def test_a_saved_config_begins_with_what_somebody_chose(tmp_path: Path) -> None:
    """In each section: the rest are the family's defaults, below a comment, so that a run's config is complete."""
    path = tmp_path / "config.toml"
    chosen = config.replace(Config(), family="llama", num_layers=2, steps=5, mesh="2x4", hidden_dropout=0.1)
    config.save(chosen, path)
    above = {}
    for part in path.read_text().split("\n\n"):
        head, _, below = part.partition("# Defaults:\n")
        assert below
        above |= tomllib.loads(head)
    assert above == {
        "model": {"family": "llama", "num_layers": 2, "hidden_dropout": 0.1},
        "parallel": {"mesh": "2x4"},
        "data": {},
        "optimizer": {},
        "training": {"steps": 5},
        "output": {},
        "finetuning": {},
    }
    assert list(tomllib.loads(path.read_text())["model"])[:3] == ["family", "num_layers", "hidden_dropout"]


def test_every_field_has_one_name_over_all_groups() -> None:
    names = [f.name for cls in get_type_hints(Config).values() for f in dataclasses.fields(cls)]
    assert len(names) == len(set(names))
    reserved = {"config", "options", "help"} | set(get_type_hints(Config))
    assert not reserved & (set(names) - {"data", "optimizer"})  # --data is a field, and [data] its table


def test_configs_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().model.hidden_size = 1  # pyright: ignore[reportAttributeAccessIssue]


def test_file_over_base_over_defaults(tmp_path: Path) -> None:
    path = tmp_path / "partial.toml"
    path.write_text("[model]\nhidden_size = 64\n")
    loaded = config.load(path, base=config.replace(Config(), hidden_size=32, num_heads=4))
    assert (loaded.model.hidden_size, loaded.model.num_heads, loaded.model.num_layers) == (
        64,
        4,
        Config().model.num_layers,
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[model]\nhiden_size = 1", r"unknown key 'hiden_size' in \[model\] - did you mean 'hidden_size'\?"),
        ("[modle]\nhidden_size = 1", "unknown table 'modle' - did you mean 'model'"),
        ("hidden_size = 1", r"unknown key 'hidden_size' - it goes under \[model\]"),
        ("[training]\nhidden_size = 1", r"unknown key 'hidden_size' in \[training\] - it goes under \[model\]"),
        ("model = 1", r"model is a table, not a value: write \[model\]"),
        ("[model]\nhidden_size = 1.5", r"\[model\] hidden_size = 1.5 should be int"),
        ("[model]\nhidden_size = true", "hidden_size = True should be int"),
        ("[model]\nhidden_size = '64'", "hidden_size = '64' should be int"),
        ("[output]\nresume = 1", "resume = 1 should be bool"),
        ("[model]\nattention = 'flash'", "'flash' is not one of 'auto', 'xla', 'blocks', 'pallas', 'cudnn'"),
        ("[training]\nrampup_batch_size = [1, 2]", r"rampup_batch_size = \[1, 2\] should be a list of 3 int"),
        ("[model\n", "is not valid TOML"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        config.load(path)
    assert "wrong.toml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "binary.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="not valid TOML"):
        config.load(path)


def test_whole_numbers_are_floats_where_a_float_is_asked_for() -> None:
    loaded = config.from_dict({"optimizer": {"weight_decay": 0}})
    assert loaded.optimizer.weight_decay == 0.0
    assert type(loaded.optimizer.weight_decay) is float


def test_what_is_offloaded_is_named_in_any_order() -> None:
    loaded = config.from_dict({"parallel": {"offload": "parameters,optimizer"}})
    assert loaded.parallel.offload == "optimizer,parameters"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_layers": 0}, "num_layers is 0, and must be at least 1"),
        ({"microbatch_size": -1}, "microbatch_size is -1, and must be at least 1"),
        ({"hidden_dropout": 1.0}, "hidden_dropout is 1.0, and must be at least 0 and below 1"),
        ({"attention_dropout": math.nan}, "attention_dropout is nan"),
        ({"learning_rate": math.nan}, "learning_rate is nan, and must be a finite number"),
        ({"weight_decay": math.inf}, "weight_decay is inf"),
        ({"warmup_steps": -1}, "warmup_steps is -1, and must be 0 or more"),
        ({"hidden_size": 100, "num_heads": 8}, "hidden_size 100 is not divisible by num_heads 8; .* are 5 and 10"),
        ({"min_learning_rate": 1.0}, "min_learning_rate 1.0 is above learning_rate"),
        ({"initial_learning_rate": 1.0}, "initial_learning_rate 1.0 is above learning_rate 0.00015"),
        ({"initial_learning_rate": 1e-5, "warmup_steps": 0}, "is for warmup, and warmup_steps is 0: set warmup_steps"),
        ({"decay_steps": 3000}, "decay_steps 3000 must be above warmup_steps 3000"),
        ({"decay_style": "inverse-square-root", "warmup_steps": 0}, "set warmup_steps above 0"),
        ({"decay_style": "WSD"}, "decay_style WSD needs wsd_decay_steps"),
        ({"decay_style": "WSD", "wsd_decay_steps": 0}, "wsd_decay_steps is 0, and must be at least 1"),
        ({"wsd_decay_steps": 10}, "are for decay_style WSD, and decay_style is cosine"),
        ({"wsd_decay_style": "linear"}, "are for decay_style WSD, and decay_style is cosine"),
        ({"weight_decay_style": "linear"}, "weight_decay_style linear needs start_weight_decay, from which it grows"),
        ({"start_weight_decay": 0.0}, "needs weight_decay_style linear or cosine, and it is constant"),
        (
            {"start_weight_decay": 0.1, "weight_decay_style": "linear"},
            "start_weight_decay 0.1 must be between 0 and weight_decay 0.01, to which it grows",
        ),
        ({"beta1": 1.0}, "beta1 is 1.0"),
        ({"beta2": -0.1}, "beta2 is -0.1"),
        ({"norm_epsilon": math.nan}, "norm_epsilon is nan"),
        ({"num_workers": -1}, "num_workers is -1"),
        ({"loader_timeout": 0.0}, "loader_timeout is 0.0"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_values_that_cannot_be_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        config.validate(config.replace(Config(), **values))


@pytest.mark.parametrize(("section", "field"), BOUNDED, ids=lambda value: getattr(value, "name", value))
def test_a_field_with_a_bound_takes_what_is_within_it_alone(section: str, field: dataclasses.Field[Any]) -> None:
    """The bound stands beside the default: `validate` has no list of names that could miss a field."""
    outside = [value for value in (math.nan, -1, 0, 1, 3) if setting_of(field).bound.why_not(value)]
    assert outside
    for value in outside:
        with pytest.raises(UserError, match=f"{field.name} is {value}, and must be "):
            config.validate(config.replace(Config(), **{field.name: value}))
    if field.default is not None:
        assert setting_of(field).bound.why_not(field.default) is None


def test_replace_names_the_nearest_field() -> None:
    with pytest.raises(UserError, match="'stpes' - did you mean 'steps'"):
        config.replace(Config(), stpes=1)


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_configs_are_found_by_name_and_are_valid(name: str) -> None:
    path = config.find(name)
    assert config.find(f"{name}.toml") == path
    config.validate(config.load(name))
    header = path.read_text()
    assert header.startswith("#")
    assert f"--config {name}" in header or name == "default"  # how to run it


def test_a_file_goes_before_a_shipped_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("gpt2-tiny.toml").write_text("[model]\nnum_layers = 7\n")
    assert config.load("gpt2-tiny.toml").model.num_layers == 7
    assert config.load("gpt2-tiny").model.num_layers == 2


def test_a_name_that_does_not_exist_gets_the_nearest() -> None:
    with pytest.raises(UserError, match="no config file 'gpt2-smal', and none .* - did you mean 'gpt2-small'"):
        config.find("gpt2-smal")


@given(st.integers(1, 500), st.integers(1, 500))
def test_nearest_divisors_divide_and_are_nearest(total: int, wanted: int) -> None:
    found = [int(word) for word in sizes.nearest_divisors(total, wanted).split(" and ") if word]
    divisors = [d for d in range(1, total + 1) if total % d == 0 and d != wanted]
    assert set(found) <= set(divisors)
    assert not any(min(found) < d < wanted or wanted < d < max(found) for d in divisors)


@given(st.integers(1, 10**6), st.integers(1, 5000))
def test_the_vocabulary_is_padded_to_the_next_multiple(size: int, multiple: int) -> None:
    padded = sizes.padded_vocab_size(config.Model(vocab_size=size, vocab_multiple=multiple))
    assert padded % multiple == 0
    assert size <= padded < size + multiple


def test_nothing_close_gets_no_guess() -> None:
    assert nearest("xyzzy", ["steps", "seed"]) == ""


def test_a_family_brings_its_settings_and_what_is_said_beside_it_wins() -> None:
    llama = config.replace(Config(), family="llama", bias=True).model
    assert (llama.norm, llama.position, llama.activation) == ("rmsnorm", "rope", "swiglu")
    assert llama.bias and not llama.tie_embeddings and llama.hidden_dropout == 0
    again = config.replace(Config(model=llama), family="llama", num_layers=2).model
    assert again == dataclasses.replace(llama, num_layers=2)
    back = config.replace(Config(model=llama), family="gpt").model
    assert back == Config().model


def test_every_family_can_be_left_for_every_other() -> None:
    names = get_args(get_type_hints(config.Model)["family"])
    assert set(FAMILIES) == set(names)
    defaults = {field.name: field.default for field in dataclasses.fields(config.Model)}
    brought = {name for family in FAMILIES for name in family_of(family).defaults}
    assert {n: defaults[n] for n in brought} == {n: family_of("gpt").defaults.get(n, defaults[n]) for n in brought}


def test_a_new_family_is_one_row_and_one_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "dummy", ROW)
    chosen = config.replace(Config(), family="dummy", num_layers=2)
    assert chosen.model.norm == "rmsnorm"
    config.validate(chosen)
    for settings, message in (
        ({"position": "rope"}, "the family dummy supports learned only"),
        ({"num_layers": 5}, "4 layers"),
    ):
        with pytest.raises(UserError, match=message):
            config.validate(config.replace(chosen, **settings))
    head = config.replace(chosen, head="classification")
    with pytest.raises(UserError, match="head is 'classification', and the family dummy supports language only"):
        config.validate(head)
    llama = config.replace(Config(), family="llama").model
    assert not differences(dataclasses.replace(llama, rope_theta=7.0), llama), "rope_theta is the dummy's own by now"
    assert not differences(dataclasses.replace(chosen.model, num_token_types=7), chosen.model), "BERT's own"


@pytest.mark.parametrize("name", ["reset_position_ids", "reset_attention_mask", "eod_mask_loss"])
@pytest.mark.parametrize("family", ["bert", "t5"])
def test_samples_without_ends_of_documents_have_no_settings_of_them(family: str, name: str) -> None:
    with pytest.raises(UserError, match=f"^{name} has no effect with the family {family}.*: remove {name}$"):
        config.validate(config.replace(Config(), family=family, **{name: True}))


def test_losses_that_a_family_has_no_network_for_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A teacher's and multi-token prediction's; a task's head reads a teacher in its own way."""
    monkeypatch.setitem(FAMILIES, "dummy", dataclasses.replace(FAMILIES["gpt"], distilled="", predicting=""))
    for family, settings, setting in (
        ("bert", {"teacher": "hf:x"}, "teacher with head language"),
        ("t5", {"teacher": "hf:x"}, "teacher with head language"),
        ("dummy", {"teacher": "hf:x", "task": "chat"}, "teacher with head language"),
        ("dummy", {"mtp_num_layers": 1}, "mtp_num_layers"),
    ):
        said = f"{setting} only works with the families gpt and llama, and family is {family}: remove "
        with pytest.raises(UserError, match=f"^{said}{setting.split()[0]}$"):
            config.validate(config.replace(Config(), family=family, **settings))
    for settings in ({"task": "mnli"}, {"task": "mnli", "head": "classification"}):
        config.validate(config.replace(Config(), family="bert", teacher="hf:x", **settings))


def test_a_file_may_name_its_family_last(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[model]\nnorm = "layernorm"\nfamily = "llama"\n')
    model = config.load(path).model
    assert (model.norm, model.position) == ("layernorm", "rope")
    config.save(config.load(path), tmp_path / "saved.toml")
    assert config.load(tmp_path / "saved.toml").model == model


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_heads": 16, "num_kv_heads": 5}, "num_heads 16 is not divisible by num_kv_heads 5; .* 4 and 8"),
        ({"num_heads": 16, "num_kv_heads": 0}, "num_kv_heads is 0"),
        ({"position": "rope", "head_dim": 5}, "rope rotates pairs of dimensions, and head_dim is 5"),
        ({"position": "rope", "rope_factor": 0.0}, "rope_factor is 0.0"),
        (
            {"position": "rope", "rope_scaling": "llama3", "rope_low_frequency_factor": 4.0},
            "rope_low_frequency_factor 4.0 must be below rope_high_frequency_factor 4.0",
        ),
        (
            {"position": "rope", "rope_scaling": "yarn", "rope_beta_slow": 32.0},
            "rope_beta_slow 32.0 must be below rope_beta_fast 32.0",
        ),
        ({"position": "rope", "rope_original_length": 0}, "rope_original_length is 0"),
        ({"qk_norm_scope": "width"}, "qk_norm_scope is width, and qk_norm is off"),
        ({"qk_norm": True, "qk_norm_bias": True}, "qk_norm_bias needs qk_norm_kind layernorm, and it is rmsnorm"),
        (
            {"qk_norm": True, "qk_norm_scope": "width", "qk_norm_kind": "layernorm"},
            "qk_norm_scope width needs qk_norm_kind rmsnorm, and it is layernorm",
        ),
        ({"qk_norm": True, "qk_norm_after_rope": True}, "needs position rope, and position is learned"),
        ({"qk_norm": True, "norm_weight": "none"}, "qk_norm needs weights, and norm_weight is none"),
        (
            {"family": "bert", "attention_sinks": True},
            "attention_sinks only works with the families gpt, llama and",
        ),
        ({"family": "t5", "qk_norm": True}, "qk_norm only works with the families gpt, llama and hybrid"),
        (
            {"attention_window": 4, "family": "t5"},
            "attention_window only works with the families gpt, llama, hybrid and",
        ),
        ({"window_layers": "SF"}, "there is no window: set attention_window"),
        ({"attention_window": 4, "window_layers": "FF"}, "gives no layer a window"),
        ({"attention_window": 4, "window_layers": "SSF", "num_layers": 2}, "is for 3 layers, and num_layers is 2"),
        ({"position": "rope", "rope_layers": "N"}, "rotates in no layer: use position none"),
        ({"position": "rope", "rope_fraction": 0.25, "head_dim": 20}, "rotates 5 of the 20 dimensions"),
        ({"position": "rope", "rope_local_theta": 10.0}, "is for layers with a window"),
        ({"position": "rope", "rope_scaling": "longrope"}, "needs rope_short_factors, 32 numbers"),
        (
            {"position": "rope", "rope_scaling": "longrope", "rope_short_factors": (1.0,)},
            "rope_short_factors has 1 numbers, and rope_scaling longrope needs 32",
        ),
        ({"position": "rope", "rope_scaling": "dynamic", "head_dim": 2}, "needs a rope_factor of at least 1"),
        ({"layer_pattern": "M-"}, "layer_pattern only works with the family hybrid, and family is gpt"),
        ({"family": "hybrid"}, "layer_pattern is empty, and the family hybrid needs the kind of each layer"),
        ({"family": "hybrid", "layer_pattern": "G", "ssm_norm": False}, "ssm_norm is False, and .* has no Mamba-2, wh"),
        (
            {"family": "hybrid", "layer_pattern": "-", "lora_rank": 4, "lora_targets": "mixers"},
            "lora_targets is mixers, and layer_pattern '-' has none of these layers",
        ),
        ({"attention_output_gate": True}, "attention_output_gate only works with the family hybrid, and family is gpt"),
        ({"family": "hybrid", "layer_pattern": "M|M"}, r"contains '\|', in Megatron a stage boundary"),
        ({"family": "hybrid", "layer_pattern": "(M-"}, r"can't be read from '\(M-' on: a repeat is letters in paren"),
        ({"family": "hybrid", "layer_pattern": "(M)x0"}, r"repeats \(M\) 0 times, and a model has 1 to 1000 layers"),
        ({"family": "hybrid", "layer_pattern": "M()x2"}, r"repeats \(\) without layers"),
        ({"family": "hybrid", "layer_pattern": "M-", "num_layers": 3}, "num_layers is 3, and .* has 2 layers: remove"),
        ({"family": "hybrid", "layer_pattern": "ME"}, "has layers with experts .E., and num_experts is 0"),
        ({"family": "hybrid", "layer_pattern": "M-", "num_experts": 4}, "has no layers with experts .E., and num_exp"),
        ({"family": "hybrid", "layer_pattern": "M-", "ssm_groups": 3}, "ssm_heads 32 is not divisible by ssm_groups"),
        (
            {"family": "hybrid", "layer_pattern": "M", "ssm_chunk": 2000},
            "ssm_chunk 2000 is longer than seq",
        ),
        (
            {"family": "hybrid", "layer_pattern": "H", "ssm_scales": (1.0, 2.0)},
            "ssm_scales has 2 numbers, and needs 5: of",
        ),
        (
            {"family": "hybrid", "layer_pattern": "M", "lora_rank": 4, "lora_targets": "mlp"},
            "lora_targets is mlp, and layer_pattern 'M' has none of these layers",
        ),
        (
            {"family": "hybrid", "layer_pattern": "M", "unroll_layers": True},
            "unroll_layers does not support the",
        ),
        ({"family": "hybrid", "layer_pattern": "M", "teacher": "hf:x"}, "a teacher does not support the family hybrid"),
        (
            {"family": "hybrid", "layer_pattern": "M", "mtp_num_layers": 1},
            "mtp_num_layers only works with the",
        ),
        ({"mtp_loss_scaling_factor": 0.3}, "mtp_loss_scaling_factor is 0.3, and mtp_num_layers is 0: set"),
        ({"mtp_num_layers": 8, "sequence_length": 8}, "sequence_length 8 has no tokens that far ahead: use at most 7"),
        ({"mtp_num_layers": 1, "head": "choices"}, "mtp_num_layers is 1, and head is choices, which predicts no"),
        ({"mtp_num_layers": 1, "lora_rank": 2}, "lora_rank is 2, and its layers have no adapters: use --mtp-num-lay"),
        ({"mtp_num_layers": 1, "teacher": "hf:x"}, "teacher is hf:x, whose probabilities are of the next token only"),
    ],
)
def test_model_settings_that_do_not_fit(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        config.validate(config.replace(Config(), **fields))


PLACES = {"learned": "gpt", "rope": "llama", "relative": "t5", "alibi": "gpt"}
"""Kind of positions -> a family that has it."""


def another_value(name: str, value: Any) -> Any:
    """A value of the model's setting that differs from this one."""
    choices = get_args(get_type_hints(config.Model)[name])
    if get_origin(get_type_hints(config.Model)[name]) is Literal:
        return next(choice for choice in choices if choice != value)
    if name == "layer_pattern":
        return "M-"
    return not value if isinstance(value, bool) else 2 * (value or 28)


@pytest.mark.parametrize("field", dataclasses.fields(config.Model), ids=lambda field: field.name)
def test_every_setting_shapes_the_model_unless_its_field_says_otherwise(field: dataclasses.Field[Any]) -> None:
    """What `--resume` and `--init-from` compare: a setting that is new is among them by itself."""
    needs = {name: values[0] for name, values in setting_of(field).shapes or ()}
    family = next((name for name in FAMILIES if field.name in family_of(name).settings), None)
    family = family or PLACES[needs.get("position", "learned")]
    ours = config.replace(Config(), vocab_size=100, **({"family": family} | needs)).model
    theirs = dataclasses.replace(ours, **{field.name: another_value(field.name, getattr(ours, field.name))})
    if field.name == "family":
        theirs = config.replace(Config(), family="bert", vocab_size=100).model
    names = [line.split()[0] for line in differences(theirs, ours)]
    if setting_of(field).shapes is None:
        assert names == []
    else:
        assert field.name in names
        following = {
            "head_dim",
            "mlp_size",
            "expert_size",
            "embedding_size",
            "num_kv_heads",
            "attention_bias",
            "mlp_bias",
            "num_decoder_layers",
            "decoder_sequence_length",
            "ssm_heads",
        }
        assert set(names) <= {field.name} | following


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("gpt", {"rope_theta": 1.0, "relative_buckets": 8, "num_token_types": 0, "num_decoder_layers": 7}),
        ("llama", {"sequence_length": 99, "rope_factor": 2.0, "rope_original_length": 5}),
        (
            "t5",
            {"sequence_length": 99, "decoder_sequence_length": 3, "rope_scaling": "linear", "sentence_order": False},
        ),
        ("bert", {"decoder_sequence_length": 3, "rope_high_frequency_factor": 9.0, "mlp_size": 4096, "head_dim": 64}),
    ],
)
def test_settings_without_effect_may_differ(family: str, settings: dict[str, Any]) -> None:
    ours = config.replace(Config(), family=family).model
    assert differences(dataclasses.replace(ours, **settings), ours) == []


def test_a_llama_is_gpt_s_network_with_other_defaults() -> None:
    llama = config.replace(Config(), family="llama").model
    assert differences(dataclasses.replace(llama, family="gpt"), llama) == []
    assert "family is bert there and gpt here" in differences(dataclasses.replace(llama, family="bert"), llama)
