"""`[optimizer]`: AdamW and its schedule."""

from dataclasses import dataclass

from mtjax.config.setting import amount, at_least, share


@dataclass(frozen=True)
class Optimizer:
    """AdamW and its schedule: section 4.2 of the paper."""

    learning_rate: float = amount(1.5e-4)
    """Peak learning rate."""
    min_learning_rate: float = amount(1e-5)
    """Learning rate at the end of the cosine."""
    warmup_steps: int = at_least(0, 3000)
    """Steps of linear warmup."""
    decay_steps: int | None = at_least(1, None)
    """Step at which the cosine ends; the last step when not given."""
    beta1: float = share(0.9)
    """Decay rate of Adam's running mean of gradients."""
    beta2: float = share(0.999)
    """Decay rate of Adam's running mean of squared gradients."""
    epsilon: float = amount(1e-8)
    """Added to the denominator of Adam's update."""
    weight_decay: float = amount(0.01)
    """Decoupled weight decay, of matrices only."""
    clip_grad_norm: float = amount(1.0)
    """Largest global gradient norm; 0 does not clip."""
    label_smoothing: float = share(0.0)
    """Share of the target probability that is spread evenly over the vocabulary."""
    z_loss: float = amount(0.0)
    """Weight of log(Z)^2 in the loss, which keeps logits from drifting."""
