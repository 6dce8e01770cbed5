"""The command `mtjax generate`: prompts from the command line, from a file, or typed in a chat."""

import itertools
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from functools import partial

from mtjax.data.progress import say
from mtjax.errors import UserError, shortened
from mtjax.generate.beams import Beam, BeamSearch
from mtjax.generate.chat import ChatTemplate, Message
from mtjax.generate.completion import Completion, Piece
from mtjax.generate.decoder import GenerationPrograms
from mtjax.generate.engine import Engine
from mtjax.generate.fill import Filler
from mtjax.generate.jsonl import JsonLines, PromptLine
from mtjax.generate.options import OF_ENGINES, OF_RETRIEVAL, Options, refuse
from mtjax.generate.request import Sampling, with_text_seed
from mtjax.generate.show import TextPrinter
from mtjax.generate.text import TextWriter
from mtjax.generate.weights import LoadedModel, describe_config, load_model
from mtjax.runtime.compile_cache import CompileCache
from mtjax.waiting import Waiting, waiting


def run(options: Options) -> None:
    """Loads the weights and generates what the options ask for.

    Raises:
      UserError: weights, prompts or options are invalid.
    """
    prompts = options.prompts
    if not (prompts or options.input or options.documents or options.interactive):
        if sys.stdin.isatty():
            raise UserError(
                "there is no prompt: give prompts as arguments, --input FILE, --interactive, or text on standard input"
            )
        # `echo` and editors end a file with a line break, after which a model would continue another paragraph.
        prompts = (sys.stdin.read().removesuffix("\n"),)
    with CompileCache(options.compile_cache):
        model = load_model(
            options.source,
            options.mesh,
            options.dtype,
            options.tokenizer,
            storage=options.storage,
            neighbours=True,
            state_snapshots=options.state_snapshots,
        )
        say(f"model   {describe_config(model.sharded_model.config, model.parameters)}")
        if model.family == "bert":
            fill_masks(options, model, prompts)
            return
        if options.fillings is not None:
            raise UserError(f"--fillings needs a bert, and the model is a {model.family}: remove it")
        if model.family == "retro":
            from mtjax.generate.retro import write_with_neighbours

            write_with_neighbours(options, model, prompts)
            return
        refuse(options, OF_RETRIEVAL, f"a {model.family} reads no neighbours")
        decoder = GenerationPrograms(
            model.sharded_model, model.parameters, model.start_id, storage=options.storage, grids=model.grids
        )
        job = GenerateJob(
            options, replace(model, parameters=None, grids=()), decoder
        )  # frees their memory: the decoder has converted them
        del model
        if options.beams is not None:
            search_beams(options, job, prompts)
        elif options.interactive:
            job.chat()
        elif options.output is not None:
            job.continue_file()
        else:
            job.continue_texts(prompts)


def fill_masks(options: Options, model: LoadedModel, prompts: Iterable[str]) -> None:
    """Prints, or writes to --output, the most likely tokens for each mask of the prompts.

    Raises:
      UserError: options of text generation are given, or a prompt has no mask.
    """
    of_texts = ("samples", "stop", "ignore_eos", "show_logprobs", "logprobs", "sampling")
    refuse(options, (*OF_ENGINES, *OF_RETRIEVAL, *of_texts), "a bert fills masks")
    filler, number = Filler(model), options.fillings or 5
    if options.input is not None and options.output is not None:
        with JsonLines.of(options, model, 1) as lines:
            for line in lines.remaining():
                try:
                    masks = filler.fill(line.prompt, number)
                except UserError as e:
                    raise UserError(f"{options.input}:{line.number + 1}: {e}") from e
                lines.write(line, {"masks": [[asdict(filling) for filling in each] for each in masks]})
        return
    for prompt in prompts:
        for index, fillings in enumerate(filler.fill(prompt, number)):
            print(f"--- {shortened(prompt, 60)!r}, mask {index + 1}")
            for filling in fillings:
                print(f"{filling.probability:.4f}\t{filling.text}")


def search_beams(options: Options, job: "GenerateJob", prompts: Sequence[str]) -> None:
    """Prints, or writes to --output, the best texts of a beam search for each prompt.

    Raises:
      UserError: a prompt is too long, or its line has settings that beam search does not support.
    """
    if options.input is None or options.output is None:
        for prompt in prompts:
            for number, (text, beam) in enumerate(job.beams(prompt, options.sampling.max_tokens)):
                if options.samples > 1 or len(prompts) > 1:
                    print(f"--- {shortened(prompt, 60)!r} ({number + 1}, {beam.score:.4f})")
                print(text)
        return
    with JsonLines.of(options, job.model, options.samples) as lines:
        # A search finds all samples of a prompt at once: the result is reused for the following samples of the line.
        found: tuple[int, list[tuple[str, Beam]]] = (-1, [])
        for line in lines.remaining():
            try:
                # The seed is set for each line, also where the user gives none, and beam search does not read it.
                if line.stops or replace(line.sampling, seed=0, max_tokens=1) != Sampling(max_tokens=1):
                    raise UserError("--beams (beam search) supports max_tokens only: remove the line's other settings")
                if found[0] != line.number:
                    found = line.number, job.beams(line.prompt, line.sampling.max_tokens)
            except UserError as e:
                raise UserError(f"{options.input}:{line.number + 1}: {e}") from e
            text, beam = found[1][line.sample]
            ended = "stop" if beam.is_stopped else "length"
            lines.write(line, {"text": text, "finish_reason": ended, "score": beam.score})


class GenerateJob:
    """One run of the command.

    Attributes:
      model: the model without its weights, which the decoder has.
    """

    def __init__(self, options: Options, model: LoadedModel, decoder: GenerationPrograms) -> None:
        self._options, self.model = options, model
        self._stop_ids = frozenset[int]() if options.ignore_eos else model.stop_ids
        self._decoder = decoder

    def beams(self, prompt: str, max_tokens: int) -> list[tuple[str, Beam]]:
        """Returns the best texts for a prompt and their beams, in descending order of score.

        Raises:
          UserError: there are too many beams, or the prompt is too long.
        """
        options, tokenizer = self._options, self.model.tokenizer
        assert options.beams is not None
        search = BeamSearch(self._decoder, options.beams, options.length_penalty, self._stop_ids)
        prompt_ids, texts = self.model.prompt_ids(prompt), []
        for beam in search.search(prompt_ids, max_tokens)[: options.samples]:
            # An encoder-decoder's text does not continue the prompt, whose tokens are then no context for decoding.
            writer = TextWriter(tokenizer, () if self._decoder.is_encoder_decoder else prompt_ids)
            # Without the stop token, whose name would be part of the text.
            for token in beam.ids[: len(beam.ids) - beam.is_stopped]:
                writer.add(token)
            writer.end()
            texts.append((writer.text, beam))
        return texts

    def continue_texts(self, prompts: Iterable[str]) -> None:
        """Continues each prompt and prints the texts: a single text token by token, several when all are done."""
        options = self._options
        numbered = list(enumerate(prompts))
        texts = [(index, prompt, number) for index, prompt in numbered for number in range(options.samples)]
        sequences = min(options.batch, len(texts))
        # A single text finds no prompt before it.
        snapshots = options.state_snapshots if len(texts) > 1 else 0
        engine = Engine(self._decoder, sequences, state_snapshots=snapshots)
        printer = TextPrinter(sys.stdout, options.show_logprobs)
        rate, done = TokenRate(sequences), list[Completion]()
        with waiting(f"compiling, and generating {len(texts)} texts" if len(texts) > 1 else COMPILING) as silence:
            for index, prompt, number in texts:
                ids = self.model.prompt_ids(prompt)
                completion = self._completion(ids, with_text_seed(options.sampling, number, index))
                # Several texts are written at once: printed as they come, their tokens would be mixed.
                completion.on_piece = partial(show_token, rate, completion, None)
                if len(texts) == 1:
                    completion.on_piece = partial(show_token, rate, completion, shown_by(printer, silence))
                engine.submit(completion.request)
                done.append(completion)
            engine.run()
        for (_, prompt, number), completion in zip(texts, done, strict=True):
            if len(texts) > 1:
                printer.title(f"{shortened(prompt, 60)!r}" + (f" ({number + 1})" if options.samples > 1 else ""))
                for piece in (*completion.prompt_pieces, *completion.pieces):
                    printer.piece(piece)
            printer.end()
        say(rate.summary())

    def continue_file(self) -> None:
        """Continues the prompts of a JSONL file, except for texts that the output already has."""
        options = self._options
        # Lines are submitted as the queue drains, so that a long file is not in memory as requests.
        engine = Engine(self._decoder, options.batch, state_snapshots=options.state_snapshots)
        max_queued = 2 * options.batch
        with JsonLines.of(options, self.model, options.samples) as lines:
            for line in lines.remaining():
                # Documents have empty prompts: they begin after the token that documents follow in training.
                ids = self.model.first_ids if options.documents else self.model.prompt_ids(line.prompt)
                completion = self._completion(ids, line.sampling, line.stops)
                completion.on_end = partial(self._write, lines, line, completion)
                try:
                    engine.submit(completion.request)
                except UserError as e:
                    raise UserError(f"{options.input}:{line.number + 1}: {e}") from e
                while engine.load[0] >= max_queued:
                    engine.step()
            engine.run()
        say(f"{lines.written:,} texts added to {options.output}")

    def _write(self, lines: JsonLines, line: PromptLine, completion: Completion) -> None:
        lines.write(line, completion.record(logprobs=self._options.logprobs))

    def chat(self) -> None:
        """Chats until the end of standard input."""
        options, template = self._options, ChatTemplate.of(self.model.folder)
        engine = Engine(self._decoder, 1, state_snapshots=options.state_snapshots)
        tokenizer = self.model.tokenizer
        if template is None and options.system is not None:
            raise UserError(f"--system needs a chat_template, and {self.model.folder} has none: remove --system")
        say("press Ctrl-D to end" + ("" if template else "; without a chat_template each line is continued separately"))
        first: list[Message] = [] if options.system is None else [{"role": "system", "content": options.system}]
        messages = list(first)
        numbers = itertools.count()
        while (typed := _read_line()) is not None:
            if template is None:
                ids = self.model.prompt_ids(typed)
            else:
                messages.append({"role": "user", "content": typed})
                # The template writes BOS and the marks of turns as text: `encode_marked` makes special tokens of them
                # and adds none.
                ids = tokenizer.encode_marked(template.render(messages))
            printer = TextPrinter(sys.stdout, options.show_logprobs)
            completion = self._completion(ids, with_text_seed(options.sampling, 0, next(numbers)))
            try:
                engine.submit(completion.request)
            except UserError as e:
                say(f"{e}; starting a new conversation")
                messages = list(first)
                continue
            with waiting(COMPILING) as silence:
                completion.on_piece = shown_by(printer, silence)
                engine.run()
            printer.end()
            # The text is tokenized again with the next turn; the prefix cache finds how much of it is the same.
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
            not self._decoder.is_encoder_decoder,
        )


def _read_line() -> str | None:
    """Reads the next non-empty line of standard input; returns None at its end."""
    while True:
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return None
        if line.strip():
            return line.rstrip("\n")


class TokenRate:
    """Measures tokens per second, without the first two tokens of each sequence, during which programs compile."""

    def __init__(self, sequences: int) -> None:
        # The first token of a sequence comes from prefill, the second from the first decode step.
        self._tokens, self._start, self._first = 0, 0.0, 2 * sequences

    def count(self) -> None:
        """Counts a generated token."""
        self._tokens += 1
        if self._tokens == self._first:
            self._start = time.perf_counter()

    def summary(self) -> str:
        """Formats the number of tokens and the rate."""
        after, seconds = self._tokens - self._first, time.perf_counter() - self._start
        speed = f", {after / seconds:.1f} per second after the first {self._first}" if after > 0 else ""
        return f"{self._tokens} tokens{speed}"


COMPILING = "compiling the programs of prefill and decode"


def shown_by(printer: TextPrinter, silence: Waiting) -> Callable[[Piece], None]:
    """Returns a function that prints a piece; the first one ends a silence."""

    def show(piece: Piece) -> None:
        silence.begin(None)
        printer.piece(piece)

    return show


def show_token(rate: TokenRate, completion: Completion, show: Callable[[Piece], object] | None, piece: Piece) -> None:
    """Counts a generated token, and calls `show` with its piece if it is given."""
    # Pieces of an echoed prompt come before there is any of the text.
    if completion.pieces and piece.token is not None:
        rate.count()
    if show is not None:
        show(piece)
