"""The components of the dummy family: those of a decoder, whose analysis nothing compares with its model."""

from mtjax.families.gpt.costs import decoder as dummy

__all__ = ["dummy"]
