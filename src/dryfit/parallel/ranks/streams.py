"""Random numbers of ranks: alike where all hold the same activations, different where each rank holds a slice.

All ranks start with the same generator state, so that dropout of shared activations drops the same elements everywhere.
Inside a sharded region the same numbers would drop the same elements of each rank's heads. Megatron-LM keeps a second
generator per rank for that (``megatron/core/tensor_parallel/random.py``) and a checkpoint function of its own,
which saves both. Here the second stream is a function of the first: where a region begins, its seed is made of the
generator's state and the rank, and the generator moves on by one number. So recomputing under torch's own checkpoint,
which restores the generator, draws the same numbers again, and no other code is concerned.
"""

import hashlib
from dataclasses import dataclass, field

import torch


@dataclass(slots=True)
class RegionStream:
    """Switches the generators between the shared stream and one rank's own, at the edges of sharded regions.

    Whether a region is open is read from the generator's seed: a checkpoint that stops recomputing within a region
    restores the generator, and with it closes the region.
    """

    rank: int
    _open: dict[torch.device, tuple[int, torch.Tensor]] = field(default_factory=dict)

    def enter(self, device: torch.device) -> None:
        """Begin a region, unless it has begun."""
        generator = _generator(device)
        if self._is_open(device, generator):
            return
        state = generator.get_state()
        torch.rand((), device=device)  # the next region shall begin with another state; nothing waits for the device
        digest = hashlib.blake2b(state.numpy().tobytes(), digest_size=7, salt=self.rank.to_bytes(8, "little"))
        seed = int.from_bytes(digest.digest(), "little")
        self._open[device] = (seed, generator.get_state())
        generator.manual_seed(seed)

    def leave(self, device: torch.device) -> None:
        """End a region, if one has begun; later draws are as if it had not been there."""
        if device not in self._open:
            return
        generator = _generator(device)
        if self._is_open(device, generator):
            generator.set_state(self._open.pop(device)[1])

    def leave_all(self) -> None:
        """End every region, at the end of a pass, however it ended."""
        for device in list(self._open):
            self.leave(device)
        self._open.clear()

    def _is_open(self, device: torch.device, generator: torch.Generator) -> bool:
        return device in self._open and generator.initial_seed() == self._open[device][0]


def _generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        torch.cuda.init()
        index = device.index if device.index is not None else torch.cuda.current_device()
        return torch.cuda.default_generators[index]
    return torch.default_generator
