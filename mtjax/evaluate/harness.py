"""Evaluates tasks of EleutherAI's lm-eval in this process.

lm-eval reads the tasks, formats their questions, and computes metrics from the answers; `mtjax.evaluate.harness_model`
provides the model's answers.
"""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mtjax.data.tokens.special_tokens import named_token
from mtjax.errors import UserError, first_line, nearest, require
from mtjax.evaluate.harness_model import HarnessModel, as_lm
from mtjax.evaluate.options import Options
from mtjax.evaluate.run import LoadedWeights, check_files, open_weights, print_header, shown, write
from mtjax.evaluate.tasks.task import Results
from mtjax.generate.first_tokens import first_tokens_of
from mtjax.generate.weights import stop_ids_of
from mtjax.runtime.processes.coordination import this_process

EXTRA = "evaluate"
RESAMPLED = 1000
"""Bootstrap iterations for the standard error of metrics that are not means; lm-eval's 100,000 take minutes."""
Loaded = dict[str, dict[str, Any]]
"""lm-eval's loaded tasks: "tasks" and "groups" by name."""


def evaluate_harness(options: Options) -> Mapping[str, Results]:
    """Evaluates tasks of lm-eval and prints the results (in process 0).

    Raises:
      UserError: lm-eval is not installed or does not have a task, or weights, tokenizer and mesh are incompatible.
    """
    start = time.monotonic()
    check_files(options)
    os.environ.setdefault(
        "DISABLE_MULTIPROC", "1"
    )  # disables lm-eval's forks, which may hang after devices are attached
    # Before the weights: an unknown task or a missing data set is an error at once.
    manager, loaded = load_tasks(options)
    with open_weights(options) as weights:
        counts = [f"{name} ({len(task.eval_docs):,} questions)" for name, task in loaded["tasks"].items()]
        print_header(weights.sharded_model, ", ".join(counts))
        model = harness_model_of(options, weights)
        found = run_harness(options, manager, loaded, as_lm(model))
        if found is None:  # not the process that lm-eval evaluates in
            return {}
        results = {name: numbers_of(values) for name, values in found["results"].items()}
        if this_process() == 0:
            print("\n" + table(results))
            task_facts = {
                "harness": {"tasks": list(loaded["tasks"]), "lm_eval": require("lm_eval", EXTRA).__version__},
                "versions": found["versions"],
                "few_shot": found["n-shot"],
                "limit": options.limit,
            }
            write(options, weights, task_facts, results, time.monotonic() - start)
            model.remove_saved()
    return results


def load_tasks(options: Options) -> tuple[Any, Loaded]:
    """Loads lm-eval's tasks, with their data.

    Returns:
      lm-eval's task manager, and the tasks.

    Raises:
      UserError: lm-eval is not installed, does not have a task, or can't load one.
    """
    assert options.harness is not None  # checked by Options.check
    tasks = require("lm_eval.tasks", EXTRA)
    include = options.harness_include
    if include is not None and not include.is_dir():
        raise UserError(f"--harness-include {include} is not a folder: name a folder with YAML files of tasks")
    manager = tasks.TaskManager(include_path=None if include is None else str(include))
    names = []
    for name in (word.strip() for word in options.harness.split(",")):
        # A name may contain wildcards, or be the path of a YAML file.
        matched = manager.match_tasks([name]) or ([name] if Path(name).is_file() else [])
        if not matched:
            raise UserError(f"lm-eval has no task or group {name!r}{nearest(name, manager.all_tasks)}")
        names += matched
    try:
        return manager, manager.load(names)
    except Exception as e:  # any error of a dataset's code, the network or YAML
        why = f"{type(e).__name__}: {first_line(e)}"
        raise UserError(f"lm-eval can't load {', '.join(names)}: {why}") from e


def harness_model_of(options: Options, weights: LoadedWeights) -> HarnessModel:
    """Returns the model for lm-eval, with the bos and eos tokens that transformers would use."""
    saved, tokenizer = weights.saved, weights.tokenizer
    files = saved.source.origin.files
    end = named_token(tokenizer, files, "eos_token")
    end = tokenizer.eod if end is None else end
    begin = named_token(tokenizer, files, "bos_token")
    # As in lm-eval: bos_token, even if the tokenizer prepends another token.
    prefix = first_tokens_of(saved, tokenizer)[-1] if begin is None else begin
    return HarnessModel(
        weights.scorer,
        saved.parameters(weights.sharded_model),
        tokenizer,
        prefix,
        stop_ids_of(saved, tokenizer) | {end},
        options.rows,
        options.out,
        saved.identity + options.compute_dtype + options.attention,
    )


def run_harness(options: Options, manager: Any, loaded: Loaded, lm: Any) -> Mapping[str, Any] | None:
    """Runs lm-eval and returns its results.

    Raises:
      UserError: a task requires another kind of model, or its metrics can't be computed.
    """
    manager.load = lambda names: loaded  # already loaded, with their data
    try:
        return require("lm_eval.evaluator", EXTRA).simple_evaluate(
            model=lm,
            tasks=list(loaded["tasks"]),
            task_manager=manager,
            num_fewshot=options.few_shot,
            limit=options.limit,
            bootstrap_iters=RESAMPLED,
            log_samples=False,
        )
    # What lm-eval raises for a task whose output type or metrics this kind of model does not support.
    except (ValueError, AssertionError, NotImplementedError) as e:
        raise UserError(f"lm-eval can't evaluate {', '.join(loaded['tasks'])}: {first_line(e)}") from e


def numbers_of(values: Mapping[str, Any]) -> Results:
    """Returns the numeric results of a task by names such as `acc`, or `exact_match,strict-match` with a filter."""
    numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
    # lm-eval names results METRIC,FILTER, with the filter "none" where a task has no filters; `sample_len` is a count.
    return {name.removesuffix(",none"): value for name, value in numbers.items() if name != "sample_len"}


def table(results: Mapping[str, Results]) -> str:
    """Formats results, one per line with its standard error."""
    rows = []
    for task, values in results.items():
        for name, value in values.items():
            metric, comma, filtered = name.partition(",")
            if metric.endswith("_stderr"):
                continue
            error = values.get(f"{metric}_stderr{comma}{filtered}")
            rows.append((task, name, shown(value), "" if error is None else f"± {shown(error)}"))
    widths = [max(len(row[i]) for row in rows) for i in range(3)] if rows else []
    return "\n".join(
        "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3]]).rstrip() for row in rows
    )
