"""A loop with Accelerate: accumulation, clipping, a schedule, evaluation, and a batch size that it finds by itself."""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import find_executable_batch_size, set_seed
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, get_linear_schedule_with_warmup

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=32)
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--vocabulary", type=int, default=100)
parser.add_argument("--length", type=int, default=16)
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--rows", type=int, default=64)
parser.add_argument("--accumulation", type=int, default=2)
parser.add_argument("--precision", default="no")
args = parser.parse_args()


def collate(indices):
    rows = [torch.randint(args.vocabulary, (args.length,), generator=torch.Generator().manual_seed(i)) for i in indices]
    tokens = torch.stack(rows)
    return {"input_ids": tokens, "labels": tokens}


accelerator = Accelerator(gradient_accumulation_steps=args.accumulation, mixed_precision=args.precision)


@find_executable_batch_size(starting_batch_size=args.batch)
def train(batch_size):
    accelerator.free_memory()
    accelerator.print(f"batches of {batch_size}")
    set_seed(0)
    config = GPT2Config(
        vocab_size=args.vocabulary,
        n_embd=args.width,
        n_layer=args.layers,
        n_head=4,
        n_positions=args.length,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    train_loader = DataLoader(range(args.rows), batch_size=batch_size, shuffle=True, collate_fn=collate)
    eval_loader = DataLoader(range(args.rows, args.rows + 12), batch_size=batch_size, collate_fn=collate)
    schedule = get_linear_schedule_with_warmup(optimizer, 2, len(train_loader))
    model, optimizer, train_loader, eval_loader, schedule = accelerator.prepare(
        model, optimizer, train_loader, eval_loader, schedule
    )
    model.train()
    for batch in train_loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    model.eval()
    losses = []
    for batch in eval_loader:
        with torch.no_grad():
            loss = model(**batch).loss
        losses.append(accelerator.gather_for_metrics(loss.repeat(len(batch["input_ids"]))))
    counted = torch.cat(losses)
    assert len(counted) == 12, f"{len(counted)} rows were evaluated"
    accelerator.print(f"validation loss {counted.mean().item():.3f}")


train()
