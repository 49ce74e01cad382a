// Moves rows between paged memory and the pool in the background and answers with tickets.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "core/device_runtime.h"

namespace hscache {

// A transfer in flight. Thread-safe. After fork() one that was pending counts as failed in the
// child, because nobody there ends it.
class Ticket {
 public:
  enum class State { kPending, kDone, kFailed };

  Ticket();

  State state() const;
  // Why it failed; empty otherwise.
  std::string error() const;
  // Waits until the transfer has ended, at most `timeout` (no limit where absent). Returns whether
  // it has. When it has ended the engine does not touch source or destination again.
  bool wait(std::optional<std::chrono::duration<double>> timeout) const;

  // Asks that what is not on its way yet be left out: unless all of it is, the transfer ends as
  // failed once what is on its way has run. Returns at once; wait() tells when.
  void cancel();

 private:
  friend class TransferEngine;
  void end(State state, std::string error);
  bool cancelled() const;
  bool in_child() const;

  const int owner_pid_;
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  State state_ = State::kPending;
  bool cancelled_ = false;
  std::string error_;
};

// One run of a request's tokens and where its rows are in host memory: for every layer of the paged
// view `length` rows side by side, or null for a layer that is left alone.
struct RowsPiece {
  std::int64_t start = 0;   // first token
  std::int64_t length = 0;  // tokens
  std::vector<std::byte*> layers;
};

enum class Direction { kGather, kScatter };  // paged memory -> rows, rows -> paged memory

// Rows of one request. The memory behind `paged` and the rows must stay valid and untouched until
// the ticket has ended.
struct TransferRequest {
  Direction direction = Direction::kGather;
  PagedView paged;
  std::vector<std::int64_t> block_ids;
  std::vector<RowsPiece> pieces;
  // The transfer runs after everything that is enqueued there by the time of the call: what writes
  // the rows of a gather, what last reads the blocks of a scatter.
  std::uintptr_t after_stream = 0;
};

struct TransferOptions {
  int lanes = 2;                            // steps that run beside each other
  std::int64_t max_pending = 256;           // transfers accepted and not yet ended
  std::int64_t staging_bytes = 64LL << 20;  // of rows on their way at once
};

enum class Backpressure { kWait, kRefuse };

// The transfer engine: a state machine driven by poll(), with a thread of its own around it unless
// told otherwise.
//
// Rows travel through a ring of regions of `staging_bytes` together, however long the request is:
// a kernel packs scattered rows into a region, the copy engine moves the region to where the rows
// belong, and only then is the region free for other rows (a scatter goes the same way backwards).
// Where the device reaches host memory itself a layer of a piece goes in one step, and the ring is
// only a count (one step at least, whatever its size). Steps run in the order of acceptance, spread
// over lanes.
//
// All public methods are thread-safe. After fork() the child's copy is closed.
class TransferEngine {
 public:
  // `threaded` false leaves it to the caller to drive poll(). Throws std::invalid_argument for
  // options below 1, DeviceError where the device refuses memory for the ring.
  TransferEngine(std::unique_ptr<DeviceRuntime> runtime, TransferOptions options,
                 bool threaded = true);
  // Closes. In a forked child it leaks on purpose: the threads that use what it holds are not
  // there, and the device is the parent's, so that nothing of it can be ended properly.
  ~TransferEngine();
  TransferEngine(const TransferEngine&) = delete;
  TransferEngine& operator=(const TransferEngine&) = delete;

  // Accepts a transfer; only enqueues. At the limit kWait waits for room and kRefuse returns null.
  // Throws what check_range() throws for any piece, std::invalid_argument for a piece that has not
  // one place for each layer, for rows larger than a region, or for a stream that the device does
  // not know, and std::runtime_error when closed.
  std::shared_ptr<Ticket> submit(TransferRequest request, Backpressure policy);

  // Lets the device copy to and from this memory without a detour, as far as it takes it: see
  // DeviceRuntime::register_host(). The registration must die before the engine does.
  std::unique_ptr<Registration> register_host(std::byte* data, std::int64_t bytes,
                                              std::int64_t unit);

  // One turn of the state machine: enqueues what there is room for, ends what has run. Returns
  // whether anything changed. Never blocks on the device, unless that refuses to record an event:
  // then outliving the stream is the only way to know that its work has run.
  bool poll();

  // Waits until everything accepted before the call has ended.
  void drain();

  // Refuses new transfers, fails those not wholly enqueued, waits for what is on its way.
  // Idempotent.
  void close();

  // Transfers accepted and not yet ended.
  std::int64_t pending() const;

 private:
  class Machine;

  bool in_child() const;

  const int owner_pid_;
  std::unique_ptr<Machine> machine_;
};

}  // namespace hscache
