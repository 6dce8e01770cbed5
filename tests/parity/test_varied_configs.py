"""Whatever a config.json says, mtjax gives transformers' numbers for it or refuses it: no key is ignored in silence."""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtjax.config.model_identity import effective_settings
from mtjax.convert.hugging_face import HuggingFaceSource
from mtjax.convert.stream import WeightSource
from mtjax.errors import UserError
from tests.parity.compare import relative, shaken
from tests.parity.decoder_types import CASES
from tests.parity.test_decoder_types import logits_of, logits_of_source, network_of, our_logits, tokens_of
from tests.parity.varied_configs import varied

torch = pytest.importorskip("torch", reason="needs the extra parity: pip install '.[parity]'")
transformers = pytest.importorskip(
    "transformers", minversion="5", reason="needs the extra parity: pip install '.[parity]'"
)
pytestmark = [pytest.mark.torch, pytest.mark.exhaustive, pytest.mark.filterwarnings("ignore")]

TOLERANCE = 3e-5
"""Largest difference of logits, relative to the largest logit: some variations have logits of thousands."""
KNOWN = {
    # transformers 5 takes its own default for layers with a window, where version 4 took the rope_theta of the file.
    ("olmo3", 'rope_scaling {"type": "linear", "factor": 3.0} alone'),
    ("olmo3", 'rope_scaling {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16} alone'),
    ("olmo3", "rope_theta 777.0 without rope_parameters"),
    # transformers 5 overlooks the scaling's kind under its older name, "type", which version 4 reads.
    ("gemma3_text", 'rope_scaling {"type": "linear", "factor": 3.0} alone'),
    ("gemma3_text", 'rope_scaling {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16} alone'),
}
"""Types and variations that mtjax reads as the version that wrote them."""

Logits = np.ndarray


@dataclass(frozen=True)
class Kind:
    """How networks of a kind are made and run."""

    network: Callable[[], Any]
    theirs: Callable[[Any], Logits]
    ours: Callable[[WeightSource], Logits]
    attention: str = "eager"


def batch_of(read: int = 16, written: int = 12) -> dict[str, np.ndarray]:
    """Two rows, the second one padded, and what a decoder has written."""
    random = np.random.default_rng(0)
    mask = np.ones((2, read), np.int32)
    mask[1, 11:] = 0
    tokens = np.where(mask, random.integers(3, 90, (2, read)), 1).astype(np.int32)
    types = np.arange(read, dtype=np.int32) // (read // 2) * np.ones((2, 1), np.int32)
    return {"tokens": tokens, "types": types, "mask": mask, "written": tokens[:, :written]}


def of_model(source: WeightSource, forward: Callable[[Any, Any], Any]) -> Logits:
    """Our logits of `batch_of`."""
    return logits_of_source(source, batch_of(), forward)


def decoder(name: str) -> Kind:
    case = CASES[name]
    tokens = tokens_of(case)
    return Kind(
        lambda: network_of(case),
        lambda network: logits_of(network, tokens),
        lambda source: our_logits(source, tokens),
        case.attention,
    )


def encoder(kind: str, head: str = "ForMaskedLM", **sizes: Any) -> Kind:
    given = {"vocab_size": 90, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3}
    given |= {"num_attention_heads": 4, "max_position_embeddings": 18} | sizes
    given = {key: value for key, value in given.items() if value is not None}
    real = batch_of()["mask"].astype(bool)

    def theirs(network: Any) -> Logits:
        batch = {key: torch.tensor(array).long() for key, array in batch_of().items()}
        more = {"token_type_ids": batch["types"]} if getattr(network.config, "type_vocab_size", 0) > 1 else {}
        with torch.no_grad():
            out = network(batch["tokens"], attention_mask=batch["mask"], **more)
        return out.get("prediction_logits", out.get("logits")).float().numpy()[real]

    def ours(source: WeightSource) -> Logits:
        return of_model(source, lambda model, batch: model(batch["tokens"], batch["types"], batch["mask"]))[real]

    config = getattr(transformers, f"{kind}Config")
    return Kind(lambda: shaken(lambda: getattr(transformers, f"{kind}{head}")(config(**given))), theirs, ours)


def text_to_text(kind: str, **settings: Any) -> Kind:
    sizes = {"vocab_size": 90, "d_model": 24, "d_kv": 6, "d_ff": 40, "num_layers": 2, "num_heads": 4}

    def theirs(network: Any) -> Logits:
        batch = {key: torch.tensor(array).long() for key, array in batch_of().items()}
        with torch.no_grad():
            out = network(batch["tokens"], attention_mask=batch["mask"], decoder_input_ids=batch["written"])
        return out.logits.float().numpy()

    def make() -> Any:
        config = getattr(transformers, f"{kind}Config")(**sizes, decoder_start_token_id=0, **settings)
        return shaken(lambda: getattr(transformers, f"{kind}ForConditionalGeneration")(config))

    return Kind(
        make,
        theirs,
        lambda source: of_model(source, lambda model, batch: model(batch["tokens"], batch["written"], batch["mask"])),
    )


def kinds() -> Iterator[tuple[str, Callable[[], Kind]]]:
    """Yields each type with how its network is made: for decoders, the first row of the table of types."""
    firsts: dict[str, str] = {}
    for name, case in CASES.items():
        firsts.setdefault(case.model_type, name)
    for model_type, name in firsts.items():
        yield model_type, lambda name=name: decoder(name)
    roberta: dict[str, Any] = {"type_vocab_size": 1, "pad_token_id": 1}
    yield "bert", lambda: encoder("Bert", "ForPreTraining")
    yield "ernie", lambda: encoder("Ernie", "ForPreTraining")
    yield "megatron-bert", lambda: encoder("MegatronBert", "ForPreTraining")
    for model_type, kind in (("roberta", "Roberta"), ("xlm-roberta", "XLMRoberta"), ("camembert", "Camembert")):
        yield model_type, lambda kind=kind: encoder(kind, **roberta)
    yield "data2vec-text", lambda: encoder("Data2VecText", **roberta)
    plain: dict[str, Any] = dict.fromkeys(
        ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    )
    dims: dict[str, Any] = {"dim": 24, "hidden_dim": 40, "n_layers": 3, "n_heads": 4}
    yield "distilbert", lambda: encoder("DistilBert", **plain, **dims)
    ids: dict[str, Any] = {
        "pad_token_id": 1,
        "bos_token_id": 2,
        "eos_token_id": 2,
        "cls_token_id": 2,
        "sep_token_id": 2,
    }
    yield "modernbert", lambda: encoder("ModernBert", local_attention=8, num_hidden_layers=4, **ids)
    yield "t5", lambda: text_to_text("T5")
    yield "t5, gated", lambda: text_to_text("T5", feed_forward_proj="gated-gelu")
    yield "mt5", lambda: text_to_text("MT5")
    yield "umt5", lambda: text_to_text("UMT5")


KINDS = dict(kinds())


@pytest.mark.parametrize("model_type", KINDS)
def test_no_key_is_ignored_in_silence(model_type: str, tmp_path: Path) -> None:
    kind = KINDS[model_type]()
    network = kind.network().eval()
    network.save_pretrained(tmp_path)
    state = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    path = tmp_path / "config.json"
    config, base, found = json.loads(path.read_text()), kind.theirs(network), dict[str, Logits]()

    def outcome(label: str) -> str:
        try:
            source = HuggingFaceSource(tmp_path, 1)
        except UserError:
            return "refused"
        try:
            with torch.no_grad():
                other = type(network)._from_config(
                    transformers.AutoConfig.from_pretrained(tmp_path), attn_implementation=kind.attention
                )
                if other.eval().load_state_dict(state, strict=False).missing_keys:
                    return "refused by transformers"
                theirs = kind.theirs(other)
        except Exception:
            return "refused by transformers"
        if not np.isfinite(theirs).all() or theirs.shape != base.shape:
            return "refused by transformers"
        settings = repr(effective_settings(source.origin.config.model))
        try:
            if settings not in found:
                found[settings] = kind.ours(source)
        except UserError:
            return "refused"
        if relative(found[settings], theirs) < TOLERANCE:
            return "the same" if relative(theirs, base) < TOLERANCE else "changed alike"
        return "known" if (model_type, label) in KNOWN else f"WRONG: {label}"

    assert outcome("") == "the same"
    counts: Counter[str] = Counter()
    only = os.environ.get("VARIED", "")
    for label, variation in varied(config, type(network.config).attribute_map):
        if only in label:
            path.write_text(json.dumps(variation))
            counts[outcome(label)] += 1
    print(f"{model_type}: {dict(counts)}")
    assert not [result for result in counts if result.startswith("WRONG")]
    if not only:  # the variations do change the network, and no known one is out of date
        assert counts["changed alike"] > 0
        assert counts["known"] == sum(name == model_type for name, _ in KNOWN)
