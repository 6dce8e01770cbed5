"""Parity with transformers: the same tokens and log-probabilities from its folders, on different meshes."""

import copy

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from mtjax.errors import UserError  # noqa: E402
from mtjax.generate.beams import BeamSearch  # noqa: E402
from mtjax.generate.decoder import GenerationPrograms  # noqa: E402
from mtjax.generate.engine import Engine  # noqa: E402
from mtjax.generate.request import Request, Sampling, Token  # noqa: E402
from mtjax.generate.weights import load_model  # noqa: E402
from tests.convert.hf_folders import small_tokenizer  # noqa: E402
from tests.parity.converted import dots1  # noqa: E402

NEW = 24
LIVELY = {"repetition_penalty": 2.0}


def gpt2():
    config = transformers.GPT2Config(
        vocab_size=301, n_positions=80, n_embd=48, n_layer=3, n_head=4, n_inner=72, initializer_range=0.15
    )
    return transformers.GPT2LMHeadModel(config)


def llama():
    config = transformers.LlamaConfig(
        vocab_size=301,
        hidden_size=40,
        intermediate_size=56,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=6,
        max_position_embeddings=80,
        rope_theta=5000.0,
        initializer_range=0.15,
        eos_token_id=None,
    )
    return transformers.LlamaForCausalLM(config)


def t5(feed_forward: str, is_tied: bool, kind: str = "T5"):
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=301,
        d_model=40,
        d_kv=6,
        d_ff=56,
        num_layers=2,
        num_decoder_layers=3,
        num_heads=4,
        n_positions=80,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=20,
        feed_forward_proj=feed_forward,
        decoder_start_token_id=0,
        eos_token_id=300,
    )
    config.tie_word_embeddings = config.scale_decoder_outputs = is_tied
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    model.encoder.embed_tokens = model.decoder.embed_tokens = model.shared  # this class ties all four tables or none
    return model


PROMPTS = [np.random.default_rng(n).integers(0, 301, n).tolist() for n in (1, 7, 33)]


def theirs(model, prompt: list[int]) -> tuple[list[int], np.ndarray]:
    """Returns greedy tokens of transformers, and log-probabilities from one pass over all of them."""
    tokens = torch.tensor([prompt])
    with torch.no_grad():
        out = model.generate(tokens, max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0)
        logprobs = torch.log_softmax(copy.deepcopy(model).double()(out).logits[0], -1)
    ids = out[0].tolist()
    own = [logprobs[at - 1, ids[at]].item() for at in range(1, len(ids))]
    return ids[len(prompt) :], np.array(own)


def layers_with_experts():
    """Builds a model whose first layer has no experts: two stacks with caches."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8}
    network = dots1(vocab_size=301, max_position_embeddings=80, initializer_range=0.15, **heads)
    network.set_experts_implementation("eager")  # others have no float64
    return network


def hybrid(pattern: str, **settings):
    """Builds a model that keeps states beside KV caches; transformers' batches of states are of one length."""
    config = transformers.NemotronHConfig(
        vocab_size=301,
        hidden_size=24,
        intermediate_size=40,
        hybrid_override_pattern=pattern,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        mamba_num_heads=8,
        mamba_head_dim=6,
        ssm_state_size=10,
        chunk_size=8,
        max_position_embeddings=80,
        initializer_range=0.15,
        eos_token_id=None,
        **settings,
    )
    return transformers.NemotronHForCausalLM(config)


def nemotron_h():
    return hybrid("M-*M", n_groups=2)


def one_group():
    return hybrid("M*M", n_groups=1)


def falcon_h1():
    """Builds a model whose layers have a state and a KV cache each."""
    config = transformers.FalconH1Config(
        vocab_size=301,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        mamba_d_ssm=48,
        mamba_n_heads=8,
        mamba_n_groups=2,
        mamba_d_state=10,
        mamba_chunk_size=8,
        max_position_embeddings=80,
        initializer_range=0.15,
        key_multiplier=0.4,
        ssm_multipliers=[0.9, 1.5, 0.7, 1.2, 0.8],
        mlp_multipliers=[0.8, 0.6],
        eos_token_id=None,
    )
    return transformers.FalconH1ForCausalLM(config)


def qwen3_next():
    """Builds a model with gated delta nets, and experts behind them."""
    config = transformers.Qwen3NextConfig(
        vocab_size=301,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        partial_rotary_factor=0.5,
        linear_num_value_heads=8,
        linear_num_key_heads=2,
        linear_value_head_dim=12,
        linear_key_head_dim=10,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=20,
        shared_expert_intermediate_size=28,
        max_position_embeddings=80,
        initializer_range=0.15,
        eos_token_id=None,
    )
    network = transformers.Qwen3NextForCausalLM(config)
    network.set_experts_implementation("eager")  # others have no float64
    return network


def zamba2():
    """Builds a model whose layers share two blocks, with a KV cache for each layer that reads one."""
    config = transformers.Zamba2Config(
        vocab_size=301,
        hidden_size=24,
        intermediate_size=40,
        layers_block_type=["linear_attention", "hybrid", "hybrid", "linear_attention", "hybrid"],
        num_hidden_layers=5,
        num_mem_blocks=2,
        use_shared_attention_adapter=True,
        adapter_rank=3,
        use_mem_rope=True,
        num_attention_heads=4,
        mamba_d_state=10,
        mamba_ngroups=2,
        n_mamba_heads=4,
        chunk_size=8,
        max_position_embeddings=80,
        initializer_range=0.15,
        eos_token_id=None,
    )
    return transformers.Zamba2ForCausalLM(config)


@pytest.mark.parametrize(
    ("family", "meshes"),
    [
        pytest.param(zamba2, ("2x2",), marks=pytest.mark.long),
        pytest.param(falcon_h1, ("2x2",), marks=pytest.mark.long),
        (nemotron_h, ("2x2",)),
        pytest.param(qwen3_next, ("1x4",), marks=pytest.mark.long),  # two groups on more ranks
        (gpt2, ("2x2",)),
        (llama, ("1x4",)),  # two key heads on more ranks
        pytest.param(layers_with_experts, ("2x2",), marks=pytest.mark.long),
        pytest.param(one_group, ("1x4",), marks=pytest.mark.exhaustive),  # of four ranks
        pytest.param(qwen3_next, ("2x2",), marks=pytest.mark.exhaustive),  # two groups on as many ranks
        pytest.param(gpt2, ("1x1",), marks=pytest.mark.exhaustive),
        pytest.param(llama, ("1x2",), marks=pytest.mark.exhaustive),  # two key heads on as many ranks
    ],
)
def test_greedy_texts_and_logprobs_equal_transformers(family, meshes, tmp_path) -> None:
    torch.manual_seed(0)
    model = family().eval()
    model.save_pretrained(tmp_path)
    small_tokenizer().save(str(tmp_path / "tokenizer.json"))
    assert len(jax.devices()) >= 4  # in use: their number is fixed
    expected = [theirs(model, prompt) for prompt in PROMPTS]
    for mesh in meshes:
        loaded = load_model(f"hf:{tmp_path}", mesh)
        engine = Engine(
            GenerationPrograms(loaded.sharded_model, loaded.parameters), 2, chunks=(8, 16), min_cache_length=32
        )
        # Three prompts in two slots: the third joins when another has ended.
        received: list[list[Token]] = [[] for _ in PROMPTS]
        for prompt, out in zip(PROMPTS, received, strict=True):
            listen = {"on_prompt": out.extend, "on_token": out.append, "logprobs": True, "echo": True}
            engine.submit(Request(tuple(prompt), Sampling(NEW), **listen))
        engine.run()
        for prompt, out, (ids, logprobs) in zip(PROMPTS, received, expected, strict=True):
            assert [token.id for token in out] == [*prompt, *ids], mesh
            np.testing.assert_allclose([t.logprob for t in out[1:]], logprobs, atol=1e-5)
        # The longest prompt again, without scores of its tokens, and once more: then from what the cache has of it.
        for _ in range(2):
            again: list[Token] = []
            before = engine.reused
            engine.submit(Request(tuple(PROMPTS[-1]), Sampling(NEW), logprobs=True, on_token=again.append))
            engine.run()
            assert [token.id for token in again] == expected[-1][0], mesh
            np.testing.assert_allclose([t.logprob for t in again], expected[-1][1][-NEW:], atol=1e-5)
        assert engine.reused == before + 32


@pytest.mark.parametrize(
    ("kind", "feed_forward", "is_tied", "meshes"),
    [
        ("T5", "relu", True, ("2x2",)),
        pytest.param("T5", "gated-gelu", False, ("1x2",), marks=pytest.mark.exhaustive),
        pytest.param("UMT5", "gated-gelu", False, ("1x2",), marks=pytest.mark.long),
    ],
)
def test_t5_texts_equal_transformers(kind: str, feed_forward: str, is_tied: bool, meshes, tmp_path) -> None:
    """Prompts of different lengths in one batch; the encoder runs once for each."""
    torch.manual_seed(0)
    model = t5(feed_forward, is_tied, kind).eval()
    model.save_pretrained(tmp_path)
    small_tokenizer().save(str(tmp_path / "tokenizer.json"))
    expected = []
    for prompt in PROMPTS:
        text = torch.tensor([prompt])
        with torch.no_grad():  # its cache does not know of decoders with more layers than the encoder
            out = model.generate(
                text, max_new_tokens=NEW, do_sample=False, eos_token_id=None, use_cache=False, **LIVELY
            )
            logits = copy.deepcopy(model).double()(text, decoder_input_ids=out).logits[0]
        logprobs = torch.log_softmax(logits, -1)
        ids = out[0].tolist()
        expected.append((ids[1:], [logprobs[at, ids[at + 1]].item() for at in range(NEW)]))
    assert len({tuple(ids) for ids, _ in expected}) == len(PROMPTS)
    assert len(jax.devices()) >= 4  # in use: their number is fixed
    for mesh in meshes:
        loaded = load_model(f"hf:{tmp_path}", mesh)
        assert loaded.start_id == 0 and loaded.stop_ids == {300}
        decoder = GenerationPrograms(loaded.sharded_model, loaded.parameters, loaded.start_id)
        engine = Engine(decoder, 2, chunks=(8, 16), min_cache_length=32)
        received: list[list[Token]] = [[] for _ in PROMPTS]
        for prompt, out in zip(PROMPTS, received, strict=True):
            engine.submit(Request(tuple(prompt), Sampling(NEW, **LIVELY), logprobs=True, on_token=out.append))
        engine.run()
        for out, (ids, logprobs) in zip(received, expected, strict=True):
            assert [token.id for token in out] == ids, mesh
            np.testing.assert_allclose([t.logprob for t in out], logprobs, atol=1e-5)
    for request, why in (
        (Request((5,), echo=True), "prompt tokens have no log-probabilities"),
        (Request((5,) * 81), "the encoder.s maximum is 80"),
    ):
        with pytest.raises(UserError, match=why):
            engine.submit(request)


def t5_apart():
    return t5("gated-gelu", False)


@pytest.mark.parametrize(
    ("family", "penalty"),
    [
        (llama, -0.5),
        pytest.param(t5_apart, 1.0, marks=pytest.mark.long),
        pytest.param(llama, 1.0, marks=pytest.mark.exhaustive),
        pytest.param(t5_apart, -0.5, marks=pytest.mark.exhaustive),
    ],
)
def test_beams_equal_transformers(family, penalty: float, tmp_path) -> None:
    """Beams end at different lengths, as two tokens are stop tokens."""
    torch.manual_seed(0)
    model = family().eval()
    model.save_pretrained(tmp_path)
    small_tokenizer().save(str(tmp_path / "tokenizer.json"))
    settings = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "num_beams": 4, "length_penalty": penalty}
    settings |= {"use_cache": False}  # see above
    settings |= {"num_return_sequences": 4, "return_dict_in_generate": True, "output_scores": True}
    assert len(jax.devices()) >= 4  # in use: their number is fixed
    loaded = load_model(f"hf:{tmp_path}", "2x2")
    decoder, kinds = GenerationPrograms(loaded.sharded_model, loaded.parameters, loaded.start_id), set()
    for prompt in PROMPTS:
        text = torch.tensor([prompt])
        free = model.generate(text, eos_token_id=None, **settings).sequences[0].tolist()
        ends = sorted({free[-NEW // 2], free[-3]})
        with torch.no_grad():
            out = model.generate(text, eos_token_id=ends, **settings)
        begin = 1 if decoder.is_encoder_decoder else len(prompt)
        search = BeamSearch(decoder, 4, penalty, frozenset(ends), chunks=(8, 16), min_cache_length=32)
        found = search.search(prompt, NEW)
        for beam, ids, score in zip(found, out.sequences[:, begin:].tolist(), out.sequences_scores, strict=True):
            assert list(beam.ids) == ids[: len(beam.ids)] and set(ids[len(beam.ids) :]) <= {ends[0]}
            np.testing.assert_allclose(beam.score, score, atol=1e-4)
            kinds.add(beam.is_stopped)
    assert True in kinds
