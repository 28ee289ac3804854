"""Ways in which published evaluation tools have gone wrong, and for each the test that would notice it here.

The tests are elsewhere; this table says where. A reference is a test of this folder, or a whole file of tests.
"""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

PITFALLS: dict[int, tuple[str, ...]] = {
    # Perplexity.
    # A number is called "sliding window" though the text was cut to one window.
    1: (
        "test_perplexity.py::test_prefix_runs_one_window_of_the_longest_length_per_document",
        "test_protocols.py::test_the_number_of_windows_is_the_closed_form",
    ),
    # Where two windows meet, tokens are scored by both or by neither.
    2: (
        "test_protocols.py::test_windows_score_every_token_once_with_enough_before_it",
        "test_protocols.py::test_rolling_windows_are_those_of_the_harness",
    ),
    # Labels are shifted once too often, or not at all.
    3: (
        "test_scoring.py::test_a_model_that_is_certain_and_right_loses_exactly_nothing",
        "test_scoring.py::test_a_model_that_is_one_token_off_loses_everywhere",
        "test_perplexity.py::test_a_certain_model_has_perplexity_one",
    ),
    # A window of ten tokens weighs as much as one of a thousand.
    4: (
        "test_records.py::test_the_token_mean_and_the_window_mean_are_both_there_and_differ",
        "test_perplexity.py::test_the_headline_is_the_token_mean_and_not_the_mean_over_windows",
    ),
    # Perplexities are averaged, instead of the losses that they are made of.
    5: (
        "test_records.py::test_the_mean_over_documents_is_of_losses_and_not_of_perplexities",
        "test_metrics.py::test_perplexity_is_not_the_mean_of_perplexities",
    ),
    # A first token is counted that nothing stood before.
    6: ("test_perplexity.py::test_empty_and_one_token_documents_are_harmless",),
    # Tokenizer and evaluation both put a start token in front.
    7: (
        "test_perplexity.py::test_every_window_begins_with_one_bos",
        "test_lm_eval.py::test_bos_is_never_doubled",
    ),
    # A model that was always trained with a start token is read without; or one without any crashes.
    8: (
        "test_data.py::test_bos_auto_does_what_the_tokenizer_does",
        "test_data.py::test_bos_always_and_never_overrule_the_tokenizer",
    ),
    # The start token stands before the first window only.
    9: ("test_perplexity.py::test_every_window_begins_with_one_bos",),
    # The rest of a text is scored with hardly any context.
    10: ("test_protocols.py::test_windows_score_every_token_once_with_enough_before_it",),
    # Every length scores another text, so that a curve over lengths means little.
    11: (
        "test_protocols.py::test_the_same_tokens_are_the_targets_at_every_length",
        "test_perplexity.py::test_same_targets_are_predicted_from_ever_more_text",
    ),
    # Padding is scored, or attended to.
    12: (
        "test_perplexity.py::test_batch_size_does_not_change_the_result",
        "test_scoring.py::test_batches_hold_equal_items_only_and_lose_none",
        "test_running.py::test_a_left_padded_row_equals_the_row_alone",
    ),
    # Token ids made by one tokenizer are fed to a model with another.
    13: ("test_data.py::test_token_ids_instead_of_text_are_refused",),
    # Token ids lose their upper bits on the way through a file; only texts, spans and hashes of ids are kept here.
    14: (
        "test_prompts.py::test_ids_that_differ_by_sixteen_bits_are_other_prompts",
        "test_longppl.py::test_keys_go_through_a_file_unchanged",
    ),
    # Documents are joined without saying so, and predict each other.
    15: ("test_perplexity.py::test_no_window_holds_two_documents",),
    # Exponentials of a rounded e, and what is no number or too large for one goes on into averages.
    16: (
        "test_perplexity.py::test_a_perplexity_too_large_for_a_number_is_none_beside_its_loss",
        "test_perplexity.py::test_a_loss_that_is_not_a_number_names_document_and_token",
        "test_metrics.py::test_overflow_leaves_the_loss_and_no_perplexity",
    ),
    # Memory and speed.
    # Logits of every position and word exist at once.
    17: (
        "test_scoring.py::test_the_head_never_sees_more_rows_than_a_slice",
        "test_scoring.py::test_no_tensor_grows_with_length_times_vocabulary_or_length_squared",
    ),
    # A model ignores the request for fewer logits; here the output head itself is called, on the rows that count.
    18: (
        "test_scoring.py::test_only_the_last_targets_are_scored",
        "test_scoring.py::test_losses_equal_full_logits_cross_entropy_in_every_family",
    ),
    # One pass over a text fills a cache that nobody reads.
    19: ("test_scoring.py::test_no_cache_is_allocated_and_no_mask_is_passed",),
    # A score or a mask for every pair of tokens.
    20: (
        "test_scoring.py::test_no_tensor_grows_with_length_times_vocabulary_or_length_squared",
        "test_scoring.py::test_changed_attention_holds_no_score_for_every_pair_unless_it_is_the_naive_one",
        "test_compare.py::test_what_does_not_fit_or_runs_out_of_memory_is_a_row_with_the_reason",
    ),
    # How many rows are computed at a time changes the number.
    21: ("test_scoring.py::test_the_size_of_the_slices_does_not_change_the_losses",),
    # Losses have the eight bits of the model's weights.
    22: (
        "test_scoring.py::test_cross_entropy_of_a_bfloat16_model_is_taken_in_float32",
        "test_lm_eval.py::test_log_probabilities_of_a_16_bit_model_are_float32",
    ),
    # Methods and what they leave behind.
    # Frequencies that follow the longest input so far make results depend on what was run before.
    23: (
        "test_scoring.py::test_positions_that_depend_on_the_input_length_are_refused",
        "test_caches.py::test_calls_in_any_order_give_what_a_fresh_model_gives",
        "test_compare.py::test_the_order_of_methods_changes_nothing",
    ),
    # Keys in the cache were rotated by other frequencies than the query that meets them.
    24: (
        "test_caches.py::test_every_way_through_a_cache_gives_the_same_logits",
        "test_running.py::test_pieces_through_a_cache_equal_a_full_forward",
        "test_scoring.py::test_decoding_token_by_token_gives_the_losses_of_one_pass",
        "test_scoring.py::test_positions_that_depend_on_the_input_length_are_refused",
    ),
    # A method that should act on long text only changes short text too.
    25: (
        "test_partition.py::test_dynamic_methods_read_the_trained_length_as_the_plain_model_does",
        "test_partition.py::test_a_text_of_one_chunk_is_read_as_by_the_plain_model",
    ),
    # The method was never in effect, and the plain model's numbers bear its name.
    26: (
        "test_compare.py::test_a_method_that_changes_nothing_is_an_error",
        "test_inspection.py::test_fingerprints_tell_settings_apart",
        "test_inspection.py::test_tampering_with_the_live_module_is_reported",
        "test_inspection.py::test_changed_attention_that_can_not_run_any_more_is_reported_and_raises",
    ),
    # One method is still on, in part, while the next is measured.
    27: (
        "test_compare.py::test_a_method_that_leaves_something_behind_ends_the_comparison",
        "test_compare.py::test_every_method_gives_what_it_gives_alone_and_the_plain_model_comes_first",
        "test_patching.py::test_no_class_or_module_of_transformers_is_touched",
    ),
    # The config still says the trained length, and other tools cut or warn there.
    28: (
        "test_lm_eval.py::test_the_model_reads_as_far_as_its_method_says",
        "test_saving.py::test_generation_below_the_target_draws_no_reminder_of_the_trained_length",
        "test_passkey.py::test_nothing_is_printed_or_warned_beyond_the_trained_length",
    ),
    # A length raised for the tools' sake moves the point from which a dynamic method scales.
    29: (
        "test_methods.py::test_how_far_the_tools_read_changes_no_score",
        "test_saving.py::test_the_target_of_the_tools_may_be_set_and_changes_no_logit",
        "test_families.py::test_a_length_raised_after_loading_is_not_taken_for_the_trained_one",
    ),
    # Positions are rounded to bfloat16, so that neighbours far out are the same.
    30: (
        "test_precision.py::test_position_100_000_is_right_in_bf16",
        "test_attention.py::test_rotation_is_exact_at_a_million",
    ),
    # YaRN's temperature is left out, or applied to cosines and scores alike.
    31: (
        "test_running.py::test_the_softmax_scale_is_untouched_and_cosine_and_sine_carry_the_factor_once",
        "test_methods.py::test_yarn_attention_factor",
        "test_inspection.py::test_a_patched_model_reports_its_method_as_measured",
    ),
    # Passkeys and RULER.
    # A prompt "of 1,024 tokens" has as many characters as 1,024 tokens usually take.
    32: (
        "test_passkey.py::test_prompt_and_answer_fill_the_length_to_within_24_tokens",
        "test_ruler_tasks.py::test_prompt_and_answer_fill_the_length_to_within_one_unit",
    ),
    # No room was left for the answer, and the beginning of the prompt is cut off to make some.
    33: (
        "test_passkey.py::test_prompt_and_answer_fill_the_length_to_within_24_tokens",
        "test_ruler_tasks.py::test_there_is_room_to_generate_the_whole_answer",
        "test_lm_eval.py::test_a_prompt_that_leaves_no_room_for_the_answer_is_an_error",
    ),
    # The right answer in other tokens is counted as wrong.
    34: (
        "test_passkey.py::test_a_model_that_copies_the_key_scores_one_with_every_tokenizer",
        "test_ruler_tasks.py::test_the_forced_answer_spells_all_answers_behind_the_prompt",
    ),
    # The answer is what comes after so many characters, which decoding has changed.
    35: ("test_passkey.py::test_the_answer_is_cut_off_by_tokens_whatever_the_decoder_does_to_blanks",),
    # The key stands elsewhere too, or a longer number that holds it is taken for it.
    36: (
        "test_passkey.py::test_the_key_stands_exactly_twice_in_the_prompt_and_nowhere_else",
        "test_passkey.py::test_a_key_that_the_filler_holds_is_not_taken",
        "test_passkey.py::test_only_the_first_run_of_digits_counts",
        "test_ruler_tasks.py::test_each_value_stands_in_the_prompt_once",
        "test_ruler_tasks.py::test_scores_are_shares_of_answers",
    ),
    # Some keys are shorter, and easier, than others.
    37: (
        "test_passkey.py::test_keys_have_five_digits_and_differ_between_trials",
        "test_ruler_tasks.py::test_noise_hides_as_many_keys_and_codes_as_the_task_says",
    ),
    # The needle splits a word, can't stand at either end, or isn't where the record says.
    38: (
        "test_passkey.py::test_realised_depth_is_within_one_sentence_of_the_request",
        "test_passkey.py::test_distractors_are_no_part_of_the_realised_depth",
        "test_passkey.py::test_depth_zero_follows_the_instruction_and_depth_one_precedes_the_question",
        "test_passkey.py::test_the_needle_is_a_sentence_between_two_blanks",
        "test_ruler_tasks.py::test_needles_stand_at_sentence_boundaries",
    ),
    # Parts of a prompt that were tokenised by themselves bring special tokens into its middle.
    39: (
        "test_passkey.py::test_no_special_token_but_one_leading_bos_is_in_the_prompt",
        "test_passkey.py::test_the_prompt_is_the_whole_text_tokenised_at_once",
        "test_ruler_tasks.py::test_no_special_token_but_one_leading_bos_is_in_the_prompt",
    ),
    # A search for the token of a full stop, which some tokenizers don't have, ends at the prompt's beginning.
    40: (
        "test_passkey.py::test_needle_start_points_at_the_needle",
        "test_ruler_tasks.py::test_start_points_at_the_needle",
    ),
    # Prompts depend on what was drawn before them, or on the process.
    41: (
        "test_passkey.py::test_samples_are_the_same_in_every_process_and_order",
        "test_ruler_tasks.py::test_prompts_are_the_same_in_every_process_and_order",
        "test_ruler_tasks.py::test_drawing_leaves_the_global_generator_alone",
    ),
    # Each method is asked something else.
    42: ("test_compare.py::test_every_method_gives_what_it_gives_alone_and_the_plain_model_comes_first",),
    # The checkpoint's own generation settings sample, or punish repeating the key.
    43: ("test_passkey.py::test_decoding_is_greedy_whatever_the_models_own_settings",),
    # The prompt ends in a blank that belongs to the answer's first token.
    44: (
        "test_passkey.py::test_the_prompt_does_not_end_in_whitespace",
        "test_ruler_tasks.py::test_the_prompt_does_not_end_in_whitespace",
    ),
    # Padding in a batch changes what is generated.
    45: (
        "test_passkey.py::test_batches_hold_prompts_of_equal_length_and_change_nothing",
        "test_passkey.py::test_the_forced_answer_is_scored_from_the_reading_that_the_generated_one_goes_on_from",
    ),
    # Looking for a prompt that is short enough never ends.
    46: (
        "test_passkey.py::test_a_length_below_the_shortest_prompt_is_an_error_before_any_generation",
        "test_ruler_tasks.py::test_a_length_below_the_shortest_prompt_is_an_error_at_once",
        "test_prompts.py::test_the_most_units_are_found_whatever_each_costs",
    ),
    # A resumed run skips prompts that only look like those that were done.
    47: (
        "test_runs.py",
        "test_longppl.py::test_a_killed_run_goes_on_to_the_same_result",
        "test_ruler_tasks.py::test_every_argument_of_the_identity_changes_the_prompt",
    ),
    # What failed is left out of the count, and the share of right answers rises.
    48: (
        "test_runs.py",
        "test_passkey.py::test_a_prompt_that_fails_counts_as_wrong_and_the_rest_goes_on",
        "test_passkey.py::test_a_prompt_that_fails_is_no_greedy_match",
        "test_cli.py::test_prompts_that_fail_make_a_partial_result_and_status_3",
        "test_compare.py::test_a_row_with_a_reason_is_a_partial_result",
    ),
    # A second run appends its answers to those of the first.
    49: ("test_runs.py", "test_compare.py::test_the_command_writes_table_pictures_and_report"),
    # Answers of one method are found in a cache and counted for another.
    50: ("test_runs.py", "test_lm_eval.py::test_the_harness_s_response_cache_is_refused"),
    # Columns of a picture are sorted as text, or its colours don't end at 0 and 1.
    51: ("test_plotting.py::test_columns_of_a_heatmap_are_in_numeric_order_and_its_colours_run_from_none_to_all",),
    # A model that can't do the task at all is blamed for failing it in long text.
    52: (
        "test_passkey.py::test_controls_are_short_prompts_with_and_without_the_key",
        "test_cli.py::test_a_model_that_finds_no_key_in_short_prompts_is_said_to_be_at_the_floor",
        "test_compare.py::test_a_task_that_is_too_hard_even_in_short_prompts_is_marked_in_the_table",
    ),
    # Statistics and reports.
    # Tokens of one document are taken for independent, and intervals are too narrow.
    53: (
        "test_statistics.py::test_intervals_over_documents_hold_the_truth_as_often_as_they_say",
        "test_statistics.py::test_an_interval_over_tokens_would_be_too_narrow",
    ),
    # Ten right out of ten are certain to the last digit.
    54: ("test_statistics.py::test_shares_have_wilsons_interval",),
    # Two methods are compared as if they had read different texts; or they had.
    55: (
        "test_statistics.py::test_what_two_methods_share_in_each_document_is_no_part_of_their_differences_error",
        "test_compare.py::test_differences_are_paired_by_document_and_token",
        "test_compare.py::test_results_of_other_protocols_or_texts_do_not_compare",
    ),
    # The same losses give another interval each time.
    56: (
        "test_statistics.py::test_the_same_seed_gives_the_same_interval",
        "test_results.py::test_the_same_record_gives_the_same_bytes",
        "test_compare.py::test_every_method_gives_what_it_gives_alone_and_the_plain_model_comes_first",
    ),
    # Losses of a token are compared between tokenizers whose tokens differ in length.
    57: (
        "test_perplexity.py::test_bits_per_byte_count_the_bytes_of_what_was_scored",
        "test_data.py::test_the_bytes_of_tokens_add_up_to_the_text",
        "test_longppl.py::test_results_of_other_settings_texts_or_tokenizers_are_not_compared",
    ),
    # Each method chooses the key tokens that it is judged by.
    58: (
        "test_longppl.py::test_results_on_different_keys_are_not_compared",
        "test_compare.py::test_wrong_arguments_are_one_line",
    ),
    # Rounding of another kernel is reported as what a method does.
    59: (
        "test_compare.py::test_differences_are_paired_by_document_and_token",
        "test_compare.py::test_the_command_writes_table_pictures_and_report",
    ),
    # The model was trained on the text that it is measured on.
    60: (
        "test_data.py::test_a_text_in_training_and_evaluation_is_refused_whatever_its_id",
        "test_data.py::test_an_id_in_training_and_evaluation_is_refused_whatever_its_text",
    ),
    # A result file holds NaN, which is no JSON.
    61: (
        "test_results.py::test_the_file_is_strict_json_even_for_numbers_that_json_lacks",
        "test_results.py::test_a_record_comes_back_as_it_was_written",
    ),
    # A data set that is a program fails after the model was loaded; or nothing works without a network.
    62: (
        "test_data.py::test_a_loading_script_on_the_hub_is_refused_with_an_alternative",
        "test_data.py::test_every_short_name_is_pinned_to_a_full_commit",
        "test_cli.py::test_a_wrong_setting_is_found_before_the_model_is_loaded",
        "test_data.py::test_a_short_name_without_a_network_says_that_the_hub_is_out_of_reach",
        "test_data.py::test_the_standard_library_is_one_document_a_file_longest_first",
    ),
}

REFERENCES = sorted({reference for references in PITFALLS.values() for reference in references})


@functools.cache
def functions_in(file: str) -> frozenset[str]:
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def test_every_pitfall_has_a_test() -> None:
    assert list(PITFALLS) == list(range(1, 63))
    assert all(PITFALLS.values())


@pytest.mark.parametrize("reference", REFERENCES)
def test_the_test_that_is_referred_to_exists(reference: str) -> None:
    file, _, name = reference.partition("::")
    assert (TESTS / file).is_file()
    assert not name or name in functions_in(file)
