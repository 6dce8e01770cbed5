"""transformers' `granitemoeshared`, `granite_swa` and `granitemoe_swa`: Granite with shared experts, windows, sinks."""

from dataclasses import replace

from mtjax.config import Model
from mtjax.config.sizes import rotated_layers
from mtjax.convert.model_types.decoder import LIKE_LLAMA, ROPE, decoder, sizes
from mtjax.convert.model_types.decoder_rows import LAYERS, ModuleNames
from mtjax.convert.model_types.family import Json
from mtjax.convert.model_types.parts import (
    ConfigKeys,
    Settings,
    always,
    biases,
    fields,
    shortest,
    sliding,
    window_letters,
    windows,
)
from mtjax.convert.model_types.rows import linear
from mtjax.convert.table import Row
from mtjax.errors import UserError
from mtjax.families.gpt.hugging_face.experts import GRANITE_NAMES, SAME_SIZE, TOP_K
from mtjax.families.gpt.hugging_face.llama import GRANITE_SIZES, MULTIPLIERS


def shared_rows(names: ModuleNames) -> tuple[Row, ...]:
    """Returns the rows of Granite's shared expert, which is beside the others."""
    shared, ours = f"{names.block}shared_mlp", f"{LAYERS}.experts.shared"
    return (
        # One tensor has the gate, then the up projection.
        *linear(f"{ours}.up", f"{shared}.input_linear", "embed", "gate*mlp"),
        *linear(f"{ours}.down", f"{shared}.output_linear", "mlp", "embed"),
    )


GRANITE_EXPERTS = (TOP_K, SAME_SIZE, fields(shared_expert_size="shared_intermediate_size"))
GRANITE_MOE_SIZES = GRANITE_SIZES | {"num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 0}
GRANITEMOESHARED = decoder(
    "granitemoeshared",
    "GraniteMoeShared",
    GRANITE_MOE_SIZES,
    *(*LIKE_LLAMA, ROPE, biases("attention_bias"), *MULTIPLIERS, *GRANITE_EXPERTS),
    rows=lambda names, model: (*GRANITE_NAMES.rows(names, model), *shared_rows(names)),
    classifies=False,
)


def _after_every_fourth(values: Json, layer: int) -> bool:
    return layer % 4 != 0


def _read_thetas(values: Json) -> Settings:
    """Reads RoPE with a base for each layer, 0 or null in layers without RoPE."""
    found = ROPE.read(values)
    thetas = values.get("layer_rope_theta") or [found["rope_theta"]] * values["num_hidden_layers"]
    letters = sliding(values, _after_every_fourth)
    of = {kind: {t for t, letter in zip(thetas, letters, strict=True) if t and letter == kind} for kind in "FS"}
    # A model without layers of one kind has the other's base.
    full, local = of["F"] or of["S"], of["S"] or of["F"]
    if max(len(full), len(local)) > 1 or (full != local and found["rope_scaling"] != "none"):
        raise UserError(
            f"layer_rope_theta is {thetas}, but must be one base in layers with a window and one in those without, "
            "the same where RoPE is scaled"
        )
    rotated = shortest(["R" if theta else "N" for theta in thetas])
    different = {} if full == local else {"rope_local_theta": float(*local)}
    return {**found, "rope_theta": float(*full), "rope_layers": rotated, **different}


def _write_thetas(model: Model) -> Json:
    local = model.rope_local_theta or model.rope_theta
    each = zip(rotated_layers(model), window_letters(model), strict=True)
    thetas = [(local if letter == "S" else model.rope_theta) if rotated else 0 for rotated, letter in each]
    return {**ROPE.write(model), "layer_rope_theta": thetas}


SINKS = (
    *(*LIKE_LLAMA, always(attention_sinks=True), *MULTIPLIERS, windows(_after_every_fourth)),
    ConfigKeys((*ROPE.keys, "layer_rope_theta"), _read_thetas, _write_thetas, ROPE.named),
)
GRANITE_SWA = decoder(
    "granite_swa",
    "GraniteSWA",
    GRANITE_SIZES
    | sizes(2560, 8192, 24, 20, 4, 100_352, 8192)
    | {"rms_norm_eps": 1e-5, "tie_word_embeddings": True, "sliding_window": 128},
    *(*SINKS, biases("attention_bias", "mlp_bias")),
    classifies=False,
)
GRANITEMOE_SWA = decoder(
    "granitemoe_swa",
    "GraniteMoeSWA",
    GRANITE_MOE_SIZES | {"sliding_window": 128},
    *(*SINKS, biases("attention_bias"), *GRANITE_EXPERTS),
    # Unlike those of the other Granites, its files name the experts as transformers 5 does.
    rows=lambda names, model: (
        *replace(GRANITE_NAMES, router="router", up_tensor="experts.gate_up_proj", down="experts.down_proj").rows(
            names, model
        ),
        *shared_rows(names),
    ),
    classifies=False,
)
