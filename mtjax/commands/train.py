"""`python -m mtjax.train`, also `mtjax train`."""

import os
import sys
from collections.abc import Sequence

from mtjax.cli import Command, parse, run_main
from mtjax.interrupt import CtrlC
from mtjax.layout.mesh import AUTO
from mtjax.train.observability.start_timer import StartTimer
from mtjax.train.options import DESCRIPTION, Options
from mtjax.waiting import IMPORTS, waiting


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command with these arguments; returns its exit code."""

    times = StartTimer()

    def body() -> int:
        with CtrlC():
            command = parse(argv, "mtjax train", DESCRIPTION, Options)
            from mtjax.runtime.processes.local import Member, member_arguments, processes_needed, run_members

            # XLA runs only so many virtual CPU devices in one process.
            count = processes_needed(command.config, os.environ)
            if count == 1:
                return _train(command, times)
        mesh = command.config.parallel.mesh
        print(f"{mesh} virtual CPU devices need {count} processes: starting them", flush=True)
        arguments = list(sys.argv[1:] if argv is None else argv)
        commands = member_arguments(arguments, count)
        members = [Member(command, prefix=f"[{i}] " if i else "") for i, command in enumerate(commands)]
        return run_members(members, command.config.parallel.peer_timeout).code

    return run_main(body)


def _train(command: Command[Options], times: StartTimer) -> int:
    with waiting(IMPORTS):  # takes seconds: only for valid options
        from mtjax.convert.initial_weights import open_foreign
        from mtjax.generate.training_sample import continue_text
        from mtjax.train.loop import train
        from mtjax.train.objective import Pretraining

    show = None
    if command.options.inspect:
        from mtjax.inspect.train_hook import show_program as show
    choose_mesh = None
    if command.config.parallel.mesh == AUTO:
        from mtjax.plan.auto import fastest_mesh as choose_mesh
    from mtjax.evaluate.during_training import evaluations_of

    joined = {"show": show, "choose_mesh": choose_mesh, "evaluations": evaluations_of(command.config)}
    train(
        command.config,
        command.name,
        command.options,
        objective=Pretraining(continue_text, open_foreign),
        times=times,
        **joined,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
