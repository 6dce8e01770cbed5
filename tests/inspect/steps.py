"""Tiny configs to compile, and the mark of tests that compile for GPUs."""

import importlib.util

import pytest

from mtjax import config
from mtjax.config import Config
from mtjax.sharding.contract import Sizes

SIZES = Sizes(
    b=2,
    s=64,
    h=64,
    f=256,
    l=3,
    V=256,
    m=2,
    data=2,
    model=4,
    again=3,
    nested=0,
    smoothing=0,
    P=46672,
    U=0,
    W=0,
    S=0,
    E=0,
    N=0,
)
"""The symbols of the formulas for `tiny()`."""

needs_aot = pytest.mark.aot
"""Of tests that compile for GPUs: they need the extra aot."""

has_cudnn = importlib.util.find_spec("nvidia") is not None and importlib.util.find_spec("nvidia.cudnn") is not None


def tiny(**values) -> Config:
    """A model small enough to compile in seconds, large enough that no activation counts as a scalar."""
    defaults = {
        "mesh": "2x4",
        "num_layers": 3,
        "hidden_size": 64,
        "num_heads": 4,
        "sequence_length": 64,
        "vocab_size": 250,
        "vocab_multiple": 256,
        "global_batch_size": 8,
        "microbatch_size": 2,
        "loss_chunk": 32,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "attention": "auto" if has_cudnn else "xla",
        "recompute": "full",
        "compute_dtype": "bfloat16",
    }
    return config.replace(Config(), **(defaults | values))
