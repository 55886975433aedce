"""How little memory a step of an architecture can do with: with blocks that are chosen by bytes, and by structure.

    python benchmarks/blocks_by_bytes.py [NAME ...]

Needs transformers and diffusers. No device and no memory: each model is run without data, in bfloat16 and in the size
in which it is trained, with the attention and dropout kernels that a GPU would take. A row says what a step needs
beside weights and gradients if each block is computed again in backward: the saved tensors of all, the least with the
outermost repeated modules as blocks, with the innermost ones, and with the blocks that fit chooses. Half of the blocks'
inputs stay, as fit reckons where inputs may move.
"""

import argparse
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from torchoffload._estimate.kernels import kernels_of_a_gpu
from torchoffload._fit.choosing.choice import SHARE_THAT_STAYS, choose_blocks, with_blocks
from torchoffload._fit.choosing.dry_run import DryRunError, dry_run
from torchoffload._fit.choosing.structure import find_blocks, innermost_blocks

Made = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
_LIMIT_S = 600.0
_GIB = float(2**30)


def _ids(batch: int, length: int) -> torch.Tensor:
    return torch.zeros(batch, length, dtype=torch.long)


def _image(batch: int, side: int) -> torch.Tensor:
    return torch.empty(batch, 3, side, side)


def _language(name: str, batch: int, length: int, **config: Any) -> Callable[[], Made]:
    def make() -> Made:
        import transformers

        settings = getattr(transformers, f"{name.removesuffix('ForCausalLM').removesuffix('LMHeadModel')}Config")(
            **config
        )
        settings.use_cache = False
        model = getattr(transformers, name)(settings)
        return model, (), {"input_ids": _ids(batch, length), "labels": _ids(batch, length)}

    return make


def _masked(name: str, batch: int, length: int, **config: Any) -> Callable[[], Made]:
    def make() -> Made:
        import transformers

        model = getattr(transformers, f"{name}ForMaskedLM")(getattr(transformers, f"{name}Config")(**config))
        return model, (), {"input_ids": _ids(batch, length), "labels": _ids(batch, length)}

    return make


def _sequences(name: str, batch: int, source: int, target: int, **config: Any) -> Callable[[], Made]:
    def make() -> Made:
        import transformers

        settings = getattr(transformers, f"{name}Config")(**config)
        settings.use_cache = False
        model = getattr(transformers, f"{name}ForConditionalGeneration")(settings)
        if name == "Whisper":
            given = {"input_features": torch.empty(batch, settings.num_mel_bins, source)}
        else:
            given = {"input_ids": _ids(batch, source)}
        return model, (), given | {"labels": _ids(batch, target)}

    return make


def _vision(name: str, batch: int, side: int, **config: Any) -> Callable[[], Made]:
    def make() -> Made:
        import transformers

        kind = next(name.removesuffix(end) for end in ("ForImageClassification", "ForSemanticSegmentation", "Model")
                    if name.endswith(end))  # fmt: skip
        model = getattr(transformers, name)(getattr(transformers, f"{kind}Config")(**config))
        return model, (_image(batch, side),), {}

    return make


def _sdxl() -> Made:
    import diffusers

    model = diffusers.UNet2DConditionModel(
        sample_size=128, block_out_channels=(320, 640, 1280), layers_per_block=2, cross_attention_dim=2048,
        attention_head_dim=(5, 10, 20), transformer_layers_per_block=(1, 2, 10), use_linear_projection=True,
        addition_embed_type="text_time", addition_time_embed_dim=256, projection_class_embeddings_input_dim=2816,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    added = {"text_embeds": torch.empty(4, 1280), "time_ids": torch.empty(4, 6)}
    noise = torch.empty(4, 4, 128, 128)
    steps = torch.zeros(4, dtype=torch.long)
    return model, (noise, steps, torch.empty(4, 77, 2048)), {"added_cond_kwargs": added}


def _autoencoder() -> Made:
    import diffusers

    model = diffusers.AutoencoderKL(
        block_out_channels=(128, 256, 512, 512), down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4, layers_per_block=2, latent_channels=4,
    )  # fmt: skip
    return model, (_image(2, 512),), {}


def _flux() -> Made:
    import diffusers

    given = {
        "hidden_states": torch.empty(1, 4096, 64), "encoder_hidden_states": torch.empty(1, 512, 4096),
        "pooled_projections": torch.empty(1, 768), "timestep": torch.empty(1), "guidance": torch.empty(1),
        "img_ids": torch.empty(4096, 3), "txt_ids": torch.empty(512, 3),
    }  # fmt: skip
    return diffusers.FluxTransformer2DModel(guidance_embeds=True), (), given


def _pixart() -> Made:
    import diffusers

    model = diffusers.PixArtTransformer2DModel(
        sample_size=128, num_layers=28, attention_head_dim=72, num_attention_heads=16, in_channels=4, out_channels=8,
        cross_attention_dim=1152, caption_channels=4096, use_additional_conditions=False,
    )  # fmt: skip
    given = {
        "encoder_hidden_states": torch.empty(4, 120, 4096), "timestep": torch.empty(4),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }  # fmt: skip
    return model, (torch.empty(4, 4, 128, 128),), given


class _Bottleneck(nn.Module):
    """A block of torchvision's ResNet, with its activations in place."""

    def __init__(self, given: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(given, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)
        self.relu = nn.ReLU(inplace=True)
        is_same = given == 4 * width and stride == 1
        self.downsample = None if is_same else nn.Sequential(
            nn.Conv2d(given, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        return self.relu(self.bn3(self.conv3(out)) + (x if self.downsample is None else self.downsample(x)))


def _resnet(depths: tuple[int, ...], batch: int) -> Callable[[], Made]:
    def make() -> Made:
        stages, given = [], 64
        for number, depth in enumerate(depths):
            width = 64 << number
            blocks = [_Bottleneck(given, width, 2 if number else 1)]
            blocks += [_Bottleneck(4 * width, width, 1) for _ in range(depth - 1)]
            stages.append(nn.Sequential(*blocks))
            given = 4 * width
        stem = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(True), nn.MaxPool2d(3, 2, 1)]
        model = nn.Sequential(*stem, *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(given, 1000))
        return model, (_image(batch, 224),), {}

    return make


def _vgg() -> Made:
    parts: list[nn.Module] = []
    given = 3
    for width in (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0):
        parts += [nn.Conv2d(given, width, 3, padding=1), nn.ReLU(True)] if width else [nn.MaxPool2d(2)]
        given = width or given
    head = [nn.Linear(512 * 49, 4096), nn.ReLU(True), nn.Dropout(), nn.Linear(4096, 1000)]
    return nn.Sequential(nn.Sequential(*parts), nn.Flatten(), nn.Sequential(*head)), (_image(128, 224),), {}


def _perceptron() -> Made:
    parts = [part for _ in range(24) for part in (nn.Linear(4096, 4096), nn.GELU())]
    return nn.Sequential(*parts), (torch.empty(65536, 4096),), {}


def _torch_transformer() -> Made:
    tokens = torch.empty(16, 512, 1024), torch.empty(16, 512, 1024)
    return nn.Transformer(1024, 16, 12, 12, 4096, batch_first=True), tokens, {}


_LLAMA = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}
_QWEN_MOE = {
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "head_dim": 128,
    "vocab_size": 151936,
}
_GEMMA = {
    "hidden_size": 3584,
    "intermediate_size": 14336,
    "num_hidden_layers": 42,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
}
_BERT = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
_ALBERT = {"hidden_size": 4096, "embedding_size": 128, "intermediate_size": 16384, "num_attention_heads": 64}
_T5 = {
    "d_model": 2048,
    "d_ff": 5120,
    "d_kv": 64,
    "num_layers": 24,
    "num_heads": 32,
    "feed_forward_proj": "gated-gelu",
    "decoder_start_token_id": 0,
}
_WHISPER = {
    "d_model": 1280,
    "encoder_layers": 32,
    "decoder_layers": 32,
    "encoder_attention_heads": 20,
    "num_mel_bins": 128,
    "decoder_attention_heads": 20,
    "encoder_ffn_dim": 5120,
    "decoder_ffn_dim": 5120,
    "vocab_size": 51866,
}
_SEGFORMER = {"hidden_sizes": [64, 128, 320, 512], "depths": [3, 6, 40, 3], "decoder_hidden_size": 768}
_CONVNEXT = {"hidden_sizes": [192, 384, 768, 1536], "depths": [3, 3, 27, 3]}
_SWIN = {"embed_dim": 192, "depths": [2, 2, 18, 2], "num_heads": [6, 12, 24, 48]}
_VIT = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
_EFFICIENTNET = {"width_coefficient": 1.6, "depth_coefficient": 2.2, "image_size": 456, "hidden_dim": 2048}
_REGNET = {"hidden_sizes": [224, 448, 1232, 3024], "depths": [2, 4, 11, 1], "groups_width": 112, "layer_type": "y"}
_PVT = {"hidden_sizes": [64, 128, 320, 512], "depths": [3, 6, 40, 3]}

ARCHITECTURES: dict[str, Callable[[], Made]] = {
    "Llama 8B, 1 x 8192": _language("LlamaForCausalLM", 1, 8192, **_LLAMA),
    "Qwen3 MoE 30B, 1 x 4096": _language("Qwen3MoeForCausalLM", 1, 4096, **_QWEN_MOE),
    "GPT-2 XL, 8 x 1024": _language("GPT2LMHeadModel", 8, 1024, n_embd=1600, n_layer=48, n_head=25),
    "Gemma 2 9B, 1 x 4096": _language("Gemma2ForCausalLM", 1, 4096, **_GEMMA),
    "BERT-large, 32 x 512": _masked("Bert", 32, 512, **_BERT),
    "ALBERT-xxl, 16 x 512": _masked("Albert", 16, 512, num_hidden_layers=12, **_ALBERT),
    "T5-XL, 8 x 512": _sequences("T5", 8, 512, 512, **_T5),
    "BART-large, 16 x 1024": _sequences("Bart", 16, 1024, 256),
    "Whisper-large, 16 x 3000": _sequences("Whisper", 16, 3000, 448, **_WHISPER),
    "ViT-L, 128 x 224 px": _vision("ViTModel", 128, 224, **_VIT),
    "DINOv2-L, 16 x 518 px": _vision("Dinov2Model", 16, 518, hidden_size=1024, num_hidden_layers=24,
                                      num_attention_heads=16, image_size=518),
    "ConvNeXt-L, 128 x 224 px": _vision("ConvNextForImageClassification", 128, 224, **_CONVNEXT),
    "ConvNeXt V2-L, 64 x 224 px": _vision("ConvNextV2ForImageClassification", 64, 224, **_CONVNEXT),
    "Swin-L, 64 x 224 px": _vision("SwinForImageClassification", 64, 224, **_SWIN),
    "SegFormer-B5, 8 x 512 px": _vision("SegformerForSemanticSegmentation", 8, 512, **_SEGFORMER),
    "PVT-L, 64 x 224 px": _vision("PvtForImageClassification", 64, 224, **_PVT),
    "EfficientNet-B5, 64 x 456 px": _vision("EfficientNetForImageClassification", 64, 456, **_EFFICIENTNET),
    "RegNetY-16G, 128 x 224 px": _vision("RegNetForImageClassification", 128, 224, **_REGNET),
    "ResNet-50, 384 x 224 px": _resnet((3, 4, 6, 3), 384),
    "ResNet-152, 128 x 224 px": _resnet((3, 8, 36, 3), 128),
    "VGG-16, 128 x 224 px": _vgg,
    "SDXL's UNet, 4 x 1024 px": _sdxl,
    "SDXL's autoencoder, 2 x 512 px": _autoencoder,
    "FLUX.1, 1 x 1024 px": _flux,
    "PixArt, 4 x 1024 px": _pixart,
    "nn.Transformer, 16 x 512": _torch_transformer,
    "24 linear layers in a row": _perceptron,
}  # fmt: skip


def _cast(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.to(torch.bfloat16)
    return {key: _cast(each) for key, each in value.items()} if isinstance(value, dict) else value


def row(make: Callable[[], Made]) -> list[str]:
    """Return the columns of one architecture."""
    with torch.device("meta"):
        model, args, kwargs = make()
    model = model.train().to(torch.bfloat16)
    began = time.perf_counter()
    with kernels_of_a_gpu():
        tree = dry_run(model, tuple(map(_cast, args)), _cast(kwargs), limit_s=_LIMIT_S)
    took_s = time.perf_counter() - began
    by_structure = find_blocks(model), innermost_blocks(model)
    chosen = choose_blocks(tree, share_that_stays=SHARE_THAT_STAYS, also=by_structure)
    took_to_choose_s = time.perf_counter() - began - took_s
    structural = [with_blocks(tree, blocks, share_that_stays=SHARE_THAT_STAYS) for blocks in by_structure]
    kinds = list(dict.fromkeys(type(module).__name__ for module in chosen.modules))
    saved = tree.total_bytes(set(tree.saves)) / _GIB
    outermost, innermost = (each.least_bytes / _GIB for each in structural)
    least = chosen.least_bytes / _GIB
    return [
        f"{saved:.1f}", f"{outermost:.2f}", f"{innermost:.2f}", f"{least:.2f}", f"{outermost / least:.1f}",
        f"{chosen.call_count}", ", ".join(kinds[:3]) + (", ..." if len(kinds) > 3 else ""),
        f"{took_s:.1f} + {took_to_choose_s:.1f}",
    ]  # fmt: skip


_HEAD = [
    "architecture", "saved, GiB", "least with the outermost", "with the innermost", "as fit chooses", "times",
    "calls", "blocks", "dry run + choice, s",
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="parts of names; default: all")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    print(f"| {' | '.join(_HEAD)} |\n|{'---|' * len(_HEAD)}", flush=True)
    for name, make in ARCHITECTURES.items():
        if not arguments.names or any(each in name for each in arguments.names):
            try:
                cells = row(make)
            except DryRunError as error:
                cells = [f"the dry run failed: {str(error).splitlines()[0]}"]
            print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
