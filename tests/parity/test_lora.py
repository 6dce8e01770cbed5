"""Low-rank adapters against peft, with transformers' models: five steps of AdamW, and both ways out of a run."""

import json
from typing import Any

import jax
import numpy as np
import pytest

from mtjax.commands.convert import main as convert
from mtjax.commands.finetune import main as finetune
from mtjax.runtime.train_state import State
from mtjax.sharding.global_batch import global_batch
from mtjax.train.step import TrainStep
from tests.convert.hf_folders import small_tokenizer
from tests.parity.test_chats import BATCH, LENGTH, chats, mean_loss, network_of, packed_batch
from tests.parity.test_finetune import GPT2, LLAMA, check_steps, program_of

torch = pytest.importorskip("torch", reason="needs the extra parity: pip install '.[parity]'")
transformers = pytest.importorskip("transformers", reason="needs the extra parity: pip install '.[parity]'")
peft = pytest.importorskip("peft", reason="needs the extra parity: pip install '.[parity]'")

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing"),  # peft asks transformers for it
    pytest.mark.filterwarnings("ignore:.*_pattern keys did not match"),  # those that peft makes for fused experts
]
RANK, ALPHA = 4, 6.0
SHARED = LLAMA | {"num_key_value_heads": 2}
LATENT = LLAMA | {"q_lora_rank": 14, "kv_lora_rank": 20, "v_head_dim": 12}
EXPERTS = SHARED | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8}
STACKED = SHARED | {"num_local_experts": 3, "num_experts_per_tok": 2, "head_dim": 8, "max_position_embeddings": 64}
LATENT |= {"qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "tie_word_embeddings": False}
DELTA = SHARED | {"head_dim": 8, "layer_types": ["linear_attention", "full_attention"], "num_experts": 0}
DELTA |= {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 6, "linear_value_head_dim": 10}
MAMBA = SHARED | {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 6, "mamba_n_groups": 2}
MAMBA |= {"mamba_chunk_size": 8, "attn_layer_indices": [1]}
BLOCKS = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 40, "tie_word_embeddings": True}
BLOCKS |= {"layers_block_type": ["mamba", *["hybrid"] * 4], "num_hidden_layers": 5, "num_mem_blocks": 2}
BLOCKS |= {"mamba_d_state": 6, "n_mamba_heads": 4, "mamba_ngroups": 2, "chunk_size": 8, "adapter_rank": 3}
BLOCKS |= {"use_shared_attention_adapter": True, "max_position_embeddings": 64}
TARGETS = {
    "all": [f"{x}_proj" for x in ("q", "k", "v", "o", "gate", "up", "down")],
    "attention": [f"{x}_proj" for x in "qkvo"],
    "latent attention": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"],
}
CASES = {
    "all, heads and ways alike": ("Llama", "all", LLAMA, "1x4", {}),
    "fewer key heads than ways, split sequences, ZeRO-3": (
        "Llama",
        "all",
        SHARED,
        "2x4",
        {"sequence_parallel": True, "zero": 3, "microbatch_size": 2, "recompute": "full"},
    ),
    "latent attention, split sequences": (
        "Youtu",
        "latent attention",
        LATENT,
        "2x4",
        {"lora_targets": "attention", "sequence_parallel": True, "recompute": "full"},
    ),
    "attention, stages": (
        "Llama",
        "attention",
        SHARED,
        "data=2,stage=2,model=2",
        {"lora_targets": "attention", "microbatch_size": 2},
    ),
}
MODULES = {
    "self_attn.o_proj": ("attention", "output", None, None),
    "mlp.down_proj": ("mlp", "down", None, None),
    "mlp.gate_proj": ("mlp", "up", None, 0),
    "mlp.up_proj": ("mlp", "up", None, 1),
    "self_attn.q_a_proj": ("attention", "query_down", None, None),
    "self_attn.q_b_proj": ("attention", "query_up", None, None),
    "self_attn.kv_a_proj_with_mqa": ("attention", "key_value_down", None, None),
    "self_attn.kv_b_proj": ("attention", "key_value_up", None, None),
}
FUSED = {f"self_attn.{x}_proj": ("attention", "qkv", None, i) for i, x in enumerate("qkv")}
GROUPED = {
    "self_attn.q_proj": ("attention", "qkv", "query", None),
    "self_attn.k_proj": ("attention", "qkv", "key_value", 0),
    "self_attn.v_proj": ("attention", "qkv", "key_value", 1),
}


def adapters_of(parameters: Any, where: tuple[str, str, str | None, int | None], layer: int) -> tuple[np.ndarray, ...]:
    """Ours of one of their products: [inputs, rank] and [rank, outputs]; `where` is module, product, part, place."""
    mixer, product, part, place = where
    module = parameters["stack"]["layers"][mixer][product]
    lora = (module if part is None else module[part])["lora"]
    a, b = np.asarray(lora["a"])[layer], np.asarray(lora["b"])[layer]
    if place is not None:
        a, b = a[..., place, :], b[place]
    return a.reshape(-1, RANK), b.reshape(RANK, -1)


def with_their_adapters(program: TrainStep, state: State, network: Any, targets: str) -> State:
    """Our A's in their model: there is nothing else that was drawn."""
    grouped = "query" in state.parameters["stack"]["layers"]["attention"].get("qkv", {})
    modules = {**(GROUPED if grouped else FUSED), **MODULES}
    orders = [order.flat for order in program.layer_orders.values()] or [range(2)]
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if ".lora_A." not in name:
                continue
            words = name.split(".")
            layer = list(orders[0]).index(int(words[words.index("layers") + 1]))
            where = modules[".".join(words[words.index("layers") + 2 :][:2])]
            a, b = adapters_of(state.parameters, where, layer)
            assert not b.any()
            parameter.copy_(torch.tensor(a.T))
    return state


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_five_steps_are_those_of_peft(case, tmp_path):
    kind, targets, settings, mesh, fields = case
    network, written = network_of(f"{kind}ForCausalLM", settings), chats()
    network.save_pretrained(tmp_path)
    resets = {"reset_position_ids": True, "reset_attention_mask": True}
    low = {"lora_rank": RANK, "lora_alpha": ALPHA}
    program, trunk = program_of(tmp_path, mesh, resets | low | fields)
    trunk.check(program)
    state, host = program.initialize(0, trunk.read(program)), packed_batch(written)
    frozen = np.array(state.parameters["embedding"])
    batch = global_batch(program.batch_sharding, {n: host[n] for n in program.batch_names}, BATCH)

    options = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=TARGETS[targets], lora_dropout=0.0)
    network = peft.get_peft_model(network, options)
    with_their_adapters(program, state, network, targets)
    learnt = [p for p in network.parameters() if p.requires_grad]
    assert sum(p.numel() for p in learnt) == sum(r.size for r in jax.tree.leaves(state.optimizer[1][0].mu))
    state = check_steps(program, state, batch, learnt, lambda: mean_loss(network, written))
    np.testing.assert_array_equal(frozen, state.parameters["embedding"])


@pytest.mark.parametrize(
    "kind, settings",
    [
        ("GPT2LMHeadModel", GPT2),
        ("YoutuForCausalLM", LATENT),
        ("Qwen3MoeForCausalLM", EXPERTS),
        ("GptOssForCausalLM", STACKED),
        pytest.param("GraniteMoeForCausalLM", STACKED, marks=pytest.mark.exhaustive),
        ("Qwen3NextForCausalLM", DELTA),
        pytest.param("Zamba2ForCausalLM", BLOCKS, marks=pytest.mark.long),
        pytest.param("BambaForCausalLM", MAMBA, marks=pytest.mark.exhaustive),
    ],
)
def test_a_run_s_adapters_load_in_peft_and_merge_to_the_same_logits(kind, settings, tmp_path):
    jax.devices()  # all eight, before a command asks for as many as its mesh needs
    words = 300
    network = network_of(kind, settings | {"vocab_size": words})
    network.save_pretrained(tmp_path / "base")
    small_tokenizer().save(str(tmp_path / "base" / "tokenizer.json"))
    rows = [
        {"prompt": "the cat", "completion": " and the dog"},
        {"prompt": "the end", "completion": " of the road"},
    ] * 8
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = ["--task", "chat", "--data", str(tmp_path / "rows.jsonl"), "--init-from", f"hf:{tmp_path / 'base'}"]
    low = ["--lora-rank", "4", "--lora-alpha", "6", "--learning-rate", "1e-2", "--epochs", "6"]
    low += ["--lora-targets", "mixers" if "Next" in kind else "all"]
    shape = ["--mesh", "1x1", "--global-batch-size", "4", "--compute-dtype", "float32", "--out", str(tmp_path / "run")]
    assert finetune([*files, *low, *shape]) == 0
    for place in ("peft", "hf"):
        assert convert(["--from", f"mtjax:{tmp_path / 'run'}", "--to", f"{place}:{tmp_path / place}"]) == 0
    ids = torch.tensor(np.random.default_rng(0).integers(1, words, (2, LENGTH)))  # 0: padding, which they zero
    base = network.eval()(ids).logits.detach()
    adapted = peft.PeftModel.from_pretrained(network, tmp_path / "peft").eval()(ids).logits.detach()
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()(ids).logits.detach()
    scale = float((adapted - base).abs().max())
    assert scale > 0.1  # there is something to compare
    assert float((adapted - merged).abs().max()) < 1e-5 * float(merged.abs().max())
