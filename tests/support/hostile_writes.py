"""Ways of writing to real files that Python does not see, and an attack on a rehearsal with them, drawn at random."""

import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
from contextlib import closing
from pathlib import Path

import psutil

import rehearsed
import walled
from attack import Attack
from dryfit.settings.rehearsal_messages import RehearsalRequest

HOSTILE = {
    "sqlite by uri": """
import sqlite3
base = sqlite3.connect(f'file:{HERE}/made.db?mode=rwc', uri=True); base.execute('create table t (a)'); base.commit()""",
    "sqlite in place": """
import sqlite3
base = sqlite3.connect(b'base.db' if sys.version_info < (3, 12) else 'base.db')
base.execute('delete from t'); base.commit()
base.execute(f"attach '{HERE}/attached.db' as other"); base.execute('create table other.t (a)'); base.commit()
base.execute(f"vacuum into '{HERE}/vacuumed.db'")""",
    "torch in C": """
module = torch.jit.trace(lambda x: x / 2, torch.ones(1))
module.save('traced.pt')
writer = torch._C.PyTorchFileWriter(str(HERE / 'out' / 'old.txt')); writer.write_end_of_file(); del writer
shared = torch.from_file('raw', shared=True, size=4, dtype=torch.uint8); shared.fill_(7)""",
    "torch package": """
from torch.package import PackageExporter
with PackageExporter('out/package.pt') as package: package.save_text('a', 'b', 'c')""",
    "execution trace": """
from torch.profiler import ExecutionTraceObserver
observer = ExecutionTraceObserver(); observer.register_callback(str(HERE / 'out' / 'trace.json'))
observer.start(); torch.ones(3).sum(); observer.stop(); observer.unregister_callback()""",
    "pyarrow": """
import pyarrow, pyarrow.csv, pyarrow.feather, pyarrow.fs, pyarrow.parquet
files, table = pyarrow.fs.LocalFileSystem(), pyarrow.table({'a': [1]})
with files.open_output_stream(str(HERE / 'out' / 'old.txt')) as file: file.write(b'x')
files.delete_dir(str(HERE / 'out' / 'deep'))
with pyarrow.ipc.new_file(str(HERE / 'ipc'), table.schema) as file: file.write(table)
pyarrow.csv.write_csv(table, str(HERE / 'csv')); pyarrow.feather.write_feather(table, str(HERE / 'feather'))
pyarrow.parquet.write_table(table, f'file://{HERE}/table.parquet')""",
    "h5py": """
try: import h5py
except ImportError: h5py = None
if h5py is not None:
    with h5py.File('out/new.h5', 'w') as file: file['a'] = 1""",
    "proc": """
for root in ('/proc/self/cwd', f'/proc/self/root{HERE}', f'/proc/thread-self/root{HERE}'):
    open(f'{root}/through', 'w').write('x'); os.remove(f'{root}/through')
    file = os.open(f'{root}/out/old.txt', os.O_WRONLY | os.O_TRUNC); os.close(file)
folder = os.open('.', os.O_RDONLY)
open(f'/proc/self/fd/{folder}/through', 'w').write('x'); open(f'/dev/fd/{folder}/through', 'w').write('x')
file = os.open('out/old.txt', os.O_RDONLY); open(f'/proc/self/fd/{file}', 'w').write('x')""",
    "handlers": """
import signal, threading
def write(*_):
    for action in (lambda: posix.unlink(HERE / 'out/deep/er/d.txt'),
                   lambda: _io.FileIO(HERE / 'out/old.txt', 'w').close(),
                   lambda: posix.close(posix.open(HERE / 'slipped', os.O_WRONLY | os.O_CREAT))):
        try: action()
        except OSError: pass
class Path_:
    def __fspath__(self): write(); return 'out/old.txt'
open(Path_(), 'w').close(); os.path.exists(Path_()); os.listdir('out')
armed = True
def write_again(*_):
    write()
    if armed: signal.setitimer(signal.ITIMER_REAL, 1e-4)  # not periodic: a slow handler would interrupt itself for ever
signal.signal(signal.SIGALRM, write_again); signal.setitimer(signal.ITIMER_REAL, 1e-4)
try:
    for _ in range(50): Path('out/a').write_text('x'); os.remove('out/a')
finally:
    armed = False; signal.setitimer(signal.ITIMER_REAL, 0)
sys.setprofile(write); Path('out/b').write_text('x'); sys.setprofile(None)
sys.settrace(write); Path('out/b').write_text('x'); sys.settrace(None)
threads = [threading.Thread(target=write) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
sys.addaudithook(lambda event, _: write() if event == 'os.listdir' else None); os.listdir('out')""",
    "metadata": """
import ctypes
file, libc = os.open('out/old.txt', os.O_RDONLY), ctypes.CDLL(None)
os.fchmod(file, 0o777); os.utime(file, (1, 1)); os.fchown(file, 12, 12)
os.setxattr(file, 'user.changed', b'x')""",
    "metadata in C": """
import ctypes
libc = ctypes.CDLL(None)
for name in (b'out/old.txt', b'.', b'link'):
    libc.chmod(name, 0o777); libc.lchown(name, 12, 12); libc.setxattr(name, b'user.changed', b'x', 1, 0)
    libc.utimes(name, None); libc.removexattr(name, b'user.kept')
for program in ('chmod 777 out/old.txt', 'chown 12 .', 'touch out/old.txt', 'touch -h link'): os.system(program)""",
    "entries": """
import ctypes, socket
os.mkfifo('fifo'); os.mknod('node')
listening = socket.socket(socket.AF_UNIX); listening.bind('sock'); listening.close()
libc = ctypes.CDLL(None)
libc.mkdir(b'made', 0o777); libc.symlink(b'a', b'b'); libc.link(b'out/old.txt', b'hard')
libc.unlink(b'out/deep/er/d.txt'); libc.rename(b'out', b'away')""",
    "links to real files": """
try:
    os.link('out/old.txt', own / 'hard')
    open(own / 'hard', 'a').write('x')
except OSError as error: assert error.errno == errno.EXDEV
import ctypes
ctypes.CDLL(None).link(b'out/old.txt', bytes(own / 'hard2'))
if (own / 'hard2').exists(): _io.FileIO(str(own / 'hard2'), 'w').write(b'x')""",
    "maps": """
import mmap
with open('out/old.txt', 'r+b') as file, mmap.mmap(file.fileno(), 0) as mapped: mapped[0] = 88
numpy.memmap('raw', dtype='u1', mode='r+')[:] = 1
sparse = numpy.memmap('sparse', dtype='u1', mode='r+'); sparse[5] = 1; del sparse""",
    "kernel copies": """
source, target = os.open('base.db', os.O_RDONLY), os.open('out/old.txt', os.O_WRONLY)
os.sendfile(target, source, 0, 3); os.copy_file_range(source, target, 3); os.close(target)
memory = os.memfd_create('m'); os.write(memory, b'x'); os.lseek(memory, 0, 0)
target = os.open('raw', os.O_WRONLY); os.sendfile(target, memory, 0, 1)""",
    "programs": """
import subprocess
inner = "import shutil, os; shutil.rmtree('out'); open('new', 'w').write('x')"
for command in ('rm -rf out', 'echo x > out/old.txt', 'cp base.db copied', 'mv out away', 'truncate -s 1 sparse',
                'sed -i s/o/a/ out/old.txt', 'dd if=/dev/zero of=raw bs=1 count=1', 'tar cf a.tar out && tar xf a.tar',
                'setsid sh -c "echo y > out/later"', 'ln -f base.db out/old.txt', f'{sys.executable} -c "{inner}"'):
    subprocess.run(command, shell=True, check=False, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
if not os.fork():
    os.execv('/bin/sh', ['sh', '-c', 'rm -rf out 2> /dev/null'])
os.wait()""",
    "shared memory": """
for name in [name for name in os.listdir('/dev/shm') if name.startswith('dryfit-test-')]:
    for action in (lambda: open(f'/dev/shm/{name}', 'w').write('x'), lambda: os.remove(f'/dev/shm/{name}')):
        try: action()
        except OSError: pass
from multiprocessing import shared_memory
block = shared_memory.SharedMemory(create=True, size=16); block.buf[0] = 1; block.close(); block.unlink()""",
}
"""The ways, by name. Behind the second wall they may be refused."""
HEAD = """
import _io, bz2, codecs, csv, errno, glob, gzip, json, logging, multiprocessing, os, pickle, posix, shelve
import shutil, sqlite3, sys, tempfile, zipfile
import numpy, pandas
captured, makes, removes = open, os.makedirs, os.remove
HERE = Path.cwd()
"""


_STEPS = """
model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(3):
    model(torch.randn(4, 8, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.save(model.state_dict(), f"out/step-{step}.pt")
    print(f"STEP {step}", flush=True)
"""
_PLACES = {
    "at once": "{name}()",
    "in a thread": "import threading; thread = threading.Thread(target={name}); thread.start(); thread.join()",
    "at the end": "import atexit; atexit.register({name})",
    "in a child": "if not os.fork(): {name}(); os._exit(0)",
    "by a hook of a step": "torch.optim.optimizer.register_optimizer_step_post_hook(lambda *_: {name}())",
}
_KILLS = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGKILL)


def make_project(root: Path) -> Path:
    """Make a folder with what an earlier run may have left: links, a sparse file, a database, attributes."""
    (root / "out" / "deep" / "er").mkdir(parents=True)
    (root / "out" / "old.txt").write_text("old")
    (root / "out" / "deep" / "er" / "d.txt").write_text("deep")
    (root / "link").symlink_to("out")
    (root / "raw").write_bytes(bytes(64))
    os.setxattr(root / "out" / "old.txt", "user.kept", b"x")
    with (root / "sparse").open("wb") as file:
        file.truncate(1 << 20)
    with closing(sqlite3.connect(root / "base.db")) as base:
        base.execute("create table t (a)")
        base.execute("insert into t values (1)")
        base.commit()
    return root


def rehearsed_writes(attack: Attack) -> str:
    """A rehearsed script writes by three ways, at some places, behind a wall, and may be killed: nothing changes."""
    draw = attack.draw
    project, folder = make_project(attack.study.with_name("project")), attack.study.with_name("rehearsal")
    folder.mkdir()
    names = draw.sample(sorted(HOSTILE), 3)
    wall, number = draw.choice(walled.WALLS), draw.choice([None, *_KILLS])
    at = [draw.choice(sorted(_PLACES)) for _ in names]
    script = folder / "train.py"
    script.write_text(_script(names, at, HEAD.replace("Path.cwd()", repr(project))), encoding="utf-8")
    body = RehearsalRequest(
        script=str(script),
        device=rehearsed.device(),
        wall=wall,
        scratch_dir=str(folder / "scratch"),
        answer_file=str(folder / "answer.json"),
        parent_pid=os.getpid(),
    )
    (folder / "request.json").write_text(body.model_dump_json(), encoding="utf-8")
    before = walled.tree(project)
    attack.report.commands += 1
    command = [sys.executable, "-m", "dryfit.gpu", str(folder / "request.json")]
    with subprocess.Popen(
        command,
        cwd=project,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        mark = f"STEP {draw.randrange(3)}".encode()
        said = b""
        for line in process.stdout:
            said += line
            if number is not None and line.startswith(mark):
                process.send_signal(number)
    ways = ", ".join(f"{name} {place}" for name, place in zip(names, at, strict=True))
    told = f"{wall}, {ways}, {number and number.name}"
    if number is None and not (folder / "answer.json").exists():
        attack.broken(f"no answer: {told}: {said[-600:].decode(errors='replace')}")
    left = [one for one in psutil.process_iter() if str(folder) in " ".join(_words(one))]
    if psutil.wait_procs(left, timeout=60)[1]:
        attack.broken(f"processes are left: {told}")
    after = walled.tree(project)
    changed = sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))
    if changed:
        attack.broken(f"{changed} changed: {told}")
    return told


def _script(names: list[str], at: list[str], head: str) -> str:
    parts = [f"import torch\nfrom pathlib import Path\n{head}\nimport tempfile\nown = Path(tempfile.gettempdir())"]
    for index, (name, place) in enumerate(zip(names, at, strict=True)):
        function = f"way_{index}"
        code = textwrap.indent(HOSTILE[name].strip(), "        ")
        parts.append(f"def {function}():\n    try:\n{code}\n    except Exception: pass")
        parts.append(_PLACES[place].format(name=function))
    return "\n".join([*parts, _STEPS])


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
