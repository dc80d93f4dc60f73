"""Several ranks on virtual GPUs: the script is rank 0 of a process group whose other ranks are not there.

Collectives return at once; what rank 0 would send is counted by kind. DistributedDataParallel keeps its buckets and
hooks, FSDP2 its shards. What a collective brings back has no values, as everything on the device.
"""

import os
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel, distributed

from dryfit.core.errors import TraceError
from dryfit.meta.private_apis.torch_fakes import FakeTensor
from dryfit.meta.private_apis.torch_modes import tree_leaves
from dryfit.meta.private_apis.torch_virtual import fake_store, replace_parameter_checks
from dryfit.virtual.import_hooks import when_imported

_ENVIRONMENT = {"RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
_KINDS = ("all_gather", "reduce_scatter", "all_reduce", "allreduce", "allgather", "broadcast", "all_to_all", "alltoall")
_SPELLINGS = {"allreduce": "all_reduce", "allgather": "all_gather", "alltoall": "all_to_all"}

Say = Callable[[str, str, int], None]


class AbsentGroup:
    """A process group of which only rank 0 is there.

    Args:
        size: Number of ranks, on one machine.

    Attributes:
        sent: Bytes that rank 0 sent so far, by kind of collective: the size of what it put in.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.sent: dict[str, int] = defaultdict(int)
        self._backend = "nccl"

    def install(self, say: Say) -> None:
        """Let ``torch.distributed`` make this group, whatever backend is asked for.

        Args:
            say: Called with what a checkpoint of shards is, where it would be, and the bytes of this rank.
        """
        os.environ.update(_ENVIRONMENT, WORLD_SIZE=str(self.size), LOCAL_WORLD_SIZE=str(self.size))
        make = dist.init_process_group

        def init_process_group(backend: str | None = None, *_: Any, **__: Any) -> None:
            self._backend = (backend or "nccl").rpartition(":")[2]
            make("fake", store=fake_store(), rank=0, world_size=self.size)

        dist.init_process_group = init_process_group
        dist.distributed_c10d.init_process_group = init_process_group
        dist.is_nccl_available = lambda: True
        dist.get_backend = lambda *_: self._backend
        replace_parameter_checks(distributed)
        self._replace_ddp()
        when_imported("torch.distributed.checkpoint", lambda module: _tell_of_shards(module, say))
        when_imported("deepspeed", _refuse_deepspeed)

    def note(self, func: Any, args: Any, _kwargs: Any, _out: Any) -> None:
        """Count what a collective sends."""
        if "c10d" not in func.namespace:
            return
        name = func.name()
        kind = next((one for one in _KINDS if one in name), None)
        if kind is not None:
            # Outputs come first where there are some: the smaller of both sides is what this rank puts in.
            sizes = [one.nbytes for one in tree_leaves(args) if isinstance(one, FakeTensor)]
            self.sent[_SPELLINGS.get(kind, kind)] += min(sizes, default=0)

    def _replace_ddp(self) -> None:
        make = DistributedDataParallel.__init__

        def make_quiet(module: Any, *args: Any, **kwargs: Any) -> None:
            make(module, *args, **kwargs)
            module.logger = _Quiet()  # it times with CUDA events
            module.register_comm_hook(None, lambda _state, bucket: self._bucket(bucket))

        DistributedDataParallel.__init__ = make_quiet  # pyright: ignore[reportAttributeAccessIssue]

    def _bucket(self, bucket: Any) -> Any:
        """Answer DDP's all-reduce of a bucket of gradients with the bucket itself."""
        buffer = bucket.buffer()
        self.sent["all_reduce"] += buffer.nbytes
        answer: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        answer.set_result(buffer)
        return answer


class _Quiet:
    def __getattr__(self, _name: str) -> Any:
        return lambda *_, **__: None


def _tell_of_shards(module: Any, say: Say) -> None:
    """Let a checkpoint of shards be told and not written: all ranks plan it, of which one is there."""

    def save(state_dict: Any, *, checkpoint_id: Any = None, storage_writer: Any = None, **_: Any) -> None:
        tensors = (one for one in tree_leaves(state_dict) if isinstance(one, torch.Tensor))
        size = sum((one.to_local() if isinstance(one, DTensor) else one).nbytes for one in tensors)
        say("checkpoint of one rank", str(checkpoint_id or getattr(storage_writer, "path", "")), size)

    module.save = save


def _refuse_deepspeed(_module: Any) -> None:
    raise TraceError(
        "rehearsing a script over several ranks",
        "it uses DeepSpeed, whose kernels and buffers are its own",
        hint="FSDP2 or DistributedDataParallel can be rehearsed",
    )
