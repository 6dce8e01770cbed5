"""`mtjax data merge`: several indexed datasets into one, in a stream."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mtjax.cli import read, run_main
from mtjax.data.commands.inputs import with_all
from mtjax.data.corpus.indexed import IndexedDataset, bin_path, prefix_of
from mtjax.data.corpus.merge import merge
from mtjax.data.corpus.parts import in_order, part_datasets
from mtjax.data.corpus.resume_record import refuse_existing
from mtjax.errors import UserError


@dataclass(frozen=True)
class Options:
    """Puts indexed datasets one after another into one.

    Example: mtjax data merge --input books_text_document web_text_document --output all_text_document
    Example: mtjax data merge --parts books
    """

    input: tuple[str, ...] = ()
    """Prefixes (paths without .bin and .idx), or a folder, for all datasets in it, by name. The parts of a run are put
    in order, and must all be there."""
    parts: Path | None = None
    """The --output of `preprocess --part`: merges the parts of each key into what preprocess without --part writes."""
    output: Path | None = None
    """Prefix of the dataset that is written; with --parts the same as --parts when not given."""
    overwrite: bool = False
    """Replace a dataset of the same name."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command."""
    return run_main(lambda: run(read(Options, with_all(argv, "--input"), "mtjax data merge")))


def run(options: Options) -> None:
    """Merges as the options say.

    Raises:
      UserError: an input is corrupted, the inputs don't fit together, or the output can't be written.
    """
    jobs = _jobs(options)
    for inputs, output in jobs:
        # A dataset is mapped while it is read; writing over it would end the process.
        if any(Path(prefix).absolute() == output.absolute() for prefix in inputs):
            raise UserError(f"{output} is one of the inputs, and can't be the output too")
    if not options.overwrite:
        refuse_existing([output for _, output in jobs])
    # All are opened, and so checked, before the first is written.
    opened = [(in_order([IndexedDataset(prefix) for prefix in inputs]), output) for inputs, output in jobs]
    for datasets, output in opened:
        merge(datasets, output)
        # Opened again, which checks what was written.
        merged = IndexedDataset(output)
        print(f"{bin_path(output)}: {merged.num_tokens:,} tokens in {len(merged):,} sequences, {merged.dtype}")


def _jobs(options: Options) -> list[tuple[list[str], Path]]:
    """Returns prefixes, and the prefix that they are merged into."""
    if options.parts is None:
        if options.output is None:
            raise UserError("--output is missing: the prefix of the merged dataset")
        return [(_prefixes(options.input), options.output)]
    if options.input:
        raise UserError("--input and --parts both say what to merge: give one of them")
    found = part_datasets(options.parts)
    if not found:
        raise UserError(
            f"there is no part of {options.parts}: --parts takes what was --output of preprocess --part, and their "
            f"names begin with {options.parts.name}-00001-of-"
        )
    output = options.output or options.parts
    return [
        ([str(prefix) for prefix in parts.values()], output.with_name(f"{output.name}_{end}"))
        for end, parts in found.items()
    ]


def _prefixes(given: Sequence[str]) -> list[str]:
    prefixes: list[str] = []
    for name in given:
        path = Path(name).expanduser()
        inside = sorted(str(p.with_suffix("")) for p in path.glob("*.idx")) if path.is_dir() else [str(path)]
        prefixes += map(prefix_of, inside)
    if not prefixes:
        raise UserError(f"{' '.join(given) or 'nothing'} holds no dataset to merge")
    return prefixes
