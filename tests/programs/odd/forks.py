"""It forks after it has used the device; the child only counts."""

import os

import torch
from one_layer import step

step()
child = os.fork()
if child == 0:
    os._exit(0 if torch.arange(4).sum().item() == 6 else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
step()
print("forked")
