"""models_vision_language.py: models of transformers made from configurations: nothing is downloaded."""

import torch
from torch import nn

from gradients import Run

IMAGE_TOKEN = 63
IMAGE_SIZE, PATCH = 16, 8
PATCHES = (IMAGE_SIZE // PATCH) ** 2


def llava(run: Run) -> nn.Module:
    """A vision tower that is frozen, a projector, and a language model."""
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    vision = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=IMAGE_SIZE,
        patch_size=PATCH,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=llama_config(LlamaConfig),
        image_token_index=IMAGE_TOKEN,
        image_seq_length=PATCHES,
        vision_feature_layer=-1,
    )
    model = run.module(lambda: LlavaForConditionalGeneration(config)).train()
    model.model.vision_tower.requires_grad_(False)
    return model


def mixtral(run: Run, implementation: str) -> nn.Module:
    """A mixture of experts; `implementation` is how its experts run: eager, batched_mm or grouped_mm."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = llama_config(
        MixtralConfig, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True, attention_dropout=0.1
    )
    config._experts_implementation = implementation
    return run.module(lambda: MixtralForCausalLM(config)).train()


def llama_config(kind: type, **more: object) -> object:
    return kind(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        use_cache=False,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
        **more,
    )


def images_and_tokens(run: Run, text_tokens: int) -> dict[str, torch.Tensor]:
    """Two sequences, each with one image at its beginning."""
    pixels = run.tensor(2, 3, IMAGE_SIZE, IMAGE_SIZE)
    text = (run.tensor(2, text_tokens) + 1).mul(31).long().clamp(0, IMAGE_TOKEN - 1)
    image = torch.full((2, PATCHES), IMAGE_TOKEN, device=text.device)
    tokens = torch.cat([image, text], dim=1)
    return {"input_ids": tokens, "pixel_values": pixels, "labels": tokens.masked_fill(tokens == IMAGE_TOKEN, -100)}
