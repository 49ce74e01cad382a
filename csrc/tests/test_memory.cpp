#include "core/memory.h"

#include <limits>

#include "tests/folder.h"
#include "tests/harness.h"

namespace hscache::test {
namespace {

constexpr std::int64_t kEndless = std::numeric_limits<std::int64_t>::max();

}  // namespace

TEST(memory, of_this_machine_is_plausible) {
  CHECK(machine_memory_bytes() >= 1 << 20);
  CHECK(machine_memory_bytes() < std::int64_t{1} << 50);
  CHECK(available_memory_bytes() > 0);
  CHECK(available_memory_bytes() < std::int64_t{1} << 50);
}

TEST(memory, available_is_the_machines_where_no_group_limits_it) {
  const Folder root;
  CHECK_EQ(available_memory_bytes(root.path()), kEndless);
  root.write("proc/meminfo", "MemTotal: 9000 kB\nMemFree: 10 kB\nMemAvailable:    3000 kB\n");
  root.write("proc/self/cgroup", "0::/\n");
  root.write("sys/fs/cgroup/memory.max", "max\n");
  CHECK_EQ(available_memory_bytes(root.path()), 3000 * 1024);
  CHECK_EQ(machine_memory_bytes(root.path()), machine_memory_bytes("/nowhere"));
}

TEST(memory, a_groups_caches_count_as_available) {
  const Folder root;
  root.write("sys/fs/cgroup/memory.max", "1000\n");
  root.write("sys/fs/cgroup/memory.current", "700\n");
  CHECK_EQ(machine_memory_bytes(root.path()), 1000);
  CHECK_EQ(available_memory_bytes(root.path()), 300);
  root.write("sys/fs/cgroup/memory.stat", "anon 500\ninactive_file 150\nactive_file 50\n");
  CHECK_EQ(available_memory_bytes(root.path()), 450);
}

TEST(memory, every_group_above_ones_own_counts) {
  const Folder root;
  root.write("proc/self/cgroup", "1:name=systemd:/a\n0::/a/b\n");
  root.write("sys/fs/cgroup/a/b/memory.max", "max\n");
  root.write("sys/fs/cgroup/a/memory.max", "2000\n");
  root.write("sys/fs/cgroup/a/memory.current", "500\n");
  root.write("sys/fs/cgroup/elsewhere/memory.max", "1\n");
  CHECK_EQ(machine_memory_bytes(root.path()), 2000);
  CHECK_EQ(available_memory_bytes(root.path()), 1500);
  root.write("sys/fs/cgroup/a/b/memory.max", "1700\n");
  CHECK_EQ(machine_memory_bytes(root.path()), 1700);
  CHECK_EQ(available_memory_bytes(root.path()), 1500);
}

TEST(memory, groups_of_version_1_count) {
  const Folder root;
  root.write("proc/self/cgroup", "5:cpu,memory:/job\n4:cpuset:/x\n");
  root.write("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  root.write("sys/fs/cgroup/memory/job/memory.limit_in_bytes", "4000\n");
  root.write("sys/fs/cgroup/memory/job/memory.usage_in_bytes", "3000\n");
  root.write("sys/fs/cgroup/memory/job/memory.stat", "inactive_file 1\ntotal_inactive_file 10\n");
  CHECK_EQ(machine_memory_bytes(root.path()), 4000);
  CHECK_EQ(available_memory_bytes(root.path()), 1010);
}

}  // namespace hscache::test
