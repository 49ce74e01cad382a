#include "core/transfer_engine.h"

#include <unistd.h>

#include <algorithm>
#include <exception>
#include <stdexcept>
#include <utility>

namespace hscache {
namespace {

// How often the thread looks at copies in flight. A copy of one chunk takes longer.
constexpr std::chrono::microseconds kPollInterval{50};

constexpr const char* kForked =
    "the transfer engine belongs to the parent process: open a store after fork(), not before";

}  // namespace

Ticket::State Ticket::state() const {
  const std::lock_guard lock(mutex_);
  return state_;
}

std::string Ticket::error() const {
  const std::lock_guard lock(mutex_);
  return error_;
}

bool Ticket::wait(std::optional<std::chrono::duration<double>> timeout) const {
  std::unique_lock lock(mutex_);
  const auto ended = [this] { return state_ != State::kPending; };
  if (!timeout) {
    changed_.wait(lock, ended);
    return true;
  }
  return changed_.wait_for(lock, *timeout, ended);
}

void Ticket::end(State state, std::string error) {
  {
    const std::lock_guard lock(mutex_);
    state_ = state;
    error_ = std::move(error);
  }
  changed_.notify_all();
}

TransferEngine::TransferEngine(std::unique_ptr<DeviceRuntime> runtime, TransferOptions options,
                               bool threaded)
    : runtime_(std::move(runtime)),
      options_(options),
      threaded_(threaded),
      owner_pid_(getpid()) {
  if (options.streams < 1 || options.max_pending < 1 || options.in_flight_bytes < 1) {
    throw std::invalid_argument(
        "transfer engine options (streams " + std::to_string(options.streams) + ", max_pending " +
        std::to_string(options.max_pending) + ", in_flight_bytes " +
        std::to_string(options.in_flight_bytes) + ") must each be at least 1");
  }
  for (int i = 0; i < options.streams; ++i) streams_.push_back(runtime_->create_stream());
  if (threaded) thread_ = std::thread([this] { run(); });
}

TransferEngine::~TransferEngine() {
  if (in_child()) {
    // The threads do not exist here: joining them would wait for ever. The memory goes with the
    // process.
    if (thread_.joinable()) thread_.detach();
    for (auto& stream : streams_) static_cast<void>(stream.release());
    return;
  }
  close();
}

bool TransferEngine::in_child() const { return getpid() != owner_pid_; }

std::shared_ptr<Ticket> TransferEngine::gather(Gather request, Backpressure policy) {
  if (in_child()) throw std::runtime_error(kForked);
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

bool TransferEngine::poll() {
  const std::lock_guard turn(poll_mutex_);
  bool changed = false;
  {
    const std::lock_guard lock(mutex_);
    changed = !inbox_.empty();
    queue_.insert(queue_.end(), inbox_.begin(), inbox_.end());
    running_.insert(running_.end(), inbox_.begin(), inbox_.end());
    inbox_.clear();
    if (closing_) {
      for (const auto& transfer : queue_) {
        transfer->error = "the transfer engine was closed before this transfer was complete";
      }
      queue_.clear();
    }
  }

  // Retire the pieces that have run, in whatever order: streams run beside each other.
  std::erase_if(in_flight_, [&](const PieceInFlight& piece) {
    try {
      if (!piece.copied->done()) return false;
    } catch (const std::exception& error) {
      piece.transfer->error = error.what();
    }
    in_flight_bytes_ -= piece.bytes;
    --piece.transfer->pieces_in_flight;
    changed = true;
    return true;
  });

  // Enqueue what there is room for.
  while (!queue_.empty() && (in_flight_.empty() || in_flight_bytes_ < options_.in_flight_bytes)) {
    const std::shared_ptr<Transfer>& transfer = queue_.front();
    if (transfer->wholly_enqueued()) {
      queue_.pop_front();
    } else {
      enqueue_piece(transfer);
    }
    changed = true;
  }

  // End the transfers whose last piece has run.
  const std::size_t ended = std::erase_if(running_, [](const auto& transfer) {
    if (transfer->pieces_in_flight > 0 || !transfer->wholly_enqueued()) return false;
    transfer->ticket->end(transfer->error.empty() ? Ticket::State::kDone : Ticket::State::kFailed,
                          transfer->error);
    return true;
  });
  if (ended > 0) {
    {
      const std::lock_guard lock(mutex_);
      std::erase_if(pending_,
                    [](const auto& ticket) { return ticket->state() != Ticket::State::kPending; });
    }
    ended_.notify_all();
  }
  return changed || ended > 0;
}

void TransferEngine::enqueue_piece(const std::shared_ptr<Transfer>& transfer) {
  const Gather& request = transfer->request;
  const GatherPiece& piece = request.pieces[transfer->next_piece++];
  Stream& stream = *streams_[next_stream_++ % streams_.size()];
  const std::int64_t bytes = piece.length * request.source.row_bytes;
  const PagedView layer = request.source.single_layer(piece.layer);
  const RowsView rows{.data = piece.destination, .token_stride = layer.row_bytes};
  try {
    auto plan = plan_copy(layer, BlockTable{std::span<const std::int64_t>(request.block_ids)},
                          piece.start, piece.length, rows);
    stream.wait(transfer->produced);
    stream.copy(layer, rows, std::move(plan));
    in_flight_.push_back({transfer, stream.record(), bytes});
  } catch (const std::exception& error) {
    transfer->error = error.what();
    return;
  }
  in_flight_bytes_ += bytes;
  ++transfer->pieces_in_flight;
}

void TransferEngine::run() {
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

void TransferEngine::drain() {
  if (in_child()) throw std::runtime_error(kForked);
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

void TransferEngine::close() {
  if (in_child()) return;
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

std::int64_t TransferEngine::pending() const {
  const std::lock_guard lock(mutex_);
  return static_cast<std::int64_t>(pending_.size());
}

}  // namespace hscache
