"""Random programs on a virtual GPU beside the same ones on the CPU: ``python values_beside.py SEED PROGRAMS``.

Prints, as JSON, how many values were known of how many, and each one that was not the CPU's.
"""

import json
import random
import sys
from typing import Any

import dryfit

STEPS = 25


def main(seed: int, programs: int) -> None:
    """Run the programs, and look at every tensor of one after each of its steps."""
    with dryfit.virtual_gpu("1GiB"):
        import torch

        from dryfit.gpu.values import value_of

        draw = random.Random(seed)
        torch.manual_seed(seed)
        known, seen, wrong = 0, 0, []

        def tensor() -> tuple[Any, Any]:
            real = torch.randint(-3, 4, (3, 4), dtype=torch.int64)
            return real.to("cuda"), real.clone()

        def unknown() -> tuple[Any, Any]:
            """What nobody can know: the fake has come from random numbers of the device."""
            real = torch.randint(-3, 4, (3, 4), dtype=torch.int64)
            return torch.rand(3, 4, device="cuda").long(), real

        def raw() -> tuple[Any, Any]:
            """Memory that nobody has written to yet."""
            real = torch.randint(-3, 4, (3, 4), dtype=torch.int64)
            made = torch.empty(3, 4, dtype=torch.int64)
            return draw.choice([made.to("cuda"), torch.nn.Parameter(made, False), torch.empty_like(made).cuda()]), real

        def initialised() -> tuple[Any, Any]:
            real = torch.full((3, 4), 2)
            made = torch.nn.Parameter(torch.empty(3, 4, dtype=torch.int64), False)
            return torch.nn.init.constant_(made, 2), real

        def drawn() -> tuple[Any, Any]:
            real = torch.zeros(3, 4).uniform_(1, 2)
            return torch.nn.init.uniform_(torch.nn.Parameter(torch.zeros(3, 4), False), 1, 2), real

        def shared() -> tuple[Any, Any]:
            """A parameter on memory of the host, which is written to afterwards."""
            made = torch.empty(3, 4, dtype=torch.int64)
            parameter = torch.nn.Parameter(made, False)
            real = torch.randint(-3, 4, (3, 4), dtype=torch.int64)
            made.copy_(real)
            return parameter, real

        makers = (unknown, raw, initialised, drawn, shared)
        views = {
            "row": lambda one: one[1:],
            "column": lambda one: one[..., :2],
            "transposed": lambda one: one.transpose(0, -1),
            "alias": lambda one: one.detach(),
            "data": lambda one: one.data,
            "parts": lambda one: one.chunk(2, -1)[-1],
            "first": lambda one: one.unbind(0)[0].unsqueeze(0),
            "element": lambda one: one.select(-1, 0).unsqueeze(-1),
            "flat": lambda one: one.flatten(),
        }
        makes = {
            "sum": lambda one: one + 1,
            "mask": lambda one: one * (one > 0),
            "last": lambda one: one.cumsum(-1),
            "copy": lambda one: one.clone(),
            "joined": lambda one: torch.cat([one, one], -1),
        }
        changes = {
            "add": lambda one: one.add_(2),
            "fill": lambda one: one.fill_(5),
            "zero": lambda one: one.zero_(),
            "positive": lambda one: one.masked_fill_(one > 0, 7),
            "set": lambda one: one.__setitem__((Ellipsis, 0), 4),
            "set where": lambda one: one.__setitem__(one < 0, -9),
            "double": lambda one: one.mul_(one),
        }
        for program in range(programs):
            pairs, story = [tensor(), tensor(), draw.choice(makers)()], []
            for _ in range(STEPS):
                fake, real = draw.choice(pairs)
                kind = draw.choice(["view", "make", "change", "change", "spoil", "into"])
                if not real.numel():
                    continue
                match kind:
                    case "view" | "make":
                        name, act = draw.choice(list((views if kind == "view" else makes).items()))
                        pairs.append((act(fake), act(real)))
                    case "change":
                        name, act = draw.choice(list(changes.items()))
                        act(fake)
                        act(real)
                    case "spoil":
                        if draw.random() < 0.7:
                            continue
                        name = "spoil"
                        fake.add_(
                            torch.rand(fake.shape, device="cuda").long() if fake.is_cuda else torch.empty_like(fake)
                        )
                        real.add_(torch.randint(0, 9, real.shape))
                    case _:
                        name = "into"
                        fake[..., 0], real[..., 0] = (pair.flatten()[0] for pair in draw.choice(pairs))
                story.append(name)
                for at, (fake, real) in enumerate(pairs):
                    value = value_of(fake)
                    seen += 1
                    known += value is not None
                    if value is not None and not torch.equal(value, real):
                        wrong.append([program, at, *story])
                if wrong:
                    break
        print(json.dumps({"known": known, "seen": seen, "wrong": wrong}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
