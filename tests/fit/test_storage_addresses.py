"""core.storage_addresses finds the storages in a nest of tuples, lists and dicts, whatever the nest looks like."""

from typing import Any

import torch

from torchoffload._core import core


def address(tensor: torch.Tensor) -> int:
    found: int = tensor.untyped_storage()._cdata
    return found


def test_each_tensor_of_a_nest_is_found():
    tensors = [torch.ones(2) for _ in range(5)]
    first, second, third, fourth, fifth = tensors
    nest = (first, [second, 3, {"a": third, "b": (fourth, None, [[fifth, "text"]])}], [], {}, torch.float32)
    assert core.storage_addresses(nest) == {address(tensor) for tensor in tensors}
    assert core.storage_addresses(first) == {address(first)}
    assert core.storage_addresses([first, object()]) is None


def test_a_nest_that_contains_itself():
    tensor = torch.ones(2)
    nest: list[Any] = [tensor]
    nest.append(nest)
    assert core.storage_addresses(nest) == {address(tensor)}
    inner: dict[str, Any] = {"outer": nest}
    nest.append((inner, [inner, nest]))
    inner["itself"] = inner
    assert core.storage_addresses(nest) == {address(tensor)}


def test_a_nest_that_is_deeper_than_the_stack():
    tensor = torch.ones(2)
    nest: list[Any] = [tensor]
    for _ in range(1_000_000):
        nest = [nest]
    assert core.storage_addresses(nest) == {address(tensor)}
    while len(nest) == 1 and isinstance(nest[0], list):  # it is taken apart here: nor may its end take the stack
        nest = nest[0]


def test_each_container_is_looked_into_once():
    """By paths there would be 2**200 of them."""
    tensor = torch.ones(2)
    nest: list[Any] = [tensor]
    for _ in range(200):
        nest = [nest, nest]
    assert core.storage_addresses(nest) == {address(tensor)}
