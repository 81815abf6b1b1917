from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import timm
import torch
from timm.layers import Mlp, SwiGLUPacked
from timm.models.convit import ConVit
from timm.models.vision_transformer import ParallelScalingBlock, ResPostBlock, VisionTransformer
from torch import nn

from fedscale.models import backbone, frozen, prompted
from fedscale.models.prompted import Prompted
from fedscale.models.vit import Unsupported

SPEC = backbone.BACKBONES["nano"]
SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 3, "num_heads": 3}


def vit(seed=0, **options):
    """A small timm model whose norms, biases and scales are not at their trivial start."""
    torch.manual_seed(seed)
    module = VisionTransformer(**{**SMALL, "num_classes": 0, **options})
    for p in module.parameters():
        p.data += 0.1 * torch.randn_like(p)
    return module.eval().requires_grad_(False)


def images(count, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)


def pixels(batch):
    return (torch.from_numpy(batch).permute(0, 3, 1, 2).float() / 255 - 0.5) / 0.5


def plain(module, x, prompts=None):
    """timm's forward, statement by statement, with prompts (B, n, d) after the CLS token."""
    x = module._pos_embed(module.patch_embed(x))
    if prompts is not None:
        x = torch.cat([x[:, :1], prompts, x[:, 1:]], 1)
    return module.norm(module.blocks(module.norm_pre(x)))[:, 0]


def close(a, b, tolerance=1e-5):
    assert float((a - b).norm() / b.norm()) < tolerance


ARCHITECTURES = {
    "plain": {},
    "one block": {"depth": 1},
    "layer scale": {"init_values": 0.1},
    "no qkv bias": {"qkv_bias": False},
    "no proj bias": {"proj_bias": False},
    "norm_pre": {"pre_norm": True},
    "quick gelu": {"act_layer": "quick_gelu", "pre_norm": True},
    "tanh gelu": {"act_layer": "gelu_tanh"},
    "norm eps": {"norm_layer": partial(nn.LayerNorm, eps=1e-3)},
    "norm without affine": {"norm_layer": partial(nn.LayerNorm, elementwise_affine=False)},
    "registers": {"reg_tokens": 2},
    "no class position": {"no_embed_class": True},
    "no position": {"pos_embed": "none"},
    "mlp ratio": {"mlp_ratio": 2},
    "dropout at training": {
        "drop_path_rate": 0.5,
        "attn_drop_rate": 0.5,
        "proj_drop_rate": 0.5,
        "pos_drop_rate": 0.5,
        "patch_drop_rate": 0.5,
    },
}


@pytest.fixture(params=ARCHITECTURES)
def module(request):
    return vit(**ARCHITECTURES[request.param])


def test_unprompted_features_are_timms(module):
    batch = images(5)
    model = Prompted(module, SPEC)
    close(model.features(model.tokens(batch)), module.forward_features(pixels(batch))[:, 0])


def test_prompted_features_and_gradients_are_those_of_timms_modules(module):
    batch, counts = images(9), [4, 1, 3, 1]
    model = Prompted(module, SPEC)
    own, seeds = torch.randn(4, 3, 24), torch.randn(9, 24)
    expected = own.clone().requires_grad_()
    out = plain(module, pixels(batch), expected.repeat_interleave(torch.tensor(counts), 0))
    (right,) = torch.autograd.grad((out * seeds).sum(), expected)
    for projected in (False, True):
        mine = own.clone().requires_grad_()
        tokens = model.tokens(batch, projected=projected)
        features = model.features(tokens, mine, counts)
        (found,) = torch.autograd.grad((features * seeds).sum(), mine)
        close(features.detach(), out.detach())
        close(found, right)
        # A gradient reaches every prompt.
        assert float(found.abs().amax(2).min()) > 0


def test_numerical_gradient_of_a_prompt():
    model = Prompted(vit(), SPEC)
    tokens = model.tokens(images(3))
    p = (0.5 * torch.randn(1, 2, 24)).requires_grad_()
    direction, seeds = torch.randn_like(p), torch.randn(3, 24)

    def value(x):
        return float((model.features(tokens, x, [3]).double() * seeds).sum())

    (g,) = torch.autograd.grad((model.features(tokens, p, [3]) * seeds).sum(), p)
    step = 1e-2
    with torch.no_grad():
        slope = (value(p + step * direction) - value(p - step * direction)) / (2 * step)
    assert float((g * direction).sum()) == pytest.approx(slope, rel=2e-3)


def test_a_set_of_prompts_per_image_is_the_default():
    model = Prompted(vit(), SPEC)
    tokens, prompts = model.tokens(images(4)), torch.randn(4, 2, 24)
    together = model.features(tokens, prompts)
    apart = [model.features(tokens[i : i + 1], prompts[i : i + 1]) for i in range(4)]
    close(together, torch.cat(apart), 1e-6)


def test_the_order_of_prompts_does_not_matter():
    model = Prompted(vit(), SPEC)
    tokens, prompts = model.tokens(images(4)), torch.randn(1, 5, 24)
    close(
        model.features(tokens, prompts[:, torch.randperm(5)], [4]),
        model.features(tokens, prompts, [4]),
    )


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_public_operators_take_over_where_onednn_is_missing(precision, monkeypatch):
    module, batch, own = vit(depth=4), images(6), torch.randn(2, 3, 24)

    def run(model):
        p = own.clone().requires_grad_()
        out = model.features(model.tokens(batch), p, [4, 2])
        return out.detach(), torch.autograd.grad(out.square().sum(), p)[0]

    fast = run(Prompted(module, SPEC, precision=precision))
    monkeypatch.setattr(frozen, "_pack", lambda weight, bias: None)
    slow = run(Prompted(module, SPEC, precision=precision))
    for a, b in zip(fast, slow, strict=True):
        close(a, b, 1e-5 if precision == "float32" else 3e-2)


def test_attention_does_not_depend_on_its_groups(monkeypatch):
    model, own = Prompted(vit(), SPEC), torch.randn(1, 3, 24)
    tokens = model.tokens(images(7))

    def run():
        p = own.clone().requires_grad_()
        out = model.features(tokens, p, [7])
        return out.detach(), torch.autograd.grad(out.square().sum(), p)[0]

    whole = run()
    monkeypatch.setattr(frozen, "ATTENTION_BYTES", 1)
    for a, b in zip(run(), whole, strict=True):
        close(a, b, 1e-6)


def test_fused_attention_is_the_plain_one():
    """The way of GPUs, on the CPU."""
    z, g = torch.randn(5, 7, 3, 2, 8), torch.randn(35, 16)
    for rows in (slice(None), slice(1, 4)):
        (a, tape), (b, other) = frozen._plain_attention(z), frozen._fused_attention(z)
        close(b, a)
        mine, right = (frozen.attention_backward(t, g, rows) for t in (other, tape))
        close(mine, right)


def test_bfloat16_is_near_float32():
    module, batch, own = vit(), images(6), torch.randn(2, 3, 24)
    exact, rough = (Prompted(module, SPEC, precision=p) for p in ("float32", "bfloat16"))
    assert rough.tokens(batch).dtype == torch.bfloat16
    p, q = own.clone().requires_grad_(), own.clone().requires_grad_()
    a = exact.features(exact.tokens(batch), p, [3, 3])
    b = rough.features(rough.tokens(batch), q, [3, 3])
    assert b.dtype == torch.float32
    close(b.detach(), a.detach(), 3e-2)
    g, h = torch.autograd.grad(a.sum(), p)[0], torch.autograd.grad(b.sum(), q)[0]
    assert h.dtype == torch.float32
    # The sum over features of a normalised row is nearly constant, hence the loose bound.
    close(h, g, 0.2)


def test_images_of_other_sizes_are_resized():
    model = Prompted(vit(), SPEC)
    flat = np.full((2, 20, 28, 3), 77, dtype=np.uint8)
    square = np.full((2, 32, 32, 3), 77, dtype=np.uint8)
    close(model.tokens(flat), model.tokens(square))


def test_tokens_do_not_depend_on_the_batch():
    model = Prompted(vit(), SPEC)
    for batch in (1, 2, 3, 6):
        close(model.tokens(images(7), batch=batch), model.tokens(images(7)), 1e-6)
    assert torch.equal(model.tokens(torch.from_numpy(images(7))), model.tokens(images(7)))


def test_projection_keeps_the_tokens():
    model = Prompted(vit(), SPEC)
    tokens = model.tokens(images(3))
    wide = model.tokens(images(3), projected=True)
    assert wide.shape == (3, 17, 96)
    assert torch.equal(wide[..., :24], tokens)


REFUSED = {
    "qk_norm": {"qk_norm": True},
    "scale_attn_norm": {"scale_attn_norm": True},
    "scale_mlp_norm": {"scale_mlp_norm": True},
    "ResPostBlock": {"block_fn": ResPostBlock},
    "ParallelScalingBlock": {"block_fn": ParallelScalingBlock},
    "DiffAttention": {"attn_layer": "diff", "num_heads": 2},
    "MLP GluMlp": {"mlp_layer": SwiGLUPacked},
    "RmsNorm": {"norm_layer": "rmsnorm"},
    "no CLS token": {"class_token": False, "global_pool": "avg"},
    "a norm after pooling": {"global_pool": "avg"},
    "attention pooling": {"global_pool": "map"},
    "final norm Identity": {"final_norm": False},
    "dynamic image sizes": {"dynamic_img_size": True},
    "activation ReLU": {"act_layer": nn.ReLU},
    "MLP Mlp": {"mlp_layer": partial(Mlp, use_conv=True)},
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_not_understood_is_refused_in_one_line(words):
    module = VisionTransformer(**{**SMALL, "num_classes": 0, **REFUSED[words]})
    with pytest.raises(Unsupported, match=words) as error:
        Prompted(module, SPEC)
    assert "\n" not in str(error.value)


def test_models_with_another_forward_are_refused():
    for name in ("deit_tiny_distilled_patch16_224", "cait_xxs24_224", "eva02_tiny_patch14_224"):
        with pytest.raises(Unsupported, match="forward pass of its own"):
            Prompted(timm.create_model(name, pretrained=False), SPEC)


@pytest.mark.parametrize(
    ("prompts", "counts"),
    [((2, 3, 24), [1, 1]), ((2, 3, 24), [3]), ((2, 3, 24), [3, 0]), ((2, 3, 24), None)],
)
def test_counts_that_do_not_fit_are_refused(prompts, counts):
    model = Prompted(vit(), SPEC)
    with pytest.raises(ValueError, match="counts"):
        model.features(model.tokens(images(3)), torch.zeros(prompts), counts)


@pytest.mark.parametrize("prompts", [(1, 2, 1), (1, 2, 25), (1, 2), (1, 0, 23)])
def test_prompts_of_another_width_are_refused_not_broadcast(prompts):
    model = Prompted(vit(), SPEC)
    with pytest.raises(ValueError, match="24") as error:
        model.features(model.tokens(images(3)), torch.zeros(prompts), [3])
    assert "\n" not in str(error.value)


def test_tokens_of_another_width_and_no_images_are_refused():
    model = Prompted(vit(), SPEC)
    with pytest.raises(ValueError, match=r"\(B, T, 24 or 96\)"):
        model.features(torch.zeros(3, 17, 48), torch.zeros(1, 2, 24), [3])
    with pytest.raises(ValueError, match="at least one"):
        model.tokens(images(0))


def test_unknown_precision_is_refused():
    with pytest.raises(ValueError, match="precision='float16'"):
        Prompted(vit(), SPEC, precision="float16")


# The contract: every backbone, small, as timm builds it under its published name.


@pytest.fixture(params=list(backbone.BACKBONES))
def family(request):
    """(name, small timm model with 2 heads, its specification on images of 32 pixels)."""
    name, spec = request.param, backbone.BACKBONES[request.param]
    torch.manual_seed(1)
    if name == "nano":
        module = backbone.build("nano", "random").eval()
    else:
        size = {"img_size": 32, "patch_size": 8, "depth": 4, "num_heads": 2, "num_classes": 0}
        size |= {"embed_dim": 12, "local_up_to_layer": 2} if "convit" in name else {"embed_dim": 24}
        module = timm.create_model(spec.timm_name, **size)
    for p in module.parameters():
        p.data += 0.1 * torch.randn_like(p)
    return name, module.eval().requires_grad_(False), replace(spec, image_size=32)


def width(module):
    return module.norm.normalized_shape[0]


def joins(module):
    """The module of timm's forward that CLS, prompts and patches enter together."""
    if isinstance(module, ConVit):
        return module.blocks[module.local_up_to_layer]
    return module.norm_pre


def through_timm(module, x, own=None):
    """timm's own forward_features, prompts (B, n, d) put in between CLS and patches."""

    def put(_, args):
        return torch.cat([args[0][:, :1], own, args[0][:, 1:]], 1)

    if own is None:
        return module.forward_features(x)[:, 0]
    with joins(module).register_forward_pre_hook(put):
        return module.forward_features(x)[:, 0]


def normalised(spec, batch):
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (spec.mean, spec.std))
    return (torch.from_numpy(batch).permute(0, 3, 1, 2).float() / 255 - mean) / std


def features_and_gradient(function, own, weights):
    own = own.clone().requires_grad_()
    out = function(own)
    return out.detach(), torch.autograd.grad((out * weights).sum(), own)[0]


def test_the_unprompted_path_is_timms_forward(family):
    _, module, spec = family
    batch = images(5)
    model = Prompted(module, spec)
    found = model.features(model.tokens(batch))
    close(found, module.forward_features(normalised(spec, batch))[:, 0])
    close(found, module(normalised(spec, batch)))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("count", [1, 5])
def test_prompts_join_where_they_must_and_all_get_a_gradient(family, precision, count):
    _, module, spec = family
    batch, counts = images(7), [3, 1, 3]
    own, weights = torch.randn(3, count, width(module)), torch.randn(7, width(module))
    each, x = torch.tensor(counts), normalised(spec, batch)

    def reference(p):
        return through_timm(module, x, p.repeat_interleave(each, 0))

    out, right = features_and_gradient(reference, own, weights)
    assert float((out - through_timm(module, x)).norm() / out.norm()) > 1e-2
    model = Prompted(module, spec, precision=precision)
    exact = precision == "float32"
    for projected in (False, True):
        tokens = model.tokens(batch, projected=projected)
        found, gradient = features_and_gradient(
            lambda p, tokens=tokens: model.features(tokens, p, counts), own, weights
        )
        close(found, out, 1e-5 if exact else 3e-2)
        close(gradient, right, 1e-5 if exact else 6e-2)
        assert float(gradient.abs().amax(2).min()) > 0


def test_no_prompts_and_prompts_that_are_not_finite(family):
    """Zero prompts are the unprompted path; a client's NaN stays its own."""
    _, module, spec = family
    model = Prompted(module, spec)
    tokens, none = model.tokens(images(4)), torch.zeros(2, 0, width(module))
    out, gradient = features_and_gradient(
        lambda p: model.features(tokens, p, [2, 2]), none, torch.ones(4, model.width)
    )
    assert torch.equal(out, model.features(tokens)) and gradient.shape == none.shape
    own = torch.randn(2, 3, model.width)
    right = model.features(tokens, own, [2, 2])
    own[0, 1, 0] = float("nan")
    found = model.features(tokens, own, [2, 2])
    assert found[:2].isnan().all() and torch.equal(found[2:], right[2:])


def test_rows_are_cls_prompts_patches():
    tokens = torch.arange(3 * 4).view(3, 4, 1)
    own = 100 + torch.arange(2 * 2).view(2, 2, 1)
    rows = prompted._join(tokens, own, [1, 2]).view(3, -1).tolist()
    assert rows == [
        [0, 100, 101, 1, 2, 3],
        [4, 102, 103, 5, 6, 7],
        [8, 102, 103, 9, 10, 11],
    ]


def test_tokens_are_what_enters_the_blocks_with_cls_first(family):
    _, module, spec = family
    batch, seen = images(4), []
    entry = joins(module) if isinstance(module, ConVit) else module.blocks[0]
    with entry.register_forward_pre_hook(lambda _, args: seen.append(args[0])):
        module.forward_features(normalised(spec, batch))
    tokens = Prompted(module, spec).tokens(batch)
    close(tokens, seen[0])
    assert tokens.shape == (4, 1 + 16, width(module))
    # CLS has seen no image yet; every patch has seen its own.
    assert torch.equal(tokens[0, 0], tokens[1, 0])
    assert float((tokens[0, 1:] - tokens[1, 1:]).norm(dim=1).min()) > 0


def test_patches_and_prompts_are_sets_past_their_positions(family):
    """Positions are in the tokens; prompts have none; CLS is told apart by its place alone."""
    _, module, spec = family
    model = Prompted(module, spec)
    tokens, own = model.tokens(images(3)), torch.randn(1, 5, model.width)
    weights, patches, order = torch.randn(3, model.width), torch.randperm(16), torch.randperm(5)

    def run(tokens, own):
        return features_and_gradient(lambda p: model.features(tokens, p, [3]), own, weights)

    out, gradient = run(tokens, own)
    shuffled = torch.cat([tokens[:, :1], tokens[:, 1:][:, patches]], 1)
    again, same = run(shuffled, own[:, order])
    close(again, out)
    close(same, gradient[:, order])
    swapped, _ = run(tokens[:, [1, 0, *range(2, 17)]], own)
    assert float((swapped - out).norm() / out.norm()) > 1e-2


@pytest.mark.parametrize("family", sorted({*backbone.BACKBONES} - {"nano"}), indirect=True)
def test_patches_of_an_image_move_with_their_positions(family):
    """Where patches meet in attention alone: not in ConViT's grid (nor in nano's stem)."""
    _, module, spec = family
    order = torch.randperm(16).tolist()
    batch, own = images(3), torch.randn(1, 4, width(module))
    squares = batch.reshape(3, 4, 8, 4, 8, 3).transpose(0, 1, 3, 2, 4, 5).reshape(3, 16, 8, 8, 3)
    moved = squares[:, order].reshape(3, 4, 4, 8, 8, 3).transpose(0, 1, 3, 2, 4, 5)
    moved = np.ascontiguousarray(moved.reshape(3, 32, 32, 3))

    def run(batch):
        model = Prompted(module, spec)
        return model.features(model.tokens(batch), own, [3])

    out, image_alone = run(batch), run(moved)
    first = module.pos_embed.shape[1] - 16
    kept = module.pos_embed.data[:, first:].clone()
    module.pos_embed.data[:, first:] = kept[:, order]
    together = run(moved)
    assert float((image_alone - out).norm() / out.norm()) > 1e-3
    if isinstance(module, ConVit):
        assert float((together - out).norm() / out.norm()) > 1e-3
    else:
        close(together, out)


def test_only_clips_norm_sees_a_prompt_before_the_blocks(family):
    """A norm forgets scale and shift: prompts that join before it are blind to both."""
    name, module, spec = family
    model = Prompted(module, spec)
    tokens, own = model.tokens(images(3)), 30 * torch.randn(1, 4, model.width)
    change = model.features(tokens, 3 * own + 20, [3]) - model.features(tokens, own, [3])
    assert (float(change.norm()) < 1e-3) == (name == "clip_b16")


FULL = [
    name if name == "nano" else pytest.param(name, marks=pytest.mark.slow)
    for name in backbone.BACKBONES
]


@pytest.mark.parametrize("name", FULL)
def test_every_backbone_of_the_package_at_its_full_size(name):
    spec = backbone.BACKBONES[name]
    module = backbone.build(name, "random")
    model = Prompted(module, spec)
    rng = np.random.default_rng(0)
    batch = rng.integers(0, 256, (2, spec.image_size, spec.image_size, 3), dtype=np.uint8)
    x, tokens = normalised(spec, batch), model.tokens(batch)
    own, weights = 0.1 * torch.randn(2, 4, spec.width), torch.randn(2, spec.width)
    with torch.no_grad():
        close(model.features(tokens), module(x))
    out, right = features_and_gradient(lambda p: through_timm(module, x, p), own, weights)
    found, gradient = features_and_gradient(lambda p: model.features(tokens, p), own, weights)
    close(found, out)
    close(gradient, right, 1e-4)
    assert float(gradient.abs().amax(2).min()) > 0
