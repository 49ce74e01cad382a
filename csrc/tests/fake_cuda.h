// A stand-in for the CUDA runtime: every stream is a queue whose work runs late and in hostile
// order, on one thread, replayable from a seed.
//
// Data is read when work runs, never when it is enqueued. Copies and kernels run in several pieces,
// so that streams interleave inside one operation. An event points at its latest record, a wait
// binds to the record of its moment, and an event never recorded is complete. Stream 0 is ordered
// with blocking streams only. Device memory begins as garbage; host code that touches it dies.
//
// Under ThreadSanitizer each stream counts as a thread. Work knows of what was done before it was
// enqueued and of what its stream has waited for, the host of what it has asked for: touching
// memory without such an order is reported as a race, whatever order the work happened to run in.
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
cudaStream_t make_stream(bool blocking = false);
void enqueue(cudaStream_t stream, std::vector<std::function<void()>> pieces);
// Work that fails when it runs: from then on every call fails, whatever it is about.
void enqueue_fault(cudaStream_t stream, cudaError_t error);

// Time passes: the device does a little of what it could do.
void progress();
// Everything that was enqueued has run, and the host knows it.
void finish();

// The call of that name fails `times` times, after `skip` more that do not; `lost` makes every
// later call fail too.
void fail(const std::string& call, cudaError_t error, int skip = 0, bool lost = false,
          int times = 1);
// No call fails any more.
void fail_no_more();

// What a device would not forgive (memory let go while work in flight uses it, a handle used after
// its end) ends the process; after this call, and until the next reset(), it is counted instead.
void count_misuse();

// Opens device memory to the host while it lives.
class DeviceAccess {
 public:
  DeviceAccess();
  ~DeviceAccess();
  DeviceAccess(const DeviceAccess&) = delete;
  DeviceAccess& operator=(const DeviceAccess&) = delete;
};

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
  std::int64_t misuses = 0;
  std::int64_t device_bytes = 0;  // allocated now
  std::int64_t most_device_bytes = 0;
};
Counters counters();

}  // namespace hscache::fake
