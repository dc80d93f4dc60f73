import pytest

from dryfit.gpu.allocator_settings import INTERVALS, MIB, AllocatorSettings
from dryfit.settings.errors import ConfigError


def test_no_text_means_the_defaults_of_torch() -> None:
    assert AllocatorSettings.parse("") == AllocatorSettings()
    assert AllocatorSettings() == AllocatorSettings(
        expandable_segments=False,
        max_split_bytes=None,
        roundup_power2_divisions=(0,) * INTERVALS,
        gc_threshold=None,
        large_segment_bytes=20 * MIB,
        max_non_split_rounding_bytes=20 * MIB,
    )


def test_every_option_that_acts() -> None:
    text = (
        "backend:native, expandable_segments:True, max_split_size_mb:512, large_segment_size_mb:40,"
        "garbage_collection_threshold:0.8, per_process_memory_fraction:0.5, max_non_split_rounding_mb:64"
    )
    assert AllocatorSettings.parse(text) == AllocatorSettings(
        expandable_segments=True,
        max_split_bytes=512 * MIB,
        gc_threshold=0.8,
        large_segment_bytes=40 * MIB,
        max_non_split_rounding_bytes=64 * MIB,
    )


def test_options_without_effect_on_the_device_are_accepted_and_checked() -> None:
    text = "pinned_use_background_threads:True,pinned_num_register_threads:8,release_lock_on_cudamalloc:False"
    assert AllocatorSettings.parse(text) == AllocatorSettings()
    with pytest.raises(ConfigError, match="pinned_use_background_threads:yes"):
        AllocatorSettings.parse("pinned_use_background_threads:yes")


def test_a_slack_for_blocks_that_are_not_cut_follows_the_segment_size() -> None:
    assert AllocatorSettings.parse("large_segment_size_mb:64").max_non_split_rounding_bytes == 64 * MIB


def test_the_table_of_divisions_of_the_documentation() -> None:
    # https://docs.pytorch.org/docs/stable/notes/cuda.html: [256:1,512:2,1024:4,>:8] gives 1 division below 512 MB,
    # 2 from 512 MB on, 4 from 1 GB on and 8 above.
    divisions = AllocatorSettings.parse("roundup_power2_divisions:[256:1,512:2,1024:4,>:8]").roundup_power2_divisions
    assert divisions == (1,) * 9 + (2, 4) + (8,) * 5


def test_rounding_is_to_512_bytes_or_to_divisions_of_a_power_of_two() -> None:
    plain = AllocatorSettings()
    assert [plain.round_request(size) for size in (1, 512, 513, MIB + 1)] == [512, 512, 1024, MIB + 512]
    # The documentation's example: 1200 with 4 divisions lies between 1024 and 2048, in steps of 256. Torch applies
    # it to requests above 512 * divisions only, so the example is in KiB here.
    four = AllocatorSettings.parse("roundup_power2_divisions:4")
    assert four.round_request(1200 * 1024) == 1280 * 1024
    assert four.round_request(1024 * 1024) == 1024 * 1024
    assert four.round_request(1281 * 1024) == 1536 * 1024
    assert four.round_request(2047) == 2048
    assert four.round_request(1800) == 2048


def test_rounding_as_the_test_of_torch_expects_it() -> None:
    """test_allocator_settings of test/test_cuda.py: 21 Mi and 100 Mi floats, with one value and with a table."""
    some, more = 4 * 21 * MIB, 4 * 100 * MIB
    assert AllocatorSettings().round_request(some) == some
    assert AllocatorSettings.parse("roundup_power2_divisions:4").round_request(some) == 96 * MIB
    table = "garbage_collection_threshold:0.5,roundup_power2_divisions:[64:8,128:2,256:2,512:2,1024:1,>:1]"
    assert AllocatorSettings.parse(table).round_request(some) == 88 * MIB
    assert AllocatorSettings.parse(table).round_request(more) == 512 * MIB


def test_segments_by_the_size_of_the_request() -> None:
    settings = AllocatorSettings.parse("large_segment_size_mb:30")
    sizes = (512, MIB, MIB + 512, 10 * MIB - 512, 10 * MIB, 10 * MIB + 512)
    assert [settings.segment_bytes(size) // MIB for size in sizes] == [2, 2, 30, 30, 10, 12]


@pytest.mark.parametrize(
    ("text", "found", "allowed"),
    [
        ("max_split_size:512", "the option 'max_split_size'", "did you mean max_split_size_mb"),
        ("max_split_size_mb:19", "max_split_size_mb:19", "at least 20"),
        ("large_segment_size_mb:64,max_split_size_mb:32", "max_split_size_mb:32", "at least 64"),
        ("max_split_size_mb:-1", "max_split_size_mb:-1", "a whole number"),
        ("large_segment_size_mb:10", "large_segment_size_mb:10", "more than 10"),
        ("expandable_segments:true", "expandable_segments:true", "True or False"),
        ("garbage_collection_threshold:1.0", "garbage_collection_threshold:1.0", "below 1"),
        ("garbage_collection_threshold:nan", "garbage_collection_threshold:nan", "below 1"),
        ("garbage_collection_threshold:much", "garbage_collection_threshold:much", "a number between 0 and 1"),
        ("per_process_memory_fraction:2", "per_process_memory_fraction:2", "from 0 to 1"),
        ("backend:cudaMallocAsync", "backend:cudaMallocAsync", "native, which can be simulated"),
        ("backend:mine", "backend:mine", "native or cudaMallocAsync"),
        ("roundup_power2_divisions:3", "roundup_power2_divisions:3", "a power of two"),
        ("roundup_power2_divisions:[3:1]", "roundup_power2_divisions:[3:1]", "intervals that are a power of two"),
        ("roundup_power2_divisions:[64:3]", "roundup_power2_divisions:[64:3]", "divisions that are 0 or a power"),
        ("roundup_power2_divisions:[]", "roundup_power2_divisions:[]", "a whole number"),
        ("roundup_power2_divisions:[64:8", "roundup_power2_divisions:[64:8", "is closed"),
        ("max_split_size_mb=512", "'max_split_size_mb=512'", "name:value pairs"),
        ("max_split_size_mb:", "'max_split_size_mb:'", "name:value pairs"),
    ],
)
def test_illegal_text_is_a_config_error(text: str, found: str, allowed: str) -> None:
    with pytest.raises(ConfigError) as caught:
        AllocatorSettings.parse(text)
    assert found in caught.value.found
    assert allowed in caught.value.allowed + caught.value.hint
