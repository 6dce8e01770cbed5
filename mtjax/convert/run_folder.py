"""The folder of a run, with one checkpoint that `mtjax train --resume` continues: a sink for a state of training."""

import dataclasses
import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mtjax import config as configs
from mtjax.config import Config, Parallel
from mtjax.convert.mtjax_folder import MtjaxSink
from mtjax.convert.stream import Origin, carry_tokenizer
from mtjax.errors import UserError
from mtjax.layout.mesh import MeshShape
from mtjax.layout.stages import PLAIN, layer_orders
from mtjax.runtime.checkpoints.checkpoint import checkpoint_metadata, fingerprint_of_slice, names_of, state_arrays
from mtjax.runtime.checkpoints.corruption import with_checksum
from mtjax.runtime.checkpoints.weights import CHECKPOINTS
from mtjax.sharding.device_mesh import make_mesh
from mtjax.train.step import make_train_step

OURS = {"exp_avg": "mu", "exp_avg_sq": "nu"}
"""Adam's moments in torch and in optax."""


@dataclass(frozen=True)
class Counters:
    """What a run has done."""

    step: int
    consumed_samples: int
    updates: int
    """Steps of Adam: steps that were skipped do not count."""
    learning_rate_steps: int
    """Steps of the learning rate schedule."""
    loss_scale: Mapping[str, float] | None = None
    """Of float16: scale, growth and hysteresis."""


class RunSink(MtjaxSink):
    """Writes a run's folder, layer by layer."""

    def __init__(self, folder: Path, origin: Origin, final: Path, config: Config, counters: Counters) -> None:
        """Starts to write to `folder`, which will be renamed to `final`; `config` is all of the run."""
        super().__init__(folder, origin, final)
        self._config, self._counters = config, counters
        self._checkpoint = folder / CHECKPOINTS / str(counters.step)
        self._abstract = abstract_arrays(config)
        self._prefixes = {kind: _prefix(self._abstract, ours) for kind, ours in OURS.items()}

    def write_moment(self, kind: str, parameter: Any, layer: int | None, array: np.ndarray) -> None:
        """Writes one layer's slice of a moment, `exp_avg` or `exp_avg_sq`."""
        self.write(parameter, layer, array, self._prefixes[kind])

    def close(self) -> None:
        """Writes counters, metadata, config and tokenizer."""
        for name, value in self._scalars().items():
            abstract = self._abstract[name]
            array = np.asarray(value, abstract.dtype).reshape(abstract.shape)
            self._create(name, array.shape, array.shape, array.dtype).write(array).result()
            self._fingerprints[name] = fingerprint_of_slice(array, 0)
        if differing := set(self._abstract) ^ set(self._fingerprints):
            raise UserError(f"a run of mtjax has other arrays than were converted: {', '.join(sorted(differing))}")
        # What Orbax reads before it opens arrays.
        (self._checkpoint / "state" / "_METADATA").write_text(json.dumps({"use_zarr3": False}))
        now = time.time_ns()
        times = {"init_timestamp_nsecs": now, "commit_timestamp_nsecs": now}
        (self._checkpoint / "_CHECKPOINT_METADATA").write_text(json.dumps({"item_handlers": None, **times}))
        # Layers are written in the model's order; a checkpoint of a run with stages would have them in that of its
        # stages.
        saved = (
            self._config if layer_orders(self._config.model, self._config.parallel) == PLAIN else _plain(self._config)
        )
        metadata = checkpoint_metadata(self._counters.step, saved, self._counters.consumed_samples, None)
        path = self._checkpoint / "page" / "metadata"
        path.parent.mkdir(parents=True)
        path.write_text(
            # Through JSON first, so that the checksum is of what a reader parses: tuples become lists.
            json.dumps(with_checksum(json.loads(json.dumps(metadata | {"fingerprints": self._fingerprints}))))
        )
        configs.save(self._config, self._folder / "config.toml")
        carry_tokenizer(self._origin, self._folder)

    def _scalars(self) -> dict[str, Any]:
        """Returns the values of all arrays that are not parameters or moments."""
        counters, found = self._counters, {}
        # The key with which a new run of this seed begins: the states of Megatron's generators can't be translated, so
        # dropout masks differ from here on.
        key = jax.random.split(jax.random.key(self._config.training.seed))[1]
        for name in self._abstract:
            if name == "step":
                found[name] = counters.step
            elif name == "random":
                found[name] = jax.random.key_data(key)
            elif name.endswith(".count"):
                # Adam's own, and that of the learning rate schedule, which comes after it.
                is_adam = f"{name.removesuffix('.count')}.mu" in {
                    n.partition(".mu.")[0] + ".mu" for n in self._abstract
                }
                found[name] = counters.updates if is_adam else counters.learning_rate_steps
            elif name.startswith("loss_scale.") and counters.loss_scale is not None:
                found[name] = counters.loss_scale[name.removeprefix("loss_scale.")]
        return found


def abstract_arrays(config: Config) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns shapes and types of a run's state, by dotted name, on one device."""
    # Names and shapes of the state do not depend on batches, whose sizes one device might refuse.
    one_device = configs.replace(config, rampup_batch_size=None)
    one_device = configs.replace(_plain(one_device), global_batch_size=1, microbatch_size=1)
    program = make_train_step(one_device, make_mesh(MeshShape(), jax.devices("cpu")))
    tree = state_arrays(program.abstract_state)
    return dict(zip(names_of(tree), jax.tree.leaves(tree), strict=True))


def _plain(config: Config) -> Config:
    return dataclasses.replace(config, parallel=Parallel())


def _prefix(arrays: Mapping[str, Any], moment: str) -> str:
    """Returns what precedes a parameter's name in the name of its moment."""
    found = {match[1] for name in arrays if (match := re.match(rf"(optimizer\..*?\b{moment})\.", name))}
    assert len(found) == 1, found
    return found.pop()
