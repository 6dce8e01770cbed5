"""Libraries that only some data commands need: the extra `data`."""

from importlib import import_module
from types import ModuleType

from mtjax.errors import UserError, install_extra


def require(name: str) -> ModuleType:
    """The library `name`, imported.

    Raises:
      UserError: it isn't installed; the message says how to.
    """
    try:
        return import_module(name)
    except ImportError as e:
        raise UserError(f"this needs the library {name}: {install_extra('data')}") from e
