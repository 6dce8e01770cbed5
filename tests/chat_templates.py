"""Chat templates of the kinds that models come with, and conversations for them."""

from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.convert.hf_folders import small_tokenizer

HEADER, END = "<|im_start|>", "<|im_end|>"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}" + PROMPT
CALLS = (
    "{% for call in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}"
)
TEMPLATES = {
    "chatml": CHATML,
    # Tools, a date, and a blank default where nobody gives one, as in Llama 3.
    "llama3": (
        "{{- bos_token }}\n"
        "{%- if not date_string is defined %}\n"
        "    {%- if strftime_now is defined %}{%- set date_string = strftime_now('%d %b %Y') %}"
        "{%- else %}{%- set date_string = '26 Jul 2024' %}{%- endif %}\n"
        "{%- endif %}\n"
        "{%- if messages[0]['role'] == 'system' %}\n"
        "    {%- set system = messages[0]['content']|trim %}\n"
        "    {%- set messages = messages[1:] %}\n"
        "{%- else %}\n    {%- set system = '' %}\n{%- endif %}\n"
        "{{- '<|im_start|>system\n' }}\n"
        "{%- if tools is not none %}{{- 'Environment: ipython\n' }}{%- endif %}\n"
        "{{- 'Today Date: ' + date_string + '\n\n' }}\n"
        "{%- if tools is not none %}\n"
        "    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- '\n\n' }}{%- endfor %}\n"
        "{%- endif %}\n"
        "{{- system + '<|im_end|>' }}\n"
        "{%- for m in messages %}\n"
        "    {%- if m.role == 'tool' %}{{- '<|im_start|>ipython\n' + (m.content | tojson) + '<|im_end|>' }}\n"
        "    {%- elif 'tool_calls' in m %}\n"
        "        {%- if m.tool_calls|length != 1 %}{{- raise_exception('one tool call at once!') }}{%- endif %}\n"
        '        {{- \'<|im_start|>assistant\n{"name": "\' + m.tool_calls[0].function.name + \'", "parameters": \' }}\n'
        "        {{- m.tool_calls[0].function.arguments | tojson }}\n"
        "        {{- '}<|im_end|>' }}\n"
        "    {%- else %}{{- '<|im_start|>' + m.role + '\n' + m.content | trim + '<|im_end|>' }}{%- endif %}\n"
        "{%- endfor %}\n"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
    ),
    # Thoughts are kept in the last turn only, and `enable_thinking` false writes an empty one into the prompt.
    "qwen3": (
        "{%- if tools %}<|im_start|>system\n# Tools\n{%- for tool in tools %}\n{{ tool | tojson }}{%- endfor %}"
        "<|im_end|>\n{%- endif %}"
        "{%- set ns = namespace(last=messages|length - 1) %}"
        "{%- for m in messages[::-1] %}{%- set index = (messages|length - 1) - loop.index0 %}"
        "{%- if m.role == 'user' %}{%- set ns.last = index %}{%- break %}{%- endif %}{%- endfor %}"
        "{%- for m in messages %}{%- set content = m.content if m.content is string else '' %}"
        "{%- if m.role == 'assistant' %}{%- set thought = '' %}"
        "{%- if m.reasoning_content is string %}{%- set thought = m.reasoning_content %}"
        "{%- elif '</think>' in content %}"
        "{%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
        "{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
        "{{- '<|im_start|>assistant\n' }}"
        "{%- if loop.index0 > ns.last and (loop.last or thought) %}"
        "{{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}{%- endif %}{{- content }}"
        + CALLS
        + "{{- '<|im_end|>\n' }}"
        "{%- elif m.role == 'tool' %}"
        "{{- '<|im_start|>user\n<tool_response>\n' + content + '\n</tool_response><|im_end|>\n' }}"
        "{%- else %}{{- '<|im_start|>' + m.role + '\n' + content + '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"
        "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}"
        "{%- endif %}"
    ),
    # The end of text instead of a generation prompt.
    "phi3": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% else %}{{ eos_token }}{% endif %}"
    ),
    # Roles alternate; the system's message stands in the last turn, if that is the user's.
    "mistral": (
        "{%- if messages[0].role == 'system' %}{%- set system = messages[0].content %}{%- set rest = messages[1:] %}"
        "{%- else %}{%- set rest = messages %}{%- endif %}{{- bos_token }}"
        "{%- for m in rest %}"
        "{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{- raise_exception('After the optional system message, roles must alternate user/assistant') }}{%- endif %}"
        "{%- if m.role == 'user' %}"
        "{%- if loop.last and system is defined %}{{- '[INST] ' + system + '\n\n' + m.content + ' [/INST]' }}"
        "{%- else %}{{- '[INST] ' + m.content + ' [/INST]' }}{%- endif %}"
        "{%- else %}{{- ' ' + m.content|trim + eos_token }}{%- endif %}{%- endfor %}"
    ),
    # The generation prompt begins a thought, and the template drops thoughts.
    "r1": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
    ),
    "only the last answer ends": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% if m.role == 'assistant' and loop.last %}{{ eos_token }}{% else %}<|im_end|>{% endif %}\n{% endfor %}"
        + PROMPT
    ),
    "no end": (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    ),
    "counts the messages": "<|im_start|>system\n{{ messages | length }}<|im_end|>\n" + CHATML,
    "generation": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content }}" + CALLS + "<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n"
        "{% endfor %}" + PROMPT
    ),
    "generation without the end": (
        "{% for m in messages -%}\n    <|im_start|>{{ m.role + '\n' }}\n"
        "    {%- if m.role == 'assistant' -%}\n        {%- generation -%} {{ m.content }} {%- endgeneration -%}\n"
        "    {%- else -%} {{ m.content }} {%- endif -%} <|im_end|>\n{% endfor %}" + PROMPT
    ),
    "everything": (
        "{{ messages | tojson }}{{ tools | tojson }}{{ documents | tojson(indent=2) }}|{{ bos_token }}|{{ eos_token }}|"
        "{{ pad_token }}|{{ unk_token }}|{{ image_token }}|{{ dict(a=1) }}{{ namespace(x=2).x }}\n"
        "    {% if true %}\n  {{ '<&\">' }}\n    {% endif %}\n"
        "{% set messages = [{'role': 'system', 'content': 'é'}] + messages %}{{ messages | length }}{{ more }}"
    ),
}


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


TOOL = {
    "type": "function",
    "function": {
        "name": "compare",
        "description": "says whether a < b & c",
        "parameters": {"type": "object", "properties": {"z": {"type": "string"}, "a": {"type": "string"}}},
    },
}
CALL = {"type": "function", "function": {"name": "compare", "arguments": {"z": "3 < 4 && it's", "a": "Zürich"}}}
SINGLE = [user("the cat?"), assistant("the dog")]
TWO = [user("the cat?"), assistant("the dog"), user("and"), assistant("on the road")]
WITH_SYSTEM = [{"role": "system", "content": "the end"}, *TWO]
THOUGHTS = [
    user("the cat?"),
    assistant("<think>\nthe road\n</think>\n\nthe dog"),
    user("and"),
    assistant("<think>\nthe end\n</think>\n\non"),
]
REASONING = [user("the cat?"), assistant("the dog", reasoning_content="the road")]
WITH_CALL = [
    user("is 3 < 4?"),
    assistant(None, tool_calls=[CALL], refusal=None),
    {"role": "tool", "name": "compare", "tool_call_id": "1", "content": "true"},
    assistant("it is"),
]


def byte_level_tokenizer() -> Tokenizer:
    """A small byte-level tokenizer with the special tokens of the templates."""
    tokenizer = small_tokenizer()
    tokenizer.add_special_tokens([HEADER, END, "<s>", "</s>"])
    return tokenizer


def metaspace_tokenizer() -> Tokenizer:
    """A small tokenizer that marks beginnings of words, like Llama 2's, and puts one before a text."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    texts = [
        "the cat and the dog went on the road to the end",
        'is it: a b c ? [INST] [/INST] \n < > / : , { } _ " 0123456789 assistant user think tool call',
    ]
    trainer = trainers.BpeTrainer(
        vocab_size=150, special_tokens=["<unk>", "<s>", "</s>", HEADER, END], show_progress=False
    )
    tokenizer.train_from_iterator(texts * 4, trainer)
    return tokenizer
