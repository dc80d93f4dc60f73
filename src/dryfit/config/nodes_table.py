"""The table ``[nodes]`` of the study file: other machines that run trials."""

import shlex
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from dryfit.core.errors import ConfigError
from dryfit.core.settings.execution import DeviceKind
from dryfit.core.settings.known_devices import parse_device
from dryfit.core.settings.tables import Settings

LAUNCH = r"^(listen|slurm:[1-9][0-9]{0,3}|ray(:[^\s/]+:[0-9]{1,5})?)$"
_NOT_YOURS = ("--array", "--parsable", "--wrap", "--wait", "-W", "--test-only")


class NodesSettings(Settings):
    """``[nodes]``: other machines that run trials, each with an agent (``dryfit agent``)."""

    launch: str = Field(
        default="listen",
        pattern=LAUNCH,
        description="listen: agents are started by hand; slurm:N: by an array of N jobs of Slurm; "
        "ray, ray:HOST:PORT: by Ray, on each node of its cluster",
    )
    sbatch: str = Field(default="", description='slurm: more options of sbatch, such as "--gres=gpu:1 --time=4:00:00"')
    host: Annotated[str, Field(min_length=1)] | None = Field(
        default=None,
        description="the address to listen on; agents must reach it; unset: 127.0.0.1, if launched this machine's own",
    )
    port: int = Field(default=0, ge=0, le=65535, description="the port to listen on; 0: any free one")
    slots: Annotated[int, Field(ge=1, le=256)] | Literal["auto"] = Field(
        default="auto", description='trials on one node, at most; "auto": its share of runtime.parallel'
    )
    local: bool = Field(default=True, description="the machine of the control process runs trials too")
    lease_s: Annotated[float, Field(ge=1, le=3600)] = Field(
        default=60, description="how long trials on a node go on without the control process"
    )

    expect: str | None = Field(
        default=None,
        description="the largest GPU that will join, as `dryfit plan --device` takes it; "
        "a trial that fits no smaller one waits for it instead of being refused",
    )
    change_device: bool = Field(
        default=False, description="a trial that was interrupted may go on on another model of GPU than it began on"
    )
    tls: bool = Field(
        default=False, description="encrypt what agents and the control process say; they know its certificate"
    )

    @property
    def sbatch_options(self) -> tuple[str, ...]:
        """The words of ``sbatch``, as a shell would read them."""
        return tuple(shlex.split(self.sbatch))

    def has_all_gpus(self, device: str) -> bool:
        """Whether trials run on GPUs of other machines alone, so that this one needs none.

        Args:
            device: As ``execution.device``.
        """
        return device == "cuda" and not self.local

    @field_validator("expect")
    @classmethod
    def _expects_a_known_device(cls, expect: str | None) -> str | None:
        try:
            is_gpu = expect is None or parse_device(expect).kind is DeviceKind.CUDA
        except ConfigError as error:
            raise ValueError(str(error)) from error
        if not is_gpu:
            raise ValueError(f'"{expect}" is no GPU; trials on CPUs are not planned for what may join')
        return expect

    @model_validator(mode="after")
    def _sbatch_has_options_of_slurm(self) -> Self:
        if self.sbatch and not self.launch.startswith("slurm:"):
            raise ValueError(f'sbatch is read where launch is "slurm:N"; it is "{self.launch}"')
        for word in self.sbatch_options:
            if word.partition("=")[0] in _NOT_YOURS or (word.startswith("-a") and not word.startswith("--")):
                raise ValueError(f'sbatch has {word}, which dryfit gives itself; how many agents: launch = "slurm:N"')
        return self
