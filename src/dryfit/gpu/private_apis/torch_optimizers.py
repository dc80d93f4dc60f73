"""What torch imports for the first optimizer that a script makes: imported ahead, once for several rehearsals."""

from typing import Final

import torch._dynamo

NAMES: Final = (
    # importing once what each rehearsal of a command would import; until: torch makes an optimizer without it
    "torch._dynamo",
)

__all__ = ["NAMES", "torch"]
