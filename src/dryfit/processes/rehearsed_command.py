"""The command line of a training script, as people write it: ``train.py ...``, ``-m module ...``, ``torchrun ...``.

Pure. The launchers' options are those of torch 2.13 (``torch.distributed.run``), accelerate 1.15 (``accelerate
launch``) and DeepSpeed 0.19 (``deepspeed/launcher/runner.py``). A launcher starts one process a rank; a rehearsal is
the one of rank 0, so only what its process learns of the launcher's options counts: the number of ranks, and the
environment that the launcher makes.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NoReturn, cast

from dryfit.settings.errors import ConfigError
from dryfit.settings.text import did_you_mean, few

_DOING: Final = "reading the command line to rehearse"
_ALLOWED: Final = (
    "SCRIPT ARGS..., or -m MODULE ARGS...; torchrun [...], accelerate launch [...] or deepspeed [...] may precede it"
)
_LAUNCHED: Final[Mapping[str, str]] = {
    **dict.fromkeys(("RANK", "LOCAL_RANK", "GROUP_RANK"), "0"),
    **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "1"),
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}
"""Variables of the first process of a launcher with one; the process group knows how many there are."""


@dataclass(frozen=True, slots=True)
class ScriptCommand:
    """What a command line runs.

    Attributes:
        script: Path of a script; None: ``module``.
        module: Name of a module, run as by ``python -m``.
        arguments: All that follows, unread.
        ranks: Processes that its launcher starts; None: no launcher says.
        environment: Variables that its launcher sets, and the script reads.
    """

    script: str | None = None
    module: str | None = None
    arguments: tuple[str, ...] = ()
    ranks: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class _Options:
    """Options of a launcher, with underscores, as they were written before the script."""

    launcher: str
    values: Mapping[str, str]
    flags: frozenset[str]
    rest: tuple[str, ...]

    def refuse(self, found: str, allowed: str, hint: str = "") -> NoReturn:
        raise ConfigError(_DOING, f"{self.launcher}: {found}", allowed, hint)

    def count(self, name: str) -> int | None:
        """Return the whole number above zero that an option has; None where it is not given."""
        text = self.values.get(name)
        if text is None:
            return None
        if not (text.isascii() and text.isdigit() and int(text)):
            self.refuse(f"--{name} {text}", "a whole number above zero", "say --ranks N before it")
        return int(text)

    def target(self) -> ScriptCommand:
        """Return the script or module after the options; ``--`` right after it is the launcher's."""
        if not self.rest:
            self.refuse("no script follows", _ALLOWED)
        target, *rest = self.rest
        arguments = tuple(rest[1:] if rest[:1] == ["--"] else rest)
        if "module" in self.flags:
            return ScriptCommand(module=target, arguments=arguments)
        return ScriptCommand(script=target, arguments=arguments)


_TORCHRUN_FLAGS = frozenset({"standalone", "module", "no_python", "run_path", "virtual_local_rank"})
_TORCHRUN_VALUES = frozenset(
    {
        *("nnodes", "nproc_per_node", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf", "max_restarts"),
        *("monitor_interval", "start_method", "event_log_handler", "role", "log_dir", "redirects", "tee"),
        *("local_ranks_filter", "duplicate_stdout_filters", "duplicate_stderr_filters", "node_rank", "master_addr"),
        *("master_port", "local_addr", "logs_specs", "numa_binding", "signals_to_handle", "shutdown_timeout"),
    }
)
_ACCELERATE_FLAGS = frozenset(
    {
        *("quiet", "cpu", "multi_gpu", "tpu", "enable_cpu_affinity", "dynamo_use_fullgraph", "dynamo_use_dynamic"),
        *("dynamo_use_regional_compilation", "use_deepspeed", "use_fsdp", "use_parallelism_config", "use_megatron_lm"),
        *("same_network", "module", "no_python", "tpu_cluster", "no_tpu_cluster", "tpu_use_sudo", "downcast_bf16"),
        *("fp8_use_autocast_during_eval", "debug"),
    }
)
_ACCELERATE_VALUES = frozenset(
    {
        *("config_file", "mixed_precision", "num_processes", "num_machines", "num_cpu_threads_per_process"),
        *("dynamo_backend", "dynamo_mode", "gpu_ids", "machine_rank", "main_process_ip", "main_process_port", "tee"),
        *("log_dir", "role", "rdzv_backend", "rdzv_conf", "max_restarts", "monitor_interval", "vm", "env"),
        *("main_training_function", "deepspeed_config_file", "zero_stage", "offload_optimizer_device"),
        *("offload_param_device", "offload_optimizer_nvme_path", "offload_param_nvme_path"),
        *("gradient_accumulation_steps", "gradient_clipping", "zero3_init_flag", "zero3_save_16bit_model"),
        *("aws_access_key_id", "aws_secret_access_key", "mpirun_hostfile"),
    }
)
_ACCELERATE_FAMILIES = ("fsdp_", "deepspeed_", "megatron_lm_", "fp8_", "parallelism_config_")
"""Further options of accelerate with values begin so."""
_DEEPSPEED_FLAGS = frozenset(
    {
        *("module", "no_python", "no_local_rank", "no_ssh", "no_ssh_check", "force_multi", "save_pid", "quiet"),
        *("bind_cores_to_rank", "elastic_training"),
    }
)
_DEEPSPEED_VALUES = frozenset(
    {
        *("hostfile", "include", "exclude", "num_nodes", "num_gpus", "num_accelerators", "master_port", "master_addr"),
        *("node_rank", "launcher", "launcher_args", "enable_each_rank_log", "autotuning", "bind_core_list", "ssh_port"),
        *("min_elastic_nodes", "max_elastic_nodes", "venv_script", "log_level"),
    }
)
_SHORT = {"m": "module", "t": "tee", "r": "redirects", "q": "quiet", "H": "hostfile", "i": "include", "e": "exclude"}

_FSDP: Mapping[str, tuple[str, str]] = {
    "fsdp_version": ("FSDP_VERSION", "1"),
    "fsdp_sharding_strategy": ("FSDP_SHARDING_STRATEGY", "FULL_SHARD"),
    "fsdp_reshard_after_forward": ("FSDP_RESHARD_AFTER_FORWARD", "true"),
    "fsdp_offload_params": ("FSDP_OFFLOAD_PARAMS", "false"),
    "fsdp_min_num_params": ("FSDP_MIN_NUM_PARAMS", "100000000"),
    "fsdp_auto_wrap_policy": ("FSDP_AUTO_WRAP_POLICY", ""),
    "fsdp_transformer_layer_cls_to_wrap": ("FSDP_TRANSFORMER_CLS_TO_WRAP", ""),
    "fsdp_backward_prefetch": ("FSDP_BACKWARD_PREFETCH", ""),
    "fsdp_state_dict_type": ("FSDP_STATE_DICT_TYPE", ""),
    "fsdp_forward_prefetch": ("FSDP_FORWARD_PREFETCH", "false"),
    "fsdp_use_orig_params": ("FSDP_USE_ORIG_PARAMS", "true"),
    "fsdp_cpu_ram_efficient_loading": ("FSDP_CPU_RAM_EFFICIENT_LOADING", "true"),
    "fsdp_sync_module_states": ("FSDP_SYNC_MODULE_STATES", "true"),
    "fsdp_activation_checkpointing": ("FSDP_ACTIVATION_CHECKPOINTING", "false"),
    "fsdp_activation_checkpointing_offload": ("FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD", "false"),
}
"""Options of accelerate, the variables that it makes of them (``utils/launch.py``, ``prepare_multi_gpu_env``), and its
defaults; an empty default is not set."""
_AS_WRITTEN = frozenset({"fsdp_version", "fsdp_sharding_strategy", "fsdp_min_num_params", "fsdp_auto_wrap_policy"}) | {
    "fsdp_transformer_layer_cls_to_wrap",
    "fsdp_backward_prefetch",
    "fsdp_state_dict_type",
}
"""Options of FSDP whose values are no truth values."""
_DEEPSPEED: Mapping[str, str] = {
    "zero_stage": "ACCELERATE_DEEPSPEED_ZERO_STAGE",
    "gradient_accumulation_steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    "gradient_clipping": "ACCELERATE_GRADIENT_CLIPPING",
    "offload_optimizer_device": "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
    "offload_param_device": "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE",
    "zero3_init_flag": "ACCELERATE_DEEPSPEED_ZERO3_INIT",
    "zero3_save_16bit_model": "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL",
    "deepspeed_config_file": "ACCELERATE_DEEPSPEED_CONFIG_FILE",
    "deepspeed_moe_layer_cls_names": "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES",
}
"""Options of accelerate for DeepSpeed and the variables that it makes of them (``prepare_deepspeed_cmd_env``)."""
_NAMES_AS_WRITTEN = frozenset({"deepspeed_config_file", "deepspeed_moe_layer_cls_names"})


def parse_command(words: Sequence[str], config_of: Callable[[str | None], Mapping[str, Any]]) -> ScriptCommand:
    """Read the command line of a training script.

    Args:
        words: The words, without those of ``dryfit rehearse`` itself.
        config_of: Reads a config file of accelerate, given its path; of None the user's default, or nothing.

    Raises:
        ConfigError: There is no script, an unknown launcher or option, or what one process cannot rehearse: several
            machines, Megatron-LM, TPUs.
    """
    match list(words):
        case ("torchrun", *rest):
            return _torchrun(rest)
        case ("accelerate", "launch", *rest):
            return _accelerate(rest, config_of)
        case ("accelerate", *_):
            raise ConfigError(_DOING, " ".join(words[:2]), "accelerate launch [...] SCRIPT ARGS...")
        case ("deepspeed", *rest):
            return _deepspeed(rest)
        case ("jupyter" | "jupyter-nbconvert" | "ipython" | "papermill", *_):
            raise ConfigError(_DOING, f"{words[0]} runs notebooks", _ALLOWED, _NO_NOTEBOOK)
        case ("-m",):
            raise ConfigError(_DOING, "no module follows -m", _ALLOWED)
        case ("-m", "torch.distributed.run" | "torch.distributed.launch", *rest):
            return _torchrun(rest)
        case ("-m", "jupyter" | "nbconvert" | "IPython" | "ipykernel_launcher" | "papermill", *_):
            raise ConfigError(_DOING, f"{words[1]} runs notebooks", _ALLOWED, _NO_NOTEBOOK)
        case ("-m", "accelerate.commands.launch", *rest):
            return _accelerate(rest, config_of)
        case ("-m", "deepspeed.launcher.runner", *rest):
            return _deepspeed(rest)
        case ("-m", module, *rest):
            return ScriptCommand(module=module, arguments=tuple(rest))
        case ("python" | "python3", *rest) if rest:
            return parse_command(rest, config_of)
        case [first, *_] if first.startswith("-"):
            hint = "options of dryfit come before SCRIPT; `dryfit rehearse --help` lists them"
            raise ConfigError(_DOING, f"there is no option {first}", _ALLOWED, hint)
        case [first, *rest]:
            return ScriptCommand(script=first, arguments=tuple(rest))
        case _:
            raise ConfigError(_DOING, "no script was given", _ALLOWED)


_NO_NOTEBOOK = "rehearse the script that `jupyter nbconvert --to script` makes"


def _read(launcher: str, words: Sequence[str], flags: Iterable[str], has_value: Callable[[str], bool]) -> _Options:
    """Read a launcher's options up to the first word that is none."""
    known_flags = frozenset(flags)
    values: dict[str, str] = {}
    given: set[str] = set()
    left = list(words)
    while left and left[0].startswith("-") and left[0] != "-":
        word = left.pop(0)
        if word == "--":
            break
        written, equals, value = word.partition("=")
        name = written.removeprefix("--").replace("-", "_") if written.startswith("--") else _SHORT.get(written[1:], "")
        if name in known_flags and not equals:
            given.add(name)
        elif name and has_value(name):
            if not equals:
                if not left:
                    raise ConfigError(_DOING, f"{launcher}: no value follows {word}", "a value")
                value = left.pop(0)
            values[name] = value
        else:
            hint = did_you_mean(name, known_flags | {"nproc_per_node", "num_processes"}, written="--{}")
            raise ConfigError(_DOING, f"{launcher} has no option {written} that is known", "its long options", hint)
    return _Options(launcher, values, frozenset(given), tuple(left))


def _torchrun(words: Sequence[str]) -> ScriptCommand:
    options = _read("torchrun", words, _TORCHRUN_FLAGS, _TORCHRUN_VALUES.__contains__)
    if "no_python" in options.flags:
        options.refuse("--no-python", "a Python script or module")
    nodes = options.values.get("nnodes", "1")
    if nodes not in ("1", "1:1"):
        options.refuse(f"--nnodes {nodes}", "one machine", "--ranks N before it: N devices of one machine")
    target = options.target()
    count = options.values.get("nproc_per_node", "1")
    # As many as there are devices: only --ranks can say.
    ranks = None if count in ("gpu", "auto", "cpu", "xpu") else options.count("nproc_per_node") or 1
    return replace(target, ranks=ranks, environment=_LAUNCHED)


def _deepspeed(words: Sequence[str]) -> ScriptCommand:
    """Read the options of DeepSpeed's launcher, which hands each rank its number as the script's first argument."""
    options = _read("deepspeed", words, _DEEPSPEED_FLAGS, _DEEPSPEED_VALUES.__contains__)
    one_machine = "--ranks N before it: N devices of one machine"
    if "no_python" in options.flags:
        options.refuse("--no_python", "a Python script or module")
    if "hostfile" in options.values or "elastic_training" in options.flags or (options.count("num_nodes") or 1) > 1:
        options.refuse("several machines", "one machine", one_machine)
    if "autotuning" in options.values:
        options.refuse("--autotuning", "one configuration", "rehearse each configuration, or see --largest")
    target = options.target()
    host, _, slots = options.values.get("include", "").partition(":")
    if "@" in host or "@" in slots:
        options.refuse(f"--include {options.values['include']}", "one machine", one_machine)
    included = len(slots.split(",")) if slots else None
    arguments = target.arguments if "no_local_rank" in options.flags else ("--local_rank=0", *target.arguments)
    ranks = options.count("num_gpus") or options.count("num_accelerators") or included
    return replace(target, arguments=arguments, ranks=ranks, environment=_LAUNCHED)


def _accelerate(words: Sequence[str], config_of: Callable[[str | None], Mapping[str, Any]]) -> ScriptCommand:
    options = _read(
        "accelerate launch",
        words,
        _ACCELERATE_FLAGS,
        lambda name: name in _ACCELERATE_VALUES or name.startswith(_ACCELERATE_FAMILIES),
    )
    target = options.target()
    config = config_of(options.values.get("config_file"))
    kind = str(config.get("distributed_type") or "NO").upper()
    chosen = options.flags & {"multi_gpu", "use_deepspeed", "use_fsdp", "use_megatron_lm", "tpu"}
    _refuse_what_is_not_simulated(options, config, "" if chosen else kind)
    fsdp = "use_fsdp" in chosen or (not chosen and kind == "FSDP")
    ranks = options.count("num_processes") or _whole(config.get("num_processes"))
    precision = options.values.get("mixed_precision") or str(config.get("mixed_precision") or "no")
    if precision not in ("no", "fp16", "bf16"):
        options.refuse(f"--mixed_precision {precision}", "no, fp16 or bf16")
    environment = {"ACCELERATE_MIXED_PRECISION": precision}
    if fsdp:
        environment |= _LAUNCHED | _fsdp_environment(options.values, config.get("fsdp_config"))
    if "use_deepspeed" in chosen or (not chosen and kind == "DEEPSPEED"):
        from_file = "mixed_precision" not in options.values and config.get("mixed_precision") is not None
        environment |= _LAUNCHED | _deepspeed_environment(options.values, config, ("mixed_precision",) * from_file)
    return ScriptCommand(target.script, target.module, target.arguments, ranks, environment)


def _refuse_what_is_not_simulated(options: _Options, config: Mapping[str, Any], kind: str) -> None:
    machines = options.count("num_machines") or _whole(config.get("num_machines")) or 1
    if machines > 1:
        options.refuse(f"{machines} machines", "one machine", "--num_machines 1, and --num_processes for its devices")
    if "use_megatron_lm" in options.flags or kind == "MEGATRON_LM":
        options.refuse("Megatron-LM", "one device, DDP, FSDP or DeepSpeed")
    if "tpu" in options.flags or kind in ("XLA", "TPU"):
        options.refuse("a TPU", "CUDA devices")
    if "cpu" in options.flags:
        options.refuse("--cpu", "CUDA devices", "leave it out: a rehearsal needs none")
    if "use_parallelism_config" in options.flags or config.get("parallelism_config"):
        options.refuse("a parallelism config", "one device, DDP, FSDP or DeepSpeed")
    if "no_python" in options.flags:
        options.refuse("--no_python", "a Python script or module")
    unknown = sorted(name for name in options.values if name.startswith("fsdp_") and name not in _FSDP)
    if unknown:
        options.refuse(f"--{unknown[0]}", few(_FSDP, len(_FSDP)))


def _whole(value: object) -> int | None:
    """Return a whole number above zero of a config file; None for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _fsdp_environment(values: Mapping[str, str], table: object) -> dict[str, str]:
    """Return the variables that accelerate makes for FSDP, of its options and the ``fsdp_config`` of its file."""
    written = cast("Mapping[str, object]", table if isinstance(table, Mapping) else {})
    config = {name if name.startswith("fsdp") else f"fsdp_{name}": value for name, value in written.items()}
    environment = {"ACCELERATE_USE_FSDP": "true"}
    for name, (variable, default) in _FSDP.items():
        value = values.get(name, config.get(name))
        text = default if value is None else str(value)
        if text:
            environment[variable] = text if name in _AS_WRITTEN else text.lower()
    return environment


def _deepspeed_environment(
    values: Mapping[str, str], config: Mapping[str, Any], others: tuple[str, ...]
) -> dict[str, str]:
    """Return the variables that accelerate makes for DeepSpeed, of its options and its file's ``deepspeed_config``.

    Args:
        others: What else the file says of DeepSpeed.
    """
    table = config.get("deepspeed_config")
    written = cast("Mapping[str, object]", table if isinstance(table, Mapping) else {})
    fields = ",".join([*written, *others] if config else [])
    environment = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_CONFIG_DS_FIELDS": fields.lower()}
    for name, variable in _DEEPSPEED.items():
        value = values.get(name, written.get(name, config.get(name)))
        if value is not None:
            environment[variable] = str(value) if name in _NAMES_AS_WRITTEN else str(value).lower()
    return environment
