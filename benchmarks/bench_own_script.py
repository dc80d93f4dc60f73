"""A script of transformers' Trainer, searched by a loop of Optuna and by dryfit: time, memory, what a kill costs.

    python benchmarks/bench_own_script.py [--trials 12] [--steps 200] [--only optuna,script,trainer]

Each way makes the same trials, one after another: equal learning rates (a random sampler with the same points), the
same model, rows, evaluations and checkpoints, pruning by the median. The loop of Optuna is what its users write: one
process, a callback that reports evaluations and raises ``TrialPruned``, the study in SQLite.

Then each is run again, and after half of its undisturbed time its whole process tree is killed and the same command
started once more. Lost are the optimizer steps that are done again, and those of trials that never end.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve()
RATES = [round(1e-4 * 1.5**number, 6) for number in range(12)]
WAYS = ("optuna", "script", "trainer")
_SAMPLE_S = 0.5


# ---- what is trained, in the processes of each way


def make_trainer(output_dir: str, rate: float, steps: int):
    """A small BERT on rows made on the spot, with ten evaluations and checkpoints."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

    class Counting(Trainer):
        def training_step(self, *given, **named):
            loss = super().training_step(*given, **named)
            with Path(os.environ["BENCH_STEPS"]).open("a") as file:  # one line a step that was really done
                file.write(f"{rate} {self.state.global_step}\n")
            return loss

    def rows(count: int, seed: int):
        ids = torch.randint(4, 500, (count, 64), generator=torch.Generator().manual_seed(seed))
        return [{"input_ids": row, "labels": int(row[0] > 251)} for row in ids]

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    every = max(1, steps // 10)
    args = TrainingArguments(
        output_dir=output_dir,
        learning_rate=rate,
        max_steps=steps,
        per_device_train_batch_size=16,
        eval_strategy="steps",
        eval_steps=every,
        save_strategy="steps",
        save_steps=every,
        save_total_limit=2,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    model = BertForSequenceClassification(BertConfig(vocab_size=512, **sizes))
    return Counting(model=model, args=args, train_dataset=rows(512, 1), eval_dataset=rows(128, 2))


def for_trial(trial):
    """The function of the task ``trainer``."""
    return make_trainer(str(trial.folder), trial.params["rate"], int(os.environ["BENCH_LENGTH"]))


def train_once() -> None:
    """The script of the task ``script``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--rate", type=float, required=True)
    parser.add_argument("--output_dir", required=True)
    own = parser.parse_args()
    make_trainer(own.output_dir, own.rate, int(os.environ["BENCH_LENGTH"])).train()


def by_optuna(folder: Path, trials: int) -> None:
    """What a careful user of Optuna writes."""
    import optuna
    from transformers import TrainerCallback

    class Pruning(TrainerCallback):
        def __init__(self, trial):
            self.trial = trial

        def on_evaluate(self, args, state, control, metrics, **_):
            self.trial.report(metrics["eval_loss"], state.global_step)
            if self.trial.should_prune():
                raise optuna.TrialPruned

    def objective(trial):
        rate = trial.suggest_float("rate", RATES[0], RATES[-1])
        trainer = make_trainer(str(folder / str(trial.number)), rate, int(os.environ["BENCH_LENGTH"]))
        trainer.add_callback(Pruning(trial))
        trainer.train()
        return min(entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry)

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        study_name="bench",
        storage=f"sqlite:///{folder}/optuna.db",
        load_if_exists=True,
        pruner=optuna.pruners.MedianPruner(n_startup_trials=5),
    )
    if not study.trials:
        for rate in RATES[:trials]:
            study.enqueue_trial({"rate": rate})
    waiting = sum(trial.state is optuna.trial.TrialState.WAITING for trial in study.trials)
    study.optimize(objective, n_trials=waiting)


# ---- the measuring process


@dataclass
class Run:
    """What a way took, and which steps it did."""

    wall_s: float
    cpu_s: float
    peak_mib: float
    ended: int
    steps: int
    lost: int


def command_of(way: str, folder: Path, trials: int) -> list[str]:
    if way == "optuna":
        return [sys.executable, str(HERE), "--optuna", str(folder), "--trials", str(trials)]
    table = {
        "script": f'[script]\ncommand = "{HERE} --train --rate {{rate}} --output_dir out"',
        "trainer": f'[trainer]\nmake = "{HERE}:for_trial"',
    }[way]
    points = ", ".join(f"{{rate = {rate}}}" for rate in RATES[:trials])
    (folder / "study.toml").write_text(
        f'[study]\ntask = "{way}"\nmetric = "eval_loss"\ndirection = "minimize"\ntrials = {trials}\n{table}\n'
        f"[space]\nrate = {{low = {RATES[0]}, high = {RATES[-1]}}}\n"
        f'[search]\nsampler = "random"\nenqueue = [{points}]\n'
        'pruner = "median"\npruner_startup_trials = 5\nwarmup_reports = 0\n'  # as Optuna's MedianPruner does
        '[runtime]\nparallel = 1\nkeep = "none"\n[execution]\ndevice = "cpu"\n'
    )
    return [sys.executable, "-m", "dryfit.documents.command_line", "tune", str(folder / "study.toml"), "--quiet"]


def descendants(root: int) -> list[int]:
    """The processes below one, itself included, wherever their groups are."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                after = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            children.setdefault(int(after[1]), []).append(int(entry.name))
    found, left = [], [root]
    while left:
        found.append(left.pop())
        left += children.get(found[-1], [])
    return found


def held_mib(pids: Sequence[int]) -> float:
    """Proportional share of memory: what forked processes share counts once."""
    total = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1024


def run(
    command: Sequence[str], folder: Path, steps: int, kill_after_s: float | None = None
) -> tuple[float, float, float]:
    """Run a command, and return wall and CPU seconds and the peak of its processes in MiB."""
    surroundings = os.environ | {"BENCH_STEPS": str(folder / "steps.txt"), "BENCH_LENGTH": str(steps)}
    peak, ended = [0.0], threading.Event()
    began_s = time.perf_counter()
    with (folder / "log.txt").open("ab") as log:
        process = subprocess.Popen(command, cwd=folder, env=surroundings, stdout=log, stderr=log)

    def sample() -> None:
        while not ended.wait(_SAMPLE_S):
            peak[0] = max(peak[0], held_mib(descendants(process.pid)))
            if kill_after_s is not None and time.perf_counter() - began_s > kill_after_s:
                for pid in descendants(process.pid):
                    os.kill(pid, signal.SIGKILL)
                return

    watching = threading.Thread(target=sample)
    watching.start()
    _, status, usage = os.wait4(process.pid, 0)
    wall_s = time.perf_counter() - began_s
    process.returncode = os.waitstatus_to_exitcode(status)
    ended.set()
    watching.join()
    if process.returncode != 0 and kill_after_s is None:
        raise RuntimeError(f"it ended with {process.returncode}: {(folder / 'log.txt').read_text()[-2000:]}")
    return wall_s, usage.ru_utime + usage.ru_stime, peak[0]


def ended_rates(way: str, folder: Path) -> list[float]:
    """The learning rates of the trials that came to an end."""
    if way == "optuna":
        import optuna

        study = optuna.load_study(study_name="bench", storage=f"sqlite:///{folder}/optuna.db")
        return [trial.params["rate"] for trial in study.trials if trial.state.is_finished()]
    sys.path.insert(0, str(HERE.parents[1] / "tests" / "support"))
    import study_runs

    return [trial.params["rate"] for trial in study_runs.fold(folder).trials if trial.outcome is not None]


def measured(way: str, trials: int, steps: int, kill_after_s: float | None = None) -> Run:
    folder = Path(tempfile.mkdtemp(prefix=f"bench-{way}-"))
    try:
        command = command_of(way, folder, trials)
        costs = [run(command, folder, steps, kill_after_s)]
        if kill_after_s is not None:
            costs.append(run(command, folder, steps))
        done = (folder / "steps.txt").read_text().splitlines()
        ended = ended_rates(way, folder)
        counted = {line for line in done if float(line.split()[0]) in ended}
        return Run(
            wall_s=sum(cost[0] for cost in costs),
            cpu_s=sum(cost[1] for cost in costs),
            peak_mib=max(cost[2] for cost in costs),
            ended=len(ended),
            steps=len(done),
            lost=len(done) - len(counted),
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=len(RATES))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--only", default=",".join(WAYS))
    parser.add_argument("--optuna", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.optuna is not None:
        by_optuna(options.optuna, options.trials)
        return
    trials, steps = min(options.trials, len(RATES)), options.steps
    print(f"{trials} trials of at most {steps} steps, {os.cpu_count()} cores")
    print("| way | wall | CPU | peak | steps | ended | killed once: wall | steps lost | ended |")
    print("|---|---|---|---|---|---|---|---|---|")
    rows = {}
    for way in options.only.split(","):
        whole = measured(way, trials, steps)
        killed = measured(way, trials, steps, kill_after_s=whole.wall_s / 2)
        rows[way] = {"whole": vars(whole), "killed": vars(killed)}
        print(
            f"| {way} | {whole.wall_s:.1f} s | {whole.cpu_s:.1f} s | {whole.peak_mib:.0f} MiB | {whole.steps} "
            f"| {whole.ended} | {killed.wall_s:.1f} s | {killed.lost} | {killed.ended} |",
            flush=True,
        )
    print(json.dumps(rows))


if __name__ == "__main__":
    if "--train" in sys.argv:
        train_once()
    else:
        main()
