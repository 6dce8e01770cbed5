"""Text for text: a prompt's continuation as the engine writes it."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from mtjax.data.tokens.tokenizer import Tokenizer
from mtjax.generate.request import FinishReason, Request, Sampling, Token
from mtjax.generate.text import TextWriter

DEFAULT = Sampling()


class Piece(NamedTuple):
    """A token and the text that it adds; told once no stop string can begin in that text."""

    text: str
    """"" for a token that leaves a character incomplete, or is a part of a stop string."""
    token: Token | None
    """None for an incomplete character at the end of the text."""


@dataclass(eq=False)
class Completion:
    """A prompt and its continuation.

    Attributes:
      request: for `Engine.submit`.
      prompt_pieces: of the prompt, if it is to be told.
      pieces: of the continuation so far.
      ended: why it ended; None before.
    """

    tokenizer: Tokenizer
    prompt: tuple[int, ...]
    sampling: Sampling = DEFAULT
    stop_ids: frozenset[int] = frozenset()
    stops: tuple[str, ...] = ()
    logprobs: bool = False
    echo: bool = False
    on_piece: Callable[[Piece], None] = field(default=lambda piece: None, repr=False)
    """Told each piece as it comes, the prompt's first, in the engine's thread."""
    on_end: Callable[[], None] = field(default=lambda: None, repr=False)
    """Told that it has ended."""

    def __post_init__(self) -> None:
        self.prompt_pieces: list[Piece] = []
        self.pieces: list[Piece] = []
        self.ended: FinishReason | None = None
        self._writer = TextWriter(self.tokenizer, self.prompt, self.stops)
        self._waiting: deque[Piece] = deque()
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
        """The continuation so far, without stop strings."""
        return self._writer.text

    def _on_prompt_tokens(self, tokens: list[Token]) -> None:
        writer = TextWriter(self.tokenizer)
        for token in tokens:
            self._add(self.prompt_pieces, Piece(writer.add(token.id), token))
        self._add(self.prompt_pieces, Piece(writer.end(), None))

    def _on_token(self, token: Token) -> bool:
        self._writer.add(token.id)
        self._waiting.append(Piece(self._writer.new, token))
        self._emit_final()
        return self._writer.is_stopped

    def _on_request_end(self, why: FinishReason) -> None:
        self.ended = why
        self._writer.end()
        self._emit_final()
        self._add(self.pieces, Piece(self.text[self._emitted :], None))
        self.on_end()

    def _emit_final(self) -> None:
        """Tells the tokens whose text is certain, each with its own text; what a stop string takes away is cut off."""
        while self._waiting:
            text, token = self._waiting[0]
            certain = self.text[self._emitted : self._emitted + len(text)]
            if len(certain) < len(text) and not self._writer.is_stopped:
                return
            self._waiting.popleft()
            self._emitted += len(certain)
            self._add(self.pieces, Piece(certain, token))

    def _add(self, pieces: list[Piece], piece: Piece) -> None:
        if piece.token is None and not piece.text:
            return
        pieces.append(piece)
        self.on_piece(piece)
