// HostMemory: how much of the machine's memory this process may take, by the kernel and by its control group.
// Ownership:     values only; it closes the files that it reads.
// Thread safety: every function, any thread.
// Not handled:   swap; memory.high (it slows processes and kills none); limits of a process (mmap tells them).
//
// Sources: sysinfo(2); /proc/meminfo, proc(5); control groups, the kernel's admin-guide/cgroup-v2.rst and
// admin-guide/cgroup-v1/memory.rst. A file that is missing, or not as documented, leaves its fields absent.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace torchoffload {

struct HostMemory {
  std::optional<uint64_t> total_bytes;
  std::optional<uint64_t> available_bytes;  // MemAvailable: without swapping
  // Of the control group that leaves least room, from this process's up to the root; absent if none limits.
  std::optional<uint64_t> limit_bytes;
  std::optional<uint64_t> limit_used_bytes;
  std::optional<uint64_t> limit_inactive_file_bytes;  // the part of the used bytes that the kernel takes back first
};

// `root`: the folder that holds proc/ and sys/, so that tests can make their own. Only total_bytes is always the
// running kernel's, if it can tell.
HostMemory read_host_memory(const std::string& root = "/");

// 0.8 x min(available, limit - used + inactive file) / local_world_size, over the known values; of the total if nothing
// else is known; 0 if nothing is. `held_bytes`: the bytes that the budget's owner holds already, which are no longer
// available; the machine's other processes are taken to hold as much each. So the budget is the same, however much of
// it is held.
uint64_t default_budget_bytes(const HostMemory& memory, uint64_t local_world_size, uint64_t held_bytes);

// The parsers, for tests.

// The value of `key` in a file of lines `key value`, `key: value` or `key: value kB`, in bytes (or in the file's own
// unit).
std::optional<uint64_t> parse_field(std::string_view text, std::string_view key);

// A file that holds one number. "max", and version 1's number for no limit, are absent.
std::optional<uint64_t> parse_limit(std::string_view text);

enum class CgroupVersion : uint8_t { One, Two };

// The mount point of a hierarchy that limits memory, and the group that stands there.
struct CgroupMount {
  CgroupVersion version = CgroupVersion::Two;
  std::string mount_point;
  std::string root;
};
std::vector<CgroupMount> parse_mountinfo(std::string_view text);

// This process's group in a hierarchy, from /proc/self/cgroup.
std::optional<std::string> parse_group(std::string_view text, CgroupVersion version);

}  // namespace torchoffload
