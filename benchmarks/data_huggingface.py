"""The Hugging Face side of `benchmarks/data.py preprocess`: JSON lines to token ids with `datasets.map`.

A separate script, because `datasets` pickles everything around the function that it maps.
"""

import json
import os
import sys
import time
from typing import Any


def main(text: str, tokenizer: str, cache: str, workers: int) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # as its own documentation advises with several processes
    import datasets  # pyright: ignore[reportMissingImports]
    from tokenizers import Tokenizer

    datasets.disable_progress_bars()
    loaded = Tokenizer.from_file(tokenizer)
    end = loaded.token_to_id("<|endoftext|>")

    def encode(rows):
        encodings = loaded.encode_batch_fast(rows["text"], add_special_tokens=False)
        return {"ids": [[*encoding.ids, end] for encoding in encodings]}

    start = time.perf_counter()
    rows = datasets.load_dataset("json", data_files=text, cache_dir=cache)["train"]
    ids: Any = rows.map(encode, batched=True, num_proc=workers, remove_columns=rows.column_names)
    seconds = time.perf_counter() - start
    print(json.dumps({"tokens": sum(len(row["ids"]) for row in ids), "seconds": seconds}))


if __name__ == "__main__":
    main(*sys.argv[1:4], workers=int(sys.argv[4]))
