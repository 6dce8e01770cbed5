"""Llama (arXiv 2302.13971, 2307.09288, 2407.21783): RMS norm, rotary positions, SwiGLU, no biases, untied output.

It has GPT's modules, chosen by the family's settings (`mtjax.config.families.llama`).
"""

from mtjax.models.families.gpt import GPT


class Llama(GPT):
    """A decoder-only language model.

    Parameters count `2 V h + l (2 h (q + k) + 3 h f + 2 h) + h` for V padded vocabulary rows, MLP width f, and q and k
    the widths of all query and of all key heads together: in the 70B models k = q / 8.
    """
