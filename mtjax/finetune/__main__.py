"""`python -m mtjax.finetune`, also `mtjax finetune`."""

import dataclasses
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from mtjax.cli import Command, argument, parse, run_main, typed_options
from mtjax.config import Config, replace
from mtjax.config.common import COMMON_FINETUNING
from mtjax.errors import UserError
from mtjax.finetune.options import CHAT, DECIDED, DEFAULTS, DESCRIPTION, LONGEST_CHATS, Options
from mtjax.finetune.tasks.registry import TASKS
from mtjax.help import HELP, HELP_ALL
from mtjax.interrupt import CtrlC
from mtjax.theory.mesh import AUTO, parse_mesh
from mtjax.train.observability.start_timer import StartTimer

if TYPE_CHECKING:
    from mtjax.convert.saved_model import Hints
    from mtjax.finetune.pretrained import OnPretrained


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command with these arguments; returns its exit code."""
    times = StartTimer()
    words = list(sys.argv[1:] if argv is None else argv)

    def body() -> int:
        with CtrlC():
            check_words(words)
            command = parse(
                words, "mtjax finetune", DESCRIPTION, Options, base=base_config, hidden=(), common=COMMON_FINETUNING
            )
            config = command.config
            if config.finetuning.task == "none":
                raise UserError(f"--task is missing: it is one of {', '.join((*TASKS, CHAT))}")
            if config.training.init_from is None and argument(words, "--config") is None:
                raise UserError("--init-from is missing: the weights to begin with, say hf:DIR or a run")
        run(command._replace(config=with_head(config)), words, times)
        return 0

    return run_main(body)


def run(command: Command[Options], words: Sequence[str], times: StartTimer) -> None:
    """Runs a finetuning, called by its config's name or, without one, by its task's."""
    from mtjax.finetune.chatting import Chatting
    from mtjax.finetune.initial import PretrainedTrunk
    from mtjax.finetune.objective import FineTuning
    from mtjax.finetune.teacher import Teacher
    from mtjax.train.loop import train  # seconds to import: not before the options are right

    config, show, choose_mesh = command.config, None, None
    named = config.finetuning.teacher
    teacher = Teacher(named, hints_of(config.parallel.mesh)) if named else None
    if command.options.inspect:
        from mtjax.inspect.train_hook import show_program

        beside = teacher.beside if teacher else lambda _: None
        show = lambda program, console: show_program(program, console, beside(program.config))  # noqa: E731
    if config.parallel.mesh == AUTO:
        from mtjax.plan.auto import fastest_mesh

        choose_mesh = partial(fastest_mesh, teacher=teacher.beside(config) if teacher else None)
    init_from, task = config.training.init_from, config.finetuning.task
    trunk = PretrainedTrunk(str(init_from), hints_of(config.parallel.mesh)) if init_from else None
    name = command.name if argument(words, "--config") else task

    def learnt() -> "OnPretrained":
        return Chatting(trunk, teacher) if task == CHAT else FineTuning(TASKS[task], trunk, teacher)

    def one(config: Config, times: StartTimer) -> bool:
        objective = learnt()
        options = command.options.of_training()
        return train(config, name, options, objective=objective, times=times, show=show, choose_mesh=choose_mesh)

    options = command.options
    if options.seeds == 1 and options.sweep is None:
        one(config, times)
        return
    from mtjax.finetune.seeds import run_seeds
    from mtjax.finetune.sweep import grid_of, run_sweep

    goal = learnt().goal(config)
    if options.sweep is None:
        run_seeds(config, name, options.seeds, goal, lambda config: one(config, StartTimer()))
    else:
        grid = grid_of(options.sweep, config)
        run_sweep(config, name, grid, options.seeds, goal, lambda config: one(config, StartTimer()))


def check_words(words: Sequence[str]) -> None:
    """Checks that no option is given which the task decides.

    Raises:
      UserError: one is.
    """
    typed = typed_options(words)
    for name in DECIDED:
        if f"--{name}" in typed:
            raise UserError(f"--{name} has no effect on a finetuning: the task, its rows and --epochs decide")


def base_config(start: Config, words: Sequence[str]) -> Config:
    """What the options are laid over: a run's config as it is, else the weights' model with a finetuning's settings.

    Raises:
      UserError: there are no such weights.
    """
    if start.finetuning.task != "none" and "--resume" in words:
        return start
    config = start if argument(words, "--config") else replace(Config(), **DEFAULTS)
    named = argument(words, "--init-from")
    if named is None or {*HELP, HELP_ALL} & set(words):
        return config
    from mtjax.convert.saved_model import model_of

    model = model_of(named, "--init-from", hints_of(argument(words, "--mesh") or config.parallel.mesh))
    kept = {name: getattr(config.model, name) for name in ("lora_rank", "lora_alpha", "lora_dropout", "lora_targets")}
    if argument(words, "--task") == CHAT:
        kept["sequence_length"] = min(model.sequence_length, LONGEST_CHATS)
    model = dataclasses.replace(model, **kept)
    return dataclasses.replace(config, model=model)


def hints_of(mesh: str) -> "Hints":
    """How a vocabulary is padded for a mesh."""
    from mtjax.convert.saved_model import Hints, vocab_multiple_for  # imports jax, for seconds

    return Hints(None if mesh == AUTO else vocab_multiple_for(parse_mesh(mesh)))


def with_head(config: Config) -> Config:
    """The config with the head of its task.

    Raises:
      UserError: the family has no such head.
    """
    family = config.model.family
    if config.finetuning.task == CHAT:
        if family not in ("gpt", "llama"):
            raise UserError(f"--task chat needs a decoder, gpt or llama, and these weights are of a {family}")
        return replace(config, head="language")
    task = TASKS[config.finetuning.task]
    if family == "t5":
        raise UserError("t5 has no head for classification or spans: use weights of a bert, gpt or llama")
    if task.head == "spans" and family != "bert":
        raise UserError(
            f"{task.name} needs a bidirectional encoder, and these weights are of a {family}: use weights of a bert"
        )
    labels = {"num_labels": len(task.labels)} if task.labels else {}
    return replace(config, head=task.head, **labels)


if __name__ == "__main__":
    sys.exit(main())
