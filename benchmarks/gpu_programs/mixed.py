"""Models of other kinds in a bare loop: a recurrent one, a U-Net with attention, a mixture of experts, a GAN."""

import argparse
import itertools

import torch
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--kind", choices=["lstm", "gru", "unet", "experts", "gan", "seq2seq", "bags"], required=True)
parser.add_argument("--batch", type=int, default=32)
parser.add_argument("--steps", type=int, default=12)
parser.add_argument("--bf16", action="store_true")
args = parser.parse_args()
torch.manual_seed(0)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32000, 1024)
        self.layers = getattr(nn, args.kind.upper())(1024, 1024, num_layers=3, batch_first=True, dropout=0.1)
        self.head = nn.Linear(1024, 32000)

    def forward(self):
        ids = torch.randint(32000, (args.batch, 257)).cuda()
        return F.cross_entropy(self.head(self.layers(self.embed(ids[:, :-1]))[0]).flatten(0, 1), ids[:, 1:].flatten())


class Stage(nn.Module):
    def __init__(self, into, out):
        super().__init__()
        self.norm, self.conv = nn.GroupNorm(32, into), nn.Conv2d(into, out, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(32, out), nn.Conv2d(out, out, 3, padding=1)
        self.skip = nn.Conv2d(into, out, 1) if into != out else nn.Identity()

    def forward(self, x):
        y = self.conv(F.silu(self.norm(x)))
        return self.skip(x) + self.conv2(F.silu(self.norm2(y)))


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        sizes = (128, 256, 384, 512)
        self.stem = nn.Conv2d(4, sizes[0], 3, padding=1)
        self.down = nn.ModuleList(Stage(a, b) for a, b in itertools.pairwise(sizes))
        self.attention = nn.MultiheadAttention(512, 8, batch_first=True)
        self.up = nn.ModuleList(Stage(a + b, b) for a, b in zip(sizes[:0:-1], sizes[-2::-1], strict=True))
        self.last = nn.Conv2d(sizes[0], 4, 3, padding=1)

    def forward(self):
        noise = torch.randn(args.batch, 4, 64, 64, device="cuda")
        x, kept = self.stem(noise), []
        for stage in self.down:
            kept.append(x)
            x = F.avg_pool2d(stage(x), 2)
        rows = x.flatten(2).transpose(1, 2)
        x = x + self.attention(rows, rows, rows, need_weights=False)[0].transpose(1, 2).reshape(x.shape)
        for stage in self.up:
            x = stage(torch.cat([F.interpolate(x, scale_factor=2), kept.pop()], dim=1))
        return F.mse_loss(self.last(x), noise)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32000, 1024)
        self.gate = nn.Linear(1024, 8)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(1024, 4096), nn.SiLU(), nn.Linear(4096, 1024)) for _ in range(8)
        )
        self.head = nn.Linear(1024, 32000)

    def forward(self):
        ids = torch.randint(32000, (args.batch, 257)).cuda()
        x = self.embed(ids[:, :-1])
        odds = self.gate(x).softmax(-1)
        mixed = sum(expert(x) * odds[..., at : at + 1] for at, expert in enumerate(self.experts))
        return F.cross_entropy(self.head(x + mixed).flatten(0, 1), ids[:, 1:].flatten())


class Seq2Seq(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32000, 512)
        self.core = nn.Transformer(512, 8, 6, 6, 2048, batch_first=True)
        self.head = nn.Linear(512, 32000)

    def forward(self):
        source, target = torch.randint(32000, (2, args.batch, 128)).cuda()
        mask = nn.Transformer.generate_square_subsequent_mask(128, device="cuda")
        out = self.core(self.embed(source), self.embed(target), tgt_mask=mask, tgt_is_causal=True)
        return F.cross_entropy(self.head(out).flatten(0, 1), target.flatten())


class Bags(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(1_000_000, 64, mode="sum")
        self.head = nn.Sequential(nn.Linear(64, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Linear(512, 1))

    def forward(self):
        ids = torch.randint(1_000_000, (args.batch * 64, 50)).cuda()
        return F.binary_cross_entropy_with_logits(self.head(self.bag(ids)).squeeze(1), torch.ones(len(ids)).cuda())


def gan():
    maker = nn.Sequential(
        nn.ConvTranspose2d(128, 512, 4, 1, 0), nn.BatchNorm2d(512), nn.ReLU(),
        nn.ConvTranspose2d(512, 256, 4, 2, 1), nn.BatchNorm2d(256), nn.ReLU(),
        nn.ConvTranspose2d(256, 128, 4, 2, 1), nn.BatchNorm2d(128), nn.ReLU(),
        nn.ConvTranspose2d(128, 3, 4, 2, 1), nn.Tanh(),
    ).cuda()  # fmt: skip
    judge = nn.Sequential(
        nn.Conv2d(3, 128, 4, 2, 1), nn.LeakyReLU(0.2),
        nn.Conv2d(128, 256, 4, 2, 1), nn.BatchNorm2d(256), nn.LeakyReLU(0.2),
        nn.Conv2d(256, 1, 8),
    ).cuda()  # fmt: skip
    of_maker, of_judge = (torch.optim.Adam(one.parameters(), 2e-4, (0.5, 0.999)) for one in (maker, judge))
    for _ in range(args.steps):
        real = torch.rand(args.batch * 8, 3, 32, 32).cuda()
        made = maker(torch.randn(args.batch * 8, 128, 1, 1, device="cuda"))
        of_judge.zero_grad()
        (F.softplus(-judge(real)).mean() + F.softplus(judge(made.detach())).mean()).backward()
        of_judge.step()
        of_maker.zero_grad()
        F.softplus(-judge(made)).mean().backward()
        of_maker.step()


if args.kind == "gan":
    gan()
else:
    kinds = {"unet": UNet, "experts": Experts, "seq2seq": Seq2Seq, "bags": Bags}
    model = kinds.get(args.kind, Recurrent)().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for _ in range(args.steps):
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=args.bf16):
            loss = model()
        loss.backward()
        optimizer.step()
