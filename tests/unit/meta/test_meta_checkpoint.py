import faulthandler
import json
import os
import random
import shutil
import signal
import sys
import threading
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dryfit.meta import reading
from dryfit.meta.checkpoint_files import ADAPTER_STEM, CheckpointFiles, CheckpointFormat, open_checkpoint
from dryfit.meta.reading import CheckpointReader, ReadMode
from dryfit.settings.errors import LoadError

WEIGHTS = {"a": torch.arange(12.0).view(3, 4), "b": torch.arange(5, dtype=torch.int16), "c": torch.tensor(2.5)}
MODES = list(ReadMode)


def read(checkpoint: CheckpointFiles, mode: ReadMode = ReadMode.PRIVATE) -> dict[str, torch.Tensor]:
    with CheckpointReader(checkpoint, mode) as reader:
        return dict(reader.tensors(checkpoint.tensors))


def equal(found: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> bool:
    return found.keys() == want.keys() and all(
        found[key].dtype == value.dtype and found[key].shape == value.shape and torch.equal(found[key], value)
        for key, value in want.items()
    )


def refused(path: Path, **options: Any) -> LoadError:
    with pytest.raises(LoadError) as caught:
        open_checkpoint(path, **options)
    assert str(path) in caught.value.doing
    return caught.value


@pytest.fixture
def single(tmp_path: Path) -> Path:
    folder = tmp_path / "single"
    folder.mkdir()
    save_file(WEIGHTS, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """Two shards, a with b in the first and c in the second."""
    folder = tmp_path / "sharded"
    folder.mkdir()
    save_file({key: WEIGHTS[key] for key in "ab"}, folder / "model-1.safetensors")
    save_file({"c": WEIGHTS["c"]}, folder / "model-2.safetensors")
    write_index(folder, {"a": "model-1.safetensors", "b": "model-1.safetensors", "c": "model-2.safetensors"})
    return folder


def write_index(folder: Path, weight_map: Any) -> None:
    content = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))


# --- which files ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_a_folder_with_one_file(single: Path, mode: ReadMode) -> None:
    checkpoint = open_checkpoint(single)
    assert checkpoint.format is CheckpointFormat.SAFETENSORS
    assert checkpoint.files == (single / "model.safetensors",)
    assert checkpoint.notes == ()
    assert equal(read(checkpoint, mode), WEIGHTS)
    assert equal(read(open_checkpoint(single / "model.safetensors"), mode), WEIGHTS)


def test_files_in_the_hubs_cache_are_links(sharded: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "cache" / "snapshots" / "0"
    snapshot.mkdir(parents=True)
    for path in sharded.iterdir():
        (snapshot / path.name).symlink_to(path)
    assert equal(read(open_checkpoint(snapshot)), WEIGHTS)
    (sharded / "model-2.safetensors").unlink()
    assert "model-2.safetensors" in refused(snapshot).found


def test_safetensors_win_over_bin_and_others_are_noted(single: Path) -> None:
    torch.save({"other": torch.ones(1)}, single / "pytorch_model.bin")
    save_file({"other": torch.ones(1)}, single / "model-00001-of-00002.safetensors")
    torch.save({}, single / "training_args.bin")
    checkpoint = open_checkpoint(single)
    assert checkpoint.tensors.keys() == WEIGHTS.keys()
    assert checkpoint.notes == ("not used: model-00001-of-00002.safetensors, pytorch_model.bin",)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_file_beside_an_index_is_refused(sharded: Path, name: str) -> None:
    if name == "pytorch_model.bin":
        for path in sharded.glob("model*"):
            path.unlink()
        (sharded / "pytorch_model.bin.index.json").write_text("{}")
    (sharded / name).write_bytes(b"")
    error = refused(sharded)
    assert f"both {name} and {name}.index.json" in error.found
    assert "out of date" in error.hint


def test_an_index_of_safetensors_beside_a_bin_is_taken(sharded: Path) -> None:
    (sharded / "pytorch_model.bin").write_bytes(b"")
    checkpoint = open_checkpoint(sharded)
    assert checkpoint.notes == ("not used: pytorch_model.bin",)
    assert equal(read(checkpoint), WEIGHTS)


def test_adapters_only_when_asked(tmp_path: Path) -> None:
    save_file(WEIGHTS, tmp_path / "adapter_model.safetensors")
    error = refused(tmp_path)
    assert "adapter_model.safetensors" in error.found
    assert "pytorch_model.bin.index.json" in error.allowed
    assert equal(read(open_checkpoint(tmp_path, stem=ADAPTER_STEM)), WEIGHTS)
    (tmp_path / "adapter_model.safetensors").unlink()
    torch.save(WEIGHTS, tmp_path / "adapter_model.bin")
    assert equal(read(open_checkpoint(tmp_path, stem=ADAPTER_STEM)), WEIGHTS)


def test_nothing_there(tmp_path: Path, sharded: Path) -> None:
    found = refused(sharded, stem="none").found
    assert "it holds no weights" in found and "model-1.safetensors" in found
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "it holds nothing" in refused(empty).found
    assert "no such file or folder" in refused(tmp_path / "none").found
    assert "too long" in refused(tmp_path / ("x" * 300)).found
    (empty / "model.safetensors").symlink_to(tmp_path / "gone")
    with pytest.raises(LoadError, match="cannot be opened"):
        open_checkpoint(empty)
    error = refused(sharded / "model.safetensors.index.json")
    assert ".safetensors" in error.allowed and str(sharded) in error.hint


# --- index and shards ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "../outside/secret.safetensors",
        "/etc/secret.safetensors",
        "..",
        "",
        ".",
        "./model-1.safetensors",
        "sub/../model-1.safetensors",
        "linked/secret.safetensors",
        "sub\\model.safetensors",
        "C:model.safetensors",
        "model\0.safetensors",
        "model\n.safetensors",
        "//model-1.safetensors",
        "model-1.safetensors/",
        "model.bin",
        "circle/model-1.safetensors",
        "\ud800.safetensors",
    ],
)
def test_an_index_cannot_point_elsewhere(sharded: Path, name: str) -> None:
    outside = sharded.parent / "outside"
    outside.mkdir()
    save_file({"c": WEIGHTS["c"]}, outside / "secret.safetensors")
    (sharded / "linked").symlink_to(outside)
    (sharded / "sub").mkdir()
    (sharded / "circle").symlink_to("circle")
    write_index(sharded, {"a": "model-1.safetensors", "b": "model-1.safetensors", "c": name})
    error = refused(sharded)
    assert "weight_map names the shard" in error.found


def test_shards_in_a_folder_below_are_inside(sharded: Path) -> None:
    (sharded / "sub").mkdir()
    shutil.move(sharded / "model-2.safetensors", sharded / "sub" / "model-2.safetensors")
    write_index(sharded, {"a": "model-1.safetensors", "b": "model-1.safetensors", "c": "sub/model-2.safetensors"})
    assert equal(read(open_checkpoint(sharded)), WEIGHTS)


@pytest.mark.parametrize(
    "text, words",
    [
        ("", "no valid JSON"),
        ("[]", "weight_map is None"),
        ("{}", "weight_map is None"),
        ('{"weight_map": {}}', "weight_map is {}"),
        ('{"weight_map": ["model-1.safetensors"]}', "weight_map is ["),
        ('{"weight_map": {"a": 1}}', "the shard of 'a' is 1"),
        ('{"weight_map": {"a": "' + "x" * 300 + '.safetensors"}}', "the shard of 'a' is 'xxx"),
        ('{"weight_map": {"a": "x", "a": "y"}}', "'a' is there twice"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_a_damaged_index_is_refused(sharded: Path, text: str, words: str) -> None:
    (sharded / "model.safetensors.index.json").write_text(text)
    assert words in refused(sharded).found


def harm_map(**changes: str | None) -> Callable[[Path], None]:
    def harm(folder: Path) -> None:
        weight_map: dict[str, Any] = {
            "a": "model-1.safetensors",
            "b": "model-1.safetensors",
            "c": "model-2.safetensors",
        }
        weight_map.update(changes)
        write_index(folder, {key: name for key, name in weight_map.items() if name})

    return harm


def harm_shard(**weights: torch.Tensor) -> Callable[[Path], None]:
    return lambda folder: save_file(weights, folder / "model-2.safetensors")


@pytest.mark.parametrize(
    "harm, words",
    [
        (harm_map(b=None), "1 keys of the shards are not in the index: b (model-1.safetensors)"),
        (
            harm_map(d="model-2.safetensors"),
            "1 keys are not in the shard that the index names: d (model-2.safetensors)",
        ),
        (harm_map(b="model-2.safetensors"), "1 keys are in another shard than the index says: b (model-1.safetensors)"),
        (harm_map(c="model-3.safetensors"), "1 of 2 shards are missing: model-3.safetensors"),
        (harm_shard(c=WEIGHTS["c"], a=WEIGHTS["a"]), "the key a is in two shards"),
        (harm_shard(d=WEIGHTS["c"]), "c (model-2.safetensors); 1 keys of the shards are not in the index: d"),
    ],
)
def test_index_and_shards_must_agree(sharded: Path, harm: Callable[[Path], None], words: str) -> None:
    harm(sharded)
    error = refused(sharded)
    assert "model.safetensors.index.json" in error.doing
    assert words in error.found
    assert error.hint


def test_a_shard_that_the_index_does_not_name_is_noted(sharded: Path) -> None:
    harm_map(c=None)(sharded)
    assert open_checkpoint(sharded).notes == ("not used: model-2.safetensors",)


# --- files of torch.save --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_a_bin_of_all_kinds_of_tensors(tmp_path: Path, mode: ReadMode) -> None:
    base = torch.randn(6, 4)
    want = OrderedDict(
        whole=base,
        tied=base,
        transposed=base.t(),
        slice=base[1:3, 1:],
        expanded=torch.ones(1).expand(5, 5),
        empty=torch.empty(0, 3),
        scalar=torch.tensor(3),
        half=torch.randn(3).bfloat16(),
        small=torch.randn(4).to(torch.float8_e4m3fn).view(torch.uint8),
        flags=torch.tensor([True, False]),
        parameter=torch.nn.Parameter(torch.ones(2)),
        complex=torch.randn(2, dtype=torch.complex64),
        image=torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    )
    for name in ("pytorch_model.bin", "model.pt"):
        torch.save(want, tmp_path / name)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.format is CheckpointFormat.PICKLE
    found = read(checkpoint, mode)
    assert equal(found, want)
    if mode is ReadMode.PRIVATE:
        assert all(value.is_contiguous() for value in found.values())
        assert found["whole"].data_ptr() != found["tied"].data_ptr()
    assert equal(read(open_checkpoint(tmp_path / "model.pt"), mode), want)


def test_places_in_a_bin_are_the_files(tmp_path: Path) -> None:
    want = {f"k{number}": torch.randn(number + 1) for number in range(50)}
    torch.save(want, tmp_path / "x.bin")
    raw = (tmp_path / "x.bin").read_bytes()
    for key, stored in open_checkpoint(tmp_path / "x.bin").tensors.items():
        part = raw[stored.offset_bytes : stored.offset_bytes + stored.size_bytes]
        assert part == want[key].numpy().tobytes()


def test_shards_of_bin(tmp_path: Path) -> None:
    torch.save({"a": WEIGHTS["a"]}, tmp_path / "pytorch_model-1.bin")
    torch.save({"b": WEIGHTS["b"], "c": WEIGHTS["c"]}, tmp_path / "pytorch_model-2.bin")
    weight_map = {"a": "pytorch_model-1.bin", "b": "pytorch_model-2.bin", "c": "pytorch_model-2.bin"}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.notes == ()
    assert equal(read(checkpoint), WEIGHTS)


@pytest.mark.parametrize("wrapper", ["state_dict", "model_state_dict"])
def test_a_wrapped_state_dict_is_unwrapped_and_noted(tmp_path: Path, wrapper: str) -> None:
    torch.save({wrapper: WEIGHTS, "epoch": 3, "optimizer": {"x": torch.ones(2)}}, tmp_path / "pytorch_model.bin")
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.notes == (f"pytorch_model.bin: the weights lie under {wrapper!r}; not used: epoch, optimizer",)
    assert equal(read(checkpoint), WEIGHTS)


class Foreign:
    """Not of torch."""


class Hostile:
    """What a pickle that runs code looks like."""

    def __reduce__(self) -> Any:
        return os.system, ("touch " + self.path,)

    def __init__(self, path: Path) -> None:
        self.path = str(path)


def test_code_in_a_bin_does_not_run(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    for thing in (Hostile(tmp_path / "ran"), Foreign()):
        torch.save({**WEIGHTS, "thing": thing}, path)
        with pytest.raises(LoadError, match="more than plain tensors") as caught:
            open_checkpoint(tmp_path)
        assert "weights_only=False" not in str(caught.value)
    assert not (tmp_path / "ran").exists()


@pytest.mark.filterwarnings("ignore:.*sparse (tensor )?invariant:UserWarning")  # of torch 2.11 and 2.15
def test_entries_without_weights_are_named(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    for name, value, words in (
        ("count", 5, "'count' is of type int"),
        ("inner", {"a": torch.ones(1)}, "'inner' is of type dict"),
        ("ghost", torch.empty(2, device="meta"), "'ghost' is a tensor on meta, without data"),
        ("sparse", torch.eye(3).to_sparse(), "'sparse' is a tensor of layout torch.sparse_coo"),
        (7, torch.ones(1), "7 is a tensor"),
    ):
        torch.save({**WEIGHTS, name: value}, path)
        found = refused(path).found
        assert "1 of 4 entries" in found and words in found
    torch.save([torch.ones(1)], path)
    assert "it holds of type list" in refused(path).found
    torch.save({"state_dict": WEIGHTS, "model_state_dict": WEIGHTS}, path)
    assert "two state dicts" in refused(path).found


def test_torn_and_old_files_of_torch_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save(WEIGHTS, path)
    whole = path.read_bytes()
    for content, words in (
        (b"", "no zip archive"),
        (whole[:-200], "no zip archive"),
        (whole[200:], ""),
        (b"version https://git-lfs.github.com/spec/v1\n", "git-lfs pointer"),
    ):
        path.write_bytes(content)
        assert words in refused(path).found
    path.write_bytes(bytes(257) + b"ustar" + bytes(1000))
    error = refused(path)
    assert "a tar archive" in error.found
    assert "torch.save(torch.load(file, weights_only=True), file)" in error.hint


@pytest.mark.parametrize("mode", ReadMode)
def test_a_bin_of_the_format_before_zip_archives(tmp_path: Path, mode: ReadMode) -> None:
    path = tmp_path / "pytorch_model.bin"
    weights = {**WEIGHTS, "tied": next(iter(WEIGHTS.values())), "turned": torch.arange(6.0).view(2, 3).t()}
    torch.save({"state_dict": weights}, path, _use_new_zipfile_serialization=False)
    checkpoint = open_checkpoint(path)
    assert "pytorch_model.bin: torch's format from before 1.6, read whole" in checkpoint.notes
    with CheckpointReader(checkpoint, mode) as reader:
        read = dict(reader.tensors(checkpoint.tensors))
    assert read.keys() == weights.keys()
    for key, value in weights.items():
        assert read[key].dtype == value.dtype and torch.equal(read[key], value), key
        assert read[key].is_contiguous()
    assert len({value.untyped_storage()._cdata for value in read.values()}) == len(read)


def test_a_damaged_bin_of_the_format_before_zip_archives(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save(WEIGHTS, path, _use_new_zipfile_serialization=False)
    whole = path.read_bytes()
    for kept in (20, 200, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:kept])
        assert "torn" in refused(path).found
    torch.save({"a": Path("x")}, path, _use_new_zipfile_serialization=False)
    assert "more than plain tensors" in refused(path).found
    torch.save({"a": torch.ones(1).expand(10**12)}, path, _use_new_zipfile_serialization=False)
    assert "takes 4000000000000 bytes" in refused(path).found


def test_a_bin_cannot_ask_for_more_memory_than_it_has(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1).expand(10**12)}, tmp_path / "x.bin")
    assert "takes 4000000000000 bytes" in refused(tmp_path / "x.bin").found


def test_keys_that_a_terminal_should_not_print_are_escaped(sharded: Path) -> None:
    harm_map(**{"\x1b[2J\ud800": "model-2.safetensors"})(sharded)
    assert "'\\x1b[2J\\ud800 (model-2.safetensors)'" in refused(sharded).found


def test_an_archive_packed_by_other_means_is_refused(tmp_path: Path) -> None:
    torch.save(WEIGHTS, tmp_path / "x.bin")
    with zipfile.ZipFile(tmp_path / "x.bin") as source, zipfile.ZipFile(tmp_path / "y.bin", "w") as target:
        for entry in source.infolist():
            target.writestr(entry.filename, source.read(entry), zipfile.ZIP_DEFLATED)
    assert "compressed" in refused(tmp_path / "y.bin").found
    with zipfile.ZipFile(tmp_path / "x.bin") as source, zipfile.ZipFile(tmp_path / "z.bin", "w") as target:
        for entry in source.infolist():
            content = b"big" if entry.filename.endswith("byteorder") else source.read(entry)
            target.writestr(entry.filename, content)
    assert "byte order" in refused(tmp_path / "z.bin").found


def library_view(path: Path) -> dict[str, torch.Tensor]:
    content = torch.load(path, weights_only=True, mmap=True, map_location="cpu")
    return content.get("state_dict", content)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_a_thousand_damaged_bins_are_refused_or_read_as_the_library_reads_them(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    torch.save({key: WEIGHTS[key] for key in "ab"}, path)
    whole = path.read_bytes()
    rng = random.Random(0)
    accepted = 0
    for _ in range(1000):
        content = bytearray(whole)
        for _ in range(rng.randrange(1, 4)):
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(content)
        try:
            checkpoint = open_checkpoint(path)
        except LoadError:
            continue
        accepted += 1
        found, want = read(checkpoint), library_view(path)
        assert found.keys() == want.keys()
        assert all(same_bits(found[key], want[key]) for key in want)
    assert 0 < accepted < 1000


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """A damaged number may be NaN."""
    return (left.dtype, left.shape) == (right.dtype, right.shape) and left.numpy().tobytes() == right.numpy().tobytes()


# --- reading ---------------------------------------------------------------------------------------------------------


def test_private_tensors_are_no_part_of_the_file(single: Path) -> None:
    path = single / "model.safetensors"
    found = read(open_checkpoint(single))
    raw = path.read_bytes()
    with path.open("r+b") as file:
        file.seek(-60, os.SEEK_END)
        file.write(b"\xff" * 60)
    assert equal(found, WEIGHTS)
    path.write_bytes(raw)
    for tensor in found.values():
        tensor.zero_()
    assert path.read_bytes() == raw


def test_mapped_tensors_outlive_reader_and_file(single: Path) -> None:
    found = read(open_checkpoint(single), ReadMode.MAPPED)
    (single / "model.safetensors").unlink()
    assert equal(found, WEIGHTS)


def mapped_files(folder: Path) -> int:
    return Path("/proc/self/maps").read_text().count(str(folder))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_last_mapped_tensor_ends_the_mapping(single: Path) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    found = read(open_checkpoint(single), ReadMode.MAPPED)
    assert mapped_files(single) == 1
    del found["a"], found["b"]
    assert mapped_files(single) == 1
    del found["c"]
    assert mapped_files(single) == 0
    assert len(os.listdir("/proc/self/fd")) == descriptors


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("padding", range(8))
def test_any_alignment_of_the_data(tmp_path: Path, mode: ReadMode, padding: int) -> None:
    want = {"a": torch.arange(3, dtype=torch.int8), "b": torch.randn(5), "c": torch.randn(2, 2, dtype=torch.float64)}
    header: dict[str, Any] = {}
    data = b""
    for key, name in (("a", "I8"), ("b", "F32"), ("c", "F64")):
        raw = want[key].numpy().tobytes()
        header[key] = {"dtype": name, "shape": [*want[key].shape], "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode() + b" " * padding
    (tmp_path / "x.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    found = read(open_checkpoint(tmp_path / "x.safetensors"), mode)
    assert equal(found, want)
    assert all(value.data_ptr() % value.dtype.itemsize == 0 for value in found.values())


@pytest.mark.parametrize("mode", MODES)
def test_only_the_keys_asked_for_in_the_order_of_the_disk(sharded: Path, mode: ReadMode) -> None:
    checkpoint = open_checkpoint(sharded)
    with CheckpointReader(checkpoint, mode) as reader:
        assert [key for key, _ in reader.tensors(["c", "a", "c"])] == ["a", "c"]
        assert list(reader.tensors([])) == []
        with pytest.raises(LoadError, match="2 keys are not in the checkpoint: x, y"):
            list(reader.tensors(["y", "a", "x"]))


@pytest.mark.parametrize("mode", MODES)
def test_many_tensors_in_small_pieces(tmp_path: Path, mode: ReadMode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_CHUNK_BYTES", 1000)
    monkeypatch.setattr(reading, "_BATCH_BYTES", 5000)
    monkeypatch.setattr(reading, "_AHEAD_BYTES", 20_000)
    want = {f"k{number}": torch.randn(number * 7 % 3000) for number in range(500)}
    save_file(want, tmp_path / "x.safetensors")
    assert equal(read(open_checkpoint(tmp_path / "x.safetensors"), mode), want)


@pytest.mark.parametrize("mode", MODES)
def test_the_callers_device_and_default_dtype_do_not_reach_the_reader(single: Path, mode: ReadMode) -> None:
    torch.save(WEIGHTS, single / "x.bin")
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            found = [read(open_checkpoint(path), mode) for path in (single, single / "x.bin")]
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(equal(weights, WEIGHTS) for weights in found)


def touch(path: Path) -> None:
    """As if it was written to a while later: the clock of a file system ticks every few milliseconds only."""
    os.utime(path, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns + 10_000_000))


def overwrite(path: Path) -> None:
    """As `cp` does: the same file, the same size, other bytes."""
    save_file({key: value + 1 for key, value in WEIGHTS.items()}, path.with_suffix(".new"), metadata={"format": "pt"})
    new = path.with_suffix(".new").read_bytes()
    assert len(new) == path.stat().st_size
    with path.open("r+b") as file:
        file.write(new)
    touch(path)


def truncate(path: Path) -> None:
    os.truncate(path, 100)


def replace(path: Path) -> None:
    save_file(WEIGHTS, path.with_suffix(".new"), metadata={"format": "pt"})
    os.utime(path.with_suffix(".new"), ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    path.with_suffix(".new").rename(path)


CHANGES = [(overwrite, "written to"), (truncate, "size changed"), (replace, "another file"), (Path.unlink, "looked at")]


@pytest.mark.parametrize("change, words", CHANGES)
def test_the_guard_sees_what_happens_to_a_mapped_file(single: Path, change: Callable[[Path], None], words: str) -> None:
    path = single / "model.safetensors"
    checkpoint = open_checkpoint(single)
    with CheckpointReader(checkpoint, ReadMode.MAPPED) as reader:
        found = dict(reader.tensors(WEIGHTS))
    guard = checkpoint.guard
    guard.check()
    assert equal(found, WEIGHTS)
    change(path)
    with pytest.raises(LoadError, match=words) as caught:
        guard.check()
    assert str(path) in caught.value.doing


@pytest.mark.skipif(sys.platform != "linux", reason="the signal differs")
def test_a_truncated_mapping_is_refused_before_it_kills(tmp_path: Path) -> None:
    """In a process of its own, which the unguarded use would end with SIGBUS."""
    path = tmp_path / "model.safetensors"

    def use(*, guarded: bool) -> None:
        checkpoint = open_checkpoint(path)
        with CheckpointReader(checkpoint, ReadMode.MAPPED) as reader:
            found = dict(reader.tensors(["a"]))
        os.truncate(path, 4096)
        if guarded:
            checkpoint.guard.check()
        found["a"].sum().item()

    ends = []
    for guarded in (True, False):
        save_file({"a": torch.ones(100_000)}, path)
        child = os.fork()
        if child == 0:
            faulthandler.disable()
            with suppress(LoadError):
                use(guarded=guarded)
                os._exit(0)
            os._exit(7)
        ends.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    assert ends == [7, -signal.SIGBUS]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("change, words", CHANGES[:3])
def test_a_file_that_changed_since_its_header_was_read(
    single: Path, mode: ReadMode, change: Callable[[Path], None], words: str
) -> None:
    checkpoint = open_checkpoint(single)
    change(single / "model.safetensors")
    with pytest.raises(LoadError, match=words), CheckpointReader(checkpoint, mode) as reader:
        list(reader.tensors(WEIGHTS))


def many(path: Path) -> dict[str, torch.Tensor]:
    weights = {f"k{number:03}": torch.full((1000,), float(number)) for number in range(200)}
    save_file(weights, path)
    return weights


@pytest.mark.parametrize("change", [touch, truncate, lambda path: path.write_bytes(b"")])
def test_a_file_that_changes_during_private_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None]
) -> None:
    path = tmp_path / "model.safetensors"
    many(path)
    monkeypatch.setattr(reading, "_BATCH_BYTES", 1)
    monkeypatch.setattr(reading, "_AHEAD_BYTES", 10_000)
    seen: list[str] = []
    with (
        pytest.raises(LoadError, match="changed since its header was read"),
        CheckpointReader(open_checkpoint(path), ReadMode.PRIVATE) as reader,
    ):
        for key, _ in reader.tensors(open_checkpoint(path).tensors):
            seen.append(key)
            if len(seen) == 20:
                change(path)
    assert 20 <= len(seen) <= 200


def test_leaving_early_still_compares(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    many(path)
    checkpoint = open_checkpoint(path)
    with (
        pytest.raises(LoadError, match="written to"),
        CheckpointReader(checkpoint, ReadMode.PRIVATE) as reader,
    ):
        tensors: Iterator[Any] = reader.tensors(checkpoint.tensors)
        next(tensors)
        touch(path)
        tensors.close()


def test_an_error_of_the_caller_is_not_hidden(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    many(path)
    checkpoint = open_checkpoint(path)
    with pytest.raises(ZeroDivisionError), CheckpointReader(checkpoint, ReadMode.PRIVATE) as reader:
        for _ in reader.tensors(checkpoint.tensors):
            touch(path)
            raise ZeroDivisionError
    assert threading.active_count() == 1 or not [t for t in threading.enumerate() if t.name.startswith("dryfit-read")]
