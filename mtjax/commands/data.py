"""`mtjax data COMMAND`: corpora from raw text to token ids, and a look at them."""

import sys
from collections.abc import Sequence
from importlib import import_module

from mtjax.errors import nearest

COMMANDS = {
    "preprocess": "text files to an indexed dataset",
    "parts": "how far the parts of a run of preprocess are",
    "merge": "several indexed datasets into one",
    "info": "counts, lengths and a decoded sample of an indexed dataset",
    "verify": "check every byte of an indexed dataset",
    "clean": "repair unicode, drop short and near-duplicate documents, remove by list, report overlap",
    "select": "rows of JSON lines by a score, of a classifier or of any program",
    "embed": "an embedding of every chunk of a corpus",
    "neighbours": "the nearest chunks of each chunk of a run's samples, or of a corpus",
    "show": "decoded training samples with their masks and labels",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `mtjax data COMMAND ...`, also `python -m mtjax.data COMMAND ...`."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help"):
        rows = "\n".join(f"  {name:12}{what}" for name, what in COMMANDS.items())
        print(f"usage: mtjax data COMMAND [OPTIONS]\n\n{rows}\n\n`mtjax data COMMAND --help` explains the options.")
        return 0
    if argv[0] not in COMMANDS:
        print(f"error: no data command is called {argv[0]!r}{nearest(argv[0], COMMANDS)}", file=sys.stderr)
        return 2
    # These join `data` with models, of which the package of data knows nothing.
    package = "mtjax.commands" if argv[0] in ("select", "embed", "neighbours") else "mtjax.data.commands"
    return import_module(f"{package}.{argv[0]}").main(argv[1:])


if __name__ == "__main__":
    sys.exit(main())
