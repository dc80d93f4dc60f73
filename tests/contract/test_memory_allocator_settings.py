"""The reading of allocator settings, held against the torch that is installed."""

import ctypes
from pathlib import Path

import pytest
import torch

from dryfit.gpu.allocator_settings import INTERVALS, MIB, AllocatorSettings
from dryfit.settings.errors import ConfigError

# Torch keeps what an earlier text set, so each begins with the default.
_RESET = "large_segment_size_mb:20,"
_MANGLED = "_ZN3c1016CachingAllocator26AcceleratorAllocatorConfig24roundup_power2_divisionsEm"

TEXTS = (
    "",
    "max_split_size_mb:512",
    "max_split_size_mb:20",
    "max_split_size_mb:19",
    "large_segment_size_mb:11",
    "large_segment_size_mb:10",
    "large_segment_size_mb:100,max_split_size_mb:64",
    "max_split_size_mb:64,large_segment_size_mb:100",
    "max_non_split_rounding_mb:20",
    "max_non_split_rounding_mb:5",
    "expandable_segments:True",
    "expandable_segments:true",
    "expandable_segments : False , garbage_collection_threshold : 0.8",
    "garbage_collection_threshold:1.0",
    "garbage_collection_threshold:0",
    "garbage_collection_threshold:0.8,",
    "roundup_power2_divisions:8",
    "roundup_power2_divisions:3",
    "roundup_power2_divisions:0",
    "roundup_power2_divisions:[256:1,512:2,1024:4,>:8]",
    "roundup_power2_divisions:[64:8,128:2,256:4,512:2,1024:4,>:1]",
    "roundup_power2_divisions:[>:4]",
    "roundup_power2_divisions:[1:2,1048576:4]",
    "roundup_power2_divisions:[3:1]",
    "roundup_power2_divisions:[64:5]",
    "roundup_power2_divisions:[64:8",
    "pinned_use_background_threads:True",
    "pinned_use_background_threads:1",
    "max_split_size_mb",
    "max_split_size_mb=64",
    "max_split_size_mb:many",
)


def _accepts(text: str) -> bool:
    try:
        torch._C._accelerator_setAllocatorSettings(_RESET + text)
    except (ValueError, RuntimeError):
        return False
    return True


def _divisions() -> tuple[int, ...]:
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    function = library[_MANGLED]
    function.argtypes, function.restype = [ctypes.c_size_t], ctypes.c_size_t
    return tuple(function(MIB << interval) for interval in range(INTERVALS))


@pytest.mark.parametrize("text", TEXTS)
def test_the_installed_torch_reads_the_same(text: str) -> None:
    accepted = _accepts(text)
    if not accepted:
        with pytest.raises(ConfigError):
            AllocatorSettings.parse(text)
        return
    settings = AllocatorSettings.parse(text)
    if "roundup" in text:
        assert _divisions() == settings.roundup_power2_divisions
    torch._C._accelerator_setAllocatorSettings("roundup_power2_divisions:1," + _RESET + "expandable_segments:False")
