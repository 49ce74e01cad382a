// Moves rows out of paged memory in the background and answers with tickets.
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

 private:
  friend class TransferEngine;
  void end(State state, std::string error);
  bool in_child() const;

  const int owner_pid_;
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  State state_ = State::kPending;
  std::string error_;
};

// Where one run of a request's tokens goes, one layer of it.
struct GatherPiece {
  std::int64_t layer = 0;            // place on the source's layer axis
  std::int64_t start = 0;            // first token
  std::int64_t length = 0;           // tokens
  std::byte* destination = nullptr;  // `length` rows side by side
};

// Rows of one request, out of `source`. The memory behind `source` and the destinations must stay
// valid and untouched until the ticket has ended.
struct Gather {
  PagedView source;
  std::vector<std::int64_t> block_ids;
  std::vector<GatherPiece> pieces;
  std::uintptr_t producer_stream = 0;  // the rows are written by what is enqueued there already
};

struct TransferOptions {
  int streams = 2;                            // side streams
  std::int64_t max_pending = 256;             // transfers accepted and not yet ended
  std::int64_t in_flight_bytes = 64LL << 20;  // enqueued on the streams at once
};

enum class Backpressure { kWait, kRefuse };

// The transfer engine: a state machine driven by poll(), with a thread of its own around it unless
// told otherwise. Accepts up to `max_pending` transfers and enqueues at most `in_flight_bytes` of
// them at once (one piece at least), in the order of acceptance, whatever their length. All public
// methods are thread-safe. After fork() the child's copy is closed.
class TransferEngine {
 public:
  // `threaded` false leaves it to the caller to drive poll(). Throws std::invalid_argument for
  // options below 1.
  TransferEngine(std::unique_ptr<DeviceRuntime> runtime, TransferOptions options,
                 bool threaded = true);
  // Closes. In a forked child it leaks on purpose: the threads that use what it holds are not
  // there, so that joining them, or destroying what they wait for, would never return.
  ~TransferEngine();
  TransferEngine(const TransferEngine&) = delete;
  TransferEngine& operator=(const TransferEngine&) = delete;

  // Accepts a transfer; only enqueues. At the limit kWait waits for room and kRefuse returns null.
  // Throws what check_range() throws for any piece, std::out_of_range for a layer outside the
  // source, std::invalid_argument for a producer stream that the device does not know, and
  // std::runtime_error when closed.
  std::shared_ptr<Ticket> gather(Gather request, Backpressure policy);

  // One turn of the state machine: enqueues what there is room for, ends what has run. Returns
  // whether anything changed. Never blocks on the device, unless that refuses to record an event:
  // then outliving the stream is the only way to know that its work has run.
  bool poll();

  // Waits until everything accepted before the call has ended.
  void drain();

  // Refuses new transfers, fails those not wholly enqueued, waits for those in flight. Idempotent.
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
