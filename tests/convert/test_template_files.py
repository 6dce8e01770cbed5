"""Chat templates travel with the weights, those with names of their own too."""

import json

from mtjax.config import Config
from mtjax.convert.stream import Origin, carry_files
from mtjax.data import DataPosition, SampleOrder
from mtjax.data.tokens.tokenizer import FastTokenizer
from mtjax.finetune.chat_encoding import ChatEncoder
from mtjax.finetune.chat_objective import ChatFinetuning
from mtjax.finetune.pretrained import FinetuningTokenizer
from mtjax.generate.chat import ChatTemplate, TemplateInputs
from mtjax.train.objective import RunData
from tests.chat_templates import CHATML, SINGLE, TOOL, byte_level_tokenizer


def test_templates_with_names_are_carried_along(tmp_path):
    source, copied, run = (tmp_path / name for name in ("source", "copied", "run"))
    for folder in (source, copied, run):
        folder.mkdir()
    (source / "chat_template.jinja").write_text(CHATML)
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools | length }} tools")
    (source / "tokenizer_config.json").write_text(json.dumps({"chat_template": "overridden"}))
    carry_files(Origin(Config(), "float32", source), copied)
    tokenizer = FastTokenizer(byte_level_tokenizer(), "a test")
    found = FinetuningTokenizer("hf:source", tokenizer, source, {})
    kept = ChatFinetuning(None)._tokenizer_files(found, ChatEncoder(tokenizer, ChatTemplate.of(source)), None)
    RunData(tokenizer, [], None, DataPosition(SampleOrder(0, (1,))), kept).save(run)
    for folder in (copied, run):
        template = ChatTemplate.of(folder)
        assert template is not None
        assert template.render(SINGLE, TemplateInputs([TOOL])) == "1 tools"
        assert template.render(SINGLE).startswith("<|im_start|>user")
    # A template that was named replaces all of them.
    (tmp_path / "own.jinja").write_text("own")
    kept = ChatFinetuning(None)._tokenizer_files(found, ChatEncoder(tokenizer, None), tmp_path / "own.jinja")
    assert [name for name in kept if name.endswith(".jinja")] == ["chat_template.jinja"]
