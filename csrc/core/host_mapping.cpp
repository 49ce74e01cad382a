#include "core/host_mapping.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <system_error>

#if !defined(F_SEAL_FUTURE_WRITE)
#define F_SEAL_FUTURE_WRITE 0x0010
#endif
#if !defined(MFD_HUGE_2MB)
#define MFD_HUGE_2MB (21U << 26)
#endif

namespace hscache {
namespace {

namespace fs = std::filesystem;

std::string read_file(const fs::path& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

// The word in brackets of a file such as "always [madvise] never".
std::string chosen(const fs::path& path) {
  const std::string text = read_file(path);
  const std::size_t open = text.find('[');
  const std::size_t close = text.find(']', open);
  return close == std::string::npos ? "" : text.substr(open + 1, close - open - 1);
}

std::string kernel_says(int error) {
  return "the kernel refused huge pages (" + std::generic_category().message(error) + ")";
}

}  // namespace

std::string why_no_advised_huge_pages(const fs::path& root) {
  const fs::path folder = root / "sys/kernel/mm/transparent_hugepage";
  // Newer kernels have a setting for each size, which may leave it to that for all.
  fs::path path = folder / "hugepages-2048kB/shmem_enabled";
  std::string setting = chosen(path);
  if (setting.empty() || setting == "inherit") setting = chosen(path = folder / "shmem_enabled");
  if (setting.empty()) return "the kernel has no huge pages for shared memory";
  if (setting != "never" && setting != "deny") return "";
  return "the kernel's setting for huge pages of shared memory is \"" + setting +
         "\": write advise to " + ("/" / path.lexically_relative(root)).string();
}

std::int64_t free_huge_pages(const fs::path& root) {
  const fs::path folder = root / "sys/kernel/mm/hugepages/hugepages-2048kB";
  std::int64_t unused = 0;
  std::int64_t claimed = 0;
  std::ifstream(folder / "free_hugepages") >> unused;
  std::ifstream(folder / "resv_hugepages") >> claimed;
  return unused - claimed;
}

HostMapping::HostMapping(std::int64_t bytes, HugePages huge_pages) : bytes_(bytes) {
  if (huge_pages == HugePages::kHugetlb) map_hugetlb();
  if (data_ == nullptr && !map(0, bytes, MAP_NORESERVE)) {
    throw std::system_error(errno, std::generic_category(),
                            "the kernel refused a pool of " + std::to_string(bytes) +
                                " bytes (set hscache_pool_bytes lower)");
  }
  if (huge_pages == HugePages::kAdvise) advise_huge_pages();
  // After our own mapping, which may go on writing.
  sealed_ =
      fcntl(fd_, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE | F_SEAL_SEAL) == 0;
}

HostMapping::~HostMapping() {
  munmap(data_, static_cast<std::size_t>(mapped_bytes_));
  close(fd_);
}

int HostMapping::fd() const {
  if (!sealed_) {
    throw std::runtime_error(
        "this kernel cannot share memory for reading only: Linux 5.1 or newer can");
  }
  return fd_;
}

// Leaves errno where it fails.
bool HostMapping::map(unsigned memfd_flags, std::int64_t mapped_bytes, int map_flags) {
  const int fd = memfd_create("hscache", MFD_CLOEXEC | MFD_ALLOW_SEALING | memfd_flags);
  if (fd < 0) return false;
  void* mapped = MAP_FAILED;
  if (ftruncate(fd, mapped_bytes) == 0) {
    mapped = mmap(nullptr, static_cast<std::size_t>(mapped_bytes), PROT_READ | PROT_WRITE,
                  MAP_SHARED | map_flags, fd, 0);
  }
  if (mapped == MAP_FAILED) {
    const int error = errno;
    close(fd);
    errno = error;
    return false;
  }
  fd_ = fd;
  mapped_bytes_ = mapped_bytes;
  data_ = static_cast<std::byte*>(mapped);
  return true;
}

void HostMapping::map_hugetlb() {
  const std::int64_t pages = (bytes_ - 1) / kHugePageBytes + 1;
  // Beyond these the kernel may make some while we wait, for as long as that takes it.
  if (const std::int64_t unused = free_huge_pages(); unused < pages) {
    huge_pages_refusal_ = std::to_string(pages) + " huge pages of 2 MiB are needed, " +
                          std::to_string(unused) +
                          " are free: set more aside (sysctl vm.nr_hugepages)";
    return;
  }
  // Without MAP_NORESERVE, so that pages which somebody else took since are missed here, and not
  // by the first who writes.
  if (map(MFD_HUGETLB | MFD_HUGE_2MB, pages * kHugePageBytes, 0)) {
    huge_pages_ = HugePages::kHugetlb;
  } else {
    huge_pages_refusal_ = kernel_says(errno);
  }
}

void HostMapping::advise_huge_pages() {
  huge_pages_refusal_ = why_no_advised_huge_pages();
  if (!huge_pages_refusal_.empty()) return;
  if (madvise(data_, static_cast<std::size_t>(mapped_bytes_), MADV_HUGEPAGE) == 0) {
    huge_pages_ = HugePages::kAdvise;
  } else {
    huge_pages_refusal_ = kernel_says(errno);
  }
}

}  // namespace hscache
