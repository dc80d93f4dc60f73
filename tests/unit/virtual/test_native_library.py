"""bitsandbytes' native library on a virtual GPU: libraries look for its functions, and call them by pointers."""

import ctypes

from dryfit.gpu.missing_parts import NativeLibrary


class Own:
    def __getattr__(self, name):
        return f"the library's {name}"


def test_a_function_for_the_device_is_one_of_a_loaded_library_and_does_nothing():
    dequantize = NativeLibrary(Own()).cdequantize_blockwise_bf16_nf4
    assert hasattr(dequantize, "restype")  # by which Unsloth tells a library that was loaded
    dequantize.argtypes = [ctypes.c_void_p, ctypes.c_int]
    assert dequantize(ctypes.c_void_p(8), 64) is None


def test_a_function_for_the_cpu_is_the_librarys():
    assert NativeLibrary(Own()).cquantize_blockwise_cpu_fp32 == "the library's cquantize_blockwise_cpu_fp32"
