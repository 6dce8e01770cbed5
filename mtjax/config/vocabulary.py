"""Default vocabulary for commands that read a config without a tokenizer."""

from collections.abc import Callable

from mtjax.config.run import Config, replace

GPT2_VOCABULARY = 50_257


def with_vocabulary(config: Config, say: Callable[[str], object]) -> Config:
    """Returns `config` with a vocabulary size: GPT-2's, with a note to the user, if none is given."""
    if config.model.vocab_size is not None:
        return config
    tokenizer = str(config.data.tokenizer or "")
    # Plans do not open the tokenizer's files.
    other = f", and the tokenizer is {tokenizer}: add --vocab-size N" if tokenizer and "gpt2" not in tokenizer else ""
    say(f"vocab_size is not given: using GPT-2's {GPT2_VOCABULARY:,}{other}")
    return replace(config, vocab_size=GPT2_VOCABULARY)
