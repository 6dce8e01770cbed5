"""Folders as Hugging Face's `save_pretrained` writes them, with random weights, without transformers.

Names and shapes are written out here once more, so that the tables under test have something to be wrong against.
"""

import json
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, models, trainers

from mtjax.convert.hugging_face import HuggingFaceSink, HuggingFaceSource
from mtjax.data.tokens.tokenizer import byte_level

LAYERS, HIDDEN, HEADS, SEQUENCE, VOCAB, INNER = 3, 32, 8, 16, 300, 80

GPT2_CONFIG = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "activation_function": "gelu_new",
    "n_layer": LAYERS,
    "n_embd": HIDDEN,
    "n_head": HEADS,
    "n_inner": INNER,
    "n_positions": SEQUENCE,
    "vocab_size": VOCAB,
    "layer_norm_epsilon": 1e-6,
    "summary_type": "cls_index",
    "bos_token_id": 7,
}


def gpt2_shapes() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "transformer.wte.weight": (VOCAB, HIDDEN),
        "transformer.wpe.weight": (SEQUENCE, HIDDEN),
        "transformer.ln_f.weight": (HIDDEN,),
        "transformer.ln_f.bias": (HIDDEN,),
    }
    for i in range(LAYERS):
        block = f"transformer.h.{i}"
        for norm in ("ln_1", "ln_2"):
            shapes |= {f"{block}.{norm}.weight": (HIDDEN,), f"{block}.{norm}.bias": (HIDDEN,)}
        linears = {
            "attn.c_attn": (HIDDEN, 3 * HIDDEN),
            "attn.c_proj": (HIDDEN, HIDDEN),
            "mlp.c_fc": (HIDDEN, INNER),
            "mlp.c_proj": (INNER, HIDDEN),
        }
        for name, (inputs, outputs) in linears.items():
            shapes |= {f"{block}.{name}.weight": (inputs, outputs), f"{block}.{name}.bias": (outputs,)}
    return shapes


LLAMA_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 6,
    "intermediate_size": 80,
    "max_position_embeddings": 64,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "rope_scaling": None,
    "tie_word_embeddings": False,
}


def llama_shapes(config: dict = LLAMA_CONFIG) -> dict[str, tuple[int, ...]]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    queries, keys = (config[f"num_{x}_heads"] * config["head_dim"] for x in ("attention", "key_value"))
    layer = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    outside = {"model.embed_tokens": (config["vocab_size"], hidden), "model.norm": (hidden,)}
    outside |= {} if config["tie_word_embeddings"] else {"lm_head": (config["vocab_size"], hidden)}
    layers = {
        f"model.layers.{i}.{name}": shape for i in range(config["num_hidden_layers"]) for name, shape in layer.items()
    }
    return {f"{name}.weight": shape for name, shape in (outside | layers).items()}


def random_tensors(shapes: dict[str, tuple[int, ...]], dtype: str = "float32") -> dict[str, np.ndarray]:
    import ml_dtypes

    types = {"bfloat16": ml_dtypes.bfloat16}
    random = np.random.default_rng(0)
    return {n: (0.3 * random.standard_normal(s)).astype(types.get(dtype, dtype)) for n, s in shapes.items()}


def write_folder(folder: Path, tensors: dict[str, np.ndarray], config: dict, *, tokenizer: bool = False) -> Path:
    from safetensors.numpy import save_file

    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    if tokenizer:
        small_tokenizer().save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2TokenizerFast"}')
    return folder


def small_tokenizer() -> Tokenizer:
    """Byte-level, with fewer tokens than VOCAB."""
    from tokenizers.pre_tokenizers import ByteLevel

    tokenizer = byte_level(Tokenizer(models.BPE()))
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - 5,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the cat and the dog went on to the end of the road and there they rested"], trainer)
    return tokenizer


def llama_tokenizer(front: str = "<s>", back: str = "") -> Tokenizer:
    """As Llama 2's: a mark of words in front of every text, too, merges across words, special tokens around a text."""
    from tokenizers import decoders, normalizers, pre_tokenizers, processors

    special = ["<unk>", "<s>", "</s>"]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")  # for training alone
    trainer = trainers.BpeTrainer(vocab_size=120, special_tokens=special, show_progress=False)
    text = "the cat and the dog went on to the end of the road\nand there they rested"
    tokenizer.train_from_iterator([text], trainer)
    tokenizer.pre_tokenizer = None
    tokenizer.post_processor = processors.TemplateProcessing(
        single=" ".join(filter(None, [front, "$A", back])),
        special_tokens=[(name, tokenizer.token_to_id(name)) for name in special],
    )
    return tokenizer


def tensors_in(folder: Path) -> dict[str, np.ndarray]:
    """All tensors of a folder, read by the library."""
    from safetensors.numpy import load_file

    found: dict[str, np.ndarray] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def write_back(source: HuggingFaceSource, folder: Path) -> None:
    """Writes the weights of a folder of Hugging Face to a new one."""
    folder.mkdir()
    sink = HuggingFaceSink(folder, source.origin, source.parameters)
    for parameter in source.parameters.values():
        for layer, array in zip(parameter.layers, source.slices(parameter), strict=True):
            sink.write(parameter, layer, array)
    sink.close()
