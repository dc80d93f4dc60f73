"""Files of tensors without values: their sizes are those of real files, and they are read back as fakes."""

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch

import walled

pytestmark = pytest.mark.heavy

MODEL = """
def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(300, 400), torch.nn.Linear(400, 300, dtype=torch.bfloat16),
                               torch.nn.Embedding(1000, 64))
"""
FAKE = MODEL + "with fakes: fake = model()\nassert isinstance(fake[0].weight, FakeTensor)\n"


def test_sizes_are_those_of_real_files(tmp_path: Path) -> None:
    code = FAKE + (
        "import safetensors.torch\n"
        "optimizer = torch.optim.AdamW(fake.parameters())\n"
        "for parameter in fake.parameters():\n    with fakes: parameter.grad = torch.empty_like(parameter)\n"
        "with fakes: optimizer.step()\n"
        "torch.save(fake.state_dict(), 'model.pt')\n"
        "torch.save({'a': [fake[0].weight, fake[0].weight.detach()[1:]], 'n': 3}, 'tied.pt')\n"
        "torch.save(optimizer.state_dict(), 'optimizer.pt')\n"
        "safetensors.torch.save_file(fake.state_dict(), 'model.safetensors', {'format': 'pt'})\n"
        "for name in ('model.pt', 'tied.pt', 'optimizer.pt', 'model.safetensors'):\n"
        "    assert Path(name).stat().st_size < 10_000\n"
        "sizes = {name: muting.saved.size_of(name) for name in os.listdir()}\n"
        "muting.say('sizes', json.dumps(sizes))\n"
    )
    project = tmp_path / "project"
    project.mkdir()
    for muted in walled.run_each("", {"saved": code}, tmp_path / "s", project, walls=walled.DAILY).values():
        said, checkpoint = muted
        told = json.loads(said.where)
        assert (checkpoint.what, checkpoint.where, checkpoint.bytes) == ("checkpoint", str(project), sum(told.values()))
        are_those_of_real_files(told, tmp_path)
    assert not list(project.iterdir())


def are_those_of_real_files(told: dict[str, int], tmp_path: Path) -> None:
    torch.manual_seed(0)
    layers = (torch.nn.Linear(300, 400), torch.nn.Linear(400, 300, dtype=torch.bfloat16), torch.nn.Embedding(1000, 64))
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter)
    optimizer.step()
    real = {
        "model.pt": model.state_dict(),
        "tied.pt": {"a": [model[0].weight, model[0].weight.detach()[1:]], "n": 3},
        "optimizer.pt": optimizer.state_dict(),
    }
    for name, value in real.items():
        torch.save(value, tmp_path / name)
        assert told[name] == pytest.approx((tmp_path / name).stat().st_size, rel=2e-3), name
    safetensors.torch.save_file(model.state_dict(), tmp_path / "model.safetensors", {"format": "pt"})
    assert told["model.safetensors"] == (tmp_path / "model.safetensors").stat().st_size


READS = {
    "state": """
torch.save({'model': fake.state_dict(), 'step': torch.tensor(3), 'epoch': 1}, 'x.pt')
for weights_only in (True, False):
    loaded = torch.load('x.pt', map_location='cpu', weights_only=weights_only)
    assert loaded['step'].item() == 3 and not isinstance(loaded['step'], FakeTensor) and loaded['epoch'] == 1
    for name, tensor in fake.state_dict().items():
        again = loaded['model'][name]
        assert isinstance(again, FakeTensor) and (again.shape, again.dtype) == (tensor.shape, tensor.dtype)
with fakes: print(fake.load_state_dict(loaded['model']))""",
    "whole model": """
torch.save(fake, 'x.pt')
loaded = torch.load('x.pt', weights_only=False)
assert isinstance(loaded[0].weight, FakeTensor) and isinstance(loaded[0].weight, torch.nn.Parameter)
assert loaded[0].weight.requires_grad and loaded[0].weight.shape == (400, 300)""",
    "buffer": """
buffer = io.BytesIO()
torch.save(fake.state_dict(), buffer)
assert buffer.tell() < 10_000
buffer.seek(0)
assert isinstance(torch.load(buffer)['0.weight'], FakeTensor)""",
    "buffer written": """
buffer = io.BytesIO()
torch.save({'state_dict': fake.state_dict(), 'note': 'x'}, buffer)
with open('last.ckpt', 'wb') as file: file.write(buffer.getvalue())
assert muting.saved.size_of('last.ckpt') > 500_000
os.remove('last.ckpt')
with open('model.pkl', 'wb') as file: pickle.dump(fake, file)
assert muting.saved.size_of('model.pkl') > 500_000
with open('model.pkl', 'rb') as file: assert isinstance(pickle.load(file)[0].weight, FakeTensor)""",
    "pickles": """
again = pickle.loads(pickle.dumps(fake[0].weight))
assert isinstance(again, FakeTensor) and again.shape == (400, 300) and isinstance(again, torch.nn.Parameter)
assert copy.copy(fake[0].weight).untyped_storage() is fake[0].weight.untyped_storage()
with fakes: deep = copy.deepcopy(fake)
assert deep[0].weight.untyped_storage() is not fake[0].weight.untyped_storage()""",
    "legacy": """
torch.save(fake.state_dict(), 'x.pt', _use_new_zipfile_serialization=False)
assert isinstance(torch.load('x.pt')['0.weight'], FakeTensor)""",
    "real ones are real": """
values = torch.arange(1 << 20)
torch.save({'a': values, 'b': [1]}, 'real.pt')
assert torch.load('real.pt')['a'].equal(values) and muting.saved.size_of('real.pt') > 8 << 20
safetensors.torch.save_file({'a': values}, 'real.safetensors')
assert safetensors.torch.load_file('real.safetensors')['a'].equal(values)""",
    "zeros of the host": """
zeros = torch.zeros(1 << 20)
torch.save({'a': zeros, 'small': torch.zeros(3)}, 'x.pt')
assert Path('x.pt').stat().st_size < 5_000 and muting.saved.size_of('x.pt') > 4 << 20
loaded = torch.load('x.pt')
assert loaded['a'].equal(zeros) and not isinstance(loaded['a'], FakeTensor)""",
    "safetensors": """
tensors = {'a': fake[0].weight.detach(), 'values': torch.arange(4), 'b': torch.zeros(1 << 20)}
safetensors.torch.save_file(tensors, 'x.safetensors')
os.makedirs('sub'); shutil.move('x.safetensors', 'sub/y.safetensors')
loaded = safetensors.torch.load_file('sub/y.safetensors')
assert isinstance(loaded['a'], FakeTensor) and loaded['values'].tolist() == [0, 1, 2, 3]
assert loaded['b'].shape == (1 << 20,)
with safetensors.safe_open('sub/y.safetensors', framework='pt', device='cpu') as file:
    assert sorted(file.keys()) == ['a', 'b', 'values'] and file.get_slice('a').get_shape() == [400, 300]
    assert file.metadata() is None
assert muting.saved.size_of('sub') > 4 << 20
shutil.rmtree('sub')
try: safetensors.torch.save_file({'a': fake[0].weight, 'b': fake[0].weight}, 'x')
except RuntimeError as error: assert 'share memory' in str(error)
else: raise AssertionError
safetensors.torch.save_model(fake, 'm.safetensors')
with fakes: safetensors.torch.load_model(fake, 'm.safetensors')""",
    "copies": """
torch.save(fake.state_dict(), 'x.pt')
shutil.copy('x.pt', 'y.pt')
shutil.copytree('.', 'all')
assert muting.saved.size_of('y.pt') == muting.saved.size_of('x.pt') == muting.saved.size_of('all/x.pt') > 500_000
assert isinstance(torch.load('y.pt')['0.weight'], FakeTensor)
torch.save(1, 'x.pt')
assert muting.saved.size_of('x.pt') < 5_000""",
    "no folder": """
try: torch.save(fake.state_dict(), 'none/x.pt')
except RuntimeError as error: assert 'Parent directory none does not exist' in str(error)
else: raise AssertionError
try: torch.load('none.pt')
except FileNotFoundError as error: assert error.filename.endswith('none.pt')
else: raise AssertionError""",
    "distributed checkpoint": """
import torch.distributed.checkpoint as dcp
state = {name: torch.zeros_like(real) for name, real in model().state_dict().items()}
state = {'model': state, 'step': torch.tensor(3)}
state['model']['big'] = torch.zeros(1 << 22)
dcp.save(state, checkpoint_id='dcp')
state['step'].zero_()
dcp.load(state, checkpoint_id='dcp')
assert state['step'].item() == 3 and muting.saved.size_of('dcp') > 16 << 20
assert sum(path.stat().st_size for path in Path('dcp').iterdir()) < 4 << 20, list(Path('dcp').iterdir())""",
}


def test_what_was_saved_is_read_back_and_told(tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    head = "import copy, io, os, pickle, shutil\nimport safetensors, safetensors.torch, torch.distributed.checkpoint\n"
    told = walled.run_each(head + FAKE, READS, tmp_path / "scratch", project, walls=walled.DAILY)
    assert not list(project.iterdir())
    for wall in walled.DAILY:
        (buffer,) = told[wall, "buffer written"]  # one of its files was removed again
        assert (buffer.what, buffer.where) == ("checkpoint", str(project))
        assert (buffer.bytes or 0) > 500_000
        assert [muted.what for muted in told[wall, "real ones are real"]] == ["files"]
        removed = next(muted for muted in told[wall, "safetensors"] if muted.where == str(project))
        assert (removed.what, (removed.bytes or 0) > 4 << 20) == ("checkpoint", True)
