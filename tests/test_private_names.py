"""Private names of other libraries are touched in few packages, all declared there, with their versions bound."""

import ast
import importlib
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from dryfit.settings.private_names import TESTED
from private_access import DOCUMENTED, class_names, is_private, private_accesses, private_parts

pytestmark = pytest.mark.heavy

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted((ROOT / "src" / "dryfit").rglob("*.py"))
OF_GPU = "dryfit.gpu.private_apis"
PACKAGES = (OF_GPU, "dryfit.meta.private_apis")
SEARCH = "dryfit.search.private_apis"

# Texts that look like private names. A key is "module:text".
TEXTS = {
    "dryfit.meta.tape:_dryfit_birth": "an attribute of ours on another library's object",
    "dryfit.parallel.apply:_dryfit_cut": "an attribute of ours on another library's object",
    "dryfit.parallel.narrow:_token_id": "how names of settings end",
    "dryfit.training.measured_step:_mask": "how names of inputs end",
    "dryfit.gpu.work:_like": "how names of operators end",
    "dryfit.gpu.redirect:_io": "the module of open, as its functions name it",
    "dryfit.search.trackio_follower:_Group": "a key of a run's settings, as trackio writes it",
    "dryfit.search.trackio_follower:_Created": "a key of a run's settings, as trackio writes it",
    "dryfit.search.trackio_follower:_Username": "a key of a run's settings, as trackio writes it",
    "dryfit.processes.failure_texts:_pickle.UnpicklingError": "pickle.UnpicklingError, as a text",
}
# Names in the package that need no row of NAMES.
UNDECLARED = {
    "_is_hf_initialized": "what transformers writes on a tensor that it has loaded, and on no class",
    "_mask_length": "what transformers writes on the config of a generation, and on no class: a self-test looks for it",
    "_keep_in_fp32_modules_strict": "what a model of transformers says of itself: set by a self-test",
}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT / "src").with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def trees() -> dict[str, ast.Module]:
    return {module_name(path): ast.parse(path.read_text("utf-8")) for path in SOURCES}


@cache
def apis() -> frozenset[str]:
    return frozenset(name for name in trees() if name == SEARCH or name.rpartition(".")[0] in PACKAGES)


def declared() -> dict[str, tuple[str, ...]]:
    return {name: importlib.import_module(name).NAMES for name in apis()}


def is_operator(access: str) -> bool:
    """Private operators of torch are no private Python names; torch_operators says which may be written, and why."""
    known = importlib.import_module(f"{OF_GPU}.torch_operators").ARGUMENTS
    return any(access in (repr(name), f"torch.ops.aten.{name}") for name in known)


@cache
def inherited() -> set[str]:
    return {name for tree in trees().values() for name in class_names(tree)}


@cache
def foreign() -> set[str]:
    """The attributes of other libraries' objects that the package reads."""
    used = (node for name in apis() for node in ast.walk(trees()[name]) if isinstance(node, ast.Attribute))
    return {node.attr for node in used if is_private(node.attr)}


def test_private_names_of_other_libraries_are_touched_in_one_package():
    found = [
        f"{module}:{access.line} {access.name}"
        for module, tree in trees().items()
        if module not in apis()
        for access in private_accesses(tree, inherited=inherited(), foreign=foreign())
        if not is_operator(access.name) and f"{module}:{access.name.strip(chr(39))}" not in TEXTS
    ]
    assert not found


def test_no_exception_is_left_over():
    written = {
        f"{module}:{access.name.strip(chr(39))}"
        for module, tree in trees().items()
        for access in private_accesses(tree, inherited=inherited())
    }
    assert TEXTS.keys() <= written
    everything = "\n".join(path.read_text("utf-8") for path in SOURCES)
    assert not [name for name in DOCUMENTED if name not in everything]


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import torch._C", "torch._C"),
        ("import torch._dynamo.exc as exc", "torch._dynamo.exc"),
        ("from torch._ops import OpOverload", "torch._ops.OpOverload"),
        ("from torch.overrides import _stack as stack", "torch.overrides._stack"),
        ("import torch\ntorch._C.f()", "torch._C"),
        ("import torch\ntorch.Tensor._make(1)._x", "torch.Tensor._make(1)._x"),
        ("def f(tensor): return tensor._use_count()", "tensor._use_count"),
        ("def f(module): module._parameters['weight'] = 1", "module._parameters"),
        ("def f(module): del module._hook", "module._hook"),
        ("class A:\n def f(self): return self._inherited", "self._inherited"),
        ("class A(B):\n def _f(self): return super()._f()", "super()._f"),
        ("class A:\n def _is_view(self): return f(self.x._is_view())", "self.x._is_view"),
        ("import torch\nclass A:\n _C = 1\n x = torch._C", "torch._C"),
        ("getattr(x, '_y')", "'_y'"),
        ("setattr(x, '_y', 1)", "'_y'"),
        ("hasattr(x, '_y')", "'_y'"),
        ("vars(x)['_y']", "'_y'"),
        ("x.__dict__.get('_y')", "'_y'"),
        ("patch.object(torch, '_y')", "'_y'"),
        ("patch('torch._C.f')", "'torch._C.f'"),
        ("import_module('torch._inductor')", "'torch._inductor'"),
        ("attrgetter('a._b')(x)", "'a._b'"),
        ("_NAME = '_y'\ngetattr(x, _NAME)", "'_y'"),
        ("getLogger(f'optuna.{name}._storage')", "'._storage'"),
        ("getattr(x, '__mangled')", "'__mangled'"),
        ("f(_private=1)", "_private="),
        ("match x:\n case A(_b=1): pass", "_b="),
        ("import torch\n_aten = torch.ops.aten\n_aten._made_up.default", "torch.ops.aten._made_up"),
        ("import os\nos._made_up()", "os._made_up"),
    ],
)
def test_every_kind_of_access_is_seen(code, found):
    accesses = private_accesses(ast.parse(code), inherited={"_ours"}, foreign={"_is_view"})
    assert found in [access.name for access in accesses]
    assert not is_operator(found)


@pytest.mark.parametrize(
    "code",
    [
        "class A:\n def __init__(self): self._x = 1\n def f(self, other): return self._x == other._x",
        "class A:\n _x: int = 1\n @classmethod\n def f(cls): return cls._x",
        "class A:\n def f(self): return self._ours",
        "def _f(): pass\n_f()",
        "class _A: pass\nclass B:\n def f(self) -> '_A': pass",
        "import os\nos._exit(1)",
        "import sys\nsys._getframe(1)",
        "def f(pair): return pair._replace(a=1), type(pair)._make, hasattr(pair, '_make')",
        "x.__class__.__name__",
        "'_x is named in a sentence'",
        "def f():\n '_x'",
        "f(__name__, '__init__')",
        "for _ in range(3): pass",
    ],
)
def test_what_is_ours_or_documented_is_let_alone(code):
    assert not private_accesses(ast.parse(code), inherited={"_ours"}, foreign={"_is_view"})


def test_an_undeclared_operator_is_an_access():
    assert is_operator("torch.ops.aten._to_copy") and is_operator("'_to_copy'")
    assert not is_operator("torch.ops.aten._made_up") and not is_operator("'_made_up'")


def overridden() -> Iterator[str]:
    """The private methods of other libraries' classes that classes of ours replace."""
    for module, tree in trees().items():
        if module in apis():
            continue
        for node in ast.walk(tree):
            if not isinstance(node, ast.ClassDef) or not class_names(node) or not node.bases:
                continue
            made = getattr(importlib.import_module(module), node.name, None)
            for base in made.__mro__[1:] if made is not None else ():
                library = base.__module__.partition(".")[0]
                if library in sys.stdlib_module_names or library == "dryfit":
                    continue
                theirs = {*vars(base), *getattr(base, "__annotations__", {})}
                yield from (f"{module}.{node.name}.{name}" for name in class_names(node) & theirs)


def test_no_private_method_of_another_library_is_overridden_elsewhere():
    assert not list(overridden())


def test_an_override_is_seen(monkeypatch):
    loop = "dryfit.training.trainer"
    code = "class TrialTrainer(StateTrainer):\n def _save_scaler(self, folder): pass"
    monkeypatch.setitem(trees(), loop, ast.parse(code))
    assert list(overridden()) == [f"{loop}.TrialTrainer._save_scaler"]


def test_every_name_of_the_package_is_declared():
    for module, names in declared().items():
        used = {
            part
            for access in private_accesses(trees()[module], inherited=inherited())
            for part in private_parts(access.name)
            if not part.startswith("_ZN")  # a symbol of a library in C++
        }
        rows = {part for name in names for part in private_parts(name)}
        assert used - UNDECLARED.keys() <= rows, module
        assert len(names) == len(set(names)), module
        text = (ROOT / "src" / Path(*module.split("."))).with_suffix(".py").read_text("utf-8")
        for name in names:  # a row that nothing uses any more is to be removed
            last = re.findall(r"\w+", name.removesuffix(".default"))[-1]
            stated = f'"{name}"' in text  # else it is made of what is used
            assert len(re.findall(rf"\b{last}\b", text)) > stated, f"{module}: {name}"


def requirements() -> dict[str, Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = [text for group in project["optional-dependencies"].values() for text in group]
    found = [Requirement(text) for text in (*project["dependencies"], *extras)]
    return {one.name: one for one in found}


def test_libraries_have_an_upper_bound_that_the_errors_name():
    required = requirements()
    for library, tested in TESTED.items():
        assert required[library].specifier == SpecifierSet(tested)
        assert any(one.operator == "<" for one in required[library].specifier), library
    libraries = {name.partition(".")[0] for names in declared().values() for name in names}
    assert libraries == TESTED.keys()


def test_constraints_are_within_the_bounds():
    pinned = dict(
        line.split("==") for line in (ROOT / "constraints.txt").read_text("utf-8").splitlines() if "==" in line
    )
    outside = [
        f"{name} {pinned[name]}: {one.specifier}"
        for name, one in requirements().items()
        if name in pinned and pinned[name] not in one.specifier
    ]
    assert not outside
