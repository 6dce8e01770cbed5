"""Runs a layer that is in no loop over a stack: a predictor, a layer of a pattern."""

from typing import Any

from mtjax.models.layer_loop import LayerLoopSettings, save_input, save_products


def run_alone(run: Any, loop_settings: LayerLoopSettings, *inputs: Any) -> Any:
    """Runs a layer outside any stack: with full recompute it saves its inputs, else its products."""
    saved = save_input(run) if loop_settings.recompute == "full" else save_products(run, loop_settings.recompute)
    return saved(*inputs)
