"""The name of a file of hidden states: a hash of all that decides them."""

from typing import Final

import torch
import transformers
import xxhash

from dryfit.core.wire import canonical_json
from dryfit.train.frozen.frozen_layers import FrozenLayers
from dryfit.train.frozen.states_file import StatesLayout

_FORMAT: Final = 1


def states_key(layers: FrozenLayers, layout: StatesLayout) -> str:
    """Return the name of the states: a hash of all that decides them.

    Those are the frozen weights themselves, the architecture, the number of layers, the number format, the rows, and
    the libraries that compute. Dropout is not among them, so that trials that differ in it share.

    Args:
        layers: The frozen layers, of a model on the CPU.
        layout: Its rows and number format.
    """
    encoder = layers.model.encoder
    config = {
        name: value
        for name, value in encoder.config.to_dict().items()
        if "drop" not in name and not name.startswith("_") and name != "transformers_version"
    }
    what = (type(encoder).__qualname__, repr(sorted(config.items())), layers.count)
    numbers = (str(layers.number_format), str(layout.dtype), layout.width)
    libraries = (torch.__version__, transformers.__version__)
    digest = xxhash.xxh3_128(canonical_json([_FORMAT, what, numbers, libraries]).encode())
    frozen = [(name, weight) for name, weight in encoder.named_parameters() if not weight.requires_grad]
    for name, tensor in (*frozen, *encoder.named_buffers()):
        digest.update(f"{name} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    for row in layout.index:
        digest.update(row)
    return digest.hexdigest()
