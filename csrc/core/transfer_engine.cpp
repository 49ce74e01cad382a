#include "core/transfer_engine.h"

#include <unistd.h>

#include <algorithm>
#include <deque>
#include <exception>
#include <stdexcept>
#include <thread>
#include <utility>

namespace hscache {
namespace {

// How often the thread looks at copies in flight. A copy of one chunk takes longer.
constexpr std::chrono::microseconds kPollInterval{50};

// Longer waits have no limit: clocks cannot count to their end.
constexpr std::chrono::duration<double> kLongestWait{1e9};

constexpr const char* kForked =
    "the transfer engine belongs to the parent process: open a store after fork(), not before";

}  // namespace

Ticket::Ticket() : owner_pid_(getpid()) {}

bool Ticket::in_child() const { return getpid() != owner_pid_; }

Ticket::State Ticket::state() const {
  // Without the lock: it may be held by a thread that was not forked along.
  if (in_child()) return state_ == State::kDone ? State::kDone : State::kFailed;
  const std::lock_guard lock(mutex_);
  return state_;
}

std::string Ticket::error() const {
  if (in_child()) return state_ == State::kDone ? "" : kForked;
  const std::lock_guard lock(mutex_);
  return error_;
}

bool Ticket::wait(std::optional<std::chrono::duration<double>> timeout) const {
  if (in_child()) return true;
  std::unique_lock lock(mutex_);
  const auto ended = [this] { return state_ != State::kPending; };
  if (timeout && *timeout < kLongestWait) return changed_.wait_for(lock, *timeout, ended);
  changed_.wait(lock, ended);
  return true;
}

void Ticket::end(State state, std::string error) {
  {
    const std::lock_guard lock(mutex_);
    state_ = state;
    error_ = std::move(error);
  }
  changed_.notify_all();
}

// The engine inside the process that made it.
class TransferEngine::Machine {
 public:
  Machine(std::unique_ptr<DeviceRuntime> runtime, TransferOptions options, bool threaded);
  ~Machine() { close(); }

  std::shared_ptr<Ticket> gather(Gather request, Backpressure policy);
  bool poll();
  void drain();
  void close();
  std::int64_t pending() const;

 private:
  struct Transfer {
    Gather request;
    std::shared_ptr<Ticket> ticket;
    std::shared_ptr<Event> produced;
    std::size_t next_piece = 0;
    std::int64_t pieces_in_flight = 0;
    std::optional<std::string> error;  // of what failed first; then nothing more is enqueued

    void fail(const char* text) {
      if (!error) error = text;
    }
    bool wholly_enqueued() const { return error || next_piece == request.pieces.size(); }
    std::int64_t next_bytes() const {
      return request.pieces[next_piece].length * request.source.row_bytes;
    }
  };
  struct PieceInFlight {
    std::shared_ptr<Transfer> transfer;
    std::shared_ptr<Event> copied;
    std::int64_t bytes = 0;
  };

  bool take_inbox();
  bool retire_pieces();
  bool enqueue_pieces();
  void enqueue_piece(const std::shared_ptr<Transfer>& transfer);
  bool end_transfers();
  void run();

  const std::unique_ptr<DeviceRuntime> runtime_;
  const TransferOptions options_;
  const bool threaded_;

  // The state machine, driven by whoever holds poll_mutex_. Callers of gather() never take it, so
  // that they do not wait while a long request is planned.
  std::mutex poll_mutex_;
  std::vector<std::unique_ptr<Stream>> streams_;    // null: to be made anew
  std::deque<std::shared_ptr<Transfer>> queue_;     // not wholly enqueued, in order
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

TransferEngine::Machine::Machine(std::unique_ptr<DeviceRuntime> runtime, TransferOptions options,
                                 bool threaded)
    : runtime_(std::move(runtime)), options_(options), threaded_(threaded) {
  if (options.streams < 1 || options.max_pending < 1 || options.in_flight_bytes < 1) {
    throw std::invalid_argument(
        "transfer engine options (streams " + std::to_string(options.streams) + ", max_pending " +
        std::to_string(options.max_pending) + ", in_flight_bytes " +
        std::to_string(options.in_flight_bytes) + ") must each be at least 1");
  }
  for (int i = 0; i < options.streams; ++i) streams_.push_back(runtime_->create_stream());
  if (threaded) thread_ = std::thread([this] { run(); });
}

std::shared_ptr<Ticket> TransferEngine::Machine::gather(Gather request, Backpressure policy) {
  const BlockTable blocks{std::span<const std::int64_t>(request.block_ids)};
  for (const GatherPiece& piece : request.pieces) {
    if (piece.layer < 0 || piece.layer >= request.source.num_layers) {
      throw std::out_of_range("layer " + std::to_string(piece.layer) + " is outside the source's " +
                              std::to_string(request.source.num_layers) + " layers");
    }
    check_range(request.source, blocks, piece.start, piece.length);
  }
  auto transfer = std::make_shared<Transfer>();
  transfer->ticket = std::make_shared<Ticket>();
  {
    std::unique_lock lock(mutex_);
    const auto has_room = [this] {
      return closing_ || static_cast<std::int64_t>(pending_.size()) < options_.max_pending;
    };
    if (policy == Backpressure::kWait) {
      ended_.wait(lock, has_room);
    } else if (!has_room()) {
      return nullptr;
    }
    if (closing_) throw std::runtime_error("the transfer engine is closed: open a new store");
    transfer->produced = runtime_->record_producer(request.producer_stream);
    transfer->request = std::move(request);
    inbox_.push_back(transfer);
    pending_.push_back(transfer->ticket);
  }
  work_.notify_one();
  return transfer->ticket;
}

bool TransferEngine::Machine::poll() {
  const std::lock_guard turn(poll_mutex_);
  bool changed = take_inbox();
  changed |= retire_pieces();
  changed |= enqueue_pieces();
  changed |= end_transfers();
  return changed;
}

bool TransferEngine::Machine::take_inbox() {
  const std::lock_guard lock(mutex_);
  const bool changed = !inbox_.empty();
  queue_.insert(queue_.end(), inbox_.begin(), inbox_.end());
  running_.insert(running_.end(), inbox_.begin(), inbox_.end());
  inbox_.clear();
  if (closing_) {
    for (const auto& transfer : queue_) {
      transfer->fail("the transfer engine was closed before this transfer was complete");
    }
  }
  return changed;
}

// Lets go of the pieces that have run, in whatever order: streams run beside each other.
bool TransferEngine::Machine::retire_pieces() {
  const std::size_t retired = std::erase_if(in_flight_, [this](const PieceInFlight& piece) {
    try {
      if (!piece.copied->done()) return false;
    } catch (const std::exception& error) {
      piece.transfer->fail(error.what());
    }
    in_flight_bytes_ -= piece.bytes;
    --piece.transfer->pieces_in_flight;
    return true;
  });
  return retired > 0;
}

bool TransferEngine::Machine::enqueue_pieces() {
  bool changed = false;
  while (!queue_.empty()) {
    const std::shared_ptr<Transfer> transfer = queue_.front();
    while (!transfer->wholly_enqueued()) {
      const bool fits = in_flight_bytes_ + transfer->next_bytes() <= options_.in_flight_bytes;
      if (!fits && !in_flight_.empty()) return changed;
      enqueue_piece(transfer);
      changed = true;
    }
    queue_.pop_front();
  }
  return changed;
}

void TransferEngine::Machine::enqueue_piece(const std::shared_ptr<Transfer>& transfer) {
  const Gather& request = transfer->request;
  const std::int64_t bytes = transfer->next_bytes();
  const GatherPiece& piece = request.pieces[transfer->next_piece++];
  const PagedView layer = request.source.single_layer(piece.layer);
  const RowsView rows{.data = piece.destination, .token_stride = layer.row_bytes};
  std::unique_ptr<Stream>& stream = streams_[next_stream_++ % streams_.size()];
  try {
    auto plan = plan_copy(layer, BlockTable{std::span<const std::int64_t>(request.block_ids)},
                          piece.start, piece.length, rows);
    if (!stream) stream = runtime_->create_stream();
    stream->wait(transfer->produced);
    stream->copy(layer, rows, std::move(plan));
  } catch (const std::exception& error) {
    transfer->fail(error.what());
    if (!stream) return;
  }
  // Also after a failure: part of the copy may have been enqueued, and its ticket must outlast it.
  try {
    in_flight_.push_back({transfer, stream->record(), bytes});
  } catch (const std::exception& error) {
    transfer->fail(error.what());
    stream.reset();  // it dies after its work has run
    return;
  }
  in_flight_bytes_ += bytes;
  ++transfer->pieces_in_flight;
}

// Ends the transfers whose last piece has run. Whoever sees an ended ticket finds the room that it
// made: both change under one lock.
bool TransferEngine::Machine::end_transfers() {
  const std::lock_guard lock(mutex_);
  const std::size_t ended = std::erase_if(running_, [](const auto& transfer) {
    if (transfer->pieces_in_flight > 0 || !transfer->wholly_enqueued()) return false;
    transfer->ticket->end(transfer->error ? Ticket::State::kFailed : Ticket::State::kDone,
                          transfer->error.value_or(""));
    return true;
  });
  if (ended == 0) return false;
  std::erase_if(pending_,
                [](const auto& ticket) { return ticket->state() != Ticket::State::kPending; });
  ended_.notify_all();
  return true;
}

void TransferEngine::Machine::run() {
  while (true) {
    {
      std::unique_lock lock(mutex_);
      work_.wait(lock, [this] { return closing_ || !pending_.empty(); });
      if (pending_.empty()) return;
    }
    if (!poll()) {
      std::unique_lock lock(mutex_);
      work_.wait_for(lock, kPollInterval, [this] { return !inbox_.empty(); });
    }
  }
}

void TransferEngine::Machine::drain() {
  std::vector<std::shared_ptr<Ticket>> tickets;
  {
    const std::lock_guard lock(mutex_);
    tickets = pending_;
  }
  for (const auto& ticket : tickets) {
    if (threaded_) {
      ticket->wait(std::nullopt);
      continue;
    }
    while (ticket->state() == Ticket::State::kPending) {
      if (!poll()) std::this_thread::sleep_for(kPollInterval);
    }
  }
}

void TransferEngine::Machine::close() {
  std::thread thread;
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
    thread.swap(thread_);  // whoever comes first joins
  }
  work_.notify_all();
  ended_.notify_all();
  drain();
  if (thread.joinable()) thread.join();
}

std::int64_t TransferEngine::Machine::pending() const {
  const std::lock_guard lock(mutex_);
  return static_cast<std::int64_t>(pending_.size());
}

TransferEngine::TransferEngine(std::unique_ptr<DeviceRuntime> runtime, TransferOptions options,
                               bool threaded)
    : owner_pid_(getpid()),
      machine_(std::make_unique<Machine>(std::move(runtime), options, threaded)) {}

TransferEngine::~TransferEngine() {
  if (in_child()) static_cast<void>(machine_.release());
}

bool TransferEngine::in_child() const { return getpid() != owner_pid_; }

std::shared_ptr<Ticket> TransferEngine::gather(Gather request, Backpressure policy) {
  if (in_child()) throw std::runtime_error(kForked);
  return machine_->gather(std::move(request), policy);
}

bool TransferEngine::poll() { return !in_child() && machine_->poll(); }

void TransferEngine::drain() {
  if (in_child()) throw std::runtime_error(kForked);
  machine_->drain();
}

void TransferEngine::close() {
  if (!in_child()) machine_->close();
}

std::int64_t TransferEngine::pending() const { return in_child() ? 0 : machine_->pending(); }

}  // namespace hscache
