"""`mtjax data merge`: several indexed datasets into one, in a stream."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mtjax.cli import read, run_main
from mtjax.data.corpus.indexed import IndexedDataset, bin_path, prefix_of
from mtjax.data.corpus.merge import merge
from mtjax.data.corpus.resume_record import refuse_existing
from mtjax.errors import UserError


@dataclass(frozen=True)
class Options:
    """Puts indexed datasets one after another into one.

    Example: mtjax data merge --input part1_text_document part2_text_document --output all_text_document
    """

    input: tuple[str, ...]
    """Prefixes (paths without .bin and .idx), or a folder, for all datasets in it, by name."""
    output: Path
    """Prefix of the dataset that is written."""
    overwrite: bool = False
    """Replace a dataset of the same name."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command."""
    return run_main(lambda: run(read(Options, argv, "mtjax data merge")))


def run(options: Options) -> None:
    """Merges as the options say.

    Raises:
      UserError: an input is corrupted, the inputs don't fit together, or the output can't be written.
    """
    datasets = [IndexedDataset(prefix) for prefix in _prefixes(options.input)]
    if any(dataset.prefix.absolute() == options.output.absolute() for dataset in datasets):
        raise UserError(f"{options.output} is one of the inputs, and can't be the output too")
    if not options.overwrite:
        refuse_existing([options.output])
    merge(datasets, options.output)
    merged = IndexedDataset(options.output)
    print(f"{bin_path(options.output)}: {merged.num_tokens:,} tokens in {len(merged):,} sequences, {merged.dtype}")


def _prefixes(given: Sequence[str]) -> list[str]:
    prefixes: list[str] = []
    for name in given:
        path = Path(name).expanduser()
        inside = sorted(str(p.with_suffix("")) for p in path.glob("*.idx")) if path.is_dir() else [str(path)]
        prefixes += map(prefix_of, inside)
    if not prefixes:
        raise UserError(f"{' '.join(given) or 'nothing'} holds no dataset to merge")
    return prefixes
