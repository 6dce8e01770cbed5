"""transformers' networks computed wholly in float64: where float32's rounding is more than a test's tolerance."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


def in_float64(network: Any) -> Any:
    """Converts a network, and what its code computes in float32 whatever the type of its weights."""
    network = network.double()
    network.set_experts_implementation("eager")  # torch's grouped products have no float64
    forward = network.forward

    def run(*arguments: Any, **named: Any) -> Any:
        with _float32_as_float64():
            return forward(*arguments, **named)

    network.forward = run
    return network


@contextmanager
def _float32_as_float64() -> Iterator[None]:
    import pytest
    import torch

    def wider(function: Callable[..., Any]) -> Callable[..., Any]:
        as_64 = lambda value: torch.float64 if value is torch.float32 else value  # noqa: E731
        return lambda *given, **named: function(*map(as_64, given), **{name: as_64(v) for name, v in named.items()})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        patch.setattr(torch.Tensor, "to", wider(torch.Tensor.to))
        patch.setattr(torch.nn.functional, "softmax", wider(torch.nn.functional.softmax))
        yield
