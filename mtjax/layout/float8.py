"""Sizes that matmuls in 8-bit floats need."""

from collections.abc import Iterator

from mtjax.config import Model
from mtjax.config.float8 import ENDS, MULTIPLE, float8_products, unfit_products
from mtjax.errors import UserError
from mtjax.layout.mesh import parse_mesh
from mtjax.layout.plan import Plan

LEAST_CAPABILITY = (8, 9)
"""Compute capability from which GPUs multiply 8-bit floats: Ada and Hopper."""


def check_float8_gpu(fp8: str, name: str, capability: tuple[int, ...]) -> None:
    """Checks that GPUs have 8-bit products.

    Raises:
      UserError: they have none.
    """
    if capability < LEAST_CAPABILITY:
        least, found = (".".join(map(str, version)) for version in (LEAST_CAPABILITY, capability))
        raise UserError(
            f"fp8 {fp8} needs a GPU with 8-bit products, of compute capability {least} or more, and {name} has "
            f"{found}: remove fp8"
        )


def float8_problems(model: Model, plan: Plan) -> Iterator[str]:
    """Yields why no matmul of a plan could be in 8 bits."""
    tokens = model.sequence_length // plan.mesh.context
    if tokens % MULTIPLE:
        yield (
            f"fp8 {plan.fp8} multiplies matrices whose sizes are multiples of {MULTIPLE}, and a rank has {tokens} "
            "tokens of a sample: change sequence_length, or remove fp8"
        )
    for name, layers in zip(ENDS, plan.fp8_ends, strict=True):
        if layers and plan.mesh.has_pipeline:
            yield (
                f"{name} {layers} does not support pipeline parallelism, whose stages all run one program, and mesh "
                f"{plan.mesh} has {plan.stages} stages: remove one of the two"
            )
    if plan.fp8 == "rowwise" and plan.tensor_degree > 1:
        yield (
            f"fp8 rowwise does not support tensor parallelism, and mesh {plan.mesh} has {plan.tensor_degree} ranks: "
            "ranks would multiply by scales of rows before they sum; use --fp8 delayed"
        )
    if plan.fp8 == "tensorwise" and plan.tensor_degree > 1 and model.kv_lora_rank:
        yield (
            f"fp8 tensorwise does not support latent attention with tensor parallelism, and mesh {plan.mesh} has "
            f"{plan.tensor_degree} ranks: use --fp8 delayed"
        )
    left = unfit_products(model, plan.tensor_degree)
    if not float8_products(model, plan.tensor_degree):
        yield (
            f"fp8 {plan.fp8} multiplies matrices whose sizes are multiples of {MULTIPLE}, and with mesh {plan.mesh} no "
            f"layer has one: they are {_listed(left)}; change the model's sizes or the mesh, or remove fp8"
        )


def products_on(model: Model, mesh: str) -> set[str]:
    """Returns the matmuls of layers that run in 8 bits on a mesh, by the paths of their weights in a layer."""
    return set(float8_products(model, parse_mesh(mesh).model))


def float8_note(model: Model, plan: Plan) -> str | None:
    """Returns a sentence about the matmuls that remain in 16 bits; None where there are none."""
    if plan.fp8 == "none":
        return None
    left = unfit_products(model, plan.tensor_degree)
    sizes = f"as a rank's sizes are not multiples of {MULTIPLE}: {_listed(left)}" if left else ""
    kinds = " and ".join(_kinds_in_16_bits(model))
    reasons = "; ".join(filter(None, (kinds, sizes)))
    return f"not in 8 bits: {reasons}" if reasons else None


def _kinds_in_16_bits(model: Model) -> Iterator[str]:
    """Yields the matmuls of layers with weights that have no 8-bit form, whatever their sizes."""
    if model.num_experts:
        yield "experts' grouped matmuls, and routers"
    if model.mtp_num_layers:
        yield "layers of multi-token prediction"


def _listed(sizes: dict[str, tuple[int, int]]) -> str:
    return ", ".join(f"{name} {inputs} x {outputs}" for name, (inputs, outputs) in sizes.items())
