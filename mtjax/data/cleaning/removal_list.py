"""The ids of `--remove-ids`, and which of them a document has."""

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

from mtjax.data.corpus.documents import value_at
from mtjax.data.json_lines import read_lines
from mtjax.errors import UserError, shortened

# JSON's grammar, not Python's, to which nan, 1_0 and 007 are numbers, too.
NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
KEYS_SHOWN = 10
LONGEST_NUMBER = 400
"""Characters; float64 has 309 digits, and Python refuses to read integers of more than 4,300."""


@dataclass
class FoundIds:
    """What is known of the ids of documents, where ids are looked for.

    Attributes:
      names: ids of the lists that documents have.
      with_id: documents that have one.
      without_id: documents that have none.
      other_form: dropped documents whose id has another form in the lists, such as 2 for 2.0.
      keys: those of the first document without an id.
    """

    names: set[str] = field(default_factory=set)
    with_id: int = 0
    without_id: int = 0
    other_form: int = 0
    keys: tuple[str, ...] = ()

    def add(self, other: "FoundIds") -> None:
        """Adds what is known of further documents."""
        self.names |= other.names
        self.with_id += other.with_id
        self.without_id += other.without_id
        self.other_form += other.other_form
        self.keys = self.keys or other.keys

    def check(self, key: str) -> None:
        """Checks that ids could be compared.

        Raises:
          UserError: no document has one.
        """
        if self.without_id and not self.with_id:
            keys = ", ".join(repr(shortened(name)) for name in self.keys[:KEYS_SHOWN])
            raise UserError(
                f"no document has an id (text or a number) under the key {key!r}, by which --remove-ids finds "
                f"documents; the first one has the keys {keys}: name the key of the ids with --id-key"
            )


@dataclass(frozen=True)
class RemovalList:
    """Ids of documents to drop.

    Attributes:
      texts: the ids as the lists have them, without space around them.
      numbers: value of those that are numbers -> all forms in which the lists have it, such as 2 and 2.0.
    """

    texts: frozenset[str] = frozenset()
    numbers: Mapping[int | float, tuple[str, ...]] | None = None

    @classmethod
    def of(cls, lines: Sequence[str]) -> "RemovalList":
        """Makes one of lines with an id each; blank ones are skipped."""
        texts = frozenset(line.strip() for line in lines) - {""}
        numbers: dict[int | float, list[str]] = defaultdict(list)
        for text in sorted(texts):
            if (value := _number(text)) is not None:
                numbers[value].append(text)
        return cls(texts, {value: tuple(forms) for value, forms in numbers.items()})

    def find(self, row: Mapping[str, Any], key: str, found: FoundIds) -> dict[str, Any] | None:
        """Looks for a document's id in the lists.

        Args:
          row: the document.
          key: of its id.
          found: to which the result is added.

        Returns:
          Its id, and the form of the lists where that is another; None where it is not in the lists, or has no id.
        """
        if not self.texts:
            return None
        value = id_in(value_at(row, key)[0])
        if value is None:
            found.without_id += 1
            found.keys = found.keys or tuple(row)
            return None
        found.with_id += 1
        names = self.names_of(value)
        if not names:
            return None
        found.names.update(names)
        if (value if isinstance(value, str) else str(value)) in names:
            return {"id": value}
        found.other_form += 1
        return {"id": value, "listed_as": names[0]}

    def names_of(self, value: str | int | float) -> tuple[str, ...]:
        """Returns the ids of the lists that stand for a document's: the same text, or for a number the same number.

        Args:
          value: a document's id, as `id_in` returns it.
        """
        if isinstance(value, str):
            # Text that looks like a number is no number: 12e4 may be a hash.
            return (value.strip(),) if value.strip() in self.texts else ()
        # Python compares integers with floats exactly: no id of many digits is taken for its neighbour.
        return (self.numbers or {}).get(value, ())


def read_removal_list(paths: Sequence[Path]) -> RemovalList:
    """Reads files with an id on each line.

    Raises:
      UserError: one can't be read.
    """
    return RemovalList.of([line for path in paths for line in read_lines(path)])


def _number(text: str) -> int | float | None:
    """Returns the value of a text that is a number in JSON: an exact integer where it has no fraction."""
    match = NUMBER.fullmatch(text) if len(text) <= LONGEST_NUMBER else None
    if match is None:
        return None
    value, exact = float(text), Decimal(text)
    if not math.isfinite(value):
        return None
    # Exact, also above 2^53, where a float may be another number.
    if exact == exact.to_integral_value():
        return int(exact)
    # 0.99999999999999999999 would be 1.
    return None if value.is_integer() else value


def id_in(value: Any) -> str | int | float | None:
    """Returns what a document has for an id; None for an empty text, NaN, and what is neither text nor a number."""
    if isinstance(value, str):
        return value if value.strip() else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    # A missing number is NaN to pandas.
    return value if isinstance(value, int) or math.isfinite(value) else None
