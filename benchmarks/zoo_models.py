"""The zoo: models of many kinds, each tiny for a CPU and real for a GPU, with the step that a user would train.

None of them was chosen for ``fit``. They differ in their blocks (whole layers, stages of layers, one layer that is
called many times), in their operators (short ones, convolutions, a head of 128,000 tokens) and in their loops (an
optimizer that steps, autocast, two forwards before a backward, sizes that change from step to step).
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

import zoo_held_out  # noqa: F401  (its models register themselves)
import zoo_unusual  # noqa: F401  (likewise)
import zoo_vision  # noqa: F401  (likewise)
from zoo_registry import (
    ZOO,
    Size,
    ZooModel,
    adamw,
    autocast,
    built,
    causal,
    draw_tokens,
    dtype_of,
    entry,
    lists_of,
    make_zoo_model,
    noise,
)

__all__ = ["ZOO", "Size", "ZooModel", "make_zoo_model"]


# ---- Language


@entry
def bert(size: Size, device: torch.device) -> ZooModel:
    """BERT-large under autocast, with dropout and an optimizer."""
    from transformers import BertConfig, BertForMaskedLM

    small = {
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "vocab_size": 99,
    }
    large = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
    config = BertConfig(**(small if size == "tiny" else large))
    model = built(lambda: BertForMaskedLM(config), device)
    data = draw_tokens(device, config.vocab_size, *((2, 16) if size == "tiny" else (32, 512)))

    def loss(_: int) -> torch.Tensor:
        with autocast(device, wanted=True):
            return model(input_ids=data, labels=data).loss

    return ZooModel(model, lists_of(model, "bert.encoder.layer"), loss, adamw(model))


@entry
def gpt_neox(size: Size, device: torch.device) -> ZooModel:
    """GPT-NeoX, with attention and the perceptron side by side."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    small = {
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "vocab_size": 99,
    }
    large = {
        "hidden_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 16, "intermediate_size": 8192,
        "vocab_size": 50_432,
    }  # fmt: skip
    config = GPTNeoXConfig(**(small if size == "tiny" else large))
    shape = (2, 16) if size == "tiny" else (8, 2048)
    return causal(size, device, config, GPTNeoXForCausalLM, "gpt_neox.layers", *shape)


@entry
def qwen3(size: Size, device: torch.device) -> ZooModel:
    """Qwen3 with an optimizer, and 151,936 tokens of vocabulary."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    small = {
        "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "intermediate_size": 64, "vocab_size": 99,
    }  # fmt: skip
    large = {
        "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128, "intermediate_size": 3072, "vocab_size": 151_936,
    }  # fmt: skip
    config = Qwen3Config(**(small if size == "tiny" else large))
    made = causal(size, device, config, Qwen3ForCausalLM, "model.layers", *((2, 16) if size == "tiny" else (4, 2048)))
    made.optimizer = adamw(made.model)
    return made


@entry
def gemma(size: Size, device: torch.device) -> ZooModel:
    """Gemma 3 with sliding windows: its layers are of two kinds."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    small = {
        "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "intermediate_size": 64, "vocab_size": 99, "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }  # fmt: skip
    large = {
        "hidden_size": 1152, "num_hidden_layers": 26, "num_attention_heads": 4, "num_key_value_heads": 1,
        "head_dim": 256, "intermediate_size": 6912, "vocab_size": 65_536, "sliding_window": 512,
    }  # fmt: skip
    config = Gemma3TextConfig(**(small if size == "tiny" else large))
    shape = (2, 16) if size == "tiny" else (4, 2048)
    return causal(size, device, config, Gemma3ForCausalLM, "model.layers", *shape)


@entry
def mixtral(size: Size, device: torch.device) -> ZooModel:
    """A mixture of experts, whose loads differ from step to step."""
    from transformers import MixtralConfig, MixtralForCausalLM

    small = {
        "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 64, "num_local_experts": 4, "vocab_size": 99,
    }  # fmt: skip
    large = {
        "hidden_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 4,
        "intermediate_size": 3584, "num_local_experts": 8, "vocab_size": 32_000,
    }  # fmt: skip
    config = MixtralConfig(**(small if size == "tiny" else large))
    config.use_cache = False
    model = built(lambda: MixtralForCausalLM(config), device, dtype_of(size))
    batches = [
        draw_tokens(device, config.vocab_size, *((2, 16) if size == "tiny" else (8, 2048))).roll(n, 0) for n in range(3)
    ]

    def loss(step: int) -> torch.Tensor:
        data = batches[step % len(batches)]
        return model(input_ids=data, labels=data).loss

    return ZooModel(model, lists_of(model, "model.layers"), loss)


@entry
def mamba(size: Size, device: torch.device) -> ZooModel:
    """Mamba without its kernels: a scan of many short operators."""
    from transformers import MambaConfig, MambaForCausalLM

    small = {"hidden_size": 32, "num_hidden_layers": 3, "vocab_size": 99, "state_size": 4}
    large = {"hidden_size": 1536, "num_hidden_layers": 8, "vocab_size": 32_000}
    config = MambaConfig(**(small if size == "tiny" else large))
    return causal(size, device, config, MambaForCausalLM, "backbone.layers", *((2, 12) if size == "tiny" else (8, 256)))


@entry
def llama_with_a_large_head(size: Size, device: torch.device) -> ZooModel:
    """A Llama with 128,256 tokens of vocabulary: most of its memory is at the loss."""
    from transformers import LlamaConfig, LlamaForCausalLM

    small = {
        "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 64, "vocab_size": 4096,
    }  # fmt: skip
    large = {
        "hidden_size": 4096, "num_hidden_layers": 4, "num_attention_heads": 32, "num_key_value_heads": 8,
        "intermediate_size": 14_336, "vocab_size": 128_256,
    }  # fmt: skip
    config = LlamaConfig(**(small if size == "tiny" else large))
    return causal(size, device, config, LlamaForCausalLM, "model.layers", *((2, 16) if size == "tiny" else (1, 8192)))


@entry
def llama_compiled_in_place(size: Size, device: torch.device) -> ZooModel:
    """A Llama of which each layer was compiled by ``layer.compile()``."""
    from transformers import LlamaConfig, LlamaForCausalLM

    small = {
        "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 64, "vocab_size": 99,
    }  # fmt: skip
    large = {
        "hidden_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 32, "num_key_value_heads": 8,
        "intermediate_size": 8192, "vocab_size": 32_000,
    }  # fmt: skip
    config = LlamaConfig(**(small if size == "tiny" else large))
    made = causal(size, device, config, LlamaForCausalLM, "model.layers", *((2, 16) if size == "tiny" else (4, 4096)))
    for layer in made.layers:
        layer.compile(backend="inductor" if size == "real" else "aot_eager")
    return made


class _Adapted(nn.Module):
    """A frozen linear layer with a trained one of low rank beside it."""

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        super().__init__()
        self.linear = linear
        options = {"bias": False, "device": linear.weight.device, "dtype": linear.weight.dtype}
        self.down, self.up = (
            nn.Linear(linear.in_features, rank, **options),
            nn.Linear(rank, linear.out_features, **options),
        )
        self.dropout = nn.Dropout(0.05)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.up(self.down(self.dropout(x)))


@entry
def lora(size: Size, device: torch.device) -> ZooModel:
    """A frozen Llama with adapters of rank 16 on its projections, dropout and an optimizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    small = {
        "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 64, "vocab_size": 99,
    }  # fmt: skip
    large = {
        "hidden_size": 4096, "num_hidden_layers": 12, "num_attention_heads": 32, "num_key_value_heads": 8,
        "intermediate_size": 14_336, "vocab_size": 32_000,
    }  # fmt: skip
    config = LlamaConfig(**(small if size == "tiny" else large))
    made = causal(size, device, config, LlamaForCausalLM, "model.layers", *((2, 16) if size == "tiny" else (2, 4096)))
    made.model.requires_grad_(requires_grad=False)
    made.model.get_input_embeddings().register_forward_hook(lambda _module, _args, output: output.requires_grad_())
    for layer in made.layers:
        for parent in layer.modules():
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.Linear) and not isinstance(parent, _Adapted):
                    setattr(parent, name, _Adapted(child, 2 if size == "tiny" else 16).to(device))
    made.optimizer = torch.optim.AdamW([each for each in made.model.parameters() if each.requires_grad], lr=1e-4)
    return made


@entry
def dpo(size: Size, device: torch.device) -> ZooModel:
    """Preferences: one forward of the policy for each answer, and one backward for both."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    small = {
        "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "intermediate_size": 64, "vocab_size": 99,
    }  # fmt: skip
    large = {
        "hidden_size": 1024, "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128, "intermediate_size": 3072, "vocab_size": 32_000,
    }  # fmt: skip
    config = Qwen3Config(**(small if size == "tiny" else large), use_cache=False)
    model = built(lambda: Qwen3ForCausalLM(config), device, dtype_of(size))
    data = draw_tokens(device, config.vocab_size, *((2, 16) if size == "tiny" else (4, 2048)))
    chosen, rejected = data, data.flip(1)

    def likelihood(tokens: torch.Tensor) -> torch.Tensor:
        logits = model(input_ids=tokens).logits[:, :-1]
        return (
            -F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
            .view(len(tokens), -1)
            .sum(1)
        )

    def loss(_: int) -> torch.Tensor:
        return -F.logsigmoid(0.1 * (likelihood(chosen) - likelihood(rejected)) / 100).mean()

    return ZooModel(model, lists_of(model, "model.layers"), loss)


@entry
def bart(size: Size, device: torch.device) -> ZooModel:
    """BART: an encoder and a decoder, with dropout, and lengths that change from step to step."""
    from transformers import BartConfig, BartForConditionalGeneration

    small = {
        "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "vocab_size": 99, "max_position_embeddings": 64,
        "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2,
    }  # fmt: skip
    config = BartConfig(**(small if size == "tiny" else {}), use_cache=False)
    model = built(lambda: BartForConditionalGeneration(config), device, dtype_of(size))
    batch, source, target = (2, 16, 12) if size == "tiny" else (16, 1024, 512)
    inputs, labels = (draw_tokens(device, config.vocab_size, batch, length) for length in (source, target))
    part = [1.0, 0.75, 0.875]

    def loss(step: int) -> torch.Tensor:
        share = part[step % len(part)]
        shorter = (tensor[:, : int(tensor.shape[1] * share)].contiguous() for tensor in (inputs, labels))
        return model(**dict(zip(("input_ids", "labels"), shorter, strict=True))).loss

    return ZooModel(model, lists_of(model, "model.encoder.layers", "model.decoder.layers"), loss)


# ---- Speech


@entry
def whisper(size: Size, device: torch.device) -> ZooModel:
    """Whisper: a long encoder beside a short decoder."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    small = {
        "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": 99,
        "num_mel_bins": 8, "max_source_positions": 30, "max_target_positions": 30,
    }  # fmt: skip
    large = {
        "d_model": 1024, "encoder_layers": 16, "decoder_layers": 16, "encoder_attention_heads": 16,
        "decoder_attention_heads": 16, "encoder_ffn_dim": 4096, "decoder_ffn_dim": 4096,
    }  # fmt: skip
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3}
    config = WhisperConfig(**(small if size == "tiny" else large), **special, use_cache=False)
    model = built(lambda: WhisperForConditionalGeneration(config), device, dtype_of(size))
    batch, frames, tokens = (2, 60, 10) if size == "tiny" else (16, 3000, 448)
    sound = noise(device, dtype_of(size), batch, config.num_mel_bins, frames)
    labels = draw_tokens(device, 90, batch, tokens)
    layers = lists_of(model, "model.encoder.layers", "model.decoder.layers")
    return ZooModel(model, layers, lambda _: model(input_features=sound, labels=labels).loss)


@entry
def wav2vec2(size: Size, device: torch.device) -> ZooModel:
    """wav2vec 2.0 with LayerDrop: some of its layers are left out of each step."""
    from transformers import Wav2Vec2Config, Wav2Vec2Model

    small = {
        "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 64,
        "conv_dim": (8, 8, 8), "conv_stride": (5, 2, 2), "conv_kernel": (10, 3, 3), "num_conv_pos_embeddings": 16,
        "num_conv_pos_embedding_groups": 4, "num_feat_extract_layers": 3,
    }  # fmt: skip
    large = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
    config = Wav2Vec2Config(**(small if size == "tiny" else large), layerdrop=0.1, mask_time_prob=0.0)
    model = built(lambda: Wav2Vec2Model(config), device, dtype_of(size))
    sound = noise(device, dtype_of(size), *((2, 2000) if size == "tiny" else (16, 160_000)))
    layers = lists_of(model, "encoder.layers")
    return ZooModel(model, layers, lambda _: model(sound).last_hidden_state.float().square().mean())
