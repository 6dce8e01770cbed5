"""Which process works on which replica of a mesh, and how process 0 speaks with each."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass

from jax.sharding import Mesh

from mtjax.errors import UserError
from mtjax.generate.engine import Engine
from mtjax.serve.lockstep import LockstepLeader, follow
from mtjax.serve.remote_replica import RemoteReplica, serve_replica
from mtjax.sharding.mesh import attach_devices, replica_meshes
from mtjax.theory.mesh import MeshShape

ReplicaEngine = Engine | LockstepLeader | RemoteReplica
"""What process 0 asks for a replica's texts."""


@dataclass(frozen=True)
class Replica:
    """A data way of the mesh."""

    number: int
    mesh: Mesh
    """Of its devices."""

    @property
    def processes(self) -> list[int]:
        """Whose devices it has; the first leads the others."""
        return sorted({device.process_index for device in self.mesh.devices.flat})


def replicas_on(shape: MeshShape, processes: int) -> list[Replica]:
    """All replicas of a mesh over this machine's devices, or over those of all processes.

    Raises:
      UserError: there are too few devices, or a process would have parts of several replicas.
    """
    own, each = shape.size // processes, shape.replica_shape.size
    if not shape.size % processes and own % each and each % own:
        raise UserError(
            f"mesh {shape} gives each of {processes} processes {own} devices, and a replica has {each}: one must be a "
            "multiple of the other"
        )
    return [Replica(number, mesh) for number, mesh in enumerate(replica_meshes(attach_devices(shape, processes)))]


def replica_engines(replicas: Sequence[Replica], own: Sequence[Engine], sequences: int) -> list[ReplicaEngine]:
    """What process 0 asks, for each replica; `own` are the engines of those that it works on, the first ones."""
    asked: list[ReplicaEngine] = []
    for replica in replicas:
        if replica.number >= len(own):
            asked.append(RemoteReplica(replica.number, own[0], sequences))
        else:
            asked.append(leading_engine(replica, own[replica.number]))
    return asked


def leading_engine(replica: Replica, engine: Engine) -> Engine | LockstepLeader:
    """The engine of the first process of a replica, which others may follow."""
    return LockstepLeader(engine, replica.number) if len(replica.processes) > 1 else engine


def run_worker(replicas: Sequence[Replica], engines: Sequence[Engine], process: int) -> None:
    """What a process does that is not process 0: works on its replicas, until process 0 lets it go."""
    jobs: list[Callable[[], None]] = []
    for replica, engine in zip(replicas, engines, strict=True):
        if process > replica.processes[0]:
            jobs.append(lambda engine=engine, number=replica.number: follow(engine, number))
        else:
            jobs.append(
                lambda replica=replica, engine=engine: serve_replica(leading_engine(replica, engine), replica.number)
            )
    threads = ThreadPoolExecutor(len(jobs), "replica")  # not waited for when one fails: the process ends
    for done in as_completed([threads.submit(job) for job in jobs]):
        done.result()
