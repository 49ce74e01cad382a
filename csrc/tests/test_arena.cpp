#include <algorithm>
#include <cstddef>
#include <filesystem>
#include <iterator>
#include <limits>
#include <stdexcept>
#include <string>
#include <system_error>

#include "core/arena.h"
#include "tests/harness.h"

namespace hscache::test {
namespace {

std::ptrdiff_t open_files() {
  return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {});
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

TEST(arena, machine_memory_is_plausible) {
  CHECK(machine_memory_bytes() >= 1 << 20);
  CHECK(machine_memory_bytes() < std::int64_t{1} << 50);
}

}  // namespace hscache::test
