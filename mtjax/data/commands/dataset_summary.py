"""What an indexed dataset holds, in numbers and as text: shared by the commands that look at one."""

from collections.abc import Sequence

import numpy as np
from rich.table import Table
from rich.text import Text

from mtjax.data.corpus.indexed import IndexedDataset
from mtjax.data.corpus.made_with import check_made_with
from mtjax.data.progress import say
from mtjax.data.tokens.tokenizer import Tokenizer, open_tokenizer

BARS = " ▁▂▃▄▅▆▇█"
WIDEST_BAR = 40


def tokenizer_of(dataset: IndexedDataset, name: str | None) -> Tokenizer | None:
    """Opens the tokenizer `name`, else the one that the dataset's record names; None without a record.

    Raises:
      UserError: it can't be read, or is not the one that made the dataset.
    """
    name = name or (dataset.meta.tokenizer if dataset.meta else None)
    if name is None:
        return None
    tokenizer = open_tokenizer(name)
    check_tokenizer(dataset, name, tokenizer)
    return tokenizer


def check_tokenizer(dataset: IndexedDataset, name: str, tokenizer: Tokenizer) -> None:
    """Checks that a tokenizer made a dataset, and prints a note about what could not be compared.

    Raises:
      UserError: another one made it.
    """
    if note := check_made_with(dataset.prefix, dataset.meta, name, tokenizer):
        say(f"note    {note}")


def counts_table(dataset: IndexedDataset) -> Table:
    """Builds a table of counts and lengths."""
    table = Table(title=str(dataset.prefix), show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(justify="right", overflow="fold")
    documents = np.diff(dataset.documents)
    rows = [("tokens", f"{dataset.num_tokens:,} ({dataset.dtype})"), ("sequences", f"{len(dataset):,}")]
    rows += [("documents", f"{dataset.num_documents:,}"), ("empty documents", f"{int((documents == 0).sum()):,}")]
    if len(dataset):
        low, middle, high = np.percentile(dataset.lengths, [1, 50, 99])
        rows += [
            ("sequence length", f"{dataset.lengths.min():,} to {dataset.lengths.max():,}"),
            ("1%, median, 99%", f"{low:,.0f}, {middle:,.0f}, {high:,.0f}"),
            ("sequences in a document", f"{documents.min():,} to {documents.max():,}"),
        ]
    if dataset.modes is not None:
        rows.append(("modes", ", ".join(map(str, np.unique(dataset.modes)))))
    if dataset.meta is not None and dataset.meta.tokenizer:
        rows.append(("tokenizer", f"{dataset.meta.tokenizer} ({dataset.meta.vocab_size:,} tokens)"))
    for row in rows:
        table.add_row(*row)
    return table


def histogram(values: np.ndarray, name: str, bins: int = 12) -> Text:
    """Draws a histogram of non-negative integers over powers of two, one line per bin."""
    top = max(1, int(values.max(initial=1)).bit_length())
    # Lengths of documents spread over orders of magnitude.
    edges = np.unique(np.concatenate([[0, 1], 2 ** np.arange(max(1, top - bins), top + 1)]))
    counts = np.histogram(values, np.append(edges, edges[-1] * 2))[0]
    text = Text(f"{name}\n", style="bold")
    for low, high, count in zip(edges, [*edges[1:], None], counts, strict=True):
        if count:
            label = f"{low:>11,}" if high is None or high == low + 1 else f"{low:,}-{high - 1:,}".rjust(11)
            width = count / counts.max() * WIDEST_BAR
            bar = BARS[-1] * int(width) + BARS[round((width % 1) * 8)]
            text.append(f"{label} ", style="default")
            text.append(bar.rstrip() or BARS[1], style="cyan")
            text.append(f" {count:,}\n", style="default")
    return text


def excerpt(tokens: Sequence[int] | np.ndarray, tokenizer: Tokenizer | None, length: int = 64) -> str:
    """Returns the first tokens of a sequence as text, or as numbers when no tokenizer is known."""
    shown = [int(t) for t in tokens[:length]]
    more = " ..." if len(tokens) > length else ""
    if tokenizer is None:
        return " ".join(map(str, shown)) + more
    # An excerpt is shown also of a damaged dataset: `verify` says what is wrong.
    return tokenizer.decode([t for t in shown if 0 <= t < tokenizer.vocab_size]) + more
