// Which of the machine's memories a mapping's pages come from.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace hscache {

// Has pages that are not backed yet come from NUMA node `node` while that has some left. Returns
// why the kernel refused; empty where it did not.
std::string prefer_numa_node(std::byte* data, std::int64_t bytes, int node);

}  // namespace hscache
