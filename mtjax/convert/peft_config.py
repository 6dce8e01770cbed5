"""What adapter_config.json of peft says: which of its keys are read, and which modules it means."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mtjax.errors import UserError

TENSORS = "adapter_model.safetensors"
"""File with the tensors."""
PREFIX = "base_model.model."
"""Prefix of the tensors' names."""
WITHOUT_EFFECT = {
    *("peft_type", "task_type", "base_model_name_or_path", "revision", "auto_mapping", "peft_version"),
    *("inference_mode", "lora_dropout", "target_modules", "exclude_modules", "layers_pattern", "modules_to_save"),
    *("megatron_config", "megatron_core", "qalora_group_size", "eva_config", "corda_config", "lora_ga_config"),
    *("loftq_config", "runtime_config", "fan_in_fan_out", "bias"),
}
"""Keys of adapter_config.json that say nothing about the weights beyond what the tensors and other keys say."""
READ = {
    *("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "init_lora_weights"),
    *("layers_to_transform", "ensure_weight_tying", "target_parameters"),
}
# With others, such as pissa and olora, peft subtracts the initial adapters from the base model's weights in memory, and
# not in its files.
STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of init_lora_weights with which the base model's weights are those of its files."""
TASKS = (None, "CAUSAL_LM", "SEQ_2_SEQ_LM", "FEATURE_EXTRACTION")
"""Values of task_type whose models have the heads of the base model."""
FACTORS = {
    "lora_A.weight": "down",
    "lora_B.weight": "up",
    "lora_embedding_A": "down",
    "lora_embedding_B": "up",
    "lora_magnitude_vector": "magnitude",
    "lora_magnitude_vector.weight": "magnitude",
}
"""Ends of names of tensors -> what they are in `AdapterNames`."""
OF_EXPERTS = re.compile(r"(?P<module>.*\.experts)(?P<depth>(\.base_layer)*)\.lora_(?P<matrix>[AB])\.weight")
"""Names of adapters of experts: a module with two adapted parameters is wrapped twice, the first of them inside."""
UP, UP_WITHOUT_GATE, DOWN = "gate_up_proj", "up_proj", "down_proj"
"""transformers' names of the parameters of experts, in the order in which a module has them."""


@dataclass
class AdapterNames:
    """Names of the tensors that change a matrix."""

    names: dict[str, str] = field(default_factory=dict)
    """`down` [rank, inputs], `up` [outputs, rank] and perhaps `magnitude` [outputs] -> names in the file."""

    @property
    def is_of_embedding(self) -> bool:
        """Whether the matrix is a table, stored as [inputs, outputs]."""
        return "lora_embedding_A" in self.names["down"]


def matching(patterns: Mapping[str, Any], module: str, otherwise: Any) -> Any:
    """Returns the value of the first pattern that matches the end of a module's name, as in peft."""
    return next((v for pattern, v in patterns.items() if re.match(rf"(.*\.)?({pattern})$", module)), otherwise)


def is_named(module: str, names: Any) -> bool:
    """Returns whether a module is one of these, as in peft: a list of names or their ends, or a regular expression."""
    if isinstance(names, str):
        # A list of linear modules that peft makes when it trains; it saves the list, so the word itself is rare.
        return names != "all-linear" and re.fullmatch(names, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names or ())


def check_names(config: Mapping[str, Any], source: Path) -> None:
    """Checks the keys of an adapter_config.json that name modules.

    Raises:
      UserError: one is not a list of names or, where that is read, a regular expression; `source` names the file.
    """
    for key in ("target_modules", "exclude_modules", "modules_to_save"):
        value, may_match = config.get(key), key != "modules_to_save"
        if isinstance(value, str) and may_match:
            check_expression(value, f"{source}: {key} is {value!r}, which")
        elif value is not None and not (isinstance(value, list) and all(isinstance(name, str) for name in value)):
            kinds = "a list of names, a regular expression" if may_match else "a list of names"
            raise UserError(f"{source}: {key} is {value!r}, and must be {kinds} or null")


def check_parameters(names: object, source: Path) -> None:
    """Checks that target_parameters of an adapter_config.json has parameters of experts only.

    Raises:
      UserError: it is not a list of names, or another parameter is among them; `source` names the file.
    """
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise UserError(f"{source}: target_parameters is {names!r}, and must be a list of names or null")
    known = UP, UP_WITHOUT_GATE, DOWN
    if others := [name for name in names or () if name.rpartition(".")[2] not in known]:
        raise UserError(
            f"{source}: target_parameters has {others[0]!r}, but must have names that end in {known[0]}, {known[1]} or "
            f"{known[2]}, the parameters of experts: merge the adapters with peft"
        )


def check_expression(text: str, subject: str) -> None:
    """Checks that a text is a regular expression.

    Raises:
      UserError: it is not one; `subject` is that of the sentence.
    """
    try:
        re.compile(text)
    except re.error as e:
        raise UserError(f"{subject} is not a regular expression: {e}") from e


def unread(config: Mapping[str, Any]) -> list[str]:
    """Returns what of an adapter_config.json is not read."""
    kind, start, task = (config.get(key) for key in ("peft_type", "init_lora_weights", "task_type"))
    wrong = [] if kind == "LORA" else [f"peft_type is {kind!r}, but must be 'LORA'"]
    if start not in STARTS:
        wrong.append(
            f"init_lora_weights is {start!r}, with which the base model's weights change when the adapters are loaded: "
            "save them with path_initial_model_for_weight_conversion, or merge them with peft"
        )
    if task not in TASKS:
        wrong.append(f"task_type is {task!r}, whose head the base model lacks: merge the adapters with peft")
    # Keys that this version does not know are refused, too, unless their value is off.
    others = [key for key in config if key not in WITHOUT_EFFECT | READ and config[key]]
    return wrong + [f"{key} is {config[key]!r}: merge the adapters with peft" for key in others]
