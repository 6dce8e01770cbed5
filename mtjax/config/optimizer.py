"""`[optimizer]`: the optimizer, and the schedules of learning rate and weight decay."""

from dataclasses import dataclass
from typing import Literal

from mtjax.config.field_metadata import amount, at_least, part_of_one, share


@dataclass(frozen=True)
class Optimizer:
    """The optimizer (the paper's is AdamW, section 4.2), and the schedules of learning rate and weight decay."""

    optimizer: Literal["adamw", "muon", "adafactor", "lion", "sgd", "schedule-free"] = "adamw"
    """The optimizer: adamw; muon, which orthogonalizes the momentum of the layers' matrices, and is AdamW for all other
    parameters; adafactor, which keeps averages of rows and columns instead of moments; lion; sgd, with momentum;
    schedule-free, AdamW that averages weights instead of decaying the learning rate."""
    learning_rate: float = amount(1.5e-4)
    """Peak learning rate (Megatron's --lr)."""
    min_learning_rate: float = amount(1e-5)
    """Minimum learning rate, reached at decay_steps (Megatron's --min-lr)."""
    warmup_steps: int = at_least(0, 3000)
    """Steps of linear warmup from initial_learning_rate to learning_rate (Megatron's --lr-warmup-iters)."""
    initial_learning_rate: float = amount(0.0)
    """Learning rate at the start of the warmup (Megatron's --lr-warmup-init)."""
    decay_steps: int | None = at_least(1, None)
    """Step at which the learning rate reaches its minimum (Megatron's --lr-decay-iters); the last step when not
    given."""
    decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "cosine"
    """Learning rate schedule after the warmup (Megatron's --lr-decay-style). WSD (warmup, stable, decay) stays at the
    peak and decays in the last wsd_decay_steps steps before decay_steps."""
    wsd_decay_steps: int | None = at_least(1, None)
    """decay_style WSD: number of decay steps (Megatron's --lr-wsd-decay-iters)."""
    wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    """decay_style WSD: shape of the decay (Megatron's --lr-wsd-decay-style)."""
    beta1: float = share(0.9)
    """Adam's beta1: decay rate of the moving average of gradients. Of lion the first of its two rates, of schedule-free
    the share of the average in the point at which gradients are taken."""
    beta2: float = share(0.999)
    """Adam's beta2: decay rate of the moving average of squared gradients. Of lion the second of its rates, the decay
    of its momentum, 0.99 in its paper."""
    epsilon: float = amount(1e-8)
    """Adam's epsilon, added to the denominator of the update."""
    adam_mu_dtype: Literal["float32", "bfloat16"] = "float32"
    """optimizer adamw: type in which the moving average of gradients is stored between steps."""
    adam_nu_dtype: Literal["float32", "bfloat16"] = "float32"
    """optimizer adamw: type in which the moving average of squared gradients is stored between steps; bfloat16 is
    rounded stochastically, as changes below half of its precision would be lost otherwise."""
    master_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type in which the trained matrices and tables are stored between steps (as Megatron's --main-params-dtype fp16,
    but bfloat16, rounded stochastically: updates below half of its precision would be lost otherwise). Vectors and
    routers stay in float32."""
    qk_clip: float = amount(0.0)
    """Largest attention score: of heads with a larger one in a step, query and key weights are scaled after the update,
    so that it would be this one (QK-clip, arXiv 2507.20534; Megatron's --qk-clip with --qk-clip-threshold); 0 turns it
    off."""
    qk_clip_alpha: float = part_of_one(0.5)
    """qk_clip: share of queries in the scaling, the rest is that of keys (Megatron's --qk-clip-alpha)."""
    muon_momentum: float = share(0.95)
    """optimizer muon: decay rate of the momentum of matrices (Megatron's --muon-momentum)."""
    sgd_momentum: float = share(0.9)
    """optimizer sgd: decay rate of the momentum (Megatron's --sgd-momentum); 0 turns it off."""
    weight_decay: float = amount(0.01)
    """Decoupled weight decay of weight matrices; biases and norm weights are not decayed."""
    start_weight_decay: float | None = amount(None)
    """weight_decay_style linear or cosine: weight decay of the first step (Megatron's --start-weight-decay); it grows
    to weight_decay."""
    weight_decay_style: Literal["constant", "linear", "cosine"] = "constant"
    """How the weight decay grows over the run (Megatron's --weight-decay-incr-style)."""
    clip_grad_norm: float = amount(1.0)
    """Maximum global gradient norm for gradient clipping (Megatron's --clip-grad); 0 turns clipping off."""
    label_smoothing: float = share(0.0)
    """Label smoothing: fraction of the target probability that is spread evenly over the vocabulary."""
    z_loss: float = amount(0.0)
    """Coefficient of the z-loss, log(Z)^2 of the output logits, which keeps them from drifting."""
