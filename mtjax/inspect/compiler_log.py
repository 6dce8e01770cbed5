"""What XLA logs while it compiles a program that is only inspected."""

import os

LEVEL = "TF_CPP_MIN_LOG_LEVEL"
"""Environment variable of the lowest level that XLA logs; 3 is above errors."""


def hide_compiler_log() -> None:
    """Hides XLA's log, unless the environment sets its level or asks for details of errors; call it before the import
    of jax, which reads the variable."""
    # XLA: a program that does not fit the memory is logged as an error in its calculation, which it is not: the report
    # says that it does not fit. Programs that XLA can't compile raise exceptions.
    if os.environ.get("MTJAX_DEBUG") != "1":
        os.environ.setdefault(LEVEL, "3")
