"""`python -m mtjax.inspect`: compile a run's step for a target, show what it sends, and hold it to its contract."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from mtjax import cli, config
from mtjax.config import Config
from mtjax.errors import UserError
from mtjax.inspect import compare, text
from mtjax.inspect.contract_file import load_contract
from mtjax.inspect.dump import dump, write
from mtjax.inspect.html import page
from mtjax.inspect.report import Report, inspect
from mtjax.inspect.schema import SCHEMA, to_json
from mtjax.inspect.targets import Target, find_target
from mtjax.theory.contract import Contract
from mtjax.theory.hardware import GB, Server

GPT2_VOCABULARY = 50_257

DESCRIPTION = """Compile the train step of a config for a mesh of devices that need not exist, and show what it sends.

Every collective of the optimized program is listed with its mesh axis, how often it runs in a step, its shape and
bytes, and whether computation hides it; then held against the layout's contract. Exit code 0: the contract holds,
1: it does not, 2: wrong use.
"""


@dataclass(frozen=True)
class Options:
    """What to compile for, and what to show."""

    target: str = "cpu"
    """cpu, attached, KINDxGPUS-PER-SERVER such as h100x8 (needs the extra aot, no GPU), or a .toml file of your own."""
    time_on: str | None = None
    """Servers whose speed and memory count, where they are not those compiled for: v100x16."""
    intra_bandwidth: float | None = None
    """GB/s of a GPU to the others in its server, one direction; the server's own when not given."""
    inter_bandwidth: float | None = None
    """GB/s of a GPU to other servers, one direction; the server's own when not given."""
    contract: Path | None = None
    """A contract of your own (TOML) instead of the layout's."""
    vs: tuple[str, ...] = ()
    """Compare with another mesh (8x8), settings (recompute=none) or config: two columns and the difference."""
    sweep: int | None = None
    """Try every (data, model) mesh of this many devices."""
    json: Path | None = None
    """Write the report as JSON; - prints it instead of the tables."""
    html: Path | None = None
    """Write the report as one self-contained page."""
    dump: Path | None = None
    """Write the program's HLO text into this folder."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    return cli.run_main(lambda: run(argv))


def run(argv: Sequence[str] | None) -> int:
    """Parses, compiles, prints."""
    command = cli.parse(argv, "mtjax inspect", DESCRIPTION, Options)
    options = command.options
    if options.sweep is not None and options.vs:
        raise UserError("--sweep and --vs both compare: give one of them")
    quiet = options.json == Path("-")
    console = console_for(sys.stderr if quiet else sys.stdout)
    run_config = with_vocabulary(command.config, console)
    job = Job.of(options, console)
    reports = job.sweep(run_config, options.sweep) if options.sweep is not None else job.compare(run_config, options.vs)
    save(reports, options)
    return 0 if all(r.verdict.holds for r in reports) else 1


@dataclass(frozen=True)
class Job:
    """What stays the same over all programs of a command."""

    target: Target
    time_on: Server | None
    contract: Contract | None
    console: Console
    verbose: bool

    @classmethod
    def of(cls, options: Options, console: Console) -> "Job":
        """The job that the options describe."""
        links = (_bytes(options.intra_bandwidth), _bytes(options.inter_bandwidth))
        on_other = options.time_on is not None
        target = find_target(options.target, *((None, None) if on_other else links))
        if on_other and not target.is_gpu:
            raise UserError(f"--time-on {options.time_on} needs a program for GPUs, and --target is {options.target}")
        time_on = find_target(options.time_on, *links).server if options.time_on else None
        contract = load_contract(options.contract) if options.contract else None
        return cls(target, time_on, contract, console, options.json != Path("-"))

    def inspect(self, run_config: Config) -> Report:
        """Compiles and reports."""
        return inspect(run_config, self.target, self.contract, self.time_on)

    def compare(self, run_config: Config, words: Sequence[str]) -> list[Report]:
        """One report, or two side by side."""
        configs = [
            run_config,
            *([with_vocabulary(compare.other_config(run_config, words), self.console)] if words else []),
        ]
        reports = []
        for one in configs:
            reports.append(self.inspect(one))
            if self.verbose:
                text.show(reports[-1], self.console)
        if words and self.verbose:
            self.console.print(compare.comparison_table(*reports))
        return reports

    def sweep(self, run_config: Config, devices: int) -> list[Report]:
        """One report for every mesh that divides, the fastest that fits first."""
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
            raise UserError(f"no mesh of {devices} devices divides this model: {tries[0].why_not}")
        return reports


def save(reports: Sequence[Report], options: Options) -> None:
    """Writes what the options ask for."""
    if options.json is not None:
        documents = [to_json(r) for r in reports]
        document = documents[0] if len(documents) == 1 else {"schema": SCHEMA, "reports": documents}
        content = json.dumps(document, indent=1) + "\n"
        if options.json == Path("-"):
            sys.stdout.write(content)
        else:
            write(options.json, content)
    if options.html is not None:
        write(options.html, page(reports[0], reports[1:]))
    if options.dump is not None:
        for number, report in enumerate(reports, 1):
            dump(report.step, options.dump, number)


def with_vocabulary(run_config: Config, console: Console) -> Config:
    """A config whose vocabulary is known: GPT-2's where only a tokenizer would tell."""
    if run_config.model.vocab_size is not None:
        return run_config
    console.print(f"vocab_size is not given: taking GPT-2's {GPT2_VOCABULARY:,}", highlight=False)
    return config.replace(run_config, vocab_size=GPT2_VOCABULARY)


def console_for(stream) -> Console:
    """As wide as the terminal, or wide enough for the tables where there is none."""
    return Console(file=stream, width=None if stream.isatty() else 180, soft_wrap=not stream.isatty())


def _bytes(gigabytes: float | None) -> float | None:
    if gigabytes is not None and not gigabytes > 0:
        raise UserError(f"a bandwidth of {gigabytes} GB/s: give a number above 0")
    return None if gigabytes is None else gigabytes * GB


if __name__ == "__main__":
    sys.exit(main())
