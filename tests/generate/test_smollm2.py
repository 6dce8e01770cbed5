"""A real model compared with transformers; opt-in, see `tests.generate.smollm2`."""

import os
from pathlib import Path

import jax
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from mtjax.generate.chat import ChatTemplate  # noqa: E402
from mtjax.generate.completion import Completion  # noqa: E402
from mtjax.generate.decoder import GenerationPrograms  # noqa: E402
from mtjax.generate.engine import Engine  # noqa: E402
from mtjax.generate.request import Sampling  # noqa: E402
from mtjax.generate.weights import load_model  # noqa: E402

FOLDER = os.environ.get("SMOLLM2")
NEW = 24


@pytest.mark.skipif(not FOLDER, reason="needs weights that SMOLLM2 names: see tests/generate/smollm2.py")
def test_smollm2_writes_and_answers_as_with_transformers() -> None:
    assert FOLDER is not None and len(jax.devices()) >= 1
    theirs = transformers.LlamaForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    encoded = transformers.PreTrainedTokenizerFast.from_pretrained(FOLDER)
    loaded = load_model(f"hf:{FOLDER}", "1x1")
    template = ChatTemplate.of(Path(FOLDER))
    assert template is not None
    question = [{"role": "user", "content": "What is the capital of France?"}]
    ours_chat = loaded.tokenizer.encode_marked(template.render(question))
    theirs_chat = encoded.apply_chat_template(question, add_generation_prompt=True, return_dict=False)
    assert ours_chat == theirs_chat
    prompts = [loaded.tokenizer.encode_prompt("The capital of France is"), ours_chat]
    assert prompts[0] == encoded("The capital of France is").input_ids
    engine, texts = Engine(GenerationPrograms(loaded.sharded_model, loaded.parameters), 2), []
    for prompt in prompts:
        text = Completion(loaded.tokenizer, tuple(prompt), Sampling(NEW), loaded.stop_ids)
        engine.submit(text.request)
        texts.append(text)
    engine.run()
    assert texts[0].text.startswith(" Paris") and "Paris" in texts[1].text
    for prompt, text in zip(prompts, texts, strict=True):
        ids = torch.tensor([prompt])
        with torch.no_grad():
            out = theirs.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)
        assert text.text == encoded.decode(out[0, len(prompt) :], skip_special_tokens=True)
