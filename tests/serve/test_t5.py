"""Serving a T5: prompts are encoded as in training, and take no space from generated texts."""

import pytest

pytest.importorskip("torch", reason="needs the extra parity: pip install '.[parity]'")
pytest.importorskip("transformers", reason="needs the extra parity: pip install '.[parity]'")

import json

import torch
from tokenizers import AddedToken

from tests.convert.hf_folders import small_tokenizer
from tests.generate.test_parity import t5
from tests.serve.asking import ask
from tests.serve.conftest import served

PROMPT, NEW = "the cat and the dog went on to the end of the <extra_id_0> road", 12


@pytest.mark.long
@pytest.mark.torch
def test_served_t5_equals_transformers(tmp_path) -> None:
    torch.manual_seed(0)
    network = t5("relu", True).eval()
    network.save_pretrained(tmp_path)
    tokenizer = small_tokenizer()
    names = ["</s>", "<pad>", "<extra_id_0>"]
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ids = [*tokenizer.encode(PROMPT, add_special_tokens=False).ids, tokenizer.token_to_id("</s>")]
    assert tokenizer.token_to_id("<extra_id_0>") in ids
    with torch.no_grad():
        out = network.generate(
            torch.tensor([ids]), max_new_tokens=NEW, do_sample=False, eos_token_id=None, use_cache=False
        )
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    with served(tmp_path, 2) as live:
        fields = {"prompt": PROMPT, "max_tokens": NEW, "temperature": 0}
        status, answer = ask(live, "POST", "/v1/completions", fields)
        assert status == 200, answer
        assert answer["usage"]["prompt_tokens"] == len(ids)
        assert answer["choices"][0]["text"] == tokenizer.decode(out[0].tolist()[1:], skip_special_tokens=False)
        most = live.service.host.max_context - 1
        status, answer = ask(live, "POST", "/v1/completions", {**fields, "max_tokens": most})
        assert status == 200, answer
        status, answer = ask(live, "PUT", "/api", {"prompts": [PROMPT]})
        assert status == 400 and "needs a decoder-only model" in answer
