"""Frozen vision transformers: what they are called, how they are built, how they travel.

Every backbone is a timm `VisionTransformer` or `ConVit` without a classifier, in eval mode and
without gradients. `nano` is trained by this package (see `pretrain.py`) and shipped with it; the
others come from timm's published weights or from a local safetensors file.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np
import timm
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from timm.models.convit import ConVit
from timm.models.vision_transformer import VisionTransformer, checkpoint_filter_fn
from torch import Tensor, nn

Backbone = VisionTransformer | ConVit
Channels = tuple[float, float, float]
ASSETS = Path(__file__).parent / "assets"


class WeightsUnavailable(RuntimeError):
    """Weights that cannot be had; one line that names the file and `backbone.weights=PATH`."""


@dataclass(frozen=True)
class BackboneSpec:
    """What the rest of the package must know of a backbone before it is built.

    Attributes:
        name: value of `backbone.name`.
        timm_name: timm's model name with its weights tag; "" where timm publishes none.
        image_size: side of the square input, pixels.
        patch: side of the image square behind one token, pixels.
        width: token width d.
        depth: number of transformer blocks.
        heads: attention heads per block.
        mean: per-channel mean of the normalisation, on the scale 0..1.
        std: per-channel standard deviation of the normalisation, on the scale 0..1.
        weights_file: file of the pretrained weights, in `assets/` or, as `owner/repo/file`,
            on huggingface.co.
    """

    name: str
    timm_name: str
    image_size: int
    patch: int
    width: int
    depth: int
    heads: int
    mean: Channels
    std: Channels
    weights_file: str

    @property
    def patches(self) -> int:
        """Number of patch tokens (the CLS token is not one of them)."""
        return (self.image_size // self.patch) ** 2


_HALF: Channels = (0.5, 0.5, 0.5)
_IMAGENET: tuple[Channels, Channels] = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_CLIP: tuple[Channels, Channels] = (
    (0.48145466, 0.4578275, 0.40821073),
    (0.26862954, 0.26130258, 0.27577711),
)


def _base(
    name: str, timm_name: str, patch: int, heads: int, mean: Channels, std: Channels
) -> BackboneSpec:
    # The weights of OpenAI's CLIP, trained with QuickGELU, lie under the name of a timm model
    # with GELU, which computes another function of them.
    file = f"timm/{timm_name.replace('_quickgelu', '')}/model.safetensors"
    return BackboneSpec(name, timm_name, 224, patch, 768, 12, heads, mean, std, file)


BACKBONES: dict[str, BackboneSpec] = {
    spec.name: spec
    for spec in (
        BackboneSpec("nano", "", 32, 8, 192, 4, 3, _HALF, _HALF, "nano.safetensors"),
        _base("vit_b32", "vit_base_patch32_224.augreg_in21k_ft_in1k", 32, 12, _HALF, _HALF),
        _base("deit_b16", "deit_base_patch16_224.fb_in1k", 16, 12, *_IMAGENET),
        _base("convit_base", "convit_base.fb_in1k", 16, 16, *_IMAGENET),
        _base("clip_b16", "vit_base_patch16_clip_quickgelu_224.openai", 16, 12, *_CLIP),
    )
}


class ConvStem(nn.Module):
    """Three strided convolutions from pixels to tokens: (B, 3, S, S) → (B, (S/8)², d).

    It takes the place of timm's `PatchEmbed` and answers the same questions. Group normalisation
    needs no running statistics, so training and inference compute the same function.
    """

    def __init__(self, img_size: int, patch_size: int, in_chans: int, embed_dim: int, **_: object):
        super().__init__()
        if patch_size != 8 or img_size % 8:
            raise ValueError(
                f"the stem makes one token of 8×8 pixels, got patch {patch_size}, image {img_size}"
            )
        self.img_size = (img_size, img_size)
        self.patch_size = (patch_size, patch_size)
        self.grid_size = (img_size // patch_size, img_size // patch_size)
        self.num_patches = self.grid_size[0] * self.grid_size[1]
        narrow, middle = embed_dim // 4, embed_dim // 2
        self.layers = nn.Sequential(
            nn.Conv2d(in_chans, narrow, 3, stride=2, padding=1, bias=False),
            nn.GroupNorm(8, narrow),
            nn.GELU(),
            nn.Conv2d(narrow, middle, 3, stride=2, padding=1, bias=False),
            nn.GroupNorm(8, middle),
            nn.GELU(),
            nn.Conv2d(middle, embed_dim, 3, stride=2, padding=1),
        )

    def feat_ratio(self, as_scalar: bool = True) -> int | tuple[int, int]:
        """Return the pixels per token and side, as timm's feature extraction asks for it."""
        return self.patch_size[0] if as_scalar else self.patch_size

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the patch tokens (B, T, d) of normalised images (B, 3, S, S)."""
        return self.layers(images).flatten(2).transpose(1, 2)


def spec_of(name: str) -> BackboneSpec:
    """Return the specification of a backbone.

    Raises:
        ValueError: `name` is not in `BACKBONES`.
    """
    if name not in BACKBONES:
        raise ValueError(f"backbone.name={name!r} is unknown; allowed: {', '.join(BACKBONES)}")
    return BACKBONES[name]


@overload
def build(
    name: Literal["nano"], weights: str | Path = ..., *, seed: int = ...
) -> VisionTransformer: ...
@overload
def build(name: str, weights: str | Path = ..., *, seed: int = ...) -> Backbone: ...
def build(name: str, weights: str | Path = "pretrained", *, seed: int = 0) -> Backbone:
    """Build a frozen backbone; the global random state is left as it was.

    Args:
        name: a key of `BACKBONES`.
        weights: "pretrained", "random" (initialised from `seed`), or the path of a safetensors
            file with the names of timm's state dict (or others that timm translates, as those of
            OpenAI's CLIP), in any float type; read as float32.
        seed: seed of the random initialisation; no other `weights` reads it.

    Returns:
        The model in eval mode, all parameters without gradients, `num_classes=0`: timm's forward
        maps normalised images (B, 3, S, S) to the CLS feature (B, d) after the final norm.

    Raises:
        ValueError: `name` is unknown.
        WeightsUnavailable: the weights are absent, not safetensors, or of another architecture.
    """
    spec = spec_of(name)
    if str(weights) == "random":
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return _freeze(_skeleton(spec))
    file = _pretrained_file(spec) if str(weights) == "pretrained" else Path(weights)
    return _load(spec, file)


def available(name: str) -> tuple[bool, str]:
    """Say, without downloading, whether the pretrained weights are here: (found, where or how)."""
    spec = spec_of(name)
    file = _local_file(spec)
    return (True, str(file)) if file else (False, _how_to_get(spec))


def metadata(file: str | Path) -> dict[str, str]:
    """Return the notes kept in a safetensors file (for `nano`: the run that made it).

    Raises:
        WeightsUnavailable: the file is absent or not safetensors.
    """
    path = Path(file)
    if not path.is_file():
        raise WeightsUnavailable(f"backbone.weights={path}: there is no such file")
    try:
        with safe_open(path, framework="pt") as opened:
            return dict(opened.metadata() or {})
    except SafetensorError as error:
        raise WeightsUnavailable(
            f"backbone.weights={path}: not a safetensors file ({_line(error)})"
        ) from None


def to_arrays(module: nn.Module) -> dict[str, np.ndarray]:
    """Return the state of a backbone as numpy arrays, which Ray's object store shares by memory."""
    return {key: value.detach().cpu().numpy() for key, value in module.state_dict().items()}


def from_arrays(name: str, arrays: Mapping[str, np.ndarray]) -> Backbone:
    """Rebuild a backbone on top of the given arrays, without copying them.

    Args:
        name: a key of `BACKBONES`.
        arrays: what `to_arrays` returned, possibly read-only. The model shares their memory.

    Raises:
        ValueError: `name` is unknown, or the arrays are another backbone's.
    """
    spec = spec_of(name)
    with torch.device("meta"):
        model = _skeleton(spec)
    with warnings.catch_warnings():
        # Arrays from the object store are read-only; nothing writes to a frozen backbone.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        state = {key: torch.from_numpy(value) for key, value in arrays.items()}
    try:
        model.load_state_dict(state, strict=True, assign=True)
    except RuntimeError as error:
        raise ValueError(f"the arrays are not those of backbone {name!r}: {_line(error)}") from None
    for module in model.modules():
        # Buffers outside the state dict (ConViT's relative positions) are still without memory.
        restore: Any = getattr(module, "init_non_persistent_buffers", None)
        if restore is not None:
            restore()
    return _freeze(model)


def _skeleton(spec: BackboneSpec) -> Backbone:
    if spec.timm_name:
        model: Any = timm.create_model(spec.timm_name, num_classes=0)
        return model
    return VisionTransformer(
        img_size=spec.image_size,
        patch_size=spec.patch,
        embed_dim=spec.width,
        depth=spec.depth,
        num_heads=spec.heads,
        num_classes=0,
        embed_layer=ConvStem,
        norm_layer=partial(nn.LayerNorm, eps=1e-6),
    )


def _freeze(model: Backbone) -> Backbone:
    model.eval()
    model.requires_grad_(False)
    return model


def _load(spec: BackboneSpec, file: Path) -> Backbone:
    metadata(file)  # refuses absent files and pickles
    # Building draws random weights that are then overwritten; the caller's stream must not move.
    with torch.random.fork_rng(devices=[]):
        model = _skeleton(spec)
    try:
        state = load_file(file)
        model.load_state_dict(_renamed(state, model) if spec.timm_name else state, strict=True)
    except (RuntimeError, LookupError, ValueError, AttributeError, TypeError) as error:
        raise WeightsUnavailable(
            f"backbone.weights={file} does not fit backbone {spec.name!r}: {_line(error)}"
        ) from None
    return _freeze(model)


def _renamed(state: dict[str, Tensor], model: Backbone) -> dict[str, Tensor]:
    """Return a published file's tensors under timm's present names, without the classifier.

    timm's own loading accepts missing keys, which would leave random weights in a frozen model:
    hence its filter (it has none for ConViT) and then strict loading.
    """
    held = {value.untyped_storage().data_ptr() for value in state.values()}
    if isinstance(model, VisionTransformer):
        state = checkpoint_filter_fn(state, model)
    state = {key: value for key, value in state.items() if not key.startswith("head.")}
    for key, value in state.items():
        # The filter resizes patches and positions of another model until they fit.
        if value.untyped_storage().data_ptr() not in held:
            raise ValueError(f"{key} is of another image or patch size")
    return state


def _local_file(spec: BackboneSpec) -> Path | None:
    if not spec.timm_name:
        file = ASSETS / spec.weights_file
        return file if file.is_file() else None
    from huggingface_hub import try_to_load_from_cache

    repo, _, filename = spec.weights_file.rpartition("/")
    cached = try_to_load_from_cache(repo, filename)
    return Path(cached) if isinstance(cached, str) else None


def _pretrained_file(spec: BackboneSpec) -> Path:
    file = _local_file(spec)
    if file is None and spec.timm_name:
        from huggingface_hub import constants, hf_hub_download
        from huggingface_hub.utils import get_session

        repo, _, filename = spec.weights_file.rpartition("/")
        try:
            # Without a network the download retries for 20 s; one request tells at once.
            get_session().head(constants.ENDPOINT, timeout=5)
            file = Path(hf_hub_download(repo, filename, etag_timeout=5))
        except Exception as error:  # the hub's clients raise a dozen unrelated types
            reason = f"download failed: {type(error).__name__}"
            raise WeightsUnavailable(f"{_how_to_get(spec)} ({reason})") from None
    if file is None:
        raise WeightsUnavailable(_how_to_get(spec))
    return file


def _how_to_get(spec: BackboneSpec) -> str:
    where = "huggingface.co" if spec.timm_name else "the package's fedscale/models/assets"
    return (
        f"weights of backbone {spec.name!r} not found: get {spec.weights_file} from {where} "
        "and point at the copy with backbone.weights=PATH"
    )


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
