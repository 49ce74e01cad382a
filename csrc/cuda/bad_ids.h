// Where kernels leave ids that they refused, for the host to find without waiting.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <optional>

namespace hscache::cuda {

struct BadId {
  std::int64_t id = 0;
  std::int64_t num_ids = 0;  // ids from 0 to below this were allowed
};

// The two words for TokenMap::bad_id of the current device, in pinned memory that its kernels
// reach. They live as long as the process: kernels that were launched may write them at any time.
// Made at the first call, also while a stream is being captured. Thread-safe. Returns CUDA's error.
cudaError_t bad_id_words(volatile std::int64_t** words);

// Takes away what a kernel left there; nothing while the stream is being captured into a graph,
// whose kernels do not run yet. Thread-safe. Returns CUDA's error.
cudaError_t take_bad_id(cudaStream_t stream, std::optional<BadId>* found);

}  // namespace hscache::cuda
