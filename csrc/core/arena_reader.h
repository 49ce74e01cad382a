// Another process's arena, for reading.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hscache {

// A read-only mapping of an arena whose descriptor (Arena::fd()) came from another process. It
// holds the memory by itself: descriptor and arena may go. What is read may be written at the same
// time: which bytes are whole, the owner has to say.
class ArenaReader {
 public:
  // The first `bytes` of the arena. Throws std::invalid_argument when `bytes` is not positive
  // or the file is not an arena of as many, std::system_error when the kernel refuses.
  ArenaReader(int fd, std::int64_t bytes);
  ~ArenaReader();
  ArenaReader(const ArenaReader&) = delete;
  ArenaReader& operator=(const ArenaReader&) = delete;

  const std::byte* data() const { return data_; }
  std::int64_t bytes() const { return bytes_; }

 private:
  const std::int64_t bytes_;
  std::int64_t mapped_bytes_ = 0;
  const std::byte* data_ = nullptr;
};

}  // namespace hscache
