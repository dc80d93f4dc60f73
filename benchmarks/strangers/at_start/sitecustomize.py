"""Imported by every interpreter of a row: data that was made here has not the checksums of what would be downloaded.

torchvision's data sets and tiktoken compare them before they read; files below the folder ``$STRANGERS_MADE`` pass,
and what tiktoken finds in its cache.
"""

import importlib.abc
import importlib.machinery
import os
import sys


def _torchvision(module):
    real = module.check_integrity

    def check_integrity(fpath, md5=None):
        made = os.path.realpath(fpath).startswith(os.path.realpath(os.environ["STRANGERS_MADE"]) + os.sep)
        return real(fpath, None if made else md5)

    module.check_integrity = check_integrity


def _tiktoken(module):
    module.check_hash = lambda data, expected_hash: True


_ASKED = {"torchvision.datasets.utils": _torchvision, "tiktoken.load": _tiktoken}


class _Passing(importlib.abc.MetaPathFinder):
    """Finds these modules, and lets their checks pass for what was made."""

    def find_spec(self, name, path=None, target=None):
        change = _ASKED.pop(name, None)
        if change is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            change(module)

        spec.loader.exec_module = exec_module
        return spec


if "STRANGERS_MADE" in os.environ:
    sys.meta_path.insert(0, _Passing())
