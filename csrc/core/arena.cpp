#include "core/arena.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <limits>
#include <stdexcept>
#include <string>
#include <system_error>

namespace hscache {
namespace {

// A control group's limit; no limit where the file is missing or says "max".
std::int64_t read_limit(const char* path) {
  std::ifstream file(path);
  std::int64_t limit = 0;
  return file >> limit && limit > 0 ? limit : std::numeric_limits<std::int64_t>::max();
}

}  // namespace

std::int64_t machine_memory_bytes() {
  const std::int64_t machine =
      static_cast<std::int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);
  return std::min({machine, read_limit("/sys/fs/cgroup/memory.max"),
                   read_limit("/sys/fs/cgroup/memory/memory.limit_in_bytes")});
}

Arena::Arena(std::int64_t bytes, std::int64_t memory_limit) : bytes_(bytes) {
  if (bytes <= 0) {
    throw std::invalid_argument("pool size is " + std::to_string(bytes) +
                                " bytes, must be positive: set hscache_pool_bytes");
  }
  const std::int64_t limit = memory_limit > 0 ? memory_limit : machine_memory_bytes();
  if (bytes > limit) {
    throw std::invalid_argument("pool size is " + std::to_string(bytes) +
                                " bytes, more than this machine's " + std::to_string(limit) +
                                " bytes of memory: set hscache_pool_bytes lower");
  }
  fd_ = memfd_create("hscache", MFD_CLOEXEC);
  void* mapped = MAP_FAILED;
  if (fd_ >= 0 && ftruncate(fd_, bytes) == 0) {
    mapped = mmap(nullptr, static_cast<std::size_t>(bytes), PROT_READ | PROT_WRITE,
                  MAP_SHARED | MAP_NORESERVE, fd_, 0);
  }
  if (mapped == MAP_FAILED) {
    const int error = errno;
    if (fd_ >= 0) close(fd_);
    throw std::system_error(error, std::generic_category(),
                            "the kernel refused a pool of " + std::to_string(bytes) +
                                " bytes (set hscache_pool_bytes lower)");
  }
  data_ = static_cast<std::byte*>(mapped);
}

Arena::~Arena() {
  munmap(data_, static_cast<std::size_t>(bytes_));
  close(fd_);
}

}  // namespace hscache
