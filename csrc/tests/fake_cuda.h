// A stand-in for the CUDA runtime: every stream is a queue whose work runs late and in hostile
// order, on one thread, replayable from a seed.
//
// Data is read when work runs, never when it is enqueued. Copies and kernels run in several pieces,
// so that streams interleave inside one operation. An event points at its latest record, a wait
// binds to the record of its moment, and an event never recorded is complete. Device memory begins
// as garbage.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace hscache::fake {

// Begins a new world: no streams, events or memory; the schedule is drawn from the seed.
void reset(std::uint64_t seed);

// A producer's own stream, and work on it, piece by piece.
cudaStream_t make_stream();
void enqueue(cudaStream_t stream, std::vector<std::function<void()>> pieces);

// Time passes: the device does a little of what it could do.
void progress();
// Everything that was enqueued has run.
void finish();

// The call of that name fails once, the `skip`-th from now on; `lost` makes every later call fail
// too.
void fail(const std::string& call, cudaError_t error, int skip = 0, bool lost = false);

// Host memory that is registered now, in the order of addresses.
struct Registered {
  const std::byte* begin = nullptr;
  std::int64_t bytes = 0;
};
std::vector<Registered> registered();

struct Counters {
  std::int64_t blocking_calls = 0;   // calls that wait for the device
  std::int64_t pageable_copies = 0;  // copies that CUDA would make a detour for
  std::int64_t launches = 0;
  std::int64_t batches = 0;
  std::int64_t device_bytes = 0;  // allocated now
  std::int64_t most_device_bytes = 0;
};
Counters counters();

}  // namespace hscache::fake
