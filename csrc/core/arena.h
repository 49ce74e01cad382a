// One big mapping of host memory that everything pooled is carved from.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hscache {

// A private, memfd-backed mapping of `bytes` host memory. Pages are backed by the kernel when they
// are first touched, so that making one takes the same time at any size. Unmapped when it dies.
class Arena {
 public:
  // Throws std::invalid_argument when `bytes` is not positive or exceeds `memory_limit` (what the
  // machine has; 0 asks the machine), std::system_error when the kernel refuses the mapping.
  explicit Arena(std::int64_t bytes, std::int64_t memory_limit = 0);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  std::byte* data() const { return data_; }
  std::int64_t bytes() const { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  std::int64_t bytes_ = 0;
  int fd_ = -1;
};

// Bytes of memory that this process may use at all: the machine's, or less where a control group
// (version 2 or 1) limits it.
std::int64_t machine_memory_bytes();

}  // namespace hscache
