"""Which meshes only training uses."""

from mtjax.errors import UserError
from mtjax.layout.mesh import MeshShape


def check_generation_mesh(mesh: MeshShape) -> None:
    """Checks that a mesh has neither context parallelism nor sharding groups, which generation does not support.

    Raises:
      UserError: it has.
    """
    if mesh.has_context_parallel:
        raise UserError(
            f"mesh {mesh} has context parallelism (context={mesh.context}), which works for training and evaluation "
            "only: remove context from the mesh"
        )
    check_no_sharding_groups(mesh)


def check_no_sharding_groups(mesh: MeshShape) -> None:
    """Checks that a mesh has no sharding groups, which only training uses.

    Raises:
      UserError: it has.
    """
    if mesh.has_sharding_groups:
        raise UserError(
            f"mesh {mesh} has sharding groups (shard={mesh.shard}), which are for training: use "
            f"data={mesh.data * mesh.shard} in place of data and shard"
        )
