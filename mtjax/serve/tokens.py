"""The server's tokenizer and chat template, in a separate thread, and the text of single tokens."""

import asyncio
import pickle
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from mtjax.data.tokens.pretrained_settings import CONFIG, read_object
from mtjax.data.tokens.tokenizer import Tokenizer
from mtjax.errors import UserError
from mtjax.generate.chat import ChatTemplate, Message, TemplateInputs
from mtjax.generate.text import BROKEN
from mtjax.serve.api_error import ApiError

T = TypeVar("T")


class Tokens:
    """Encodes and decodes text.

    Encoding temporarily changes a tokenizer's settings, so it happens in a single thread, with a separate tokenizer.
    Decoding changes nothing: the engine's thread and others share `decoder`.

    Args:
      tokenizer: the model's tokenizer.
      folder: folder of its files.
      first: ids to put before a text: the BOS token, or the end-of-document token if there is none.
      prompt_ids: encodes a prompt with that tokenizer; if None, `Tokenizer.encode_prompt`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        folder: Path,
        first: list[int],
        prompt_ids: Callable[[str], list[int]] | None = None,
    ) -> None:
        # A copy for decoding, which other threads may use while this one encodes.
        self.decoder: Tokenizer = pickle.loads(pickle.dumps(tokenizer))
        # Compiled once: a template with a syntax error ends the command before it serves.
        self.template = ChatTemplate.of(folder)
        self.settings: Mapping[str, Any] = read_object(folder / CONFIG)
        self.first = first
        self._tokenizer, self._prompt_ids = tokenizer, prompt_ids or tokenizer.encode_prompt
        # Long prompts take a while to encode: in the event loop, all streams would wait.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="encoding")
        # A token that precedes others in `text_of`.
        self._before = tokenizer.encode("a")[-1:]
        self._texts: dict[int, str] = {}

    async def encode_prompt(self, text: str) -> list[int]:
        """Encodes a prompt in the form that the model was trained on."""
        return await self._in_thread(lambda: self._prompt_ids(text))

    async def encode(self, text: str) -> list[int]:
        """Encodes a text without adding special tokens."""
        return await self._in_thread(lambda: self._tokenizer.encode(text))

    async def encode_marked(self, text: str) -> list[int]:
        """Encodes a text in which names of special tokens are encoded as these tokens."""
        return await self._in_thread(lambda: self._tokenizer.encode_marked(text))

    async def encode_chat(self, messages: Sequence[Message], inputs: TemplateInputs | None = None) -> list[int]:
        """Encodes a conversation, up to the generation prompt.

        Raises:
          ApiError: there is no template, or it rejects the conversation.
        """
        template = self.template
        if template is None:
            raise ApiError(400, "this model has no chat_template: use /v1/completions", "messages")
        try:
            return await self._in_thread(lambda: self._tokenizer.encode_marked(template.render(messages, inputs)))
        except UserError as e:
            raise ApiError(400, str(e), "messages") from e

    async def decode(self, ids: Sequence[int]) -> str:
        """Decodes ids."""
        return await self._in_thread(lambda: self.decoder.decode(ids))

    def text_of(self, token: int) -> str:
        """Returns the text of a token inside a text, with its leading space."""
        if token not in self._texts:
            # Decoded after another token: some tokenizers drop the space of the first token.
            before = self.decoder.decode(self._before)
            self._texts[token] = self.decoder.decode([*self._before, token])[len(before) :]
        return self._texts[token]

    def bytes_of(self, token: int) -> list[int] | None:
        """Returns a token's bytes in UTF-8; None if it is part of a character."""
        text = self.text_of(token)
        return None if BROKEN in text else list(text.encode())

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
