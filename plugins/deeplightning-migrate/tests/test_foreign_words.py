"""The table of words of other systems, `words.tsv`."""

import re

import pytest
import reference_pages
from deeplightning_migrate import foreign_words
from test_words import habits, wrong_rows

from deeplightning.config import other_tools
from deeplightning.config.signature_check import Meanings

PAGE = reference_pages.FOLDER / f"{reference_pages.WORDS}.md"


def test_each_row_of_the_table_is_true():
    """Each row maps to a key of the schema or to an existing argument; classes in comments exist."""
    assert wrong_rows(foreign_words.ROWS, Meanings()) == {}


def test_no_two_systems_give_a_word_two_meanings():
    """A word has one row, because a message cannot know which system it comes from."""
    words = [word for rows in foreign_words.SYSTEMS.values() for old in rows for word in old.split()]
    assert sorted(words) == sorted(set(words))


def test_check_gives_a_word_the_meaning_that_the_table_has():
    """Each word that `check` knows is in the table with the same key."""
    meant = {word: other_tools.key_of(new) for word, new in foreign_words.ROWS.items()}
    assert {word: other_tools.key_of(new) for word, new in other_tools.ROWS.items()}.items() <= meant.items()


def test_the_manual_has_each_word():
    """The page has the rows of all systems; `.venv/bin/python tools/reference_pages.py` updates it."""
    page = PAGE.read_text()
    assert page == reference_pages.updated(reference_pages.WORDS)
    made = page.partition(reference_pages.START)[2]
    rows = re.findall(r"^\| (`.+`) \| (?:the same in )?(?:`[\w.-]+`|none: .+?)(?: .*)?\|$", made, re.MULTILINE)
    assert {word for old in rows for word in re.findall("`([^`]+)`", old)} == {
        word.lstrip("/") for word in foreign_words.ROWS
    }


def test_the_table_has_the_words_of_habits():
    """In 300 configs with keys of other tools, at least 400 keys have a row with our key."""
    pairs = [pair for habit in habits() for pair in habit.answers.items()]
    right = [key for key, word in pairs if other_tools.key_of(foreign_words.ours(key) or "none:") == (word or None)]
    assert len(right) >= 400, {key for key, _ in pairs} - {*right}


OLD_SETTINGS = {
    "AMP and Apex": "init_scale growth_factor backoff_factor growth_interval cast_model_outputs max_loss_scale "
    "min_loss_scale convert_to_sync_batch_norm scaler_per_loss verbosity",
    "DDP": "find_unused_parameters broadcast_buffers bucket_cap_mb gradient_as_bucket_view static_graph no_sync "
    "convert_to_sync_batch_norm backend local_rank init_method auto_mpi_discovery",
    "Horovod": "compression op gradient_predivide_factor convert_to_sync_batch_norm use_fork_server",
    "DeepSpeed": "fp32_allreduce prescale_gradients gradient_predivide_factor disable_allgather dump_state "
    "steps_per_print wall_clock_breakdown initial_scale_power loss_scale loss_scale_window hysteresis min_loss_scale "
    "block_size queue_depth thread_count single_submit overlap_events partition_activations cpu_checkpointing "
    "contiguous_memory_optimization synchronize_checkpoint_boundary number_checkpoints profile profile_step "
    "module_depth top_modules detailed output_file tensorboard progressive_layer_drop dist_backend verbose "
    # nineteen of ZeRO
    "stage allgather_bucket_size allgather_partitions contiguous_gradients overlap_comm reduce_bucket_size "
    "reduce_scatter sub_group_size ignore_unused_parameters round_robin_gradients stage3_max_live_parameters "
    "stage3_max_reuse_distance stage3_prefetch_bucket_size stage3_param_persistence_threshold "
    "stage3_gather_fp16_weights_on_model_save offload_optimizer offload_param grad_hooks legacy_stage1 "
    # offload
    "nvme_path buffer_count buffer_size max_in_cpu pipeline_read pipeline_write fast_init",
    "fairscale": "broadcast_fp16 force_broadcast_object reduce_fp16 reduce_buffer_size broadcast_buffers "
    "sync_models_at_startup auto_refresh_trainable warn_on_trainable_params_changed reshard_after_forward "
    "compute_dtype fp32_reduce_scatter move_params_to_cpu move_grads_to_cpu disable_reshard_on_root buffer_dtype "
    "force_input_to_fp32 flatten_parameters bucket_cap_mb clear_autocast_cache no_broadcast_optim_state "
    "gradient_predivide_factor gradient_postdivide_factor",
}


@pytest.mark.parametrize("system", OLD_SETTINGS)
def test_every_old_setting_has_its_row(system):
    """The manual gives the present key of each old setting, or says that there is none."""
    rows = re.findall(r"^\|(.+)\|(.+)\|$", PAGE.read_text(), re.MULTILINE)
    named = {name for old, today in rows for name in re.findall(r"[`.](\w+)`", old) if today.strip()}
    assert sorted(set(OLD_SETTINGS[system].split()) - named) == []
