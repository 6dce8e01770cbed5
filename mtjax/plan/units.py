"""Formatting of numbers with units."""

_SI = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def gib(size: float) -> str:
    """Formats bytes in GiB, or in MiB below a tenth of one."""
    return f"{size / 2**30:,.2f} GiB" if size >= 2**30 / 10 else f"{size / 2**20:,.2f} MiB"


def si(value: float, unit: str) -> str:
    """Formats a value with three digits and a decimal prefix: 27.6 PFLOP."""
    for scale, prefix in _SI:
        if abs(value) >= scale:
            return (
                f"{value / scale:.3g} {prefix}{unit}"
                if value < 1000 * scale
                else f"{value / scale:,.0f} {prefix}{unit}"
            )
    return f"{value:.3g} {unit}"


def seconds(value: float) -> str:
    """Formats seconds, or milliseconds below one."""
    return f"{value * 1e3:,.1f} ms" if value < 1 else f"{value:,.3f} s"


def percent(share: float) -> str:
    """Formats a share as percent with one decimal."""
    return f"{100 * share:.1f}%"


def days(value: float) -> str:
    """Formats days, or hours below one."""
    return f"{value:,.1f} days" if value >= 1 else f"{value * 24:,.1f} hours"
