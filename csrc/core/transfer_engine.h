// Moves rows out of paged memory in the background and answers with tickets.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "core/device_runtime.h"

namespace hscache {

// A transfer in flight. Thread-safe.
class Ticket {
 public:
  enum class State { kPending, kDone, kFailed };

  State state() const;
  // Why it failed; empty otherwise.
  std::string error() const;
  // Waits until the transfer has ended, at most `timeout` (no limit where absent). Returns whether
  // it has. When it has ended the engine does not touch source or destination again.
  bool wait(std::optional<std::chrono::duration<double>> timeout) const;

 private:
  friend class TransferEngine;
  void end(State state, std::string error);

  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  State state_ = State::kPending;
  std::string error_;
};

// Where one run of a request's tokens goes, one layer of it.
struct GatherPiece {
  std::int64_t layer = 0;   // place on the source's layer axis
  std::int64_t start = 0;   // first token
  std::int64_t length = 0;  // tokens
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
  ~TransferEngine();
  TransferEngine(const TransferEngine&) = delete;
  TransferEngine& operator=(const TransferEngine&) = delete;

  // Accepts a transfer; only enqueues. At the limit kWait waits for room and kRefuse returns null.
  // Throws what check_range() throws for any piece, std::out_of_range for a layer outside the
  // source, std::invalid_argument for a producer stream that the device does not know, and
  // std::runtime_error when closed.
  std::shared_ptr<Ticket> gather(Gather request, Backpressure policy);

  // One turn of the state machine: enqueues what there is room for, ends what has run. Returns
  // whether anything changed. Never blocks on the device.
  bool poll();

  // Waits until everything accepted before the call has ended.
  void drain();

  // Refuses new transfers, fails those not yet started, waits for those in flight. Idempotent.
  void close();

  std::int64_t pending() const;

 private:
  struct Transfer {
    Gather request;
    std::shared_ptr<Ticket> ticket;
    std::shared_ptr<Event> produced;
    std::size_t next_piece = 0;
    std::int64_t pieces_in_flight = 0;
    std::string error;  // set once something failed: nothing more is enqueued
    bool wholly_enqueued() const {
      return !error.empty() || next_piece == request.pieces.size();
    }
  };
  struct PieceInFlight {
    std::shared_ptr<Transfer> transfer;
    std::shared_ptr<Event> copied;
    std::int64_t bytes = 0;
  };

  void enqueue_piece(const std::shared_ptr<Transfer>& transfer);
  void run();
  bool in_child() const;

  const std::unique_ptr<DeviceRuntime> runtime_;
  const TransferOptions options_;
  const bool threaded_;
  const int owner_pid_;

  // The state machine, driven by whoever holds poll_mutex_. Callers of gather() never take it, so
  // that they do not wait while a long request is planned.
  std::mutex poll_mutex_;
  std::vector<std::unique_ptr<Stream>> streams_;
  std::deque<std::shared_ptr<Transfer>> queue_;  // not wholly enqueued, in order
  std::vector<std::shared_ptr<Transfer>> running_;  // not ended
  std::vector<PieceInFlight> in_flight_;
  std::int64_t in_flight_bytes_ = 0;
  std::size_t next_stream_ = 0;

  // What callers share with it.
  mutable std::mutex mutex_;
  std::condition_variable work_;   // something to poll for
  std::condition_variable ended_;  // a transfer ended, or the engine closed
  std::vector<std::shared_ptr<Transfer>> inbox_;
  std::vector<std::shared_ptr<Ticket>> pending_;  // accepted, not ended
  bool closing_ = false;
  std::thread thread_;
};

}  // namespace hscache
