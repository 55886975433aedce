"""Cards: the rates of a GPU's computation, memory and link, by its data sheet."""

import difflib
import re
from dataclasses import dataclass
from typing import Any

__all__ = ["CARDS", "Card", "card_of_device", "find_card"]

# Copies between pinned memory and the device, one direction, in GB/s. Generation 5 was measured on an H200
# (docs/performance.md): 55 of the 63 that 16 lanes carry. Of the 31.5 and 15.8 of the older ones about four fifths are
# assumed, which nobody here has measured.
_PCIE_5, _PCIE_4, _PCIE_3 = 55.0, 25.0, 12.3


@dataclass(frozen=True, kw_only=True)
class Card:
    """A GPU, by the figures that an estimate needs.

    Attributes
    ----------
    name : str
        Its name.
    half_tflops : float
        The dense rate of matrix products in bfloat16 with float32 accumulation, in 1e12 operations a second, a product
        and a sum being two. Data sheets often print twice that, for sparse matrices.
    single_tflops : float
        The rate in float32.
    tf32_tflops : float
        The dense rate in TF32, which convolutions in float32 use by default.
    memory_gib : float
        The memory that a CUDA program sees, in GiB: less than the name says.
    bandwidth_gb_per_s : float
        Of the device's memory, in 1e9 bytes a second.
    link_gb_per_s : float
        Between the device and pinned host memory, in each direction, in 1e9 bytes a second.
    has_bfloat16 : bool, default True
        Whether it computes in bfloat16. If not, ``half_tflops`` is that of float16.
    is_measured : bool, default False
        Whether steps on it were measured and compared with estimates.
    source : str, default "the caller"
        The source of the figures.
    """

    name: str
    half_tflops: float
    single_tflops: float
    tf32_tflops: float
    memory_gib: float
    bandwidth_gb_per_s: float
    link_gb_per_s: float
    has_bfloat16: bool = True
    is_measured: bool = False
    source: str = "the caller"

    def __post_init__(self) -> None:
        for name in _RATES:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"Card: {name} must be a number, got {type(value).__name__}")
            if not 0 < value < float("inf"):
                raise ValueError(f"Card: {name} must be above 0 and finite, got {value}")


_RATES = ("half_tflops", "single_tflops", "tf32_tflops", "memory_gib", "bandwidth_gb_per_s", "link_gb_per_s")


def _card(
    name: str, half: float, single: float, tf32: float, memory: float, bandwidth: float, link: float, source: str,
    *, has_bfloat16: bool = True, is_measured: bool = False,
) -> Card:  # fmt: skip
    return Card(
        name=name, half_tflops=half, single_tflops=single, tf32_tflops=tf32, memory_gib=memory,
        bandwidth_gb_per_s=bandwidth, link_gb_per_s=link, has_bfloat16=has_bfloat16, is_measured=is_measured,
        source=source,
    )  # fmt: skip


# Dense rates with float32 accumulation. The memory is the figure of torch.cuda.get_device_properties, with ECC if the
# card has it on by default.
#
# On 2026-11-25 the figures were compared with public pages other than the data sheets that ``source`` names. Confirmed:
# rates and bandwidth of the A100s, the H100 SXM and the H200 (https://glennklockwood.com/garden/processors/A100,
# .../h100), of the L40S (https://www.mullet.se/product.html?product_id=355414) and of the RTX 4090
# (https://waredb.com/processor/nvidia-geforce-rtx-4090), the rates of the H100 PCIe
# (https://hmc-tech.com/gpu/nvidia-h100-vs-nvidia-h200-sxm-vs-nvidia-gb200, where 3,030 for sparse int8 is four times
# 756), rates and bandwidth of the RTX 5090 (https://www.spheron.network/blog/nvidia-rtx-5090-specs/, where 838 for
# sparse float16 with float16 accumulation is four times 209.5) and of the B200
# (https://hmc-tech.com/gpu/nvidia-b200-vs-nvidia-gb200, https://hmc-tech.com/gpus/nvidia-b200-vs-nvidia-b100), the
# rates of the T4 (https://sysrqmts.com/en/gpus/nvidia/tesla/t4), and the memory of six cards, by errors of PyTorch's
# that users have reported: 23.5 to 23.7 GiB (RTX 4090), 31.4 (RTX 5090), 44.4 (RTX 6000 Ada), 14.6 to 14.8 (T4), 39.5
# (A100 40GB), 79.1 (H100).
#
# Not confirmed: RTX 3090, rates of its tensor cores and bandwidth; RTX 6000 Ada, all but its float32 rate and its
# memory; H100 PCIe, bandwidth (one page says 2,000); T4, bandwidth (10 Gbit/s on 256 lines are 320 GB/s, the data sheet
# says 300); B200, memory, and bandwidth (pages say 7.7 or 8 TB/s); and the links of generations 3 and 4.
CARDS = (
    _card("RTX 3090", 71.0, 35.6, 35.6, 23.7, 936, _PCIE_4,
          "NVIDIA Ampere GA102 GPU Architecture, whitepaper, table of the GeForce RTX 3090"),
    _card("RTX 4090", 165.2, 82.6, 82.6, 23.5, 1008, _PCIE_4,
          "NVIDIA Ada GPU Architecture, whitepaper, appendix A"),
    _card("RTX 5090", 209.5, 104.8, 104.8, 31.4, 1792, _PCIE_5,
          "NVIDIA RTX Blackwell GPU Architecture, whitepaper, appendix A"),
    _card("RTX 6000 Ada", 364.2, 91.1, 182.1, 44.4, 960, _PCIE_4,
          "NVIDIA Ada GPU Architecture, whitepaper, appendix B; RTX 6000 Ada data sheet"),
    _card("L40S", 362.1, 91.6, 183.0, 44.4, 864, _PCIE_4, "NVIDIA L40S data sheet"),
    _card("T4", 65.0, 8.1, 8.1, 14.6, 300, _PCIE_3, "NVIDIA T4 data sheet; no bfloat16, the rate is that of float16",
          has_bfloat16=False),
    _card("A100 40GB", 312.0, 19.5, 156.0, 39.4, 1555, _PCIE_4, "NVIDIA A100 data sheet, SXM 40GB"),
    _card("A100 80GB", 312.0, 19.5, 156.0, 79.2, 2039, _PCIE_4, "NVIDIA A100 data sheet, SXM 80GB"),
    _card("H100 PCIe", 756.0, 51.0, 378.0, 79.1, 2000, _PCIE_5, "NVIDIA H100 data sheet, PCIe, halved: it is sparse"),
    _card("H100 SXM", 989.5, 67.0, 494.5, 79.1, 3350, _PCIE_5, "NVIDIA H100 data sheet, SXM, halved: it is sparse"),
    _card("H200", 989.5, 67.0, 494.5, 139.7, 4800, _PCIE_5, "NVIDIA H200 data sheet, SXM, halved: it is sparse",
          is_measured=True),
    _card("B200", 2250.0, 75.0, 1125.0, 178.0, 7700, _PCIE_5,
          "NVIDIA HGX B200 data sheet, an eighth of the eight, halved: it is sparse"),
)  # fmt: skip
"""The cards that ``estimate`` knows by name."""

_ALIASES = {"a100": "A100 80GB", "h100": "H100 SXM", "rtx6000ada": "RTX 6000 Ada", "a10040": "A100 40GB",
            "a10080": "A100 80GB", "h100sxm5": "H100 SXM", "6000ada": "RTX 6000 Ada"}  # fmt: skip


def _plain(name: str) -> str:
    """Return a name without the parts that people write differently."""
    letters = re.sub(r"[^a-z0-9]", "", name.lower())
    for word in ("nvidia", "geforce", "tesla"):
        letters = letters.replace(word, "")
    return letters


def find_card(gpu: object) -> Card:
    """Return the card of a name, however it is spelled; a ``Card`` is returned as it is.

    Raises
    ------
    TypeError, ValueError
        There is no such card; the message names one that it resembles.
    """
    if isinstance(gpu, Card):
        return gpu
    if not isinstance(gpu, str):
        raise TypeError(f"gpu must be the name of a card or a torchoffload.Card, got {type(gpu).__name__}")
    known: dict[str, Card] = {}
    for card in CARDS:
        plain = _plain(card.name)
        known |= dict.fromkeys((plain, plain.removesuffix("gb"), plain.removeprefix("rtx")), card)
    known |= {alias: next(card for card in CARDS if card.name == name) for alias, name in _ALIASES.items()}
    wanted = _plain(gpu)
    if wanted in known:
        return known[wanted]
    near = difflib.get_close_matches(wanted, known, n=1, cutoff=0.5)
    end = f"; did you mean {known[near[0]].name!r}?" if near else "."
    names = ", ".join(card.name for card in CARDS)
    raise ValueError(f"gpu: no card {gpu!r} is known{end} The cards: {names}. Any other one: torchoffload.Card(...).")


# The names that torch.cuda.get_device_name gives to the cards above, unless they are those names themselves.
_DEVICE_NAMES = {
    "RTX 6000 Ada Generation": "RTX 6000 Ada", "A100-SXM4-40GB": "A100 40GB", "A100-PCIE-40GB": "A100 40GB",
    "A100-SXM4-80GB": "A100 80GB", "A100 80GB PCIe": "A100 80GB", "H100 80GB HBM3": "H100 SXM", "H200 NVL": "H200",
}  # fmt: skip

# Operations of tensor cores in a clock and multiprocessor, in bfloat16 (before 8.0 in float16) with float32
# accumulation, and those in float32, by compute capability. The figures of the cards above are about their products
# with processors and clock. Of cards that share a capability the slowest is taken: an L40S computes twice as fast.
_PER_CLOCK = {
    (7, 0): (1024, 128), (7, 5): (1024, 128), (8, 0): (2048, 128), (8, 6): (512, 256), (8, 9): (512, 256),
    (9, 0): (4096, 256), (10, 0): (8192, 256), (12, 0): (512, 256),
}  # fmt: skip


def card_of_device(properties: Any) -> Card | None:
    """Return the card that a CUDA device is, by its name, or else by its processors and clocks.

    Parameters
    ----------
    properties : object
        As ``torch.cuda.get_device_properties`` returns them.

    Returns
    -------
    Card or None
        None if neither the name is known nor the clocks are told.
    """
    plain = _plain(properties.name)
    for card in CARDS:
        if plain == _plain(card.name):
            return card
    for name, of_card in _DEVICE_NAMES.items():
        if plain == _plain(name):
            return find_card(of_card)
    # In kHz, and in bits; a virtual machine may hide the clocks.
    clock_hz, memory_hz = (1e3 * (getattr(properties, f"{name}clock_rate", 0) or 0) for name in ("", "memory_"))
    bus_bits = getattr(properties, "memory_bus_width", 0) or 0
    known = _PER_CLOCK.get((properties.major, properties.minor))
    if known is None or not (clock_hz and memory_hz and bus_bits):
        return None
    half, single = (properties.multi_processor_count * clock_hz * each / 1e12 for each in known)
    return Card(
        name=properties.name, half_tflops=half, single_tflops=single,
        tf32_tflops=max(single, half / 2), memory_gib=properties.total_memory / 2**30,
        bandwidth_gb_per_s=2 * memory_hz * bus_bits / 8 / 1e9, link_gb_per_s=_PCIE_4,
        has_bfloat16=properties.major >= 8, source="its processors and clocks",
    )  # fmt: skip
