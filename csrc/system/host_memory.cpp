#include "system/host_memory.h"

#include <sys/sysinfo.h>

#include <algorithm>

#include "system/parse.h"

namespace torchoffload {
namespace {

// From here on a limit is version 1's way to say none: the largest signed number, less a page.
constexpr uint64_t kNoLimitBytes = uint64_t{1} << 62;

// Calls `visit` with each line; it returns false to stop.
template <typename Visit>
void for_each_line(std::string_view text, Visit visit) {
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size());
    if (!visit(text.substr(0, end))) return;
    text.remove_prefix(std::min(end + 1, text.size()));
  }
}

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  while (true) {
    const size_t end = text.find(separator);
    parts.push_back(text.substr(0, end));
    if (end == std::string_view::npos) return parts;
    text.remove_prefix(end + 1);
  }
}

bool has_item(std::string_view list, std::string_view item) {
  const auto items = split(list, ',');
  return std::find(items.begin(), items.end(), item) != items.end();
}

struct Usage {
  uint64_t limit_bytes = 0;
  uint64_t used_bytes = 0;
  std::optional<uint64_t> inactive_file_bytes;

  uint64_t available_bytes() const {
    const uint64_t fixed_bytes = used_bytes - std::min(inactive_file_bytes.value_or(0), used_bytes);
    return limit_bytes - std::min(fixed_bytes, limit_bytes);
  }
};

std::optional<Usage> read_usage(const std::string& group, CgroupVersion version) {
  const bool is_two = version == CgroupVersion::Two;
  const auto limit = parse_limit(read_text(group + (is_two ? "/memory.max" : "/memory.limit_in_bytes")));
  const auto used = parse_limit(read_text(group + (is_two ? "/memory.current" : "/memory.usage_in_bytes")));
  if (!limit || !used) return std::nullopt;
  const std::string stat = read_text(group + "/memory.stat");
  return Usage{*limit, *used, parse_field(stat, is_two ? "inactive_file" : "total_inactive_file")};
}

// A limit counts for all groups below it: the process's group and each above it, up to the mount point. A container
// often sees its own group there, while /proc names the group as the host does: that path leads nowhere inside the
// mount, and walking up it ends at the mount point.
std::optional<Usage> tightest_usage(const std::string& mount_point, std::string path, CgroupVersion version) {
  std::optional<Usage> tightest;
  while (true) {
    const auto usage = read_usage(mount_point + path, version);
    if (usage && (!tightest || usage->available_bytes() < tightest->available_bytes())) tightest = usage;
    if (path.empty()) return tightest;
    path.resize(path.find_last_of('/'));
  }
}

// "/a/b" seen from a mount whose root is "/a" is "/b"; the root itself is "".
std::string path_below(const std::string& group, const std::string& root) {
  std::string path = group;
  const bool is_below = root != "/" && group.compare(0, root.size(), root) == 0 &&
                        (group.size() == root.size() || group[root.size()] == '/');
  if (is_below) path.erase(0, root.size());
  while (!path.empty() && path.back() == '/') path.pop_back();
  return !path.empty() && path.front() != '/' ? "/" + path : path;
}

}  // namespace

HostMemory read_host_memory(const std::string& root) {
  HostMemory memory;
  const std::string meminfo = read_text(root + "/proc/meminfo");
  memory.available_bytes = parse_field(meminfo, "MemAvailable");
  struct sysinfo info{};
  if (sysinfo(&info) == 0) {
    memory.total_bytes = uint64_t{info.totalram} * info.mem_unit;
  } else {
    memory.total_bytes = parse_field(meminfo, "MemTotal");
  }

  std::vector<CgroupMount> mounts = parse_mountinfo(read_text(root + "/proc/self/mountinfo"));
  if (mounts.empty()) {
    mounts = {{CgroupVersion::Two, "/sys/fs/cgroup", "/"}, {CgroupVersion::One, "/sys/fs/cgroup/memory", "/"}};
  }
  const std::string groups = read_text(root + "/proc/self/cgroup");
  std::optional<Usage> tightest;
  for (const CgroupMount& mount : mounts) {
    const std::string path = path_below(parse_group(groups, mount.version).value_or(""), mount.root);
    const auto usage = tightest_usage(root + mount.mount_point, path, mount.version);
    if (usage && (!tightest || usage->available_bytes() < tightest->available_bytes())) tightest = usage;
  }
  if (tightest) {
    memory.limit_bytes = tightest->limit_bytes;
    memory.limit_used_bytes = tightest->used_bytes;
    memory.limit_inactive_file_bytes = tightest->inactive_file_bytes;
  }
  return memory;
}

uint64_t default_budget_bytes(const HostMemory& memory, uint64_t local_world_size, uint64_t held_bytes) {
  const uint64_t process_count = std::max<uint64_t>(local_world_size, 1);
  std::optional<uint64_t> available_bytes = memory.available_bytes;
  if (memory.limit_bytes) {
    const Usage usage{*memory.limit_bytes, memory.limit_used_bytes.value_or(0), memory.limit_inactive_file_bytes};
    available_bytes = std::min(available_bytes.value_or(UINT64_MAX), usage.available_bytes());
  }
  const uint64_t known_bytes = available_bytes ? *available_bytes : memory.total_bytes.value_or(0);
  const uint64_t held_share_bytes = available_bytes ? held_bytes / 10 * 8 : 0;
  return known_bytes / 10 * 8 / process_count + held_share_bytes;
}

std::optional<uint64_t> parse_field(std::string_view text, std::string_view key) {
  std::optional<uint64_t> value;
  for_each_line(text, [&](std::string_view line) {
    if (line.substr(0, key.size()) != key) return true;
    std::string_view rest = line.substr(key.size());
    if (rest.empty() || (rest.front() != ':' && rest.front() != ' ')) return true;  // a longer key
    rest = strip(rest.substr(1));
    const bool is_in_kib = rest.size() > 3 && rest.substr(rest.size() - 3) == " kB";
    if (is_in_kib) rest = strip(rest.substr(0, rest.size() - 3));
    value = parse_number(rest);
    if (value && is_in_kib) value = *value > UINT64_MAX / 1024 ? std::nullopt : std::optional(*value * 1024);
    return false;
  });
  return value;
}

std::optional<uint64_t> parse_limit(std::string_view text) {
  const auto value = parse_number(strip(text));
  return value && *value < kNoLimitBytes ? value : std::nullopt;
}

// id parent major:minor root mount_point options [optional fields] - type source super_options
std::vector<CgroupMount> parse_mountinfo(std::string_view text) {
  std::vector<CgroupMount> mounts;
  for_each_line(text, [&](std::string_view line) {
    const auto fields = split(line, ' ');
    const auto dash = std::find(fields.begin(), fields.end(), "-");
    if (dash - fields.begin() < 6 || fields.end() - dash < 4) return true;
    const std::string_view type = dash[1];
    const bool is_one = type == "cgroup" && has_item(dash[3], "memory");
    if (type != "cgroup2" && !is_one) return true;
    const CgroupVersion version = is_one ? CgroupVersion::One : CgroupVersion::Two;
    mounts.push_back({version, std::string(fields[4]), std::string(fields[3])});
    return true;
  });
  return mounts;
}

// hierarchy:controllers:path; version 2 is hierarchy 0 with no controllers
std::optional<std::string> parse_group(std::string_view text, CgroupVersion version) {
  std::optional<std::string> group;
  for_each_line(text, [&](std::string_view line) {
    const size_t first = line.find(':');
    const size_t second = first == std::string_view::npos ? first : line.find(':', first + 1);
    if (second == std::string_view::npos) return true;
    const std::string_view controllers = line.substr(first + 1, second - first - 1);
    const bool is_two = line.substr(0, first) == "0" && controllers.empty();
    if (version == CgroupVersion::Two ? !is_two : !has_item(controllers, "memory")) return true;
    group = std::string(line.substr(second + 1));
    return false;
  });
  return group;
}

}  // namespace torchoffload
