"""Conversations, written out for the model as its tokenizer's chat_template says (a Jinja template)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mtjax.errors import UserError, first_line, require
from mtjax.generate.weights import read_json

Message = Mapping[str, str]
"""`role` and `content`."""


class ChatTemplate:
    """How a model was taught to read conversations; by the folder of its tokenizer.

    Templates run in Jinja's sandbox: they come with weights that somebody else made.
    """

    def __init__(self, text: str, names: Mapping[str, str], source: str) -> None:
        """Compiles a template.

        Args:
          text: the template.
          names: what it may ask for besides the messages, such as `bos_token`.
          source: for messages.

        Raises:
          UserError: it is not a template, or jinja2 is not installed.
        """
        self._error, self._names, self._source = require("jinja2", "chat").TemplateError, names, source
        # As transformers' apply_chat_template has it, for which templates are written.
        environment = require("jinja2.sandbox", "chat").ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = self._refuse
        try:
            self._template = environment.from_string(text)
        except self._error as e:
            raise UserError(f"the chat_template of {source} can't be read: {first_line(e)}") from e

    @classmethod
    def of(cls, folder: Path) -> "ChatTemplate | None":
        """The template beside a tokenizer; None where there is none.

        Raises:
          UserError: it can't be read.
        """
        settings = read_json(folder / "tokenizer_config.json")
        file, text = folder / "chat_template.jinja", settings.get("chat_template")
        if isinstance(text, list):
            text = next((entry.get("template") for entry in text if entry.get("name") == "default"), None)
        if file.is_file():
            text = file.read_text(encoding="utf-8")
        if not isinstance(text, str):
            return None
        return cls(text, _special_names(settings), str(folder))

    def render(self, messages: Sequence[Message]) -> str:
        """The conversation up to where the model answers, for `Tokenizer.encode_marked`.

        Raises:
          UserError: the template refuses it, say because roles do not alternate.
        """
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, **self._names)
        except (self._error, TypeError) as e:
            raise UserError(f"the chat_template of {self._source} refuses this conversation: {first_line(e)}") from e

    def _refuse(self, why: str) -> None:
        raise self._error(why)


def _special_names(settings: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` and the like, which are strings or objects with a `content`."""
    named = {name: value.get("content") if isinstance(value, dict) else value for name, value in settings.items()}
    return {name: value for name, value in named.items() if name.endswith("_token") and isinstance(value, str)}
