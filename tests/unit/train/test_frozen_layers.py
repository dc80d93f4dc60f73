"""Frozen layers without dropout: what they give is taken from a file, and every number stays what it is."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import encoders
import tiny
import trials
from dryfit.core.settings.tables import HeadSettings
from dryfit.core.wire import Note
from dryfit.tasks.base import MODEL_INPUTS, Batch, Outputs, pad_rows
from dryfit.tasks.heads import EncoderWithHead, HeadSpec, freeze
from dryfit.tasks.tokens.token_set import TokenSet
from dryfit.train.frozen.distinct_rows import distinct_rows
from dryfit.train.frozen.frozen_layers import FrozenLayers
from dryfit.train.frozen.sharing import check_soundness, states_of
from dryfit.train.frozen.states_file import NoStatesError, StatesFolder
from dryfit.train.model import enable_checkpointing
from dryfit.train.optim.step import backward_batch

PLAIN = ("bert", "roberta", "xlm-roberta", "electra", "distilbert", "deberta-v2", "deberta-v3", "modernbert")
LENGTHS = (12, 5, 9, 7, 12, 3)
FROZEN = {"regularization": {"freeze_layers": 1, "frozen_dropout": False, "dropout": 0.3}}
KEPT = {"execution": {"frozen_cache_bytes": 2**30}}


class Squares:
    """A loss that is a sum over rows."""

    inputs: ClassVar[tuple[str, ...]] = MODEL_INPUTS
    padded: ClassVar[tuple[str, ...]] = MODEL_INPUTS

    def batch_weight(self, batch: Batch) -> torch.Tensor:
        """The number of rows."""
        return torch.tensor(float(len(batch["input_ids"])))

    def loss_sum(self, outputs: Outputs, batch: Batch) -> torch.Tensor:
        """Of the squared scores."""
        del batch
        assert isinstance(outputs, torch.Tensor)
        return outputs.square().sum()


def rows(lengths: tuple[int, ...] = LENGTHS) -> TokenSet:
    """Rows of random tokens and segments."""
    generator = torch.Generator().manual_seed(2)
    starts = torch.zeros(len(lengths) + 1, dtype=torch.int64)
    starts[1:] = torch.tensor(lengths).cumsum(0)
    ids = torch.randint(5, 30, (int(starts[-1]),), generator=generator, dtype=torch.int32)
    return TokenSet(ids, (ids % 2).to(torch.uint8), starts, torch.zeros(len(lengths)))


def built(folder: Path, dtype: torch.dtype, *, dropout: float = 0.3, recompute: bool = False) -> EncoderWithHead:
    """A model with one frozen layer of two, that stays in eval mode."""
    encoder = encoders.with_dropouts(folder, dtype, dropout=dropout)
    if recompute:
        enable_checkpointing(encoder, reentrant=False)
    torch.manual_seed(0)
    model = EncoderWithHead(encoder, HeadSpec(HeadSettings(layers=1, dropout=dropout), num_outputs=3)).to(dtype)
    freeze(model, 1, dropout=False)
    return model.train()


def trained(
    model: EncoderWithHead, tokens: TokenSet, around: Callable[[], Any] = nullcontext
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """The losses and outputs of three steps in micro-batches, and the last step's gradients."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    numbers: list[torch.Tensor] = []
    torch.manual_seed(1)
    for picked in ([0, 1, 2, 3], [4, 1, 5], [5, 3, 2, 0]):
        optimizer.zero_grad()
        batch = pad_rows(tokens, picked, pad_id=0)
        loss = backward_batch(
            model,
            batch,
            Squares(),
            micro_batch=2,
            backward=lambda loss: loss.backward(),
            autocast=around,
            check=lambda outputs, *_: numbers.append(outputs.detach().clone()),  # pyright: ignore
        )
        numbers.append(loss)
        optimizer.step()
    return numbers, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def with_states(
    model: EncoderWithHead, tokens: TokenSet, folder: Path, autocast: torch.dtype | None = None, **around: Any
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """The same with what the frozen layers give from a file; every micro-batch takes it from there."""
    layers = FrozenLayers(model, 1, autocast)
    own = distinct_rows((tokens,), types=model.takes_types)
    with layers.connected():
        model.eval()
        check_soundness(layers, own)
        file, _ = states_of(layers, own, StatesFolder(folder, 2**30))
        with file:
            layers.serve(file)
            model.train()
            before = layers.served
            result = trained(model, tokens, **around)
            assert layers.served - before == 6
    assert not any("forward" in module.__dict__ for module in model.modules())
    return result


def apart(one: tuple[list[torch.Tensor], dict[str, torch.Tensor]], other: Any) -> float:
    """The largest difference of any number, relative to the largest of its tensor where that is above 1e-3."""
    assert one[1].keys() == other[1].keys() and one[1]
    pairs = [*zip(one[0], other[0], strict=True), *((one[1][name], other[1][name]) for name in one[1])]
    return max(float((a - b).abs().max()) / max(float(b.abs().max()), 1e-3) for a, b in pairs)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: encoders.model(tmp_path_factory.mktemp(name), name) for name in encoders.CONFIGS}


def test_only_what_is_frozen_stays_in_eval_mode(folders: dict[str, Path]) -> None:
    model = built(folders["bert"], torch.float32)
    encoder: Any = model.encoder
    for mode in (True, False, True):
        model.train(mode)
        layers = encoder.encoder.layer
        assert (encoder.training, layers[1].training, model.head.training) == (mode, mode, mode)
        frozen = (*encoder.embeddings.modules(), *layers[0].modules())
        assert not any(module.training for module in frozen)
        assert all(module.training is mode for module in layers[1].modules())
    other = EncoderWithHead(encoders.with_dropouts(folders["bert"], torch.float32, dropout=0.3), model.spec)
    freeze(other, 1)
    assert all(module.training for module in other.train().modules())


@pytest.mark.parametrize("name", PLAIN)
def test_states_of_a_file_change_no_number_in_fp64(folders: dict[str, Path], name: str, tmp_path: Path) -> None:
    want = trained(built(folders[name], torch.float64), rows())
    have = with_states(built(folders[name], torch.float64), rows(), tmp_path)
    assert apart(have, want) <= 1e-12
    if name != "electra":  # it recomputes nothing of what is frozen, as the others
        again = with_states(built(folders[name], torch.float64, recompute=True), rows(), tmp_path)
        assert apart(again, want) <= 1e-12


@pytest.mark.parametrize("name", ["bert", "deberta-v3", "modernbert"])
def test_in_fp32_and_bf16_they_differ_by_rounding(folders: dict[str, Path], name: str, tmp_path: Path) -> None:
    exact = trained(built(folders[name], torch.float64), rows())
    plain = trained(built(folders[name], torch.float32), rows())
    taken = with_states(built(folders[name], torch.float32), rows(), tmp_path)
    assert apart(taken, plain) <= 1e-4

    def bf16() -> Any:
        return torch.autocast("cpu", dtype=torch.bfloat16)

    plain = trained(built(folders[name], torch.float32), rows(), around=bf16)
    taken = with_states(built(folders[name], torch.float32), rows(), tmp_path, torch.bfloat16, around=bf16)
    assert apart(taken, exact) <= 2 * apart(plain, exact) + 1e-2


@pytest.mark.parametrize(
    ("name", "reason"), [("convbert", "no function of the row alone"), ("xlnet", r"not \(rows, tokens, width\)")]
)
def test_layers_that_cannot_be_left_out_are_refused(folders: dict[str, Path], name: str, reason: str) -> None:
    """ConvBERT's windows reach into the padding; XLNet's hidden states are (tokens, rows, width)."""
    model = built(folders[name], torch.float32)
    layers = FrozenLayers(model, 1)
    with layers.connected(), pytest.raises(NoStatesError, match=reason):
        check_soundness(layers, distinct_rows((rows(),), types=model.takes_types))


def test_weights_rows_and_number_format_have_files_of_their_own(folders: dict[str, Path], tmp_path: Path) -> None:
    def write(model: EncoderWithHead, tokens: TokenSet, autocast: torch.dtype | None = None) -> float | None:
        layers = FrozenLayers(model.eval(), 1, autocast)
        with layers.connected():
            own = distinct_rows((tokens,), types=model.takes_types)
            file, seconds = states_of(layers, own, StatesFolder(tmp_path, 2**30))
            file.__exit__()
        return seconds

    model = built(folders["bert"], torch.float32)
    assert write(model, rows()) is not None
    assert write(model, rows()) is None
    assert write(built(folders["bert"], torch.float32, dropout=0.1), rows()) is None, "dropout decides nothing here"
    shuffled = rows(LENGTHS)
    swapped = distinct_rows((shuffled,), types=True).keys()
    assert swapped == distinct_rows((shuffled, shuffled), types=True).keys()
    assert write(model, rows((12, 5, 9, 7, 12, 4))) is not None
    assert write(model, rows(), torch.bfloat16) is not None
    with torch.no_grad():
        nn.init.normal_(next(model.encoder.parameters()))
    assert write(model, rows()) is not None
    assert len(list(tmp_path.glob("*.states"))) == 4


def notes(channel: trials.ScriptedChannel) -> list[str]:
    """What the trial's story says of frozen layers."""
    return [message.text for message in channel.messages() if isinstance(message, Note) and "frozen" in message.text]


def test_trials_share_what_frozen_layers_give(tmp_path: Path) -> None:
    encoder = tiny.model(tmp_path / "model")
    plain, channel = trials.small(tmp_path / "plain", encoder=encoder, **FROZEN).run()
    assert notes(channel) == [] and plain.value is not None
    shared = trials.small(tmp_path / "shared", encoder=encoder, **FROZEN, **KEPT)
    first, channel = shared.run()
    assert [note.split(": ")[1].split(" in ")[0] for note in notes(channel)] == ["computed"]
    again = trials.Trial(tmp_path / "shared", encoder=encoder, data=shared.data.model_dump(), **FROZEN, **KEPT)
    second, channel = again.run()
    assert [note.split(": ")[1] for note in notes(channel)] == ["read from the study's cache"]
    assert first == second
    assert first.value == pytest.approx(plain.value, rel=1e-5)


@pytest.mark.parametrize(
    ("tables", "reason"),
    [
        ({"execution": {"frozen_cache_bytes": 1000}}, "they take 0 MiB, and execution.frozen_cache is 0 MiB"),
        (trials.merged(KEPT, {"execution": {"checkpointing": True, "reentrant": True}}), "execution.reentrant = true"),
    ],
)
def test_the_story_says_why_nothing_is_shared(tables: Any, reason: str, tmp_path: Path) -> None:
    trial = trials.small(tmp_path, encoder=tiny.model(tmp_path / "model"), **FROZEN, **tables)
    result, channel = trial.run()
    assert result.steps == 10
    assert len(notes(channel)) == 1 and reason in notes(channel)[0]
