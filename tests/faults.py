"""Plants faults in a copy of the package, one at a time, and shows that a test notices each: `make test-faults`.

`python -m tests.faults` tries them all; words choose those whose description has one of them. Exit code 1 when a fault
escapes, or its text is no longer in the package exactly once: then point it at the code that has taken its place.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
LEFT_OUT = shutil.ignore_patterns(".git", ".venv", ".*_cache", ".hypothesis", "__pycache__", "runs", "build", "dist")
TRIED = "not (exhaustive or aot)"
"""What `make test` runs, long tests, and those that compare with torch."""
ATTEMPTS_AT_ONCE = 2


@dataclass(frozen=True)
class Fault:
    """What goes wrong, the text that is replaced wherever in `mtjax` it stands, and the test that should notice."""

    what: str
    old: str
    new: str
    folder: str
    """Of `tests`, somewhere in which the test is."""
    test: str
    """Its name, or the beginning of the names of several."""


FAULTS = (
    # --- lower bounds of the search for a plan
    Fault(
        "plan: the lower bound of a step's time is none",
        "return (1 - ROUNDING) * ticks * longest",
        "return 1.3 * ticks * longest",
        "plan",
        "test_lower_bounds_leave_out_no_plan",
    ),
    Fault(
        "plan: the memory that a search may use",
        "Space(usable=options.usable, unrolled=",
        "Space(unrolled=",
        "plan",
        "test_a_search_keeps_to_the_usable_memory",
    ),
    # --- model families
    Fault(
        "families: settings of hybrid models alone",
        "    refused_elsewhere=HYBRID,\n",
        "",
        "test_config.py",
        "test_model_settings_that_do_not_fit",
    ),
    Fault(
        "families: a head of BERT's",
        'with_head="mtjax.families.bert.finetuned:FinetunedEncoder"',
        'with_head=""',
        "families",
        "test_the_parts_of_a_row_are_what_their_readers_expect",
    ),
    # --- attention in Pallas
    Fault(
        "attention in Pallas: halves of the random numbers change places",
        "both = jnp.stack([jnp.stack(low, axis=-1), jnp.stack(high, axis=-1)], axis=-1)",
        "both = jnp.stack([jnp.stack(high, axis=-1), jnp.stack(low, axis=-1)], axis=-1)",
        "models",
        "test_attends_as_a_softmax_that_is_written_out",
    ),
    # --- weights that are read
    Fault(
        "NaN in weights: said",
        "if count := sum(count_not_finite(shard) for shard in shards):",
        "if count := 0:",
        "convert",
        "test_nan_and_infinities_are_named_and_kept",
    ),
    Fault(
        "messages about a config.json: its keys",
        'return f"{found[0]} ({key} in config.json)" if key else found[0]',
        "return found[0]",
        "convert",
        "test_settings_have_the_names_that_config_json_has",
    ),
    Fault(
        "a T5 that is tied and not scaled: its factor",
        "return hidden**0.5 if tied and not scaled else 1.0",
        "return 1.0",
        "parity",
        "test_text_to_text_models_are_transformers_own_there_and_back",
    ),
    Fault(
        "adapters of experts: B has the experts next to each other for each rank",
        "b.reshape(len(b), -1, self.experts)",
        "b.reshape(len(b), self.experts, -1).swapaxes(1, 2)",
        "convert",
        "test_adapters_of_experts_are_added_to_each_expert",
    ),
    # --- weights of generation
    Fault(
        "transposed weights: an adapter's components are transposed together",
        'indexed = "expert" in names or names[0] in PARTS',
        'indexed = "expert" in names',
        "models",
        "test_components_of_an_adapter_are_not_turned",
    ),
    # --- prefix reuse of recurrent states
    Fault(
        "snapshots: the states of a reused prefix are restored",
        "cache = self._restored(request.prompt[:shared], slot, cache)",
        "pass",
        "generate",
        "test_texts_are_those_without_reuse",
    ),
    Fault(
        "snapshots: one that was taken because there was room goes first",
        "key=lambda each: (not each.is_spare, each.used)",
        "key=lambda each: each.used",
        "generate",
        "test_spare_snapshots_are_evicted_first",
    ),
    Fault(
        "snapshots: they leave with the keys of their tokens",
        "snapshot.slots.discard(slot)",
        "pass",
        "generate",
        "test_snapshots_leave_with_the_keys",
    ),
    # --- other names of keys, adapters of peft
    Fault(
        "other names of keys of config.json are read",
        "found.setdefault(key, value) != value",
        "found.get(key, value) != value",
        "convert",
        "test_bloom_560m_has_its_published_number",
    ),
    Fault(
        "adapters of peft are multiplied by alpha over rank",
        'if self.config.get("use_rslora") else alpha / rank',
        'if self.config.get("use_rslora") else alpha',
        "convert",
        "test_a_merged_export_has_the_sum",
    ),
    # --- tables narrower than the hidden states, post-LN decoders
    Fault(
        "narrow tables: OPT's width of embeddings is read",
        '"embedding_size": None if width == values["hidden_size"] else width',
        '"embedding_size": None',
        "convert",
        "test_opt_350m_has_its_published_number_of_parameters",
    ),
    Fault(
        "narrow tables: embeddings are taken to the hidden size before positions are added",
        "x = x if project_in is None else project_in(x)",
        "x = x if project_in is None else -project_in(x)",
        "models",
        "test_logits_are_numpys",
    ),
    Fault(
        "a post-LN decoder has no final norm",
        'make_norm(model, dtype) if model.norm_placement != "post" else None',
        "make_norm(model, dtype)",
        "models",
        "test_logits_are_numpys",
    ),
    Fault(
        "biases of attention's output alone are in no product of queries",
        'return kind in ("qkv", "all"), kind in ("output", "all")',
        'return kind != "none", kind in ("output", "all")',
        "convert",
        "test_gpt_neo_has_its_published_number_of_parameters",
    ),
    Fault(
        "Qwen2-MoE's list of kinds of layers is read",
        'ConfigKeys(("layer_types",), _check_layers, lambda model: {}),',
        "",
        "families",
        "test_layers_of_a_qwen2_with_experts_that_slide_are_refused",
    ),
    Fault(
        "memory: the gradient of an untied embedding comes after the layers' backward pass",
        "below = [w for part in parts for w in part.weights if w not in tied]",
        "below = []",
        "analysis",
        "test_the_gradient_of_an_untied_embedding_comes_last",
    ),
    Fault(
        "memory: a single layer is in no loop",
        "return saved_per_loop(stack, plan) if layers_in_chunk(stack, plan) == plan.chunks == 1 else {}",
        "return {}",
        "analysis",
        "test_a_single_layer_is_read_in_place",
    ),
    Fault(
        "weights that attend to later tokens are no decoder's",
        '"use_bidirectional_attention": (False, None),\n    "is_causal": (True, None),',
        '"use_bidirectional_attention": (False, None),',
        "convert",
        "test_keys_that_change_a_network_are_known_to_its_type",
    ),
    Fault(
        "Gemma has no activation but the tanh GELU",
        'only={"hidden_act": ("gelu", *TANHS), "hidden_activation": (None, "gelu", *TANHS)},',
        "",
        "convert",
        "test_another_activation_of_gemma_is_refused",
    ),
    # --- Retro
    Fault(
        "Retro: a packed row reads the neighbours of the row before",
        "reads = reads if context.reads is None else reads & (context.reads > 0)",
        "del context",
        "finetune",
        "test_packed_rows_are_read_as_each_alone",
    ),
    Fault(
        "Retro: an answer begins within a chunk of its prompt",
        "return -prompt % chunk",
        "return 0",
        "retrieval",
        "test_neighbours_are_in_the_chunks",
    ),
    Fault(
        "Retro: the chunks of a row after its first answer's read nothing",
        "neighbours[first : (at + self.tokens_taken(chat)) // chunk] = chat.passages",
        "neighbours[first : first + 1] = chat.passages",
        "finetune",
        "test_rows_are_laid_out_as_generation_reads_them",
    ),
    Fault(
        "Retro: the norms of a frozen encoder's chunked cross-attention are the decoder's",
        'any(name.startswith("chunked") for name in modules)',
        '"chunked" in modules',
        "finetune",
        "test_what_is_frozen_has_no_optimizer_state",
    ),
    Fault(
        "Retro: weight decay shrinks an encoder that no row trains",
        'if not have_passages(train) and model.retro_frozen != "retrieval":',
        "if False:",
        "finetune",
        "test_what_no_row_trains_must_be_frozen",
    ),
    Fault(
        "Retro: layers of a GPT change places in the new model",
        "if number in parameter.numbers:",
        "if number < len(parameter.numbers):",
        "retrieval",
        "test_a_gpt_becomes_the_decoder_of_a_new_retro",
    ),
    # --- neighbours of chunks
    Fault(
        "neighbours: chunks of documents that a sample reads are found",
        "kept = ~np.isin(database.documents(candidates), own[sample])",
        "kept = np.ones(len(candidates), bool)",
        "retrieval",
        "test_a_run_reads_the_nearest_chunks",
    ),
    Fault(
        "neighbours: a document that ends is read again from the chunk on",
        "return self.corpora[corpus].get(sequence, offset, size)",
        "return np.resize(self.corpora[corpus].get(sequence, offset, size), count * self.chunk)",
        "retrieval",
        "test_a_run_reads_the_nearest_chunks",
    ),
    Fault(
        "neighbours: validation text is searched, too",
        "parts.append(VectorRange(each.rows, first - base, last - base, base))",
        "parts.append(Part(each.rows, 0, len(each.rows), base))",
        "retrieval",
        "test_a_run_reads_the_nearest_chunks",
    ),
    Fault(
        "neighbours: overlap is looked for in the chunk itself",
        "following = tokens[sample, (place + 1) * chunk : (place + 2) * chunk]",
        "following = tokens[sample, place * chunk : (place + 1) * chunk]",
        "retrieval",
        "test_neighbours_that_say_what_comes_next",
    ),
    Fault(
        "neighbours: places of a second file are those of the first",
        "return np.where(places < 0, -1, chunks[part] + places - begins[part])",
        "return np.where(places < 0, -1, chunks[part] + places)",
        "retrieval",
        "test_exact_search_equals_float64",
    ),
    Fault(
        "neighbours: another order of samples is accepted",
        "if made.order != run.order:",
        "if False:",
        "retrieval",
        "test_neighbours_of_another_run",
    ),
    Fault(
        "neighbours: those that replaced a run's own are read on resume",
        "if past is not None and config.data.neighbours == past.config.data.neighbours and NEIGHBOURS not in allowed:",
        "if False:",
        "retrieval",
        "test_a_resumed_run_reads_the_neighbours",
    ),
    Fault(
        "neighbours: a file of more samples is another",
        '("<u4",))[:samples]',
        '("<u4",))[:]',
        "retrieval",
        "test_a_resumed_run_reads_the_neighbours",
    ),
    Fault(
        "retriever: documents that are left out are found",
        "return ~np.isin(database.chunks.documents(candidates), dropped[query])",
        "return np.ones(len(candidates), bool)",
        "retrieval",
        "test_a_retriever_finds_what",
    ),
    Fault(
        "retriever: validation text is searched, too",
        'bounds = [(each["first"], each["first"] + each["documents"]) for each in header.database]',
        "bounds = [(0, len(corpus)) for corpus in corpora]",
        "retrieval",
        "test_a_retriever_finds_what",
    ),
    Fault(
        "retriever: another embedder is accepted",
        "if embedder.fingerprint != made.header.fingerprint:",
        "if False:",
        "retrieval",
        "test_wrong_input_is_one_sentence",
    ),
    Fault(
        "retriever: an index of faiss visits another number of cells",
        'return cls(found[1], int(found[2]), None if found[3] == "None" else int(found[3]))',
        "return cls(found[1], int(found[2]))",
        "retrieval",
        "test_an_index_of_faiss",
    ),
    Fault(
        "retro: a chunk is searched a token late",
        "for chunk in range(len(text.reading.sources), text.length // size)",
        "for chunk in range(len(text.reading.sources), (text.length - 1) // size)",
        "retrieval",
        "test_each_chunk_is_searched_when_it_is_complete",
    ),
    Fault(
        "retro: what is found for a chunk is read by it",
        "reading.neighbours[chunk] = retriever.tokens(numbers)",
        "reading.neighbours[chunk - 1] = retriever.tokens(numbers)",
        "retrieval",
        "test_each_chunk_is_searched_when_it_is_complete",
    ),
    Fault(
        "retro: a text is penalised for the tokens of another",
        "self._tokens[row], self._counts[row] = 0, 0",
        "self._tokens[row] = 0",
        "retrieval",
        "test_texts_with_and_without_neighbours",
    ),
    Fault(
        "generate: an output made with --retrieve goes on without",
        "names = [*self._facts, *(name for name in before if name not in self._facts)]",
        "names = [*self._facts]",
        "retrieval",
        "test_retrieved_neighbours_are_those",
    ),
    Fault(
        "neighbours: another job goes on with an interrupted one's rows",
        'rows = int(saved["rows"]) if saved["identity"] == self._identity else 0',
        'rows = int(saved["rows"])',
        "retrieval",
        "test_a_file_of_rows",
    ),
    Fault(
        "neighbours: a search goes on with another index",
        'return f"{self.factory}, sample {self.sample}, nprobe {self.nprobe}"',
        "return self.factory",
        "retrieval",
        "test_an_interrupted_search",
    ),
    Fault(
        "neighbours: passages are read by the first chunk of the answer alone",
        "neighbours[first_with_passages(len(ids), model.retro_chunk) :] = self._tokens_of",
        "neighbours[first_with_passages(len(ids), model.retro_chunk)] = self._tokens_of",
        "retrieval",
        "test_neighbours_are_in_the_chunks",
    ),
    Fault(
        "neighbours: no more are searched where too many were dropped",
        "short.append(query)",
        "pass",
        "retrieval",
        "test_more_are_searched",
    ),
    # --- 8-bit floats
    Fault(
        "8-bit floats: an infinite value becomes the largest number",
        "jnp.where(jnp.isinf(a), wide - wide, jnp.clip(wide * scale, -top, top)).astype(kind)",
        "jnp.clip(wide * scale, -top, top).astype(kind)",
        "train",
        "test_what_is_not_finite_stays_so",
    ),
    Fault(
        "8-bit floats: the gradient of the weight has the scale of the gradient alone",
        "_scaled(recipe, formula, x8, g8, (x_scale, scale),",
        "_scaled(recipe, formula, x8, g8, (scale / scale, scale),",
        "train",
        "test_a_product_and_its_gradients_are_those_of_numpys",
    ),
    Fault(
        "8-bit floats: weights quantized once a step are not rounded to the compute type before",
        "quantized(stack.astype(compute_dtype), E4M3, of_layers)",
        "quantized(stack, E4M3, of_layers)",
        "train",
        "test_matrices_are_quantized_as_numpy",
    ),
    Fault(
        "8-bit floats: an exact scale is so large that the largest value does not fit",
        "(mantissa + unit - 1) // unit",
        "mantissa // unit",
        "train",
        "test_a_scale_is_the_largest",
    ),
    Fault(
        "8-bit floats: a run that has counted powers of two goes on with exact scales",
        '"fp8_scales": "the state of delayed has counts of one kind of scales",',
        "",
        "train",
        "test_scales_of_earlier_steps",
    ),
    Fault(
        "8-bit floats: weights are quantized once a step where some layers read them in 16 bits",
        'return fp8 == "delayed" and not any(ends) and not lora_rank',
        'return fp8 == "delayed" and not lora_rank',
        "train",
        "test_each_matrix_is_quantized_once_a_step",
    ),
    Fault(
        "8-bit floats: each product quantizes its weight again",
        'if of_layer["weight"].is_trainable:',
        'if not of_layer["weight"].is_trainable:',
        "train",
        "test_each_matrix_is_quantized_once_a_step",
    ),
    Fault(
        "delayed scaling: smaller values of other ranks count, too",
        "largest = found & (jnp.cumsum(found, -1) == 1)",
        "largest = found",
        "train",
        "test_losses_of_delayed_scaling_do_not_depend_on_the_mesh",
    ),
    Fault(
        "QK-clip: largest scores of microbatches are added up",
        "add = jnp.maximum if record.grad_reduction.is_maximum else jnp.add",
        "add = jnp.add",
        "train",
        "test_scores_and_weights_do_not_depend_on_the_mesh",
    ),
    Fault(
        "QK-clip: in blocks, scores of tokens that do not attend to each other count",
        "largest = _hidden(products, seen).max(-1) if observes",
        "largest = products.max(-1) if observes",
        "sharding",
        "test_the_largest_scores_of_blocks",
    ),
    Fault(
        "QK-clip: a group of query heads is scaled by its least largest score",
        "_factors(scores.reshape(layers, keys, -1).max(-1), threshold)",
        "_factors(scores.reshape(layers, keys, -1).min(-1), threshold)",
        "train",
        "test_weights_of_heads_with_too_large_scores_are_those_of_numpy",
    ),
    Fault(
        "delayed scaling: weights are updated while the first scales are found",
        "return state.step >= 0",
        "return state.step >= -9",
        "train",
        "test_the_first_scales_are_found_before_the_first_update_and_nothing_else_changes",
    ),
    Fault(
        "delayed scaling: one pass finds the first scales",
        "if passes > 1 and (",
        "if passes > 0 or (",
        "train",
        "test_the_first_scales_are_found_before_the_first_update_and_nothing_else_changes",
    ),
    Fault(
        "delayed scaling: a scale is of the last step alone",
        'is_recent = jnp.where(largest, 0.0, 1 - jnp.max(-state["age"], -2)) < history',
        'is_recent = jnp.where(largest, 0.0, 1 - jnp.max(-state["age"], -2)) < 1',
        "train",
        "test_a_scale_fits_the_largest_value",
    ),
    Fault(
        "delayed scaling: a skipped step changes scales",
        "lambda new, old: jnp.where(keep, new, old), moved.parameters",
        "lambda new, old: new, moved.parameters",
        "train",
        "test_a_skipped_step_leaves",
    ),
    Fault(
        "delayed scaling: scales of weights fit Schedule-Free's averages instead of the point of gradients",
        "_fitted(split(state.parameters)[1], self.training_point(state))",
        "_fitted(split(state.parameters)[1], state.parameters)",
        "train",
        "test_weights_scales_fit_the_point",
    ),
    Fault(
        "8-bit floats: the first layers are not left in 16 bits",
        "token = _is_unquantized.set(True)",
        "token = _is_unquantized.set(False)",
        "train",
        "test_a_skipped_step_leaves",
    ),
    Fault(
        "8-bit floats: rows have the scales of columns",
        "enumerate(letters) if letter in contracted)",
        "enumerate(letters) if letter not in contracted)",
        "train",
        "test_a_product_with_a_scale_for_each_row",
    ),
    # --- coming from Megatron-LM
    Fault(
        "a script's unknown arguments are ignored",
        "if not given.unlisted or options.ignore_unknown:",
        "if given.unlisted or options.ignore_unknown:",
        "convert",
        "test_wrong_input_is_one_sentence",
    ),
    Fault(
        "a script that asks for flash attention with separate documents has none",
        'to.settings["attention"] = "cudnn"',
        'to.settings["attention"] = "auto"',
        "convert",
        "test_settings",
    ),
    Fault(
        "the weights of a blend are compared as typed",
        "dataclasses.replace(text, weight=share) for",
        "dataclasses.replace(text, weight=text.weight or share) for",
        "train",
        "test_a_blend_is_compared_by_its_shares",
    ),
    # --- hybrid models
    Fault(
        "patterns: the last layer of an iteration gathers the first of the same iteration again",
        "unit.count(letter) * (index + 1))",
        "unit.count(letter) * index)",
        "sharding",
        "test_gradients_are_those_of_layers_that_gather_for_themselves",
    ),
    Fault(
        "shared blocks: layers that read the second read the first",
        'self.block = int(kind.rpartition("_")[2]) - 1',
        "self.block = 0",
        "models",
        "test_layers_with_shared_blocks_are_their_formulas",
    ),
    Fault(
        "shared blocks: attention reads the hidden states twice, and no embeddings",
        "jnp.concatenate([x, context.shared.embedded.astype(x.dtype)], -1)",
        "jnp.concatenate([x, x], -1)",
        "models",
        "test_layers_with_shared_blocks_are_their_formulas",
    ),
    Fault(
        "shared blocks: the MLP leaves a layer's adapter out",
        "self.up(for_product) + own(for_adapter)",
        "self.up(for_product)",
        "models",
        "test_layers_with_shared_blocks_are_their_formulas",
    ),
    Fault(
        "LoRA: the gate of attention has an adapter that nothing reads",
        "self.gate(for_product) + adapter_of(self.gate)(for_adapter)",
        "self.gate(for_product)",
        "families",
        "test_merged_adapters_are_the_same_model",
    ),
    Fault(
        "shared blocks: their output enters the residual stream",
        'x = self.add(x, scaled(mixed, self.output_scales["mamba"])',
        'x = self.add(x + read, scaled(mixed, self.output_scales["mamba"])',
        "models",
        "test_layers_with_shared_blocks_are_their_formulas",
    ),
    Fault(
        "LoRA: the parts of Mamba-2's first product are not merged",
        '("a", "b" if kind == "weight" else kind)',
        '"ab"',
        "families",
        "test_merged_adapters_are_the_same_model",
    ),
    Fault(
        "state space: decays have the type of the inputs",
        "triangle, rate * a[..., None], precision=HIGHEST)",
        "triangle, rate * a[..., None], precision=HIGHEST).astype(x.dtype).astype(jnp.float32)",
        "models",
        "test_errors_are_a_few_roundings_also_after_many_chunks",
    ),
    Fault(
        "gated delta nets: a state passes from one document to the next within a chunk",
        "to_end = jnp.where((segments == last[..., None])[:, :, None, None], to_end, 0)",
        "pass",
        "families",
        "test_documents_that_are_packed",
    ),
    Fault(
        "gated delta nets: a state passes from one document to the next between chunks",
        "total = jnp.where((last == earlier)[..., None, None], total, 0)",
        "pass",
        "families",
        "test_documents_that_are_packed",
    ),
    Fault(
        "gated delta nets: tokens read a state of another document",
        "from_start = jnp.where((segments == earlier[..., None])[:, :, None, None], from_start, 0)",
        "pass",
        "families",
        "test_documents_that_are_packed",
    ),
    Fault(
        "gated delta nets: a state does not pass through pieces of samples on other ranks",
        "state = one[..., :width] + kept",
        "state = one[..., :width]",
        "families",
        "test_every_mesh_computes_the_same",
    ),
    Fault(
        "gated delta nets: a state passes from one document to the next between pieces of samples on several ranks",
        "passage = delta_passage(inputs, ssm_chunk(self.model), self._chunks_at_once(inputs), before)",
        "passage = delta_passage(inputs, ssm_chunk(self.model), self._chunks_at_once(inputs), None)",
        "families",
        "test_every_mesh_computes_the_same",
    ),
    Fault(
        "convolutions: gradients of channels pass from one document to the one before",
        "term = _of_document(own * weights[tap], taps - 1 - tap, segments)",
        "term = own * weights[tap]",
        "models",
        "test_gradients_are_those_of_a_depthwise_convolution",
    ),
    Fault(
        "gated delta nets: the gradient of the inverse has one factor",
        'return (-jnp.einsum("...ik,...jk->...ij", back, inverse, precision=HIGHEST),)',
        "return (-back,)",
        "models",
        "test_the_gradient_of_the_inverse",
    ),
    Fault(
        "hybrid models: beta and decay of Megatron's gated delta nets are exchanged",
        'Row(f"{ours}.inputs.beta", (product("beta"),))',
        'Row(f"{ours}.inputs.beta", (product("alpha"),))',
        "parity",
        "test_their_logits_are_ours",
    ),
    Fault(
        "pipeline: inspect takes layers that stages skip for branches of the timetable",
        "return phase_of(around) not in LAYER_PHASES",
        "return True",
        "inspect",
        "test_layers_that_a_stage_may_skip",
    ),
    Fault(
        "hybrid models: Megatron's shares of layers are placed elsewhere",
        'is_end = old == "M" and left < 0.5',
        'is_end = old == "M" and left < 1.5',
        "convert",
        "test_settings",
    ),
    Fault(
        "a state passes from one document to the next within a chunk",
        "left = jnp.where((self.segments == self.segments[:, :, -1:])[:, :, None, None], left, 0)",
        "pass",
        "families",
        "test_documents_that_are_packed",
    ),
    Fault(
        "a state passes from one document to the next between chunks",
        "passes = passes & (own[:, :, None] == breaks[:, None])[..., None, None]",
        "pass",
        "families",
        "test_documents_that_are_packed",
    ),
    Fault(
        "the convolution reads across documents",
        "return jnp.where(same[..., None, None], x, 0)",
        "return x",
        "families",
        "test_documents_that_are_packed",
    ),
    Fault(
        "every layer of a loop over a pattern is the first of its kind",
        "place = before[letter] + run.unit.count(letter) * index + seen[letter]",
        "place = before[letter] + run.unit.count(letter) * index",
        "families",
        "test_layers_run_in_the_order_of_the_pattern",
    ),
    Fault(
        "a stage puts a layer into a slot of another kind",
        "numbers = [waiting.pop(0) if waiting and pattern[waiting[0]] == slot else PADDING for slot in slots]",
        "numbers = [waiting.pop(0) if waiting else PADDING for slot in slots]",
        "families",
        "test_stages_with_other_layers_leave_slots_empty",
    ),
    Fault(
        "the time of a layer counts for the last kind in its path",
        r'rf"layers\)*/(?:[^:]*?/)??(?:',
        r'rf"layers\)*/(?:[^:]*/)?(?:',
        "inspect",
        "test_an_operation_counts_for_the_first_kind_in_its_path",
    ),
    Fault(
        "an array that a kernel updates in registers counts as unread",
        "read += 0 if _is_result(fused, user) else _read(fused, user)",
        "continue",
        "inspect",
        "test_an_updated_array_is_read_unless_it_is_updated_in_place",
    ),
    Fault(
        "of a branch in machine code both sides count",
        "found[first : last + 1] = [min(share, other) for other in found[first : last + 1]]",
        "pass",
        "inspect",
        "test_of_a_branch_the_side_is_counted_that_threads_take",
    ),
    # --- contracts
    Fault(
        "inspect: numbers of the compute dtype are not all of a line beside wide arrays of another type",
        "or _elements(same_dtype) >= max(required.min_elements, 1) or are_arrays",
        "or are_arrays",
        "inspect",
        "test_numbers_are_counted_apart_from_wide_arrays_of_another_type",
    ),
    # --- unrolled layers
    Fault(
        "the gradients that are computed with the loss ignore the gradient of the sum",
        "lambda gradient: (gradient * of_sum).astype(gradient.dtype)",
        "lambda gradient: gradient",
        "sharding",
        "test_gradients_with_the_loss_are_those_of_float64",
    ),
    Fault(
        "unrolled ZeRO-3: the gradients of query, key and value are reduced in another order",
        "[reduced(part) for part in parts]",
        "[reduced(part) for part in parts[::-1]]",
        "models",
        "test_numbers_are_those_of_the_loop",
    ),
    Fault(
        "unrolled layers: RMSNorm's gradient leaves out that of the mean square",
        "d_x = (d_x - normal * (d_x * normal).mean(-1, keepdims=True)) * rate",
        "d_x = d_x * rate",
        "models",
        "test_numbers_are_those_of_the_loop",
    ),
    # --- multi-token prediction, and caches of windows
    Fault(
        "train: a loss of multi-token prediction counts tokens of the next document",
        "weights = jnp.where(ahead(segments, number) == segments, weights, 0)",
        "pass",
        "models",
        "test_a_prediction_counts_where_its_token_does_and_in_its_document",
    ),
    Fault(
        "train: the mask of multi-token prediction is not shifted",
        'weights = ahead(batch["loss_mask"], number)',
        'weights = batch["loss_mask"]',
        "models",
        "test_a_prediction_counts_where_its_token_does_and_in_its_document",
    ),
    Fault(
        "train: a loss of multi-token prediction is a mean of its samples' means",
        "weights / jnp.maximum(weights.sum(), 1)",
        "weights / jnp.maximum(weights.sum(1, keepdims=True), 1) / len(weights)",
        "models",
        "test_a_prediction_counts_where_its_token_does_and_in_its_document",
    ),
    Fault(
        "generate: a prompt's padding takes the places of tokens in a window's cache",
        "is_kept = (offsets < count) & (offsets >= count - slots)",
        "is_kept = offsets >= len(offsets) - slots",
        "models",
        "test_chunks_and_single_tokens_attend_as_the_whole_text_does",
    ),
    Fault(
        "generate: a prompt's first tokens read a window's cache that its last ones wrote",
        "before = lax.dynamic_index_in_dim(old, sequence, keepdims=True)",
        "before = lax.dynamic_index_in_dim(written[-1], sequence, keepdims=True)",
        "models",
        "test_chunks_and_single_tokens_attend_as_the_whole_text_does",
    ),
    Fault(
        "generate: a prefix is reused whose last tokens a window's cache no longer has",
        "return written <= self.slots + max(0, shared - self.window + 1)",
        "return True",
        "generate",
        "test_a_prefix_is_reused_as_long_as_windows_have_its_end",
    ),
    # --- parts of a corpus
    Fault(
        "preprocess --part: a line that begins exactly at the border of two parts is in neither",
        "    file.seek(begin - 1)\n",
        "    file.seek(begin)\n",
        "data/commands",
        "test_every_document_is_in_one_part_with_its_line",
    ),
    Fault(
        "preprocess --part: a row group of Parquet at the border of two parts is in both",
        "size * row // max(starts[-1], 1) < end]",
        "size * row // max(starts[-1], 1) <= end + size // 8]",
        "data/commands",
        "test_every_document_is_in_one_part_with_its_line",
    ),
    Fault(
        "merge --parts: parts are merged in the order in which they were named",
        "return [by_number[number] for number in sorted(by_number)]",
        "return list(by_number.values())",
        "data/commands",
        "test_parts_that_do_not_belong_together",
    ),
    Fault(
        "merge --parts: parts of other settings are merged",
        "if (their := theirs.settings.get(option)) != value:",
        "if (their := theirs.settings.get(option)) != value and option == '':",
        "data/commands",
        "test_parts_that_do_not_belong_together",
    ),
    Fault(
        "merge: a damaged .bin is merged",
        "                    check_crc(dataset, crc)\n",
        "",
        "data/commands",
        "test_parts_that_do_not_belong_together",
    ),
    Fault(
        "train: of several --data the last counts",
        "        values.append(value)\n    joined",
        "        values[:] = [value]\n    joined",
        "data/commands",
        "test_train_takes_data_several_times",
    ),
    # --- conversations
    Fault(
        "finetune: a message with weight 0 is trained on",
        "return weight != 0 and train is not False",
        "return True",
        "finetune",
        "test_which_messages_are_trained_on",
    ),
    Fault(
        "finetune: answers share a sample although the template writes the first one differently later on",
        "if samples and samples[-1].begins(sample):",
        "if samples:",
        "finetune",
        "test_each_answer_is_trained_on_behind_the_tokens_by_which_it_is_asked_for",
    ),
    Fault(
        "generate: a chat template's tojson escapes HTML, as Jinja's own does",
        'self.jinja.filters["tojson"] = _to_json',
        "pass",
        "finetune",
        "test_tools_and_variables_of_a_row_reach_the_template",
    ),
    Fault(
        "finetune: RoBERTa's two texts have a single separator",
        "between=2 if",
        "between=1 if",
        "finetune",
        "test_roberta_s_rows_are_the_library_s_pairs",
    ),
    Fault(
        "convert: every process of a run downloads the model",
        "float(when) >= asked",
        "float(when) < 0",
        "convert",
        "test_waiting_processes_use_the_first_one_s_download",
    ),
    # --- learning from a teacher, adapters
    Fault(
        "finetune: a teacher whose tokens have other names is believed",
        "if theirs.token(index) != tokenizer.token(index):",
        "if False:",
        "finetune",
        "test_a_teacher_of_tokens_that_does_not_fit_is_refused",
    ),
    Fault(
        "models: what adapters read is never dropped",
        "return dropout(x, low.dropout, context.dropout_keys",
        "return dropout(x, 0.0, context.dropout_keys",
        "models",
        "test_an_adapter_reads_what_dropout_leaves_and_its_product_reads_all",
    ),
    # --- sharding
    Fault(
        "sharding: gradients that waited a layer are added to the layer at work",
        "accumulators = loop.reduce_into(accumulators, slots.gradients, index + 1)",
        "accumulators = loop.reduce_into(accumulators, slots.gradients, index)",
        "sharding",
        "test_gradients_are_those_of_layers_that_gather_for_themselves",
    ),
    Fault(
        "sharding: of parameters that are gathered once a step, all layers have the first one's",
        "gather_layer(index_layer(stack, number))",
        "gather_layer(index_layer(stack, 0))",
        "sharding",
        "test_gradients_by_matrices_gathered_in_16_bits",
    ),
    Fault(
        "sharding: tokens for other ranks' experts are put where this rank has its own",
        "_starts(sizes)[rank], received)",
        "_starts(sent), received)",
        "sharding",
        "test_rows_arrive_by_ranks_and_come_home_added_up",
    ),
    Fault(
        "sharding: of a turn between ranks that share samples, a pair of chunks counts for the wrong queries",
        "early_sums = jnp.where(is_before, other_sums, HIDDEN_SCORE)",
        "early_sums = jnp.where(is_before, HIDDEN_SCORE, other_sums)",
        "train",
        "test_split_sequences_and_zero_change_nothing",
    ),
    Fault(
        "sharding: a token on the border of two slices of the vocabulary belongs to both",
        "owned = (row >= 0) & (row < rows)",
        "owned = (row >= 0) & (row <= rows)",
        "sharding",
        "test_embedding_is_a_lookup",
    ),
    Fault(
        "sharding: the sum over model ways is missing where embedded tokens enter the stream",
        "x = lax.psum(x, all_reduced) if all_reduced else x",
        "x = lax.pmean(x, all_reduced) if all_reduced else x",
        "sharding",
        "test_embedding_is_a_lookup",
    ),
    Fault(
        "sharding: padding rows of the vocabulary take part in the softmax",
        "jnp.where(column[start:] < vocab_size, logits[:, start:], NEVER)",
        "jnp.where(column[start:] < vocab_size, logits[:, start:], logits[:, start:])",
        "sharding",
        "test_padding_rows_never_win_nor_learn",
    ),
    Fault(
        "sharding: ZeRO splits the smallest dimension that divides, not the largest",
        "return max(in_layer, key=lambda i: shape[i])",
        "return min(in_layer, key=lambda i: shape[i])",
        "sharding",
        "test_a_dimension_is_chosen_whenever_one_divides",
    ),
    Fault(
        "sharding: microbatches overwrite each other's gradients outside the layers",
        "lambda a, g: add(a, g.astype(jnp.float32))",
        "lambda a, g: g.astype(jnp.float32)",
        "train",
        "test_layouts_accumulation_and_recompute_change_nothing[1x1-full-1]",
    ),
    Fault(
        "analysis: the contract forgets the gradient of the hidden states",
        'return [*lines, over_model(LOSS_BACKWARD, "all-reduce", stream.turns, elements, why)]',
        "return lines",
        "inspect",
        "test_the_whole_program_holds",
    ),
    # --- models
    Fault(
        "models: a token sees the one after it",
        "jnp.tril(jnp.ones((length, length), bool))",
        "jnp.tril(jnp.ones((length, length), bool), 1)",
        "families",
        "test_a_token_sees_only_those_before_it",
    ),
    Fault(
        "models: in blocks, keys have the gradients of the last queries alone",
        "a + _lengthened(b, a.shape[1]) for a, b",
        "a for a, b",
        "sharding",
        "test_flash_equals_plain_attention_and_its_gradients",
    ),
    Fault(
        "models: attention's scores are made in 16 bits",
        'return jnp.einsum("bgnqd,bkgd->bgnqk", query, key, preferred_element_type=jnp.float32)',
        'return jnp.einsum("bgnqd,bkgd->bgnqk", query, key)',
        "models",
        "test_products_and_masks_are_kept_and_nothing_else",
    ),
    Fault(
        "models: attention's scores are not scaled",
        "query = query * options.scale_of(shape[-1])",
        "query = query * (1.0 if options.scale is None else options.scale)",
        "sharding",
        "test_flash_equals_plain_attention_and_its_gradients",
    ),
    Fault(
        "models: two places of a layer drop the same elements",
        "of_site = jax.vmap(lambda key: jax.random.fold_in(key, site))(keys)",
        "of_site = keys",
        "families",
        "test_each_site_drops_its_own",
    ),
    Fault(
        "models: every layer drops the same elements",
        "jax.vmap(lambda key: jax.random.fold_in(key, number))(keys)",
        "keys",
        "families",
        "test_each_layer_draws_from_its_own_key",
    ),
    Fault(
        "sharding: of layers without a loop, each gets the gradient of the one behind it",
        "jnp.stack(leaf.layers)",
        "jnp.stack(leaf.layers[1:] + leaf.layers[:1])",
        "models",
        "test_numbers_are_those_of_the_loop",
    ),
    Fault(
        "models: a token keeps a group of experts fewer than it should",
        "num_better = ((other > this) | ((other == this) & is_earlier)).sum(-1)",
        "num_better = (other >= this).sum(-1)",
        "models",
        "test_output_report_and_gradients_are_those_of_every_expert_on_every_token",
    ),
    Fault(
        "models: layers behind those without experts count from 0 again",
        "layers = np.asarray(layer_numbers(model, record.name))",
        "layers = np.arange(record.shape[0])",
        "finetune",
        "test_layers_with_experts_count_on_from_those_without",
    ),
    # --- train
    Fault(
        "train: each who holds a part of a lost disk gives it, and they add up",
        "if owners[str(index[1:])] != (index[0].start or 0):",
        "if False:",
        "runtime",
        "test_parts_come_from_who_holds_them",
    ),
    Fault(
        "train: a part that is missing on a local disk is read as zeros",
        "if not (state / name / chunk).exists():",
        "if False:",
        "runtime",
        "test_a_missing_part_is_no_zero",
    ),
    Fault(
        "train: dropout follows the place in the batch, not the sample",
        'jax.vmap(lambda i: jax.random.fold_in(key, i))(batch["sample_index"])',
        'jax.vmap(lambda i: jax.random.fold_in(key, i))(batch["sample_index"] % 8)',
        "train",
        "test_dropout_is_on_and_its_keys_follow_the_sample",
    ),
    Fault(
        "train: the loss is a sum over tokens, not their mean",
        "{name: w / jnp.maximum(w.sum(), 1) for",
        "{name: w for",
        "train",
        "test_dropout_is_on_and_its_keys_follow_the_sample",
    ),
    Fault(
        "train: masked tokens count",
        "return (values * each).sum(range(weights.ndim))",
        "return (values * each.mean()).sum(range(weights.ndim))",
        "train",
        "test_masked_tokens_do_not_count",
    ),
    Fault(
        "train: the learning rate falls below its floor",
        "return lambda k: floor + (peak - floor) * DECAYS",
        "return lambda k: (peak - floor) * DECAYS",
        "train",
        "test_the_default_is_the_papers",
    ),
    Fault(
        "train: the warm-up is a step early",
        "initial + (peak - initial) * k / warmup, after)",
        "initial + (peak - initial) * (k + 1) / warmup, after)",
        "train",
        "test_every_update_has_megatrons_rate_and_decay",
    ),
    Fault(
        "train: gradients are clipped array by array",
        "return jax.tree.map(lambda gradient: gradient * factor, updates), state",
        "return jax.tree.map(lambda g: g * jnp.minimum(1.0, max_norm / optax.tree.norm(g)), updates), state",
        "train",
        "test_update_is_clipped_adamw_with_decoupled_decay",
    ),
    Fault(
        "processes: GPUs that the environment of a run hides count",
        "several_expected(config.parallel, environment) or has_gpu(environment):",
        "several_expected(config.parallel, environment) or has_gpu():",
        "runtime",
        "test_cpus_of_a_machine_whose_gpus_are_not_used",
    ),
    Fault(
        "processes: a barrier of another spelling of a folder is another barrier",
        '    key = f"mtjax/{key}"\n',
        '    key = f"mtjax/{key}/{shown or name}"\n',
        "runtime",
        "test_processes_meet_whatever_each_calls_what_it_reads",
    ),
    Fault(
        "processes: the texts of different barriers are exchanged",
        "if said[process][0] != first), None)",
        "if False), None)",
        "runtime",
        "test_processes_at_different_barriers_are_told_so",
    ),
    Fault(
        "checkpoints: a step that is saved twice in an object store has one key",
        '"state", f"mtjax/remote/{number}"',
        '"state", f"mtjax/remote/{step}"',
        "runtime",
        "test_a_step_is_saved_in_a_store_twice",
    ),
    Fault(
        "train: a best checkpoint of a step that is trained again stays in the object store",
        "        remove_later(environment.out / BEST, step)\n",
        "        pass\n",
        "train",
        "test_a_best_checkpoint_of_a_step_that_is_trained_again",
    ),
    Fault(
        "train: a best checkpoint that can't be saved ends the run",
        "consumed, wait=True)",
        "consumed, must_succeed=True)",
        "train",
        "test_a_best_checkpoint_that_cannot_be_saved_counts_as_a_failed_save",
    ),
    Fault(
        "train: the loss scale of a counter beyond the window",
        "growth >= options.loss_scale_window",
        "growth == options.loss_scale_window",
        "train",
        "test_a_counter_that_has_passed_a_shorter_window",
    ),
    # --- optimizers and their states
    Fault(
        "Muon: exchanged shards come back in another order of axes",
        "for dim, axes in reversed(exchanges):",
        "for dim, axes in exchanges:",
        "train",
        "test_updates_are_those_of_optax",
    ),
    Fault(
        "Adafactor limits the update of a stack, not of each layer",
        "of_layer = tuple(range(int(record.logical_axes[:1] == (LAYERS,)), gradient.ndim))",
        "of_layer = tuple(range(gradient.ndim))",
        "train",
        "test_updates_are_those_of_optax",
    ),
    Fault(
        "averages of squares are rounded toward zero",
        "+ (bits >> 16)",
        "+ (bits >> 32)",
        "train",
        "test_moments_in_bfloat16",
    ),
    Fault(
        "offloaded moments of skipped steps move",
        "return jax.tree.map(partial(jnp.where, self.finite), (rounded, after.mu[0], after.nu[0]), (p, mu, nu))",
        "return rounded, after.mu[0], after.nu[0]",
        "train",
        "test_a_skipped_step_moves_no_offloaded_state",
    ),
    Fault(
        "a layer's offloaded moments are read for the next one too",
        "read = on_device(self.ranks.layer(stacks[source][i], k + ahead))",
        "read = on_device(self.ranks.layer(stacks[source][i], k))",
        "train",
        "test_runs_and_checkpoints_with_and_without_offload",
    ),
    Fault(
        "offloaded states are paired by chance",
        "order = sorted(range(len(sizes)), key=lambda i: -sizes[i])",
        "order = list(range(len(sizes)))",
        "layout",
        "test_what_is_exposed_is_what_a_link_would_take",
    ),
    Fault(
        "offloaded master weights are read in the order of another stage",
        "return lax.dynamic_index_in_dim(stack, k, axis=1, keepdims=False)",
        "return lax.dynamic_index_in_dim(stack, self.layers - 1 - k, axis=1, keepdims=False)",
        "train",
        "test_the_copies_change_no_bit",
    ),
    Fault(
        "Muon's checkpoint is resumed by AdamW",
        "if then.name != now.name:",
        "if False:",
        "train",
        "test_another_optimizer_s_checkpoint_is_refused",
    ),
    Fault(
        "train: a skipped step moves the optimizer's state",
        "return jax.tree.map(partial(jnp.where, applies), (updated, optimizer), (trainable, state.optimizer))",
        "return jax.tree.map(partial(jnp.where, applies), updated, trainable), optimizer",
        "train",
        "test_a_nan_of_one_replica_skips_its_step_on_all_and_no_other[float32]",
    ),
    Fault(
        "train: a fingerprint does not see an exchange of elements",
        "return (bits * (index * jnp.uint32(2654435761) * jnp.uint32(2) + jnp.uint32(1))).sum(dtype=jnp.uint32)",
        "return bits.sum(dtype=jnp.uint32)",
        "runtime",
        "test_fingerprints_see_a_bit_and_an_exchange_on_any_mesh",
    ),
    Fault(
        "train: a checkpoint's metadata is not checked",
        'metadata.pop("checksum", None) != metadata_checksum(metadata)',
        'metadata.pop("checksum", None) is None',
        "runtime",
        "test_page_of_metadata_is_checked",
    ),
    Fault(
        "train: replicas are compared with themselves",
        "for device in devices if holding == next_most or numbers[device] != most]",
        "for device in devices if holding == next_most]",
        "train",
        "test_one_of_many_replicas_is_named",
    ),
    Fault(
        "config: a setting has no largest value",
        "return None if value <= self.most else",
        "return None if True else",
        "",
        "test_options_out_of_bounds_are_named",
    ),
    Fault(
        "train: a torn line stays in the metrics",
        "            file.truncate(size)\n        raise\n\n\nclass Lines",
        "            pass\n        raise\n\n\nclass Lines",
        "end_to_end",
        "test_lines_wait_for_room",
    ),
    Fault(
        "train: a resumed run passes over a sample",
        'return cls(step, metadata["consumed_samples"], metadata["config"], record, bits)',
        'return cls(step, metadata["consumed_samples"] + 1, metadata["config"], record, bits)',
        "runtime",
        "test_any_mesh_restores_every_bit",
    ),
    Fault(
        "train: a file of another user is a corrupted one",
        "if not url_of(folder) and (problem := next(unreadable_files(folder), None)):",
        "if problem := None:",
        "runtime",
        "test_what_only_can_not_be_read_stays_where_it_is",
    ),
    Fault(
        "train: a run whose checkpoints are all corrupted begins anew",
        "if corrupted or quarantined:",
        "if quarantined:",
        "runtime",
        "test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_anew",
    ),
    Fault(
        "train: a start at step 0 overwrites the metrics of an earlier one",
        "if from_step == 0:",
        "if from_step < 0:",
        "train",
        "test_a_run_that_begins_anew_drops_nothing",
    ),
    Fault(
        "train: two runs share a folder",
        "peers.at_end = claim_folder(folder, resume=output.resume, say=progress.say, remote=environment.remote)",
        "pass",
        "end_to_end",
        "test_a_folder_in_use_is_left_alone",
    ),
    Fault(
        "train: a heartbeat from another machine is not heard",
        "elif _last_heartbeat(path) != renewed:",
        "elif path.parent == path:",
        "train",
        "test_a_holder_on_another_machine_is_known_by_its_heartbeat",
    ),
    Fault(
        "train: a run goes on in a folder that another has taken over",
        "sys.stderr.flush()\n    os._exit(LOST)",
        "sys.stderr.flush()",
        "train",
        "test_who_was_stopped_for_too_long_does_not_go_on",
    ),
    Fault(
        "train: a silent process is not lost",
        "if now - self._heard[process] > self._silence",
        "if now < self._heard[process]",
        "runtime",
        "test_a_process_whose_pulse_stands_still_is_lost",
    ),
    Fault(
        "train: a process that is ahead is late",
        "if pulse.step < overdue]",
        "if pulse.step >= overdue]",
        "runtime",
        "test_who_has_not_come_to_a_step_that_takes_too_long_is_late",
    ),
    Fault(
        "train: a validation counts as a step that takes too long",
        "self._watched = False\n        self._times",
        "self._times",
        "train",
        "test_stacks_are_written_once",
    ),
    # --- data
    Fault(
        "data: added tokens in the settings of a tokenizer's folder are left out",
        "    tokens: list[Token] = [token for _, token in sorted(added.items())]\n",
        "    tokens: list[Token] = []\n",
        "data",
        "test_ids_are_those_of_transformers",
    ),
    Fault(
        "data: a tokenizer's folder is read by the class it names where transformers takes another one",
        "if registered and (not named or model_type in OVERRULED) else named or BACKEND\n",
        "if registered and not named else named or BACKEND\n",
        "data",
        "test_ids_are_those_of_transformers",
    ),
    Fault(
        "data: JSON lines are cut at every end of line that Unicode has",
        'for line in read_text(path).split("\\n")]\n',
        "for line in read_text(path).splitlines()]\n",
        "test_json_lines.py",
        "test_lines_end_in_a_line_feed_alone",
    ),
    Fault(
        "data: labels are the tokens themselves",
        "tokens, labels = (text[:-1], text[1:]) if",
        "tokens, labels = (text[:-1], text[:-1]) if",
        "families",
        "test_samples_are_the_shuffled_stream",
    ),
    Fault(
        "data: samples are shuffled by another seed",
        "random = np.random.RandomState(options.seed)\n\n        def build",
        "random = np.random.RandomState(options.seed + 1)\n\n        def build",
        "families",
        "test_samples_are_the_shuffled_stream",
    ),
    Fault(
        "data: a resumed run begins a step late",
        "consumed = self.batch_schedule.advance(self.start_sample, int(index))",
        "consumed = self.batch_schedule.advance(self.start_sample, int(index) + (self.start_sample > 0))",
        "data",
        "test_a_resumed_run_on_any_number_of_processes_sees_the_next_sample",
    ),
    Fault(
        "data: a masked span goes on over a special token",
        "begins[1:] |= special[:-1]",
        "begins[1:] |= False",
        "data",
        "test_words_stop_at_special_tokens",
    ),
    Fault(
        "data: a vocabulary's first merge is taken for a comment",
        'for line in lines if line.strip() and not line.startswith("#version")]',
        "for line in lines[2:] if line.strip()]",
        "data",
        "test_gpt2s_two_files_are_the_same_tokenizer",
    ),
    Fault(
        "analysis: gradients of each microbatch cross the ranks also where no loop over layers is",
        "    if not stream.unstacked:\n",
        "    if True:\n",
        "inspect",
        "test_sums_of_microbatches_may_be_reduced_where_no_loop_over_layers_is",
    ),
    # --- inspect and plan
    Fault(
        "inspect: whether a total may be smaller depends on the order of its lines",
        "hoisted, also = before.line.hoisted or line.hoisted, before.line.also or line.also",
        "hoisted, also = line.hoisted, before.line.also or line.also",
        "inspect",
        "test_sums_of_gradients_in_loops_and_once_a_step_are_counted_together",
    ),
    Fault(
        "inspect: a sum in the recompute counts or not by the order of the lines",
        "hoisted, also = before.line.hoisted or line.hoisted, before.line.also or line.also",
        "hoisted, also = before.line.hoisted or line.hoisted, line.also",
        "inspect",
        "test_of_sums_counted_together_one_may_be_in_another_phase",
    ),
    Fault(
        "inspect: what a loop sends counts once",
        "if branch else count * inner",
        "if branch else count",
        "inspect",
        "test_a_loop_multiplies",
    ),
    Fault(
        "inspect: the losses of a pipeline count in every tick",
        "times = branch.count(module.is_true_branch(instruction, callee)) if branch else count * inner",
        "times = count * inner",
        "inspect",
        "test_branches_count_once_a_microbatch_and_the_embedding_in_idle_ticks_too",
    ),
    Fault(
        "inspect: between stages, activations are taken for gradients",
        ".get((1 in steps, -1 in steps), EITHER_WAY)",
        ".get((-1 in steps, 1 in steps), EITHER_WAY)",
        "inspect",
        "test_directions_along_a_line_and_a_ring",
    ),
    Fault(
        "inspect: a product costs one FLOP for each multiplication and addition",
        "return 2 * self.m * self.k * self.n * self.batch",
        "return self.m * self.k * self.n * self.batch",
        "inspect",
        "test_flash_attention_counts_its_products_in_full",
    ),
    Fault(
        "sharding: the type of gradients on the wire is said and not done",
        "g = g.astype(reduction.comm_dtype)",
        "g = g.astype(jnp.float32)",
        "sharding",
        "test_a_sum_rounds_what_is_sent",
    ),
    Fault(
        "inspect: gradients summed in bf16 pass in programs for CPUs",
        "return dtype_bits(dtype) < dtype_bits(required.dtype) or",
        "return",
        "inspect",
        "test_gradients_summed_in_bf16",
    ),
    Fault(
        "analysis: a ring's all-reduce sends every byte once",
        '"all-reduce": 2,',
        '"all-reduce": 1,',
        "inspect",
        "test_ring_factors",
    ),
    Fault(
        "inspect: a trace of a run with other layers per stage is taken for one of this program",
        ' and name in ("attention", "unroll_layers")',
        "",
        "inspect",
        "test_a_trace_of_a_run_with_other_settings",
    ),
    Fault(
        "analysis: attention is counted without its second product",
        "return 2 * self.pairs * self.widths",
        "return self.pairs * self.widths",
        "analysis",
        "test_closed_forms_of_the_flops",
    ),
    Fault(
        "prefetch: XLA gathers the layer below before it sends gradients, beside tensor parallel collectives",
        "(after(accumulators, index) if is_tensor_parallel() else index)",
        "index",
        "sharding",
        "test_gradients_are_sent_before",
    ),
    Fault(
        "patterns: XLA gathers the layer below at once, and waits for the sums of the layer above",
        "index = after(known, index) if known and is_tensor_parallel() else index",
        "index = index",
        "sharding",
        "test_in_patterns_the_next_gather_waits",
    ),
    Fault(
        "analysis: every sum over tensor parallel ranks waits, also in the backward pass",
        "exposed[MODEL] -= hidden_sums(anatomy, plan, machine, products)",
        "exposed[MODEL] -= 0 * hidden_sums(anatomy, plan, machine, products)",
        "analysis",
        "test_parts_sum_to_the_step",
    ),
    Fault(
        "analysis: attention that writes scores out copies nothing",
        "forward, backward = forward + each, backward + each",
        "forward, backward = forward + each, backward",
        "analysis",
        "test_attention_that_writes_scores_out",
    ),
    Fault(
        "analysis: small kernels of loops are not counted",
        "found.append(Copy(LAUNCHES, 0, _launches(stack, parameters, plan)))",
        "pass",
        "analysis",
        "test_small_kernels_of_a_loop",
    ),
    Fault(
        "unrolled recompute: beside many experts a layer waits for their gradients alone",
        "largest = max((math.prod(sorted(a.shape)[-2:]) for a in arrays), default=0)",
        "largest = max((a.size for a in arrays), default=0)",
        "models",
        "test_a_recomputed_layer_waits",
    ),
    Fault(
        "analysis: with ZeRO-2 gradients are reduced once a step",
        'scattered = [("microbatches" if zero >= 2 else "1", split)]',
        'scattered = [("1", split)]',
        "analysis",
        "test_zero_1_moves_less_than_an_all_reduce",
    ),
    Fault(
        "sharding: the last stage counts losses in its idle backward halves",
        "is_last = order.when(self._is_last_chunk(work) & work.counts, out, chunk_losses, vjp)",
        "is_last = order.when(self._is_last_chunk(work), out, chunk_losses, vjp)",
        "train",
        "test_stages_change_nothing",
    ),
    Fault(
        "sharding: gradients of what all stages hold are not summed over stages",
        "(record.between_groups, record.deferred_axes)",
        "(record.between_groups, record.deferred_axes if record.is_stacked else ())",
        "train",
        "test_stages_change_nothing",
    ),
    Fault(
        "train: layers are restored in the order in which they lay",
        "if saved != orders or not (state",
        "if saved is None or not (state",
        "train",
        "test_a_checkpoint_of_stages_resumes_on_any_mesh",
    ),
    Fault(
        "analysis: a microbatch's first backward half waits a tick behind its last forward half",
        'delay = last + depth if schedule == "gpipe" else depth - 1',
        'delay = last + depth if schedule == "gpipe" else depth',
        "layout",
        "test_1f1b_turns_round_in_the_tick_of_the_last_chunk",
    ),
    Fault(
        "analysis: slots of stages are counted without those of the last group of microbatches",
        "return stages * chunks + (stages - 1 if groups > 1 else remainder)",
        "return stages * chunks + (stages - 1 if groups > 1 else 0)",
        "analysis",
        "test_formulas_say_what_timetables_hold",
    ),
    Fault(
        "gradients are not reduced between sharding groups",
        "filter(None, (record.between_groups, record.deferred_axes))",
        "filter(None, (record.deferred_axes,))",
        "sharding",
        "test_a_step_is_that_of_one_device",
    ),
    Fault(
        "2D: a norm's gradient leaves out the mean of the gradient",
        "return ((d_x - normal * along - level) * rate)",
        "return ((d_x - normal * along) * rate)",
        "sharding",
        "test_a_step_is_that_of_one_device",
    ),
    Fault(
        "ZeRO shards between sharding groups",
        "return (SHARD if SHARD in axes else DATA, CONTEXT, EXPERT)",
        "return (DATA, CONTEXT, EXPERT)",
        "sharding",
        "test_a_gradient_is_summed_over_the_axes",
    ),
    Fault(
        "analysis: what sharding groups send each other passes behind the backward pass",
        "return upfront + last + waits",
        "return upfront + waits",
        "analysis",
        "test_what_sharding_groups_send_each_other_is_exposed",
    ),
    Fault(
        "analysis: gradients that sharding groups do not divide are reduced within them alone",
        "axis=JOINED.join((*between, line.axis))",
        "axis=line.axis",
        "inspect",
        "test_split_sequences_and_zero_keep_their_contract_on_cpus",
    ),
    Fault(
        "analysis: stacks of what layers keep are not zeros first",
        "yield Copy(ZEROS, size, 1 / layers)",
        "pass",
        "analysis",
        "test_bytes_by_hand",
    ),
    Fault(
        "analysis: experts' matrices are cast as if all ranks over which ZeRO splits had the same",
        "on_device(weight, layout, mesh), mesh.degree(zero_axes(layout, weight.names))",
        "on_device(weight, layout, mesh), mesh.degree(zero_axes(layout, ()))",
        "analysis",
        "test_experts_are_split_over",
    ),
    Fault(
        "analysis: what stages keep goes into no slots",
        'in_slots = plan.is_staged and plan.recompute != "full"',
        "in_slots = False",
        "analysis",
        "test_stages_cast_once_more",
    ),
    Fault(
        "analysis: idle ticks of stages copy nothing",
        "bubble=ticks * longest - work",
        "bubble=ticks * (longest - chunks[-1][3]) - (work - copied)",
        "analysis",
        "test_a_step_on_stages_takes",
    ),
    Fault(
        "analysis: what ZeRO can't split is counted as if it could",
        'replicated, unsharded = (held.replicated if plan.residuals == "jax" else 0 for held in (counts, trainable))',
        "replicated = unsharded = 0",
        "analysis",
        "test_zero_splits_what_a_stage_holds",
    ),
    Fault(
        "analysis: shares of layers that do not add up to the model's are accepted",
        "elif sum(per_stage) != count:",
        "elif sum(per_stage) > count + 1:",
        "layout",
        "test_what_does_not_divide_is_named",
    ),
    Fault(
        "analysis: two microbatches of a pipeline's stage share a slot",
        "next(n for n in range(len(held) + 1) if n not in used)",
        "next(n for n in range(len(held) + 1) if n not in used or n == 2)",
        "layout",
        "test_a_ring_of_mailboxes_and_slots_runs_the_table",
    ),
    Fault(
        "plan: --mesh auto takes what does not fit",
        "fitting = [plan for plan in inside if needed[plan] <= limit]",
        "fitting = inside",
        "plan",
        "test_what_fits_on_no_mesh_says_what_it_needs",
    ),
    # --- interrupt and launch
    Fault(
        "interrupt: nobody hears a second Ctrl-C while C++ computes",
        "if count >= 2 or (count and",
        "if count >= 99 or (count and",
        "",
        "test_it_ends_long_before_the_program_would",
    ),
    Fault(
        "launch: wrong input is started again",
        "ended.code in (0, 2, 130)",
        "ended.code in (0, 130)",
        "launch",
        "test_what_is_not_started_again",
    ),
    Fault(
        "launch: a restart begins anew",
        'arguments = [*arguments, "--resume"]',
        "arguments = [*arguments]",
        "launch",
        "test_a_failure_is_resumed_in_the_same_folder_with_the_devices_that_are_left",
    ),
    # --- starts, time and traces
    Fault(
        "train: the folder of compiled programs is not the user's alone",
        "folder.mkdir(mode=0o700, parents=True, exist_ok=True)",
        "folder.mkdir(parents=True, exist_ok=True)",
        "runtime",
        "test_a_second_start_finds_what_the_first_compiled",
    ),
    Fault(
        "train: a compiled program that was cut off stays",
        "why.startswith(CUT_OFF) and",
        "False and",
        "runtime",
        "test_a_damaged_program_is_compiled_again_and_replaced",
    ),
    Fault(
        "train: tracing a function within another counts twice",
        "self.take(COMPILATION, end - start - inner)",
        "self.take(COMPILATION, end - start)",
        "train",
        "test_compiling_is_taken_from_what_goes_on_and_never_counted_twice",
    ),
    Fault(
        "models: neighbours do not share the counter of their dropout",
        "index >> jnp.uint32(2))",
        "index)",
        "models",
        "test_four_neighbours_share_the_words_of_one_counter",
    ),
    Fault(
        "train: steps that are done again are not lost",
        "for span in (span for span in result if span.step > from_step):",
        "for span in (span for span in result if span.step > from_step + 99):",
        "train",
        "test_a_crash_costs_the_steps_behind_the_checkpoint",
    ),
    Fault(
        "train: the pause after a run that was done is lost",
        "if before is not None and not before.ended:",
        "if before is not None:",
        "train",
        "test_time_between_an_end_and_a_later_start_is_nobodys",
    ),
    Fault(
        "train: a resumed run is a new one in its tracker",
        "json.dumps({name: tracker.id, PLACE: str(folder.resolve())})",
        "json.dumps({PLACE: str(folder.resolve())})",
        "train",
        "test_wandb_gets_settings_and_metrics_and_goes_on_in_the_same_run",
    ),
    Fault(
        "train: master weights in bfloat16 are rounded to nearest",
        "carried = jax.lax.bitcast_convert_type(array, jnp.uint32) + (bits >> 16)",
        "carried = jax.lax.bitcast_convert_type(array, jnp.uint32) + jnp.uint32(0x7FFF)",
        "train",
        "test_an_update_below_half_of_the_precision_is_made_by_chance",
    ),
    Fault(
        "train: all layers with offloaded moments are rounded alike",
        "return flat.reshape(self.count, self.layers).T",
        "return 0 * flat.reshape(self.count, self.layers).T",
        "train",
        "test_rounding_is_the_same_on_every_mesh",
    ),
    Fault(
        "inspect: operations of a GPU's trace count twice",
        'if gpus and not line.name.startswith("Stream"):',
        'if gpus and not line.name.startswith(("Stream", "XLA Ops")):',
        "inspect",
        "test_every_operation_counts_once_in_its_phase",
    ),
    # --- convert
    Fault(
        "convert: pieces of an array have the fingerprint of its beginning",
        "index = np.arange(offset + start, offset + start + piece.size, dtype=np.uint64)",
        "index = np.arange(start, start + piece.size, dtype=np.uint64)",
        "convert",
        "test_fingerprints_of_parts_add_up_to_the_whole",
    ),
    Fault(
        "convert: what can't be read is said to be a target that can't be written",
        "_named_as_target(target, inside=partial)",
        "_named_as_target(target)",
        "convert",
        "test_a_file_that_cannot_be_read_is_not_called_a_target_that_cannot_be_written",
    ),
    Fault(
        "convert: the vocabulary is padded with its last token",
        "return np.pad(array, [(0, rows - n if i == at else 0) for i, n in enumerate(array.shape)])",
        'return np.pad(array, [(0, rows - n if i == at else 0) for i, n in enumerate(array.shape)], "edge")',
        "convert",
        "test_the_vocabulary_is_padded_with_zeros",
    ),
    Fault(
        "convert: tensors in the optimizer's buffers begin at multiples of 32",
        'ALIGNMENT = 64\n"""Tensors begin',
        'ALIGNMENT = 32\n"""Tensors begin',
        "convert",
        "test_both_layouts_are_the_same_state",
    ),
    Fault(
        "convert: Adam's two moments are exchanged",
        '{"exp_avg": "mu", "exp_avg_sq": "nu"}',
        '{"exp_avg": "nu", "exp_avg_sq": "mu"}',
        "convert",
        "test_the_state_is_what_was_saved",
    ),
    Fault(
        "convert: float32 weights of another save are taken",
        "if not np.array_equal(full.astype(rounded.dtype), rounded):",
        "if full.shape != rounded.shape:",
        "convert",
        "test_a_state_of_something_else_is_refused",
    ),
    Fault(
        "convert: the parts of a flattened state are put one after the other",
        "for axis in range(len(grid)) for half in range(2)]",
        "for half in range(2) for axis in range(len(grid))]",
        "convert",
        "test_parts_that_are_flattened_are_put_together",
    ),
    Fault(
        "convert: the schedule has Adam's count",
        "counters.updates if is_adam else counters.learning_rate_steps",
        "counters.updates",
        "convert",
        "test_steps_that_megatron_skipped_do_not_count",
    ),
    Fault(
        "convert: torchtitan's queries and keys keep the order of their rows",
        "        interleaved=True,\n    )\n\n\nclass TorchtitanSource",
        "        interleaved=False,\n    )\n\n\nclass TorchtitanSource",
        "convert",
        "test_torchtitan_s_llama_is_the_same_weights",
    ),
    Fault(
        "convert: Megatron's experts are dealt to their ranks in turn",
        "rank * _count(tensors) + number",
        "number * ranks + rank",
        "convert",
        "test_all_ways_to_keep_experts_are_the_same_model",
    ),
    # --- generate
    Fault(
        "generate: a T5's text begins with the space that follows its prompt",
        "TextWriter(self.tokenizer, self.prompt if self.continues else (), self.stops)",
        "TextWriter(self.tokenizer, self.prompt, self.stops)",
        "generate",
        "test_the_text_of_an_encoder_decoder",
    ),
    Fault(
        "serve: a prompt that is only scored counts a generated token",
        "(piece for text in self._texts for piece in text.pieces) if form.has_text else ()",
        "(piece for text in self._texts for piece in text.pieces)",
        "serve",
        "test_logprobs_of_a_prompt",
    ),
    Fault(
        "evaluate: texts of lm-eval's tasks have names of special tokens",
        "self.tokenizer.decode([index for index in ids if not self._is_special(index)])",
        "self.tokenizer.decode(list(ids))",
        "evaluate",
        "test_texts_are_decoded",
    ),
    Fault(
        "generate: each model rank draws the same noise for its columns",
        "threefry(seed, varying_like(index_V, column_V), column_V.astype(jnp.uint32))",
        "threefry(seed, varying_like(index_V, column_V), (column_V % 64).astype(jnp.uint32))",
        "generate",
        "test_texts_depend",
    ),
    Fault(
        "generate: a sequence whose prompt is being read is written to by the others' steps",
        "jnp.where(active, state.positions, cache_length(cache))",
        "jnp.where(active, state.positions, 0)",
        "generate",
        "test_texts_depend",
    ),
    Fault(
        "generate: top-p counts tokens that top-k has left out",
        "jnp.where(ordered_BV >= top_k_B[:, None], jnp.exp(below_top_BV), 0)",
        "jnp.exp(below_top_BV)",
        "generate",
        "test_token_frequencies_match_probabilities",
    ),
    Fault(
        "generate: numbers of 8 bits are cut off instead of rounded",
        "jnp.round(scaled)",
        "jnp.trunc(scaled)",
        "generate",
        "test_matrices_of_8_bits",
    ),
    # --- evaluate
    Fault(
        "evaluate: the last word of a passage is encoded on its own",
        "last = len(ids) - _shared(tokenizer.encode(passage[: passage.rindex(words[-1])].rstrip()), ids)",
        'last = len(tokenizer.encode(f" {words[-1]}"))',
        "evaluate",
        "test_the_last_word_of_a_tokenizer_that_marks_words",
    ),
    Fault(
        "evaluate: a text stands behind the end of a document although the tokenizer puts its BOS in front",
        "if front := added_tokens(tokenizer).front:",
        "if front := []:",
        "generate",
        "test_first_tokens_by_tokenizer_settings_and_config",
    ),
    Fault(
        "data: ids of a corpus are cut to 32 bits before they are checked",
        "ids = np.concatenate(parts) if parts",
        "ids = np.concatenate(parts).astype(np.int32) if parts",
        "families",
        "test_ids_are_checked_before_they_are_cast",
    ),
    Fault(
        "generate: prompts share their noise",
        "sampling.seed + sample + prompt * PROMPT_STEP",
        "sampling.seed + sample",
        "generate",
        "test_every_prompt_uses_its_own_seed",
    ),
    Fault(
        "generate: texts that other weights have made are kept",
        "self._record.check()",
        "pass",
        "generate",
        "test_output_of_other_weights_or_settings_is_rejected",
    ),
    Fault(
        "generate: text that a stop string may begin in is told with a later token",
        "if len(final) < len(text) and not self._writer.is_stopped:",
        "if False:",
        "generate",
        "test_tokens_keep_their_text_with_stop_sequences",
    ),
    Fault(
        "finetune: results of a sweep with other settings are taken over",
        "names = [name for name in {**recorded, **settings} if recorded.get(name) != settings.get(name)]",
        "names = []",
        "finetune",
        "test_results_of_other_settings_are_not_taken_over",
    ),
    Fault(
        "evaluate: the window at a text's end is as short as what it counts",
        "first = max(0, stop - length - 1)",
        "first = start",
        "evaluate",
        "test_windows_are_lm_evals",
    ),
    Fault(
        "evaluate: the best checkpoint is the one with the highest perplexity",
        'Goal(f"{task}/{name}", KINDS[task].measures[name])',
        'Goal(f"{task}/{name}", True)',
        "evaluate",
        "test_what_is_best",
    ),
    # --- serve
    Fault(
        "serve: headers that do not come are waited for",
        "self._timer = self.loop.call_later(HEADER_SECONDS, self._send_timeout)",
        "self._timer = None",
        "serve",
        "test_invalid_bodies",
    ),
    Fault(
        "serve: a search for beams ends as transformers' does, not as Megatron's",
        "found[0][2] if options.megatron_stopping else",
        "self._running[0][1] if options.megatron_stopping else",
        "serve",
        "test_beams_equal_megatron_search",
    ),
    Fault(
        "serve: a client that has left is written for to the end",
        "for request in pending.requests.values():",
        "for request in ():",
        "serve",
        "test_full_queue_is_a_429_and_disconnects_free_slots",
    ),
    Fault(
        "serve: what other processes write behind the end of a text is told",
        "if not has_ended and request.on_token(token):",
        "if request.on_token(token):",
        "serve",
        "test_remote_replica_of_two_processes_equals_local_engine",
    ),
    Fault(
        "serve: what is under way at SIGTERM is cut off",
        "await self._host.idle.wait()",
        "pass",
        "serve",
        "test_curl_as_documented_and_sigterm",
    ),
    Fault(
        "serve: half a character reaches the tokenizer",
        "        text.encode()\n    except UnicodeEncodeError as e:\n        raise ApiError",
        "        pass\n    except UnicodeEncodeError as e:\n        raise ApiError",
        "serve",
        "test_error_names_the_invalid_field",
    ),
    Fault(
        "serve: a scored prompt is answered without the token behind it, where that ends the text",
        "if echo and with_logprobs and max_new_tokens == 1 else {}",
        "if False else {}",
        "serve",
        "test_token_after_a_scored_prompt_is_returned_even_if_it_is_a_stop_token",
    ),
    Fault(
        "serve: Megatron's shorter prompts are continued no further than the longest",
        "longest - len(prompt) + parsed.tokens",
        "parsed.tokens",
        "serve",
        "test_texts_segments_and_logprobs",
    ),
    # --- finetune
    Fault(
        "finetune: every pass goes through the rows in the same order",
        "np.random.default_rng([seed, epoch])",
        "np.random.default_rng([seed, 0])",
        "finetune",
        "test_each_pass_has_every_row_once",
    ),
    Fault(
        "finetune: a validation that is as good as the best counts as better",
        "not sign * value > sign * self.value",
        "not sign * value >= sign * self.value",
        "finetune",
        "test_a_run_that_does_not_get_better_ends_early",
    ),
    Fault(
        "finetune: a resumed run forgets what was best",
        'best = Best(goal, json.loads(all_gather_text("the best validation", json.dumps(history))[0]))',
        "best = Best(goal)",
        "finetune",
        "test_a_run_that_does_not_get_better_ends_early",
    ),
    Fault(
        "finetune: windows on a passage follow each other without overlap",
        "step, windows, begin = min(self.options.doc_stride, size), [], 0",
        "step, windows, begin = room, [], 0",
        "finetune",
        "test_windows_are_those_of_the_library",
    ),
    Fault(
        "finetune: an answer's last token is looked for among the first ones",
        "float(inside[start, 0] + inside[end, 1])",
        "float(inside[start, 0] + inside[end, 0])",
        "finetune",
        "test_the_best_answer_is_that_of_all_spans",
    ),
    Fault(
        "finetune: choices of different questions compete",
        "outputs.reshape(-1, choices)",
        "outputs.reshape(choices, -1).T",
        "finetune",
        "test_the_loss_is_over_the_choices",
    ),
)


def place_of(fault: Fault, package: Path) -> Path:
    """The one file with the fault's text.

    Raises:
      LookupError: the text is in no file, or in several places.
    """
    places = [path for path in sorted(package.rglob("*.py")) for _ in range(path.read_text().count(fault.old))]
    if len(places) != 1:
        raise LookupError(f"its text is in {len(places)} places")
    return places[0]


def copied(folder: Path) -> Path:
    """A copy of the checkout without what tools left behind."""
    return Path(shutil.copytree(ROOT, folder, ignore=LEFT_OUT, symlinks=True))


def failure(tree: Path, faults: Sequence[Fault], cache: Path) -> str:
    """What pytest says where a test of these faults fails in a copy of the checkout; empty where none does.

    Raises:
      LookupError: a fault's test is not among `TRIED`.
    """
    folders = sorted({f"tests/{fault.folder}" for fault in faults})
    names = " or ".join(sorted({fault.test for fault in faults}))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", TRIED, "-k", names, *folders]
    environment = os.environ | {"PYTHONPATH": str(tree), "JAX_COMPILATION_CACHE_DIR": str(cache)}
    ended = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    if ended.returncode not in (0, 1):
        raise LookupError(f"pytest ended with {ended.returncode} at {names} in {' '.join(folders)}: {ended.stderr}")
    return ended.stdout if ended.returncode else ""


def attempt(fault: Fault, number: int, folder: Path) -> str:
    """What came of a fault: "caught", "ESCAPED" or why it could not be tried."""
    tree = copied(folder / str(number))
    try:
        place = place_of(fault, tree / "mtjax")
        place.write_text(place.read_text().replace(fault.old, fault.new))
        failed = failure(tree, [fault], folder / "cache")
    except LookupError as e:
        return f"NOT TRIED: {e}"
    finally:
        shutil.rmtree(tree)
    return "caught" if failed else f"ESCAPED {fault.test}"


def main(words: list[str]) -> int:
    """Tries the faults that the words choose; 0 when all are caught."""
    chosen = [fault for fault in FAULTS if not words or any(word in fault.what for word in words)]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if failed := failure(copied(folder / "compute_spec"), chosen, folder / "cache"):
            print(f"{failed}\nThis fails without any fault.")
            return 1
        with ThreadPoolExecutor(ATTEMPTS_AT_ONCE) as pool:
            results = pool.map(attempt, chosen, range(len(chosen)), [folder] * len(chosen))
            caught = 0
            for fault, result in zip(chosen, results, strict=True):
                print(f"{fault.what}: {result}", flush=True)
                caught += result == "caught"
    print(f"{caught} of {len(chosen)} faults caught")
    return int(caught < len(chosen))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
