"""Runs a layer that is in no loop over a stack: a predictor, a layer of a pattern."""

from typing import Any

from mtjax.models.recompute import Recompute, save_input, save_products


def run_alone(run: Any, recompute: Recompute, *inputs: Any) -> Any:
    """Runs a layer outside any stack: with full recompute it saves its inputs, else its products."""
    saved = save_input(run) if recompute.kind == "full" else save_products(run, recompute.kind)
    return saved(*inputs)
