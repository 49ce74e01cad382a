#include "core/memory.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <limits>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

namespace hscache {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kNoLimit = std::numeric_limits<std::int64_t>::max();

// A file that holds one number; absent where it is missing or says "max".
std::optional<std::int64_t> read_number(const fs::path& path) {
  std::ifstream file(path);
  std::int64_t number = 0;
  if (file >> number) return number;
  return std::nullopt;
}

// The number behind `name` in a file of lines "name number".
std::optional<std::int64_t> read_field(const fs::path& path, const std::string& name) {
  std::ifstream file(path);
  std::string word;
  std::int64_t number = 0;
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    if (words >> word >> number && word == name) return number;
  }
  return std::nullopt;
}

struct Group {
  std::int64_t limit = kNoLimit;
  std::int64_t used = 0;  // caches that can be dropped left out
};

// What the two versions of control groups call the same things.
struct Version {
  const char* mount;
  const char* controller;  // in /proc/self/cgroup
  const char* limit;
  const char* used;
  const char* cache;  // in memory.stat
};
constexpr Version kVersions[] = {
    {"sys/fs/cgroup", "", "memory.max", "memory.current", "inactive_file"},
    {"sys/fs/cgroup/memory", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes",
     "total_inactive_file"},
};

// The process's own group below a version's mount, as in a line "4:memory:/path" or "0::/path".
// Empty where there is none, and "/" seen from inside of a container.
fs::path own_group(const fs::path& root, const std::string& controller) {
  std::ifstream file(root / "proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    const std::size_t first = line.find(':');
    const std::size_t second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string names = "," + line.substr(first + 1, second - first - 1) + ",";
    if (names.find("," + controller + ",") == std::string::npos) continue;
    return fs::path(line.substr(second + 1)).relative_path();
  }
  return {};
}

// The groups that this process is in, from its own up to the root's.
std::vector<Group> groups(const fs::path& root) {
  std::vector<Group> found;
  for (const Version& version : kVersions) {
    const fs::path mount = root / version.mount;
    fs::path below = own_group(root, version.controller);
    for (bool last = false; !last; below = below.parent_path()) {
      last = below.empty();
      const fs::path folder = last ? mount : mount / below;
      const auto limit = read_number(folder / version.limit);
      if (!limit || *limit <= 0) continue;
      const std::int64_t used = read_number(folder / version.used).value_or(0);
      found.push_back(
          {*limit, used - read_field(folder / "memory.stat", version.cache).value_or(0)});
    }
  }
  return found;
}

}  // namespace

std::int64_t machine_memory_bytes(const fs::path& root) {
  std::int64_t bytes = static_cast<std::int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);
  for (const Group& group : groups(root)) bytes = std::min(bytes, group.limit);
  return bytes;
}

std::int64_t available_memory_bytes(const fs::path& root) {
  const auto kilobytes = read_field(root / "proc/meminfo", "MemAvailable:");
  std::int64_t bytes = kilobytes ? *kilobytes << 10 : kNoLimit;
  for (const Group& group : groups(root)) bytes = std::min(bytes, group.limit - group.used);
  return bytes;
}

}  // namespace hscache
