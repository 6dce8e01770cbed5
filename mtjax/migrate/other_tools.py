"""Names of mtjax's settings in Hugging Face's Trainer, MaxText, vLLM, OpenAI's API and nanoGPT."""

from collections.abc import Mapping

OTHERS: Mapping[str, tuple[str, ...]] = {
    # Names that several tools use.
    "batch-size": (
        "--global-batch-size (samples in a step, over all devices) or --microbatch-size (samples of a data-parallel"
        " rank at a time)",
        "--batch (texts at a time)",
    ),
    "block-size": ("--sequence-length",),
    "n-layer": ("--num-layers",),
    "n-head": ("--num-heads",),
    "n-embd": ("--hidden-size",),
    "num-key-value-heads": ("--num-kv-heads",),
    "num-hidden-layers": ("--num-layers",),
    "intermediate-size": ("--mlp-size",),
    "max-position-embeddings": ("--sequence-length",),
    "context-length": ("--sequence-length",),
    "dropout": ("--hidden-dropout N --attention-dropout N",),
    "max-iters": ("--steps",),
    "num-steps": ("--steps",),
    "gradient-clipping": ("--clip-grad-norm",),
    "grad-clip": ("--clip-grad-norm",),
    "dtype": ("--compute-dtype",),
    "precision": ("--compute-dtype",),
    "compile": ("nothing: programs are always compiled",),
    # Hugging Face's Trainer, TRL and PEFT.
    "per-device-train-batch-size": (
        "--microbatch-size N (samples of a data-parallel rank at a time); --global-batch-size counts all devices",
    ),
    "per-device-eval-batch-size": ("--valid-batches (a validation has the batches of training)",),
    "gradient-accumulation-steps": (
        "--global-batch-size (the number of microbatches follows from it and --microbatch-size)",
    ),
    "gradient-checkpointing": ("--recompute full",),
    "num-train-epochs": ("--epochs", "--steps"),
    "max-steps": ("--steps",),
    "warmup-ratio": ("--warmup-fraction", "--warmup-steps"),
    "lr-scheduler-type": ("--decay-style",),
    "max-grad-norm": ("--clip-grad-norm",),
    "adam-epsilon": ("--epsilon",),
    "optim": ("--optimizer",),
    "logging-steps": ("--log-every",),
    "eval-steps": ("--valid-every",),
    "save-steps": ("--checkpoint-every",),
    "save-total-limit": ("--keep-last",),
    "output-dir": ("--out", "--output"),
    "overwrite-output-dir": ("--out with a new folder",),
    "resume-from-checkpoint": ("--resume",),
    "model-name-or-path": ("--init-from", "--from"),
    "tokenizer-name": ("--tokenizer",),
    "dataset-name": ("--data",),
    "train-file": ("--data", "--train-data"),
    "validation-file": ("--valid-data",),
    "report-to": ("--track",),
    "neftune-noise-alpha": ("nothing: there is no noise on embeddings",),
    "fsdp": ("--zero 3",),
    "deepspeed": ("--zero 1, 2 or 3",),
    "max-seq-length": ("--sequence-length",),
    "max-length": ("--sequence-length", "--max-tokens"),
    "lora-r": ("--lora-rank",),
    "torch-dtype": ("--compute-dtype", "--dtype"),
    "attn-implementation": ("--attention",),
    # Transformer Engine, torchao.
    "use-power-2-scales": ("--fp8-scales power-of-two",),
    "round-scales-to-power-of-2": ("--fp8-scales power-of-two",),
    # MaxText.
    "per-device-batch-size": ("--microbatch-size N; --global-batch-size counts all devices",),
    "max-target-length": ("--sequence-length",),
    "base-emb-dim": ("--hidden-size",),
    "base-num-query-heads": ("--num-heads",),
    "base-num-kv-heads": ("--num-kv-heads",),
    "base-mlp-dim": ("--mlp-size",),
    "base-num-decoder-layers": ("--num-layers",),
    "base-output-directory": ("--out",),
    "run-name": ("--out",),
    "dataset-path": ("--data",),
    "load-parameters-path": ("--init-from",),
    "checkpoint-period": ("--checkpoint-every",),
    "eval-period": ("--valid-every",),
    "remat-policy": ("--recompute",),
    "tokenizer-path": ("--tokenizer",),
    **{f"{where}-data-parallelism": ("--mesh data=N (N-way data parallel)",) for where in ("ici", "dcn")},
    **{f"{where}-tensor-parallelism": ("--mesh model=N (N-way tensor parallel)",) for where in ("ici", "dcn")},
    **{f"{where}-pipeline-parallelism": ("--mesh stage=N (N pipeline stages)",) for where in ("ici", "dcn")},
    **{f"{where}-context-parallelism": ("--mesh context=N (N-way context parallel)",) for where in ("ici", "dcn")},
    **{f"{where}-expert-parallelism": ("--mesh expert=N (N-way expert parallel)",) for where in ("ici", "dcn")},
    **{
        f"{where}-fsdp-parallelism": ("--mesh data=N --zero 3 (FSDP over N data-parallel ranks)",)
        for where in ("ici", "dcn")
    },
    # Sharding groups in torchtitan, Accelerate, DeepSpeed (MiCS, hpZ).
    **dict.fromkeys(
        ("parallelism.data-parallel-replicate-degree", "parallelism-config-dp-replicate-size"),
        ("--mesh data=N,shard=S --zero 3 (N replicas of sharding groups)",),
    ),
    **dict.fromkeys(
        (
            "parallelism.data-parallel-shard-degree",
            "parallelism-config-dp-shard-size",
            "mics-shard-size",
            "zero-hpz-partition-size",
        ),
        ("--mesh data=D,shard=N --zero 3 (sharding groups of N ranks)",),
    ),
    # Parallelism as other launchers call it.
    **dict.fromkeys(("tensor-parallel-size", "tp-size", "tp"), ("--mesh model=N (N-way tensor parallel)",)),
    **dict.fromkeys(("pipeline-parallel-size", "pp-size", "pp"), ("--mesh stage=N (N pipeline stages)",)),
    **dict.fromkeys(("data-parallel-size", "dp-size", "dp"), ("--mesh data=N (N-way data parallel)",)),
    **dict.fromkeys(("context-parallel-size", "cp-size", "cp"), ("--mesh context=N (N-way context parallel)",)),
    **dict.fromkeys(("expert-parallel-size", "ep-size", "ep"), ("--mesh expert=N (N-way expert parallel)",)),
    # OpenAI's API and vLLM.
    "max-new-tokens": ("--max-tokens",),
    "max-completion-tokens": ("--max-tokens",),
    "n": ("--samples",),
    "num-beams": ("--beams",),
    "num-return-sequences": ("--samples",),
    "do-sample": ("--temperature 1 (0 is greedy)",),
    "model": ("--from", "--init-from"),
    "max-model-len": ("--context", "--sequence-length"),
    "max-num-seqs": ("--batch",),
    "quantization": ("--weights-dtype int8",),
    "prompt": ("the prompt itself, without an option",),
    # Short words.
    "output-folder": ("--out",),
    "gpus": ("--mesh N (mtjax plan --gpus N finds the fastest; mtjax train takes --mesh auto, too: all devices)",),
    "epochs": ("--steps",),
}
"""A name without its dashes -> options of mtjax; the first that a command has is suggested. `N` stands for the
value."""
