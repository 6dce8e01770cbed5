"""Chat templates: render conversations to text, equivalent to transformers' `apply_chat_template`."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mtjax.data.tokens.pretrained_settings import CONFIG, read_object, special_names_in
from mtjax.data.tokens.template_files import DEFAULT, template_files
from mtjax.errors import UserError, first_line, lone_surrogate, nearest, require, shortened
from mtjax.generate.chat_environment import ChatEnvironment, Spans

TOOL_USE = "tool_use"
"""Name of the template for conversations with tools, if a tokenizer has several templates."""
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys of a message that clients and data sets use for the assistant's reasoning."""
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""The tag with which a template marks the assistant's text."""
Message = Mapping[str, Any]
"""`role`, `content`, and other keys that the template reads, such as `tool_calls`."""


@dataclass(frozen=True)
class TemplateInputs:
    """The inputs of a template in addition to the messages.

    Attributes:
      tools: JSON schemas; None if none are given.
      documents: documents for retrieval-augmented generation; None if none are given.
      variables: `chat_template_kwargs`, such as `enable_thinking`.
    """

    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "TemplateInputs":
        """Reads `tools`, `documents` and `chat_template_kwargs`; null counts as not given.

        Raises:
          UserError: a value has the wrong type, or a variable has the name of a template argument.
        """
        lists = {name: _objects(name, values.get(name)) for name in ("tools", "documents")}
        variables = values.get("chat_template_kwargs")
        variables = {} if variables is None else variables
        if not isinstance(variables, dict):
            raise UserError(f"chat_template_kwargs is {shortened(variables)}, and must be an object")
        for name in ("messages", "tools", "documents", "add_generation_prompt"):
            if name in variables:
                raise UserError(f"chat_template_kwargs has {name}, which can't be set there: remove it")
        return cls(**lists, variables=variables)


@dataclass(frozen=True)
class Rendered:
    """A rendered conversation.

    Attributes:
      text: the input of `Tokenizer.encode_marked`.
      generated: character ranges inside `{% generation %}` blocks.
      wrote_date: whether the template wrote the current date.
    """

    text: str
    generated: Spans
    wrote_date: bool


class ChatTemplate:
    """The chat templates of a tokenizer: usually one, sometimes a second one for conversations with tools."""

    def __init__(self, text: str | Mapping[str, str], names: Mapping[str, str], source: str) -> None:
        """Compiles the templates.

        Args:
          text: a template, or templates by name.
          names: special tokens that templates may use, such as `bos_token`.
          source: file or folder of the template, for error messages.

        Raises:
          UserError: a template has a syntax error, or jinja2 is not installed.
        """
        self._names, self._source = names, source
        self._environment = ChatEnvironment()
        self._templates = {
            name: self._compile(each) for name, each in ({DEFAULT: text} if isinstance(text, str) else text).items()
        }

    @classmethod
    def of(cls, folder: Path, named: Path | None = None) -> "ChatTemplate | None":
        """Loads the template of a tokenizer's folder, or of the file `named`; returns None if there is none.

        Raises:
          UserError: the template can't be read.
        """
        files = {DEFAULT: named} if named else template_files(folder)
        # `named` replaces all templates of the folder, so it is also used with tools.
        texts: Any = {name: _read(path) for name, path in files.items()}
        # A template file takes precedence over `tokenizer_config.json`, as in transformers.
        texts = texts or read_object(folder / CONFIG).get("chat_template")
        # Older configs have a list of {name, template}.
        if isinstance(texts, list):
            texts = {entry.get("name"): entry.get("template") for entry in texts if isinstance(entry, dict)}
        if not texts:
            return None
        if not all(isinstance(text, str) for text in (texts.values() if isinstance(texts, dict) else [texts])):
            raise UserError(f"the chat_template in {folder / CONFIG} is not text")
        return cls(texts, special_names_in(folder), str(named or folder))

    def render(
        self, messages: Sequence[Message], inputs: TemplateInputs | None = None, *, to_be_answered: bool = True
    ) -> str:
        """Renders a conversation; if it is `to_be_answered`, the text ends with the generation prompt.

        Raises:
          UserError: the template raises an error, for example because roles do not alternate.
        """
        return self.render_tracked(messages, inputs, to_be_answered=to_be_answered).text

    def render_tracked(
        self, messages: Sequence[Message], inputs: TemplateInputs | None = None, *, to_be_answered: bool = True
    ) -> Rendered:
        """Renders a conversation as `render` does, and records the ranges of `{% generation %}` blocks.

        Raises:
          UserError: the template raises an error.
        """
        inputs = inputs or TemplateInputs()
        values = {
            "messages": [_message(message) for message in messages],
            "tools": inputs.tools,
            "documents": inputs.documents,
            "add_generation_prompt": to_be_answered,
        }
        template = self._chosen(inputs).template
        try:
            with self._environment.tracking() as tracking:
                # Not `render`: the blocks so far tell at which character a `{% generation %}` block starts. Later
                # values win: variables replace special tokens, as in transformers, but not messages or tools.
                for block in template.generate(**{**self._names, **inputs.variables, **values}):
                    tracking.blocks.append(block)
        except Exception as e:  # a template is a program, and can fail in any way
            raise UserError(f"the chat_template of {self._source} rejects this conversation: {first_line(e)}") from e
        text = "".join(tracking.blocks)
        if lone_surrogate(text):
            raise UserError(
                "the conversation has half of a surrogate pair, which is not a character: encode it as UTF-8"
            )
        return Rendered(text, tracking.spans, tracking.wrote_date)

    def has_generation(self, inputs: TemplateInputs) -> bool:
        """Returns whether the template marks the assistant's text with `{% generation %}` blocks."""
        return self._chosen(inputs).has_generation

    def reads_key(self, key: str) -> bool:
        """Returns whether any of the templates uses a key of messages."""
        return any(key in template.keys for template in self._templates.values())

    def check(self, inputs: TemplateInputs) -> None:
        """Checks that the template uses all inputs.

        Raises:
          UserError: the template would ignore tools, documents or a variable.
        """
        variables = self._chosen(inputs).variables
        given = {"tools": inputs.tools, "documents": inputs.documents}
        for name in (*(name for name, value in given.items() if value), *inputs.variables):
            if name not in variables and name not in self._names:
                known = "" if name in given else nearest(name, variables)
                raise UserError(f"the chat_template of {self._source} does not use {name}{known}: remove it")

    def _chosen(self, inputs: TemplateInputs) -> "_Compiled":
        # As in transformers, an empty list of tools selects this template too.
        name = TOOL_USE if inputs.tools is not None and TOOL_USE in self._templates else DEFAULT
        if name not in self._templates:
            names = ", ".join(sorted(self._templates))
            raise UserError(f"{self._source} has no chat template named {DEFAULT}, only {names}")
        return self._templates[name]

    def _compile(self, text: str) -> "_Compiled":
        jinja, nodes = self._environment.jinja, require("jinja2.nodes", "chat")
        try:
            parsed = jinja.parse(text)
            variables = {node.name for node in parsed.find_all(nodes.Name) if node.ctx == "load"}
            # Templates write message.key, message["key"], "key" in message or message.get("key"): any string constant
            # may be a key.
            keys = {node.attr for node in parsed.find_all(nodes.Getattr)}
            keys |= {node.value for node in parsed.find_all(nodes.Const) if isinstance(node.value, str)}
            has_generation = GENERATION.search(text) is not None
            return _Compiled(jinja.from_string(text), frozenset(variables), frozenset(keys), has_generation)
        except require("jinja2", "chat").TemplateError as e:
            raise UserError(f"the chat_template of {self._source} can't be read: {first_line(e)}") from e


@dataclass(frozen=True)
class _Compiled:
    """A compiled template, the variables and keys that it uses, and whether it has `{% generation %}` blocks."""

    template: Any
    variables: frozenset[str]
    keys: frozenset[str]
    has_generation: bool


def _message(message: Message) -> dict[str, Any]:
    """Prepares a message as transformers does: drops nulls, and repeats the reasoning under both common names."""
    given = {key: value for key, value in message.items() if value is not None}
    # Templates of different model families read different keys for the reasoning.
    reasoning = next((given[key] for key in REASONING if key in given), None)
    return given if reasoning is None else {"thinking": reasoning, **given, "reasoning_content": reasoning}


def _objects(name: str, value: Any) -> list[dict[str, Any]] | None:
    """Parses a list of objects, or its JSON text, which data sets use if the schemas differ between rows."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as e:
            raise UserError(f"{name} is {shortened(value)}, and must be a list of objects") from e
    if value is not None and not (isinstance(value, list) and all(isinstance(each, dict) for each in value)):
        raise UserError(f"{name} is {shortened(value)}, and must be a list of objects")
    return value


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"the chat template {path} can't be read: {first_line(e)}") from e
