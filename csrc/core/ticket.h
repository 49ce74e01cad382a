// What a caller holds of a transfer in flight.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>

namespace hscache {

// What the child of a fork() is told about its parent's engine.
inline constexpr const char* kForked =
    "the transfer engine belongs to the parent process: open a store after fork(), not before";

// A transfer in flight. Thread-safe. After fork() one that was pending counts as failed in the
// child, because nobody there ends it.
class Ticket {
 public:
  enum class State { kPending, kDone, kFailed };

  Ticket();

  State state() const;
  // Why it failed; empty otherwise.
  std::string error() const;
  // How many of the rows that were moved hold an infinity or a NaN; 0 where nobody asked.
  std::int64_t non_finite_rows() const;
  // Waits until the transfer has ended, at most `timeout` (no limit where absent). Returns whether
  // it has. When it has ended the engine does not touch source or destination again.
  bool wait(std::optional<std::chrono::duration<double>> timeout) const;

  // Asks that what is not on its way yet be left out: unless all of it is, the transfer ends as
  // failed once what is on its way has run. Returns at once; wait() tells when.
  void cancel();

 private:
  friend class TransferEngine;
  // How it ended: the error is empty where all was moved.
  void end(std::string error, std::int64_t non_finite_rows);
  bool cancelled() const;
  bool in_child() const;

  const int owner_pid_;
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  State state_ = State::kPending;
  bool cancelled_ = false;
  std::string error_;
  std::int64_t non_finite_rows_ = 0;
};

}  // namespace hscache
