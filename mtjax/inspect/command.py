"""The command `mtjax inspect` after its options are parsed: compiles, prints, compares, writes."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from rich.console import Console

from mtjax.analysis.contract import Contract
from mtjax.analysis.hardware import GB, Server
from mtjax.config import Config
from mtjax.config.vocabulary import with_vocabulary
from mtjax.errors import UserError
from mtjax.inspect import compare, text
from mtjax.inspect.advice import memory_advice
from mtjax.inspect.contract_file import load_contract
from mtjax.inspect.decision import Decision
from mtjax.inspect.html import page
from mtjax.inspect.kernels.audit import check_kernels
from mtjax.inspect.measured import Measured, find_trace, measure
from mtjax.inspect.measured_text import show_measured
from mtjax.inspect.options import Options
from mtjax.inspect.report import Report, inspect
from mtjax.inspect.schema import SCHEMA, to_json
from mtjax.inspect.targets import Target, find_target
from mtjax.inspect.write_files import dump, write
from mtjax.plan.command import WithTeacher
from mtjax.waiting import waiting


def run(given: Config, options: Options, source: str, with_teacher: WithTeacher) -> int:
    """Compiles the programs that the options request, and prints and writes their reports.

    Args:
      given: the config as given by the user.
      options: of the command.
      source: the config's name or path as typed, for the command of a faster plan.
      with_teacher: reads the teacher's model.

    Returns:
      The exit code: 1 if a program violates its contract.
    """
    quiet = options.json == Path("-")
    # stdout must have nothing but the JSON.
    job = InspectJob.of(options, console_for(sys.stderr if quiet else sys.stdout), with_teacher)
    config = job.with_vocabulary(given)
    # A missing trace is an error before seconds of compiling.
    trace = find_trace(options.measured) if options.measured is not None else None
    reports = job.sweep(config, options.sweep) if options.sweep is not None else job.compare(config, options.vs)
    measured = measure(reports[0], trace) if trace is not None else None
    if measured is not None and job.verbose:
        show_measured(measured, job.console)
    if options.sweep is None and job.verbose:
        for report in reports:
            if advice := memory_advice(report, source, options.time_on or options.target):
                job.console.print(f"{report.step.mesh} {advice}", highlight=False, soft_wrap=True)
    save(reports, options, measured)
    if options.html is not None:
        with waiting(f"comparing with other plans, for {options.html}"):
            decision = Decision.on(reports[0], given, source, options.price)
        write(options.html, page(reports[0], reports[1:], decision))
        job.console.print(f"wrote {options.html}", highlight=False, soft_wrap=True)
    return 0 if all(r.verdict.holds for r in reports) else 1


@dataclass(frozen=True)
class InspectJob:
    """Settings of all programs of a command."""

    target: Target
    time_on: Server | None
    contract: Contract | None
    console: Console
    verbose: bool
    with_teacher: WithTeacher
    kernels: bool | None = False

    @classmethod
    def of(cls, options: Options, console: Console, with_teacher: WithTeacher) -> "InspectJob":
        """Builds the job from the options."""
        links = (_bytes(options.intra_bandwidth), _bytes(options.inter_bandwidth))
        on_other = options.time_on is not None
        target = find_target(options.target, *((None, None) if on_other else links))
        if on_other and not target.is_gpu:
            raise UserError(
                f"--time-on {options.time_on} needs a GPU program, and --target is {options.target}: set --target to a "
                "GPU, such as h100x8"
            )
        time_on = find_target(options.time_on, *links).server if options.time_on else None
        contract = load_contract(options.contract) if options.contract else None
        if options.kernels:
            check_kernels(target)
        # Programs that are compared are timed in the same way, however many kernels they have.
        reads = False if options.vs or options.sweep or on_other else None
        kernels = reads if options.kernels is None else options.kernels
        return cls(target, time_on, contract, console, options.json != Path("-"), with_teacher, kernels)

    def with_vocabulary(self, run_config: Config) -> Config:
        """Returns the config with GPT-2's vocabulary size where it has none."""
        return with_vocabulary(run_config, lambda text: self.console.print(text, highlight=False))

    def inspect(self, run_config: Config) -> Report:
        """Compiles a run's step and reports on it."""
        run_config, teacher = self.with_teacher(run_config)
        with waiting(f"compiling the step of mesh {run_config.parallel.mesh} for {self.target.name}"):
            report = inspect(run_config, self.target, self.contract, self.time_on, teacher, kernels=self.kernels)
        text.show_note(report.step.note, self.console)
        return report

    def compare(self, run_config: Config, words: Sequence[str]) -> list[Report]:
        """Returns one report, or with `words` of --vs two, and prints them side by side."""
        configs = [
            run_config,
            *([self.with_vocabulary(compare.other_config(run_config, words))] if words else []),
        ]
        reports = []
        for compared in configs:
            reports.append(self.inspect(compared))
            if self.verbose:
                text.show(reports[-1], self.console)
        if words and self.verbose:
            self.console.print(compare.comparison_table(*reports))
        return reports

    def sweep(self, run_config: Config, devices: int) -> list[Report]:
        """Returns one report for every mesh that fits the model, the fastest that fits the memory first."""
        if devices < 1:
            raise UserError(f"--sweep {devices}: give the number of devices, 1 or more")
        tries = []
        for mesh, candidate in compare.sweep_configs(run_config, devices):
            if isinstance(candidate, UserError):
                tries.append(compare.Try(mesh, None, str(candidate)))
                continue
            tries.append(compare.Try(mesh, self.inspect(candidate)))
            if self.verbose:
                seconds = tries[-1].report.step.compile_seconds
                self.console.print(f"{mesh} compiled in {seconds:.1f} s", highlight=False)
        if self.verbose:
            self.console.print(compare.sweep_table(tries))
            for note in compare.sweep_notes(tries):
                self.console.print(note, highlight=False)
        reports = sorted((t.report for t in tries if t.report), key=compare.rank)
        if not reports:
            raise UserError(f"no mesh of {devices} devices fits this model: {tries[0].why_not}")
        return reports


def save(reports: Sequence[Report], options: Options, measured: Measured | None = None) -> None:
    """Writes the JSON and the programs that the options ask for."""
    if options.json is not None:
        documents = [to_json(r, measured) for r in reports]
        document = documents[0] if len(documents) == 1 else {"schema": SCHEMA, "reports": documents}
        content = json.dumps(document, indent=1) + "\n"
        if options.json == Path("-"):
            sys.stdout.write(content)
        else:
            write(options.json, content)
    if options.dump is not None:
        for number, report in enumerate(reports, 1):
            dump(report.step, options.dump, number)


def console_for(stream: TextIO) -> Console:
    """Builds a console as wide as the terminal, or wide enough for the tables if there is none."""
    return Console(file=stream, width=None if stream.isatty() else 180, soft_wrap=not stream.isatty())


def _bytes(gigabytes: float | None) -> float | None:
    if gigabytes is not None and not gigabytes > 0:
        raise UserError(f"a bandwidth of {gigabytes} GB/s: give a number above 0")
    return None if gigabytes is None else gigabytes * GB
