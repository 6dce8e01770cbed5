"""The Jinja environment of chat templates, with the extensions of transformers."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from typing import Any

from mtjax.errors import require

Spans = list[tuple[int, int]]
"""(start, end) character ranges of a rendered text."""


class RenderState:
    """State that is recorded while a template is rendered.

    Attributes:
      blocks: the rendered text so far.
      spans: character ranges inside `{% generation %}` blocks.
      wrote_date: whether the template asked for the current date.
    """

    def __init__(self) -> None:
        self.blocks: list[str] = []
        self.spans: Spans = []
        self.wrote_date = False


class ChatEnvironment:
    """A sandboxed environment with the filters, functions and tags of transformers' `apply_chat_template`.

    Templates are untrusted: they come with downloaded weights. Hence the sandbox.

    Attributes:
      jinja: the environment.
    """

    def __init__(self) -> None:
        """Builds the environment.

        Raises:
          UserError: jinja2 is not installed.
        """
        jinja2, sandbox = require("jinja2", "chat"), require("jinja2.sandbox", "chat")
        # As in transformers: each thread that renders has its own record.
        self._tracking: ContextVar[RenderState | None] = ContextVar("tracking", default=None)
        self.jinja = sandbox.ImmutableSandboxedEnvironment(
            # These two are transformers' settings: with Jinja's defaults the line breaks after tags would be in the
            # prompt.
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _generation_extension(self._generated)],
        )

        def raise_exception(message: str) -> None:
            # Templates call this for conversations that they refuse, such as roles that do not alternate.
            raise jinja2.TemplateError(message)

        self.jinja.filters["tojson"] = _to_json
        self.jinja.globals |= {"raise_exception": raise_exception, "strftime_now": self._strftime_now}
        self.jinja.globals |= {"dict": _PlainDict(), "namespace": _namespace_class()}

    @contextmanager
    def tracking(self) -> Iterator[RenderState]:
        """Returns a context that records the rendering inside it."""
        tracking = RenderState()
        token = self._tracking.set(tracking)
        try:
            yield tracking
        finally:
            self._tracking.reset(token)

    def _generated(self, text: str) -> str:
        tracking = self._tracking.get()
        if tracking is not None:
            # Jinja yields this block only after it was rendered: `blocks` has exactly the text before it.
            start = sum(map(len, tracking.blocks))
            tracking.spans.append((start, start + len(text)))
        return text

    def _strftime_now(self, format: str) -> str:
        tracking = self._tracking.get()
        if tracking is not None:
            tracking.wrote_date = True
        return datetime.now().strftime(format)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's filter escapes HTML and non-ASCII characters and sorts keys; models were trained without that.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _generation_extension(generated: Callable[[str], str]) -> type:
    """Builds the `{% generation %}` tag, which renders its body unchanged and passes it to `generated`."""
    nodes = require("jinja2.nodes", "chat")

    class GenerationTag(require("jinja2.ext", "chat").Extension):
        tags = {"generation"}  # noqa: RUF012 - jinja2 declares it like this

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            # A call block passes its rendered body as one string, so the range of characters is known.
            return nodes.CallBlock(self.call_method("_support"), [], [], body).set_lineno(line)

        def _support(self, caller: Callable[[], str]) -> str:
            return generated(caller())

    return GenerationTag


class _PlainDict:
    """A callable in place of the class `dict`, whose attributes would be accessible to templates."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _namespace_class() -> type:
    """Builds a `namespace` that rejects names with a leading underscore, which give access to Python internals."""
    jinja2, base = require("jinja2", "chat"), require("jinja2.utils", "chat").Namespace

    def check(name: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace has no attribute {name!r}")

    class Namespace(base):
        def __init__(*args: Any, **kwargs: Any) -> None:
            attributes = dict(*args[1:], **kwargs)
            for name in attributes:
                check(name)
            base.__init__(args[0], attributes)

        def __setitem__(self, name: str, value: Any) -> None:
            check(name)
            super().__setitem__(name, value)

    return Namespace
