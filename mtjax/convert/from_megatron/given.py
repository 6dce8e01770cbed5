"""Reads Megatron-LM's arguments from a command line, a launch script or a YAML file."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mtjax.convert.from_megatron.expand import Value, evaluate, shown, unknown_in
from mtjax.convert.from_megatron.script import CommandLine, Script
from mtjax.errors import UserError, require, shortened
from mtjax.migrate.megatron import by_dest, by_name

PROGRAMS = {"pretrain_gpt": "gpt", "pretrain_bert": "bert", "pretrain_mamba": "hybrid", "pretrain_hybrid": "hybrid"}
"""Megatron's programs that can be translated -> the family."""
_OTHERS = re.compile(r"pretrain_(t5|ict|retro|vlm|vision\w*)|train_rl|finetune\w*")
_TEXTS = frozenset(
    {
        *("save", "load", "pretrained_checkpoint", "non_persistent_local_ckpt_dir", "data_cache_path"),
        *(f"{split}data_path" for split in ("", "train_", "valid_", "test_")),
        *("tokenizer_model", "vocab_file", "merge_file", "wandb_project", "wandb_entity"),
    }
)
"""Arguments whose values stay text: Python reads `2024_01_15`, which may name a folder, as the number 20240115."""
_LARGEST = 2**24
"""Most bytes of a script."""


@dataclass
class GivenArguments:
    """Arguments, and other information from a script."""

    source: str
    """Name of the script or file, for messages."""
    values: dict[str, Any] = field(default_factory=dict)
    """Attribute of an argument -> its value, for those that could be read."""
    typed: dict[str, str] = field(default_factory=dict)
    """The same attributes -> as typed: `--lr 1e-4`."""
    unread: list[tuple[str, str]] = field(default_factory=list)
    """Arguments that could not be read, as typed, and the reason."""
    unlisted: list[str] = field(default_factory=list)
    """Unknown arguments, as typed."""
    notes: list[str] = field(default_factory=list)
    """Notes on conditions and loops of the script that could not be evaluated."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables that the script sets for NCCL, CUDA, PyTorch or Transformer Engine, with their values."""
    family: str = "gpt"
    gpus: int | None = None
    """Number of processes that the launcher starts, one per GPU; None if unknown."""


def from_words(words: Sequence[str], given: GivenArguments) -> None:
    """Adds the arguments of a command line to `given`; a repeated argument overrides the earlier one."""
    at = 0
    while at < len(words):
        name, equals, value = words[at].partition("=")
        end = next((i for i in range(at + 1, len(words)) if _is_name(words[i])), len(words))
        if not _is_name(words[at]):
            given.unread += [(shown(word), _reason(word) or "not the value of an argument") for word in words[at:end]]
        else:
            _put(name, [value] if equals else list(words[at + 1 : end]), given)
        at = end


def _is_name(word: str) -> bool:
    return bool(re.match(r"--[A-Za-z]", word))


def _put(name: str, values: list[str], given: GivenArguments) -> None:
    """Adds one argument with its values."""
    row = by_name().get(name.replace("_", "-"))
    typed = shortened(" ".join([name, *map(shown, values)]), 70)
    missing = next((reason for value in values if (reason := _reason(value))), "")
    # Abbreviations, which argparse would accept, are unknown, too: which argument they stand for depends on the version
    # of Megatron.
    if row is None:
        given.unlisted.append(typed)
        return
    # argparse's store_true and store_false.
    is_switch = row.default is False or row.stores is False
    if missing and row.status == "default" and row.same is None:  # whatever its value, mtjax needs no such setting
        given.values[row.dest], given.typed[row.dest] = row.default, typed
        return
    if missing and not is_switch:
        given.unread.append((typed, missing))
        return
    if values and is_switch:  # `--bf16 $MORE`: the switch is set, and $MORE is unknown
        given.unread.append((" ".join(map(shown, values)), missing or f"{name} takes no value"))
        typed, values = name, []
    read = tuple(map(_unquoted if row.dest in _TEXTS else _value, values))
    given.values[row.dest] = row.stores if not read else read[0] if len(read) == 1 else read
    given.typed[row.dest] = typed


def _reason(word: str) -> str:
    """Returns why a word can't be read (a variable in it has no value), or ""."""
    names = unknown_in(word)
    if not names:
        return ""
    numbered = [name for name in names if name.isdigit() or name in "@#"]
    if numbered:
        return f"${numbered[0]} is an argument of the script: give it after the script's name"
    commands = [name for name in names if name[0] in "$`"]
    if commands:
        return f"it depends on the output of {commands[0]}"
    return f"{names[0]} has no value: add --set {names[0]}=..."


def _unquoted(text: str) -> str:
    """Removes quotes inside quotes, as in a YAML file or `"'128,0'"`, of which the shell leaves one pair."""
    return text.strip("'\"") if text[:1] == text[-1:] and text[:1] in ("'", '"') else text


def _value(text: str) -> Any:
    """Parses a number or a list of numbers; returns any other text unchanged."""
    text = _unquoted(text)
    # Megatron's argparse knows the type of each argument; here it follows from the text, and `_check_types` compares
    # later.
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    if re.fullmatch(r"[\[\]()\d,+* ]+", text) and "[" in text:
        try:
            return evaluate(text)
        except (ValueError, SyntaxError, TypeError):
            return text
    return text


def as_list(value: Any) -> list[Any]:
    """Returns the values of an argument that takes several: a list, `128,0` or `(128,0)`."""
    if isinstance(value, str):
        return [_value(item.strip()) for item in value.strip("()[]").split(",")]
    return list(value) if isinstance(value, list | tuple) else [value]


def from_file(path: Path, positional: Sequence[str], variables: Mapping[str, str]) -> GivenArguments:
    """Reads the arguments in a launch script, in a file of arguments, or in a YAML file.

    Raises:
      UserError: it can't be read, or does not start a program of Megatron-LM that can be translated.
    """
    try:
        if path.stat().st_size > _LARGEST:
            raise UserError(f"{path} has {path.stat().st_size} bytes, too large for a launch script")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        reason = e.strerror if isinstance(e, OSError) else "not a text file"
        raise UserError(f"{path} can't be read: {reason}") from e
    if path.suffix in (".yaml", ".yml"):
        return _from_yaml(text, path)
    return from_script(text, str(path), positional, variables)


def _from_yaml(text: str, path: Path) -> GivenArguments:
    """Reads the arguments in a YAML file, in any nesting: `--num-layers: 12`, or `num_layers: 12`."""
    yaml: Any = require("yaml", "dev")
    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError as e:
        raise UserError(f"{path} is not YAML: {str(e).splitlines()[0]}") from e
    given = GivenArguments(str(path))
    _add_environment(dict(_flat(found)), given)
    for name, value in _flat(found):
        option = f"--{name.removeprefix('--').replace('_', '-')}"
        if option not in by_name() and name not in by_dest():
            # Capitals are environment variables and the settings of a test.
            if value not in (None, False) and name == name.lower():
                given.unlisted.append(shortened(f"{name}: {value}", 70))
        elif isinstance(value, bool):
            row = by_name().get(option)
            by_attribute = by_dest().get(name)  # add_bias_linear: false is the value that --disable-bias-linear stores
            if row is not None and value:
                _put(option, [], given)
            elif row is None and by_attribute is not None:
                given.values[name], given.typed[name] = value, f"{name}: {str(value).lower()}"
        elif isinstance(value, list):
            _put(option, [str(item) for item in value], given)
        elif value is not None and option in by_name():
            _put(option, str(value).split() if name.startswith("--") else [str(value)], given)
    return given


def _flat(found: Any) -> Iterable[tuple[str, Any]]:
    """Yields the names and values in nested mappings."""
    for name, value in found.items() if isinstance(found, dict) else ():
        if isinstance(value, dict):
            yield from _flat(value)
        else:
            yield str(name), value


def from_script(text: str, source: str, positional: Sequence[str], variables: Mapping[str, str]) -> GivenArguments:
    """Reads the arguments with which a script starts Megatron-LM.

    Raises:
      UserError: it does not start a program of Megatron-LM that can be translated.
    """
    script = Script(text, source, positional, dict(variables))
    # A file for torchrun's or Megatron's `@file`: each line would otherwise be a command of its own.
    if script.lines and all(line.words[0].startswith("--") for line in script.lines):  # a file of arguments
        script.lines = [CommandLine([word for line in script.lines for word in line.words], 1)]
    # The command with most known arguments starts Megatron-LM; others are launchers, echo or mkdir.
    counted = [(sum(word.partition("=")[0] in by_name() for word in line.words), line) for line in script.lines]
    most = max((count for count, _ in counted), default=0)
    if most < 2:
        raise UserError(f"{source} contains no command with arguments of Megatron-LM, such as --num-layers")
    started = [line for count, line in counted if count == most]
    chosen = started[-1]
    given = GivenArguments(source, notes=script.notes)
    if len(started) > 1:
        given.notes.append(f"{len(started)} commands start Megatron-LM; translating the one in line {chosen.line}")
    at = next((i for i, word in enumerate(chosen.words) if word.endswith(".py")), None)
    first = next(i for i, word in enumerate(chosen.words) if word.partition("=")[0] in by_name())
    program = Path(chosen.words[at]).stem if at is not None else ""
    # Without the name of a program, as in a file of arguments, the family is gpt.
    given.family = _family(program, source)
    launcher = chosen.words[: first if at is None else at]
    given.gpus = _processes(launcher, script.variables.values, given)
    from_words(chosen.words[first if at is None else at + 1 :], given)
    _add_environment(script.variables.values, given)
    return given


def _add_environment(variables: Mapping[str, Any], given: GivenArguments) -> None:
    """Adds the variables that libraries of Megatron-LM read."""
    libraries = re.compile(r"(NCCL|CUDA|GLOO|UCX|NVTE|TORCH|PYTORCH)_\w+")
    given.environment |= {n: shown(str(value)) for n, value in variables.items() if libraries.fullmatch(n)}


def _family(program: str, source: str) -> str:
    if _OTHERS.fullmatch(program):
        known = ", ".join(f"{name}.py" for name in PROGRAMS)
        raise UserError(f"{source} starts {program}.py, but only {known} can be translated")
    return PROGRAMS.get(program, "gpt")


def _processes(launcher: list[str], values: Mapping[str, Value], given: GivenArguments) -> int | None:
    """Returns how many processes torchrun, srun or mpirun start, else the number in variables such as WORLD_SIZE."""
    found: dict[str, str] = {}
    for word, following in zip(launcher, [*launcher[1:], ""], strict=False):
        name, equals, value = word.partition("=")
        if name.startswith("-"):
            # torchrun accepts --nproc_per_node and --nproc-per-node.
            found[name.lstrip("-").replace("_", "-")] = value if equals else following
    # torchrun defaults to 1 for a missing --nnodes or --nproc-per-node.
    is_torchrun = any(
        Path(word).name in ("torchrun", "torch.distributed.run", "torch.distributed.launch") for word in launcher
    )
    pairs = [
        ("nnodes", "nproc-per-node", is_torchrun),
        ("nodes", "ntasks-per-node", False),
        ("N", "ntasks-per-node", False),
    ]
    for nodes, each, has_defaults in pairs:
        if (nodes in found and each in found) or (has_defaults and (nodes in found or each in found)):
            return _product(given, found.get(nodes, "1"), found.get(each, "1"))
    for name in ("np", "n", "ntasks"):
        if name in found:
            return _product(given, found[name])
    # Last, as a script may set these variables and not use them: NVIDIA's examples compute WORLD_SIZE, but start
    # torchrun with its factors.
    if isinstance(size := values.get("WORLD_SIZE"), str) and size.isdigit():
        return int(size)
    nodes = next((values[name] for name in ("NNODES", "NUM_NODES", "SLURM_NNODES") if name in values), None)
    each = next((values[name] for name in ("GPUS_PER_NODE", "SLURM_NTASKS_PER_NODE") if name in values), None)
    if isinstance(nodes, str) and isinstance(each, str):
        return _product(given, nodes, each)
    return _product(given, str(values["SLURM_NTASKS"])) if "SLURM_NTASKS" in values else None


def _product(given: GivenArguments, *numbers: str) -> int | None:
    """Returns the product of numbers; None, with a note, if one is unknown."""
    product = 1
    for number in numbers:
        if not number.isdigit():
            reason = _reason(number) or "not a number"
            given.unread.append((f"number of processes {shown(number)}", reason))
            return None
        product *= int(number)
    return product
