"""Bytes and seconds as text."""


def size(number: float) -> str:
    """Formats bytes in decimal units: 1.5 GB."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        # What three digits would round up to 1,000 is shown in the larger unit.
        if number >= 0.9995 * scale:
            return f"{_three_digits(number / scale)} {unit}"
    return f"{number:.0f} B"


def duration(seconds: float) -> str:
    """Formats seconds in s, ms or us: 1.5 ms."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= 0.9995 * scale:
            return f"{_three_digits(seconds / scale)} {unit}"
    return f"{_three_digits(seconds * 1e6)} us"


def _three_digits(number: float) -> str:
    return f"{number:,.0f}" if number >= 999.5 else f"{number:.3g}"
