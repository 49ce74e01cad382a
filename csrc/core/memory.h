// How much host memory this process may use, and how much of it is left.
#pragma once

#include <cstdint>
#include <filesystem>

namespace hscache {

// Bytes that this process may use at all: the machine's, or less where one of its control groups
// (version 2 or 1) sets a limit. `root` is where /proc and /sys lie.
std::int64_t machine_memory_bytes(const std::filesystem::path& root = "/");

// Bytes that can be taken now before the kernel has to kill somebody: what the machine has left,
// or less where a control group is nearer to its limit. File caches count as left. Where the
// system does not say, there is no end.
std::int64_t available_memory_bytes(const std::filesystem::path& root = "/");

}  // namespace hscache
