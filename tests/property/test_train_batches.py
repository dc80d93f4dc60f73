import torch
from hypothesis import given
from hypothesis import strategies as st

from dryfit.training.batches import EpochBatchSampler, epoch_batches, evaluation_batches
from dryfit.training.trainer import evaluation_steps

LENGTHS = st.lists(st.integers(1, 500), min_size=1, max_size=300)


@given(LENGTHS, st.integers(0, 2**31 - 1), st.integers(0, 50), st.integers(1, 40), st.booleans())
def test_each_row_once_in_full_batches(
    lengths: list[int], seed: int, epoch: int, batch_size: int, group_by_length: bool
) -> None:
    args = {"seed": seed, "epoch": epoch, "batch_size": batch_size, "group_by_length": group_by_length}
    batches = epoch_batches(torch.tensor(lengths), **args)
    assert sorted(row for batch in batches for row in batch) == list(range(len(lengths)))
    sizes = sorted((len(batch) for batch in batches), reverse=True)
    rest = len(lengths) % batch_size
    assert sizes == [batch_size] * (len(lengths) // batch_size) + ([rest] if rest else [])
    torch.manual_seed(99)  # the global state plays no part
    assert epoch_batches(torch.tensor(lengths), **args) == batches
    sampler = EpochBatchSampler(
        torch.tensor(lengths), seed=seed, batch_size=batch_size, group_by_length=group_by_length
    )
    sampler.set_epoch(epoch)
    assert list(sampler) == batches
    assert len(sampler) == len(batches)


@given(LENGTHS, st.integers(1, 40))
def test_evaluation_batches_hold_all_rows_longest_first(lengths: list[int], batch_size: int) -> None:
    batches = evaluation_batches(torch.tensor(lengths), batch_size)
    order = [row for batch in batches for row in batch]
    assert sorted(order) == list(range(len(lengths)))
    assert [lengths[row] for row in order] == sorted(lengths, reverse=True)


@given(st.integers(1, 500), st.integers(1, 20), st.data())
def test_validations_are_even_and_end_each_epoch(steps_per_epoch: int, epochs: int, data: st.DataObject) -> None:
    evals = data.draw(st.integers(1, min(steps_per_epoch, 30)))
    steps = sorted(evaluation_steps(steps_per_epoch=steps_per_epoch, evals_per_epoch=evals, epochs=epochs))
    assert len(steps) == evals * epochs
    assert {epoch * steps_per_epoch for epoch in range(1, epochs + 1)} <= set(steps)
    gaps = [after - before for before, after in zip([0, *steps], steps, strict=False)]
    assert max(gaps) - min(gaps) <= 1
