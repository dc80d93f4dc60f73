"""What children of the tokenizer tests do: load a tokenizer, cut random texts, and say what they ran on."""

import json
import os
import warnings
from pathlib import Path

from google.protobuf.internal import api_implementation

import encoders
from dryfit.meta.checkpoint_files import FolderSource
from dryfit.meta.configs import load_tokenizer
from dryfit.processes.channel import ChildChannel
from dryfit.settings.training_messages import TrainRequest, TrainResult
from dryfit.settings.wire import Note
from runtime_jobs import done


def ids_of(folder: Path, seed: int) -> list[list[int]]:
    """Token ids of random texts."""
    tokenizer = load_tokenizer(FolderSource(str(folder)))
    return tokenizer(encoders.words(50, seed), add_special_tokens=False)["input_ids"]


def run_job(body: TrainRequest, channel: ChildChannel) -> TrainResult:
    """Entry point: cut texts, and fork after that, as a loader's workers do."""
    warnings.simplefilter("error")
    params = body.config.params
    found = ids_of(Path(str(params["folder"])), int(params["seed"]))
    pid = os.fork()
    if pid == 0:
        os._exit(0 if ids_of(Path(str(params["folder"])), int(params["seed"])) == found else 1)
    _, status = os.waitpid(pid, 0)
    said = {
        "ids": found,
        "forked": os.waitstatus_to_exitcode(status),
        "protobuf": api_implementation.Type(),
        "forced": os.environ.get("PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION"),
    }
    channel.send(Note(text=json.dumps(said)))
    return done()
