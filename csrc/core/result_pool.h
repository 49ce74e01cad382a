// Host memory that results are handed out in, over and over.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>

namespace hscache {

// A snapshot of a result pool. Bytes are those of whole buffers, rounded up as ResultPool says.
struct ResultPoolStats {
  std::int64_t max_bytes = 0;
  std::int64_t in_use_bytes = 0;
  std::int64_t idle_bytes = 0;  // that wait for the next request
  std::int64_t hits = 0;        // requests met with a buffer that was there
  std::int64_t misses = 0;      // with fresh memory
  std::int64_t fallbacks = 0;   // refused: the caller takes memory of its own
};

struct ResultBlock;
struct ResultPoolState;

// Memory for one result. Goes back to its ResultPool when it dies, or to the system where it has
// none, where the pool is gone by then, or in a forked child, whose copy nobody waits for.
//
// Dying takes a few steps and no system call while the pool is there, so that it may happen
// wherever the last owner lets go.
class ResultBuffer {
 public:
  // For ResultPool::take and fresh_result, which alone have what it takes.
  ResultBuffer(std::weak_ptr<ResultPoolState> pool, std::list<ResultBlock> block,
               std::int64_t bytes);
  ~ResultBuffer();
  ResultBuffer(const ResultBuffer&) = delete;
  ResultBuffer& operator=(const ResultBuffer&) = delete;

  // At an address that is divisible by 64. Recycled memory holds whatever the result before left
  // there.
  std::byte* data() const;
  // As many as were asked for.
  std::int64_t bytes() const { return bytes_; }

 private:
  const std::weak_ptr<ResultPoolState> pool_;
  std::list<ResultBlock> block_;  // the one, as a list node that goes back without an allocation
  const std::int64_t bytes_;
};

// Memory that goes to the system when the buffer dies, for who finds a pool exhausted: in huge
// pages where it is large, as all fresh memory here. Throws std::invalid_argument when `bytes` is
// below 1, std::bad_alloc when the kernel refuses.
std::shared_ptr<ResultBuffer> fresh_result(std::int64_t bytes);

// Recycles the memory of results: pages that were touched once cost nothing to write again, where
// fresh ones cost more than the copy into them.
//
// Buffers come in sizes, four from each power of two to the next and none below 4 KiB, so that
// above it at most a quarter of what was asked for is added. A request is met with the idle buffer
// of its size that came back last, whose pages are the warmest; or else with fresh memory, for
// which idle buffers of other sizes, those that came back first, are given to the system until it
// fits the limit: a mix of sizes that is over does not keep the next one from the memory.
//
// In use and idle together never pass the limit. What is given to the system counts as gone when
// that begins, outside of the lock: other threads wait for no system call.
//
// Thread-safe. In a forked child, where a thread that is not there may hold the lock, take() and
// stats() throw std::runtime_error, and idle buffers are never given back; buffers in use stay
// readable and writable, as the child's own copies. The pool may die before its buffers.
class ResultPool {
 public:
  // With a limit of 0 it refuses all. Throws std::invalid_argument when `max_bytes` is negative.
  explicit ResultPool(std::int64_t max_bytes);
  // Idle buffers go to the system.
  ~ResultPool() = default;
  ResultPool(const ResultPool&) = delete;
  ResultPool& operator=(const ResultPool&) = delete;

  // `bytes` of memory, or null, which counts as a fallback, when buffers in use leave no room.
  // Takes a few steps where there is a buffer. Throws std::invalid_argument when `bytes` is below
  // 1, std::bad_alloc when the kernel refuses fresh memory.
  std::shared_ptr<ResultBuffer> take(std::int64_t bytes);

  ResultPoolStats stats() const;

 private:
  void check_owner() const;

  const std::shared_ptr<ResultPoolState> state_;
};

}  // namespace hscache
