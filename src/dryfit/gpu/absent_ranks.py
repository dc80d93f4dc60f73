"""Ranks on virtual GPUs: the script is rank 0 of a process group whose other ranks are not there.

Collectives return at once; what rank 0 would send is counted by kind. DistributedDataParallel keeps its buckets and
hooks, FSDP its shards. Of what a collective brings back small values are known where those of rank 0 are: the others
have the same. Nothing waits for another rank: processes that the script would start for its ranks are one call in
this process, and a wait for what another rank would say is an error.
"""

import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import start_processes
from torch.nn.parallel import DistributedDataParallel, distributed

from dryfit.gpu.import_hooks import rebind, when_imported
from dryfit.gpu.private_apis.torch_fakes import FakeTensor
from dryfit.gpu.private_apis.torch_modes import schema_of, tree_leaves
from dryfit.gpu.private_apis.torch_virtual import (
    expect_gradients,
    expect_states,
    know_fake_groups,
    replace_parameter_checks,
    stand_in,
)
from dryfit.gpu.values import forget, remember, value_of
from dryfit.settings.errors import TraceError

_ENVIRONMENT = {"RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
_KINDS = ("all_gather", "reduce_scatter", "all_reduce", "allreduce", "allgather", "broadcast", "all_to_all", "alltoall")
_SPELLINGS = {"allreduce": "all_reduce", "allgather": "all_gather", "alltoall": "all_to_all"}
_LIGHTNING_DEVICES = (
    *("lightning.pytorch.accelerators.cuda", "pytorch_lightning.accelerators.cuda"),
    *("lightning.fabric.accelerators.cuda", "lightning_fabric.accelerators.cuda"),
)
_DOING = "rehearsing a script over several ranks"
_PATIENCE = timedelta(seconds=1)
"""After so long a key that no rank of this process has set will not be there."""

Say = Callable[[str, str, int], None]
Note = Callable[[str], None]


class LoneStore(dist.HashStore):  # pyright: ignore[reportPrivateImportUsage]
    """The store of a process group of which one rank is there: what another one would set never comes."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()
        self.set_timeout(_PATIENCE)

    def get(self, key: str) -> bytes:
        """Return a value.

        Raises:
            TraceError: Another rank would set it.
        """
        self.wait([key])
        return super().get(key)

    def wait(self, keys: list[str], _timeout: timedelta = _PATIENCE) -> None:
        """Return where all keys are there.

        Raises:
            TraceError: Another rank would set one of them.
        """
        if not self.check(keys):
            raise TraceError(_DOING, f"it waits for {', '.join(keys)}, which a rank that is not there would set")


class AbsentGroup:
    """A process group of which only rank 0 is there.

    Args:
        size: Number of ranks, on one machine.
        on_sent: Called with the kind of each collective and its bytes.

    Attributes:
        wanted: Number of ranks of a group that the script made, where it is larger; else 0.
        sent: Bytes that rank 0 sent so far, by kind of collective: the size of what it put in.
        groups: Names of the groups that collectives ran in: each has a communicator of NCCL.
    """

    def __init__(self, size: int, on_sent: Callable[[str, int], None] = lambda *_: None) -> None:
        self.size = size
        self.wanted = 0
        self._on_sent = on_sent
        self.sent: dict[str, int] = defaultdict(int)
        self.groups: set[str] = set()
        self._backend = "nccl"

    def install(self, say: Say, note: Note) -> None:
        """Let ``torch.distributed`` make this group, whatever backend is asked for.

        Args:
            say: Called with what a checkpoint of shards is, where it would be, and the bytes of this rank.
            note: Called with a remark on the whole run.
        """
        if self.size > 1:
            os.environ.update(_ENVIRONMENT, WORLD_SIZE=str(self.size), LOCAL_WORLD_SIZE=str(self.size))
        self._replace_groups()
        self._replace_ddp()
        _replace_processes(note)
        when_imported("torch.distributed.checkpoint", lambda module: _tell_of_shards(module, say))
        when_imported("torch.distributed.pipelining.stage", expect_gradients)
        when_imported("torch.distributed.fsdp", expect_states)
        for name in _LIGHTNING_DEVICES:
            when_imported(name, self._count_devices)

    def _count_devices(self, module: Any) -> None:
        """Ask for as many ranks as a Lightning Trainer or Fabric is given devices."""
        parse = module.CUDAAccelerator.parse_devices

        def parse_devices(devices: Any) -> Any:
            several = isinstance(devices, str) and "," in devices
            asked = len(devices.strip(", ").split(",")) if several else devices
            count = len(asked) if isinstance(asked, list) else int(asked) if str(asked).isdecimal() else 0
            if count > self.size:
                self._refuse(count, f"it asks Lightning for {count} devices")
            return parse(devices)

        module.CUDAAccelerator.parse_devices = staticmethod(parse_devices)

    def _refuse(self, size: int, problem: str) -> NoReturn:
        self.wanted = size
        raise TraceError(_DOING, f"{problem}, and {self.size} are rehearsed (--ranks {size})")

    def _replace_groups(self) -> None:
        know_fake_groups()
        make, make_part = dist.init_process_group, dist.new_group

        def init_process_group(
            backend: str | None = None,
            init_method: str | None = None,
            timeout: Any = None,
            world_size: int = -1,
            rank: int = -1,
            store: Any = None,
            **options: Any,
        ) -> None:
            size = world_size if world_size > 0 else int(os.environ.get("WORLD_SIZE", "0"))
            if not size:  # it says how many there are in another way, or forgot to
                make(backend, init_method, timeout, world_size, rank, store, **options)
                return
            if size > self.size:
                self._refuse(size, f"it makes a process group of {size} ranks")
            self._backend = (backend or "nccl").rpartition(":")[2]
            make("fake", store=LoneStore() if store is None else store, rank=0, world_size=size)

        def new_group(ranks: Any = None, *_: Any, group_desc: Any = None, **__: Any) -> Any:
            return make_part(ranks, group_desc=group_desc)

        def split_group(parent_pg: Any = None, split_ranks: Any = None, *_: Any, **__: Any) -> Any:
            members = dist.get_process_group_ranks(parent_pg)
            mine = [[members[one] for one in part] for part in split_ranks if 0 in part]
            return make_part(mine[0]) if mine else None

        replaced: tuple[tuple[Any, Callable[..., Any]], ...] = (
            (make, init_process_group),
            (make_part, new_group),
            (dist.split_group, split_group),
            (dist.recv_object_list, _receive),
            (dist.monitored_barrier, lambda *_, **__: None),
        )
        for old, answer in replaced:
            rebind(old, stand_in(answer, old))
        for store in (dist.TCPStore, dist.FileStore):  # pyright: ignore[reportPrivateImportUsage]
            rebind(store, LoneStore)
        # What Lightning calls is that of the group.
        dist.ProcessGroup.monitored_barrier = lambda *_, **__: None  # pyright: ignore[reportAttributeAccessIssue]
        dist.is_nccl_available = lambda: True
        dist.get_backend = stand_in(lambda *_, **__: self._backend, dist.get_backend)
        replace_parameter_checks(distributed)

    def note(self, func: Any, args: Any, kwargs: Any, _out: Any) -> None:
        """Count what a collective sends."""
        if "c10d" not in func.namespace:
            return
        name = func.name()
        kind = next((one for one in _KINDS if one in name), None)
        if kind is not None:
            # Outputs come first where there are some: the smaller of both sides is what this rank puts in.
            sizes = [one.nbytes for one in tree_leaves(args) if isinstance(one, FakeTensor)]
            self._sends(_SPELLINGS.get(kind, kind), min(sizes, default=0))
            self.groups |= _group_names(func, args, kwargs)
        _gather_own(name, args)

    def _sends(self, kind: str, size: int) -> None:
        self.sent[kind] += size
        self._on_sent(kind, size)

    def _replace_ddp(self) -> None:
        make = DistributedDataParallel.__init__

        def make_quiet(parallel: Any, /, *args: Any, **kwargs: Any) -> None:
            make(parallel, *args, **kwargs)
            parallel.logger = _Quiet()  # it times with CUDA events
            parallel.register_comm_hook(None, lambda _state, bucket: self._bucket(bucket))
            self.groups.add(parallel.process_group.group_name)

        DistributedDataParallel.__init__ = make_quiet  # pyright: ignore[reportAttributeAccessIssue]

    def _bucket(self, bucket: Any) -> Any:
        """Answer DDP's all-reduce of a bucket of gradients with the bucket itself."""
        buffer = bucket.buffer()
        self._sends("all_reduce", buffer.nbytes)
        answer: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        answer.set_result(buffer)
        return answer


def _group_names(func: Any, args: Any, kwargs: Any) -> set[str]:
    """Return the name of the group that a collective runs in, as a set."""
    given = dict(zip((one.name for one in schema_of(func).arguments), args, strict=False)) | kwargs
    group = given.get("process_group")
    return {given["group_name"] if group is None else dist.ProcessGroup.unbox(group).group_name}


def _gather_own(name: str, args: Any) -> None:
    """Let what is gathered of all ranks be what rank 0 has of it, or unknown: never what was there before."""
    gathered: list[tuple[torch.Tensor, torch.Tensor | None]] = []
    match name:
        case "c10d::allgather_":
            pairs = zip(args[0], map(value_of, args[1]), strict=True)
            gathered = [(one, value) for parts, value in pairs for one in parts]
        case "c10d::_allgather_base_":
            own = value_of(args[1])
            times = args[0].numel() // max(args[1].numel(), 1)
            gathered = [(args[0], None if own is None else own.flatten().repeat(times).view(args[0].shape))]
        case _:
            pass
    for one, value in gathered:
        forget(one)
        if value is not None:
            remember(one, value)


def _replace_processes(note: Note) -> None:
    """Let processes that a script would start for its ranks be one call in its own."""

    def start_here(fn: Any, args: Any = (), nprocs: int = 1, join: bool = True, *_: Any, **__: Any) -> Any:
        note(f"of {nprocs} processes that the script starts the first is rehearsed, as rank 0, in the script's own")
        fn(0, *args)
        return None if join else SimpleNamespace(join=lambda *_, **__: True, processes=[], pids=list)

    rebind(start_processes, stand_in(start_here, start_processes))
    when_imported("torch.distributed.launcher.api", lambda module: _launch_here(module, note))
    when_imported("accelerate.launchers", _allow_libraries)


class _Quiet:
    """A logger that logs nothing, and was told nothing."""

    def __getattr__(self, _name: str) -> Any:
        return lambda *_, **__: SimpleNamespace(strs_map={}, ints_map={})


def _receive(*_: Any, **__: Any) -> None:
    raise TraceError(_DOING, "it receives an object that a rank that is not there would send")


def _tell_of_shards(module: Any, say: Say) -> None:
    """Let a checkpoint of shards be told and not written: all ranks plan it, of which one is there."""

    def save(state_dict: Any, *, checkpoint_id: Any = None, storage_writer: Any = None, **_: Any) -> None:
        size = sum(shard.nbytes for one in tree_leaves(state_dict) for shard in _shards(one))
        say("checkpoint of one rank", str(checkpoint_id or getattr(storage_writer, "path", "")), size)

    module.save = save


def _shards(value: Any) -> Sequence[torch.Tensor]:
    """Return the tensors of this rank that a value of a checkpoint stands for."""
    if isinstance(value, DTensor):
        return (value.to_local(),)
    if hasattr(value, "local_shards"):
        return [shard.tensor for shard in value.local_shards()]
    return (value,) if isinstance(value, torch.Tensor) else ()


def _launch_here(module: Any, note: Note) -> None:
    """Let what a launcher would start as ranks be one call in this process."""

    class Launch(module.elastic_launch):
        """Calls a function as rank 0."""

        def __init__(self, config: Any, entrypoint: Any) -> None:
            if not callable(entrypoint):
                hint = "rehearse that command itself, behind torchrun"
                raise TraceError(_DOING, f"it starts its ranks as commands: {entrypoint}", hint=hint)
            self._size, self._entrypoint = config.max_nodes * config.nproc_per_node, entrypoint

        def __call__(self, *args: Any) -> dict[int, Any]:
            os.environ.update(_ENVIRONMENT, WORLD_SIZE=str(self._size), LOCAL_WORLD_SIZE=str(self._size))
            note(f"of {self._size} ranks that the script starts the first is rehearsed, in the script's own process")
            return {0: self._entrypoint(*args)}

    rebind(module.elastic_launch, Launch)


def _allow_libraries(module: Any) -> None:
    """Let a notebook's ranks begin with libraries imported that would use a device: they begin in this process."""
    module.are_libraries_initialized = lambda *_: []
