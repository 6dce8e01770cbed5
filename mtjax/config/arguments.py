"""The options of a command line, read before the parser reads them: to rename, sort and join what was typed."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Typed(NamedTuple):
    """An option as it was typed: `--name value`, or `--name=value`."""

    position: int
    """Of its word among the arguments."""
    option: str
    """`--name`."""
    value: str | None
    """What follows; None where nothing does."""
    is_joined: bool
    """Whether the value is in the same word."""

    @property
    def setting(self) -> str:
        """Name of the setting: `num_layers` of `--num-layers`."""
        return self.option[2:].replace("-", "_")

    def write(self, argv: list[str], option: str, value: str | None) -> None:
        """Replaces the option and its value, in the form in which it was typed."""
        argv[self.position] = f"{option}={value}" if self.is_joined else option
        if not self.is_joined and value is not None:
            argv[self.position + 1] = value


def typed_options(argv: Sequence[str]) -> Iterator[Typed]:
    """Yields the words that begin with `--`, each with what follows it."""
    for i, word in enumerate(argv):
        option, equals, value = word.partition("=")
        if option.startswith("--"):
            following = argv[i + 1] if i + 1 < len(argv) else None
            yield Typed(i, option, value if equals else following, bool(equals))
