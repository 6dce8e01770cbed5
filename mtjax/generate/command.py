"""What `mtjax generate` does: prompts from the command line, from a file, or from somebody who types."""

import itertools
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from mtjax.data.progress import say
from mtjax.errors import UserError, shortened
from mtjax.generate.beams import Beam, BeamSearch
from mtjax.generate.chat import ChatTemplate, Message
from mtjax.generate.completion import Completion, Piece
from mtjax.generate.decoder import Decoder
from mtjax.generate.engine import Engine
from mtjax.generate.fill import Filler
from mtjax.generate.jsonl import JsonLines, Line
from mtjax.generate.options import Options
from mtjax.generate.output_record import OutputRecord
from mtjax.generate.request import Sampling, with_text_seed
from mtjax.generate.show import TextPrinter
from mtjax.generate.text import TextWriter
from mtjax.generate.weights import LoadedModel, describe_config, load_model
from mtjax.train.compile_cache import CompileCache


def run(options: Options) -> None:
    """Loads the weights and continues what is asked for.

    Raises:
      UserError: weights, prompts or settings are wrong.
    """
    prompts = options.prompts
    if not (prompts or options.input or options.interactive):
        if sys.stdin.isatty():
            raise UserError("there is no prompt: give texts, --input FILE, --interactive, or a text to standard input")
        prompts = (sys.stdin.read().removesuffix("\n"),)
    with CompileCache(options.compile_cache):
        model = load_model(options.source, options.mesh, options.dtype, options.tokenizer)
        say(f"model   {describe_config(model.placed.config, model.parameters)}")
        if model.family == "bert":
            fill_masks(options, model, prompts)
            return
        if options.fillings is not None:
            raise UserError(f"--fillings is of a BERT's masks, and this is a {model.family}: leave it out")
        decoder = Decoder(model.placed, model.parameters, model.start_id, int8=options.weights_dtype == "int8")
        job = Job(options, replace(model, parameters=None), decoder)  # their memory is free again
        del model
        if options.beams is not None:
            search_beams(options, job, prompts)
        elif options.interactive:
            job.chat()
        elif options.input is not None:
            job.continue_file()
        else:
            job.continue_texts(prompts)


def fill_masks(options: Options, model: LoadedModel, prompts: Iterable[str]) -> None:
    """Shows, or writes, what may stand in place of each mask of some texts.

    Raises:
      UserError: options are given that are of texts, or a prompt has no mask.
    """
    plain = Options(options.source)
    text_options = (
        "weights_dtype",
        "beams",
        "length_penalty",
        "interactive",
        "samples",
        "stop",
        "ignore_eos",
        "echo",
        "show_logprobs",
        "logprobs",
        "sampling",
    )
    if idle := next((name for name in text_options if getattr(options, name) != getattr(plain, name)), None):
        named = "--temperature and the like" if idle == "sampling" else f"--{idle.replace('_', '-')}"
        raise UserError(f"a BERT fills masks, without any use for {named}: leave it out")
    filler, number = Filler(model), options.fillings or 5
    if options.input is not None and options.output is not None:
        with json_lines(options, model, 1) as lines:
            for line in lines.remaining():
                try:
                    masks = filler.fill(line.prompt, number)
                except UserError as e:
                    raise UserError(f"{options.input}:{line.number + 1}: {e}") from e
                lines.write(line, {"masks": [[asdict(filling) for filling in each] for each in masks]})
        return
    for prompt in prompts:
        for at, fillings in enumerate(filler.fill(prompt, number)):
            print(f"--- {shortened(prompt, 60)!r}, mask {at + 1}")
            for filling in fillings:
                print(f"{filling.probability:.4f}\t{filling.text}")


def json_lines(options: Options, model: LoadedModel, samples: int) -> JsonLines:
    """Opens `--input` and `--output`.

    Raises:
      UserError: a file can't be used.
    """
    assert options.input is not None and options.output is not None
    record = OutputRecord.of(options, model)
    return JsonLines(
        options.input,
        options.output,
        record,
        samples,
        options.sampling,
        options.stop,
        overwrite=options.overwrite,
    )


def search_beams(options: Options, job: "Job", prompts: Iterable[str]) -> None:
    """Shows, or writes, the most probable texts for some prompts.

    Raises:
      UserError: a prompt is too long, or its line asks for more than a search has.
    """
    if options.input is None or options.output is None:
        for prompt in prompts:
            for number, (text, beam) in enumerate(job.beams(prompt, options.sampling.max_tokens)):
                if options.samples > 1 or len(tuple(prompts)) > 1:
                    print(f"--- {shortened(prompt, 60)!r} ({number + 1}, {beam.score:.4f})")
                print(text)
        return
    with json_lines(options, job.model, options.samples) as lines:
        found: tuple[int, list[tuple[str, Beam]]] = (-1, [])
        for line in lines.remaining():
            try:
                if line.stops or replace(line.sampling, seed=0, max_tokens=1) != Sampling(max_tokens=1):
                    raise UserError("--beams has use for max_tokens only: leave the other settings out")
                if found[0] != line.number:
                    found = line.number, job.beams(line.prompt, line.sampling.max_tokens)
            except UserError as e:
                raise UserError(f"{options.input}:{line.number + 1}: {e}") from e
            text, beam = found[1][line.sample]
            ended = "stop" if beam.is_stopped else "length"
            lines.write(line, {"text": text, "finish_reason": ended, "score": beam.score})


class Job:
    """One run of the command.

    Attributes:
      model: without its weights, which the decoder has.
    """

    def __init__(self, options: Options, model: LoadedModel, decoder: Decoder) -> None:
        self._options, self.model = options, model
        self._stop_ids = frozenset[int]() if options.ignore_eos else model.stop_ids
        self._decoder = decoder

    def beams(self, prompt: str, max_tokens: int) -> list[tuple[str, Beam]]:
        """The most probable texts for a prompt with their beams, the best one first.

        Raises:
          UserError: there are too many beams for the stop ids, or the prompt is too long.
        """
        options, tokenizer = self._options, self.model.tokenizer
        assert options.beams is not None
        search = BeamSearch(self._decoder, options.beams, options.length_penalty, self._stop_ids)
        prompt_ids, texts = self.model.prompt_ids(prompt), []
        for beam in search.search(prompt_ids, max_tokens)[: options.samples]:
            writer = TextWriter(tokenizer, () if self._decoder.is_encoder_decoder else prompt_ids)
            for token in beam.ids[: len(beam.ids) - beam.is_stopped]:
                writer.add(token)
            writer.end()
            texts.append((writer.text, beam))
        return texts

    def continue_texts(self, prompts: Iterable[str]) -> None:
        """Continues each prompt and shows the texts: a single one as it comes, several when they are done."""
        options = self._options
        several = list(enumerate(prompts))
        wanted = [(place, prompt, number) for place, prompt in several for number in range(options.samples)]
        sequences = min(options.batch, len(wanted))
        engine = Engine(self._decoder, sequences)
        shown = TextPrinter(sys.stdout, options.show_logprobs)
        clock, done = Clock(sequences), list[Completion]()
        for index, prompt, number in wanted:
            ids = self.model.prompt_ids(prompt)
            completion = self._completion(ids, with_text_seed(options.sampling, number, index))
            completion.on_piece = partial(show_token, clock, completion, shown if len(wanted) == 1 else None)
            engine.submit(completion.request)
            done.append(completion)
        engine.run()
        for (_, prompt, number), completion in zip(wanted, done, strict=True):
            if len(wanted) > 1:
                shown.title(f"{shortened(prompt, 60)!r}" + (f" ({number + 1})" if options.samples > 1 else ""))
                for piece in (*completion.prompt_pieces, *completion.pieces):
                    shown.piece(piece)
            shown.end()
        say(clock.summary())

    def continue_file(self) -> None:
        """Continues the prompts of a JSONL file that the output does not have yet."""
        options = self._options
        assert options.input is not None and options.output is not None
        engine, waiting = Engine(self._decoder, options.batch), 2 * options.batch
        with json_lines(options, self.model, options.samples) as lines:
            for line in lines.remaining():
                ids = self.model.prompt_ids(line.prompt)
                completion = self._completion(ids, line.sampling, line.stops)
                completion.on_end = partial(self._write, lines, line, completion)
                try:
                    engine.submit(completion.request)
                except UserError as e:
                    raise UserError(f"{options.input}:{line.number + 1}: {e}") from e
                while engine.load[0] >= waiting:
                    engine.step()
            engine.run()

    def _write(self, lines: JsonLines, line: Line, completion: Completion) -> None:
        record: dict[str, Any] = {"text": completion.text, "finish_reason": completion.ended}
        if self._options.logprobs:
            tokens = [(piece.text, piece.token) for piece in completion.pieces if piece.token is not None]
            record["logprobs"] = [{"text": text, "id": t.id, "logprob": t.logprob} for text, t in tokens]
        lines.write(line, record)

    def chat(self) -> None:
        """Answers what is typed until the input ends."""
        options, template = self._options, ChatTemplate.of(self.model.folder)
        engine, tokenizer = Engine(self._decoder, 1), self.model.tokenizer
        if template is None and options.system is not None:
            raise UserError(f"{self.model.folder} has no chat_template, and --system needs one: leave it out")
        say("Ctrl-D ends it" + ("" if template else "; there is no chat_template: each line is continued by itself"))
        first: list[Message] = [] if options.system is None else [{"role": "system", "content": options.system}]
        messages = list(first)
        turns = itertools.count()
        while (typed := _read_line()) is not None:
            if template is None:
                ids = self.model.prompt_ids(typed)
            else:
                messages.append({"role": "user", "content": typed})
                ids = tokenizer.encode_marked(template.render(messages))
            shown = TextPrinter(sys.stdout, options.show_logprobs)
            completion = self._completion(ids, with_text_seed(options.sampling, 0, next(turns)))
            completion.on_piece = shown.piece
            try:
                engine.submit(completion.request)
            except UserError as e:
                say(f"{e}; the conversation begins anew")
                messages = list(first)
                continue
            engine.run()
            shown.end()
            messages.append({"role": "assistant", "content": completion.text})

    def _completion(self, ids: list[int], sampling: Sampling, stops: tuple[str, ...] | None = None) -> Completion:
        options = self._options
        return Completion(
            self.model.tokenizer,
            tuple(ids),
            sampling,
            self._stop_ids,
            options.stop if stops is None else stops,
            options.show_logprobs or options.logprobs,
            options.echo,
        )


def _read_line() -> str | None:
    """A line that is not empty; None when the input has ended."""
    while True:
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return None
        if line.strip():
            return line.rstrip("\n")


class Clock:
    """Tokens per second of texts, without the first two of each sequence, for which programs are compiled."""

    def __init__(self, sequences: int) -> None:
        self._tokens, self._start, self._first = 0, 0.0, 2 * sequences

    def count(self) -> None:
        """One more token was written."""
        self._tokens += 1
        if self._tokens == self._first:
            self._start = time.perf_counter()

    def summary(self) -> str:
        """What was counted."""
        after, seconds = self._tokens - self._first, time.perf_counter() - self._start
        speed = f", {after / seconds:.1f} a second behind the first {self._first}" if after > 0 else ""
        return f"{self._tokens} tokens{speed}"


def show_token(clock: Clock, completion: Completion, shown: TextPrinter | None, piece: Piece) -> None:
    """Counts a token that was written, and shows its piece if that is wanted at once."""
    if completion.pieces and piece.token is not None:
        clock.count()
    if shown is not None:
        shown.piece(piece)
