"""`--mesh auto`: the fastest mesh of a run on its devices, by the planner's formulas."""

from mtjax.analysis.anatomy import Anatomy, anatomy_of
from mtjax.analysis.hardware import SERVERS, Server, by_device_kind
from mtjax.analysis.memory import peak_stage_memory
from mtjax.analysis.timing import step_time
from mtjax.config import Config, Model
from mtjax.config.sizes import divisors
from mtjax.config.vocabulary import with_vocabulary
from mtjax.errors import UserError
from mtjax.layout.attention_kernel import HOPPER
from mtjax.layout.divisibility import problems
from mtjax.layout.mesh import MeshShape
from mtjax.layout.plan import Plan
from mtjax.layout.proposed_meshes import meshes_within, with_groups
from mtjax.plan.search import Space


def fastest_mesh(config: Config, devices: int, kind: str, teacher: Model | None = None) -> MeshShape:
    """Returns the mesh of all devices on which a step of the run, with its recompute and ZeRO stage, is fastest.

    On devices that the planner does not know, such as CPUs, it is the mesh with the largest data parallel degree, which
    has the least communication.

    Args:
      config: the run; its `mesh` is not read.
      devices: of all processes.
      kind: jax's name of the devices.
      teacher: the teacher's model, if any.

    Raises:
      UserError: no mesh fits model and batch, or none fits the memory.
    """
    anatomy = anatomy_of(with_vocabulary(config, lambda message: None).model)
    gpu = by_device_kind(kind)
    server = SERVERS.get(gpu.name) if gpu else None
    # Ascending tensor parallel degrees, so that the first mesh that is possible has the largest data parallel degree.
    shapes = [MeshShape(data=devices // model, model=model) for model in divisors(devices)]
    experts, tokens = anatomy.model.num_experts, anatomy.model.sequence_length
    meshes = [mesh for shape in shapes for mesh in meshes_within(shape, experts, tokens)]
    # Groups shard what ZeRO shards; without ZeRO they are the same as data parallelism.
    if server and config.parallel.zero:
        meshes += [grouped for mesh in meshes for grouped in with_groups(mesh, server.gpus, anatomy.model.hidden_size)]
    capability = gpu.compute_capability if gpu else HOPPER
    plans = [Plan.of(config, mesh, capability, teacher=teacher) for mesh in meshes]
    reasons = {str(plan.mesh): next(problems(anatomy.model, plan), None) for plan in plans}
    possible = [plan for plan in plans if reasons[str(plan.mesh)] is None]
    if not possible:
        listed = "; ".join(f"{mesh}: {reason}" for mesh, reason in list(reasons.items())[:3])
        raise UserError(
            f"no mesh of {devices} devices fits this run ({listed}): give --mesh, or change global_batch_size"
        )
    return _fastest(anatomy, possible, server).mesh if server else possible[0].mesh


def _fastest(anatomy: Anatomy, plans: list[Plan], server: Server) -> Plan:
    """Returns the fastest plan that fits the memory; tensor parallelism stays inside a server where possible."""
    # As in a search without --usable.
    limit = Space().usable * server.gpu.memory
    inside = [plan for plan in plans if plan.tensor_degree <= server.gpus] or plans
    needed = {plan: peak_stage_memory(anatomy, plan).total for plan in inside}
    fitting = [plan for plan in inside if needed[plan] <= limit]
    if not fitting:
        least = min(inside, key=lambda plan: needed[plan])
        size, gib = least.mesh.size, needed[least] / 2**30
        raise UserError(
            f"on {size} x {server.gpu.name} this run needs at least {gib:.1f} GiB per GPU (on mesh {least.mesh}), "
            f"and {limit / 2**30:.1f} are usable: use a higher --zero or --recompute full, or search for a plan with "
            f"mtjax plan --gpus {size}"
        )
    return min(fitting, key=lambda plan: step_time(anatomy, plan, server).total)
