"""What a run with scales of earlier steps can go on with."""

from mtjax.config import Config
from mtjax.config.float8 import ENDS
from mtjax.errors import UserError
from mtjax.layout.float8 import products_on
from mtjax.runtime.checkpoints.past import Past

KEPT = {
    "fp8_scales": "the state of delayed has counts of one kind of scales",
    "fp8_format": "the scales of gradients, and the counts of earlier steps, are for the range of its type",
}
"""Settings that delayed scaling keeps, each with why."""


def check_float8_layers(past: Past, config: Config) -> None:
    """Checks that each product with delayed scaling has scales of earlier steps, and the others none.

    Raises:
      UserError: other products had scales when the checkpoint was saved.
    """
    before, now = past.config.training, config.training
    if (before.fp8 == "delayed") != (now.fp8 == "delayed"):
        raise UserError(
            f"the checkpoint of step {past.step} was saved with fp8 {before.fp8}, and fp8 is {now.fp8}: only delayed "
            f"has scales of earlier steps; resume with --fp8 {before.fp8}, or begin a new run from its weights with "
            "--init-from"
        )
    if now.fp8 != "delayed":
        return
    for name, why in KEPT.items():
        if (then := getattr(before, name)) != (here := getattr(now, name)):
            raise UserError(
                f"the checkpoint of step {past.step} was saved with {name} {then}, and {name} is {here}: {why}; resume "
                f"with --{name.replace('_', '-')} {then}, or begin a new run from its weights with --init-from"
            )
    # A product whose shards are not a multiple of 16 runs in 16 bits, and has no scales: that depends on the mesh.
    fitted, fit = (products_on(config.model, of.parallel.mesh) for of in (past.config, config))
    if fitted != fit:
        raise UserError(
            f"the checkpoint of step {past.step} was saved on mesh {past.config.parallel.mesh}, and mesh is "
            f"{config.parallel.mesh}, where other matmuls fit fp8 ({', '.join(sorted(fitted ^ fit))}), without scales "
            "of earlier steps: resume on a mesh with the former tensor parallel degree, or begin a new run from its "
            "weights with --init-from"
        )
    for name in ENDS:
        if (then := getattr(before, name)) > (here := getattr(now, name)):
            raise UserError(
                f"the checkpoint of step {past.step} was saved with {name} {then}, and {name} is {here}: layers "
                f"between have no scales of earlier steps; resume with --{name.replace('_', '-')} {then}, or begin a "
                "new run from its weights with --init-from"
            )
