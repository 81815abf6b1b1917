"""Backbones: their shape, where their weights come from, and how they travel."""

import pickle
from functools import partial

import huggingface_hub
import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.layers import QuickGELU
from timm.models.convit import GPSA, MHSA, ConVit
from timm.models.vision_transformer import VisionTransformer

from fedscale.models import backbone
from fedscale.models.backbone import BACKBONES, WeightsUnavailable, build, from_arrays, to_arrays

PUBLISHED = [name for name, spec in BACKBONES.items() if spec.timm_name]


@pytest.fixture(scope="module")
def nano():
    return build("nano", "random")


@pytest.fixture
def small(monkeypatch):
    """A timm model of the same kind as the paper's, small enough to write to disk."""
    spec = backbone.BackboneSpec(
        *("small", "vit_tiny_patch16_224.augreg_in21k_ft_in1k", 224, 16, 192, 12, 3),
        *((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
        "timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k/model.safetensors",
    )
    monkeypatch.setitem(BACKBONES, "small", spec)
    return spec


@pytest.fixture(params=PUBLISHED)
def shrunk(request, monkeypatch):
    """A published backbone's name; timm builds it with 2 heads and 4 blocks on 32 pixels."""
    size = {"img_size": 32, "patch_size": 8, "depth": 4, "num_heads": 2, "embed_dim": 24}
    if "convit" in request.param:
        size |= {"local_up_to_layer": 2, "embed_dim": 12}  # timm multiplies by the heads
    monkeypatch.setattr(timm, "create_model", partial(timm.create_model, **size))
    return request.param


def one_line(error) -> str:
    text = str(error.value)
    assert "\n" not in text and len(text) < 400
    return text


def same(left, right) -> bool:
    first, second = left.state_dict(), right.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


@pytest.mark.parametrize("name", BACKBONES)
def test_the_specification_is_what_is_built(name):
    spec = BACKBONES[name]
    with torch.device("meta"):
        model = backbone._skeleton(spec)
    assert model.embed_dim == spec.width and len(model.blocks) == spec.depth
    assert model.num_prefix_tokens == 1 and model.num_classes == 0
    assert {block.attn.num_heads for block in model.blocks} == {spec.heads}
    assert model.patch_embed.num_patches == spec.patches
    assert tuple(model.patch_embed.patch_size) == (spec.patch, spec.patch)
    of_cls = 0 if name == "convit_base" else 1
    assert model.pos_embed.shape == (1, of_cls + spec.patches, spec.width)
    if spec.timm_name:
        published = timm.get_pretrained_cfg(spec.timm_name)
        assert (published.mean, published.std) == (spec.mean, spec.std)
        assert published.input_size == (3, spec.image_size, spec.image_size)
        assert published.interpolation == "bicubic"  # as `Prompted.tokens` resizes
        assert published.hf_hub_filename is None  # then timm's name of the file is:
        assert spec.weights_file == f"{published.hf_hub_id}/model.safetensors"


def test_each_name_is_the_architecture_it_stands_for():
    with torch.device("meta"):
        models = {name: backbone._skeleton(BACKBONES[name]) for name in PUBLISHED}
    kinds = {name: type(model) for name, model in models.items()}
    assert kinds.pop("convit_base") is ConVit and set(kinds.values()) == {VisionTransformer}
    assert set(kinds) == {"vit_b32", "deit_b16", "clip_b16"}
    for name, model in models.items():
        quick = {isinstance(block.mlp.act, QuickGELU) for block in model.blocks}
        assert quick == {name == "clip_b16"}
        pre = isinstance(getattr(model, "norm_pre", None), torch.nn.LayerNorm)
        assert pre == (name == "clip_b16")
        assert model.norm.eps == (1e-5 if name == "clip_b16" else 1e-6)
    kinds = [type(block.attn) for block in models["convit_base"].blocks]
    assert kinds == [GPSA] * 10 + [MHSA] * 2
    assert models["convit_base"].local_up_to_layer == 10


def test_timms_forward_runs_on_nano(nano):
    images = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    tokens = nano.forward_features(images)
    assert tokens.shape == (2, 17, 192)
    assert nano.patch_embed(images).shape == (2, 16, 192)
    assert torch.equal(nano(images), tokens[:, 0])
    assert not torch.allclose(tokens[0], tokens[1])


def test_a_backbone_is_frozen(nano):
    assert not any(module.training for module in nano.modules())
    assert not any(parameter.requires_grad for parameter in nano.parameters())
    assert not any(isinstance(m, torch.nn.Dropout) and m.p for m in nano.modules())


def test_tokens_are_in_reading_order(nano):
    """A spot at the centre of token t's field changes token t most."""
    images = torch.zeros(16, 3, 36, 36)
    for token in range(16):
        row, column = divmod(token, 4)
        images[token, :, 8 * row : 8 * row + 5, 8 * column : 8 * column + 5] = 1
    images = images[..., 2:34, 2:34]
    change = (nano.patch_embed(images) - nano.patch_embed(images[:1] * 0)).norm(dim=-1)
    assert change.argmax(dim=1).tolist() == list(range(16))


def test_the_stem_refuses_other_sizes():
    with pytest.raises(ValueError, match="8×8 pixels, got patch 16, image 32") as error:
        backbone.ConvStem(32, 16, 3, 192)
    one_line(error)


def test_random_weights_depend_on_the_seed_alone(nano):
    assert same(nano, build("nano", "random"))
    assert not same(nano, build("nano", "random", seed=1))


def test_building_leaves_the_global_random_state_alone(tmp_path, nano, small):
    save_file(nano.state_dict(), tmp_path / "nano.safetensors")
    before = torch.random.get_rng_state()
    build("nano", "random")
    build("nano", tmp_path / "nano.safetensors")
    build("small", "random")
    from_arrays("nano", to_arrays(nano))
    assert torch.equal(before, torch.random.get_rng_state())


def test_arrays_round_trip_bit_for_bit_without_a_copy(nano):
    arrays = to_arrays(nano)
    for array in arrays.values():
        array.flags.writeable = False  # as the object store hands them out
    again = from_arrays("nano", arrays)
    assert same(nano, again)
    assert not any(parameter.requires_grad for parameter in again.parameters())
    for key, value in again.state_dict().items():
        assert np.shares_memory(value.numpy(), arrays[key])
    images = torch.rand(3, 3, 32, 32)
    assert torch.equal(nano(images), again(images))


def test_arrays_of_timms_models_round_trip(small):
    model = build("small", "random")
    assert same(model, from_arrays("small", to_arrays(model)))


def test_arrays_of_every_published_backbone_round_trip(shrunk):
    model = build(shrunk, "random", seed=2)
    arrays = to_arrays(model)
    again = from_arrays(shrunk, arrays)
    assert same(model, again)
    assert all(np.shares_memory(v.numpy(), arrays[k]) for k, v in again.state_dict().items())
    assert not any(buffer.is_meta for buffer in again.buffers())
    images = torch.rand(2, 3, 32, 32)
    assert torch.equal(again.to("cpu")(images), model(images))


def test_arrays_of_another_backbone_are_refused(nano, small):
    with pytest.raises(ValueError, match="not those of backbone 'small'") as error:
        from_arrays("small", to_arrays(nano))
    one_line(error)


def test_a_local_file_in_half_precision_is_read_as_float32(tmp_path, nano):
    file = tmp_path / "with spaces.safetensors"
    halves = {key: value.half() for key, value in nano.state_dict().items()}
    save_file(halves, file, metadata={"seed": "7"})
    state = build("nano", file).state_dict()
    assert all(torch.equal(state[key], halves[key].float()) for key in halves)
    assert backbone.metadata(file) == {"seed": "7"}


def test_a_local_file_of_timms_full_model_fits(tmp_path, small):
    """Published files carry the classifier of ImageNet; the backbone drops it."""
    full = timm.create_model(small.timm_name, pretrained=False).eval()
    save_file(full.state_dict(), tmp_path / "model.safetensors")
    model = build("small", str(tmp_path / "model.safetensors"))
    images = torch.rand(1, 3, 224, 224)
    with torch.no_grad():
        torch.testing.assert_close(
            model(images), full.forward_head(full.forward_features(images), True)
        )


def test_the_published_file_of_every_backbone_fits(tmp_path, shrunk):
    """It carries a classifier (CLIP's: a projection), which the backbone drops."""
    classes = timm.get_pretrained_cfg(BACKBONES[shrunk].timm_name).num_classes
    full = timm.create_model(BACKBONES[shrunk].timm_name, num_classes=classes).eval()
    assert "head.weight" in full.state_dict()
    save_file(full.state_dict(), tmp_path / "model.safetensors")
    model, images = build(shrunk, tmp_path / "model.safetensors"), torch.rand(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(model(images), full.forward_features(images)[:, 0])
    assert not model.training and not any(p.requires_grad for p in model.parameters())


OPENAI = {
    "patch_embed.proj": "conv1",
    "pos_embed": "positional_embedding",
    "blocks.": "transformer.resblocks.",
    "norm_pre": "ln_pre",
    "norm1": "ln_1",
    "norm2": "ln_2",
    "attn.qkv.": "attn.in_proj_",
    "attn.proj": "attn.out_proj",
    "mlp.fc1": "mlp.c_fc",
    "mlp.fc2": "mlp.c_proj",
    "cls_token": "class_embedding",
}


@pytest.mark.parametrize("shrunk", ["clip_b16"], indirect=True)
def test_openais_names_are_translated(tmp_path, shrunk):
    model, state = build(shrunk, "random", seed=5), {"logit_scale": torch.ones(1)}
    for key, value in model.state_dict().items():
        for ours, theirs in OPENAI.items():
            key = key.replace(ours, theirs)
        key = key.replace("norm.", "ln_post.")
        if key in ("class_embedding", "positional_embedding"):
            value = value.squeeze()
        state[f"visual.{key}"] = value.clone()
    state["visual.proj"] = torch.zeros(24, 16)
    state["transformer.resblocks.0.ln_1.weight"] = torch.zeros(8)  # of the text model
    save_file(state, tmp_path / "clip.safetensors")
    assert same(build(shrunk, tmp_path / "clip.safetensors"), model)


@pytest.mark.parametrize(
    "size", [{"patch_size": 4, "img_size": 16}, {"img_size": 64}, {"depth": 3}, {"embed_dim": 48}]
)
def test_weights_of_other_sizes_are_refused_not_resized(tmp_path, shrunk, size):
    """timm's filter would resize the patches of the first and the positions of the second."""
    other = timm.create_model(BACKBONES[shrunk].timm_name, **size)
    save_file(other.state_dict(), tmp_path / "other.safetensors")
    with pytest.raises(WeightsUnavailable, match=f"does not fit backbone '{shrunk}'") as error:
        build(shrunk, tmp_path / "other.safetensors")
    one_line(error)


@pytest.mark.parametrize(
    "harm",
    [
        lambda state: state.pop("norm.bias"),
        lambda state: state.update(extra=torch.zeros(1)),
        lambda state: state.update(model=torch.zeros(1)),
        lambda state: state.update(encoder=torch.zeros(1)),
        lambda state: state.update(pos_embed=torch.zeros(3)),
        lambda state: state.update({"patch_embed.proj.weight": torch.zeros(5)}),
        lambda state: state.update({"patch_embed.proj.weight": torch.zeros(24, 3, 0, 8)}),
        lambda state: state.update({"visual.class_embedding": torch.zeros(24)}),
        lambda state: state.clear(),
    ],
)
def test_a_file_of_other_names_or_shapes_is_refused(tmp_path, shrunk, harm):
    state = build(shrunk, "random").state_dict()
    harm(state)
    save_file(state, tmp_path / "other.safetensors")
    with pytest.raises(WeightsUnavailable, match=f"does not fit backbone '{shrunk}'") as error:
        build(shrunk, tmp_path / "other.safetensors")
    one_line(error)


class Trap:
    """Says so when it is unpickled."""

    opened = False

    def __reduce__(self):
        return setattr, (Trap, "opened", True)


@pytest.mark.parametrize("name", BACKBONES)
@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_a_pickle_is_refused_unopened(tmp_path, name, suffix):
    file = tmp_path / f"weights{suffix}"
    file.write_bytes(pickle.dumps({"a": Trap()}))
    with pytest.raises(WeightsUnavailable, match="not a safetensors file") as error:
        build(name, file)
    assert str(file) in one_line(error)
    assert not Trap.opened


def test_an_absent_file_is_named(tmp_path):
    with pytest.raises(WeightsUnavailable, match="there is no such file") as error:
        build("nano", tmp_path / "absent.safetensors")
    assert "absent.safetensors" in one_line(error)


def test_weights_of_another_architecture_are_refused(tmp_path, nano, small):
    file = tmp_path / "nano.safetensors"
    save_file(nano.state_dict(), file)
    with pytest.raises(WeightsUnavailable, match="does not fit backbone 'small'") as error:
        build("small", file)
    assert f"backbone.weights={file}" in one_line(error)


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("failure", [ConnectionError("no route"), OSError("x"), KeyError("y")])
def test_without_a_network_the_line_names_file_and_option(monkeypatch, failure, name):
    asked = []

    class Session:
        def head(self, url, **_):
            asked.append(url)
            raise failure

    def no_download(*_, **__):
        raise AssertionError("the download retries for 20 s; it must not be tried")

    monkeypatch.setattr(huggingface_hub.utils, "get_session", Session)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: None)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", no_download)
    with pytest.raises(WeightsUnavailable) as error:
        build(name)
    text = one_line(error)
    assert len(asked) == 1
    assert BACKBONES[name].weights_file in text and "backbone.weights=PATH" in text
    assert type(failure).__name__ in text
    assert backbone.available(name) == (False, text.split(" (download")[0])


def test_a_cached_download_needs_no_network(tmp_path, monkeypatch, small):
    model = build("small", "random", seed=3)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    cached = str(tmp_path / "model.safetensors")
    monkeypatch.setattr(huggingface_hub.utils, "get_session", None)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: cached)
    assert backbone.available("small") == (True, cached)
    assert same(model, build("small"))


@pytest.mark.parametrize("call", [build, backbone.available, backbone.spec_of])
def test_unknown_names_are_refused(call):
    with pytest.raises(ValueError, match=r"backbone.name='vgg' is unknown; allowed: nano") as error:
        call("vgg")
    one_line(error)


def test_the_shipped_file_is_small_and_says_how_it_was_made():
    found, where = backbone.available("nano")
    assert found
    file = backbone.ASSETS / "nano.safetensors"
    assert where == str(file) and file.stat().st_size <= 5 * 2**20
    notes = backbone.metadata(file)
    for key in ("command", "seed", "images", "steps", "seconds", "torch", "timm", "numpy"):
        assert notes.get(key), f"{key} is missing in the weights' notes"
    done, _, planned = notes["steps"].partition(" of ")
    assert done == planned, "the shipped weights are an unfinished run's"
    model = build("nano")
    assert not same(model, build("nano", "random", seed=int(notes["seed"])))
    assert all(value.isfinite().all() for value in model.state_dict().values())
