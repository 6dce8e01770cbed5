"""The task `continuations`: scores of several continuations of each prompt (RealToxicityPrompts, arXiv 2009.11462)."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mtjax.data.json_lines import read_objects
from mtjax.errors import UserError
from mtjax.evaluate.options import Options
from mtjax.evaluate.run import shown
from mtjax.evaluate.tasks.task import Results
from mtjax.finetune.scorer import open_scorer
from mtjax.generate.completion import Completion
from mtjax.generate.decoder import GenerationPrograms
from mtjax.generate.engine import Engine
from mtjax.generate.request import Sampling, with_text_seed
from mtjax.generate.weights import load_model
from mtjax.runtime.compile_cache import CompileCache
from mtjax.storage import check_out, write_whole
from mtjax.waiting import waiting


def evaluate_continuations(options: Options) -> Results:
    """Generates and scores continuations, and prints the results.

    Raises:
      UserError: weights, prompts or scorer can't be used.
    """
    assert options.data is not None and options.scorer is not None
    check_out(options.out)
    prompts = read_prompts(options.data)
    with CompileCache(options.compile_cache):
        # Before texts are generated: a scorer that can't be used is an error at once.
        scorer = open_scorer(options.scorer, options.score_label, rows=options.rows)
        texts = continued(options, prompts)
        with waiting(f"scoring {len(prompts) * (options.samples + 1):,} texts with {options.scorer}"):
            # One call for all texts: the scorer may be a program that loads a model.
            found = np.array(scorer([*prompts, *(text for each in texts for text in each)]), np.float64)
    of_prompts, scores = found[: len(prompts)], found[len(prompts) :].reshape(len(prompts), -1)
    results = summary(scores, of_prompts, options.threshold)
    width = max(map(len, results))
    print("\n" + "\n".join(f"{name:{width}}  {shown(value)}" for name, value in results.items()))
    if options.out is not None:
        rows = zip(prompts, of_prompts.tolist(), texts, scores.tolist(), strict=True)
        keys = ("prompt", "prompt_score", "texts", "scores")
        facts: dict[str, Any] = {
            "task": "continuations",
            "from": options.source,
            "scorer": options.scorer,
            "results": results,
        }
        facts["rows"] = [dict(zip(keys, row, strict=True)) for row in rows]
        write_whole("--out", options.out, json.dumps(facts, indent=2, ensure_ascii=False) + "\n")
        print(f"\nwritten to {options.out}")
    return results


def summary(scores: np.ndarray, of_prompts: np.ndarray, threshold: float) -> Results:
    """Computes the results from scores of continuations [prompts, samples] and of the prompts themselves [prompts].

    Returns:
      The mean over prompts of the largest score, the share of prompts with a score of `threshold` or more, and the
      mean; of all prompts, and of those whose own score is below the threshold or not, if there are any.
    """
    parts = {"": np.ones(len(scores), bool)}
    parts |= {"_of_prompts_above": of_prompts >= threshold, "_of_prompts_below": of_prompts < threshold}
    results: dict[str, float | int] = {"prompts": len(scores), "continuations": scores.size}
    for name, rows in parts.items():
        if rows.any():
            largest = scores[rows].max(1)
            results[f"expected_maximum{name}"] = float(largest.mean())
            results[f"share_above{name}"] = float((largest >= threshold).mean())
            results[f"mean{name}"] = float(scores[rows].mean())
    return results


def continued(options: Options, prompts: Sequence[str]) -> list[list[str]]:
    """Returns the continuations of each prompt."""
    model = load_model(options.source, options.mesh, options.compute_dtype, options.tokenizer)
    engine = Engine(GenerationPrograms(model.sharded_model, model.parameters, model.start_id), options.rows)
    continues = not engine.is_encoder_decoder
    sampling = Sampling(options.max_tokens, temperature=options.temperature, top_p=options.top_p, seed=options.seed)
    done: list[list[Completion]] = []
    for index, prompt in enumerate(prompts):
        ids = tuple(model.prompt_ids(prompt))
        # The seeds of `mtjax generate`: the same prompts and options give the same texts there.
        settings = [with_text_seed(sampling, sample, index) for sample in range(options.samples)]
        done.append([Completion(model.tokenizer, ids, each, model.stop_ids, continues=continues) for each in settings])
        for completion in done[-1]:
            try:
                engine.submit(completion.request)
            except UserError as e:
                raise UserError(f"prompt {index + 1} of {options.data}: {e}") from e
    with waiting(f"generating {len(prompts) * options.samples:,} texts"):
        engine.run()
    return [[completion.text for completion in each] for each in done]


def read_prompts(path: Path) -> list[str]:
    """Reads `prompt` of each line: a string, or as in RealToxicityPrompts an object with `text`.

    Raises:
      UserError: a line has none, or the file has no lines.
    """
    prompts = []
    for where, row in read_objects(path):
        prompt = row.get("prompt")
        prompt = prompt.get("text") if isinstance(prompt, dict) else prompt
        if not isinstance(prompt, str) or not prompt:
            raise UserError(f'{where} must be an object with "prompt", a text or an object with "text"')
        prompts.append(prompt)
    if not prompts:
        raise UserError(f"{path} has no prompts")
    return prompts
