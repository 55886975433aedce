"""The cards and the optimizers that are known by name."""

from types import SimpleNamespace

import pytest
import torch

from torchoffload import Card
from torchoffload._estimate.cards import CARDS, card_of_device, find_card
from torchoffload._estimate.optimizers import OPTIMIZERS, find_optimizer

WANTED = {
    "RTX 3090", "RTX 4090", "RTX 5090", "RTX 6000 Ada", "L40S", "T4", "A100 40GB", "A100 80GB", "H100 PCIe", "H100 SXM",
    "H200", "B200",
}  # fmt: skip


def test_all_cards_have_a_source():
    assert {card.name for card in CARDS} == WANTED
    assert all("NVIDIA" in card.source for card in CARDS)
    assert [card.name for card in CARDS if card.is_measured] == ["H200"]
    assert [card.name for card in CARDS if not card.has_bfloat16] == ["T4"]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("rtx4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("4090", "RTX 4090"),
        ("A100", "A100 80GB"),
        ("a100-40gb", "A100 40GB"),
        ("NVIDIA H200", "H200"),
        ("h100", "H100 SXM"),
        ("Tesla T4", "T4"),
        ("l40s", "L40S"),
    ],
)
def test_a_card_is_found_however_it_is_spelled(text: str, name: str):
    assert find_card(text).name == name


def test_every_card_is_found_by_its_name():
    assert all(find_card(card.name) is card for card in CARDS)


def test_a_card_may_be_given_by_its_figures():
    card = Card(
        name="own", half_tflops=1, single_tflops=1, tf32_tflops=1, memory_gib=1, bandwidth_gb_per_s=1, link_gb_per_s=1
    )
    assert find_card(card) is card
    assert card.source == "the caller"


@pytest.mark.parametrize(("value", "error"), [(0, ValueError), (float("nan"), ValueError), ("1", TypeError)])
def test_figures_of_a_card_are_checked(value: object, error: type):
    figures = dict.fromkeys(("half_tflops", "single_tflops", "tf32_tflops", "memory_gib", "bandwidth_gb_per_s"), 1.0)
    with pytest.raises(error, match="link_gb_per_s"):
        Card(name="own", link_gb_per_s=value, **figures)


def device(name: str, capability: tuple[int, int] = (9, 0), **more: int) -> SimpleNamespace:
    major, minor = capability
    more |= {"multi_processor_count": 108, "total_memory": 40 << 30}
    return SimpleNamespace(name=name, major=major, minor=minor, **more)


@pytest.mark.parametrize(
    ("name", "card"),
    [
        ("NVIDIA GeForce RTX 4090", "RTX 4090"), ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB"), ("NVIDIA A100 80GB PCIe", "A100 80GB"), ("Tesla T4", "T4"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"), ("NVIDIA H100 PCIe", "H100 PCIe"), ("NVIDIA H200", "H200"),
    ],
)  # fmt: skip
def test_a_device_is_the_card_of_its_name(name: str, card: str):
    found = card_of_device(device(name))
    assert found is not None
    assert found.name == card


def test_another_device_is_known_by_its_clocks():
    """Those of an A100, whose rates they give to within a tenth."""
    clocks = {"clock_rate": 1_410_000, "memory_clock_rate": 1_215_000, "memory_bus_width": 5120}
    found = card_of_device(device("NVIDIA A100X", (8, 0), **clocks))
    assert found is not None
    assert found.half_tflops == pytest.approx(312, rel=0.1)
    assert found.single_tflops == pytest.approx(19.5, rel=0.1)
    assert found.bandwidth_gb_per_s == pytest.approx(1555, rel=0.1)


@pytest.mark.parametrize("name", ["NVIDIA GeForce RTX 4090 Laptop GPU", "GRID A100X-40C"])
def test_a_device_that_tells_no_clocks_is_not_guessed(name: str):
    assert card_of_device(device(name, clock_rate=0)) is None


def test_an_unknown_card_that_resembles_none_is_an_error_that_lists_them():
    with pytest.raises(ValueError, match="The cards: RTX 3090"):
        find_card("abacus")


@pytest.mark.parametrize(
    "name", ["adamw", "adam", "sgd", "sgd-momentum", "adafactor"]
)  # the others are not part of PyTorch
def test_states_are_those_that_optimizers_of_pytorch_keep(name: str):
    parameters = [torch.nn.Parameter(torch.randn(8, 6)), torch.nn.Parameter(torch.randn(6))]
    kinds = {
        "adamw": torch.optim.AdamW,
        "adam": torch.optim.Adam,
        "sgd": torch.optim.SGD,
        "sgd-momentum": lambda each: torch.optim.SGD(each, lr=0.1, momentum=0.9),
        "adafactor": torch.optim.Adafactor,
    }
    optimizer = kinds[name](parameters)
    for each in parameters:
        each.grad = torch.randn_like(each)
    optimizer.step()
    kept = [
        value
        for state in optimizer.state.values()
        for key, value in state.items()
        if isinstance(value, torch.Tensor) and key != "step"
    ]
    assert OPTIMIZERS[name].state_bytes(parameters) == sum(each.nbytes for each in kept)


def test_an_optimizer_may_be_given_as_bytes_for_each_parameter():
    parameters = [torch.empty(10)]
    assert find_optimizer(12).state_bytes(parameters) == 120
    assert find_optimizer(None).state_bytes(parameters) == 0
    with pytest.raises(TypeError, match="a name or the bytes"):
        find_optimizer([])
