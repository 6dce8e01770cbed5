"""Megatron-LM's arguments of the network: rows of the table. Names and defaults: its megatron/training/arguments.py."""

from mtjax.migrate.argument import Sections, always, equal, none, off, same

_OF_LATENT = "of latent attention"
LATENT = (
    equal("--q-lora-rank", "--q-lora-rank N", _OF_LATENT),
    equal("--kv-lora-rank", "--kv-lora-rank N", _OF_LATENT, default=32),
    equal("--v-head-dim", "--v-head-dim N", _OF_LATENT, default=128),
    equal("--qk-head-dim", "--qk-nope-head-dim N", _OF_LATENT, default=128),
    equal("--qk-pos-emb-head-dim", "--qk-rope-head-dim N", _OF_LATENT, default=64),
    equal("--rotary-scaling-factor", "--rope-factor N", f"{_OF_LATENT}, with --rope-scaling yarn", default=1.0),
    equal("--rope-type", "--rope-scaling yarn", f"{_OF_LATENT}; rope is --rope-scaling none"),
    none("--mscale", f"{_OF_LATENT}: see --rope-attention-factor", default=1.0),
    none("--mscale-all-dim", f"{_OF_LATENT}: see --rope-attention-factor", default=0.0),
)
_LAYOUT = (
    same("--num-layers --encoder-num-layers", "num_layers"),
    same("--hidden-size", "hidden_size"),
    same(
        "--ffn-hidden-size",
        "mlp_size",
        note="Megatron's default with --swiglu is 8/3 x hidden size, rounded down to a multiple of 64; mtjax's is 4 x",
    ),
    same("--num-attention-heads", "num_heads"),
    equal("--group-query-attention", "--num-kv-heads N", "N is --num-query-groups", default=False),
    # A checkpoint has the default 1 without --group-query-attention, too, where every head has keys of its own.
    same("--num-query-groups", "num_kv_heads", default=1, note="only with --group-query-attention"),
    same("--kv-channels", "head_dim"),
    same("--seq-length --encoder-seq-length", "sequence_length"),
    equal(
        "--max-position-embeddings",
        "--sequence-length N",
        "mtjax has as many learned positions as --sequence-length; RoPE needs no such number",
    ),
    none("--decoder-seq-length", "only of T5"),
    none("--decoder-num-layers", "only of T5"),
    equal(
        "--position-embedding-type",
        "--position",
        "learned_absolute is learned; none is --position none in a hybrid model; mrope and relative have no equivalent",
        default="learned_absolute",
        same=("learned_absolute", "rope", None),
    ),
    equal("--use-rotary-position-embeddings", "--position rope", default=False),
    off(always("--no-position-embedding", "follows from --position rope"), "add_position_embedding"),
    same("--rotary-base", "rope_theta", default=10_000),
    equal("--rotary-percent", "--rope-fraction N", default=1.0),
    # Same shapes, other channels: weights trained so would be rotated wrongly.
    none("--rotary-interleaved", "RoPE rotates the two halves of a head", default=False, same=(False, None)),
    equal("--rotary-seq-len-interpolation-factor", "--rope-scaling linear --rope-factor N"),
    equal(
        "--use-rope-scaling",
        "--rope-scaling llama3",
        "Llama 3.1's numbers: factors 1 and 4, original length 8,192",
        default=False,
    ),
    same("--rope-scaling-factor", "rope_factor", default=8.0, note="only with --use-rope-scaling"),
    equal(
        "--no-rope-freq",
        "--rope-layers RN",
        "a pattern that repeats over the layers: 4 is RRRN; checkpoints that have it can't be converted",
        same=(None,),
    ),
    none("--mrope-section", "only of multimodal models"),
    equal(
        "--window-size",
        "--attention-window TOKENS",
        "TOKENS counts the token itself: the first number + 1; checkpoints that have it can't be converted",
        same=(None,),
    ),
    equal(
        "--window-attn-skip-freq",
        "--window-layers SF",
        "a pattern that repeats over the layers: 4 is SSSF",
        same=(None,),
    ),
    equal(
        "--softmax-type",
        "--attention-sinks",
        "learnable; sinks start at 0; off-by-one has no equivalent; checkpoints that have it can't be converted",
        default="vanilla",
        same=("vanilla", None),
    ),
)
_KINDS = (
    equal(
        "--normalization",
        "--norm rmsnorm",
        "LayerNorm is layernorm",
        default="LayerNorm",
        same=("LayerNorm", "RMSNorm", None),
    ),
    same("--norm-epsilon --layernorm-epsilon", "norm_epsilon", default=1e-5),
    equal(
        "--apply-layernorm-1p",
        "--norm-weight offset",
        "checkpoints that have it can't be converted",
        default=False,
        same=(False, None),
    ),
    none(
        "--apply-residual-connection-post-layernorm",
        "the residual connection starts before the norm",
        default=False,
        same=(False, None),
    ),
    equal("--swiglu", "--activation swiglu", default=False),
    equal(
        "--openai-gelu",
        "--activation gelu",
        "the tanh approximation; Megatron's fused GELU with biases is this too",
        default=False,
    ),
    off(
        equal("--no-bias-gelu-fusion", "--activation gelu_exact", "without the fusion Megatron computes GELU exactly"),
        "bias_gelu_fusion",
    ),
    equal(
        "--squared-relu",
        "--activation relu2",
        default=False,
    ),
    none("--quick-geglu", "the activation stays GELU", default=False, same=(False, None)),
    none("--glu-linear-offset", "nothing is added to the half that is not the gate", default=0.0, same=(0, None)),
    none("--activation-func-clamp-value", "activations are not clamped", same=(None,)),
    off(
        equal("--disable-bias-linear", "--no-bias", "also no biases of query, key and value"),
        "add_bias_linear",
    ),
    equal("--add-qkv-bias", "--attention-bias qkv", "with --disable-bias-linear (Qwen2)", default=False),
    equal("--untie-embeddings-and-output-weights", "--no-tie-embeddings", default=False),
    equal(
        "--qk-layernorm",
        "--qk-norm",
        "with --normalization LayerNorm also --qk-norm-kind layernorm --qk-norm-bias; checkpoints that have it with"
        " LayerNorm can't be converted",
        default=False,
    ),
    none("--qk-l2-norm", "no L2 norm of queries and keys", default=False, same=(False, None)),
    same(
        "--make-vocab-size-divisible-by",
        "vocab_multiple",
        default=128,
        note="Megatron multiplies it by the tensor-parallel size; mtjax takes the multiple itself, whatever the mesh,"
        " and leaves the padding out of the loss",
    ),
    same("--vocab-size", "vocab_size", note="Megatron's NullTokenizer adds one token, the end of document"),
    none("--padded-vocab-size", "set --vocab-size and --vocab-multiple"),
    same("--hidden-dropout", "hidden_dropout", default=0.1),
    same(
        "--attention-dropout",
        "attention_dropout",
        default=0.1,
        note="cuDNN's flash attention needs 0; --attention pallas does not",
    ),
    same("--init-method-std", "init_std", default=0.02),
    none("--embedding-init-method-std", "embeddings start with the standard deviation of --init-std"),
    none("--init-method-xavier-uniform", "weights start normally distributed", default=False),
    none("--fp32-residual-connection", "the residual stream has the type of --compute-dtype", default=False),
    none(
        "--apply-query-key-layer-scaling",
        "the same numbers, without the protection of fp16 from overflow",
        default=False,
    ),
    none(
        "--multi-latent-attention",
        "set --kv-lora-rank and the settings below; Megatron's defaults of them, with YaRN, are not translated",
        default=False,
        same=(False, None),
    ),
    *LATENT,
    same("--mtp-num-layers", "mtp_num_layers", same=(None, 0)),
    same("--mtp-loss-scaling-factor", "mtp_loss_scaling_factor", default=0.1, note="only with --mtp-num-layers"),
    # No `same` for what changes only how a network trains: such arguments are noted, and a checkpoint is converted.
    # With `same`, a checkpoint with any other value is refused.
    none("--heterogeneous-layers-config-path", "all layers are alike", same=(None,)),
    none("--heterogeneous-layers-config-encoded-json", "all layers are alike", same=(None,)),
    equal(
        "--hybrid-layer-pattern --hybrid-override-pattern",
        "--layer-pattern",
        "family hybrid; for stages (|) set --layers-per-stage; D, + and / have no equivalent",
        same=(None,),
    ),
    *(
        equal(f"--hybrid-{kind}-ratio", "--layer-pattern", "written out as Megatron places the layers", default=0.0)
        for kind in ("attention", "mlp")
    ),
    equal("--is-hybrid-model", "--family hybrid", default=False),
    same("--mamba-num-heads", "ssm_heads"),
    same("--mamba-head-dim", "ssm_head_dim", default=64),
    same("--mamba-state-dim", "ssm_state", default=128),
    same("--mamba-num-groups", "ssm_groups", default=8),
    always("--disable-mamba-mem-eff-path", "the scan is always recomputed in the backward pass", default=False),
    none("--mamba-training-ssm-states-dtype", "states are float32", same=(None, "fp32")),
    *(
        equal(
            f"--linear-{name}", f"--{setting} N", "of gated delta nets (G in --hybrid-layer-pattern)", default=default
        )
        for name, setting, default in (
            ("num-value-heads", "ssm-heads", 32),
            ("value-head-dim", "ssm-head-dim", 128),
            ("key-head-dim", "ssm-state", 128),
            ("num-key-heads", "ssm-groups", 16),
            ("conv-kernel-dim", "ssm-conv", 4),
        )
    ),
    none(
        "--linear-attention-freq",
        "GPTs with linear attention are not translated; hybrid models have layers G",
        same=(None, 0),
    ),
    none(
        "--experimental-attention-variant",
        "attention is the usual one; gdn selects the layers G of hybrid models, which are translated",
        same=(None,),
    ),
    same(
        "--attention-output-gate",
        "attention_output_gate",
        note="of hybrid models; GPTs with it are not translated",
        default=False,
        same=(False, None),
    ),
    none("--use-mup", "nothing is scaled by widths", default=False, same=(False, None)),
    none("--spec", "the layers are mtjax's own"),
    off(equal("--bert-no-binary-head", "--no-sentence-order", "of BERT"), "bert_binary_head"),
)
_EXPERTS = (
    same("--num-experts", "num_experts"),
    same("--moe-router-topk", "experts_top_k", default=2),
    same("--moe-ffn-hidden-size", "expert_size", note="--ffn-hidden-size when not given, in both"),
    same("--moe-shared-expert-intermediate-size", "shared_expert_size"),
    same("--moe-shared-expert-gate", "shared_expert_gate", default=False),
    equal(
        "--moe-layer-freq",
        "--first-dense-layers COUNT or --moe-every COUNT",
        "experts in all layers, in all after the first ones, or in the last of every N",
        default=1,
    ),
    equal(
        "--moe-aux-loss-coeff",
        "--router-aux-loss N",
        "computed per sample, as Megatron's seq_aux_loss; its default aux_loss takes all tokens of a microbatch of the"
        " tensor- and context-parallel group, so the same coefficient balances more strictly in mtjax",
        default=0.0,
    ),
    equal(
        "--moe-router-load-balancing-type",
        "--router-aux-loss N",
        "always per sample; none is --router-aux-loss 0, sinkhorn has no equivalent",
        default="aux_loss",
    ),
    same("--moe-z-loss-coeff", "router_z_loss"),
    same("--moe-input-jitter-eps", "router_jitter"),
    same("--moe-router-score-function", "router_score", default="softmax", same=("softmax", "sigmoid", None)),
    equal(
        "--moe-router-pre-softmax",
        "--no-router-normalize",
        "softmax over all experts instead of the chosen ones",
        default=False,
    ),
    same("--moe-router-topk-scaling-factor", "router_scale"),
    same("--moe-router-num-groups", "expert_groups"),
    same("--moe-router-group-topk", "expert_groups_top_k"),
    equal("--moe-router-enable-expert-bias", "--router-bias", default=False),
    same("--moe-router-bias-update-rate", "router_bias_update_rate", default=0.001, note="only with --router-bias"),
    same(
        "--moe-expert-capacity-factor",
        "capacity_factor",
        note="counted per sample here and per microbatch in Megatron, and the last tokens are dropped, not the least"
        " probable ones: the same factor drops other tokens",
        same=(None, -1, -1.0),
    ),
    none(
        "--moe-token-drop-policy", "over capacity the last tokens of a sample are dropped (position)", default="probs"
    ),
    none("--moe-pad-expert-input-to-capacity", "inputs of experts are not padded", default=False),
    equal(
        "--moe-token-dispatcher-type", "--expert-dispatch", "allgather is all-gather; alltoall and flex are all-to-all"
    ),
    always("--moe-grouped-gemm", "experts of a rank are always one grouped matmul", default=False),
    always("--moe-use-legacy-grouped-gemm", "experts of a rank are always one grouped matmul", default=False),
    always("--moe-router-dtype", "routers always compute in float32"),
    always("--moe-permute-fusion", "up to XLA", default=False),
    always("--moe-router-fusion", "up to XLA", default=False),
    always("--moe-per-layer-logging", "the log has each layer's expert load", default=False),
    none("--moe-layer-recompute", "use --recompute selective or full", default=False),
    none("--moe-shared-expert-overlap", "the shared expert is not overlapped by hand; XLA schedules it", default=False),
    none(
        "--overlap-moe-expert-parallel-comm", "expert-parallel communication is overlapped by XLA only", default=False
    ),
    none("--moe-enable-deepep", "tokens are exchanged by XLA's collectives", default=False),
    none("--moe-router-topk-limited-devices", "experts of all ranks may be chosen; see --expert-groups", same=(None,)),
    none("--moe-apply-probs-on-input", "experts' outputs are weighted, not their inputs", same=(False, None)),
    # The same shapes in another order: converted as they are, the weights would be another network's.
    none("--moe-mlp-glu-interleave-size", "a matrix has all of the gate first, then the other half", same=(None,)),
    none(
        "--moe-shared-expert-glu-interleave-size",
        "a matrix has all of the gate first, then the other half",
        same=(None,),
    ),
    none("--moe-router-force-biased", "routers choose experts by their scores", same=(None,)),
    none("--moe-latent-size", "experts read the hidden states themselves", same=(None,)),
    none("--moe-extended-tp", "experts have the tensor parallelism of the other layers", same=(False, None)),
    none("--moe-use-upcycling", "no upcycling of a dense model", default=False),
    none(
        "--moe-router-force-load-balancing", "routers choose experts by their scores, also in benchmarks", default=False
    ),
)
MODEL: Sections = {
    "Layers, attention, positions": _LAYOUT,
    "Norms, activation, vocabulary, initialization": _KINDS,
    "Mixture of experts": _EXPERTS,
}
