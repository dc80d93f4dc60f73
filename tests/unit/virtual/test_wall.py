"""Behind each wall a script reads what it wrote, and nothing real is changed, whatever way of writing it takes."""

import os
import socket
import textwrap
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import thinning
import walled
from dryfit.processes.wall import caches
from dryfit.settings.choices import Wall
from hostile_writes import HEAD, HOSTILE, make_project

pytestmark = pytest.mark.heavy

WRITES = {
    "open": "open('new.txt', 'w').write('a')\nassert open('new.txt').read() == 'a'",
    "overwritten": "open('out/old.txt', 'w').write('new')\nassert open('out/old.txt').read() == 'new'",
    "appended": "open('out/old.txt', 'a').write('new')\nassert open('out/old.txt').read() == 'oldnew'",
    "changed within": """
with open('out/old.txt', 'r+b') as file:
    file.seek(1)
    file.write(b'X')
assert Path('out/old.txt').read_text() == 'oXd'""",
    "exclusive": """
try: open('out/old.txt', 'x')
except FileExistsError as error: assert error.filename == 'out/old.txt'
else: raise AssertionError
open('out/x', 'x').close()
try: open('out/x', 'x')
except FileExistsError: pass
else: raise AssertionError""",
    "no folder": """
for action in (lambda: open('none/x', 'w'), lambda: os.mkdir('none/x'), lambda: os.remove('out/none'),
               lambda: open('out/none', 'r+'), lambda: os.open('out/none', os.O_WRONLY), lambda: os.listdir('none'),
               lambda: os.rename('out/none', 'x'), lambda: os.truncate('out/none', 1), lambda: os.utime('out/none')):
    try: action()
    except FileNotFoundError as error: assert not (name := error.filename) or 'none' in name and name[0] != '/', error
    else: raise AssertionError
for action in (lambda: open('out', 'w'), lambda: os.remove('out')):
    try: action()
    except IsADirectoryError as error: assert error.filename == 'out'
    else: raise AssertionError
try: os.rmdir('out')
except OSError as error: assert error.errno == errno.ENOTEMPTY
else: raise AssertionError""",
    "pathlib": """
folder = Path('out/a/b')
folder.mkdir(parents=True)
folder.mkdir(parents=True, exist_ok=True)
(folder / 'x.txt').write_text('hi')
(folder / 'touched').touch()
assert sorted(path.name for path in folder.iterdir()) == ['touched', 'x.txt']
assert sorted(map(str, Path('out').rglob('*.txt'))) == ['out/a/b/x.txt', 'out/deep/er/d.txt', 'out/old.txt']
assert (folder / 'x.txt').resolve() == Path.cwd() / 'out/a/b/x.txt' and (folder / 'x.txt').stat().st_size == 2
(folder / 'x.txt').rename(folder / 'y.txt')
assert not (folder / 'x.txt').exists() and (folder / 'y.txt').is_file()""",
    "removed": """
os.remove('out/old.txt')
assert not os.path.exists('out/old.txt') and 'old.txt' not in os.listdir('out')
assert not glob.glob('out/*.txt') and not list(Path('out').glob('*.txt'))
try: open('out/old.txt')
except FileNotFoundError as error: assert error.filename == 'out/old.txt'
else: raise AssertionError
open('out/old.txt', 'w').write('again')
assert os.path.getsize('out/old.txt') == 5""",
    "rmtree": """
shutil.rmtree('out')
assert not os.path.exists('out') and 'out' not in os.listdir('.') and not os.path.exists('out/deep/er/d.txt')
os.makedirs('out/deep')
assert os.listdir('out') == ['deep'] and os.listdir('out/deep') == []
Path('out/deep/new').write_text('n')
shutil.rmtree('out', ignore_errors=False)
assert not os.path.exists('out')""",
    "renamed folder": """
os.rename('out', 'moved')
os.mkdir('moved/deep/new'); os.replace('moved/deep/er', 'moved/deep/new'); os.rename('moved/deep/new', 'moved/deep/er')
Path('/tmp/of-the-wall').write_text('x'); os.rename('/tmp/of-the-wall', Path.home() / 'of-the-wall')
assert not os.path.exists('/tmp/of-the-wall') and (Path.home() / 'of-the-wall').read_text() == 'x'
assert not os.path.exists('out') and Path('moved/deep/er/d.txt').read_text() == 'deep'
Path('moved/deep/er/d.txt').write_text('new')
assert Path('moved/old.txt').read_text() == 'old' and Path('moved/deep/er/d.txt').read_text() == 'new'
os.mkdir('out')
assert os.listdir('out') == []
shutil.move('moved/old.txt', 'out')
assert os.listdir('out') == ['old.txt'] and Path('out/old.txt').read_text() == 'old'
with open('out/old.txt', 'a') as file: file.write('+')
assert Path('out/old.txt').read_text() == 'old+'""",
    "replaced": """
with tempfile.NamedTemporaryFile('w', dir='out', delete=False) as file: file.write('whole')
os.replace(file.name, 'out/old.txt')
assert Path('out/old.txt').read_text() == 'whole' and not os.path.exists(file.name)
with tempfile.NamedTemporaryFile('w', dir='out') as file: assert os.path.exists(file.name)
assert not os.path.exists(file.name)
with tempfile.NamedTemporaryFile('w', delete=False) as file: file.write('other')
shutil.move(file.name, 'out/old.txt')
assert Path('out/old.txt').read_text() == 'other'
with tempfile.TemporaryDirectory(dir='out') as folder: Path(folder, 'x').write_text('x')
assert not os.path.exists(folder)""",
    "chdir": """
os.makedirs('fresh/sub')
os.chdir('fresh')
assert os.getcwd() == str(HERE / 'fresh') and Path.cwd().name == 'fresh'
Path('x').write_text('x')
os.chdir('..')
assert os.getcwd() == str(HERE) and Path('fresh/x').read_text() == 'x'
os.chdir('out')
Path('../y').write_text('y')
assert Path('../out/old.txt').read_text() == 'old' and (HERE / 'y').exists()""",
    "links": """
Path('link/old.txt').write_text('through')
assert Path('out/old.txt').read_text() == 'through' and Path('link').is_symlink()
os.symlink('out', 'mine')
Path('mine/new.txt').write_text('m')
assert Path('out/new.txt').read_text() == 'm' and os.readlink('mine') == 'out'
assert os.path.realpath('mine/new.txt') == str(HERE / 'out/new.txt')
os.unlink('link')
assert not os.path.lexists('link') and Path('out').exists()
os.symlink(HERE / 'out' / 'deep', 'latest')
Path('latest/er/d.txt').write_text('changed')
assert Path('out/deep/er/d.txt').read_text() == 'changed'
os.symlink('loop', 'loop')
try: open('loop')
except OSError as error: assert error.errno == errno.ELOOP
else: raise AssertionError""",
    "hard links": """
os.link('out/old.txt', 'out/second')
assert Path('out/second').read_text() == 'old' and os.path.getsize('out/second') == 3
with open('out/second', 'a') as file: file.write('+')
assert Path('out/second').read_text() == 'old+' and Path('out/old.txt').read_text() == 'old+'
Path('a').write_text('a')
os.link('a', 'b')
assert Path('b').read_text() == 'a'""",
    "descriptors": """
folder = os.open('out', os.O_RDONLY)
file = os.open('fd.txt', os.O_WRONLY | os.O_CREAT, 0o600, dir_fd=folder)
os.write(file, b'fd'); os.close(file)
assert Path('out/fd.txt').read_text() == 'fd' and os.stat('fd.txt', dir_fd=folder).st_size == 2
assert 'fd.txt' in os.listdir(folder) and 'fd.txt' in [entry.name for entry in os.scandir(folder)]
os.unlink('old.txt', dir_fd=folder)
os.mkdir('d', dir_fd=folder); os.rename('fd.txt', 'd/fd.txt', src_dir_fd=folder, dst_dir_fd=folder)
assert sorted(os.listdir('out')) == ['d', 'deep'] and os.listdir('out/d') == ['fd.txt']
os.close(folder)""",
    "marks": """
os.chmod('out/old.txt', 0o600); os.utime('out/old.txt', (1, 1))
Path('new').write_text('n'); os.chmod('new', 0o600); os.utime('new', (1, 1))
shutil.copy2('out/old.txt', 'copied')
if wall is Wall.NAMESPACES:
    for name in ('new', 'out/old.txt', 'copied'):
        assert os.stat(name).st_mtime == 1 and os.stat(name).st_mode & 0o777 == 0o600, name
os.truncate('out/old.txt', 1)
assert Path('out/old.txt').read_text() == 'o'""",
    "copies": """
shutil.copytree('out', 'copy')
shutil.copy('out/old.txt', 'out/deep')
shutil.copytree('copy', 'out', dirs_exist_ok=True)
assert Path('copy/deep/er/d.txt').read_text() == 'deep' and Path('out/deep/old.txt').read_text() == 'old'
shutil.make_archive('packed', 'zip', 'copy')
with zipfile.ZipFile('packed.zip') as packed: assert 'deep/er/d.txt' in packed.namelist()""",
    "libraries": """
with open('x.json', 'w') as file: json.dump([1], file)
with open('x.csv', 'w', newline='') as file: csv.writer(file).writerow([1])
logger = logging.getLogger('x'); logger.addHandler(logging.FileHandler('out/x.log')); logger.error('said')
with gzip.open('x.gz', 'wb') as file: file.write(b'x')
with bz2.open('x.bz2', 'wb') as file: file.write(b'x')
with codecs.open('x.txt', 'w', 'utf-8') as file: file.write('x')
with shelve.open('shelf') as shelf: shelf['a'] = 1
import numpy
numpy.save('x.npy', numpy.arange(3)); numpy.savez('x.npz', a=numpy.arange(3)); numpy.savetxt('t', numpy.arange(3))
numpy.arange(3).tofile('raw')
kept = numpy.memmap('kept', dtype='u1', mode='w+', shape=3); kept[:] = 7; kept.flush()
mapped = numpy.memmap('out/old.txt', dtype='u1'); mapped[0] = 65; mapped.flush()
assert Path('out/old.txt').read_text() == 'Ald' and mapped.tolist()[0] == 65
assert muting.saved.size_of('out/old.txt') == 3
assert numpy.load('x.npy').tolist() == [0, 1, 2] and numpy.fromfile('raw', dtype=int).tolist() == [0, 1, 2]
assert numpy.memmap('kept', dtype='u1', mode='r').tolist() == [7, 7, 7]
assert 'said' in Path('out/x.log').read_text() and gzip.open('x.gz').read() == b'x'
import pandas
pandas.DataFrame({'a': [1]}).to_csv('out/frame.csv')
assert pandas.read_csv('out/frame.csv')['a'].tolist() == [1]""",
    "bytes": """
open(b'out/bytes', 'w').close()
assert b'bytes' in os.listdir(b'out') and os.path.exists(b'out/bytes')
assert b'out/bytes' in [entry.path for entry in os.scandir(b'out')]""",
    "names taken before": """
assert captured('out/old.txt').read() == 'old'
captured('out/old.txt', 'w').write('n')
assert makes is os.makedirs and removes is os.remove
makes('deep/er'); removes('out/old.txt')
assert pickle.loads(pickle.dumps(os.listdir)) is os.listdir
class Holder: opener = open
Holder().opener('y', 'w').close()""",
    "forked": """
process = multiprocessing.get_context('fork').Process(target=lambda: Path('child').write_text('c'))
process.start(); process.join()
assert process.exitcode == 0 and Path('child').read_text() == 'c'
import threading
thread = threading.Thread(target=lambda: Path('thread').write_text('t')); thread.start(); thread.join()
assert Path('thread').read_text() == 't'
with multiprocessing.get_context('fork').Manager() as manager: assert manager.list([1])[0] == 1""",
    "unnamed": """
with tempfile.TemporaryFile(dir='out') as file: file.write(b'x')""",
    "walks": """
Path('out/deep/new').write_text('n')
assert [(folder, sorted(folders), sorted(files)) for folder, folders, files in os.walk('out')] == [
    ('out', ['deep'], ['old.txt']), ('out/deep', ['er'], ['new']), ('out/deep/er', [], ['d.txt'])]
assert [files for *_, files, _ in os.fwalk('out/deep')] == [['new'], ['d.txt']]
assert os.path.isdir('out/deep') and os.access('out/deep/new', os.R_OK) and shutil.disk_usage('out/deep').total""",
}
ONLY_IN_A_VIEW = {
    "unnamed file": """
file = os.open('out', os.O_TMPFILE | os.O_RDWR)
os.write(file, b'unnamed')
os.link(f'/proc/self/fd/{file}', 'out/named', src_dir_fd=0)
os.close(file)
assert Path('out/named').read_text() == 'unnamed'
with tempfile.TemporaryFile(dir='out') as file: file.write(b'x')""",
    "opened by C": """
import sqlite3
import pyarrow, pyarrow.parquet
for at in ('out/base.db', HERE / 'out' / 'other.db'):
    base = sqlite3.connect(at); base.execute('create table t (a)'); base.execute('insert into t values (1)')
    base.commit(); base.close()
    assert sqlite3.connect(at).execute('select a from t').fetchall() == [(1,)]
assert sqlite3.connect(':memory:').execute('select 1').fetchall() == [(1,)]
table = pyarrow.table({'a': [1]})
pyarrow.parquet.write_table(table, 'out/t.parquet')
with pyarrow.OSFile('out/raw', 'wb') as file: file.write(b'raw')
assert pyarrow.parquet.read_table('out/t.parquet')['a'].to_pylist() == [1] and Path('out/raw').read_bytes() == b'raw'
assert pyarrow.memory_map('out/raw').read() == b'raw' and pyarrow.memory_map('out/old.txt').read() == b'old'
pandas.DataFrame({'a': [1]}).to_parquet('frame.parquet')
assert pandas.read_parquet('frame.parquet')['a'].tolist() == [1]
torch.jit.save(torch.jit.trace(lambda x: x / 2, torch.ones(1)), 'half.pt')
assert torch.jit.load('half.pt')(torch.ones(1)) == .5
with torch.profiler.profile() as profiled: torch.ones(3).sum()
profiled.export_chrome_trace('trace.json')
assert 'traceEvents' in Path('trace.json').read_text()""",
}
REFUSED = {
    "refused": """
import _io
for action in (lambda: _io.FileIO('slipped', 'w'), lambda: posix.mkdir('slipped'), lambda: posix.remove('out/old.txt'),
               lambda: posix.open('out/old.txt', os.O_WRONLY), lambda: posix.rename('out', 'slipped')):
    try: action()
    except PermissionError as error: assert 'rehearsal' in error.strerror
    else: raise AssertionError
assert posix.open('out/old.txt', os.O_RDONLY) > 2""",
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with files of an earlier run."""
    return make_project(tmp_path / "project")


def told(project: Path, scratch: Path, cases: dict[str, str], **options: Any) -> walled.Told:
    """What is told of cases; nothing real has changed."""
    before = walled.tree(project)
    said = walled.run_each(HEAD, cases, scratch, project, **options)
    assert walled.tree(project) == before
    return said


def test_what_is_written_is_read_and_nothing_real_is_changed(project: Path, tmp_path: Path) -> None:
    """The kernel redirects whatever writes; behind the second wall each way is redirected by itself."""
    told(project, tmp_path / "scratch", thinning.some(WRITES, 4) | ONLY_IN_A_VIEW, walls=[Wall.NAMESPACES])
    told(project, tmp_path / "scratch", WRITES, walls=[Wall.LANDLOCK])


def test_what_is_not_redirected_is_refused_and_told(project: Path, tmp_path: Path) -> None:
    said = told(project, tmp_path / "scratch", REFUSED, walls=[Wall.LANDLOCK, Wall.REDIRECT])
    for wall, _ in said:
        paths = {one.where for one in said[wall, "refused"] if one.what == "refused to write"}
        assert paths == {str(project / name) for name in ("slipped", "out/old.txt", "out")}


def test_no_way_of_writing_reaches_real_files(project: Path, tmp_path: Path) -> None:
    shared = Path(f"/dev/shm/dryfit-test-{os.getpid()}")
    shared.write_text("real")
    try:
        told(project, tmp_path / "scratch", HOSTILE, walls=[Wall.NAMESPACES])
        refused = {
            name: "try:\n" + textwrap.indent(code, "    ") + "\nexcept (OSError, RuntimeError, sqlite3.Error): pass"
            for name, code in thinning.some(HOSTILE, 2).items()
        }
        told(project, tmp_path / "scratch", refused, walls=[Wall.LANDLOCK])
        assert shared.read_text() == "real"
    finally:
        shared.unlink()


def test_a_cache_that_contains_the_project_is_not_kept(tmp_path: Path) -> None:
    project, cache = tmp_path / "home" / "project", tmp_path / "cache"
    project.mkdir(parents=True)
    cache.mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "home")
    kept = {"HF_HOME": str(cache), "TORCH_HOME": str(tmp_path / "home"), "MPLCONFIGDIR": str(tmp_path / "link")}
    nowhere = {"XDG_CACHE_HOME": str(cache), "TRITON_HOME": "/", "KERAS_HOME": str(cache), "NLTK_DATA": str(project)}
    assert caches({**kept, **nowhere}, [project]) == [cache]


def test_a_kept_folder_is_written_and_all_others_are_not(project: Path, tmp_path: Path) -> None:
    (cache := tmp_path / "cache").mkdir()
    code = "Path('out/old.txt').write_text('x'); Path(KEPT, 'model').write_text('x')"
    told(project, tmp_path / "scratch", {"kept": code.replace("KEPT", repr(str(cache)))}, kept=[cache])
    assert (cache / "model").read_text() == "x"


def test_a_socket_of_another_process_is_reached_and_told(project: Path, tmp_path: Path) -> None:
    place = str(tmp_path / "listening")
    code = f"import socket\nwith socket.socket(socket.AF_UNIX) as one: one.connect({place!r}); one.sendall(b'x')"
    with closing(socket.socket(socket.AF_UNIX)) as listening:
        listening.bind(place)
        listening.listen()
        said = told(project, tmp_path / "scratch", {"connected": code})
        for wall in walled.WALLS:
            assert ("socket", place) in [(one.what, one.where) for one in said[wall, "connected"]]
            with listening.accept()[0] as accepted:
                assert accepted.recv(1) == b"x"
