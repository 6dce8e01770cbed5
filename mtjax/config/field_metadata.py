"""What a field of the config says about itself: the values it may have, and whether it shapes the model.

Both are metadata of the dataclass field, next to its default. `validate` reads the first, `shape` the second.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import Field, dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")

Condition = tuple[tuple[str, Sequence[Any]], ...]
"""Settings of the model, each with the values of which it must have one."""
ALWAYS: Condition = ()
"""The setting changes what the model computes, or the shapes of its parameters."""
NEVER = None
"""The setting concerns only training or speed: two runs of one model may differ in it."""

_KEY = "setting"


LARGEST = 2**31 - 1
"""The largest whole number where a setting has no other: devices count in int32."""
LARGEST_FLOAT = 1e38
"""The largest fraction: devices compute in float32, which ends a little above."""
LAYERS, WIDTH, HEADS, INNER_WIDTH, TOKENS = 10_000, 2**20, 2**16, 2**23, 2**24
"""The largest sizes of a model and its batches: some hundred times what was ever trained, and small enough that every
plan, program and message about them is computed at once."""
SAMPLES = 2**32
"""Samples of a run: each has a number of 32 bits, from which its dropout derives."""


@dataclass(frozen=True)
class Bound:
    """The values that a setting may have."""

    is_enough: Callable[[Any], bool]
    words: str
    """What comes after "must be" in the error about a value that is not enough."""
    most: float = math.inf
    """The largest value."""

    def admits(self, value: Any) -> bool:
        """Whether a value may be had."""
        return self.why_not(value) is None

    def why_not(self, value: Any) -> str | None:
        """What comes after "must be" in the error about a value; None for one that may be had."""
        if not self.is_enough(value):
            return self.words
        return None if value <= self.most else f"at most {self.most:{'' if type(self.most) is int else 'g'}}"


@dataclass(frozen=True)
class Setting:
    """The metadata of one field."""

    bound: Bound | None = None
    shapes: Condition | None = ALWAYS
    """The condition under which it shapes the model; None: never. Read for fields of `Model` only."""


def setting(default: T, *, bound: Bound | None = None, shapes: Condition | None = ALWAYS) -> T:
    """A dataclass field with this default and metadata."""
    return field(default=default, metadata={_KEY: Setting(bound, shapes)})


def setting_of(of: Field[Any]) -> Setting:
    """The metadata of a field; one with a plain default takes any value, and shapes the model."""
    return of.metadata.get(_KEY, Setting())


def when(**values: str | tuple[str, ...]) -> Condition:
    """The condition that each of these settings has this value, or one of these."""
    return tuple((name, (value,) if isinstance(value, str) else value) for name, value in values.items())


def at_least(minimum: int, default: T, *, most: int = LARGEST, shapes: Condition | None = ALWAYS) -> T:
    """A field for a whole number from `minimum` to `most`."""
    words = f"at least {minimum}" if minimum else "0 or more"
    return setting(default, bound=Bound(lambda value: value >= minimum, words, most), shapes=shapes)


def numbers(minimum: int, default: T, *, most: int, length: int) -> T:
    """A field for up to `length` whole numbers from `minimum` to `most`."""

    def fits(values: Any) -> bool:
        return isinstance(values, tuple) and len(values) <= length and all(minimum <= value <= most for value in values)

    return setting(default, bound=_Several(fits, f"up to {length} numbers from {minimum} to {most}"))


class _Several(Bound):
    """Of a tuple."""

    def why_not(self, value: Any) -> str | None:
        return None if self.is_enough(value) else self.words


def share(default: T, *, shapes: Condition | None = ALWAYS) -> T:
    """A field for a fraction: 0 <= value < 1."""
    return setting(default, bound=Bound(lambda value: 0 <= value < 1, "at least 0 and below 1"), shapes=shapes)


def amount(default: T, *, shapes: Condition | None = ALWAYS) -> T:
    """A field for a finite number, 0 or more."""
    bound = Bound(lambda value: math.isfinite(value) and value >= 0, "a finite number, 0 or more", LARGEST_FLOAT)
    return setting(default, bound=bound, shapes=shapes)


def above_zero(default: T, *, shapes: Condition | None = ALWAYS) -> T:
    """A field for a finite number above 0."""
    bound = Bound(lambda value: math.isfinite(value) and value > 0, "a finite number above 0", LARGEST_FLOAT)
    return setting(default, bound=bound, shapes=shapes)


def seconds(default: T) -> T:
    """A field for a time from 1 second to a week."""
    bound = Bound(lambda value: 1 <= value <= 604_800, "from 1 to 604800 seconds")
    return setting(default, bound=bound)


def multiple_of(divisor: int, default: T, *, shapes: Condition | None = ALWAYS) -> T:
    """A field for `divisor`, twice `divisor`, and so on."""
    bound = Bound(lambda value: value >= divisor and value % divisor == 0, f"a multiple of {divisor}", WIDTH)
    return setting(default, bound=bound, shapes=shapes)
