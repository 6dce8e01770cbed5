"""What both sides compute: models, corpora, schedules and a run. Imports neither Megatron nor JAX."""

from pathlib import Path
from typing import Any

TOKENS = 96
"""Length of the texts whose logits are compared; Llama 3's scaled RoPE differs from the plain one by then."""
VOCAB = 512
COMMON = {
    "num_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "max_position_embeddings": TOKENS,
    "ffn_hidden_size": 160,
    "seq_length": TOKENS,
    "vocab_size": VOCAB - 6,
    "padded_vocab_size": VOCAB,
    "make_vocab_size_divisible_by": 128,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "transformer_impl": "local",
    "openai_gelu": False,
}
GPT = {
    **COMMON,
    "kv_channels": 8,
    "group_query_attention": False,
    "num_query_groups": 1,
    "add_bias_linear": True,
    "swiglu": False,
    "bias_gelu_fusion": True,
    "normalization": "LayerNorm",
    "norm_epsilon": 1e-5,
    "position_embedding_type": "learned_absolute",
    "untie_embeddings_and_output_weights": False,
}
LLAMA = {
    **COMMON,
    "kv_channels": 16,
    "group_query_attention": True,
    "num_query_groups": 4,
    "add_bias_linear": False,
    "swiglu": True,
    "bias_gelu_fusion": False,
    "normalization": "RMSNorm",
    "norm_epsilon": 1e-6,
    "position_embedding_type": "rope",
    "rotary_base": 10_000,
    "rotary_percent": 1.0,
    "use_rope_scaling": False,
    "untie_embeddings_and_output_weights": True,
}
EXPERTS = LLAMA | {
    "qk_layernorm": False,
    "num_experts": 8,
    "moe_layer_freq": 1,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 48,
    "moe_shared_expert_intermediate_size": None,
    "moe_shared_expert_gate": False,
    "moe_router_score_function": "softmax",
    "moe_router_pre_softmax": False,
    "moe_router_topk_scaling_factor": None,
    "moe_router_num_groups": None,
    "moe_router_group_topk": None,
    "moe_router_enable_expert_bias": False,
    "moe_router_load_balancing_type": "none",
    "moe_aux_loss_coeff": 0.0,
    "moe_z_loss_coeff": 0.001,
}
WITH_EXPERTS: dict[str, dict[str, Any]] = {
    "experts": EXPERTS
    | {
        "moe_shared_expert_intermediate_size": 32,
        "moe_shared_expert_gate": True,
        "moe_router_load_balancing_type": "seq_aux_loss",
        "moe_aux_loss_coeff": 0.02,
    },
    "experts, softmax before the choice, groups": EXPERTS
    | {
        "moe_router_pre_softmax": True,
        "qk_layernorm": True,
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
    },
    "experts by sigmoid and bias, in groups, behind an MLP": EXPERTS
    | {
        "moe_layer_freq": [0, 1, 1, 1],
        "moe_router_topk": 4,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": 2.5,
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
        "moe_shared_expert_intermediate_size": 32,
    },
}
COUNTS = (3, 0, 2, 5, 1, 4, 2, 3)
"""Tokens of each of a layer's experts, which come one after the other."""
MODELS: dict[str, dict[str, Any]] = {
    "gpt": GPT,
    "gpt untied, exact gelu": GPT | {"bias_gelu_fusion": False, "untie_embeddings_and_output_weights": True},
    "llama": LLAMA,
    "llama tied, scaled rope": LLAMA
    | {
        "num_layers": 8,
        "rotary_base": 500_000,
        "use_rope_scaling": True,
        "rope_scaling_factor": 8.0,
        "untie_embeddings_and_output_weights": False,
        "group_query_attention": False,
        "num_query_groups": 1,
        "kv_channels": 8,
    },
    **WITH_EXPERTS,
}
"""Megatron's arguments by the model's name."""
SPLITS = ((1, 1, 1), (2, 2, 1), (4, 1, 1))
"""Tensor-parallel ranks, pipeline stages and expert-parallel ranks."""
EXPERT_SPLITS = {
    "experts": (1, 1, 4),
    "experts, softmax before the choice, groups": (2, 1, 2),
    "experts by sigmoid and bias, in groups, behind an MLP": (2, 2, 2),
}
"""Of models with experts, one besides a single rank."""


HYBRID: dict[str, Any] = EXPERTS | {
    "num_layers": 6,
    "hybrid_override_pattern": "M-*EM-",
    "hybrid_attention_ratio": 0.0,
    "hybrid_mlp_ratio": 0.0,
    "mamba_num_heads": 8,
    "mamba_head_dim": 12,
    "mamba_state_dim": 10,
    "mamba_num_groups": 4,
    "swiglu": False,
    "squared_relu": True,
    "norm_epsilon": 1e-5,
    "position_embedding_type": "none",
}
"""A hybrid model: all kinds of layers."""
DELTA: dict[str, Any] = HYBRID | {
    "hybrid_override_pattern": "GM*EG-",
    "linear_num_value_heads": 8,
    "linear_value_head_dim": 12,
    "linear_key_head_dim": 10,
    "linear_num_key_heads": 4,
    "linear_conv_kernel_dim": 4,
    "attention_output_gate": True,
    "swiglu": True,
    "squared_relu": False,
    "init_method_std": 0.1,
}
"""The same with gated delta nets and gated attention, whose weights of 0.2 would magnify roundings: its own logits in
float32 and float64 differ by 9e-6 then."""
HYBRIDS: dict[str, dict[str, Any]] = {"hybrid": HYBRID, "delta": DELTA}
HYBRID_SPLITS = ((1, 1, 1), (2, 1, 1), (4, 3, 1), (2, 1, 2))


def splits_of(name: str) -> tuple[tuple[int, int, int], ...]:
    """Those in which a model is saved."""
    return ((1, 1, 1), EXPERT_SPLITS[name]) if name in EXPERT_SPLITS else SPLITS


CORPORA = {"a": (31, 17), "b": (7, 400), "c": (90, 9)}
"""Documents of each corpus, and the most tokens of one."""
EOD = 0
SEQUENCE = 24
DATASETS: dict[str, dict[str, Any]] = {
    "one epoch": {"blend": ["a"], "samples": (5, 1, 1)},
    "epochs, the last shuffled with the others": {"blend": ["a"], "samples": (60, 3, 3)},
    "epochs, the last apart": {"blend": ["c"], "samples": (49, 20, 2)},
    "long documents, another split and seed": {"blend": ["b"], "samples": (40, 9, 0), "split": "60,40", "seed": 7},
    "reset and masked": {"blend": ["c"], "samples": (30, 2, 2), "reset": True},
    "two weighted": {"blend": ["a", "b"], "weights": [0.3, 0.7], "samples": (100, 12, 9)},
    "three weighted, one of them 0": {"blend": ["a", "b", "c"], "weights": [2.0, 0.0, 5.5], "samples": (77, 5, 6)},
}
"""What is asked of each, by a name; `samples` of train, valid and test."""

AHEAD = {"layers": 2, "factor": 0.3}
"""Layers of multi-token prediction, and the coefficient of the mean of their losses."""

STEPS = 20
RATES = {"max_lr": 6e-4, "min_lr": 3e-5, "lr_warmup_steps": 4, "lr_decay_steps": 17}
PLAIN_DECAY = {"start_wd": 0.1, "end_wd": 0.1, "wd_incr_style": "constant"}
SCHEDULES: dict[str, dict[str, Any]] = {
    **{style: {"lr_decay_style": style} for style in ("constant", "linear", "cosine", "inverse-square-root")},
    **{
        f"WSD {style}": {"lr_decay_style": "WSD", "wsd_decay_steps": 6, "lr_wsd_decay_style": style}
        for style in ("exponential", "linear", "cosine", "minus_sqrt")
    },
    "from an initial rate": {"lr_decay_style": "cosine", "init_lr": 1e-4},
    "no warmup": {"lr_decay_style": "cosine", "lr_warmup_steps": 0},
    "linear weight decay": {
        "lr_decay_style": "linear",
        "start_wd": 0.02,
        "end_wd": 0.1,
        "wd_incr_style": "linear",
    },
    "cosine weight decay": {
        "lr_decay_style": "linear",
        "start_wd": 0.0,
        "end_wd": 0.1,
        "wd_incr_style": "cosine",
    },
}
"""What differs from `RATES`, no initial rate and `PLAIN_DECAY`; weight decay grows over `STEPS` steps."""
OURS = {
    "max_lr": "learning_rate",
    "min_lr": "min_learning_rate",
    "init_lr": "initial_learning_rate",
    "lr_warmup_steps": "warmup_steps",
    "lr_decay_steps": "decay_steps",
    "lr_decay_style": "decay_style",
    "wsd_decay_steps": "wsd_decay_steps",
    "lr_wsd_decay_style": "wsd_decay_style",
    "start_wd": "start_weight_decay",
    "end_wd": "weight_decay",
    "wd_incr_style": "weight_decay_style",
}
"""Megatron's names of a schedule's settings, and ours."""


def our_settings(name: str) -> dict[str, Any]:
    """The settings of one of `SCHEDULES`, as fields of our config."""
    settings = {"init_lr": 0.0} | RATES | PLAIN_DECAY | SCHEDULES[name]
    found = {OURS[key]: value for key, value in settings.items()}
    return found | {"start_weight_decay": None} if settings["wd_incr_style"] == "constant" else found


RUN = {
    "steps": 20,
    "batch": 4,
    "max_lr": 5e-3,
    "min_lr": 5e-4,
    "warmup": 5,
    "start_wd": 0.02,
    "end_wd": 0.3,
    "clip_grad": 2.0,
    "beta2": 0.95,
    "epsilon": 1e-8,
}
"""Twenty steps of the models `gpt` and `llama`; of the llama the first steps are clipped and the last are not."""

Degrees = tuple[int, int, int | None, int]
"""Tensor and pipeline parallel degrees, chunks of interleaved stages, expert parallel degree."""
DISTRIBUTED: tuple[tuple[str, Degrees, Degrees], ...] = (
    ("gpt", (2, 2, None, 1), (4, 1, None, 1)),
    ("gpt untied, exact gelu", (4, 1, None, 1), (1, 2, 2, 1)),
    ("llama", (1, 2, 2, 1), (2, 2, None, 1)),
    ("llama tied, scaled rope", (1, 4, 2, 1), (2, 1, None, 1)),
    ("experts", (1, 1, None, 2), (2, 1, None, 2)),
    ("experts, softmax before the choice, groups", (2, 1, None, 2), (1, 1, None, 4)),
    ("experts by sigmoid and bias, in groups, behind an MLP", (1, 2, None, 2), (2, 2, None, 1)),
)
"""A model, the degrees in which a `torch_dist` checkpoint of it is saved, and those in which ours is loaded."""

TINY = LLAMA | {
    "num_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 4,
    "ffn_hidden_size": 12,
    "max_position_embeddings": 16,
    "seq_length": 16,
    "vocab_size": 20,
    "padded_vocab_size": 24,
    "make_vocab_size_divisible_by": 12,
}
"""The model of `tests/convert/torch_dist.zip`."""

SAVED = 10
"""Steps after which the runs of `RESUMED` are saved."""
RESUMED: dict[str, dict[str, Any]] = {
    "llama": {"layouts": ("fully_reshardable", "dp_reshardable", "torch")},
    "gpt in bfloat16, small buckets": {
        "model": "gpt",
        "bf16": True,
        "bucket": 20_000,
        "layouts": ("dp_reshardable", "torch", "fully_reshardable"),
    },
    "llama without the distributed optimizer": {"distributed": False, "layouts": ("",)},
    "llama, interleaved stages": {"degrees": (2, 2, 2, 1), "bf16": True, "trained": False, "rare": True},
    "gpt, a copy of the embedding": {
        "model": "gpt",
        "degrees": (2, 2, None, 1),
        "bucket": 20_000,
        "layouts": ("dp_reshardable", "torch"),
        "trained": False,
    },
    "experts": {
        "model": "experts",
        "degrees": (1, 1, None, 2),
        "layouts": ("fully_reshardable", "dp_reshardable", "torch"),
        "arguments": {"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0, "moe_z_loss_coeff": None},
    },
    "experts in stages": {
        "model": "experts by sigmoid and bias, in groups, behind an MLP",
        "degrees": (1, 2, None, 2),
        "bf16": True,
        "layouts": ("fully_reshardable", "dp_reshardable", "torch"),
        "trained": False,
    },
    "experts on every rank": {"model": "experts", "degrees": (2, 1, None, 1), "trained": False},
    "llama, a long first stage": {
        "degrees": (2, 2, None, 1),
        "layouts": ("fully_reshardable", "dp_reshardable", "torch"),
        "arguments": {"decoder_first_pipeline_num_layers": 3},
        "trained": False,
        "rare": True,
    },
    "llama, embedding and loss count as layers": {
        "degrees": (1, 2, 2, 1),
        "layouts": ("fully_reshardable", "dp_reshardable", "torch"),
        "arguments": {
            "num_layers": 6,
            "account_for_embedding_in_pipeline_split": True,
            "account_for_loss_in_pipeline_split": True,
        },
        "trained": False,
        "rare": True,
    },
    "llama, stages by a layout": {
        "degrees": (1, 2, 2, 1),
        "layouts": ("dp_reshardable", "torch"),
        "arguments": {"pipeline_model_parallel_layout": "E|t*2,|t,|tL"},
        "trained": False,
    },
}
"""Runs that are saved and resumed, with what differs from `RESUMED_AS`."""
RESUMED_AS: dict[str, Any] = {
    "model": "llama",
    "degrees": (2, 1, None, 1),
    "bf16": False,
    "distributed": True,
    "bucket": None,
    "layouts": ("fully_reshardable", "dp_reshardable"),
    "arguments": {},
    "trained": True,
    "rare": False,
}
"""`arguments` are in place of the model's, `bucket` is the least size of a bucket, `layouts` those of the optimizer;
states of a run that is not trained are random; of one that is rare every setting is in another case or test."""
TINY_RUN = {"tiny": RESUMED_AS | {"model": "tiny", "degrees": (2, 2, None, 1), "bf16": True, "trained": False}}
"""The run in `tests/convert/resumed.zip`."""
RESUMED = {name: RESUMED_AS | case for name, case in RESUMED.items()}


def run_arguments(folder: Path) -> dict[str, Any]:
    """Megatron's arguments of the run in `RUN` on the corpus in a folder."""
    return {
        "seed": 1234,
        "seq_length": TOKENS,
        "data_path": [str(folder / "corpus")],
        "split": "100,0,0",
        "tokenizer_type": "HuggingFaceTokenizer",
        "tokenizer_model": str(folder / "tokenizer.json"),
        "micro_batch_size": 2,
        "global_batch_size": RUN["batch"],
        "train_iters": RUN["steps"],
        "lr": RUN["max_lr"],
        "min_lr": RUN["min_lr"],
        "lr_decay_style": "cosine",
        "lr_warmup_iters": RUN["warmup"],
        "weight_decay": RUN["end_wd"],
        "start_weight_decay": RUN["start_wd"],
        "end_weight_decay": RUN["end_wd"],
        "weight_decay_incr_style": "linear",
        "clip_grad": RUN["clip_grad"],
        "adam_beta1": 0.9,
        "adam_beta2": RUN["beta2"],
        "adam_eps": RUN["epsilon"],
        "optimizer": "adam",
        "eval_interval": 1000,
        "eval_iters": 0,
        "log_interval": 1,
        "use_distributed_optimizer": True,
        "save": str(folder / "saved"),
        "save_interval": SAVED,
    }
