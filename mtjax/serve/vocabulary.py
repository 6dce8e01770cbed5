"""vLLM's endpoints `/tokenize`, `/detokenize` and `/tokenizer_info`, which lm-eval uses."""

from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from mtjax.errors import shortened
from mtjax.serve.api_error import ApiError, json_response
from mtjax.serve.chats import INPUTS, read_inputs, read_messages
from mtjax.serve.fields import Fields, invalid_value
from mtjax.serve.service import Service


async def tokenize(service: Service, request: HttpRequest) -> Response:
    """Encodes `prompt`, or `messages` rendered with the chat template.

    With `add_special_tokens` a prompt is encoded as for a completion. Without, nothing is added, and names of special
    tokens are encoded as these tokens, by which clients find the id of the end-of-text token.

    Raises:
      ApiError: the request is invalid.
    """
    fields = Fields(await service.read_object(request))
    service.check_name(fields.take("model"))
    prompt, messages = fields.text("prompt"), fields.take("messages")
    with_special = fields.take("add_special_tokens")
    if not isinstance(with_special, bool | None):
        raise invalid_value("add_special_tokens", shortened(with_special), "true or false")
    with_texts = fields.boolean("return_token_strs")
    template, inputs = service.tokens.template, None
    if messages is not None:
        inputs = read_inputs(fields, template)
    else:
        for name in INPUTS:
            fields.reject_unsupported(name, "the chat template renders messages only", [], {})
    fields.reject_unknown()
    if (prompt is None) == (messages is None):
        raise ApiError(400, "send either prompt or messages", "prompt")
    if messages is not None:
        ids = await service.tokens.encode_chat(read_messages(messages, template), inputs)
    else:
        encode = service.tokens.encode_marked if with_special is False else service.tokens.encode_prompt
        ids = await encode(prompt or "")
    texts = {"token_strs": [service.tokens.decoder.token(index) for index in ids]} if with_texts else {}
    return json_response({"count": len(ids), "max_model_len": service.host.max_context, "tokens": ids, **texts})


async def detokenize(service: Service, request: HttpRequest) -> Response:
    """Decodes `tokens`.

    Raises:
      ApiError: the request is invalid.
    """
    fields = Fields(await service.read_object(request))
    service.check_name(fields.take("model"))
    ids = fields.take("tokens")
    fields.reject_unknown()
    size = service.tokens.decoder.vocab_size
    if not isinstance(ids, list) or not all(type(index) is int and 0 <= index < size for index in ids):
        raise invalid_value("tokens", shortened(ids), f"a list of token ids from 0 to {size - 1}")
    return json_response({"prompt": await service.tokens.decode(ids)})


async def tokenizer_info(service: Service, request: HttpRequest) -> Response:
    """Returns `tokenizer_config.json`, with sizes and the end-of-document token."""
    decoder = service.tokens.decoder
    known: dict[str, Any] = {
        "eos_token": decoder.token(decoder.eod),
        "vocab_size": decoder.vocab_size,
        "model_max_length": service.host.max_context,
    }
    # The tokenizer's own settings win over what is known of its ids.
    return json_response({**known, **service.tokens.settings, "max_model_len": service.host.max_context})
