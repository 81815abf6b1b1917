"""Backbones: their shape, where their weights come from, and how they travel."""

import pickle

import huggingface_hub
import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file

from fedscale.models import backbone
from fedscale.models.backbone import BACKBONES, WeightsUnavailable, build, from_arrays, to_arrays


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
    assert model.pos_embed.shape == (1, 1 + spec.patches, spec.width)
    if spec.timm_name:
        published = timm.get_pretrained_cfg(spec.timm_name)
        assert (published.mean, published.std) == (spec.mean, spec.std)
        assert published.input_size == (3, spec.image_size, spec.image_size)
        assert spec.weights_file == f"{published.hf_hub_id}/model.safetensors"


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
        assert torch.equal(model(images), full.forward_head(full.forward_features(images), True))


class Trap:
    """Says so when it is unpickled."""

    opened = False

    def __reduce__(self):
        return setattr, (Trap, "opened", True)


@pytest.mark.parametrize("name", ["nano", "vit_b32"])
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


@pytest.mark.parametrize("failure", [ConnectionError("no route"), OSError("x"), KeyError("y")])
def test_without_a_network_the_line_names_file_and_option(monkeypatch, failure):
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
        build("vit_b32")
    text = one_line(error)
    assert len(asked) == 1
    assert BACKBONES["vit_b32"].weights_file in text and "backbone.weights=PATH" in text
    assert type(failure).__name__ in text
    assert backbone.available("vit_b32") == (False, text.split(" (download")[0])


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
