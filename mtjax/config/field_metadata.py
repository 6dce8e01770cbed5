"""Metadata of the config's fields: the allowed values, and whether the setting is part of the model's architecture.

Both are in the metadata of the dataclass field, next to its default. `validate` reads the bound; `model_identity` reads
`shapes`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import Field, dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")

Condition = tuple[tuple[str, Sequence[Any]], ...]
"""Settings of the model, each with the values under which the condition holds."""
ALWAYS: Condition = ()
"""The setting changes what the model computes, or the shapes of its parameters."""
NEVER = None
"""The setting concerns only training or speed: two runs of the same model may differ in it."""

_KEY = "setting"


LARGEST = 2**31 - 1
"""Maximum of integers that have no other bound: devices count in int32."""
LARGEST_FLOAT = 1e38
"""Maximum of floats: devices compute in float32, whose maximum is slightly larger."""
LAYERS, WIDTH, HEADS, INNER_WIDTH, TOKENS = 10_000, 2**20, 2**16, 2**23, 2**24
"""Maximum sizes of a model and its batches: some hundred times the largest ever trained, and small enough that plans,
programs and messages are computed at once."""
SAMPLES = 2**32
"""Maximum number of samples of a run: each has a 32-bit number, from which its dropout key is derived."""


@dataclass(frozen=True)
class Bound:
    """The allowed values of a setting."""

    is_enough: Callable[[Any], bool]
    expected: str
    """Text after "must be" in the error message."""
    most: float = math.inf
    """Maximum value."""

    def why_not(self, value: Any) -> str | None:
        """Returns the text after "must be" in the error message; None if the value is allowed."""
        if not self.is_enough(value):
            return self.expected
        return None if value <= self.most else f"at most {self.most:{'' if type(self.most) is int else 'g'}}"


@dataclass(frozen=True)
class Setting:
    """Metadata of one field."""

    bound: Bound | None = None
    shapes: Condition | None = ALWAYS
    """The condition under which it is part of the model's architecture; None: never. Read for fields of `Model`
    only."""


def setting(
    default: T, *, bound: Bound | None = None, shapes: Condition | None = ALWAYS, alone: str | None = None
) -> T:
    """Builds a dataclass field with this default and metadata; `alone` is the value of its option typed without one."""
    return field(default=default, metadata={_KEY: Setting(bound, shapes), "alone": alone})


def setting_of(of: Field[Any]) -> Setting:
    """Returns the metadata of a field; a field with a plain default allows any value and is part of the
    architecture."""
    return of.metadata.get(_KEY, Setting())


def when(**values: str | tuple[str, ...]) -> Condition:
    """Builds the condition that each of these settings has this value, or one of these values."""
    return tuple((name, (value,) if isinstance(value, str) else value) for name, value in values.items())


def at_least(minimum: int, default: T, *, most: int = LARGEST, shapes: Condition | None = ALWAYS) -> T:
    """Builds a field for an integer from `minimum` to `most`."""
    expected = f"at least {minimum}" if minimum else "0 or more"
    return setting(default, bound=Bound(lambda value: value >= minimum, expected, most), shapes=shapes)


def numbers(minimum: int, default: T, *, most: int, length: int) -> T:
    """Builds a field for up to `length` integers from `minimum` to `most`."""

    def fits(values: Any) -> bool:
        return isinstance(values, tuple) and len(values) <= length and all(minimum <= value <= most for value in values)

    return setting(default, bound=_Several(fits, f"up to {length} numbers from {minimum} to {most}"))


def factors(default: T, *, shapes: Condition | None = ALWAYS) -> T:
    """Builds a field for a tuple of finite numbers above 0."""

    def fits(values: Any) -> bool:
        return isinstance(values, tuple) and all(math.isfinite(value) and value > 0 for value in values)

    return setting(default, bound=_Several(fits, "finite numbers above 0"), shapes=shapes)


def pattern(letters: str) -> Bound:
    """Returns the bound of a pattern of layers: text of one or more of these letters."""
    expected = f"a text of the letters {' and '.join(letters)}, such as {letters}"
    return _Several(lambda value: isinstance(value, str) and bool(value) and set(value) <= set(letters), expected)


class _Several(Bound):
    """The allowed values of a setting that is a tuple or a text."""

    def why_not(self, value: Any) -> str | None:
        return None if self.is_enough(value) else self.expected


def share(default: T, *, shapes: Condition | None = ALWAYS) -> T:
    """Builds a field for a fraction: 0 <= value < 1."""
    return setting(default, bound=Bound(lambda value: 0 <= value < 1, "at least 0 and below 1"), shapes=shapes)


def part_of_one(default: T) -> T:
    """Builds a field for a number from 0 to 1."""
    return setting(default, bound=Bound(lambda value: 0 <= value <= 1, "from 0 to 1"))


def amount(default: T, *, shapes: Condition | None = ALWAYS) -> T:
    """Builds a field for a finite number >= 0."""
    # TOML and the command line read infinity as a number.
    bound = Bound(lambda value: math.isfinite(value) and value >= 0, "a finite number, 0 or more", LARGEST_FLOAT)
    return setting(default, bound=bound, shapes=shapes)


def above_zero(default: T, *, shapes: Condition | None = ALWAYS) -> T:
    """Builds a field for a finite number > 0."""
    bound = Bound(lambda value: math.isfinite(value) and value > 0, "a finite number above 0", LARGEST_FLOAT)
    return setting(default, bound=bound, shapes=shapes)


def seconds(default: T) -> T:
    """Builds a field for a time from 1 second to one week."""
    bound = Bound(lambda value: 1 <= value <= 604_800, "from 1 to 604800 seconds")
    return setting(default, bound=bound)


def multiple_of(divisor: int, default: T, *, shapes: Condition | None = ALWAYS) -> T:
    """Builds a field for positive multiples of `divisor`."""
    bound = Bound(lambda value: value >= divisor and value % divisor == 0, f"a multiple of {divisor}", WIDTH)
    return setting(default, bound=bound, shapes=shapes)
