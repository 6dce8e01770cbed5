"""Tokenizer and chat template behind the server: in one thread, and each token's own text."""

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
    """Strings and ids.

    Encoding changes a tokenizer's settings for a moment, so it happens in one thread, with a tokenizer of its own.
    Decoding changes nothing: the engine's thread and others share `decoder`.

    Args:
      tokenizer: the model's.
      folder: of its files.
      first: ids that stand before a text: the BOS of tokenizer or model, or the end of a document where they have none.
      prompt_ids: how a prompt becomes ids, with that tokenizer; by what it adds to texts when None.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        folder: Path,
        first: list[int],
        prompt_ids: Callable[[str], list[int]] | None = None,
    ) -> None:
        self.decoder: Tokenizer = pickle.loads(pickle.dumps(tokenizer))
        self.template = ChatTemplate.of(folder)
        self.settings: Mapping[str, Any] = read_object(folder / CONFIG)
        self.first = first
        self._tokenizer, self._prompt_ids = tokenizer, prompt_ids or tokenizer.encode_prompt
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="encoding")
        self._before = tokenizer.encode("a")[-1:]
        self._texts: dict[int, str] = {}

    async def encode_prompt(self, text: str) -> list[int]:
        """Ids of a text to be continued or answered, as the model is given it."""
        return await self._in_thread(lambda: self._prompt_ids(text))

    async def encode(self, text: str) -> list[int]:
        """Ids of a text, nothing added."""
        return await self._in_thread(lambda: self._tokenizer.encode(text))

    async def encode_marked(self, text: str) -> list[int]:
        """The same, where names of special tokens stand for them."""
        return await self._in_thread(lambda: self._tokenizer.encode_marked(text))

    async def encode_chat(self, messages: Sequence[Message], inputs: TemplateInputs | None = None) -> list[int]:
        """Ids of a conversation, up to where the model answers.

        Raises:
          Refused: there is no template, or it refuses the conversation.
        """
        template = self.template
        if template is None:
            raise ApiError(400, "this model has no chat_template: ask /v1/completions", "messages")
        try:
            return await self._in_thread(lambda: self._tokenizer.encode_marked(template.render(messages, inputs)))
        except UserError as e:
            raise ApiError(400, str(e), "messages") from e

    async def decode(self, ids: Sequence[int]) -> str:
        """Text of ids."""
        return await self._in_thread(lambda: self.decoder.decode(ids))

    def text_of(self, token: int) -> str:
        """One token's text, as it reads behind others: with the space that it begins with."""
        if token not in self._texts:
            before = self.decoder.decode(self._before)
            self._texts[token] = self.decoder.decode([*self._before, token])[len(before) :]
        return self._texts[token]

    def bytes_of(self, token: int) -> list[int] | None:
        """Its bytes in UTF-8; None where it is a part of a character."""
        text = self.text_of(token)
        return None if BROKEN in text else list(text.encode())

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
