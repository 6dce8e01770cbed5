"""Conversations, written out for the model as its tokenizer's chat_template says (a Jinja template)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mtjax.errors import UserError, first_line, require
from mtjax.generate.weights import read_json

TEMPLATE_FILE = "chat_template.jinja"
"""Beside a tokenizer, it goes before what tokenizer_config.json has."""
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
        self.text = text
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
    def of(cls, folder: Path, named: Path | None = None) -> "ChatTemplate | None":
        """The template beside a tokenizer, or the one in the file that is `named`; None where there is none.

        Raises:
          UserError: it can't be read.
        """
        settings = read_json(folder / "tokenizer_config.json")
        file, text = named or folder / TEMPLATE_FILE, settings.get("chat_template")
        if isinstance(text, list):
            text = next((entry.get("template") for entry in text if entry.get("name") == "default"), None)
        if named or file.is_file():
            try:
                text = file.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as e:
                raise UserError(f"the chat template {file} can't be read: {first_line(e)}") from e
        if not isinstance(text, str):
            return None
        return cls(text, special_names(settings), str(named or folder))

    def render(self, messages: Sequence[Message], *, to_be_answered: bool = True) -> str:
        """The conversation, for `Tokenizer.encode_marked`; with the words after which the model answers, if it shall.

        Raises:
          UserError: the template refuses it, say because roles do not alternate.
        """
        try:
            return self._template.render(messages=messages, add_generation_prompt=to_be_answered, **self._names)
        except (self._error, TypeError) as e:
            raise UserError(f"the chat_template of {self._source} refuses this conversation: {first_line(e)}") from e

    def _refuse(self, why: str) -> None:
        raise self._error(why)


def special_names(settings: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` and the like, which are strings or objects with a `content`."""
    named = {name: value.get("content") if isinstance(value, dict) else value for name, value in settings.items()}
    return {name: value for name, value in named.items() if name.endswith("_token") and isinstance(value, str)}
