"""A vocabulary for commands that know a model by its config alone, without the tokenizer of a run."""

from collections.abc import Callable

from mtjax.config.run import Config, replace

GPT2_VOCABULARY = 50_257


def with_vocabulary(config: Config, say: Callable[[str], object]) -> Config:
    """`config` with a vocabulary: GPT-2's where only a tokenizer would tell, which is said to the user."""
    if config.model.vocab_size is not None:
        return config
    say(f"vocab_size is not given: taking GPT-2's {GPT2_VOCABULARY:,}")
    return replace(config, vocab_size=GPT2_VOCABULARY)
