"""Greedy text through the KV cache is transformers' own for every decoder type, far beyond the windows."""

from dataclasses import replace as replace_case
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from mtjax.config import replace
from mtjax.config.sizes import longest_text
from mtjax.convert.hugging_face import HuggingFaceSource
from mtjax.convert.saved_model import SavedModel, without_training
from mtjax.generate.decoder import GenerationPrograms
from mtjax.generate.engine import Engine
from mtjax.generate.request import Request, Sampling, Token
from mtjax.layout.mesh import MeshShape
from mtjax.models.sharded_model import ShardedModel
from mtjax.sharding.device_mesh import make_mesh
from tests.parity.decoder_types import CASES, Case
from tests.parity.test_decoder_types import network_of

torch = pytest.importorskip("torch", reason="needs the extra parity: pip install '.[parity]'")
pytest.importorskip("transformers", minversion="5", reason="needs the extra parity: pip install '.[parity]'")
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")]

PROMPT, NEW = 7, 64
LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
ALWAYS = {
    "gemma3_text": "windows in two of three layers, two bases of RoPE, norms of heads",
    "gpt_oss": "sinks, YaRN, experts",
    "deepseek_v3": "latent attention, groups of experts",
    "exaone4": "RoPE only in layers with a window",
    "falcon rw": "ALiBi within the scale",
    "ministral3": "queries scaled by position",
    "opt": "learned positions with an offset",
}
"""Cases of the suite, which together have all kinds of attention and positions -> what each has."""


WITHOUT_CACHE = ("mamba2, three taps, limited, tied", "nemotron_h", "zamba2")
"""Beginnings of the names of cases whose text in transformers 5.24 is another one with its cache than without."""


def longer(case: Case) -> Case:
    """The case with room for the text; RoPE that is scaled by the text's length keeps its own."""
    keys = [key for key in LENGTH_KEYS if key in case.config] or ["max_position_embeddings"]
    kind = (case.settings.get("rope_parameters") or {}).get("rope_type")
    keys = keys if kind not in ("dynamic", "longrope") or "alpha" in case.settings["rope_parameters"] else []
    # Tied to their embedding, random networks often repeat one token.
    untied = {} if case.model_type == "zamba2" else {"tie_word_embeddings": False}
    return replace_case(case, settings={**case.settings, **dict.fromkeys(keys, 96), **untied})


def our_text(source: HuggingFaceSource, prompt: list[int], new: int) -> list[Token]:
    """The greedy tokens, with log-probabilities."""
    config = without_training(source.origin.config, source.origin.config.parallel, compute_dtype="float32")
    placed = ShardedModel(replace(config, attention="xla"), make_mesh(MeshShape(), jax.devices("cpu")))
    parameters = SavedModel(Path(), source).parameters(placed)
    received: list[Token] = []
    engine = Engine(GenerationPrograms(placed, parameters), 1, chunks=(8,), min_cache_length=96)

    def receive(token: Token) -> bool:
        received.append(token)
        return False

    engine.submit(Request(tuple(prompt), Sampling(new), on_token=receive, logprobs=True))
    engine.run()
    return received


@pytest.mark.parametrize(
    "name", [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.exhaustive) for name in CASES]
)
def test_text_equals_transformers(name: str, tmp_path: Path) -> None:
    case = longer(CASES[name])
    network: Any = network_of(case)
    network.save_pretrained(tmp_path)
    source = HuggingFaceSource(tmp_path, 1)
    new = min(NEW, longest_text(source.origin.config.model) - PROMPT)
    prompt = np.random.default_rng(1).integers(3, case.config["vocab_size"], PROMPT).tolist()
    asked = {"max_new_tokens": new, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    asked |= {"use_cache": False} if name.startswith(WITHOUT_CACHE) else {}
    with torch.no_grad():
        ids = network.generate(torch.tensor([prompt]), **asked)[0]
        logprobs = torch.log_softmax(network(ids[None], use_cache=False).logits[0].double(), -1)
    known = [logprobs[at - 1, ids[at]].item() for at in range(PROMPT, PROMPT + new)]
    received = our_text(source, prompt, new)
    assert len(set(ids[PROMPT:].tolist())) > 1
    assert [token.id for token in received] == ids[PROMPT:].tolist()
    np.testing.assert_allclose(np.array([token.logprob for token in received], float), known, atol=1e-4)
