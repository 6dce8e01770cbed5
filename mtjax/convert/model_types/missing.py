"""transformers' types that mtjax does not support, and what of each no setting says."""

from collections.abc import Mapping

_REASONS = {
    "some of its layers have a recurrence other than Mamba-2 instead of attention": (
        "falcon_mamba jamba mamba recurrent_gemma rwkv xlstm zamba"
    ),
    "some of its layers have linear attention": (
        "bailing_hybrid kimi_linear lara_mini minimax olmo_hybrid qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text "
        "qwen4_exp qwen4_exp_text"
    ),
    "its layers have short convolutions": "inkling_text inkling2_text inkling2_loop_text lfm2 lfm2_moe lfm3 zaya",
    "an indexer chooses the tokens that it attends to": (
        "axk2 deepseek_v32 deepseek_v4 dots3_note dots3_note_text glm_moe_dsa hy_v4 minimax_m3_vl_text"
    ),
    "it multiplies attention's output by a gate": "afmoe beam dory hrm_text laguna",
    "its layers have inputs of their own and share keys and values": (
        "gemma3n_text gemma4_text gemma4_assistant gemma4_unified_text gemma4_unified_assistant"
    ),
    "its attention is the difference of two softmaxes": "diffllama",
    "its attention has a mask that is computed from the values": "doge",
    "it attends within chunks": "llama4_text",
    "its experts are of attention, too": "jetmoe",
    "its router is a sparse mixer, which scores each chosen expert apart": "phimoe",
    "its router chooses by logits, and scores only the chosen": "cohere2_moe kolibri1 aria_text",
    "some of its experts pass their input on": "longcat_flash",
    "values are scaled, and heads differ between layers": "mimo_v2_flash",
    "the MLP's output has a norm in layers with experts alone": "axk1",
    "its activation is xielu, which has trained parameters": "apertus apertus1p5_text",
    "its weights have three values, and it has norms before the last product of attention and of the MLP": "bitnet",
    "its norms of queries and keys have no weight": "nanochat",
    "its positions are sinusoids": "ctrl xglm",
    "the last layer alone has a bias of attention's output": "gpt_neox_japanese",
    "it computes positions relative to segments of the text": "cpmant xlnet",
    "it may add embeddings of languages, and its tensors have XLM's names": "flaubert xlm",
    "its tokens are bytes in patches": "blt",
    "its config.json has the settings of attention and of experts in objects of their own": "dbrx",
    "its embeddings are narrower than its layers": "electra rembert",
    "its output has a linear layer and a norm before the table": "modernbert-decoder",
    "it is an encoder-decoder": (
        "bart bigbird_pegasus blenderbot blenderbot-small encoder-decoder fsmt led m2m_100 marian mbart mvp nllb-moe "
        "pegasus pegasus_x plbart prophetnet whisper"
    ),
    "it is the decoder of an encoder-decoder": "bert-generation trocr",
    "it is an encoder-decoder with experts": "switch_transformers",
    "it is an encoder-decoder with the layers of Gemma": "t5gemma t5gemma2",
    "it attends to a part of the tokens, or to summaries of them": (
        "big_bird funnel longformer longt5 mra nystromformer reformer yoso"
    ),
    "its layers share their weights": "albert",
    "its layers have convolutions": "convbert squeezebert",
    "its scores have terms of distances apart from those of tokens": "deberta deberta-v2",
    "it has Fourier transforms instead of attention": "fnet",
    "its layers are narrower inside than outside": "mobilebert",
    "its encoder has T5's relative positions, shared by all layers": "mpnet",
    "it has RoBERTa's names, and norms before the sublayers": "roberta-prelayernorm xlm-roberta-xl",
    "its layers have adapters of languages": "xmod",
    "its layers are BERT's, with rotated queries and keys": "gte jina_embeddings_v3 nomic_bert roformer",
    "its layers are Llama's without a causal mask, and its output is not that of a BERT": "eurobert ultrabert",
    "its weights and activations are integers": "ibert",
    # gpt-sw3's model is GPT-2's code, with another tokenizer.
    "its layers are those of gpt2, which model_type may say": "gpt-sw3",
    "it reads proteins": "esm esmc",
    "its tokens also have embeddings of shape and pronunciation": "roc_bert",
    "its tokens are hashed characters": "canine",
    "it also reads entities, or places on a page": "bros layoutlm lilt luke markuplm tapas",
    "it reads more than text": (
        "audioflamingo3 cohere_compass_text emu3 fuyu gemma3 gemma3n gemma4 gemma4_unified git glmasr got_ocr2 "
        "granite_speech granite_speech_plus llama4 mllama modernvbert moshi moss_transcribe_diarize musicflamingo "
        "musicgen musicgen_melody nemo_speechlm neomme omniasr perceiver phi4_multimodal qwen2_audio qwen3_asr "
        "seamless_m4t seamless_m4t_v2 ultravbert vibevoice_asr voxtral voxtral_realtime"
    ),
}
"""What is missing -> types that need it."""
MISSING: Mapping[str, str] = {name: reason for reason, names in _REASONS.items() for name in names.split()}
"""Types that are not supported -> the reason."""
