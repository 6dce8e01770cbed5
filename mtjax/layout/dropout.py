"""What a dropout rate becomes: a threshold for random numbers of 16 bits."""

DROPOUT_BITS = 16
"""Random bits per element. Runs of mtjax before 26 November 2026 drew 32, and so other masks."""
_NUMBERS = 1 << DROPOUT_BITS


def keep_threshold(rate: float) -> int:
    """Returns the threshold: elements whose random number is at least this are kept.

    The rate is rounded to a multiple of 2^-16 = 0.0000153, but neither to 0 nor to 1: 0.1 is 6554 / 65536 = 0.100006.
    """
    # A rate above 0 always drops something, and a rate below 1 always keeps something: nothing is divided by 0.
    return min(max(round(rate * _NUMBERS), 1), _NUMBERS - 1)


def keep_share(rate: float) -> float:
    """Returns the probability with which elements are kept, by which they are divided: the mean stays exact."""
    return 1 - keep_threshold(rate) / _NUMBERS
