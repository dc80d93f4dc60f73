"""Models without weights, however a script makes or loads them: wherever values would be read, fakes are made.

Libraries are changed when the script imports them, so that nothing is imported that it does not import.
"""

from dryfit.memory.tracing import quantised_kernels
from dryfit.virtual.import_hooks import when_imported
from dryfit.virtual.loading import (
    adapters,
    addresses,
    checkpoint_files,
    initialisers,
    pretrained,
    tensor_classes,
)
from dryfit.virtual.loading.pretrained import DemandRoom
from dryfit.virtual.loading.tensor_classes import Make


def install(make: Make, demand_room: DemandRoom) -> None:
    """Let no weight be read or drawn for the rest of this process.

    Args:
        make: Makes a fake of a shape, type and device; whether it requires a gradient.
        demand_room: Raises an error where a model of so many bytes does not fit; told what has so many.
    """
    addresses.install()
    initialisers.install()
    tensor_classes.install(make)
    checkpoint_files.install(make)
    when_imported("transformers.modeling_utils", lambda module: pretrained.install(module, make, demand_room))
    when_imported("bitsandbytes", lambda _: quantised_kernels.install())
    when_imported("peft.peft_model", lambda module: adapters.install_peft(module, make))
    when_imported("timm", adapters.install_timm)
