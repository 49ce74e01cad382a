#include "core/numa.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <climits>
#include <system_error>

namespace hscache {
namespace {

constexpr int kMostNodes = 1024;  // what Linux can be built for
constexpr int kPreferred = 1;     // MPOL_PREFERRED, from linux/mempolicy.h
constexpr int kBits = sizeof(unsigned long) * CHAR_BIT;

}  // namespace

std::string prefer_numa_node(std::byte* data, std::int64_t bytes, int node) {
  const std::string where = "NUMA node " + std::to_string(node) + ": ";
  if (node < 0 || node >= kMostNodes) {
    return where + "there are at most " + std::to_string(kMostNodes) + ", counted from 0";
  }
  std::array<unsigned long, kMostNodes / kBits> mask{};
  mask[static_cast<std::size_t>(node / kBits)] = 1UL << (node % kBits);
  // The kernel reads one bit less than it is told.
  if (syscall(SYS_mbind, data, static_cast<unsigned long>(bytes), kPreferred, mask.data(),
              static_cast<unsigned long>(kMostNodes + 1), 0UL) == 0) {
    return "";
  }
  const int error = errno;
  return where + "the kernel refused (" + std::generic_category().message(error) + ")" +
         (error == EPERM ? ": a container needs CAP_SYS_NICE for it" : "");
}

}  // namespace hscache
