#include "system/numa.h"

#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <climits>
#include <vector>

#include "system/parse.h"

namespace torchoffload {
namespace {

constexpr int kMaxNode = 1023;

std::string_view first_line(std::string_view text) { return text.substr(0, text.find('\n')); }

// Takes a number from the front of `text`.
std::optional<int> take_number(std::string_view& text) {
  int number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc()) return std::nullopt;
  text.remove_prefix(static_cast<size_t>(end - text.data()));
  return number;
}

}  // namespace

std::optional<cpu_set_t> parse_cpu_list(std::string_view text) {
  cpu_set_t cpus;
  CPU_ZERO(&cpus);
  text = first_line(text);
  while (true) {
    const std::optional<int> begin = take_number(text);
    std::optional<int> end = begin;
    if (begin && text.starts_with('-')) {
      text.remove_prefix(1);
      end = take_number(text);
    }
    if (!begin || !end || *begin < 0 || *end < *begin || *end >= CPU_SETSIZE) return std::nullopt;
    for (int cpu = *begin; cpu <= *end; ++cpu) CPU_SET(static_cast<size_t>(cpu), &cpus);
    if (text.empty()) return cpus;
    if (!text.starts_with(',')) return std::nullopt;
    text.remove_prefix(1);
  }
}

std::optional<int> node_of_pci_device(std::string address, const std::string& root) {
  // Nodes are listed as CPUs are.
  const auto with_memory = parse_cpu_list(read_text(root + "/sys/devices/system/node/has_memory"));
  if (!with_memory || CPU_COUNT(&*with_memory) < 2) return std::nullopt;
  std::ranges::transform(address, address.begin(), [](unsigned char letter) { return std::tolower(letter); });
  const std::string text = read_text(root + "/sys/bus/pci/devices/" + address + "/numa_node");
  std::string_view rest = first_line(text);
  const std::optional<int> node = take_number(rest);
  const bool is_known = node && rest.empty() && *node >= 0 && *node <= kMaxNode;
  if (!is_known || !CPU_ISSET(static_cast<size_t>(*node), &*with_memory)) return std::nullopt;
  return node;
}

std::optional<cpu_set_t> cpus_of_node(int node, const std::string& root) {
  return parse_cpu_list(read_text(root + "/sys/devices/system/node/node" + std::to_string(node) + "/cpulist"));
}

bool prefer_node(void* address, uint64_t nbytes, int node) {
  if (node < 0 || node > kMaxNode) return false;
  constexpr size_t kBits = sizeof(unsigned long) * CHAR_BIT;
  std::vector<unsigned long> mask(static_cast<size_t>(kMaxNode) / kBits + 1, 0);
  mask[static_cast<size_t>(node) / kBits] = 1UL << (static_cast<size_t>(node) % kBits);
  // The kernel reads one bit less than the call names.
  return syscall(SYS_mbind, address, nbytes, MPOL_PREFERRED, mask.data(), mask.size() * kBits + 1, 0U) == 0;
}

}  // namespace torchoffload
