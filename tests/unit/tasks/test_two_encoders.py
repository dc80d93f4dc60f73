"""How a criterion comes into the token vectors of a text: against formulas in fp64, with gradients."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import encoders
import tiny
from dryfit.meta.checkpoint_files import FolderSource
from dryfit.meta.pretrained import Kind, load_pretrained
from dryfit.settings.choices import Fusion, Weighting
from dryfit.settings.errors import ConfigError
from dryfit.settings.tables import HeadSettings, JointSettings
from dryfit.tasks.heads import HeadSpec
from dryfit.tasks.joint import CriterionFusion, TwoEncoders, share_layers

B, L, K = 7, 19, 6


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory):
    """Encoders of widths 32 and 48."""
    folder = tmp_path_factory.mktemp("models")
    sources = tiny.model(folder / "text"), tiny.model(folder / "criteria", "distilbert", dim=48, hidden_dim=64)
    return tuple(load_pretrained(FolderSource(str(source)), Kind.ENCODER)[0] for source in sources)


def drawn(width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(3)
    hidden = torch.randn(B, L, 32, dtype=torch.float64, generator=rng, requires_grad=True)
    criterion = torch.randn(B, K, width, dtype=torch.float64, generator=rng, requires_grad=True)
    lengths = torch.randint(1, K + 1, (B,), generator=rng)
    return hidden, criterion, (torch.arange(K) < lengths[:, None]).long()


def reference(fusion: CriterionFusion, hidden: torch.Tensor, criterion: torch.Tensor, mask: torch.Tensor):
    """Row by row, and of a criterion its own tokens alone."""
    found = []
    for row in range(B):
        h, c = hidden[row], criterion[row, : int(mask[row].sum())]
        if fusion.kind is Fusion.ATTENTION:
            a = fusion.attention
            weights = (a.in_proj_weight.chunk(3) if a._qkv_same_embed_dim else None) or (
                a.q_proj_weight,
                a.k_proj_weight,
                a.v_proj_weight,
            )
            q, k, v = (F.linear(x, w, b) for x, w, b in zip((h, c, c), weights, a.in_proj_bias.chunk(3), strict=True))
            heads = []
            for part in range(a.num_heads):
                at = slice(part * a.head_dim, (part + 1) * a.head_dim)
                heads.append((q[:, at] @ k[:, at].T / a.head_dim**0.5).softmax(dim=-1) @ v[:, at])
            found.append(h + F.linear(torch.cat(heads, dim=-1), a.out_proj.weight, a.out_proj.bias))
            continue
        mean = fusion.project(c.mean(dim=0)).expand_as(h)
        if fusion.kind is Fusion.ADD:
            found.append(h + mean)
            continue
        mixed = torch.cat([h, mean], dim=-1) @ fusion.mix.weight.T + fusion.mix.bias
        gate = 1 / (1 + torch.exp(-mixed))
        found.append(mixed if fusion.kind is Fusion.CONCAT else gate * h + (1 - gate) * mean)
    return torch.stack(found)


@pytest.mark.parametrize("same", [True, False], ids=["one width", "two widths"])
@pytest.mark.parametrize("kind", list(Fusion))
def test_fusion_is_its_formula(pair, kind: Fusion, same: bool) -> None:
    text, criteria = pair
    torch.manual_seed(0)
    fusion = CriterionFusion(kind, text, text if same else criteria, dropout=0.3).double().eval()
    hidden, criterion, mask = drawn(32 if same else 48)
    weights = torch.randn(B, L, 32, dtype=torch.float64)
    have, want = fusion(hidden, criterion, mask), reference(fusion, hidden, criterion, mask)
    inputs = [hidden, criterion, *fusion.parameters()]
    gradients, wanted = (torch.autograd.grad((one * weights).sum(), inputs) for one in (have, want))
    assert float((have - want).detach().norm()) <= 1e-12 * float(want.detach().norm())
    for gradient, expected in zip(gradients, wanted, strict=True):
        # Nothing is learned of the keys' bias: it is the same for all that are attended to.
        assert float((gradient - expected).norm()) <= 1e-12 * max(float(expected.norm()), 1.0)
    assert gradients[1][mask == 0].count_nonzero() == 0
    assert gradients[1][mask == 1].norm(dim=-1).min() > 0


@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert", "electra", "deberta-v2", "modernbert", "xlnet"])
def test_what_is_shared_is_the_first_layers(tmp_path: Path, name: str) -> None:
    folder = encoders.model(tmp_path, name)
    inputs = torch.randint(5, 30, (3, 12), generator=torch.Generator().manual_seed(1))
    for ratio, layers in ((0.5, 1), (1.0, 2), (0.2, 0)):
        first, second = (load_pretrained(FolderSource(str(folder)), Kind.ENCODER)[0].eval() for _ in range(2))
        before = second(inputs)[0]
        share_layers(first, second, JointSettings(share_ratio=ratio))
        assert torch.equal(second(inputs)[0], before)  # they were equal, and still are
        text, criteria = (dict(one.named_parameters()) for one in (first, second))
        shared = {key for key in text if text[key] is criteria[key]}
        assert any("embed" in key for key in shared)
        numbers = {int(part) for key in shared for part in key.split(".")[:-1] if part.isdigit()}
        assert numbers >= set(range(layers))
        assert (shared == text.keys()) == (ratio == 1)
        second(inputs)[0].sum().backward()
        assert all(text[key].grad is not None for key in shared if criteria[key].grad is not None)
        assert all(text[key].grad is None for key in text if key not in shared)


def test_nothing_is_shared_of_two_models(pair) -> None:
    text, criteria = pair
    with pytest.raises(ConfigError, match="the criterion's encoder is other"):
        share_layers(text, criteria, JointSettings(share_ratio=0.5, criteria_model="other"))


def test_what_a_window_is_scored_depends_on_its_own_criterion(pair) -> None:
    text, criteria = pair
    spec = HeadSpec(HeadSettings(), 3)
    torch.manual_seed(0)
    model = TwoEncoders(text, criteria, JointSettings(), spec, Weighting.FIXED, {}).eval()
    rng = torch.Generator().manual_seed(2)
    ids, asked = (torch.randint(5, 40, (4, size), generator=rng) for size in (11, 5))
    mask, asked_mask = torch.ones_like(ids), torch.ones_like(asked)
    before = model(ids, mask, asked, asked_mask)
    assert [tuple(one.shape) for one in before] == [(4, 3), (4, 11, 2)]
    asked[2] += 1
    after = model(ids, mask, asked, asked_mask)
    for one, other in zip(before, after, strict=True):
        same = [torch.allclose(one[row], other[row], atol=1e-6) for row in range(4)]
        assert same == [True, True, False, True]
