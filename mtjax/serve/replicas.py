"""Assigns the replicas of a mesh to processes, and builds the engine interface of each for process 0."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass

from jax.sharding import Mesh

from mtjax.errors import UserError
from mtjax.generate.engine import Engine
from mtjax.layout.mesh import MeshShape
from mtjax.runtime.devices import attach_devices
from mtjax.serve.lockstep import LockstepLeader, follow
from mtjax.serve.remote_replica import RemoteReplica, serve_replica
from mtjax.sharding.replicas import replica_meshes

ReplicaEngine = Engine | LockstepLeader | RemoteReplica
"""Process 0's interface to a replica: in this process, across processes, or in another process."""


@dataclass(frozen=True)
class Replica:
    """A data parallel replica of the mesh."""

    number: int
    mesh: Mesh
    """Mesh of the replica's devices."""

    @property
    def processes(self) -> list[int]:
        """Processes whose devices it has; the first is the leader."""
        return sorted({device.process_index for device in self.mesh.devices.flat})


def replicas_on(mesh_shape: MeshShape, processes: int) -> list[Replica]:
    """Builds all replicas of a mesh over this machine's devices, or over those of all processes.

    Raises:
      UserError: there are too few devices, or a process would have parts of multiple replicas.
    """
    # local: devices of each process; each: devices of each replica.
    local, each = mesh_shape.size // processes, mesh_shape.replica_shape.size
    # Another division is an error of its own in `attach_devices`.
    if not mesh_shape.size % processes and local % each and each % local:
        raise UserError(
            f"mesh {mesh_shape} gives each of {processes} processes {local} devices, and a replica has {each}: one "
            "number must be a multiple of the other"
        )
    return [Replica(number, mesh) for number, mesh in enumerate(replica_meshes(attach_devices(mesh_shape, processes)))]


def replica_engines(replicas: Sequence[Replica], local: Sequence[Engine], sequences: int) -> list[ReplicaEngine]:
    """Returns process 0's interface to each replica; `local` are its engines, which are of the first replicas."""
    engines: list[ReplicaEngine] = []
    for replica in replicas:
        if replica.number >= len(local):
            engines.append(RemoteReplica(replica.number, local[0], sequences))
        else:
            engines.append(leading_engine(replica, local[replica.number]))
    return engines


def leading_engine(replica: Replica, engine: Engine) -> Engine | LockstepLeader:
    """Wraps the engine of a replica's first process as a `LockstepLeader` if the replica spans multiple processes."""
    return LockstepLeader(engine, replica.number) if len(replica.processes) > 1 else engine


def run_worker(replicas: Sequence[Replica], engines: Sequence[Engine], process: int) -> None:
    """Runs the local replicas of a process other than process 0, until process 0 stops."""
    jobs: list[Callable[[], None]] = []
    for replica, engine in zip(replicas, engines, strict=True):
        if process > replica.processes[0]:
            jobs.append(lambda engine=engine, number=replica.number: follow(engine, number))
        else:
            jobs.append(
                lambda replica=replica, engine=engine: serve_replica(leading_engine(replica, engine), replica.number)
            )
    threads = ThreadPoolExecutor(len(jobs), "replica")  # if one fails, the process ends without waiting for the others
    # `result` raises a failed replica's error at once, although others still run.
    for done in as_completed([threads.submit(job) for job in jobs]):
        done.result()
