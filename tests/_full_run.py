"""Cases that only `make test-full` runs: each costs seconds, and others of the default run show the same claim.

By file, a regular expression that the case's name begins with. A test keeps at least one case by default unless a
comment names the test that shows its claim.
"""

import re

CASES = {
    # Ops: one case for each kernel; further options, dtypes and modes with one kernel, or with plain JAX.
    "ops/test_losses.py": r"""
        test_every_shape_.*interpret-\(1,\ 1,\ 1\)
        |test_every_option_.*(interpret-none|xla-none-cross)
        |test_half_precision_.*mosaic_tpu:interpret-.*-cross_entropy
        |test_plain_loss_.*interpret-mean-cross_entropy|test_plain_loss_.*mosaic_tpu
        |test_rows_that_do_not_count_may_hold_nan\[.*interpret-(where|token_weights)
        |test_(metrics_match|vmap_over|impossible_label|confident_pred).*mosaic_tpu
        |test_shard_map_over.*xla-(fast|lean)-False
        |test_labels_may_be_narrower.*int16""",
    "ops/test_fused_linear_cross_entropy.py": r"""
        test_(frozen_head|mixed_precision|chunk_size|a_loss_of_the_sum|a_large_bias|an_infinite_token).*mosaic_tpu
        |test_one_jitted_loss.*lean|test_budget_bounds.*lean""",
    "ops/test_fused_linear_log_probs.py": r"""
        test_(log_probs_are_what|tokens_that_do_not|large_logits).*mosaic_tpu
        |test_tokens_on_an_explicit.*\[P\(None|test_sharded_vocabulary.*False""",
    "ops/test_fused_linear_token_loss.py": r"""
        test_a_policy_loss_has_exact.*(\[-every\ option|\[-plain-lean|entropy-plain-lean|entropy-every\ option-fast)
        |test_kernels_make_it_too.*mosaic_tpu|test_tokens_on_an_explicit.*fast
        |test_half_precision.*lean|test_the_parts_of_the_loss.*fast""",
    "ops/test_distillation.py": r"""
        test_every_divergence.*((forward_kl|jsd)-0.3-lean|(reverse_kl|tvd)-0.0-fast)
        |test_half_precision.*(reverse_kl|tvd)|test_stored_teachers.*(ignore-0.3|bucket-0.0)
        |test_one_chunk.*(distillation-without|topk-with\ )|test_tokens_that_do_not_count.*fast
        |test_vmap_is.*\[distillation|test_a_split_vocabulary.*False|test_a_loss_scale.*\[distillation
        |test_a_bucket_is_empty.*\[4""",
    "ops/test_attention.py": r"""
        test_rows_that_devices_share.*False|test_packed_rows_round.*triton-bfloat16-packed
        |test_nothing_as_large.*(\{\}|window)|test_the_position_that_pads.*\[1-
        |test_attention_of_this_platform.*window|test_splash_has.*ragged|test_chunks_of_queries.*None
        |test_a_part_of_the_queries.*plain|test_a_window_of_the_row.*(2147483647|9223372036854775808)""",
    "ops/test_attention_sinks.py": r"test_sinks_have_the_values.*(plain|window)",
    "ops/test_contract.py": r"""
        test_(flax_variables|numpy_arrays).*(fast|layer_norm|fused_add|geglu|apply_mrope|sparsemax|integer_labels)
        |test_plain_jax_has_second.*(layer_norm|fused_add|geglu|apply_mrope|integer_labels)""",
    "ops/test_dyt.py": r"test_the_largest.*bfloat16",
    "ops/test_explicit_mesh.py": r"test_rows_stay.*(layer_norm|nothing|geglu|swiglu-triton)|test_fused_loss.*fast",
    "ops/test_forward_mode.py": r".*eager",
    "ops/test_gated_mlp.py": r"""
        test_every_shape_.*\(\)-(gelu|silu)|test_half_precision.*gelu\]|test_vmap.*all\ mapped
        |test_what_is_frozen.*(up_kernel-2|interpret.*kernel-[12]-)""",
    "ops/test_glu.py": r"""
        test_every_shape.*\(1,\ 3000\)-(gelu|silu-side)|test_every_shape.*(gelu|tanh)-side|test_zeros_give.*gelu
        |test_side_by_side.*gelu\]""",
    "ops/test_group_norm.py": r"test_every_layout.*\[(1-2|1--1|3-1|3--1|6-1|6-2)\]",
    "ops/test_grouped_matmul.py": r"test_groups_of_any.*(even-w|one\ has\ all)|test_shard_map.*False",
    "ops/test_layer_norm.py": r"test_the_largest.*bfloat16",
    "ops/test_rms_norm.py": r"""
        test_(without_a_residual|the_residual_stream|an_unused_output|llama_rounds|float32_parameters).*mosaic_tpu
        |test_(rows_of_zeros|a_row_of_nan).*mosaic_tpu|test_the_smallest.*(1e-38|mosaic_tpu)|test_the_largest.*bfloat16
        |test_every_option.*(triton|mosaic_tpu):interpret.*(gemma|none)|test_vmap.*all\ mapped
        |test_every_casting_mode.*interpret-none|test_shard_map.*xla-False|test_checkpoint.*interpret""",
    "ops/test_moe_mlp.py": r"test_every_activation.*(gelu|gelu_tanh)\]",
    "ops/test_rope.py": r"""
        test_(vmap|mrope_under_vmap).*interpret|test_vmap.*all\ mapped-interleaved|test_mrope_matches.*xla-2
        |test_every_shape.*R=10""",
    "ops/test_sharded_logits.py": r"test_split_classes.*(mean-False|none-True)",
    "ops/test_sharded_vocabulary.py": r"test_sharded_vocabulary.*(mean-False|none-True)",
    "ops/test_sliced_head.py": r"test_loss_metrics.*width-lean",
    "ops/test_rope_table.py": r"test_tables_are.*(dynamic|scaling5|scaling7)",
    # Losses: their types are rows of one table of formulas.
    "losses/test_packed.py": r"test_policy_losses.*tokens|test_rows_over.*shard_map|test_a_policy_loss.*(bnpo|luspo)",
    "losses/test_policy.py": r"""
        test_(ratios_that|a_fresh_sample).*\[(bnpo|dr_grpo|luspo|cispo|gmpo)-|test_the_token_form.*(bnpo|dr_grpo|luspo)
        |test_a_token_that_the_sampler.*cispo""",
    "losses/test_preference.py": r"test_far_ratios.*\[(hinge|robust|bco_pair|aot|apo_zero|apo_down|nca_pair)-",
    "losses/test_distillation.py": r"test_values_and_gradients.*\[(sum|none)-(js|tv)|test_values.*mean-cosine",
    "losses/test_sampler.py": r"test_a_ratio_beyond.*(token_mask-rows|sequence_truncate-packed|token_truncate-rows)",
    "layers/test_mlp.py": r"test_one_op_has.*(exact\ geglu|None.*-swiglu|bfloat16.*-geglu)",
    # Models
    "models/test_causal_lm.py": r"""
        test_each_kept_position.*(False-1\]|False-12|True-\[)|test_four_micro_batches.*plain
        |test_no_logits_buffer.*(False-True|True-False)|test_tokens_may_be.*(plain|kernel)
        |test_loss_on_logits.*kernel|test_beside_layers.*none|test_with_labels_comes.*(plain-None|kernel-None)
        |test_a_rope_scaling.*scaling1|test_without_labels.*None|test_metrics_without.*False
        |test_the_bound_is_of.*None""",
    "models/test_decoder.py": r"test_layers_of.*aBBaaBBa|test_scanned_patterns.*aabaaba|test_projections.*linear",
    "models/test_embedding.py": r"test_a_tied_head_s.*(float16-1.6|bfloat16-0.51-\((2|1),)",
    "models/test_experts.py": r"test_(files_have|a_layer_is).*\[(mixtral|olmoe)",
    "models/test_export.py": r"test_a_loss_and_its_gradients.*fast",
    "models/test_generation.py": r"test_log_probabilities.*\{\}|test_sequences_of_a_prompt.*likeliest",
    "models/test_llama.py": r"test_a_tied_bfloat16.*True|test_loss_and_every.*untied|test_rematerialisation.*full",
    "models/test_lora.py": r"""
        test_a_merged_model.*False|test_saved_adapters.*False|test_no_product.*(full|unrolled)|test_damaged.*slow_choice
        |test_gradients_of_adapters.*\[full""",
    "models/test_log_probs.py": r"test_a_batch_that_is.*Auto|test_logit_scale.*False|test_token_loss_of_a_sharded",
    "models/test_lora_outside.py": r"test_all_of_it_is_saved.*modules|test_all_of_it_computes.*mesh",
    "models/test_parameters.py": r"test_adapters_have_peft.*scanned",
    "models/test_parity.py": r"""
        test_numbers_of_committed.*(qwen2|gemma2|smollm3|mixtral|olmoe)
        |test_bfloat16_of_fresh.*\[(?!llama|gemma2)""",
    "models/test_random_configs.py": r"test_transformers_computes.*-1\]",
    "models/test_saving.py": r"test_after_kill|test_a_kill_at.*(weights-(1_files-2|2_files-1)|all-1|all-2_files-1)",
    "models/test_sharded_model.py": r"test_sharded_loss.*fused-AxisType.Auto",
    "models/test_tiles.py": r"test_tiled_feed_forward.*\[llama\]",
    "models/test_quantized.py": r"test_loss_and_gradients.*unrolled",
    # Files of such adapters are loaded into a stack, and its loss compared, by test_ranks_and_alphas_... there.
    "models/test_lora_targets.py": r"test_layers_with_ranks_and_alphas_of_their_own_compute",
    # By default the sums are right on average; here they train.
    "models/test_stochastic_rounding.py": r"test_200_steps",
    # In bfloat16 each op is compared by itself, and in float32 the whole training.
    "models/test_convergence.py": r"test_bfloat16_losses",
    # Commands and the rest: what differs between cases is shown by faster tests of the same part.
    "commands/test_chat.py": r"test_two_thousand.*(added|tilde)",
    "commands/test_finetune.py": r"test_rows_that_fill.*True|test_perplexity.*True",
    "commands/test_generate.py": r"test_a_text_goes_on.*likeliest",
    "commands/test_grpo.py": r"test_the_update_of_packed.*\[\{\}",
    "commands/test_runs.py": r"test_a_run_that_is_killed.*dpo",
    "commands/test_dpo.py": r"test_the_losses_of_micro.*orpo",
    # A run that changes its mesh: examples/test_integrations.py and training/test_adamw_8bit.py.
    "commands/test_finetune_mesh.py": r"test_adapters_of_a_run_that_changes",
    # The trainer's own claims: a kill is in commands/test_runs.py, the loss's memory in models/test_causal_lm.py,
    # kernels in models/test_convergence.py and micro-batches in models/test_training.py.
    "examples/test_train_llama.py": r"test_a_killed_run|test_the_fused_loss_takes|test_without_kernels",
    "training/test_adamw_8bit.py": r"test_a_run_goes_on_exactly.*bfloat16",
    "planner/test_advice.py": r"test_advice_that_is_followed.*(t4|l4|v5e)",
    "planner/test_command.py": r"test_the_size_that_is.*micro-batches",
    "examples/test_one_page.py": r"test_the_swapped.*fused",
    "test_switches.py": r"test_a_program.*(qdora|rounded|generate)|test_kernels_of_devices.*L4",
    "test_fuzz.py": r"test_a_fault.*NaN",
}
_PATTERNS = {file: re.compile(pattern, re.VERBOSE if "\n" in pattern else 0) for file, pattern in CASES.items()}


def is_for_the_full_run(file: str, name: str) -> bool:
    """Whether a case, such as `test_vmap[xla]` of `ops/test_rope.py`, is one of them."""
    return file in _PATTERNS and _PATTERNS[file].match(name) is not None
