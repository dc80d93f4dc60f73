import json
import os
import random
import resource
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from dryfit.gpu.stored_types import STORED_TYPES
from dryfit.meta import file_formats
from dryfit.meta.checkpoint_files import open_checkpoint
from dryfit.meta.file_formats import read_safetensors_header
from dryfit.meta.reading import CheckpointReader, ReadMode
from dryfit.settings.errors import LoadError
from thinning import examples


def entry(dtype: Any = "U8", shape: Any = (4,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def write(path: Path, header: Any, data: bytes = b"\1\2\3\4") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def refused(path: Path) -> str:
    with pytest.raises(LoadError) as caught:
        read_safetensors_header(path)
    assert str(path) in caught.value.doing
    return caught.value.found


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    raw = torch.randint(0, 256, (torch.Size(shape).numel() * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal in type, shape and every bit; NaNs too."""
    if (left.dtype, left.shape) != (right.dtype, right.shape):
        return False
    flat = (left.contiguous().reshape(-1).view(torch.uint8), right.contiguous().reshape(-1).view(torch.uint8))
    return not left.numel() or torch.equal(*flat)


TENSORS = st.dictionaries(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(lambda key: key != "__metadata__"),
    st.tuples(
        st.sampled_from(list(STORED_TYPES.values())),
        st.lists(st.integers(0, 4), max_size=4).map(tuple),
        st.integers(0, 1000),
    ),
    max_size=6,
)


@settings(max_examples=examples(200))
@given(rows=TENSORS, metadata=st.none() | st.dictionaries(st.text(max_size=5), st.text(max_size=5)))
def test_every_dtype_and_shape_comes_back(
    tmp_path_factory: pytest.TempPathFactory, rows: dict[str, Any], metadata: dict[str, str] | None
) -> None:
    # Packed 4-bit numbers need a dimension to be packed along.
    want = {
        key: random_tensor(dtype, shape or ((3,) if dtype is torch.float4_e2m1fn_x2 else ()), seed)
        for key, (dtype, shape, seed) in rows.items()
    }
    path = tmp_path_factory.mktemp("round") / "model.safetensors"
    metadata = metadata if want else None  # safetensors 0.8 writes metadata without tensors as no JSON
    save_file(want, path, metadata=metadata)
    checkpoint = open_checkpoint(path)
    assert checkpoint.tensors.keys() == want.keys()
    for mode in ReadMode:
        with CheckpointReader(checkpoint, mode) as reader:
            found = dict(reader.tensors(want))
        assert all(same(found[key], value) for key, value in want.items())


def test_each_place_is_the_files(tmp_path: Path) -> None:
    want = {"a": torch.arange(3.0), "b": torch.arange(5, dtype=torch.int16), "c": torch.tensor(7)}
    path = tmp_path / "model.safetensors"
    save_file(want, path)
    raw = path.read_bytes()
    for key, stored in read_safetensors_header(path).tensors.items():
        part = raw[stored.offset_bytes : stored.offset_bytes + stored.size_bytes]
        assert (stored.key, stored.file) == (key, path)
        assert part == want[key].numpy().tobytes()


@pytest.mark.parametrize(
    "header, words",
    [
        ([], ["[]", "not an object"]),
        (b'{"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}', ["no valid JSON"]),
        (b"\xff\xfe{}", ["no valid JSON", "utf-8"]),
        (b"\xef\xbb\xbf{}", ["no valid JSON"]),
        (b'{"a": 1, "a": 2}', ["'a' is there twice"]),
        (b'{"a": {"dtype": "U8", "dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}', ["'dtype' is there twice"]),
        (b'{"a": {"dtype": "U8", "shape": [4], "data_offsets": [-0, 4]}}', ["'-0'"]),
        (b'{"a": {"dtype": "U8", "shape": [NaN], "data_offsets": [0, 4]}}', ["'NaN'"]),
        (b'{"a": ' + b"[" * 100_000, ["nested too deeply"]),
        (b'{"a": {"dtype": "U8", "shape": [' + b"9" * 5000 + b'], "data_offsets": [0, 4]}}', ["no valid JSON"]),
        (b'{"\\ud800": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}', ["Unicode"]),
        ({"a": []}, ["'a'", "[]"]),
        ({"a": {"dtype": "U8", "shape": [4]}}, ["'a'", "data_offsets, dtype, shape"]),
        ({"a": {**entry(), "more": 1}}, ["'a'", "'more'"]),
        ({"a": entry("F6_E2M3")}, ["'a'", "'F6_E2M3'", "BF16"]),
        ({"a": entry(["U8"])}, ["'a'", "dtype is ['U8']"]),
        ({"a": entry(shape=4)}, ["'a'", "shape is 4"]),
        ({"a": entry(shape=[True, 4])}, ["'a'", "shape holds True"]),
        ({"a": entry(shape=[4.0])}, ["'a'", "shape holds 4.0"]),
        ({"a": entry(shape=[-4])}, ["'a'", "shape holds -4"]),
        ({"a": entry(shape=[None])}, ["'a'", "shape holds None"]),
        ({"a": entry(shape=[2**63])}, ["'a'", "shape holds 9223372036854775808"]),
        ({"a": entry(shape=[10**100])}, ["'a'", "a number of 333 bits"]),
        ({"a": entry("U16", [2**62, 2**62])}, ["'a'", "overflows"]),
        ({"a": entry("U16", [0, 2**62, 2**62], [0, 0])}, ["'a'", "overflows"]),
        ({"a": entry(shape=[1] * 70)}, ["'a'", "70 dimensions"]),
        ({"a": entry("F4", [3], [0, 4])}, ["'a'", "even"]),
        ({"a": entry("F4", [], [0, 4])}, ["'a'", "even"]),
        ({"a": entry(shape=[3])}, ["'a'", "span 4 bytes", "takes 3"]),
        ({"a": entry("F32", [4])}, ["'a'", "span 4 bytes", "takes 16"]),
        ({"a": entry(offsets=[0, 4, 4])}, ["'a'", "data_offsets is [0, 4, 4]"]),
        ({"a": entry(offsets=[4, 0])}, ["'a'", "begin <= end"]),
        ({"a": entry(offsets={"0": 4})}, ["'a'", "not a list"]),
        ({"a": entry(shape=[5], offsets=[0, 5])}, ["'a'", "lead out of the file", "cut short"]),
        ({"a": entry(shape=[3], offsets=[0, 3])}, ["end at byte 3", "has 4 bytes"]),
        ({"a": entry(shape=[3], offsets=[1, 4])}, ["'a'", "hole after the start"]),
        ({"a": entry(shape=[1], offsets=[0, 1]), "b": entry(shape=[2], offsets=[2, 4])}, ["'b'", "hole after 'a'"]),
        ({"a": entry(shape=[3], offsets=[0, 3]), "b": entry(shape=[2], offsets=[2, 4])}, ["'b'", "overlaps with 'a'"]),
        ({"a": entry(), "b": entry()}, ["overlaps with 'a'"]),
        ({"__metadata__": [], "a": entry()}, ["__metadata__ is []"]),
        ({"__metadata__": {"format": 1}, "a": entry()}, ["__metadata__", "'format' is 1"]),
        (b'{"__metadata__": {"a": "\\ud800"}, "a": {"dtype":"U8","shape":[4],"data_offsets":[0,4]}}', ["Unicode"]),
    ],
)
def test_what_the_format_does_not_allow_is_refused(tmp_path: Path, header: Any, words: list[str]) -> None:
    found = refused(write(tmp_path / "model.safetensors", header))
    assert all(word in found for word in words), found
    assert len(found) < 1000


def test_lengths_that_cannot_be_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    for content, words in (
        (b"", "has 0 bytes"),
        (b"\1\0\0", "has 3 bytes"),
        ((100).to_bytes(8, "little") + b"{}", "cut short"),
        ((2**64 - 1).to_bytes(8, "little") + b"{}", "18446744073709551615"),
        ((100_000_001).to_bytes(8, "little") + b"{}", "at most 100000000"),
        (b"\0" * 8, "no valid JSON"),
    ):
        path.write_bytes(content)
        assert words in refused(path)


def test_a_claim_of_a_long_header_allocates_nothing(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes((100_000_000).to_bytes(8, "little") + b"{}")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert "cut short" in refused(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000


def test_a_git_lfs_pointer_is_called_one(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n")
    with pytest.raises(LoadError, match="git lfs pull"):
        read_safetensors_header(path)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    assert "cannot be opened" in refused(tmp_path / "none.safetensors")
    assert "no regular file" in refused(tmp_path)
    pipe = tmp_path / "pipe.safetensors"
    os.mkfifo(pipe)
    assert "no regular file" in refused(pipe)


def test_a_file_that_changes_while_its_header_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "model.safetensors", {"a": entry()})
    parse = file_formats.parse_json

    def slow(text: bytes) -> Any:
        with path.open("ab") as file:
            file.write(b"more")
        return parse(text)

    monkeypatch.setattr(file_formats, "parse_json", slow)
    with pytest.raises(LoadError, match="changed since its header was read: its size changed"):
        read_safetensors_header(path)


def test_a_header_of_many_keys_is_read_fast(tmp_path: Path) -> None:
    count = 20_000
    header = {f"model.layers.{n}.weight": entry(shape=[1], offsets=[n, n + 1]) for n in range(count)}
    path = write(tmp_path / "model.safetensors", header, bytes(count))
    began_s = time.process_time()
    assert len(read_safetensors_header(path).tensors) == count
    assert time.process_time() - began_s < 5  # 0.15 s on a quiet machine: this is about squares, not about speed


# --- mutated headers ---------------------------------------------------------------------------------------------

NUMBERS = (0, 1, -1, 3, 4, 5, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**30, 10**400)
ODD = (*NUMBERS, 0.5, 1e300, True, False, None, "", "F32", [], {}, [[]], [0], [0, 0], {"dtype": "U8"})
SPOILT = (*(bytes([byte]) for byte in b'{}[]",:\\\0\xff- '), b"-0", b"1e9", b"\\ud800", b"9" * 50)


def original(rng: random.Random) -> tuple[dict[str, Any], bytes]:
    header: dict[str, Any] = {}
    end = 0
    for number in range(rng.randrange(1, 5)):
        dtype = rng.choice(list(STORED_TYPES))
        shape = [rng.randrange(4) for _ in range(rng.randrange(1, 3))]
        if dtype == "F4":
            shape[-1] *= 2
        size = (STORED_TYPES[dtype].itemsize * torch.Size(shape).numel()) // (2 if dtype == "F4" else 1)
        header[f"layer.{number}"] = entry(dtype, shape, [end, end + size])
        end += size
    if rng.random() < 0.3:
        header["__metadata__"] = {"format": "pt"}
    return header, bytes(rng.choices((0, 1), k=end))


def mutate_json(header: dict[str, Any], rng: random.Random) -> bytes:
    for _ in range(rng.randrange(1, 3)):
        key = rng.choice(list(header))
        inner = header[key]
        match rng.randrange(7):
            case 0:
                header[key] = rng.choice(ODD)
            case 1 if isinstance(inner, dict):
                inner[rng.choice(["dtype", "shape", "data_offsets", "more"])] = rng.choice(ODD)
            case 2 if isinstance(inner, dict) and isinstance(inner.get("data_offsets"), list):
                inner["data_offsets"] = [rng.choice((old, old + 1, old - 1, *NUMBERS)) for old in inner["data_offsets"]]
            case 3 if isinstance(inner, dict) and isinstance(inner.get("shape"), list):
                inner["shape"] = [*inner["shape"], *rng.choices(NUMBERS, k=rng.randrange(3))]
            case 4 if isinstance(inner, dict):
                inner["dtype"] = rng.choice([*STORED_TYPES, "F6_E2M3", "f32", "I128"])
            case 5 if isinstance(inner, dict) and inner:
                inner.pop(rng.choice(list(inner)))
            case _:
                header[rng.choice(["", "__metadata__", "é", "layer.0", "x" * 5000])] = rng.choice((inner, *ODD))
    if rng.random() < 0.1:
        deep: Any = 1
        for _ in range(rng.choice((5, 200, 800))):
            deep = [deep] if rng.random() < 0.5 else {"a": deep}
        header["deep"] = deep
    pairs = [(key, header[key]) for key in rng.sample(list(header), len(header))]
    if rng.random() < 0.1:
        pairs.append(rng.choice(pairs))
    return ("{" + ",".join(f"{json.dumps(key)}:{json.dumps(value)}" for key, value in pairs) + "}").encode()


def mutated(rng: random.Random) -> bytes:
    header, data = original(rng)
    text = json.dumps(header).encode()
    kind = rng.randrange(8)
    if kind <= 3:
        text = mutate_json(header, rng)
    content = bytearray(len(text).to_bytes(8, "little") + text + data)
    match kind:
        case 4:
            for _ in range(rng.randrange(1, 4)):
                content[rng.randrange(len(text) + 8)] ^= 1 << rng.randrange(8)
        case 5:
            del content[rng.randrange(len(content)) :]
        case 6:
            place = rng.randrange(8, len(text) + 8)
            spoilt = rng.choice(SPOILT)
            content[place : place + rng.randrange(3)] = spoilt
            if rng.random() < 0.7:
                content[:8] = (len(content) - len(data) - 8).to_bytes(8, "little")
        case 7:
            length = rng.choice((len(text) + 1, len(text) - 1, 0, 2**63, 2**64 - 1, 10**8, 1))
            content[:8] = length.to_bytes(8, "little")
    return bytes(content)


def raw_view(value: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    return value.dtype, tuple(value.shape), value.reshape(-1).view(torch.uint8).numpy().tobytes()


def library_view(path: Path) -> dict[str, tuple[torch.dtype, tuple[int, ...], bytes]] | None:
    try:
        with safe_open(path, "pt") as file:
            return {key: raw_view(file.get_tensor(key)) for key in file.keys()}
    except (SafetensorError, RuntimeError, TypeError):
        return None


@pytest.mark.parametrize("count", [1_000, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.nightly])])
def test_mutated_headers_are_refused_or_read_as_the_library_reads_them(tmp_path: Path, count: int) -> None:
    path = tmp_path / "model.safetensors"
    rng = random.Random(0)
    accepted = 0
    messages: list[str] = []
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(count):
        content = mutated(rng)
        path.write_bytes(content)
        try:
            header = read_safetensors_header(path)
        except LoadError as error:
            messages.append(str(error))
            continue
        accepted += 1
        ours = {
            key: (stored.dtype, stored.shape, content[stored.offset_bytes : stored.offset_bytes + stored.size_bytes])
            for key, stored in header.tensors.items()
        }
        assert ours == library_view(path), (number, content)
        checkpoint = open_checkpoint(path)
        for mode in ReadMode:
            with CheckpointReader(checkpoint, mode) as reader:
                assert {key: raw_view(value) for key, value in reader.tensors(header.tensors)} == ours
    assert accepted > count // 50 and len(messages) > count // 10
    assert all(str(path) in message and len(message) < 2000 for message in messages)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb < 200_000
