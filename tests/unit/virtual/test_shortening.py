"""Scripts of every kind end after three steps, with their evaluation and saving, on real CPU tensors."""

import multiprocessing
import os
import random
import warnings
from collections.abc import Callable, Iterable, Iterator
from itertools import repeat
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, get_worker_info

from dryfit.gpu.loaders import EVALUATION_BATCHES, LONG_BATCH, PATIENCE, RehearsalDone, Stock
from dryfit.gpu.shortening import LONG_STEP, Shortening
from in_fork import in_fork

pytestmark = pytest.mark.heavy

WIDTH = 4


class Log:
    """What a script did, and how it ended."""

    def __init__(self) -> None:
        self.said: list[Any] = []
        self.sizes: list[int] = []
        self.allocated_bytes = 0
        self.events = 0

    def say(self, *words: Any) -> None:
        self.said.append(" ".join(map(str, words)))


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    """Let torch import what a first step imports, for all forks."""
    model, optimizer = parts()
    loss_of(model, ONE).backward()
    optimizer.step()


def shortened(script: Callable[[Log], None], *, worst_batch: bool = False, steps: int | None = 3) -> dict[str, Any]:
    """Run a script in a fork, shortened; return what it said."""

    def run() -> dict[str, Any]:
        log = Log()
        marks: list[str] = []
        short = Shortening(
            steps,
            worst_batch=worst_batch,
            on_step_end=lambda number: marks.append(f"{number}>"),
            stock=lambda: Stock(log.allocated_bytes, log.events),
        )
        short.install()
        try:
            script(log)
            log.say("finished")
        except RehearsalDone:
            log.say("stopped")
        largest = short.largest_batch
        return {
            "said": log.said,
            "sizes": log.sizes,
            "marks": " ".join(marks),
            "done": short.done,
            "notes": short.notes,
            "largest": None if largest is None else largest.model_dump(mode="json"),
        }

    return in_fork(run)


def rows(count: int = 64) -> TensorDataset:
    return TensorDataset(torch.randn(count, WIDTH), torch.randint(0, 2, (count,)))


def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(WIDTH, 2)
    return model, torch.optim.AdamW(model.parameters())


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    inputs, labels = batch
    return nn.functional.cross_entropy(model(inputs), labels)


ONE = (torch.zeros(2, WIDTH), torch.tensor([0, 1]))


def train_on(log: Log, batches: Iterable[Any]) -> None:
    """Take a step on each batch, and say so."""
    model, optimizer = parts()
    for batch in batches:
        loss_of(model, batch).backward()
        optimizer.step()
        log.say("step")


def evaluate(model: nn.Module, loader: Any) -> int:
    model.eval()
    with torch.no_grad():
        return sum(1 for batch in loader if loss_of(model, batch) is not None)


def plain(log: Log, *, accumulation: int = 1, workers: int = 0) -> None:
    model, optimizer = parts()
    train = DataLoader(rows(), 2, shuffle=True, num_workers=workers, pin_memory=True)
    test = DataLoader(rows(100), 2, num_workers=workers)
    for _ in range(2):
        model.train()
        for at, batch in enumerate(train):
            loss_of(model, batch).backward()
            if (at + 1) % accumulation == 0:
                optimizer.step()
                optimizer.zero_grad()
                log.say("step")
        log.say("evaluated", evaluate(model, test))
        log.say("saved")


def test_a_plain_loop_evaluates_and_saves_after_its_last_step():
    answer = shortened(plain)
    after = ["step", "stopped"]  # a step of the next epoch, after the evaluation
    assert answer["said"] == ["step"] * 3 + [f"evaluated {EVALUATION_BATCHES}", "saved", *after]
    assert answer["marks"] == "1> 2> 3> 4>"
    (note,) = answer["notes"]
    assert note == f"an evaluation was ended after {EVALUATION_BATCHES} of 50 batches"


@pytest.mark.parametrize("workers", [0, 2])
def test_accumulation_beyond_an_evaluations_batches_and_workers(workers: int):
    answer = shortened(lambda log: plain(log, accumulation=20, workers=workers), steps=2)
    # 32 batches an epoch and 20 a step: the first epoch ends by itself, with its evaluation.
    assert answer["said"] == [
        "step",
        f"evaluated {EVALUATION_BATCHES}",
        "saved",
        "step",
        f"evaluated {EVALUATION_BATCHES}",
        "saved",
        "finished",
    ]


@pytest.mark.parametrize(
    ("steps", "later", "seen"), [(None, LONG_STEP + 1, 2), (None, LONG_STEP, 3), (3, LONG_STEP + 1, 3), (1, 0, 1)]
)
def test_of_three_steps_that_nobody_named_the_last_is_left_out_where_one_is_long(
    steps: int | None, later: int, seen: int
) -> None:
    def batches(log: Log) -> Iterator[Any]:
        for number in range(9):
            log.events += later if number else 2 * LONG_STEP  # a first step that is long alone decides nothing
            yield ONE

    answer = shortened(lambda log: train_on(log, batches(log)), steps=steps)
    assert answer["said"] == ["step"] * seen + ["stopped"]
    assert len(answer["notes"]) == (seen == 2)


def test_a_loop_without_a_loader_stops_before_another_step():
    answer = shortened(lambda log: train_on(log, repeat(ONE)))
    assert answer["said"] == ["step"] * 3 + ["stopped"]
    assert answer["marks"] == "1> 2> 3>"


def test_one_batch_trained_on_over_and_over_stops_too():
    answer = shortened(lambda log: train_on(log, repeat(next(iter(DataLoader(rows(), 2))))))
    assert answer["said"] == ["step"] * 3 + ["stopped"]


def test_a_scaler_and_an_iterator_begun_again():
    def script(log: Log) -> None:
        model, optimizer = parts()
        scaler = torch.amp.GradScaler("cpu")
        loader = DataLoader(rows(4), 2)
        batches = iter(loader)
        for _ in range(100):
            try:
                batch = next(batches)
            except StopIteration:
                batches = iter(loader)
                batch = next(batches)
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(model, batch)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            log.say("step")

    answer = shortened(script)
    assert answer["said"] == ["step"] * 3 + ["stopped"]
    assert answer["marks"] == "1> 2> 3>"


def test_several_optimizers_each_make_their_steps():
    def script(log: Log) -> None:
        critic, of_critic = parts()
        generator, of_generator = parts()
        for at, batch in enumerate(DataLoader(rows(), 2)):
            of_critic.zero_grad()
            loss_of(critic, batch).backward()
            of_critic.step()
            log.say("critic")
            if at % 3 == 2:
                loss_of(generator, batch).backward()
                of_generator.step()
                log.say("generator")

    answer = shortened(script)
    assert answer["said"].count("generator") == 3
    assert answer["said"].count("critic") == 9
    assert answer["said"][-1] == "finished"


def test_an_optimizer_that_takes_no_step_is_not_waited_for_long():
    def script(log: Log) -> None:
        unused = parts()
        train_on(log, DataLoader(rows(), 2))
        del unused

    assert shortened(script)["said"] == ["step"] * (3 * PATIENCE) + ["finished"]


def test_a_step_within_a_subclass_step_is_one():
    class Louder(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    def script(log: Log) -> None:
        model = nn.Linear(WIDTH, 2)
        torch.optim.SGD(model.parameters(), 0.1)  # torch announces steps of the parent's class from here on
        optimizer = Louder(model.parameters(), 0.1)
        for batch in DataLoader(rows(), 2):
            loss_of(model, batch).backward()
            optimizer.step()
            log.say("step")

    assert shortened(script)["marks"] == "1> 2> 3>"


class Stream(IterableDataset):
    """Counts what is read of it."""

    def __init__(self) -> None:
        self.read = 0

    def __iter__(self) -> Iterator[Any]:
        while True:
            self.read += 1
            yield torch.full((WIDTH,), float(self.read)), torch.tensor(self.read % 2)


class OwnProcess(Dataset[int]):
    """Says of each row in which process it was made."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return os.getpid()


def test_many_short_epochs_of_a_step_begin_workers_twice():
    def script(log: Log) -> None:
        loader = DataLoader(OwnProcess(), batch_size=2, num_workers=2)
        for _ in range(4):
            log.say(*(os.getpid() in batch.tolist() for batch in loader), loader.num_workers)
        log.say(*(os.getpid() in batch.tolist() for batch in DataLoader(OwnProcess(), batch_size=4, num_workers=1)))

    assert shortened(script)["said"] == [*["False False 2"] * 2, *["True True 2"] * 2, "False", "finished"]


class MadeInAdvance(Dataset[int]):
    """Counts the rows that all its processes make."""

    def __init__(self) -> None:
        self.made: Any = multiprocessing.Value("i", 0)

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> int:
        with self.made.get_lock():
            self.made.value += 1
        return index


def test_many_workers_make_few_batches_in_advance():
    def script(log: Log) -> None:
        rows = MadeInAdvance()
        loader = DataLoader(rows, batch_size=2, num_workers=2, prefetch_factor=4)
        loader.num_workers = 16  # torch warns of more workers than cores when a loader is made
        batches = iter(loader)
        log.say(next(batches).tolist(), loader.num_workers, loader.prefetch_factor)
        del batches
        log.say(rows.made.value <= 6)

    assert shortened(script)["said"] == ["[0, 1] 16 4", "True", "finished"]


class NeedsWorker(IterableDataset[int]):
    """A stream of rows whose share a worker decides; without one it fails after some rows."""

    def __init__(self, fails_after: int) -> None:
        self.fails_after = fails_after

    def __iter__(self) -> Iterator[int]:
        worker: Any = get_worker_info()
        if worker is None:
            yield from range(self.fails_after)
        yield from range(worker.id, 6, worker.num_workers)


@pytest.mark.parametrize("fails_after", [0, 2])
def test_a_data_set_that_needs_its_workers_has_them_in_every_epoch(fails_after: int):
    def script(log: Log) -> None:
        loader = DataLoader(NeedsWorker(fails_after), num_workers=2)
        loader.num_workers = 3  # more than the rehearsal gives a data set with rows by number
        with warnings.catch_warnings(action="ignore"):  # more than this machine has cores
            for _ in range(4):
                log.say(sorted(map(int, loader)))

    assert shortened(script)["said"] == [*[str([0, 1, 2, 3, 4, 5])] * 4, "finished"]


def test_a_stream_is_read_once():
    def script(log: Log) -> None:
        model, optimizer = parts()
        stream = Stream()
        for batch in DataLoader(stream, 2):
            log.sizes.append(int(batch[0][0, 0]))
            loss_of(model, batch).backward()
            optimizer.step()
        log.say("read", stream.read)

    answer = shortened(script, worst_batch=True)
    assert answer["sizes"] == [1, 3, 5]
    assert answer["said"] == ["read 6", "finished"]
    assert answer["largest"] is None
    assert answer["notes"] == ["the largest batch is not known: the data set can be read only once"]


class Sentences(Dataset[torch.Tensor]):
    """Rows of random lengths, and of random numbers."""

    def __init__(self, count: int) -> None:
        self.lengths = [1 + (7 * at) % 23 for at in range(count)]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, at: int) -> torch.Tensor:
        noise = torch.rand(()).item() + float(np.random.rand()) + random.random()
        return torch.full((self.lengths[at],), 1.0 + at + noise * 1e-3)


def padded(batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"inputs": nn.utils.rnn.pad_sequence(batch, batch_first=True)}


def epoch(log: Log, *, workers: int = 0, count: int = 20, at_once: int = 3) -> None:
    """Train for an epoch, and say every value that was seen."""
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)
    weight = nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([weight], 0.0)
    loader = DataLoader(Sentences(count), at_once, shuffle=True, collate_fn=padded, num_workers=workers)
    for batch in loader:
        log.sizes.append(batch["inputs"].numel())
        log.say(batch["inputs"][:, 0].tolist())
        (weight * batch["inputs"]).sum().backward()
        optimizer.step()
    log.say(torch.rand(()).item(), float(np.random.rand()), random.random())


@pytest.mark.parametrize("workers", [0, 2])
def test_the_largest_batch_comes_first_and_the_others_in_their_order(workers: int):
    as_it_is = shortened(lambda log: epoch(log, workers=workers), steps=99)
    answer = shortened(lambda log: epoch(log, workers=workers), worst_batch=True, steps=99)
    assert answer["sizes"][0] == max(as_it_is["sizes"])
    first = as_it_is["sizes"].index(max(as_it_is["sizes"]))
    assert len(answer["sizes"]) == len(as_it_is["sizes"]) == 7
    # Once more in place of the second, when the optimizer has its state; otherwise the same rows with the same random
    # numbers, and the same numbers afterwards.
    others = [said for at, said in enumerate(as_it_is["said"]) if at != first]
    assert answer["sizes"][1] == answer["sizes"][0]
    assert answer["said"][2:] == others[1:]
    assert answer["largest"] == {
        "shapes": {"inputs": [3, answer["sizes"][0] // 3]},
        "seen": 7,
        "of": 7,
        "fed_first": True,
    }
    assert answer["notes"] == []


@pytest.mark.parametrize("columns", [False, True])
def test_of_batches_of_texts_the_one_with_the_longest_comes_first(columns: bool):
    texts = [{"prompt": [{"role": "user", "content": "a" * (7 * at % 20)}], "number": at} for at in range(20)]

    def collate(rows: list[dict[str, Any]]) -> Any:
        return {name: [row[name] for row in rows] for name in rows[0]} if columns else rows

    def script(log: Log) -> None:
        weight = nn.Parameter(torch.zeros(()))
        optimizer = torch.optim.SGD([weight], 0.0)
        for batch in DataLoader(texts, 3, collate_fn=collate):
            prompts = batch["prompt"] if columns else [row["prompt"] for row in batch]
            log.sizes.append(max(len(prompt[0]["content"]) for prompt in prompts))
            (weight * 2).backward()
            optimizer.step()

    answer = shortened(script, worst_batch=True, steps=99)
    assert answer["sizes"][0] == max(answer["sizes"]) == 19 and len(answer["sizes"]) == 7
    assert answer["largest"]["shapes"] == {"characters": [3, 19 + len("user")]}


def test_a_loader_begun_before_training_begins_with_its_largest_batch_again():
    def script(log: Log) -> None:
        weight = nn.Parameter(torch.zeros(()))
        optimizer = torch.optim.SGD([weight], 0.0)
        loader = DataLoader(Sentences(20), 3, shuffle=True, collate_fn=padded)
        log.sizes.append(next(iter(loader)).pop("inputs").numel())
        for batch in loader:
            log.sizes.append(batch["inputs"].numel())
            (weight * batch["inputs"]).sum().backward()
            optimizer.step()

    sizes = shortened(script, worst_batch=True, steps=99)["sizes"]
    assert len(sizes) == 8
    assert sizes[1] == max(sizes[1:])


def test_a_data_set_that_fails_costs_the_search_alone():
    class Broken(Sentences):
        def __getitem__(self, at: int) -> torch.Tensor:
            if torch.utils.data.get_worker_info() is None:
                raise OSError("open only in a worker")
            return super().__getitem__(at)

    def script(log: Log) -> None:
        weight = nn.Parameter(torch.zeros(()))
        optimizer = torch.optim.SGD([weight], 0.0)
        for batch in DataLoader(Broken(20), 3, collate_fn=padded, num_workers=1):
            (weight * batch["inputs"]).sum().backward()
            optimizer.step()
            log.say("step")

    answer = shortened(script, worst_batch=True)
    assert answer["said"] == ["step"] * 3 + ["finished"]
    assert answer["largest"] is None
    assert answer["notes"] == ["the largest batch is not known: looking for it raised OSError: open only in a worker"]


def test_a_loader_of_the_scripts_own_class_ends_as_torchs():
    class Renamed(DataLoader[Any]):
        def __iter__(self) -> Any:
            for inputs, labels in super().__iter__():
                yield {"inputs": inputs, "labels": labels}

    def script(log: Log) -> None:
        train_on(log, ((batch["inputs"], batch["labels"]) for batch in Renamed(rows(), 2)))

    assert shortened(script, worst_batch=True)["said"] == ["step"] * 3 + ["finished"]


@pytest.mark.parametrize(("events", "batches"), [(LONG_BATCH, EVALUATION_BATCHES), (LONG_BATCH + 1, 2)])
def test_an_evaluation_of_long_batches_is_cut_after_two(events: int, batches: int):
    def script(log: Log) -> None:
        model, _ = parts()
        model.eval()
        done = 0
        with torch.no_grad():
            for batch in DataLoader(rows(100), 2):
                loss_of(model, batch)
                log.events += events
                done += 1
        log.say("evaluated", done)

    answer = shortened(script)
    assert answer["said"] == [f"evaluated {batches}", "finished"]
    assert answer["notes"] == [f"an evaluation was ended after {batches} of 50 batches"]


def test_an_evaluation_before_training_is_cut_and_training_is_not():
    def script(log: Log) -> None:
        model, optimizer = parts()
        log.say("evaluated", evaluate(model, DataLoader(rows(100), 2)))
        log.say("looked at", sum(1 for _ in DataLoader(rows(100), 2)))
        model.train()
        for batch in DataLoader(rows(), 2):
            loss_of(model, batch).backward()
            optimizer.step()

    said = shortened(script)["said"]
    assert said == [f"evaluated {EVALUATION_BATCHES}", "looked at 50", "finished"]


def test_what_an_evaluation_keeps_of_each_batch_is_told():
    def script(log: Log) -> None:
        model, optimizer = parts()
        for batch in DataLoader(rows(), 2):
            loss_of(model, batch).backward()
            optimizer.step()
            log.allocated_bytes += 2**20
        model.eval()
        with torch.no_grad():
            for at, (inputs, _) in enumerate(DataLoader(rows(100), 2)):
                model(inputs)
                log.allocated_bytes += 2**30 if at else 2**32  # the first one also makes what all have in common

    (note,) = shortened(script)["notes"]
    assert note == (
        "an evaluation was ended after 4 of 50 batches; it keeps 1.0 GiB of each batch on the device (logits, as a"
        " rule): the 46 others would keep 46.0 GiB more"
    )


def test_rollouts_of_a_shuffled_loader_before_the_first_step_are_no_evaluation():
    def script(log: Log) -> None:
        model, optimizer = parts()
        kept: list[Any] = []
        for batch in DataLoader(rows(100), 2, shuffle=True):
            with torch.no_grad():
                model(batch[0])
            kept.append(batch)
            if len(kept) == 10:
                log.say("step")
                torch.stack([loss_of(model, one) for one in kept]).sum().backward()
                optimizer.step()
                kept.clear()

    assert shortened(script)["said"] == ["step"] * 3 + ["finished"]
