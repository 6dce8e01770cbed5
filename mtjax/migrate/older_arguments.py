"""Megatron-LM's arguments of former versions, and rare ones: rows of the table.

The names are those of arguments.py in its history, from v1.0 (2019) to Megatron-Core 0.16.
"""

from mtjax.migrate.argument import Sections, always, equal, none

_XLA = "up to XLA"
_RECOMPUTE = (
    equal(
        "--checkpoint-activations",
        "--recompute full",
        "the input of every --checkpoint-num-layers layers is saved, 1 by default",
        default=False,
    ),
    equal("--activations-checkpoint-method", "--recompute full --recompute-method N"),
    equal(
        "--activations-checkpoint-num-layers --checkpoint-num-layers",
        "--recompute-num-layers N",
        "with --recompute full",
        default=1,
    ),
)
_FORMER = (
    # Of 2020, with a dest of its own: bias_gelu_fusion is the dest of --no-bias-gelu-fusion, which turns it off.
    always("--bias-gelu-fusion", _XLA, dest="bias_gelu_fusion_of_2020"),
    none("--expert-parallel", "experts are on all ranks: add expert=N to --mesh", default=False),
    *(equal(f"--fp8-{kind}", f"--fp8 delayed --fp8-format {kind}", default=False) for kind in ("e4m3", "hybrid")),
    always("--DDP-impl", "gradients are always reduced in the compiled step"),
    always("--fp32-allreduce", "gradients are always added up in float32", default=False),
    always("--no-query-key-layer-scaling", "scores are never scaled by the layer's number"),
    # All formats that Megatron had. mtjax reads only that of mmap, which it recognizes by the files' magic number.
    always("--data-impl", "files are mapped into memory", same=("mmap", "infer", "lazy", "cached", None)),
    always("--mmap-warmup", "not needed", default=False),
    *(
        always(f"--{name}", _XLA)
        for name in (
            *("no-scatter-gather-tensors-in-pipeline", "no-async-tensor-model-parallel-allreduce"),
            *("use-contiguous-buffers-in-ddp", "no-contiguous-buffers-in-local-ddp", "no-overlap-p2p-communication"),
            *("overlap-p2p-communication", "delay-grad-reduce", "no-delay-grad-reduce", "delay-param-gather"),
            *("align-grad-reduce", "no-align-grad-reduce", "align-param-gather", "no-align-param-gather"),
            *("delay-wgrad-compute", "wgrad-deferral-limit", "use-ring-exchange-p2p", "deallocate-pipeline-outputs"),
            *("no-gradient-reduce-div-fusion", "no-clone-scatter-output-in-embedding", "fsdp-double-buffer"),
            *("disable-tp-comm-bulk-dgrad", "disable-tp-comm-bulk-wgrad", "disable-tp-comm-overlap-ag"),
            *("disable-tp-comm-overlap-rs", "disable-tp-comm-split-ag", "disable-tp-comm-split-rs"),
            *("tp-comm-bulk-dgrad", "tp-comm-bulk-wgrad", "tp-comm-split-ag", "tp-comm-split-rs"),
            *("tp-comm-overlap-rs-dgrad", "tp-comm-bootstrap-backend", "pipeline-model-parallel-comm-backend"),
            *("cuda-graph-scope", "cuda-graph-modules", "cuda-graph-warmup-steps", "external-cuda-graph"),
            *("scaled-masked-softmax-fusion", "scaled-upper-triang-masked-softmax-fusion"),
            *(
                "bias-dropout-fusion",
                "disable-jit-fuser",
                "use-te-activation-func",
                "fsdp-manual-registration",
                "lazy-mpu-init",
                "onnx-safe",
            ),
        )
    ),
)
_RARE = (
    none("--main-grads-dtype", "gradients are accumulated in float32", same=("fp32", "float32", None)),
    none(
        "--main-params-dtype",
        "float32 is kept; fp16 has no equivalent, but --master-dtype bfloat16 stores 2 bytes, too, by stochastic "
        "rounding",
        same=("fp32", "float32", None),
    ),
    none("--optimizer-offload-fraction", "--offload optimizer offloads all of Adam's moments", default=1.0),
    none(
        "--fine-grained-activation-offloading",
        "activations stay on the devices; see --recompute-offload",
        default=False,
    ),
    none("--torch-fsdp2-no-reshard-after-forward", "--zero 3 gathers weights for each use; see --zero 2"),
    none("--exit-signal", "SIGTERM saves and ends a run", same=("SIGTERM", None)),
    none("--renormalize-blend-weights", "blends are sampled by the weights as given", default=False),
    none("--log-max-attention-logit", "--qk-clip logs largest_score; not logged without it", default=False),
    none("--log-energy", "it is not logged", default=False),
    always("--non-persistent-local-ckpt-dir", "--local-checkpoints DIR, with --non-persistent-save-interval"),
    *(
        always(f"--{name}", "random numbers follow from seed and step")
        for name in ("te-rng-tracker", "inference-rng-tracker")
    ),
    *(
        always(f"--{name}", "checkpoints are always written in the background, every rank its shards")
        for name in (
            *(
                "use-dist-ckpt",
                "dist-ckpt-format",
                "dist-ckpt-workers",
                "async-strategy",
                "no-ckpt-fully-parallel-save",
            ),
            *("non-persistent-global-ckpt-dir", "non-persistent-local-ckpt-algo", "replication"),
            *(
                "dist-ckpt-optim-fully-reshardable",
                "distrib-optim-fully-reshardable-mem-efficient",
                "dist-ckpt-save-pre-mcore-014",
            ),
        )
    ),
    *(
        always(f"--{name}", "the tokenizer is what its file says")
        for name in (
            "trust-remote-code",
            "tokenizer-hf-use-fast",
            "tokenizer-hf-no-use-fast",
            "legacy-tokenizer",
            "no-use-tokenizer-model-from-checkpoint-args",
        )
    ),
    *(
        always(f"--{name}", "not needed")
        for name in (
            *("no-log-learnig-rate-to-tensorboard", "no-log-loss-scale-to-tensorboard"),
            *("log-batch-size-to-tensorboard", "log-straggler", "straggler-ctrlr-port", "straggler-minmax-count"),
            *("disable-straggler-on-startup", "enable-one-logger", "one-logger-project", "one-logger-run-name"),
            *("one-logger-entity", "one-logger-async", "app-tag-run-name", "app-tag-run-version", "enable-ft-package"),
            *("calc-ft-timeouts", "no-barrier-with-level-1-timing", "config-logger-dir", "memory-snapshot-path"),
            *(
                "disable-msc",
                "enable-experimental",
                "train-sync-interval",
                "no-manual-gc-eval",
                "nvtx-ranges",
                "verify-integrity",
            ),
            *("adlr-autoresume-interval", "moe-deepep-num-sms", "moe-flex-dispatcher-backend"),
            *("moe-router-padding-for-fp8", "moe-router-padding-for-quantization", "no-initialization"),
            *(
                "distributed-timeout-seconds-after-init",
                "use-gpu-initialization",
                "init-model-with-meta-device",
                "mid-level-dataset-surplus",
            ),
        )
    ),
)
OLDER: Sections = {"Former versions": (*_RECOMPUTE, *_FORMER), "Rare arguments": _RARE}
