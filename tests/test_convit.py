"""ConViT: positional blocks before the prompts, what is read of it, what is refused."""

import numpy as np
import pytest
import timm
import torch
from timm.layers import LayerNorm
from timm.models.convit import ConVit
from torch import nn

from fedscale.models import backbone, convit
from fedscale.models.prompted import Prompted
from fedscale.models.vit import Unsupported

SPEC = backbone.BACKBONES["nano"]
SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 12, "depth": 4, "num_heads": 2}
SMALL |= {"local_up_to_layer": 2, "num_classes": 0}


def small(**options):
    torch.manual_seed(0)
    module = ConVit(**{**SMALL, **options})
    for p in module.parameters():
        p.data += 0.1 * torch.randn_like(p)
    return module.eval().requires_grad_(False)


def images(count):
    return np.random.default_rng(0).integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)


def pixels(batch):
    return (torch.from_numpy(batch).permute(0, 3, 1, 2).float() / 255 - 0.5) / 0.5


def plain(module, x, prompts):
    """The forward pass statement by statement, prompts (B, n, d) with CLS at its block."""
    x = module.patch_embed(x)
    if module.use_pos_embed:
        x = x + module.pos_embed
    for number, block in enumerate(module.blocks):
        if number == module.local_up_to_layer:
            x = torch.cat([module.cls_token.expand(len(x), -1, -1), prompts, x], 1)
        x = block(x)
    return module.norm(x)[:, 0]


def close(a, b, tolerance=1e-5):
    assert float((a - b).norm() / b.norm()) < tolerance


VARIANTS = {
    "small": {},
    "qkv bias": {"qkv_bias": True},
    "no position": {"use_pos_embed": False},
    "no positional block": {"local_up_to_layer": 0},
    "CLS at the last block": {"local_up_to_layer": 3},
    "one block": {"local_up_to_layer": 0, "depth": 1},
    "mlp ratio": {"mlp_ratio": 2},
    "one patch": {"patch_size": 32},
    "torch's norm": {"norm_layer": nn.LayerNorm},
    "dropout at training": {
        "drop_rate": 0.5,
        "pos_drop_rate": 0.5,
        "proj_drop_rate": 0.5,
        "attn_drop_rate": 0.5,
        "drop_path_rate": 0.5,
    },
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_features_and_gradients_are_those_of_timms_modules(variant):
    module, batch, counts = small(**VARIANTS[variant]), images(6), [2, 3, 1]
    model, x = Prompted(module, SPEC), pixels(batch)
    own, weights = torch.randn(3, 4, 24), torch.randn(6, 24)
    expected = own.clone().requires_grad_()
    out = plain(module, x, expected.repeat_interleave(torch.tensor(counts), 0))
    (right,) = torch.autograd.grad((out * weights).sum(), expected)
    close(model.features(model.tokens(batch)), module.forward_features(x)[:, 0])
    for projected in (False, True):
        mine = own.clone().requires_grad_()
        found = model.features(model.tokens(batch, projected=projected), mine, counts)
        (gradient,) = torch.autograd.grad((found * weights).sum(), mine)
        close(found.detach(), out.detach())
        close(gradient, right)
        assert float(gradient.abs().amax(2).min()) > 0


def test_cls_enters_as_it_was_learned():
    """Without a position, and behind the positional blocks."""
    module = small()
    tokens = Prompted(module, SPEC).tokens(images(3))
    assert torch.equal(tokens[:, 0], module.cls_token[0].expand(3, -1))
    x = module.patch_embed(pixels(images(3))) + module.pos_embed
    close(tokens[:, 1:], module.blocks[1](module.blocks[0](x)))


@pytest.mark.parametrize("gate", [-40.0, 40.0])
def test_the_gate_chooses_between_content_and_position(gate):
    """Equations 7–9: closed, attention is that of content; open, that of the grid alone."""
    module, d = small(local_up_to_layer=1), 24
    attention, batch = module.blocks[0].attn, images(2)
    attention.gating_param.data[:] = gate
    y = module.blocks[0].norm1(module.patch_embed(pixels(batch)) + module.pos_embed)
    if gate < 0:
        q, k = attention.qk(y).view(2, 16, 2, 2, 12).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT / 12**0.5
    else:
        at = torch.cartesian_prod(torch.arange(4.0), torch.arange(4.0)).flip(1)  # (x, y)
        apart = at[None] - at[:, None]
        relative = torch.cat([apart, apart.square().sum(2, keepdim=True)], 2)
        scores = attention.pos_proj(relative).permute(2, 0, 1).expand(2, -1, -1, -1)
    v = attention.v(y).view(2, 16, 2, 12).transpose(1, 2)
    mixed = attention.proj((scores.softmax(3) @ v).transpose(1, 2).reshape(2, 16, d))
    x = module.patch_embed(pixels(batch)) + module.pos_embed + mixed
    x = x + module.blocks[0].mlp(module.blocks[0].norm2(x))
    close(Prompted(module, SPEC).tokens(batch)[:, 1:], x)


def test_an_image_has_the_same_tokens_in_any_company():
    module = small()
    x = pixels(images(7))
    together = convit.embed(module, x)
    apart = [convit.embed(module, x[i : i + 2])[0] for i in range(6)]
    assert torch.equal(together[:6], torch.stack(apart))
    model = Prompted(module, SPEC)
    for batch in (1, 2, 3):
        close(model.tokens(images(7), batch=batch), model.tokens(images(7)), 1e-6)
    assert model.tokens(images(1)).shape == (1, 17, 24)


def test_the_published_sizes_are_understood():
    for name in ("convit_tiny", "convit_small"):
        with torch.device("meta"):
            convit.check(timm.create_model(name, pretrained=False))


class Another(ConVit):
    """Of another class, hence of an unknown forward pass."""


def refused(what):
    if what == "a forward pass of its own":
        return Another(**SMALL)
    module = small(**{"average pooling": {"global_pool": "avg"}}.get(what, {}))
    block = module.blocks[3]
    if what == "no CLS token":
        module = small(local_up_to_layer=4)
    elif what == "final norm Identity":
        module.norm = nn.Identity()
    elif what == "blocks Sequential":
        module.blocks[3] = nn.Sequential()
    elif what == "attention GPSA":
        block.attn = module.blocks[0].attn
    elif what == "activation ReLU":
        block.mlp.act = nn.ReLU()
    elif what == "norm Identity":
        block.norm2 = nn.Identity()
    elif what == "normalised queries":
        block.attn.q_norm = LayerNorm(12)
    return module


@pytest.mark.parametrize(
    "what",
    [
        "a forward pass of its own",
        "average pooling",
        "no CLS token",
        "final norm Identity",
        "blocks Sequential",
        "attention GPSA",
        "activation ReLU",
        "norm Identity",
        "normalised queries",
    ],
)
def test_what_is_not_understood_is_refused_in_one_line(what):
    with pytest.raises(Unsupported, match=what) as error:
        Prompted(refused(what), SPEC)
    assert "\n" not in str(error.value)


def test_a_pruned_model_has_no_cls_token():
    module = small()
    module.prune_intermediate_layers([0])
    with pytest.raises(Unsupported, match="no CLS token"):
        Prompted(module, SPEC)
