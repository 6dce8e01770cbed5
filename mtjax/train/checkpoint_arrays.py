"""How Orbax reads and writes a checkpoint's arrays, without leaving anything behind when a file is damaged."""

import asyncio
from collections.abc import Sequence

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.type_handlers import ArrayHandler, ParamInfo, RestoreArgs


def array_handler() -> ocp.PyTreeCheckpointHandler:
    """A handler for trees of only `jax.Array`."""
    registry = ocp.type_handlers.create_type_handler_registry((jax.Array, _FinishingHandler()))
    return ocp.PyTreeCheckpointHandler(type_handler_registry=registry)


class _FinishingHandler(ArrayHandler):
    """Waits for every read it has begun before it reports that one has failed.

    Orbax reads all arrays at once and closes its event loop as soon as one read raises. The other reads would stay
    suspended with what they hold, until the garbage collector finds them in the middle of something else, and print an
    error each. They are waited for, not cancelled: TensorStore's threads report to the loop even then.
    """

    async def deserialize(
        self, infos: Sequence[ParamInfo], args: Sequence[RestoreArgs] | None = None
    ) -> Sequence[jax.Array]:
        before = asyncio.all_tasks()
        try:
            return await super().deserialize(infos, args)
        except Exception:
            while begun := asyncio.all_tasks() - before:
                await asyncio.wait(begun)
            raise
