#include "core/arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>

#include "core/arena_reader.h"
#include "tests/child.h"
#include "tests/folder.h"
#include "tests/harness.h"

namespace hscache::test {
namespace {

constexpr std::chrono::seconds kSoon{10};
const std::string kForked =
    "the arena belongs to the parent process: open a store after fork(), not before";

std::ptrdiff_t open_files() {
  return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {});
}

// Threads of this process that touch an arena.
int touching_threads() {
  int count = 0;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::ifstream file(task.path() / "comm");
    std::string name;
    count += file >> name && name == "hscache-touch";
  }
  return count;
}

}  // namespace

TEST(arena, is_writable_from_first_to_last_byte) {
  Arena arena(12'345);
  CHECK_EQ(arena.bytes(), 12'345);
  CHECK(std::all_of(arena.data(), arena.data() + arena.bytes(),
                    [](std::byte byte) { return byte == std::byte{0}; }));
  arena.data()[0] = std::byte{1};
  arena.data()[12'344] = std::byte{2};
  CHECK(arena.data()[0] == std::byte{1} && arena.data()[12'344] == std::byte{2});
}

TEST(arena, may_take_all_memory_because_untouched_pages_cost_nothing) {
  Arena arena(machine_memory_bytes());
  arena.data()[arena.bytes() - 1] = std::byte{3};
  CHECK(arena.data()[arena.bytes() - 1] == std::byte{3});
}

TEST(arena, refuses_sizes_that_are_not_positive) {
  CHECK_THROWS(std::invalid_argument, "pool size is 0 bytes, must be positive", Arena(0));
  CHECK_THROWS(std::invalid_argument, "pool size is -4096 bytes", Arena(-4096));
}

TEST(arena, refuses_more_than_the_limit_and_takes_the_limit) {
  CHECK_THROWS(std::invalid_argument, "1001 bytes, more than this machine's 1000 bytes",
               Arena(1001, 1000));
  CHECK_EQ(Arena(1000, 1000).bytes(), 1000);
}

TEST(arena, refuses_more_than_the_machine_has) {
  CHECK_THROWS(std::invalid_argument, "set hscache_pool_bytes lower",
               Arena(machine_memory_bytes() + 1));
}

TEST(arena, reports_what_the_kernel_refused) {
  const std::int64_t more_than_addresses = std::numeric_limits<std::int64_t>::max() / 2;
  CHECK_THROWS(std::system_error,
               "the kernel refused a pool of " + std::to_string(more_than_addresses),
               Arena(more_than_addresses, std::numeric_limits<std::int64_t>::max()));
}

TEST(arena, keeps_no_file_open_behind_it) {
  const auto before = open_files();
  {
    const Arena arena(4096);
  }
  try {
    const Arena refused(std::numeric_limits<std::int64_t>::max() / 2,
                        std::numeric_limits<std::int64_t>::max());
  } catch (const std::system_error&) {
  }
  CHECK_EQ(open_files(), before);
}

TEST(arena, any_size_is_usable_at_its_first_and_last_byte) {
  // Only addresses are taken: a machine of any size will do.
  constexpr std::int64_t kMebibyte = 1 << 20;
#if defined(__SANITIZE_THREAD__)
  // It keeps some addresses of its own for each of ours, and does not always find as many.
  constexpr std::int64_t kMostBytes = 16'384 * kMebibyte;
#else
  constexpr std::int64_t kMostBytes = 1'048'576 * kMebibyte;
#endif
  for (const std::int64_t bytes : {kMebibyte, 64 * kMebibyte + 1, 8'192 * kMebibyte,
                                   524'288 * kMebibyte + 4'097, 1'048'576 * kMebibyte}) {
    if (bytes > kMostBytes) continue;
    const Arena arena(bytes, bytes);
    CHECK_EQ(arena.bytes(), bytes);
    arena.data()[0] = std::byte{1};
    arena.data()[bytes - 1] = std::byte{2};
    CHECK(arena.data()[0] == std::byte{1} && arena.data()[bytes - 1] == std::byte{2});
  }
}

TEST(arena, touches_nothing_unless_told) {
  const Arena arena(64 << 20);
  const ArenaStats stats = arena.stats();
  CHECK_EQ(stats.bytes, 64 << 20);
  CHECK_EQ(stats.touched_bytes, 0);
  CHECK(!stats.touching);
  CHECK_EQ(touching_threads(), 0);
}

TEST(arena, is_touched_in_the_background_and_the_threads_end) {
  Arena arena(80 << 20);
  arena.data()[70 << 20] = std::byte{7};
  arena.touch_in_background(kSoon);
  arena.touch_in_background(kSoon);
  while (arena.stats().touching) std::this_thread::yield();
  const ArenaStats stats = arena.stats();
  CHECK_EQ(stats.touched_bytes, stats.touch_refusal.empty() ? 80 << 20 : stats.touched_bytes);
  CHECK(arena.data()[70 << 20] == std::byte{7});
  while (touching_threads() > 0) std::this_thread::yield();
}

TEST(arena, a_small_one_is_not_worth_a_thread) {
  Arena arena((32 << 20) - 1);
  arena.touch_in_background(kSoon);
  CHECK_EQ(touching_threads(), 0);
  CHECK(!arena.stats().touching);
}

TEST(arena, dies_while_it_is_touched) {
  for (int round = 0; round < 20; ++round) {
    Arena arena(256 << 20);
    arena.touch_in_background(kSoon);
  }
}

TEST(arena, goes_on_with_plain_pages_where_huge_ones_cannot_be_had) {
  for (const HugePages asked : {HugePages::kOff, HugePages::kAdvise, HugePages::kHugetlb}) {
    const Arena arena((4 << 20) + 5, 0, asked);
    arena.data()[arena.bytes() - 1] = std::byte{9};
    const ArenaStats stats = arena.stats();
    CHECK_EQ(stats.huge_pages == asked, stats.huge_pages_refusal.empty());
    CHECK(stats.huge_pages == asked || stats.huge_pages == HugePages::kOff);
  }
}

TEST(arena, more_huge_pages_than_were_set_aside_are_refused_with_both_numbers) {
  const std::int64_t unused = free_huge_pages();
  const std::int64_t bytes = (unused + 1) * kHugePageBytes;
  const Arena arena(bytes, bytes, HugePages::kHugetlb);
  CHECK_EQ(arena.stats().huge_pages_refusal,
           std::to_string(unused + 1) + " huge pages of 2 MiB are needed, " +
               std::to_string(unused) + " are free: set more aside (sysctl vm.nr_hugepages)");
}

TEST(arena, reads_the_kernels_settings_for_huge_pages) {
  const Folder root;
  CHECK_EQ(why_no_advised_huge_pages(root.path()),
           "the kernel has no huge pages for shared memory");
  CHECK_EQ(free_huge_pages(root.path()), 0);
  const std::string folder = "sys/kernel/mm/transparent_hugepage/";
  root.write(folder + "shmem_enabled", "always within_size advise [never] deny force\n");
  CHECK_EQ(why_no_advised_huge_pages(root.path()),
           "the kernel's setting for huge pages of shared memory is \"never\": write advise to "
           "/sys/kernel/mm/transparent_hugepage/shmem_enabled");
  root.write(folder + "hugepages-2048kB/shmem_enabled", "always [inherit] within_size never\n");
  CHECK(why_no_advised_huge_pages(root.path()).ends_with("hugepage/shmem_enabled"));
  root.write(folder + "shmem_enabled", "always within_size [advise] never deny force\n");
  CHECK_EQ(why_no_advised_huge_pages(root.path()), "");
  root.write(folder + "hugepages-2048kB/shmem_enabled", "always inherit within_size [never]\n");
  CHECK(why_no_advised_huge_pages(root.path()).ends_with("hugepages-2048kB/shmem_enabled"));
  root.write("sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", "12\n");
  root.write("sys/kernel/mm/hugepages/hugepages-2048kB/resv_hugepages", "5\n");
  CHECK_EQ(free_huge_pages(root.path()), 7);
}

TEST(arena, a_numa_node_is_had_or_refused_with_a_reason) {
  Arena arena(1 << 20);
  CHECK(!arena.stats().numa_node.has_value());
  for (const int node : {-1, 1024}) {
    arena.prefer_numa_node(node);
    CHECK_EQ(arena.stats().numa_refusal,
             "NUMA node " + std::to_string(node) + ": there are at most 1024, counted from 0");
  }
  arena.prefer_numa_node(1023);  // no machine has so many
  CHECK(arena.stats().numa_refusal.starts_with("NUMA node 1023: the kernel refused ("));
  CHECK(!arena.stats().numa_node.has_value());
  arena.prefer_numa_node(0);
  const ArenaStats stats = arena.stats();
  CHECK(stats.numa_node == 0 ? stats.numa_refusal.empty() : !stats.numa_refusal.empty());
  if (stats.numa_node != 0) return;
  constexpr unsigned long kOfAddress = 2;  // MPOL_F_ADDR
  for (const std::int64_t offset : {0, (1 << 20) - 1}) {
    int policy = -1;
    unsigned long nodes[16] = {};
    REQUIRE(syscall(SYS_get_mempolicy, &policy, nodes, 1024UL, arena.data() + offset, kOfAddress) ==
            0);
    CHECK_EQ(policy, 1);  // MPOL_PREFERRED
    CHECK_EQ(nodes[0], 1UL);
  }
}

TEST(arena, another_process_reads_what_is_written_later_too) {
  const Arena arena(3 * 4096 + 1);
  arena.data()[0] = std::byte{41};
  const int fd = arena.fd();
  CHECK_EQ(in_child([&] {
             const ArenaReader reader(fd, arena.bytes());
             const int before = static_cast<int>(reader.data()[0]);
             // The mapping that came through fork() writes as the owner's does.
             arena.data()[3 * 4096] = std::byte{42};
             return std::to_string(before) + " " +
                    std::to_string(static_cast<int>(reader.data()[3 * 4096]));
           }),
           "41 42");
  CHECK(arena.data()[3 * 4096] == std::byte{42});
}

TEST(arena, nobody_else_can_write_to_it_or_resize_it) {
  const Arena arena(8192);
  const int fd = arena.fd();
  CHECK(mmap(nullptr, 8192, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) == MAP_FAILED);
  const std::string path = "/proc/self/fd/" + std::to_string(fd);
  const int again = open(path.c_str(), O_RDWR | O_CLOEXEC);
  for (const int way : {fd, again}) {
    if (way < 0) continue;  // the kernel may refuse to open it at all
    CHECK_EQ(pwrite(way, "x", 1, 0), -1);
    CHECK_EQ(ftruncate(way, 4096), -1);
    CHECK_EQ(ftruncate(way, 16384), -1);
  }
  if (again >= 0) close(again);
  const ArenaReader reader(fd, 8192);
  CHECK_EQ(mprotect(const_cast<std::byte*>(reader.data()), 8192, PROT_READ | PROT_WRITE), -1);
  arena.data()[8191] = std::byte{1};  // its own mapping still can
  CHECK(reader.data()[8191] == std::byte{1});
}

TEST(arena, a_reader_outlives_arena_and_descriptor) {
  std::unique_ptr<ArenaReader> reader;
  {
    const Arena arena(4096);
    arena.data()[5] = std::byte{6};
    reader = std::make_unique<ArenaReader>(arena.fd(), 4096);
  }
  CHECK(reader->data()[5] == std::byte{6});
}

TEST(arena, a_reader_trusts_no_descriptor) {
  const Arena arena(8192);
  CHECK_THROWS(std::invalid_argument, "cannot map 0 bytes", ArenaReader(arena.fd(), 0));
  CHECK_THROWS(std::invalid_argument, "the arena has 8192 bytes, asked for are 8193",
               ArenaReader(arena.fd(), 8193));
  CHECK_THROWS(std::invalid_argument, "descriptor -1 is not an arena's", ArenaReader(-1, 1));
  const int loose = memfd_create("loose", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  REQUIRE(loose >= 0 && ftruncate(loose, 8192) == 0);
  CHECK_THROWS(std::invalid_argument, "is not an arena's: it can be made smaller",
               ArenaReader(loose, 8192));
  close(loose);
  const int file = open("/proc/self/exe", O_RDONLY | O_CLOEXEC);
  CHECK_THROWS(std::invalid_argument, "is not an arena's", ArenaReader(file, 16));
  close(file);
}

TEST(arena, a_forked_child_may_only_drop_it) {
  auto arena = std::make_unique<Arena>(256 << 20);
  arena->touch_in_background(kSoon);
  CHECK_EQ(in_child([&] {
             arena->stats();
             return "answered";
           }),
           "threw: " + kForked);
  CHECK_EQ(in_child([&] {
             arena->touch_in_background(kSoon);
             return "started";
           }),
           "threw: " + kForked);
  CHECK_EQ(in_child([&] {
             arena.reset();
             return "gone";
           }),
           "gone");
  arena->data()[0] = std::byte{1};
  CHECK_EQ(arena->stats().bytes, 256 << 20);
}

}  // namespace hscache::test
