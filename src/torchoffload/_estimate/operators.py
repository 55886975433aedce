"""Operators of a step: how many operations each of them computes, and how many bytes it reads and writes.

Operations are counted by formulas of our own if those of ``torch.utils.flop_counter`` (2.9 to 2.15) are not right:
its formula of ``convolution_backward`` ignores groups, the one of attention knows neither causal masks nor grouped
queries, and ``_grouped_mm`` has none.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

__all__ = ["Cost", "cost_of"]

_aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one call of an operator.

    Attributes
    ----------
    kind : str
        ``"product"``, ``"convolution"``, ``"attention"``, ``"attention backward"``, or ``"other"``.
    flops : int
        Its operations; a product and a sum are two.
    nbytes : int
        The bytes that it reads and writes.
    smallest : int
        The smallest of the three sizes of a product, and of a convolution its input channels for each output: tensor
        cores do little with small ones. The size of attention's heads. 0 for the others.
    length : int
        How many keys attention has; 0 for the others.
    dtype : torch.dtype
        The dtype in which it computes.
    """

    kind: str
    flops: int
    nbytes: int
    smallest: int
    dtype: torch.dtype
    length: int = 0


_PRODUCTS = (_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm, _aten._grouped_mm)
_GATHERS = (_aten.embedding, _aten.index, _aten.index_select, _aten.gather, _aten._unsafe_index, _aten.select_backward)
_MAKES_NOTHING = (_aten.empty, _aten.empty_like, _aten.new_empty, _aten.empty_strided, _aten.detach,
                  _aten.new_empty_strided)  # fmt: skip


def cost_of(
    operator: Any,
    args: Any,
    kwargs: Any,
    tensors_in: list[torch.Tensor],
    made: list[torch.Tensor],
    written: list[torch.Tensor],
) -> Cost:
    """Return the cost of a call of an operator.

    Parameters
    ----------
    operator : OpOverload
        The operator.
    args, kwargs : tuple, dict
        Its arguments.
    tensors_in, made, written : list of Tensor
        The tensors among its arguments, those that it made, and those that it wrote to.
    """
    packet = operator.overloadpacket
    dtype = next((each.dtype for each in tensors_in if each.is_floating_point()), torch.float32)
    if packet in _MAKES_NOTHING or (not made and not written):
        return Cost("other", 0, 0, 0, dtype)
    read = sum(map(_nbytes, tensors_in))
    returned = sum(map(_nbytes, made)) + sum(map(_nbytes, written))
    if packet in _GATHERS:
        read = min(read, returned)
    nbytes = read + returned
    if packet in _PRODUCTS:
        flops, smallest = _product(packet, args)
        return Cost("product", flops, nbytes, smallest, dtype)
    if packet in (_aten.convolution, _aten.convolution_backward):
        flops, smallest = _convolution(packet, args, made)
        return Cost("convolution", flops, nbytes, smallest, dtype)
    name = packet.__name__
    if name in _ATTENTION:
        arguments = _arguments(operator, args, kwargs)
        is_backward = name.endswith("_backward")
        kind, flops = "attention backward" if is_backward else "attention", _attention(arguments)
        return Cost(kind, flops, nbytes, arguments["query"].shape[-1], dtype, length=arguments["key"].shape[-2])
    return Cost("other", _by_torch(packet, args, kwargs, made), nbytes, 0, dtype)


def _nbytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor, which are no more than those of its storage if it is expanded."""
    nbytes = tensor.numel() * tensor.element_size()
    return min(nbytes, tensor.untyped_storage().nbytes()) if tensor.layout is torch.strided else nbytes


def _product(packet: Any, args: Any) -> tuple[int, int]:
    if packet in (_aten.addmm, _aten.baddbmm):
        args = args[1:]
    left, right = args[0], args[1]
    rows, inner, columns = left.shape[-2], left.shape[-1], right.shape[-1]
    count = 1 if packet is _aten._grouped_mm and 2 in (left.dim(), right.dim()) else left.shape[:-2].numel()
    return 2 * count * rows * inner * columns, min(rows, inner, columns)


def _convolution(packet: Any, args: Any, made: list[torch.Tensor]) -> tuple[int, int]:
    if packet is _aten.convolution_backward:
        grad, x, weight, is_transposed, mask = args[0], args[1], args[2], args[7], args[10]
        count = int(mask[0]) + int(mask[1])
    else:
        grad, x, weight, is_transposed, count = made[0], args[0], args[1], args[6], 1
    each = weight.numel() // weight.shape[0]  # weights have the shape (out, in / groups, ...), or transposed
    if is_transposed:
        return 2 * count * x.numel() * each, weight.shape[1]
    return 2 * count * grad.numel() * each, weight.shape[1]


_ATTENTION = frozenset(
    f"{name}{suffix}"
    for name in (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
    )
    for suffix in ("", "_backward")
)


def _arguments(operator: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    names = [each.name for each in operator._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _attention(arguments: dict[str, Any]) -> int:
    """Return the operations of attention: two products, five in backward, and half of that if it is causal."""
    query, key, value = arguments["query"], arguments["key"], arguments["value"]
    batch, heads, length, size = query.shape
    products = 5 * (size + value.shape[-1]) // 2 if "grad_out" in arguments or "grad_out_" in arguments else None
    sizes = size + value.shape[-1] if products is None else products
    flops = 2 * batch * heads * length * key.shape[-2] * sizes
    return int(flops // 2 if arguments.get("is_causal") is True else flops)


def _by_torch(packet: Any, args: Any, kwargs: Any, made: list[torch.Tensor]) -> int:
    formula: Callable[..., int] | None = flop_registry.get(packet)
    if formula is None:
        return 0
    try:
        return int(formula(*args, **kwargs, out_val=made[0] if len(made) == 1 else tuple(made)))
    except Exception:  # a formula that does not know these arguments
        return 0
