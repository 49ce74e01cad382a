// Memory that this process writes and others may be allowed to read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>

namespace hscache {

enum class HugePages {
  kOff,
  kAdvise,   // asked for; the kernel makes them where it finds room
  kHugetlb,  // out of those that the machine has set aside
};

constexpr std::int64_t kHugePageBytes = 2LL << 20;

// Why the kernel makes no huge pages of shared memory that asks for them; empty where it may.
// `root` is where /sys lies.
std::string why_no_advised_huge_pages(const std::filesystem::path& root = "/");
// Huge pages set aside on this machine that nobody has a claim on.
std::int64_t free_huge_pages(const std::filesystem::path& root = "/");

// A memfd and a writable mapping of it. Nobody can resize the file nor, this mapping aside, write
// to it: who gets the descriptor can read. Pages are backed when they are first touched.
class HostMapping {
 public:
  // Where `huge_pages` cannot be had it goes on with plain pages and says why. Throws
  // std::system_error when the kernel refuses the mapping.
  HostMapping(std::int64_t bytes, HugePages huge_pages);
  ~HostMapping();
  HostMapping(const HostMapping&) = delete;
  HostMapping& operator=(const HostMapping&) = delete;

  std::byte* data() const { return data_; }
  std::int64_t bytes() const { return bytes_; }
  // The same in whole huge pages where it is made of those, which nothing may cut.
  std::int64_t mapped_bytes() const { return mapped_bytes_; }
  // The file, for other processes. Throws std::runtime_error where the kernel cannot keep them from
  // writing (before Linux 5.1).
  int fd() const;
  // What was had, and why it is not what was asked for; empty where it is.
  HugePages huge_pages() const { return huge_pages_; }
  const std::string& huge_pages_refusal() const { return huge_pages_refusal_; }

 private:
  bool map(unsigned memfd_flags, std::int64_t mapped_bytes, int map_flags);
  void map_hugetlb();
  void advise_huge_pages();

  const std::int64_t bytes_;
  std::int64_t mapped_bytes_ = 0;
  int fd_ = -1;
  std::byte* data_ = nullptr;
  bool sealed_ = false;
  HugePages huge_pages_ = HugePages::kOff;
  std::string huge_pages_refusal_;
};

}  // namespace hscache
