"""`[optimizer]`: AdamW and its schedule."""

from dataclasses import dataclass
from typing import Literal

from mtjax.config.field_metadata import amount, at_least, share


@dataclass(frozen=True)
class Optimizer:
    """AdamW and its schedule: section 4.2 of the paper."""

    learning_rate: float = amount(1.5e-4)
    """Peak learning rate."""
    min_learning_rate: float = amount(1e-5)
    """Learning rate from decay_steps on, and the lowest while it decays."""
    warmup_steps: int = at_least(0, 3000)
    """Steps of linear warmup, from initial_learning_rate to the peak."""
    initial_learning_rate: float = amount(0.0)
    """Learning rate of the first step of the warmup."""
    decay_steps: int | None = at_least(1, None)
    """Step at which the learning rate reaches its minimum; the last step when not given."""
    decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "cosine"
    """How the learning rate decays after the warmup; WSD (warmup, stable, decay) stays at the peak until the last
    wsd_decay_steps steps before decay_steps."""
    wsd_decay_steps: int | None = at_least(1, None)
    """decay_style WSD: steps of the decay."""
    wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    """decay_style WSD: shape of the decay."""
    beta1: float = share(0.9)
    """Decay rate of Adam's running mean of gradients."""
    beta2: float = share(0.999)
    """Decay rate of Adam's running mean of squared gradients."""
    epsilon: float = amount(1e-8)
    """Added to the denominator of Adam's update."""
    weight_decay: float = amount(0.01)
    """Decoupled weight decay, of matrices only."""
    start_weight_decay: float | None = amount(None)
    """weight_decay_style linear or cosine: weight decay of the first step, which grows to weight_decay over the run."""
    weight_decay_style: Literal["constant", "linear", "cosine"] = "constant"
    """How the weight decay grows."""
    clip_grad_norm: float = amount(1.0)
    """Largest global gradient norm; 0 does not clip."""
    label_smoothing: float = share(0.0)
    """Share of the target probability that is spread evenly over the vocabulary."""
    z_loss: float = amount(0.0)
    """Weight of log(Z)^2 in the loss, which keeps logits from drifting."""
