"""It sets the allocator as it likes."""

import os

os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"

from one_layer import step

for rows in (1_000_000, 2_000_000, 3_000_000):
    step(rows)
