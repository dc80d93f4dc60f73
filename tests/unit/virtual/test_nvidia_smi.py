"""What the virtual ``nvidia-smi`` prints."""

import pytest

from dryfit.gpu.nvidia_smi import answer

DEVICES = [
    {"index": n, "name": f"NVIDIA A{n}", "uuid": f"GPU-{n}", "memory.total": 100 + n, "memory.used": n} for n in (0, 1)
]


@pytest.mark.parametrize(
    ("options", "lines"),
    [
        (["-L"], ["GPU 0: NVIDIA A0 (UUID: GPU-0)", "GPU 1: NVIDIA A1 (UUID: GPU-1)"]),
        (["--list-gpus", "-i", "1"], ["GPU 1: NVIDIA A1 (UUID: GPU-1)"]),
        (
            ["--query-gpu=index, memory.used,serial", "--format=csv"],
            ["index, memory.used [MiB], serial", "0, 0 MiB, [N/A]", "1, 1 MiB, [N/A]"],
        ),
        (["--query-gpu=memory.total", "--format=csv,noheader,nounits", "--id=1"], ["101"]),
        (["--query-gpu=memory.total", "--format=csv,nounits", "-i", "0"], ["memory.total", "100"]),
        (["--query-compute-apps=pid", "--format=csv,noheader"], []),
        (["--query-gpu=name", "--format=csv,noheader", "-i", "7"], []),
    ],
)
def test_queries_have_the_lines_that_scripts_take_apart(options, lines):
    assert answer(DEVICES, options).splitlines() == lines


@pytest.mark.parametrize("options", [[], ["-q"], ["--loop=1"], ["-i"], ["--format=csv"]])
def test_anything_else_has_a_table_with_each_device(options):
    text = answer(DEVICES, options)
    assert "NVIDIA A0" in text and "1MiB / 101MiB" in text
    assert len({len(line) for line in text.splitlines()}) == 1
