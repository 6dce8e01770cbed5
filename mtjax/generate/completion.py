"""Detokenized text of a request, with stop sequences, as the engine generates it."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mtjax.data.tokens.tokenizer import Tokenizer
from mtjax.generate.request import FinishReason, Request, Sampling, Token
from mtjax.generate.text import TextWriter

DEFAULT = Sampling()


class Piece(NamedTuple):
    """A token and the text that it adds; emitted as soon as no stop sequence can begin in that text."""

    text: str
    """"" for a token that leaves a character incomplete, or is part of a stop sequence."""
    token: Token | None
    """None for an incomplete character at the end of the text."""


@dataclass(eq=False)
class Completion:
    """A prompt and the text that continues it.

    Attributes:
      request: the request for `Engine.submit`.
      prompt_pieces: pieces of the prompt, if it is echoed.
      pieces: pieces of the generated text so far.
      ended: the finish reason; None until then.
    """

    tokenizer: Tokenizer
    prompt: tuple[int, ...]
    sampling: Sampling = DEFAULT
    stop_ids: frozenset[int] = frozenset()
    stops: tuple[str, ...] = ()
    logprobs: bool = False
    echo: bool = False
    continues: bool = True
    """Whether the text continues the prompt: not in an encoder-decoder."""
    on_piece: Callable[[Piece], None] = field(default=lambda piece: None, repr=False)
    """Called in the engine's thread with each piece, those of an echoed prompt first."""
    on_end: Callable[[], None] = field(default=lambda: None, repr=False)
    """Called in the engine's thread after the last piece."""

    def __post_init__(self) -> None:
        self.prompt_pieces: list[Piece] = []
        self.pieces: list[Piece] = []
        self.ended: FinishReason | None = None
        # After a prompt, the first word of an encoder-decoder's text would begin with a space.
        self._writer = TextWriter(self.tokenizer, self.prompt if self.continues else (), self.stops)
        self._held_back: deque[Piece] = deque()
        self._emitted = 0
        self.request = Request(
            self.prompt,
            self.sampling,
            self.stop_ids,
            self.logprobs,
            self.echo,
            on_prompt=self._on_prompt_tokens,
            on_token=self._on_token,
            on_end=self._on_request_end,
        )

    @property
    def text(self) -> str:
        """The generated text so far, without stop sequences."""
        return self._writer.text

    def record(self, *, logprobs: bool) -> dict[str, Any]:
        """Returns the text's fields in an output file."""
        record: dict[str, Any] = {"text": self.text, "finish_reason": self.ended}
        if logprobs:
            tokens = [(piece.text, piece.token) for piece in self.pieces if piece.token is not None]
            record["logprobs"] = [{"text": text, "id": t.id, "logprob": t.logprob} for text, t in tokens]
        return record

    def _on_prompt_tokens(self, tokens: list[Token]) -> None:
        # A writer without stop sequences: those in a prompt do not end the text.
        writer = TextWriter(self.tokenizer)
        for token in tokens:
            self._add(self.prompt_pieces, Piece(writer.add(token.id), token))
        self._add(self.prompt_pieces, Piece(writer.end(), None))

    def _on_token(self, token: Token) -> bool:
        self._writer.add(token.id)
        # The characters of this token may become final only with later ones, which may complete a stop sequence.
        self._held_back.append(Piece(self._writer.new, token))
        self._emit_final()
        return self._writer.is_stopped

    def _on_request_end(self, reason: FinishReason) -> None:
        self.ended = reason
        self._writer.end()
        self._emit_final()
        self._add(self.pieces, Piece(self.text[self._emitted :], None))
        self.on_end()

    def _emit_final(self) -> None:
        """Emits the tokens whose text is final, each with the text that it adds, truncated at a stop sequence."""
        while self._held_back:
            text, token = self._held_back[0]
            final = self.text[self._emitted : self._emitted + len(text)]
            # Once it is stopped, nothing more becomes final: the last tokens are emitted with what is left of their
            # text.
            if len(final) < len(text) and not self._writer.is_stopped:
                return
            self._held_back.popleft()
            self._emitted += len(final)
            self._add(self.pieces, Piece(final, token))

    def _add(self, pieces: list[Piece], piece: Piece) -> None:
        # The piece after the last token has text only where the end left characters to decode.
        if piece.token is None and not piece.text:
            return
        pieces.append(piece)
        self.on_piece(piece)
