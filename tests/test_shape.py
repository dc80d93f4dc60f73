"""The shape of the house: sizes, imports and names, checked on the syntax trees of the sources."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted((ROOT / "src" / "dryfit").rglob("*.py"))
EVERYTHING = sorted(
    path for folder in ("src", "tests", "benchmarks", "examples", "scripts") for path in (ROOT / folder).rglob("*.py")
)

MOST_MODULE_LINES = 400
MOST_FUNCTION_LINES = 60
MOST_ARGUMENTS = 7

# Exceptions, each with its reason. A key is "module" or "module:function".
LONG_MODULES: dict[str, str] = {}
LONG_FUNCTIONS: dict[str, str] = {}
MANY_ARGUMENTS: dict[str, str] = {
    "dryfit.meta.loading.filling:model_construct": "building a record field by field, unchecked for speed",
    "dryfit.memory.tracing.attention:attention": "the signature is torch's operator's",
    "dryfit.memory.tracing.attention:_scaled_dot_product_attention_math": "torch's operator",
    "dryfit.memory.tracing.attention:_scaled_dot_product_cudnn_attention": "torch's operator",
    "dryfit.memory.tracing.attention:_scaled_dot_product_efficient_attention": "torch's operator",
    "dryfit.api.studies:tune": "the public face of searching: of a study file or of a function, each with its keywords",
    "dryfit.api.rehearsal:rehearse": "the public face of rehearsing, a script or a function",
    "dryfit.cli.planning:plan": "a command's options are its parameters",
    "dryfit.cli.rehearse:rehearse": "a command's options are its parameters",
    "dryfit.cli.training:train": "a command's options are its parameters",
    "dryfit.cli.studies:init": "a command's options are its parameters",
    "dryfit.cli.studies:tune": "a command's options are its parameters",
    "dryfit.cli.imports:import_rows": "a command's options are its parameters",
    "dryfit.cli.training:predict": "a command's options are its parameters",
    "dryfit.api.models:predict": "the public face of predicting, as of loading",
    "dryfit.tasks.saved.saved_model:load": "the public face of loading: only the caller knows the answers",
}
ASKS_A_MACHINE = {
    "os.cpu_count",
    "os.sched_getaffinity",
    "os.process_cpu_count",
    "os.getloadavg",
    "os.uname",
    "platform.node",
    "platform.uname",
    "socket.gethostname",
    "psutil.virtual_memory",
    "CUDA_VISIBLE_DEVICES",
    "nvidia-smi",
    "pynvml",
    "/proc/meminfo",
    "read_host_memory",
    "host_total_bytes",
    "memory_limit_bytes",
    "available_cores",
    "gpu_count",
    "first_gpu",
    "visible_here",
    "local_facts",
}
"""Calls, names and texts by which a module learns of the machine that it runs on."""
ASKED_OF_A_NODE = ("config", "importers", "reporting", "search", "starter", "store", "study")
"""Packages that learn of machines from nodes alone: a study may have several."""
THIS_VERY_MACHINE: dict[str, str] = {
    "dryfit.search.sampling.gp_handle": "the process beside it is to see none of its devices",
    "dryfit.study.doctor.bug_report": "a report on a bug tells of the machine where it is written",
    "dryfit.study.doctor.drill": "the drill's study is to see none of its devices",
    "dryfit.study.doctor.machine_facts": "the doctor examines the machine where it is called",
    "dryfit.study.loop.session": "the ledger names the host of the control process, beside its process id",
    "dryfit.reporting.terminal.watch": "a process id means something on the host that the ledger names",
}
CATCHES_EVERYTHING: dict[str, str] = {
    "dryfit.parallel.ranks.simulated": "the outermost frame of a rank's thread: its waiter raises what it caught",
    "dryfit.core.private_names": "whatever a changed library raises in a self-test is what is wrong with it",
    "dryfit.core.cleanup": "what a clean-up raises is added to the error it came after, whatever it is",
    "dryfit.parallel.layout.processes": "what ends a rank, whatever it is, ends the trial, and rank 0 tells of it",
    "dryfit.runtime.children.child": "the child's outermost frame turns any exception into its last word",
    "dryfit.cli.app": "the outermost frame of a command turns a bug into exit status 4",
    "dryfit.study.loop.listeners": "whatever a user's module raises as it is imported is wrong with that module",
    "dryfit.tasks.lm.answer_metrics": "whatever a user's module or function raises is told with its line",
    "dryfit.study.loop.observers": "the outermost frame of an observer's thread: whatever it raises detaches it",
    "dryfit.train.optim.compiling": "a compiler raises whatever it likes; the model's own error comes again",
    "dryfit.virtual.session": "the outermost frame of a user's script: whatever ends it is told",
    "dryfit.virtual.script.largest_batch": "a script's own data set may raise anything: the search is given up",
    "dryfit.search.mirror.following": "drivers have errors of their own; after any of them the target is tried again",
}
IMPORTS_IN_FUNCTIONS: dict[str, str] = {
    "dryfit.api.studies": "only an agent pays for its messages and sockets",
    "dryfit": "the public names load lazily, so that the command line never imports torch",
    "dryfit.cli.app": "errors are printed by what is imported then: help stays fast",
    "dryfit.cli.doctor": "commands import what they need: help stays fast",
    "dryfit.cli.imports": "commands import what they need: help stays fast",
    "dryfit.cli.models": "commands import what they need: help stays fast",
    "dryfit.cli.planning": "commands import what they need: help stays fast",
    "dryfit.cli.rehearse": "commands import what they need: help stays fast",
    "dryfit.cli.reports": "commands import what they need: help stays fast",
    "dryfit.cli.training": "commands import what they need: help stays fast",
    "dryfit.cli.studies": "commands import what they need: help stays fast",
    "dryfit.meta.loading.adapters": "PEFT is an optional extra",
    "dryfit.runtime.children.child": "resolves a job's entry point in the child only",
    "dryfit.runtime.children.fork_server": "the fork server imports the compute plane, nobody else may",
    "dryfit.search.sampling.importance": "optuna.importance brings scikit-learn: only a report pays",
    "dryfit.virtual.session": "bitsandbytes is an optional extra",
    "dryfit.study.resources.study_nodes": "only a study with [nodes] pays for its messages and sockets",
    "dryfit.tasks.baselines.words": "scikit-learn takes a second and 100 MB: only baselines pay",
    "dryfit.tasks.metrics": "scikit-learn takes a second and 100 MB: loading and planning need neither",
    "dryfit.tasks.rows.sources": "pyarrow and datasets cost a second: only rows of those kinds pay",
}

CONTROL_PLANE = ("core", "config", "store", "starter", "importers", "search", "runtime", "study", "reporting", "cli")
HEAVY = (
    "torch",
    "transformers",
    "tokenizers",
    "accelerate",
    "datasets",
    "sklearn",
    "scipy",
    "pandas",
    "pyarrow",
)


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT / "src").with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree(path)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def test_there_is_something_to_check():
    assert len(SOURCES) > 10
    assert any(list(functions(path)) for path in SOURCES)


def test_no_module_is_long():
    long = {module_name(path): len(path.read_text("utf-8").splitlines()) for path in SOURCES}
    long = {name: lines for name, lines in long.items() if lines > MOST_MODULE_LINES and name not in LONG_MODULES}
    assert not long


def test_no_function_is_long():
    long = {
        f"{module_name(path)}:{node.name}": lines
        for path in SOURCES
        for node in functions(path)
        if (lines := (node.end_lineno or 0) - node.lineno + 1) > MOST_FUNCTION_LINES
    }
    assert not {name: lines for name, lines in long.items() if name not in LONG_FUNCTIONS}


def argument_count(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return len([argument for argument in arguments if argument.arg not in ("self", "cls")])


def called_name(node: ast.Call) -> str:
    function = node.func
    return (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )


def test_no_function_takes_or_is_given_many_arguments():
    many: list[str] = []
    for path in SOURCES:
        name = module_name(path)
        commands = {
            node.name
            for node in functions(path)
            if name.startswith("dryfit.cli.") and node.decorator_list  # a command's options are its parameters
        }
        many += [
            f"{name}:{node.name} takes {argument_count(node)}"
            for node in functions(path)
            if argument_count(node) > MOST_ARGUMENTS
            and node.name not in commands
            and f"{name}:{node.name}" not in MANY_ARGUMENTS
        ]
        # Building a record (a class, by its capital, or its View.of) field by field is no call in this sense.
        many += [
            f"{name}:{node.lineno} gives {called_name(node)} {len(node.args) + len(node.keywords)}"
            for node in ast.walk(tree(path))
            if isinstance(node, ast.Call)
            and not called_name(node)[:1].isupper()
            and called_name(node) not in ("Field", "of")
            and len(node.args) + len(node.keywords) > MOST_ARGUMENTS
            and f"{name}:{called_name(node)}" not in MANY_ARGUMENTS
        ]
    assert not many


def test_nobody_catches_everything():
    broad = [
        f"{module_name(path)}:{node.lineno}"
        for path in SOURCES
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ExceptHandler)
        and (node.type is None or {"Exception", "BaseException"} & names_in(node.type))
        and module_name(path) not in CATCHES_EVERYTHING
    ]
    assert not broad


def names_in(node: ast.expr) -> set[str]:
    return {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}


def test_imports_stand_at_the_top():
    inside = {
        f"{module_name(path)}:{node.name}"
        for path in SOURCES
        for node in functions(path)
        if any(isinstance(inner, ast.Import | ast.ImportFrom) for inner in ast.walk(node))
        and module_name(path) not in IMPORTS_IN_FUNCTIONS
    }
    assert not inside


def test_nobody_imports_the_package_root():
    importers = [
        module_name(path)
        for path in SOURCES
        for node in ast.walk(tree(path))
        if (isinstance(node, ast.Import) and any(alias.name == "dryfit" for alias in node.names))
        or (isinstance(node, ast.ImportFrom) and (node.module == "dryfit" or node.level))
    ]
    assert not [name for name in importers if name != "dryfit"]


def learned_from(path: Path) -> Iterator[str]:
    """Yield what of a module may tell of a machine: names, names of a module's, and texts."""
    for node in ast.walk(tree(path)):
        match node:
            case ast.Attribute(value=ast.Name(id=module), attr=name):
                yield f"{module}.{name}"
            case ast.Name(id=name) | ast.alias(name=name):
                yield name
            case ast.Constant(value=str(text)):
                yield text
            case _:
                pass


def test_only_nodes_tell_of_machines():
    """What the control process asks of its own machine would be wrong for a trial on another."""
    asking = {
        module_name(path): sorted(ASKS_A_MACHINE.intersection(learned_from(path)))
        for path in SOURCES
        if path.relative_to(ROOT / "src" / "dryfit").parts[0] in ASKED_OF_A_NODE
    }
    assert len(asking) > 100
    assert {module for module, asked in asking.items() if asked} == set(THIS_VERY_MACHINE), asking
    asked = set(learned_from(ROOT / "src/dryfit/runtime/machine/local_devices.py"))
    assert {"os.cpu_count", "CUDA_VISIBLE_DEVICES", "nvidia-smi"} <= asked, "where they are asked, they are seen"


def test_core_needs_only_the_standard_library_and_pydantic():
    allowed = {*sys.stdlib_module_names, "pydantic", "dryfit"}
    core = [path for path in SOURCES if module_name(path).startswith("dryfit.core")]
    assert core
    foreign = {name for path in core for name in imported(path) if name.partition(".")[0] not in allowed}
    assert not foreign
    assert not {name for path in core for name in imported(path) if name.startswith("dryfit") and "core" not in name}


def test_test_files_have_names_of_their_own():
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert len(names) == len(set(names))


def test_files_whose_times_are_known_are_there():
    named = set(json.loads((ROOT / "tests" / "durations.json").read_text("utf-8")))
    assert named and named <= {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")}


# Spelled in halves: this file is searched too.
FORBIDDEN = ["shared" + "/data", "/wo" + "rk/", "TO" + "DO", "FIX" + "ME", "print(" + '"debug']


@pytest.mark.parametrize("words", FORBIDDEN)
def test_no_file_names_a_place_outside_or_leaves_work_undone(words):
    texts = [*EVERYTHING, *ROOT.glob("*.md"), *ROOT.glob("*.toml"), *(ROOT / "docs").rglob("*.md"), ROOT / "Makefile"]
    texts += (ROOT / "examples").rglob("*.toml")
    assert not [str(path) for path in texts if words in path.read_text(encoding="utf-8")]


def control_modules() -> list[str]:
    prefixes = tuple(f"dryfit.{package}" for package in CONTROL_PLANE)
    names = [module_name(path) for path in SOURCES]
    return [name for name in names if name in ("dryfit", "dryfit.api") or name.startswith(prefixes)]


def test_the_control_plane_never_loads_torch():
    code = (
        "import importlib, sys\n"
        f"for name in {control_modules()!r}: importlib.import_module(name)\n"
        f"print(sorted(set({HEAVY!r}) & set(sys.modules)))"
    )
    # __main__ modules run on import; there is none of them in the list by construction.
    assert not [name for name in control_modules() if name.endswith("__main__")]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr


def test_no_public_class_stands_twice():
    classes = [
        node.name
        for path in SOURCES
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    assert not {name for name in classes if classes.count(name) > 1}
