#include "core/arena_reader.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <stdexcept>
#include <string>
#include <system_error>

namespace hscache {

ArenaReader::ArenaReader(int fd, std::int64_t bytes) : bytes_(bytes) {
  if (bytes <= 0) {
    throw std::invalid_argument("cannot map " + std::to_string(bytes) +
                                " bytes of an arena: ask for the size that its owner says");
  }
  // A file that can shrink would end this process at the next read behind its new end.
  const int seals = fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) {
    throw std::invalid_argument("descriptor " + std::to_string(fd) +
                                " is not an arena's: it can be made smaller, or is no memory");
  }
  struct stat status{};
  if (fstat(fd, &status) != 0 || status.st_size < bytes) {
    throw std::invalid_argument("the arena has " + std::to_string(status.st_size) +
                                " bytes, asked for are " + std::to_string(bytes) +
                                ": ask for the size that its owner says");
  }
  // All of it: huge pages cannot be unmapped in part.
  mapped_bytes_ = status.st_size;
  void* const mapped =
      mmap(nullptr, static_cast<std::size_t>(mapped_bytes_), PROT_READ, MAP_SHARED, fd, 0);
  if (mapped == MAP_FAILED) {
    throw std::system_error(
        errno, std::generic_category(),
        "the kernel refused to map an arena of " + std::to_string(bytes) + " bytes for reading");
  }
  data_ = static_cast<const std::byte*>(mapped);
}

ArenaReader::~ArenaReader() {
  munmap(const_cast<std::byte*>(data_), static_cast<std::size_t>(mapped_bytes_));
}

}  // namespace hscache
