"""What `make test` leaves out, so that it takes some minutes on two cores.

By file, a regular expression that the case's name begins with.
"""

import re

# `make examples` runs them, beside the examples of docstrings.
EXAMPLES = {
    "packaging/test_snippets.py": r"test_examples_of_a_page|test_example_runs_alone",
    "packaging/test_site.py": r"test_(an_entry|pages_ask|the_pictures|the_search|a_plot)",  # one build
    "examples/test_alignment_and_distillation.py": r"test",
    "examples/test_integrations.py": r"test",
    "examples/test_train_llama.py": r"test_(a_packed_run|another_setting|it_starts|a_loss_that_is_not|a_run_learns)",
    "examples/test_one_page.py": r"test_(linen_and_nnx|both_ways)",
}

# `make test-full` runs them: each costs seconds, and others of the default run show the same claim. A test keeps at
# least one case by default unless a comment names the test that shows its claim.
FULL = {
    # Ops: one case for each kernel; further options, dtypes and modes with one kernel, or with plain JAX.
    "ops/test_losses.py": r"""
        test_every_shape_.*interpret-\(1,\ 1,\ 1\)|test_every_option_.*(interpret-none|xla-none-cross)
        |test_plain_loss_.*interpret-mean-cross_entropy
        |test_plain_loss_.*mosaic_tpu|test_rows_that_do_not_count_may_hold_nan\[.*interpret-(where|token_weights)
        |test_(metrics_match|vmap_over|impossible_label|confident_pred).*mosaic_tpu
        |test_shard_map_over.*xla-(fast|lean)-False|test_labels_may_be_narrower.*int16
        |test_(half_precision|shard_map_over).*mosaic_tpu
        |test_(small_logits|every_option|metrics|predicted|mean_over).*xla.*-cross|test_small_logits.*mosaic_tpu
        |test_every_option.*(interpret.*-cross|xla-none)|test_every_shape.*(triton.*-cross|xla.*-fused)
        |test_half_precision.*-cross|test_rows_that_do_not_count.*xla-(where|token_weights)
        |test_(confident|impossible|plain_loss).*xla|test_every_shape.*(xla-\(1,\ 1|mosaic_tpu)
        |test_(every_option|rows_that_do_not_count|predicted|ignore_index|minus_inf).*mosaic_tpu
        |test_rows_that_do_not_count.*xla.*-fused|test_metrics_match.*triton|test_(half_precision|small_logits).*xla
        |test_shard_map_over.*lean|test_(vmap|scan)_over.*-cross""",
    "ops/test_fused_linear_cross_entropy.py": r"""
        test_(frozen_head|mixed_precision|a_loss_of_the_sum|a_large_bias|an_infinite_token).*mosaic_tpu
        |test_one_jitted_loss.*lean|test_budget_bounds.*lean|test_(weight_layouts|width_that).*mosaic_tpu
        |test_(chunk_size|frozen_head|mixed).*xla-lean|test_weight_gradient.*fast
        |test_weight_layouts.*xla-fast|test_width_that.*xla|test_an_infinite.*xla|test_a_large_bias.*xla
        |test_(chunk_size|frozen|mixed|a_loss_of_the_sum).*triton|test_no_array.*True-lean""",
    "ops/test_fused_linear_log_probs.py": r"""
        test_(log_probs_are_what|tokens_that_do_not|large_logits).*mosaic_tpu|test_tokens_on_an_explicit.*\[P\(None
        |test_sharded_vocabulary.*False|test_half_precision.*(mosaic_tpu|xla)
        |test_(entries|log_sum_of|vmap|tokens_that|large_logits).*xla|test_log_sum_of.*mosaic_tpu
        |test_log_probs_ent.*xla-plain|test_log_probs_are_what.*xla|test_no_array.*False""",
    "ops/test_fused_linear_token_loss.py": r"""
        test_a_policy_loss_has_exact.*(\[-every\ option|\[-plain-lean|entropy-plain-lean|entropy-every\ option-fast)
        |test_kernels_make_it_too.*mosaic_tpu|test_tokens_on_an_explicit.*fast|test_half_precision.*lean
        |test_the_parts_of_the_loss.*fast
        |test_a_policy_loss_has.*entropy-plain|test_kernels_make_it_too.*xla
        |test_(numbers_of|tokens_that_do|the_cross_entropy|integers_are).*fast""",
    "ops/test_distillation.py": r"""
        test_every_divergence.*((forward_kl|jsd)-0.3-lean|(reverse_kl|tvd)-0.0-fast)
        |test_half_precision.*(reverse_kl|tvd)|test_stored_teachers.*(ignore-0.3|bucket-0.0)
        |test_one_chunk.*(distillation-without|topk-with\ )|test_tokens_that_do_not_count.*fast
        |test_vmap_is.*\[distillation|test_a_split_vocabulary.*False|test_a_loss_scale.*\[distillation
        |test_a_bucket_is_empty.*\[4|test_opposite.*(tvd|reverse)|test_half_precision.*jsd|test_one_chunk.*topk
        |test_a_probability.*(tvd|reverse)
        |test_(opposite|a_probability).*forward|test_where_both.*(tvd|reverse)|test_(a_denominator|no_buffer).*fast
        |test_a_smaller_head.*\[float16|test_likely.*fast
        |test_hopper_s_products.*fast""",
    "ops/test_attention.py": r"""
        test_rows_that_devices_share.*False|test_packed_rows_round.*triton-bfloat16-packed
        |test_nothing_as_large.*(\{\}|window)|test_the_position_that_pads.*\[1-
        |test_attention_of_this_platform.*window|test_splash_has.*ragged|test_chunks_of_queries.*None
        |test_a_part_of_the_queries.*plain|test_a_window_of_the_row.*(2147483647|9223372036854775808)
        |test_chunks_have.*padded|test_attention_of_this.*all|test_blocks_are.*packed-(150|1\])""",
    "ops/test_decode_attention.py": r"""
        test_half_precision.*(xla|one\ slot)|test_a_token_that_is_padding.*triton|test_slots_beyond.*xla
        |test_float32_in_xla.*(True|one\ slot)""",
    "ops/test_attention_sinks.py": r"test_sinks_have_the_values.*(plain|window)",
    "ops/test_contract.py": r"""
        test_(flax_variables|numpy_arrays).*(fast|layer_norm|fused_add|geglu|apply_mrope|sparsemax|integer_labels)
        |test_(flax_variables|numpy_arrays|plain_jax).*(causal_lm_loss|gated_mlp|log_probs|apply_rope)
        |test_(flax_variables|numpy_arrays|plain_jax|there_is_no).*(norm|geglu|swiglu|softmax|token_loss|sparse|dyt|mrope)
        |test_(flax_variables|numpy_arrays|plain_jax).*(causal_attention|gated_delta|conv1d)
        |test_there_is_no.*(apply_rope|fused)
        |test_a_second_eager.*(norm|conv1d|apply|softmax|sparsemax|dyt|relu|glu|token_loss|causal_lm|fused_linear_c)
        |test_a_second_eager.*(gated_delta|grouped_matmul|moe_mlp)""",
    "ops/test_dyt.py": r"test_the_largest.*bfloat16|test_every_shape.*300|test_the_smallest",
    "ops/test_explicit_mesh.py": r"""
        test_rows_stay.*(layer_norm|nothing|geglu|swiglu-triton)|test_fused_loss.*fast
        |test_rows_stay.*(fused_add|triton|of\ split\ columns)""",
    "ops/test_forward_mode.py": r".*eager",
    "ops/test_gated_mlp.py": r"""
        test_every_shape_.*\(\)-(gelu|silu)|test_half_precision.*gelu\]|test_vmap.*all\ mapped
        |test_what_is_frozen.*(up_kernel-2|interpret.*kernel-[12]-)|test_what_is_frozen.*kept
        |test_half_precision.*(xla.*silu|tanh)
        |test_every_shape.*(xla.*gelu|tanh)|test_gates_made.*xla|test_vmap.*triton|test_shard_map.*False
        |test_hopper_is_no_worse.*\[float16|test_hopper_maps.*(\[map-kept|vmap-recomputed)""",
    "ops/test_glu.py": r"""
        test_every_shape.*(gelu|tanh)-side|test_zeros_give.*gelu
        |test_side_by_side.*gelu\]|test_mixed_dtypes.*triton
        |test_vmap.*all|test_shard_map.*(False-gelu|True-silu)|test_side_by_side.*xla
        |test_(every_shape|half|large_gates|gates_up|value_is|zeros|vmap\[).*xla|test_every_shape.*3000
        |test_half.*tanh|test_side_by_side.*tanh|test_vmap_side.*triton""",
    "ops/test_group_norm.py": r"""
        test_every_layout.*\[(1-2|1--1|3-1|3--1|6-1|6-2)\]
        |test_the_largest.*bfloat16|test_every_shape.*300""",
    # The products of moe_mlp's test_shard_map are these.
    "ops/experts/test_grouped_matmul.py": r"""
        test_groups_of_any.*even-w|test_shard_map
        |test_groups_of_any.*unequal|test_wrong_sizes_are_nan_under.*33|test_any_number.*\(1,\ 1""",
    # On Hopper both modes share what makes the logits, and each has its own products in test_values_and_gradients.
    "ops/test_hopper.py": r"""
        test_values_and_gradients.*-256-\(300|test_(weight_layouts|tokens_that_do|a_logit_scale|large_and).*fast
        |test_metrics_are.*lean|test_heads_in_a_loop.*(fast-map|lean-vmap)|test_runs_inside.*False""",
    "ops/test_layer_norm.py": r"""
        test_the_largest.*bfloat16|test_every_shape.*300.*triton
        |test_half.*(xla|mosaic_tpu)|test_the_largest.*xla|test_every_shape.*300.*xla""",
    "ops/test_rms_norm.py": r"""
        test_(without_a_residual|the_residual_stream|an_unused_output|llama_rounds|float32_parameters).*mosaic_tpu
        |test_(rows_of_zeros|a_row_of_nan).*mosaic_tpu|test_the_smallest.*(1e-38|mosaic_tpu)
        |test_the_largest.*bfloat16|test_every_option.*(triton|mosaic_tpu):interpret.*(gemma|none)
        |test_vmap.*all\ mapped|test_every_casting_mode.*interpret-none
        |test_checkpoint.*interpret|test_half_precision.*mosaic_tpu|test_(without_a_residual|scan).*triton
        |test_is_the_sum.*(xla|mosaic_tpu)|test_the_largest.*mosaic_tpu
        |test_(rows_do_not_see|no_more_than).*(xla|mosaic_tpu)
        |test_(the_residual_stream|an_unused).*xla|test_shard_map.*xla
        |test_every_shape.*300.*interpret
        |test_(every_option|both_inputs).*mosaic_tpu|test_(every_casting|llama_rounds).*triton
        |test_(half|the_smallest|vmap).*xla|test_xla.*Explicit
        |test_every_shape.*300.*xla""",
    # Its products are grouped_matmul's, which is scanned and rematerialised by itself.
    "ops/experts/test_moe_mlp.py": r"""
        test_every_activation.*(gelu|gelu_tanh)\]
        |test_every_activation.*-silu\]|test_(scan|checkpoint)""",
    # Values and gradients are float64's in test_every_shape and test_mrope_matches, and phases complex numbers' in
    # test_rotation: distances, the inverse and equal positions follow from them.
    "ops/test_rope.py": r"""
        test_(score_depends|gradient_is_the_inverse|mrope_of_equal)|test_vmap.*all\ mapped-interleaved
        |test_every_shape.*(R=10|T=5)|test_xla.*Explicit|test_shard_map.*(replicated\ table-True|split\ table-False)
        |test_mrope_matches.*-2""",
    "ops/test_sharded_logits.py": r"test_split_classes.*(mean-False|none-True)",
    "ops/test_sharded_vocabulary.py": r"""
        test_sharded_vocabulary_equals.*(mean-lean|none-lean-True)|test_shards_of_any.*dv
        |test_a_shard_of_padding.*mosaic_tpu""",
    "ops/test_sliced_head.py": r"test_loss_metrics.*width-lean",
    "ops/test_rope_table.py": r"test_tables_are.*(dynamic|scaling5|scaling7)",
    "ops/test_gated_rms_norm.py": r"test_the_largest.*bfloat16|test_every_shape.*300|test_shard_map.*False|test_scan",
    "ops/test_poly_norm.py": r"test_the_largest.*bfloat16|test_every_shape.*300",
    "ops/test_softmax.py": r"test_every_shape.*3000|test_shard_map.*(False|sparse)|test_xla.*Explicit",
    "ops/test_refusals.py": r"test_what_is_not_refused.*\[(?!1-(rms_norm|causal_attention-(splash|mosaic_gpu)))",
    "ops/test_tpu_races.py": r"test_cores_do_not_race_where",
    # Losses: their types are rows of one table of formulas.
    "losses/test_packed.py": r"""
        test_policy_losses.*tokens|test_rows_over.*shard_map|test_a_policy_loss.*(bnpo|luspo)
        |test_a_policy_loss_with_a_row.*(vespo|sapo|cispo|dr_grpo)|test_rows_over.*explicit
        |test_micro_batches.*vespo|test_a_policy_loss_with.*gmpo""",
    "losses/test_policy.py": r"""
        test_(ratios_that|a_fresh_sample).*\[(bnpo|dr_grpo|luspo|cispo|gmpo)-
        |test_the_token_form.*(bnpo|dr_grpo|luspo)|test_a_token_that_the_sampler.*cispo
        |test_a_token_that_the_sampler.*(sapo|grpo)|test_the_token_form.*(sapo|grpo)|test_ratios_that.*sapo""",
    "losses/test_preference.py": r"test_far_ratios.*\[(hinge|robust|bco_pair|aot|apo_zero|apo_down|nca_pair)-",
    "losses/test_distillation.py": r"test_values_and_gradients.*\[(sum|none)-(js|tv)",
    "losses/test_sampler.py": r"test_a_ratio_beyond.*(token_mask-rows|sequence_truncate-packed|token_truncate-rows)",
    "layers/test_norms.py": r"test_a_layer_runs_alike.*(Poly|GroupNorm0|DyT)|test_keeps_the_inputs.*(Poly|GroupNorm0)",
    "layers/test_mlp.py": r"test_one_op_has.*(geglu|None.*-swiglu|\('float32)|test_every_parameter_has.*(swiglu|exact)",
    # Models
    # Micro-batches with a normalizer of the whole batch add up in models/test_training.py.
    "models/test_causal_lm.py": r"""
        test_each_kept_position.*(False-|True-\[)|test_four_micro_batches
        |test_no_logits_buffer.*(False-True|True-False)
        |test_loss_on_logits.*kernel|test_beside_layers.*none
        |test_a_rope_scaling.*scaling1|test_without_labels.*None|test_metrics_without.*False
        |test_the_bound_is_of.*None|test_each_kept_position.*True-12|test_a_rope_scaling.*scaling0
        |test_beside_layers.*dots|test_a_batch_of_no.*kernels1|test_with_labels_comes.*plain|test_tokens_may_be
        |test_a_rope_scaling.*scaling3|test_with_labels_comes.*(kernel|fused-None)|test_with_labels_and.*(kernel|plain)""",
    "models/test_decoder.py": r"""
        test_layers_of.*aBBaaBBa|test_scanned_patterns.*aabaaba|test_projections.*linear
        |test_hopper_s_feed.*none-False|test_projections_in.*lora""",
    "models/test_embedding.py": r"""
        test_a_tied_head_s.*(float16-1.6|bfloat16-0.51-\((2|1),)
        |test_a_tied_head_s.*float32|test_a_gradient_is.*float32""",
    "models/test_experts.py": r"test_(files_have|a_layer_is).*\[(mixtral|olmoe)|test_(files_have|a_layer_is).*qwen3",
    # By default a loss is exported; here a whole step and a model are.
    "models/test_export.py": r"test_a_loss_and_its_gradients.*fast|test_a_training_step_and",
    "models/generation/test_generation.py": r"""
        test_log_probabilities.*\{\}|test_sequences_of_a_prompt.*likeliest|test_prompts_may_be
        |test_a_prompt_is_attended.*\[1-""",
    # Scanned layers are the unrolled ones in models/test_decoder.py.
    "models/test_llama.py": r"""
        test_scanned_and_unrolled|test_a_tied_bfloat16.*True|test_loss_and_every.*untied
        |test_rematerialisation.*full""",
    "models/test_lora.py": r"""
        test_a_merged_model.*False|test_saved_adapters.*False|test_no_product.*(full|unrolled)
        |test_damaged.*(slow_choice|names|no_finite)|test_gradients_of_adapters.*\[full|test_adapters_on_some
        |test_gradients_of_adapters.*unrolled|test_a_rank_may|test_no_product.*q\ and\ v
        |test_a_layer_keeps.*dots""",
    # Sharded tokens stay so in ops/test_fused_linear_log_probs.py.
    "models/test_log_probs.py": r"test_logit_scale.*False|test_token_loss_of_a_sharded|test_a_batch_that_is",
    "models/test_lora_outside.py": r"""
        test_all_of_it_is_saved.*modules|test_all_of_it_computes.*mesh|test_hidden_states_and_head""",
    "models/test_parameters.py": r"test_adapters_have_peft.*scanned",
    # test_linear_attention.py has Qwen3-Next and reads Qwen3.5's files.
    "models/test_parity.py": r"""
        test_numbers_of_committed.*(qwen2|gemma2|smollm3|mixtral|olmoe)|test_bfloat16_of_fresh.*\[(?!llama|gemma2)
        |test_numbers_of_committed.*(olmo2|gemma3|qwen3_moe|qwen3_next|qwen3_5_moe|llama\])""",
    "models/test_random_configs.py": r"test_transformers_computes.*-1\]",
    "models/test_saving.py": r"test_after_kill|test_a_kill_at.*(weights-(1_files-2|2_files-1)|all)",
    "models/parallel/test_sharded_model.py": r"""
        test_sharded_loss.*fused-AxisType.Auto|test_sharded_steps_in_micro|test_a_sharded_model_without.*kernels1
        |test_a_mesh_that_is_not.*Auto""",
    "models/test_tiles.py": r"test_tiled_feed_forward.*\[llama\]",
    "models/test_quantized.py": r"""
        test_loss_and_gradients.*unrolled|test_quantised_weights_on_a_mesh|test_a_value_is_within.*-1-""",
    # Files of such adapters are loaded into a stack, and its loss compared, by test_ranks_and_alphas_... there.
    "models/test_lora_targets.py": r"test_layers_with_ranks_and_alphas_of_their_own_compute",
    # By default the sums are right on average; here they train.
    "models/test_stochastic_rounding.py": r"test_200_steps",
    # In bfloat16 each op is compared by itself, and in float32 the whole training.
    "models/test_convergence.py": r"test_bfloat16_losses|test_a_gradient_scaled",
    "models/test_training.py": r"test_micro_batches_of_a_policy",
    # Beyond the length in training, generation is shown by the test of keys that were turned otherwise.
    "models/test_phi3.py": r"test_each_new_token|test_adapters_are_on|test_codes_of|test_a_text_that_grows",
    "models/test_checkpoint.py": r"test_each_parameter.*(False-(rule|none)|True-(none|rule))",
    # commands/test_generate.py loads such a model and speaks with it.
    "models/test_adapted_source.py": r"test_adapters_load_as",
    # The loss under two axes that split the parameters is in models/parallel/test_tensor_and_sequence.py, and a model
    # in a shard_map in models/test_log_probs.py.
    "models/parallel/test_layout.py": r"test_an_axis_that.*Auto|test_parameters_that_two_axes|test_a_model_s_gradients",
    # Commands and the rest: what differs between cases is shown by faster tests of the same part.
    "chat/test_template.py": r"test_two_thousand.*(added|tilde)",
    # Rows that fill a batch: models/test_router_padding.py, and in micro-batches trainers/test_grpo.py.
    "trainers/test_finetune.py": r"test_rows_that_fill|test_perplexity.*True",
    "commands/test_show.py": r"test_what_is_shown.*(texts.jsonl-(\]|--pack --eval)|chats.jsonl---pack\])",
    "commands/test_generate.py": r"test_a_text_goes_on.*likeliest",
    "trainers/test_grpo.py": r"test_the_update_of_packed.*corrected",
    # A run that goes on from its newest checkpoint is in trainers/test_finetune.py.
    "trainers/test_runs.py": r"test_a_run_that_is_killed",
    "trainers/test_dpo.py": r"test_the_losses_of_micro.*orpo|test_the_loss_of_packed.*\[(?!sigmoid|orpo)",
    # A run that changes its mesh: examples/test_integrations.py and training/test_adamw_8bit.py.
    "trainers/test_finetune_mesh.py": r"test_adapters_of_a_run_that_changes",
    # The trainer's own claims: a kill is in trainers/test_runs.py, the loss's memory in models/test_causal_lm.py,
    # kernels in models/test_convergence.py and micro-batches in models/test_training.py.
    "examples/test_train_llama.py": r"test_a_killed_run|test_the_fused_loss_takes|test_without_kernels",
    # Packed documents have the loss that they have alone in models/test_causal_lm.py, and in a run in test_calls.py.
    "training/test_packing.py": r"test_a_packed_batch_has_loss",
    "training/test_simulated_devices.py": r"test_programs.*setting",
    "training/test_adamw_8bit.py": r"test_a_run_goes_on_exactly.*bfloat16",
    # The estimates of planner/test_estimate.py stand on the same numbers.
    "planner/test_architectures.py": r"test_models_have_as_many",
    "planner/test_advice.py": r"test_advice_that_is_followed.*(t4|l4|v5e|a100)",
    "planner/test_command.py": r"test_the_size_that_is.*micro-batches",
    "examples/test_one_page.py": r"test_the_swapped.*fused",
    "test_switches.py": r"""
        test_a_program.*(qdora|rounded|generate)|test_kernels_of_devices.*L4|test_kernels_of_devices.*H200
        |test_programs_run""",
    "test_fuzz.py": r"test_a_fault.*NaN",
    "trainers/test_finetune_adapters.py": r"test_options_of_new",
    "packaging/test_import.py": r"test_what_only.*plan",
}


def _compiled(table: dict[str, str]) -> dict[str, re.Pattern]:
    return {file: re.compile(pattern, re.VERBOSE if "\n" in pattern else 0) for file, pattern in table.items()}


_EXAMPLES, _FULL = _compiled(EXAMPLES), _compiled(FULL)


def is_an_example(file: str, name: str) -> bool:
    """Whether a case, such as `test_vmap[xla]` of `ops/test_rope.py`, is for `make examples`."""
    return file in _EXAMPLES and _EXAMPLES[file].match(name) is not None


def is_for_the_full_run(file: str, name: str) -> bool:
    """Whether a case is for `make test-full`."""
    return file in _FULL and _FULL[file].match(name) is not None
