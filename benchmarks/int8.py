"""Cost of quantized weights in quality: perplexity of a text, with matrices in float32, bfloat16, int8 and int4.

python benchmarks/int8.py --from hf:FOLDER --text wiki.valid.tokens --windows 8 --length 512
"""

import argparse
import math
from pathlib import Path

from mtjax.config.storage import PLAIN, Storage
from mtjax.evaluate.tasks.wikitext103 import detokenized
from mtjax.generate.decoder import GenerationPrograms
from mtjax.generate.engine import Engine
from mtjax.generate.request import Request, Sampling, Token
from mtjax.generate.weights import load_model

KINDS = {
    "float32": ("float32", PLAIN),
    "bfloat16": ("bfloat16", PLAIN),
    "int8": ("bfloat16", Storage("int8")),
    "int4": ("bfloat16", Storage("int4", weights_group=64)),
    "int4, group 32": ("bfloat16", Storage("int4", weights_group=32)),
    "int4, zero points": ("bfloat16", Storage("int4", weights_group=64, weights_zero_point=True)),
}


def perplexity(source: str, text: str, windows: int, length: int, dtype: str, storage: Storage) -> tuple[float, int]:
    model = load_model(source, "1x1", dtype)
    ids = model.tokenizer.encode(detokenized(text))
    engine = Engine(GenerationPrograms(model.sharded_model, model.parameters, storage=storage), 1)
    tokens_of_windows: list[Token] = []
    for start in range(0, windows * length, length):
        window = tuple(ids[start : start + length])
        engine.submit(Request(window, Sampling(1), logprobs=True, echo=True, on_prompt=tokens_of_windows.extend))
    engine.run()
    losses = [-token.logprob for token in tokens_of_windows if token.logprob is not None]
    return math.exp(math.fsum(losses) / len(losses)), len(losses)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="source", required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--length", type=int, default=512)
    options = parser.parse_args()
    text = options.text.read_text(encoding="utf-8")
    for name, (dtype, storage) in KINDS.items():
        value, tokens = perplexity(options.source, text, options.windows, options.length, dtype, storage)
        print(f"{name:17} perplexity {value:.4f} of {tokens} tokens", flush=True)


if __name__ == "__main__":
    main()
