"""Unpicklers that run no code: a class or function that a file names becomes one that does nothing, or is refused."""

import argparse
import io
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from mtjax.errors import UserError

_DCP = "torch.distributed.checkpoint"
METADATA = f"{_DCP}.metadata"
FILESYSTEM = f"{_DCP}.filesystem"
_PLANNER = f"{_DCP}.planner"
_OLD_METADATA = "torch.distributed._shard.sharded_tensor.metadata"  # of TensorProperties before torch 2.3
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
_KNOWN = {
    METADATA: (
        *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "MetadataIndex"),
        *("TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING"),
    ),
    _OLD_METADATA: ("TensorProperties", "MEM_FORMAT_ENCODING"),
    FILESYSTEM: ("_StorageInfo", "StorageTransforms"),
    _PLANNER: ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData"),
    _MEGATRON: ("MCoreSavePlan", "MCoreMetadata"),
    "torch.serialization": ("_get_layout",),
    "pathlib": ("PosixPath", "WindowsPath", "PurePosixPath"),
    "pathlib._local": ("PosixPath", "WindowsPath", "PurePosixPath"),
}
"""All classes that occur in `.metadata`, by their module."""
TYPES = (
    *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
    *("int64", "int32", "int16", "int8", "uint8", "bool"),
)
"""torch's types that are read."""
STORAGES = {
    "FloatStorage": "float32",
    "DoubleStorage": "float64",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "UntypedStorage": "",
}
"""torch's classes of storages, with the type of their numbers; the last has none."""
_PLAIN_OF_PYTHON = {
    *(("builtins", name) for name in ("set", "frozenset", "bytearray", "complex", "slice", "range", "object")),
    *(("builtins", "getattr"), ("_codecs", "encode"), ("copyreg", "_reconstructor"), ("functools", "partial")),
    *(("signal", "Signals"), ("datetime", "timedelta"), ("datetime", "datetime")),
}
"""Of the standard library, what the common state may name; none of it is called."""


class Record:
    """An object of a class that is not loaded: the arguments that it was called with, and its state.

    The state's names are its attributes. It can be called and filled like a list or a dict, and ignores both.
    """

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        # pickle's protocol for objects with __slots__.
        if isinstance(state, tuple) and len(state) == 2 and all(isinstance(s, dict | None) for s in state):
            state = {**(state[0] or {}), **(state[1] or {})}  # __dict__ and __slots__
        if isinstance(state, dict):
            self.__dict__.update({str(name): value for name, value in state.items()})
        else:
            self.state = state

    def __call__(self, *_: Any) -> "Record":
        """Returns itself."""
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, value: Any) -> None:
        """Drops a value."""

    add = extend = append


def _record(name: str) -> type[Record]:
    return type(name, (Record,), {})


@dataclass(frozen=True)
class TensorEntry:
    """A tensor as torch pickles it: a view of a storage."""

    dtype: str
    storage: str
    """Name of the storage in the archive."""
    first: int
    """Its first element in the storage."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def _rebuilt(storage: Any, first: Any, shape: Any, strides: Any, *more: Any) -> TensorEntry:
    """Replaces `torch._utils._rebuild_tensor_v2` and `_v3`, which has the type after `requires_grad` and hooks."""
    dtype = more[2] if len(more) > 2 and isinstance(more[2], str) else storage[0]
    # Negative strides or offsets would read outside of the storage; torch has none.
    numbers = (first, *shape, *strides)
    if not all(isinstance(number, int) and number >= 0 for number in numbers) or len(shape) != len(strides):
        raise UserError(f"a tensor of shape {tuple(shape)}, strides {tuple(strides)} and first element {first}")
    return TensorEntry(dtype, str(storage[1]), first, tuple(shape), tuple(strides))


class _Refusing(pickle.Unpickler):
    """Knows no class but these: shapes, types, and `known`."""

    known: ClassVar[dict[tuple[str, str], Any]] = {}

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        """Returns the harmless equal of a class or function.

        Raises:
          UserError: it is not a known one.
        """
        if (module_name, global_name) in self.known:
            return self.known[module_name, global_name]
        if module_name == "torch" and global_name in TYPES:
            return global_name
        return self.unknown(module_name, global_name)

    def unknown(self, module: str, name: str) -> Any:
        """Refuses a class or function.

        Raises:
          UserError: always.
        """
        raise UserError(f"it names {module}.{name}, which is not loaded: the file may be meant to run code")


_SHAPES = {("torch", "Size"): lambda sizes=(): tuple(sizes), ("collections", "OrderedDict"): dict}


class MetadataUnpickler(_Refusing):
    """Reads `.metadata`."""

    known: ClassVar = _SHAPES | {(m, name): _record(name) for m, names in _KNOWN.items() for name in names}


class TensorUnpickler(_Refusing):
    """Reads `data.pkl` of one tensor as a `TensorEntry`."""

    known: ClassVar = {
        **_SHAPES,
        ("torch._utils", "_rebuild_tensor_v2"): _rebuilt,
        ("torch._utils", "_rebuild_tensor_v3"): _rebuilt,
        # nn.Parameter around a tensor, with flags of autograd.
        ("torch._utils", "_rebuild_parameter"): lambda tensor, *_: tensor,
        **{(module, name): dtype for module in ("torch", "torch.storage") for name, dtype in STORAGES.items()},
    }

    def persistent_load(self, pid: Any) -> tuple[str, str]:
        """Returns a storage's type and name in the archive, from ("storage", class, name, device, numbers)."""
        return pid[1], pid[2]


class StateUnpickler(TensorUnpickler):
    """Reads the common state: a Namespace, plain values, and records instead of everything else.

    Objects of other packages, such as Megatron's enums, become records; functions of the standard library are refused.
    """

    known: ClassVar = {
        **TensorUnpickler.known,
        ("argparse", "Namespace"): argparse.Namespace,
        **{which: _record(which[1]) for which in _PLAIN_OF_PYTHON},
    }

    def unknown(self, module: str, name: str) -> Any:
        """Returns a class of records, or refuses what the standard library has."""
        # Python 2's names, which pickles of protocol 2 have.
        module = {"__builtin__": "builtins", "copy_reg": "copyreg"}.get(module, module)
        if (module, name) in self.known:
            return self.known[module, name]
        # Refused, not replaced: a pickle that names os.system is an attack, and the user should know.
        if module.partition(".")[0] in sys.stdlib_module_names and module.partition(".")[0] != "enum":
            return super().unknown(module, name)
        return _record(name)


def unpickled(data: bytes, unpickler: Callable[[io.BytesIO], pickle.Unpickler], source: str) -> Any:
    """Unpickles data.

    Raises:
      UserError: it is damaged, or names what `unpickler` refuses; `source` names the file.
    """
    try:
        return unpickler(io.BytesIO(data)).load()
    except UserError as e:
        raise UserError(f"{source} can't be read without running code from it: {e}") from e
    except Exception as e:  # bytes that are not a pickle may cause any exception
        raise UserError(f"{source} is corrupted: it is not a complete pickle ({str(e) or type(e).__name__})") from e
