"""Imported by every interpreter of a row: data that was made here has not the checksums of what would be downloaded.

torchvision's data sets compare them before they read; files below the folder ``$STRANGERS_MADE`` pass.
"""

import importlib.abc
import importlib.machinery
import os
import sys

_ASKED = "torchvision.datasets.utils"


class _Passing(importlib.abc.MetaPathFinder):
    """Finds the one module, and lets its check pass for what was made."""

    def find_spec(self, name, path=None, target=None):
        if name != _ASKED:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            real = module.check_integrity

            def check_integrity(fpath, md5=None):
                made = os.path.realpath(fpath).startswith(os.path.realpath(os.environ["STRANGERS_MADE"]) + os.sep)
                return real(fpath, None if made else md5)

            module.check_integrity = check_integrity

        spec.loader.exec_module = exec_module
        return spec


if "STRANGERS_MADE" in os.environ:
    sys.meta_path.insert(0, _Passing())
