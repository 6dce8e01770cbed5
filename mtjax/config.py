"""The whole run as frozen dataclasses: defaults are the paper's, TOML in and out, command line over file over default.

Every field has one name, unique over all groups, so that it is an option (`--hidden-size 256`) and a TOML key
(`hidden_size = 256` under `[model]`) alike. `mtjax train --help` is made from the docstrings below.
"""

import dataclasses
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import tomli_w

from mtjax.errors import UserError, nearest
from mtjax.model_config import FAMILIES as FAMILIES
from mtjax.model_config import GATED as GATED
from mtjax.model_config import Model as Model
from mtjax.model_config import check_model
from mtjax.model_config import decoder_layers as decoder_layers
from mtjax.model_config import decoder_length as decoder_length
from mtjax.model_config import head_dim as head_dim
from mtjax.model_config import mlp_size as mlp_size
from mtjax.model_config import most_masked as most_masked
from mtjax.model_config import nearest_divisors as nearest_divisors
from mtjax.model_config import num_kv_heads as num_kv_heads
from mtjax.model_config import padded_vocab_size as padded_vocab_size
from mtjax.training_config import Training as Training
from mtjax.training_config import check_loss_scale, check_recompute
from mtjax.training_config import describe_recompute as describe_recompute
from mtjax.training_config import layers_again as layers_again
from mtjax.training_config import layers_nested as layers_nested


@dataclass(frozen=True)
class Parallel:
    """Which device does what."""

    mesh: str = "1x1"
    """Devices as DATAxMODEL, say 64x8, or by name: data=64,model=8."""
    sequence_parallel: bool = False
    """Split the residual stream over `model` along the sequence: norms, dropout and what is kept for the backward pass
    take 1/model of the memory, for the same bytes sent."""
    zero: Literal[0, 1, 2, 3] = 0
    """Split over `data` what every data rank would hold alike: 1 the optimizer's state, 2 also the gradients, 3 also
    the parameters (FSDP)."""
    overlap: bool = True
    """Ask XLA to send behind computing where it would not by itself; for GPUs."""
    coordinator: str | None = None
    """host:port of process 0, for several processes that no Slurm, MPI or Kubernetes started."""
    num_processes: int | None = None
    """How many processes take part; with --coordinator."""
    process_id: int | None = None
    """Which of them this one is, from 0; with --coordinator."""


@dataclass(frozen=True)
class Data:
    """What the model reads."""

    data: str | None = None
    """Text (FILE.txt, FILE.jsonl, also .gz and .zst, globs), a Megatron PREFIX of .bin and .idx, or a blend like
    '0.3 A 0.7 B'; when not given, text that comes with Python."""
    train_data: str | None = None
    """Training data alone, like --data but not split; goes with --valid-data and --test-data."""
    valid_data: str | None = None
    """Validation data, when not a share of --data."""
    test_data: str | None = None
    """Test data, when not a share of --data."""
    tokenizer: str | None = None
    """A tokenizer.json, a folder with GPT-2's encoder.json and vocab.bpe, or KIND:PATH with the kind gpt2, bert, hf or
    sentencepiece; when not given, one trained on the text."""
    split: str = "969,30,1"
    """Shares of the text for training, validation and test."""
    cache_dir: Path | None = None
    """Where prepared text is kept; ~/.cache/mtjax when not given."""
    num_workers: int = 0
    """Processes that prepare samples; 0 prepares them in threads of this one."""
    loader_timeout: float = 300.0
    """Seconds without a batch after which the loader counts as stalled, which ends the run."""
    reset_position_ids: bool = False
    """Count positions from 0 after each end of document."""
    reset_attention_mask: bool = False
    """Keep attention within a document."""
    eod_mask_loss: bool = False
    """No loss where the input is the end of a document."""


@dataclass(frozen=True)
class Optimizer:
    """AdamW and its schedule: section 4.2 of the paper."""

    learning_rate: float = 1.5e-4
    """Peak learning rate."""
    min_learning_rate: float = 1e-5
    """Learning rate from decay_steps on, and the least while it decays."""
    warmup_steps: int = 3000
    """Steps of linear warmup, from initial_learning_rate to the peak."""
    initial_learning_rate: float = 0.0
    """Learning rate of the first step of the warmup."""
    decay_steps: int | None = None
    """Step at which the learning rate reaches its minimum; the last step when not given."""
    decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "cosine"
    """How the learning rate decays after the warmup; WSD (warmup, stable, decay) stays at the peak until the last
    wsd_decay_steps steps before decay_steps."""
    wsd_decay_steps: int | None = None
    """Of decay_style WSD: steps of the decay."""
    wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    """Of decay_style WSD: how the learning rate decays in them."""
    beta1: float = 0.9
    """Adam's decay of the mean."""
    beta2: float = 0.999
    """Adam's decay of the square."""
    epsilon: float = 1e-8
    """Adam's denominator floor."""
    weight_decay: float = 0.01
    """Decoupled decay, on matrices only."""
    start_weight_decay: float | None = None
    """Of weight_decay_style linear or cosine: weight decay of the first step, which grows to weight_decay over the
    run."""
    weight_decay_style: Literal["constant", "linear", "cosine"] = "constant"
    """How the weight decay grows."""
    clip_grad_norm: float = 1.0
    """Largest global gradient norm; 0 does not clip."""
    label_smoothing: float = 0.0
    """Share of the target spread evenly over the vocabulary."""
    z_loss: float = 0.0
    """Weight of log(Z)^2, which keeps logits from drifting."""


def check_schedule(optimizer: Optimizer) -> None:
    """Checks that learning rates and weight decays are in order, and that nothing is set that their styles don't read.

    Raises:
      UserError: the first that is not.
    """
    peak, initial, style = optimizer.learning_rate, optimizer.initial_learning_rate, optimizer.decay_style
    for name in ("min_learning_rate", "initial_learning_rate"):
        if getattr(optimizer, name) > peak:
            raise UserError(f"{name} {getattr(optimizer, name)} is above learning_rate {peak}")
    if initial and not optimizer.warmup_steps:
        raise UserError(f"initial_learning_rate {initial} is where a warmup begins, and warmup_steps is 0")
    if optimizer.decay_steps is not None and optimizer.decay_steps <= optimizer.warmup_steps:
        raise UserError(f"decay_steps {optimizer.decay_steps} must be above warmup_steps {optimizer.warmup_steps}")
    if style == "inverse-square-root" and not optimizer.warmup_steps:
        raise UserError("decay_style inverse-square-root is peak x sqrt(warmup_steps / step): set warmup_steps above 0")
    if style == "WSD" and optimizer.wsd_decay_steps is None:
        raise UserError("decay_style WSD needs wsd_decay_steps, how many steps the decay at the end takes")
    if style != "WSD" and (optimizer.wsd_decay_steps, optimizer.wsd_decay_style) != (None, "exponential"):
        raise UserError(f"wsd_decay_steps and wsd_decay_style are of decay_style WSD, and this is {style}")
    start, end, growth = optimizer.start_weight_decay, optimizer.weight_decay, optimizer.weight_decay_style
    if start is None and growth != "constant":
        raise UserError(f"weight_decay_style {growth} needs start_weight_decay, from which it grows to {end}")
    if start is not None and growth == "constant":
        raise UserError(f"start_weight_decay {start} needs weight_decay_style linear or cosine, and this is constant")
    if start is not None and not 0 <= start <= end:
        raise UserError(f"start_weight_decay {start} must be between 0 and weight_decay {end}, to which it grows")


@dataclass(frozen=True)
class Output:
    """What the run leaves behind, and how often."""

    out: Path | None = None
    """Folder of the run; runs/NAME-N, the next free N, when not given."""
    resume: bool = False
    """Go on from the last good checkpoint in --out, or of the newest run of this name."""
    log_every: int = 10
    """Steps between log lines."""
    valid_every: int = 1000
    """Steps between validations; 0 never validates."""
    valid_batches: int = 10
    """Global batches of held-out text in a validation."""
    checkpoint_every: int = 1000
    """Steps between checkpoints; 0 saves at the end only."""
    keep_last: int = 3
    """Newest checkpoints that are kept."""
    keep_every: int | None = None
    """Also keep each checkpoint whose step is a multiple of this."""
    prompt: str = "The "
    """What the finished model continues in the summary."""


@dataclass(frozen=True)
class Config:
    """A run."""

    model: Model = field(default_factory=Model)
    parallel: Parallel = field(default_factory=Parallel)
    data: Data = field(default_factory=Data)
    optimizer: Optimizer = field(default_factory=Optimizer)
    training: Training = field(default_factory=Training)
    output: Output = field(default_factory=Output)


def replace(config: Config, **values: Any) -> Config:
    """`config` with fields set by their bare names, whatever group they are in.

    Another family brings its own settings, except for those that are set here too.

    Raises:
      UserError: a name that no group has.
    """
    groups = groups_by_field()
    if values.get("family", config.model.family) != config.model.family:
        values = {**FAMILIES[values["family"]], **values}
    changed: dict[str, Any] = {}
    for name, value in values.items():
        if name not in groups:
            raise UserError(f"no setting is called {name!r}{nearest(name, groups)}")
        group = changed.get(groups[name], getattr(config, groups[name]))
        changed[groups[name]] = dataclasses.replace(group, **{name: value})
    return dataclasses.replace(config, **changed)


def groups_by_field() -> dict[str, str]:
    """Field name -> the name of its group."""
    hints = get_type_hints(Config)
    return {f.name: group for group, cls in hints.items() for f in dataclasses.fields(cls)}


def to_dict(config: Config) -> dict[str, dict[str, Any]]:
    """Plain tables of TOML and JSON values; fields that are None are left out."""

    def plain(value: Any) -> Any:
        return str(value) if isinstance(value, Path) else value

    return {
        group: {k: plain(v) for k, v in table.items() if v is not None}
        for group, table in dataclasses.asdict(config).items()
    }


def from_dict(tables: Mapping[str, Any], base: Config | None = None, source: str = "config") -> Config:
    """`base` (the defaults) with the values of `tables` over it.

    Raises:
      UserError: an unknown table or key, or a value of the wrong type; `source` names the file.
    """
    config = base or Config()
    hints = get_type_hints(Config)
    for group, table in tables.items():
        if group not in hints:
            place = groups_by_field().get(group)
            hint = f" - it goes under [{place}]" if place else nearest(group, hints)
            raise UserError(f"{source}: unknown {'table' if isinstance(table, Mapping) else 'key'} {group!r}{hint}")
        if not isinstance(table, Mapping):
            raise UserError(f"{source}: {group} is a table, not a value: write [{group}] on a line of its own")
        fields = get_type_hints(hints[group])
        for name, value in sorted(table.items(), key=lambda item: item[0] != "family"):
            if name not in fields:
                place = groups_by_field().get(name)
                hint = f" - it goes under [{place}]" if place else nearest(name, fields)
                raise UserError(f"{source}: unknown key {name!r} in [{group}]{hint}")
            config = replace(config, **{name: _typed(fields[name], value, f"{source}: [{group}] {name}")})
    return config


def _typed(hint: Any, value: Any, where: str) -> Any:
    """`value` as the type that a field's annotation asks for."""
    if get_origin(hint) is Literal:
        if value not in get_args(hint):
            raise UserError(f"{where} = {value!r} is none of {', '.join(map(repr, get_args(hint)))}")
        return value
    kinds = [t for t in (get_args(hint) or (hint,)) if t is not type(None)]
    for kind in kinds:
        if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        if kind is Path and isinstance(value, str):
            return Path(value)
        if get_origin(kind) is tuple and isinstance(value, list) and [type(v) for v in value] == list(get_args(kind)):
            return tuple(value)
        if type(value) is kind:
            return value
    raise UserError(f"{where} = {value!r} should be {' or '.join(map(_type_name, kinds))}")


def _type_name(kind: Any) -> str:
    if get_origin(kind) is tuple:
        return f"a list of {len(get_args(kind))} {get_args(kind)[0].__name__}"
    return kind.__name__


def load(name: str | Path, base: Config | None = None) -> Config:
    """Reads a TOML file: a path, or the name of a config that ships with mtjax.

    Raises:
      UserError: neither exists, the file is no TOML, or a key or value in it is wrong.
    """
    path = find(name)
    try:
        tables = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise UserError(f"{path} is not valid TOML: {e}") from e
    return from_dict(tables, base, source=str(path))


def find(name: str | Path) -> Path:
    """The file behind `--config NAME`: itself, or the shipped config of that name."""
    path = Path(name)
    if path.is_file():
        return path
    shipped = {p.stem: p for p in sorted(shipped_folder().glob("*.toml"))}
    if str(name) in shipped or path.name in {p.name for p in shipped.values()}:
        return shipped[path.name.removesuffix(".toml")]
    hint = nearest(path.name.removesuffix(".toml"), shipped)
    raise UserError(f"no config file {str(name)!r}, and none of that name ships with mtjax{hint}")


def shipped_folder() -> Path:
    """`configs/`: inside an installed package, or beside it in a checkout."""
    here = Path(__file__).parent
    return next((d for d in (here / "configs", here.parent / "configs") if d.is_dir()), here / "configs")


def save(config: Config, path: Path) -> None:
    """Writes `config` as TOML, atomically."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(tomli_w.dumps(to_dict(config)))
    temporary.replace(path)


def validate(config: Config) -> None:
    """Checks what no mesh is needed for; divisions by mesh axes are checked in `sharding.layouts`.

    Raises:
      UserError: the first field that can't be, or pair of fields that don't fit.
    """
    groups = (config.model, config.data, config.optimizer, config.training, config.output)
    model = config.model
    positive = ("num_layers", "hidden_size", "num_heads", "sequence_length", "vocab_multiple", "steps")
    positive += ("rope_original_length",)
    positive += ("global_batch_size", "loss_chunk", "log_every", "keep_last", "valid_batches", "max_bad_steps")
    optional = (
        "num_kv_heads",
        "head_dim",
        "num_decoder_layers",
        "decoder_sequence_length",
        "mlp_size",
        "vocab_size",
        "microbatch_size",
        "keep_every",
        "decay_steps",
        "wsd_decay_steps",
        "train_samples",
    )
    flat = {k: v for group in groups for k, v in vars(group).items()}
    for name in positive + tuple(n for n in optional if flat[n] is not None):
        if flat[name] < 1:
            raise UserError(f"{name} is {flat[name]}, and must be at least 1")
    for name in ("hidden_dropout", "attention_dropout", "label_smoothing", "beta1", "beta2"):
        if not 0 <= flat[name] < 1:
            raise UserError(f"{name} is {flat[name]}, and must be at least 0 and below 1")
    for name in (
        "learning_rate",
        "min_learning_rate",
        "initial_learning_rate",
        "weight_decay",
        "clip_grad_norm",
        "z_loss",
        "init_std",
        "epsilon",
        "norm_epsilon",
    ):
        if not (math.isfinite(flat[name]) and flat[name] >= 0):
            raise UserError(f"{name} is {flat[name]}, and must be a finite number, 0 or more")
    for name in ("warmup_steps", "valid_every", "checkpoint_every", "num_workers", "seed"):
        if flat[name] < 0:
            raise UserError(f"{name} is {flat[name]}, and must be 0 or more")
    if not flat["loader_timeout"] > 0:
        raise UserError(f"loader_timeout is {flat['loader_timeout']}, and must be above 0")
    check_model(model)
    check_recompute(model, config.training)
    check_loss_scale(config.training)
    check_schedule(config.optimizer)
