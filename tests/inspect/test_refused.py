"""What XLA cannot compile: once more without its own kernels for products, or one sentence."""

from typing import Any

import jax
import pytest

from mtjax.errors import UserError
from mtjax.inspect.compiled import NO_TILES, OWN_KERNELS, compile_for
from mtjax.inspect.targets import Target

H100 = Target("h100x8", None, is_gpu=True)
CPU = Target("cpu", None, is_gpu=False)
TILES = f"INTERNAL: {NO_TILES} that satisfy hlo: %dot.114 = bf16[174080,1536]\n\tSymbolic tile with"


class Refusing:
    """A lowered program that XLA refuses, so many times."""

    def __init__(self, message: str, times: int) -> None:
        self.message, self.times = message, times
        self.asked: list[Any] = []

    def compile(self, compiler_options: Any = None) -> str:
        self.asked.append(compiler_options)
        if len(self.asked) <= self.times:
            raise jax.errors.JaxRuntimeError(self.message)
        return "compiled"


def test_a_product_without_tiles_is_compiled_without_xlas_own_kernels():
    lowered = Refusing(TILES, 1)
    program, note = compile_for(H100, lowered)
    assert program == "compiled" and OWN_KERNELS in note
    assert lowered.asked == [None, {OWN_KERNELS: False}]
    assert compile_for(H100, Refusing(TILES, 0)) == ("compiled", None)


@pytest.mark.parametrize(
    ("target", "message", "times", "asked"),
    [(H100, TILES, 2, 2), (H100, "RESOURCE_EXHAUSTED: 12 GiB of 8\nand more", 1, 1), (CPU, TILES, 1, 1)],
)
def test_what_xla_refuses_is_one_sentence(target, message, times, asked):
    lowered = Refusing(message, times)
    with pytest.raises(UserError) as refused:
        compile_for(target, lowered)
    assert len(lowered.asked) == asked
    said = str(refused.value)
    assert said.startswith(f"XLA could not compile the program for {target.name}: {message.splitlines()[0]}; try")
    assert "\n" not in said and "MTJAX_DEBUG=1" in said
    assert isinstance(refused.value.__cause__, jax.errors.JaxRuntimeError)
