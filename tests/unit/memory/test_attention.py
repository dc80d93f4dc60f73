"""The attention kernel a device takes, row by row of torch's rules."""

from dataclasses import replace

import pytest
import torch

from dryfit.gpu.kernels import AttentionCall, Backend, choose_backend

PLAIN = AttentionCall(dtype=torch.bfloat16, width=64, value_width=64, has_mask=False, dropout=0.1, trains=True)
FP32 = replace(PLAIN, dtype=torch.float32)
FP16 = replace(PLAIN, dtype=torch.float16)


@pytest.mark.parametrize(
    ("call", "capability", "expected"),
    [
        (PLAIN, (8, 0), Backend.FLASH),
        (PLAIN, (8, 9), Backend.FLASH),
        (replace(PLAIN, has_mask=True), (8, 0), Backend.EFFICIENT),
        (FP32, (8, 0), Backend.EFFICIENT),
        (FP32, (7, 0), Backend.EFFICIENT),
        (FP16, (7, 5), Backend.EFFICIENT),
        (PLAIN, (7, 5), Backend.MATH),  # no bf16 before 8.0
        (replace(PLAIN, width=100, value_width=100, has_mask=True), (8, 0), Backend.MATH),  # not a multiple of 8
        (replace(PLAIN, width=100, value_width=100), (8, 0), Backend.FLASH),  # padded to 104
        (replace(FP32, width=100, value_width=100), (8, 0), Backend.EFFICIENT),  # a multiple of 4
        (replace(FP32, width=66, value_width=66), (8, 0), Backend.MATH),
        (replace(PLAIN, width=320, value_width=320), (8, 0), Backend.EFFICIENT),  # too wide for flash
        (replace(PLAIN, value_width=128), (8, 0), Backend.EFFICIENT),
        (replace(PLAIN, width=256, value_width=256), (8, 0), Backend.FLASH),
        (replace(PLAIN, width=256, value_width=256), (8, 6), Backend.EFFICIENT),  # with dropout, in training
        (replace(PLAIN, width=256, value_width=256, trains=False), (8, 6), Backend.FLASH),
        (replace(PLAIN, width=256, value_width=256, dropout=0.0), (8, 6), Backend.FLASH),
        (replace(PLAIN, width=224, value_width=224, dropout=0.0), (8, 9), Backend.EFFICIENT),
        (PLAIN, (9, 0), Backend.FLASH),  # 0.1 is no number of sixteenths
        (replace(PLAIN, dropout=0.0), (9, 0), Backend.CUDNN),
        (replace(PLAIN, dropout=0.0, has_mask=True), (10, 0), Backend.CUDNN),
        (replace(PLAIN, dropout=0.125), (9, 0), Backend.CUDNN),
        (replace(PLAIN, dropout=0.0), (12, 0), Backend.FLASH),
        (replace(FP32, dropout=0.0), (9, 0), Backend.EFFICIENT),
        (replace(PLAIN, dtype=torch.float64), (9, 0), Backend.MATH),
        (replace(PLAIN, same_heads=False), (8, 0), Backend.FLASH),
        (replace(FP32, same_heads=False), (8, 0), Backend.MATH),  # it wants each query's own keys
    ],
)
def test_choice(call: AttentionCall, capability: tuple[int, int], expected: Backend) -> None:
    assert choose_backend(call, capability) is expected
