"""Translates checkpoints, logs and the start of a Megatron-LM run."""

import math
from pathlib import Path

from mtjax.config import Config, replace
from mtjax.config.place import MEGATRON_TRACKER
from mtjax.convert.from_megatron.translated import Translation
from mtjax.layout.attention_kernel import choose_kernel
from mtjax.layout.mesh import MeshShape

CONTINUED = "runs/continued"
"""Folder in the commands that are printed."""


def translate_output(to: Translation) -> None:
    """Adds checkpoint and logging settings to a translation, and what to run and to add on the command line."""
    # Without it Megatron saves only at the end of a run.
    if not to.has("save_interval"):
        to.settings["checkpoint_every"] = 0
        to.implied.add("checkpoint_every")
    elif "keep_every" not in to.settings:
        to.settings["keep_every"] = to.settings["checkpoint_every"]
        to.implied.add("keep_every")  # Megatron keeps every checkpoint
    _start(to)
    if to.has("non_persistent_save_interval"):
        folder = to.given.values.get("non_persistent_local_ckpt_dir") or "LOCAL-DIR"
        to.settings |= {"local_every": to.get("non_persistent_save_interval"), "local_checkpoints": str(folder)}
    for dest, variable in (("wandb_project", "WANDB_PROJECT"), ("wandb_entity", "WANDB_ENTITY")):
        if to.has(dest):
            to.environment.append(f"{variable}={to.get(dest)}")
    if to.has("wandb_project"):
        to.run_options.append("--track wandb")
    if to.has("profile"):
        to.run_options.append(f"--profile {to.get('profile_step_start')}:{to.get('profile_step_end')}")
    if to.has("distributed_timeout_minutes"):
        seconds = float(math.ceil(to.get("distributed_timeout_minutes") * 60))
        to.set("distributed_timeout_minutes", {"step_timeout": seconds})


def _start(to: Translation) -> None:
    """Adds where the run starts: at step 0, or with the checkpoint of Megatron-LM that is converted first."""
    save, load = (str(value) if (value := to.given.values.get(dest)) is not None else None for dest in ("save", "load"))
    weights = to.given.values.get("pretrained_checkpoint")
    # With --finetune or --no-load-optim Megatron takes the weights alone and begins at step 0.
    if load is not None and not to.has("finetune") and not to.has("no_load_optim"):
        # The usual form of a script that is started again and again: it continues if there is something to continue.
        if load == save:
            to.settings["resume"] = True
            if not _holds_checkpoint(load):
                to.differences.append("--resume: continues from a checkpoint of mtjax in --out, or starts at step 0")
        where = "" if _holds_checkpoint(load) else f"if {load} has a checkpoint of Megatron-LM, go on from it: "
        to.run_first.append(f"{where}mtjax convert --from {load} --to mtjax:{CONTINUED} --with-optimizer")
        to.run_first.append(f"then, instead of this config: mtjax train --config {CONTINUED}/config.toml --resume")
    elif load is not None or weights is not None:
        to.run_first.append(f"mtjax convert --from {load if load is not None else weights} --to mtjax:weights")
        to.run_options.append("--init-from weights")


def note_kernel(to: Translation, run: Config, mesh: MeshShape) -> None:
    """Notes why a run that asks for flash attention has none."""
    if not to.asks_for_flash:
        return
    kernel, reason = choose_kernel(replace(run, attention="cudnn"), "gpu", mesh=mesh)
    if kernel != "cudnn" and choose_kernel(run, "gpu", mesh=mesh)[0] != "pallas":
        uses_pallas = choose_kernel(replace(run, attention="pallas"), "gpu", mesh=mesh)[0] == "pallas"
        hint = "; --attention pallas does not have this limit" if uses_pallas else ""
        to.differences.append(f"cuDNN's flash attention is not used: {reason}{hint}")


def _holds_checkpoint(folder: str) -> bool:
    return (Path(folder) / MEGATRON_TRACKER).is_file()
