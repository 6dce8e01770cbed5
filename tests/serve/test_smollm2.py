"""A real model with the openai package, compared with transformers; opt-in, see `tests.generate.smollm2`."""

import os
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
openai = pytest.importorskip("openai")

from tests.serve.conftest import KEY, served  # noqa: E402

FOLDER = os.environ.get("SMOLLM2")
NEW = 16


@pytest.mark.skipif(not FOLDER, reason="needs weights that SMOLLM2 names: see tests/generate/smollm2.py")
def test_the_capital_of_france() -> None:
    assert FOLDER is not None
    theirs = transformers.LlamaForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    encoded = transformers.PreTrainedTokenizerFast.from_pretrained(FOLDER)
    question = [{"role": "user", "content": "What is the capital of France?"}]

    def expected(ids: list[int]) -> str:
        with torch.no_grad():
            prompt = torch.tensor([ids])
            out = theirs.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NEW, do_sample=False)
        return encoded.decode(out[0, len(ids) :], skip_special_tokens=True)

    with served(Path(FOLDER), 2) as live, openai.OpenAI(base_url=f"{live.address}/v1", api_key=KEY) as client:
        ask = {"model": live.service.name, "temperature": 0}
        text = client.completions.create(**ask, prompt="The capital of France is", max_tokens=NEW).choices[0].text
        events = client.chat.completions.create(**ask, messages=question, max_completion_tokens=NEW, stream=True)
        chat = "".join(event.choices[0].delta.content or "" for event in events)
    assert text.startswith(" Paris") and text == expected(encoded("The capital of France is").input_ids)
    prompt = encoded.apply_chat_template(question, add_generation_prompt=True, return_dict=False)
    assert "Paris" in chat and chat == expected(prompt)
