// Numa: memory near a device. On a machine with several nodes a copy across them runs below the link's rate.
// Ownership:     values only. prefer_node() sets a policy of memory that stays the caller's.
// Thread safety: every function, any thread.
//
// Sources: the kernel's ABI/testing/sysfs-bus-pci (numa_node) and ABI/stable/sysfs-devices-node (cpulist, has_memory);
// mbind(2). If a file is silent, or not written as documented, the answer is unknown.
#pragma once

#include <sched.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace torchoffload {

// The node with memory at which a PCI device is; nullopt: not known, or the machine has one node only. `address`: as
// "0000:1b:00.0", in either case. `root`: the folder that holds sys/, so that tests can make their own.
std::optional<int> node_of_pci_device(std::string address, const std::string& root = "/");

// The node's CPUs; nullopt: not known, or none.
std::optional<cpu_set_t> cpus_of_node(int node, const std::string& root = "/");

// Pages that were not touched yet will be the node's, as long as it has some. False: refused, as in containers without
// the right to; then a page belongs to the node of the CPU that touches it first.
bool prefer_node(void* address, uint64_t nbytes, int node);

// A list as "0-3,8,10-11"; nullopt if it is none.
std::optional<cpu_set_t> parse_cpu_list(std::string_view text);

}  // namespace torchoffload
