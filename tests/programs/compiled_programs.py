"""Programs that compile what they train, as people write them: ``compiled_programs.py NAME [MODE]``.

MODE is one of ``torch.compile``, or ``eager``: then nothing is compiled.
"""

import sys
import tempfile

import torch
from torch import nn
from torch.nn import functional


class Attention(nn.Module):
    """Causal attention by torch's fused kernels, or written out."""

    def __init__(self, width: int, heads: int, *, written_out: bool = False, causal: bool = True) -> None:
        super().__init__()
        self.heads, self.written_out, self.causal = heads, written_out, causal
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        rows, length, width = x.shape
        q, k, v = self.qkv(x).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if self.written_out:
            scores = (q @ k.transpose(-2, -1)) / (width // self.heads) ** 0.5
            seen = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
            y = functional.softmax(scores.masked_fill(~seen, float("-inf")), dim=-1) @ v
        else:
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(y.transpose(1, 2).reshape(rows, length, width))


class Block(nn.Module):
    """A layer of a transformer."""

    def __init__(self, width: int, heads: int, *, mlp: nn.Module | None = None, **options: bool) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, **options)
        up, down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.mlp = mlp or nn.Sequential(up, nn.GELU(), down, nn.Dropout(0.1))

    def forward(self, x):
        x = x + self.attention(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    """A decoder with its loss."""

    def __init__(self, vocabulary: int, width: int, layers: int, heads: int, length: int, **options: bool) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads, **options) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids, labels):
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.view(-1, logits.shape[-1]).float(), labels.view(-1))


class Residual(nn.Module):
    """Two convolutions with batch norm, or group norm, around which the input goes."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1, *, groups: int = 0) -> None:
        super().__init__()
        norm = (lambda n: nn.GroupNorm(groups, n)) if groups else nn.BatchNorm2d
        self.conv1, self.norm1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), norm(outputs)
        self.conv2, self.norm2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), norm(outputs)
        is_same = (inputs, stride) == (outputs, 1)
        self.down = nn.Identity() if is_same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x):
        y = functional.relu(self.norm1(self.conv1(x)))
        return functional.relu(self.norm2(self.conv2(y)) + self.down(x))


class ResNet(nn.Module):
    """ResNet-18's shape."""

    def __init__(self) -> None:
        super().__init__()
        first = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.stem = nn.Sequential(first, nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        widths = ((64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1))
        widths += ((128, 256, 2), (256, 256, 1), (256, 512, 2), (512, 512, 1))
        self.layers = nn.Sequential(*(Residual(*one) for one in widths))
        self.head = nn.Linear(512, 1000)

    def forward(self, x, labels):
        return functional.cross_entropy(self.head(self.layers(self.stem(x)).mean((2, 3))), labels)


class UNet(nn.Module):
    """Down and up again, with what was computed on the way down beside it; of diffusion: with a time."""

    def __init__(self, *, diffusion: bool = False) -> None:
        super().__init__()
        groups = 32 if diffusion else 0
        self.first = nn.Conv2d(3, 64, 3, 1, 1)
        self.down = nn.ModuleList(Residual(64 * 2**n, 128 * 2**n, 2, groups=groups) for n in range(3))
        self.up = nn.ModuleList(nn.ConvTranspose2d(128 * 2**n, 64 * 2**n, 2, 2) for n in reversed(range(3)))
        self.merge = nn.ModuleList(Residual(128 * 2**n, 64 * 2**n, groups=groups) for n in reversed(range(3)))
        self.last = nn.Conv2d(64, 3, 1)
        self.time = nn.Sequential(nn.Linear(64, 512), nn.SiLU(), nn.Linear(512, 512)) if diffusion else None
        self.middle = Block(512, 8, causal=False) if diffusion else None

    def forward(self, x, target, time):
        x, kept = self.first(x), []
        for layer in self.down:
            kept.append(x)
            x = layer(x)
        if self.time is not None:
            angles = time[:, None] * torch.exp(-torch.arange(32, device=x.device) / 4)
            x = x + self.time(torch.cat((angles.sin(), angles.cos()), 1))[:, :, None, None]
            rows, width, high, wide = x.shape
            x = self.middle(x.flatten(2).transpose(1, 2)).transpose(1, 2).view(rows, width, high, wide)
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat((up(x), kept.pop()), 1))
        return functional.mse_loss(self.last(x), target)


class ViT(nn.Module):
    """Patches, layers, a class."""

    def __init__(self, width: int = 768, layers: int = 6) -> None:
        super().__init__()
        self.patches, self.token = nn.Conv2d(3, width, 16, 16), nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(torch.zeros(1, 197, width))
        self.blocks = nn.Sequential(*(Block(width, 12, causal=False) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1000)

    def forward(self, x, labels):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(len(x), -1, -1), x), 1) + self.places
        return functional.cross_entropy(self.head(self.norm(self.blocks(x))[:, 0]), labels)


class RNN(nn.Module):
    """A recurrent layer written as a loop."""

    def __init__(self, width: int = 1024) -> None:
        super().__init__()
        self.tokens, self.input = nn.Embedding(8000, width), nn.Linear(width, width)
        self.state = nn.Linear(width, width)
        self.head = nn.Linear(width, 8000)

    def forward(self, ids, labels):
        given, states = self.input(self.tokens(ids)), []
        state = torch.zeros_like(given[:, 0])
        for step in range(ids.shape[1]):
            state = torch.tanh(given[:, step] + self.state(state))
            states.append(state)
        return functional.cross_entropy(self.head(torch.stack(states, 1)).flatten(0, 1), labels.flatten())


class Experts(nn.Module):
    """A mixture of experts, all of which see all tokens, by their weights."""

    def __init__(self, width: int, experts: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.first = nn.Parameter(torch.randn(experts, width, 2 * width) * 0.02)
        self.second = nn.Parameter(torch.randn(experts, 2 * width, width) * 0.02)

    def forward(self, x):
        shares = self.gate(x).softmax(-1)
        chosen, index = shares.topk(2, dim=-1)
        weights = torch.zeros_like(shares).scatter(-1, index, chosen)
        hidden = functional.silu(torch.einsum("bld,edf->eblf", x, self.first))
        return torch.einsum("eblf,efd,ble->bld", hidden, self.second, weights)


def ids(vocabulary: int, rows: int, length: int):
    """Return tokens and labels."""
    return [torch.randint(vocabulary, (rows, length), device="cuda") for _ in range(2)]


def images(rows: int, size: int):
    """Return images and classes."""
    return torch.randn(rows, 3, size, size, device="cuda"), torch.randint(1000, (rows,), device="cuda")


def train(model: nn.Module, batch, mode: str, *, by_layer: bool = False) -> None:
    """Train three steps in bfloat16 by autocast."""
    model = model.cuda()
    options = {} if mode in ("default", "eager") else {"mode": mode}
    if mode != "eager" and by_layer:
        for layer in model.blocks:
            layer.compile(**options)
    elif mode != "eager":
        model = torch.compile(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(3):
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(*batch())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def train_by_trainer(name: str, mode: str) -> None:
    """Train a model of transformers by its Trainer."""
    import transformers

    shape = {"hidden_size": 768, "num_hidden_layers": 6, "num_attention_heads": 12, "vocab_size": 30000}
    if name == "bert":
        model = transformers.BertForMaskedLM(transformers.BertConfig(**shape, intermediate_size=3072))
    else:
        config = transformers.LlamaConfig(**shape, intermediate_size=2048, use_cache=False)
        model = transformers.LlamaForCausalLM(config)
    rows = [{"input_ids": (row := torch.randint(30000, (512,))), "labels": row} for _ in range(64)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder, per_device_train_batch_size=8, bf16=True, torch_compile=mode != "eager", max_steps=3,
            report_to="none", save_strategy="no",
        )  # fmt: skip
        transformers.Trainer(model, arguments, train_dataset=rows).train()


def main(name: str, mode: str = "default") -> None:
    """Run a program."""
    size = 256
    match name:
        case "gpt":
            train(GPT(50304, 768, 12, 12, 1024), lambda: ids(50304, 8, 1024), mode)
        case "nanogpt":
            train(GPT(50304, 384, 6, 6, 256, written_out=True), lambda: ids(50304, 32, 256), mode)
        case "resnet":
            train(ResNet(), lambda: images(64, 224), mode)
        case "unet":
            train(UNet(), lambda: (images(16, size)[0], images(16, size)[0], None), mode)
        case "vit":
            train(ViT(), lambda: images(64, 224), mode)
        case "rnn":
            train(RNN(), lambda: ids(8000, 64, 32), mode)
        case "bert" | "llama":
            train_by_trainer(name, mode)
        case "layers":
            train(GPT(50304, 768, 6, 12, 1024), lambda: ids(50304, 8, 1024), mode, by_layer=True)
        case "diffusion":
            target = lambda: images(16, 128)[0]  # noqa: E731
            train(UNet(diffusion=True), lambda: (target(), target(), torch.rand(16, device="cuda")), mode)
        case "moe":
            model = GPT(32000, 512, 4, 8, 512)
            for block in model.blocks:
                block.mlp = Experts(512)
            train(model, lambda: ids(32000, 16, 512), mode)


if __name__ == "__main__":
    main(*sys.argv[1:3])
