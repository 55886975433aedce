"""The operators that a GPU would run, for fake tensors on the CPU, for which PyTorch chooses others.

They differ in the tensors that they save: attention by flash and by efficient kernels, dropout with a mask of one byte,
and the lists of autocast.
"""

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

__all__ = ["GpuKernels", "kernels_of_a_gpu"]

_aten = torch.ops.aten
_HALF = (torch.bfloat16, torch.float16)
_LARGEST_HEAD = 256  # of flash attention

# Autocast on CUDA runs these in float32, and on a CPU it leaves some of them as they are
# (torch.amp's documentation, "CUDA Ops that can autocast to float32").
_IN_FLOAT32 = frozenset(
    {
        "acos", "asin", "cosh", "cosine_embedding_loss", "cdist", "cosine_similarity", "cross_entropy", "cumprod",
        "cumsum", "dist", "erfinv", "exp", "expm1", "group_norm", "hinge_embedding_loss", "kl_div", "l1_loss",
        "layer_norm", "log", "log10", "log_softmax", "log1p", "log2", "margin_ranking_loss", "mse_loss",
        "multilabel_margin_loss", "multi_margin_loss", "nll_loss", "norm", "normalize", "pdist", "poisson_nll_loss",
        "pow", "prod", "reciprocal", "rsqrt", "sinh", "smooth_l1_loss", "soft_margin_loss", "softmax", "softmin",
        "softplus", "sum", "renorm", "tan", "triplet_margin_loss", "rms_norm",
    }
)  # fmt: skip


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    """Attention by the kernel that a GPU would take: flash attention without a mask, else the efficient one."""
    if torch.is_autocast_enabled("cpu"):
        query, key, value = (each.to(torch.get_autocast_dtype("cpu")) for each in (query, key, value))

    def by_math() -> Any:
        return _attention_by_math(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)

    size, is_half = query.shape[-1], query.dtype in _HALF
    if query.dim() != 4 or size != value.shape[-1]:
        return by_math()
    is_flash = is_half and attn_mask is None and size <= _LARGEST_HEAD
    if enable_gqa and query.shape[1] != key.shape[1] and not is_flash:
        key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
        value = value.repeat_interleave(query.shape[1] // value.shape[1], 1)
    if is_flash:
        padding = -size % 8
        padded = [functional.pad(each, (0, padding)) if padding else each for each in (query, key, value)]
        output = _aten._scaled_dot_product_flash_attention(*padded, dropout_p, is_causal, scale=scale or size**-0.5)[0]
        return output[..., :size] if padding else output
    if query.shape[1] != key.shape[1] or size % (8 if is_half else 4):
        return by_math()
    # A position bias may be a permuted table, as T5's in transformers 5.17: the efficient kernel cannot read it.
    if attn_mask is not None and attn_mask.stride(-1) != 1:
        return by_math()
    if attn_mask is not None:
        if attn_mask.dtype is torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, float("-inf"))
        attn_mask = attn_mask.to(query.dtype).expand(*query.shape[:3], key.shape[2])
    return _aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale
    )[0]


def _attention_by_math(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None, dropout_p: float,
    is_causal: bool, scale: float | None, enable_gqa: bool,
) -> torch.Tensor:  # fmt: skip
    """Attention by operators, as ``_scaled_dot_product_attention_math`` of ATen (native/transformers/attention.cpp).

    That function itself would take the CPU's dropout, which saves its mask in float32: four bytes an element, where a
    GPU saves one. And on a CPU ``scaled_dot_product_attention`` may choose a fused kernel.
    """
    dtype = query.dtype
    if dtype in _HALF and not _reduces_in_half():
        query, key, value = query.float(), key.float(), value.float()
    if enable_gqa and query.dim() > 2:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    if is_causal:
        attn_mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, float("-inf"))
    root = abs(scale or query.shape[-1] ** -0.5) ** 0.5  # its sign changes no byte
    weights = torch.matmul(query * root, key.transpose(-2, -1) * root)
    if attn_mask is not None:
        weights.add_(attn_mask)
    weights = _dropout(_aten._safe_softmax(weights, -1), dropout_p)
    return torch.matmul(weights, value).to(dtype)


def _reduces_in_half() -> bool:
    """Return whether attention by operators may stay in bfloat16 or float16, which is off by default."""
    return bool(torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed())  # type: ignore[no-untyped-call]


def _dropout(
    input: torch.Tensor,  # noqa: A002 (its name in torch)
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> torch.Tensor:
    """Dropout by the kernel of a GPU, which saves a mask of one byte an element."""
    if not training or p == 0 or inplace:
        return _plain_dropout(input, p, training, inplace)
    return torch.native_dropout(input, p, True)[0]


_stock_attention: Any = functional.scaled_dot_product_attention
_plain_dropout = functional.dropout


class GpuKernels(TorchFunctionMode):
    """Puts the operators of a GPU in the place of those that are called.

    PyTorch switches such a mode off in backward, and inside of its own functions in Python.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        keywords = kwargs or {}
        if func is _stock_attention:
            return _attention(*args, **keywords)
        if func is _plain_dropout or func is torch.dropout:
            return _dropout(*args, **keywords)
        if torch.is_autocast_enabled("cpu") and getattr(func, "__name__", "") in _IN_FLOAT32:
            args = tuple(map(_in_float32, args))
            keywords = {name: _in_float32(value) for name, value in keywords.items()}
        return func(*args, **keywords)


def _in_float32(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype in _HALF else value


@contextlib.contextmanager
def kernels_of_a_gpu() -> Iterator[None]:
    """Have attention, dropout and autocast work on this thread as they do on a GPU."""
    # Also from inside of torch.nn.functional, which switches function modes off, as in multi_head_attention_forward.
    thread = threading.get_ident()
    before = functional.scaled_dot_product_attention, functional.dropout

    @functools.wraps(_stock_attention)
    def attention(*args: Any, **kwargs: Any) -> Any:
        return (_attention if threading.get_ident() == thread else before[0])(*args, **kwargs)

    @functools.wraps(_plain_dropout)
    def dropout(*args: Any, **kwargs: Any) -> Any:
        return (_dropout if threading.get_ident() == thread else before[1])(*args, **kwargs)

    functional.scaled_dot_product_attention, functional.dropout = attention, dropout
    try:
        with GpuKernels():
            yield
    finally:
        functional.scaled_dot_product_attention, functional.dropout = before
