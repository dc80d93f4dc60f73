"""The self-tests of private names: they pass here, and say what is wrong where a library has changed."""

import importlib
import random
import runpy
import sys
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers.trainer
from optuna.samplers import CmaEsSampler, NSGAIISampler, TPESampler
from torch import nn

from dryfit.gpu.private_apis import (
    torch_cuda,
    torch_fakes,
    torch_modes,
    torch_modules,
    torch_operators,
    torch_recording,
    torch_tensors,
    torch_virtual,
    transformers_steps,
)
from dryfit.meta import build
from dryfit.meta.private_apis import (
    torch_capture,
    transformers_auto,
    transformers_files,
    transformers_models,
    transformers_trainer,
)
from dryfit.search import private_apis as search_apis
from dryfit.settings import private_names
from dryfit.settings.errors import LibraryError
from dryfit.settings.private_names import PrivateNames, require

GROUPS = {
    "modes": torch_modes.MODES,
    "modules": torch_modules.MODULES,
    "tensors": torch_tensors.TENSORS,
    "fakes": torch_fakes.FAKES,
    "operators": torch_operators.OPERATORS,
    "recording": torch_recording.RECORDING,
    "capture": torch_capture.CAPTURE,
    "fake device": torch_cuda.FAKE_DEVICE,
    "allocator": torch_cuda.ALLOCATOR,
    "auto": transformers_auto.AUTO,
    "files": transformers_files.FILES,
    "virtual": torch_virtual.VIRTUAL,
    "loading": transformers_steps.LOADING,
    "pretrained": transformers_steps.PRETRAINED,
    "sampling": transformers_steps.SAMPLING,
    "models": transformers_models.MODELS,
    "trainer": transformers_trainer.TRAINER,
    "tpe": search_apis.TPE,
    "nsga2": search_apis.NSGA2,
    "cmaes": search_apis.CMAES,
}


@pytest.fixture(autouse=True)
def untested(monkeypatch):
    """Nothing has been tested in this process, nor will it count as such after the test."""
    monkeypatch.setattr(private_names, "_problem", private_names._problem.__wrapped__)


@pytest.mark.parametrize("name", GROUPS)
def test_self_tests_pass(name):
    require("testing", GROUPS[name])


def test_the_tests_know_every_group():
    modules = (torch_modes, torch_modules, torch_tensors, torch_fakes, torch_operators, torch_recording, torch_capture)
    modules += (
        torch_cuda,
        torch_virtual,
        transformers_auto,
        transformers_files,
        transformers_steps,
        transformers_models,
    )
    modules += (transformers_trainer, search_apis)
    groups = [one for module in modules for one in vars(module).values() if isinstance(one, PrivateNames)]
    assert set(groups) - set(GROUPS.values()) == {torch_cuda.HISTORY}  # which only builds for CUDA have


RESOLVED = [(group, name) for group in GROUPS.values() for name in group.names]


@pytest.mark.parametrize(("group", "name"), RESOLVED, ids=[name for _, name in RESOLVED])
def test_a_name_that_is_gone_is_told(group, name):
    gone = f"{name.partition('(')[0]}_gone"
    with pytest.raises(LibraryError) as caught:
        require("using it", PrivateNames(group.library, (gone,)))
    said = str(caught.value)
    assert said.startswith(f"using it: {group.library} ") and f"{gone} is missing" in said
    assert private_names.TESTED[group.library] in caught.value.allowed and "pip install" in caught.value.hint


def test_a_keyword_that_is_gone_is_told(monkeypatch):
    monkeypatch.setattr(transformers.utils.hub, "cached_files", lambda name, files: None)
    with pytest.raises(LibraryError, match=r"_raise_exceptions_for_missing_entries=\) is missing"):
        require("looking for a file", transformers_files.FILES)


def _other_storage_count(_address):
    return 7


def _never_called(self, model):
    return 0.0


CHANGES = {
    "disable shows": (torch_modes, "without_dispatch_modes", nullcontext, "MODES", "_disable_current_modes"),
    "functions are seen": (torch_modes, "without_function_modes", nullcontext, "MODES", "DisableTorchFunction"),
    "no constructors": (torch_modes, "device_constructors", frozenset, "MODES", "_device_constructors"),
    "no stack": (torch_modes, "function_modes", list, "MODES", "_get_current_function_mode_stack"),
    "not asked": (nn.Module, "_load_from_state_dict", lambda *_: None, "MODES", "does not ask a tensor"),
    "wrappers": (torch_modes, "is_traceable_wrapper_subclass", lambda _: True, "MODES", "plain tensors for wrappers"),
    "leaves": (torch_modes, "tree_leaves", list, "MODES", "_pytree"),
    "schema": (
        torch_modes,
        "schema_of",
        lambda _: SimpleNamespace(name="", is_mutable=False, arguments=[]),
        "MODES",
        "_schema of an operator",
    ),
    "unsaved": (torch_modules, "unsaved_buffers", lambda _: set(), "MODULES", "_non_persistent_buffers_set"),
    "tables": (torch_modules, "parameters_of", lambda _: {}, "MODULES", "torch.nn.Module._parameters"),
    "hooks": (torch_modules, "hook_tables", lambda _: [({}, ())], "MODULES", "_forward_hooks"),
    "one key": (torch_tensors, "storage_key", lambda _: 0, "TENSORS", "_cdata"),
    "a copy": (torch_tensors, "on_same_memory", lambda *_: torch.ones(4), "TENSORS", "_make_subclass"),
    "any data": (torch_tensors, "takes_data", lambda *_: True, "TENSORS", "_has_compatible_shallow_copy_type"),
    "no view": (torch_tensors, "is_view", lambda _: False, "TENSORS", "_is_view"),
    "no fakes": (torch_fakes, "FakeTensorMode", lambda **_: nullcontext(), "FAKES", "DataDependentOutputException"),
    "argument": (
        torch_operators,
        "ARGUMENTS",
        {"_to_copy": "self other"},
        "OPERATORS",
        "aten::_to_copy takes (self, dtype)",
    ),
    "counts": (torch._C, "_storage_Use_Count", _other_storage_count, "RECORDING", "_storage_Use_Count does not count"),
    "sums": (torch_recording, "gradient_sums", lambda _: None, "RECORDING", "one sum of gradients is seen as 0"),
    "node": (torch_recording, "running_node_number", lambda: None, "RECORDING", "undone by a node"),
    "graphs": (torch_capture, "HigherOrderOperator", int, "CAPTURE", "wrap_with_set_grad_enabled"),
    "plan": (transformers_models, "kept_in_fp32", lambda *_: {}, "MODELS", "_get_dtype_plan"),
    "lists": (transformers_models, "computed_keys", lambda _: (), "MODELS", "_keys_to_ignore_on_load"),
    "experts": (transformers_models, "chooses_experts", lambda _: True, "MODELS", "finds experts"),
    "classes": (transformers_auto, "classes_of", lambda *_: (nn.Linear,), "AUTO", "_model_mapping"),
    "forgets": (
        transformers.PreTrainedModel,
        "_move_missing_keys_from_meta_to_device",
        lambda self: None,
        "LOADING",
        "no longer replaces",
    ),
    "clip": (
        transformers.Trainer,
        "_clip_grad_norm",
        lambda self, model, most: 0.0,
        "TRAINER",
        "takes self, model, most",
    ),
    "numbers": (TPESampler, "_get_internal_repr", lambda *_: {}, "TPE", "gives other numbers"),
    "sampling": (TPESampler, "sample_relative", lambda *_: {}, "TPE", "no longer asks"),
    "key": (NSGAIISampler, "_get_generation_key", lambda: "other", "NSGA2", "'other'"),
    "cma": (CmaEsSampler, "_attr_key_optimizer", "other", "CMAES", "'other'"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_other_behaviour_is_told(monkeypatch, change):
    owner, name, other, group, says = CHANGES[change]
    home = next(module for module in (*APIS, search_apis) if hasattr(module, group))
    monkeypatch.setattr(owner, name, other)
    with pytest.raises(LibraryError) as caught:
        require("using it", getattr(home, group))
    assert says in caught.value.found
    assert caught.value.code == "LIBRARY" and caught.value.doing == "using it"


APIS = [module for name, module in sys.modules.items() if ".private_apis." in name and name.startswith("dryfit.")]


def test_a_hook_that_the_trainer_no_longer_calls_is_told(monkeypatch):
    for name, method in list(vars(transformers.Trainer).items()):
        if callable(method) and "_load_scaler" in getattr(getattr(method, "__code__", None), "co_names", ()):
            monkeypatch.setattr(transformers.Trainer, name, _never_called)
    with pytest.raises(LibraryError, match="no method of transformers.Trainer calls _load_"):
        require("training", transformers_trainer.TRAINER)


def test_what_a_self_test_raises_is_told():
    def misbehaves():
        raise ZeroDivisionError("of the library")

    group = PrivateNames("torch", ("torch.Tensor._use_count",), misbehaves)
    with pytest.raises(LibraryError, match=r"one of torch.Tensor._use_count raised ZeroDivisionError: of the library"):
        require("using it", group)


@pytest.mark.parametrize(
    ("package", "module", "owner", "name"),
    [
        ("gpu", "torch_modes", "torch.utils._python_dispatch", "_disable_current_modes"),
        ("gpu", "torch_modes", "torch.utils._device", "_device_constructors"),
        ("gpu", "torch_fakes", "torch._subclasses.fake_tensor", "DynamicOutputShapeException"),
        ("meta", "torch_capture", "torch._dynamo.exc", "TorchDynamoException"),
    ],
)
def test_a_name_that_cannot_be_imported_is_told(monkeypatch, package, module, owner, name):
    path = importlib.import_module(f"dryfit.{package}.private_apis.{module}").__file__
    monkeypatch.delattr(importlib.import_module(owner), name)
    with pytest.raises(LibraryError, match=f"torch {torch.__version__.split('+')[0]}.*{name}"):
        runpy.run_path(path)


@pytest.mark.parametrize("around", [torch.device("meta"), torch.inference_mode(), torch.no_grad()])
def test_modes_of_the_caller_change_nothing(around):
    with around:
        for group in GROUPS.values():
            require("testing", group)


def test_self_tests_leave_the_random_state_alone():
    before = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
    for group in GROUPS.values():
        require("testing", group)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (random.getstate(), str(np.random.get_state()))


def test_a_group_is_tested_once(monkeypatch):
    monkeypatch.undo()
    calls = []
    group = PrivateNames("torch", (), lambda: calls.append(1) or "")
    for _ in range(3):
        require("using it", group)
    assert calls == [1]


def test_a_changed_library_ends_building_a_model(monkeypatch):
    monkeypatch.setattr(torch_modes, "device_constructors", frozenset)
    with pytest.raises(LibraryError, match=r"building a model without memory: torch .* does not say which functions"):
        build(lambda: nn.Linear(2, 2))


def test_a_fake_mode_in_a_thread_that_ends_leaves_the_device_guard_of_its_caller() -> None:
    """Builds of torch for CUDA put one there that lives as long as the thread."""
    table = torch_cuda.guard_table()
    before = table[torch_cuda.CUDA]

    def replace() -> None:
        with torch_cuda.guard_of_caller():
            table[torch_cuda.CUDA] = table[torch_cuda.LAZY]

    try:
        thread = threading.Thread(target=replace)
        thread.start()
        thread.join()
        assert table[torch_cuda.CUDA] == before
    finally:
        table[torch_cuda.CUDA] = before
