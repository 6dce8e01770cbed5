"""`python -m mtjax.finetune`, also `mtjax finetune`."""

import dataclasses
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from mtjax.cli import Command, argument, parse, run_main, typed_options
from mtjax.config import Config, replace
from mtjax.config.common import COMMON_FINETUNING
from mtjax.config.families import is_decoder, kind_of
from mtjax.errors import UserError
from mtjax.families.retro.config import shortest_text, text_step
from mtjax.finetune.options import CHAT, DECIDED, DEFAULTS, DESCRIPTION, LONGEST_CHATS, Options
from mtjax.finetune.tasks.registry import TASKS
from mtjax.help import HELP, HELP_ALL
from mtjax.interrupt import CtrlC
from mtjax.layout.mesh import AUTO, parse_mesh
from mtjax.train.observability.start_timer import StartTimer
from mtjax.waiting import IMPORTS, waiting

if TYPE_CHECKING:
    from mtjax.convert.saved_model import Hints
    from mtjax.finetune.pretrained import FinetuningObjective


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command with these arguments; returns its exit code."""
    times = StartTimer()
    words = list(sys.argv[1:] if argv is None else argv)

    def body() -> int:
        with CtrlC():
            check_options(words)
            command = parse(
                words, "mtjax finetune", DESCRIPTION, Options, base=base_config, hidden=(), common=COMMON_FINETUNING
            )
            config = command.config
            if config.finetuning.task == "none":
                raise UserError(f"--task is missing: use one of {', '.join((*TASKS, CHAT))}")
            if config.training.init_from is None and argument(words, "--config") is None:
                raise UserError("--init-from is missing: name the pretrained weights, such as hf:DIR or a run")
        run(command._replace(config=with_head(config)), words, times)
        return 0

    return run_main(body)


def run(command: Command[Options], words: Sequence[str], times: StartTimer) -> None:
    """Runs a finetuning; its name is that of the config or, without --config, that of the task."""
    with waiting(IMPORTS):  # takes seconds: only after the options are checked
        from mtjax.finetune.chat_objective import ChatFinetuning
        from mtjax.finetune.objective import TaskFinetuning
        from mtjax.finetune.pretrained_trunk import PretrainedTrunk
        from mtjax.finetune.teacher import Teacher
        from mtjax.train.loop import train

    config, show, choose_mesh = command.config, None, None
    teacher_name = config.finetuning.teacher
    teacher = Teacher(teacher_name, hints_of(config.parallel.mesh)) if teacher_name else None
    if command.options.inspect:
        from mtjax.inspect.train_hook import show_program

        teacher_model = teacher.model_for if teacher else lambda _: None
        show = lambda program, console: show_program(program, console, teacher_model(program.config))  # noqa: E731
    if config.parallel.mesh == AUTO:
        from mtjax.plan.auto import fastest_mesh

        choose_mesh = partial(fastest_mesh, teacher=teacher.model_for(config) if teacher else None)
    init_from, task = config.training.init_from, config.finetuning.task
    trunk = PretrainedTrunk(str(init_from), hints_of(config.parallel.mesh)) if init_from else None
    name = command.name if argument(words, "--config") else task

    # Each run of several seeds gets a new one: an objective keeps what it has read of its rows.
    def new_objective() -> "FinetuningObjective":
        return ChatFinetuning(trunk, teacher) if task == CHAT else TaskFinetuning(TASKS[task], trunk, teacher)

    def run_once(config: Config, times: StartTimer) -> bool:
        objective = new_objective()
        options = command.options.of_training()
        return train(config, name, options, objective=objective, times=times, show=show, choose_mesh=choose_mesh)

    options = command.options
    if options.seeds == 1 and options.sweep is None:
        run_once(config, times)
        return
    from mtjax.finetune.seeds import run_seeds
    from mtjax.finetune.sweep import grid_of, run_sweep

    goal = new_objective().goal(config)
    if options.sweep is None:
        run_seeds(config, name, options.seeds, goal, lambda config: run_once(config, StartTimer()))
    else:
        grid = grid_of(options.sweep, config)
        run_sweep(config, name, grid, options.seeds, goal, lambda config: run_once(config, StartTimer()))


def check_options(words: Sequence[str]) -> None:
    """Checks that no option is given that the task determines.

    Raises:
      UserError: one is given.
    """
    typed = typed_options(words)
    for name in DECIDED:
        if f"--{name}" in typed:
            raise UserError(f"--{name} has no effect on finetuning: the task, its rows and --epochs determine it")


def base_config(start: Config, words: Sequence[str]) -> Config:
    """Returns the config that options override: that of a resumed run, else the weights' model with defaults.

    Raises:
      UserError: there are no such weights.
    """
    # The config of a run that is resumed has all settings already, and the original weights may be gone.
    if start.finetuning.task != "none" and "--resume" in words:
        return start
    config = start if argument(words, "--config") else replace(Config(), **DEFAULTS)
    init_from = argument(words, "--init-from")
    # Help is shown without opening the weights.
    if init_from is None or {*HELP, HELP_ALL} & set(words):
        return config
    from mtjax.convert.saved_model import model_of

    model = model_of(init_from, "--init-from", hints_of(argument(words, "--mesh") or config.parallel.mesh))
    overrides = {
        name: getattr(config.model, name)
        for name in ("lora_rank", "lora_alpha", "lora_dropout", "lora_targets", "retro_frozen")
    }
    overrides["retro_reads"] = True  # the rows decide it when they are read
    if argument(words, "--task") == CHAT:
        step = text_step(model)
        # A Retro reads whole chunks, so its length is a multiple of theirs.
        longest = max(LONGEST_CHATS // step * step, shortest_text(model))
        overrides["sequence_length"] = min(model.sequence_length, longest)
    # What the weights decide (sizes, norms, activations) is not a choice; what only finetuning adds comes from the
    # config.
    model = dataclasses.replace(model, **overrides)
    return dataclasses.replace(config, model=model)


def hints_of(mesh: str) -> "Hints":
    """Returns how the vocabulary is padded for a mesh."""
    from mtjax.convert.saved_model import Hints, vocab_multiple_for  # imports jax, which takes seconds

    return Hints(None if mesh == AUTO else vocab_multiple_for(parse_mesh(mesh)))


def with_head(config: Config) -> Config:
    """Returns the config with the head of its task.

    Raises:
      UserError: the family does not have this head.
    """
    family = config.model.family
    if config.finetuning.task == CHAT:
        if not is_decoder(config.model) and kind_of(config.model) != "retrieval":
            raise UserError(f"--task chat requires a decoder, gpt, llama or retro, but --init-from is a {family}")
        return replace(config, head="language")
    task = TASKS[config.finetuning.task]
    if kind_of(config.model) == "encoder-decoder":
        raise UserError("t5 cannot be finetuned: use weights of a bert, gpt or llama")
    if task.head == "spans" and family != "bert":
        raise UserError(
            f"--task {task.name} requires a bidirectional encoder, but --init-from is a {family}: use weights of a bert"
        )
    labels = {"num_labels": len(task.labels)} if task.labels else {}
    return replace(config, head=task.head, **labels)


if __name__ == "__main__":
    sys.exit(main())
