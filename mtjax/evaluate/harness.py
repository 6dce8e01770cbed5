"""Tasks of EleutherAI's lm-eval, asked of a model in this process: read it from top to bottom.

lm-eval reads the tasks, writes their questions, and makes metrics of the answers; the model's answers are ours
(`mtjax.evaluate.answering`).
"""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mtjax.data.tokens.special_tokens import named_token
from mtjax.errors import UserError, first_line, nearest, require
from mtjax.evaluate.answering import Answering, as_lm
from mtjax.evaluate.options import Options
from mtjax.evaluate.run import Subject, check_files, introduce, opened, shown, write
from mtjax.evaluate.tasks.task import Results
from mtjax.generate.first_tokens import first_tokens_of
from mtjax.generate.weights import stop_ids_of
from mtjax.train.processes.coordination import this_process

EXTRA = "evaluate"
RESAMPLED = 1000
"""Draws from which lm-eval finds the standard error of what is not a mean; its own 100,000 take minutes on one core."""
Loaded = dict[str, dict[str, Any]]
"""What lm-eval has of tasks: "tasks" and "groups" by their names."""


def evaluate_harness(options: Options) -> Mapping[str, Results]:
    """Asks tasks of lm-eval and shows the results; in several processes, the first one does.

    Raises:
      UserError: lm-eval is not installed or lacks a task, or weights, tokenizer and mesh don't fit each other.
    """
    start = time.monotonic()
    check_files(options)
    os.environ.setdefault("DISABLE_MULTIPROC", "1")  # lm-eval's, whose forks of a process with devices may hang
    manager, loaded = load_tasks(options)
    with opened(options) as subject:
        counts = [f"{name} ({len(task.eval_docs):,} questions)" for name, task in loaded["tasks"].items()]
        introduce(subject.placed, ", ".join(counts))
        answering = answering_of(options, subject)
        found = ask(options, manager, loaded, as_lm(answering))
        if found is None:  # of another process of a launcher
            return {}
        results = {name: measured(values) for name, values in found["results"].items()}
        if this_process() == 0:
            print("\n" + table(results))
            asked = {
                "harness": {"tasks": list(loaded["tasks"]), "lm_eval": require("lm_eval", EXTRA).__version__},
                "versions": found["versions"],
                "few_shot": found["n-shot"],
                "limit": options.limit,
            }
            write(options, subject, asked, results, time.monotonic() - start)
            answering.forget()
    return results


def load_tasks(options: Options) -> tuple[Any, Loaded]:
    """lm-eval's tasks of these names, their data read, and what manages them.

    Raises:
      UserError: it is not installed, has no such task, or can't read one.
    """
    assert options.harness is not None  # who calls has looked
    tasks = require("lm_eval.tasks", EXTRA)
    include = options.harness_include
    if include is not None and not include.is_dir():
        raise UserError(f"--harness-include {include} is not a folder: name one with YAML files of tasks")
    manager = tasks.TaskManager(include_path=None if include is None else str(include))
    names = []
    for name in (word.strip() for word in options.harness.split(",")):
        matched = manager.match_tasks([name]) or ([name] if Path(name).is_file() else [])
        if not matched:
            raise UserError(f"lm-eval has no task or group {name!r}{nearest(name, manager.all_tasks)}")
        names += matched
    try:
        return manager, manager.load(names)
    except Exception as e:  # of a dataset's own code, of the network, of YAML
        why = f"{type(e).__name__}: {first_line(e)}"
        raise UserError(f"lm-eval can't load {', '.join(names)}: {why}") from e


def answering_of(options: Options, subject: Subject) -> Answering:
    """What answers lm-eval: the tokenizer's beginning of a text and the weights' ends as transformers has them."""
    saved, tokenizer = subject.saved, subject.tokenizer
    files = saved.source.origin.files
    end = named_token(tokenizer, files, "eos_token")
    end = tokenizer.eod if end is None else end
    begin = named_token(tokenizer, files, "bos_token")
    # As lm-eval's own: `bos_token` even where the tokenizer puts something else in front.
    prefix = first_tokens_of(saved, tokenizer)[-1] if begin is None else begin
    return Answering(
        subject.scorer,
        saved.parameters(subject.placed),
        tokenizer,
        prefix,
        stop_ids_of(saved, tokenizer) | {end},
        options.rows,
        options.out,
        saved.identity + options.compute_dtype + options.attention,
    )


def ask(options: Options, manager: Any, loaded: Loaded, lm: Any) -> Mapping[str, Any] | None:
    """lm-eval's results.

    Raises:
      UserError: a task is of another kind of model, or its metrics can't be made.
    """
    manager.load = lambda names: loaded  # their data are read
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
    except (ValueError, AssertionError, NotImplementedError) as e:
        raise UserError(f"lm-eval can't ask {', '.join(loaded['tasks'])}: {first_line(e)}") from e


def measured(values: Mapping[str, Any]) -> Results:
    """Numbers of a task, by names such as `acc`; that of a filter stands behind its name, as lm-eval has it."""
    numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
    return {name.removesuffix(",none"): value for name, value in numbers.items() if name != "sample_len"}


def table(results: Mapping[str, Results]) -> str:
    """A line for each number, its standard error behind it."""
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
