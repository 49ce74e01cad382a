#include "core/transfer_engine.h"

#include <unistd.h>

#include <algorithm>
#include <deque>
#include <exception>
#include <stdexcept>
#include <thread>
#include <utility>

#include "core/copy_plan.h"
#include "core/mutation.h"

namespace hscache {
namespace {

// How often the thread looks at copies in flight. A copy of one chunk takes longer.
constexpr std::chrono::microseconds kPollInterval{50};

// Regions of the ring: while one is filled another is moved, with one to spare on either side.
constexpr std::int64_t kRegions = 4;
// Block ids that one step may need; a step covers fewer tokens where blocks are short.
constexpr std::int64_t kRegionIds = 4096;

// Longer waits have no limit: clocks cannot count to their end.
constexpr std::chrono::duration<double> kLongestWait{1e9};

constexpr const char* kForked =
    "the transfer engine belongs to the parent process: open a store after fork(), not before";

std::int64_t region_bytes(const TransferOptions& options) {
  return std::max<std::int64_t>(1, options.staging_bytes / kRegions);
}

BlockTable table(const TransferRequest& request) {
  return BlockTable{std::span<const std::int64_t>(request.block_ids)};
}

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

void Ticket::cancel() {
  if (in_child()) return;
  const std::lock_guard lock(mutex_);
  cancelled_ = true;
}

bool Ticket::cancelled() const {
  const std::lock_guard lock(mutex_);
  return cancelled_;
}

// The engine inside the process that made it.
class TransferEngine::Machine {
 public:
  Machine(std::unique_ptr<DeviceRuntime> runtime, TransferOptions options, bool threaded);
  ~Machine() {
    if (mutated("ring freed before the drain")) device_ring_.reset();
    if (mutated("pinned ids freed before the drain")) pinned_ids_.reset();
    close();
  }

  std::shared_ptr<Ticket> submit(TransferRequest request, Backpressure policy);
  std::unique_ptr<Registration> register_host(std::byte* data, std::int64_t bytes,
                                              std::int64_t unit) {
    return runtime_->register_host(data, bytes, unit);
  }
  bool poll();
  void drain();
  void close();
  std::int64_t pending() const;

 private:
  // A part of the staging ring, with the block ids of what goes through it.
  struct Region {
    std::byte* rows = nullptr;
    std::int64_t* ids = nullptr;       // on the device
    std::int64_t* host_ids = nullptr;  // pinned, where they are copied from
  };
  struct Transfer {
    TransferRequest request;
    std::shared_ptr<Ticket> ticket;
    std::shared_ptr<Event> after;
    // What is enqueued next: the piece, its first layer, its first token.
    std::size_t piece = 0;
    std::size_t layer = 0;
    std::int64_t token = 0;
    std::int64_t steps_in_flight = 0;
    std::optional<std::string> error;  // of what failed first; then nothing more is enqueued

    void fail(const char* text) {
      if (!error) error = text;
    }
    bool wholly_enqueued() const { return error || piece == request.pieces.size(); }
    bool skip_what_is_empty();
  };
  // Tokens `[token, token + tokens)` of a piece, layers `[layer, layer + layers)`.
  struct Part {
    std::int64_t token = 0;
    std::int64_t tokens = 0;
    std::size_t layer = 0;
    std::size_t layers = 0;
  };
  // Two streams, so that one part is moved while the next is packed.
  struct Lane {
    std::unique_ptr<Stream> kernels;
    std::unique_ptr<Stream> copies;  // null where rows go in one step
  };
  // A part on its way.
  struct Step {
    std::shared_ptr<Transfer> transfer;
    std::shared_ptr<Event> ran;
    std::optional<Region> region;
    std::int64_t bytes = 0;
  };

  void make_ring();
  Lane make_lane();
  bool take_inbox();
  bool retire_steps();
  bool enqueue_steps();
  bool has_room(std::int64_t bytes) const;
  Part next_part(const Transfer& transfer) const;
  void enqueue_step(const std::shared_ptr<Transfer>& transfer, const Part& part);
  std::shared_ptr<Event> enqueue_direct(Lane& lane, const Transfer& transfer, const Part& part);
  std::shared_ptr<Event> enqueue_staged(Lane& lane, const Transfer& transfer, const Part& part,
                                        const Region& region);
  bool end_transfers();
  void run();

  const std::unique_ptr<DeviceRuntime> runtime_;
  const TransferOptions options_;
  const bool threaded_;
  const bool direct_;  // rows go to host memory in one step; the ring is only a count of bytes

  // The state machine, driven by whoever holds poll_mutex_. Callers of submit() never take it, so
  // that they do not wait while a long request is enqueued.
  std::mutex poll_mutex_;
  std::unique_ptr<Buffer> device_ring_;
  std::unique_ptr<Buffer> pinned_ids_;
  // After the memory that they use: they die first, when their work has run.
  std::vector<Lane> lanes_;  // empty ones are made anew
  std::size_t next_lane_ = 0;
  std::vector<Region> free_regions_;
  std::deque<std::shared_ptr<Transfer>> queue_;     // not wholly enqueued, in order
  std::vector<std::shared_ptr<Transfer>> running_;  // not ended
  std::vector<Step> in_flight_;
  std::int64_t in_flight_bytes_ = 0;

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
    : runtime_(std::move(runtime)),
      options_(options),
      threaded_(threaded),
      direct_(runtime_->reaches_host()) {
  if (options.lanes < 1 || options.max_pending < 1 || options.staging_bytes < 1) {
    throw std::invalid_argument("transfer engine options (lanes " + std::to_string(options.lanes) +
                                ", max_pending " + std::to_string(options.max_pending) +
                                ", staging_bytes " + std::to_string(options.staging_bytes) +
                                ") must each be at least 1");
  }
  if (!direct_) make_ring();
  for (int i = 0; i < options.lanes; ++i) lanes_.push_back(make_lane());
  if (threaded) thread_ = std::thread([this] { run(); });
}

void TransferEngine::Machine::make_ring() {
  const std::int64_t id_bytes = kRegionIds * static_cast<std::int64_t>(sizeof(std::int64_t));
  // Regions begin at multiples of 256 bytes, so that kernels move them in their widest words.
  const std::int64_t stride = (region_bytes(options_) + id_bytes + 255) / 256 * 256;
  device_ring_ = runtime_->allocate_device(kRegions * stride);
  pinned_ids_ = runtime_->allocate_pinned(kRegions * id_bytes);
  for (std::int64_t i = 0; i < kRegions; ++i) {
    std::byte* const device = device_ring_->data() + i * stride;
    std::byte* const pinned = pinned_ids_->data() + i * id_bytes;
    free_regions_.push_back({.rows = device + id_bytes,
                             .ids = reinterpret_cast<std::int64_t*>(device),
                             .host_ids = reinterpret_cast<std::int64_t*>(pinned)});
  }
}

TransferEngine::Machine::Lane TransferEngine::Machine::make_lane() {
  Lane lane;
  lane.kernels = runtime_->create_stream();
  if (!direct_) lane.copies = runtime_->create_stream();
  return lane;
}

std::shared_ptr<Ticket> TransferEngine::Machine::submit(TransferRequest request,
                                                        Backpressure policy) {
  for (const RowsPiece& piece : request.pieces) {
    if (static_cast<std::int64_t>(piece.layers.size()) != request.paged.num_layers) {
      throw std::invalid_argument("a piece has places for " + std::to_string(piece.layers.size()) +
                                  " layers, the paged memory has " +
                                  std::to_string(request.paged.num_layers) +
                                  ": give one for each, null for those left alone");
    }
    check_range(request.paged, table(request), piece.start, piece.length);
  }
  if (!direct_ && request.paged.row_bytes > region_bytes(options_)) {
    throw std::invalid_argument("a row of " + std::to_string(request.paged.row_bytes) +
                                " bytes does not fit a region of the staging ring of " +
                                std::to_string(region_bytes(options_)) +
                                " bytes: set hscache_staging_bytes higher");
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
    transfer->after = runtime_->record_on(request.after_stream);
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
  changed |= retire_steps();
  changed |= enqueue_steps();
  changed |= end_transfers();
  return changed;
}

bool TransferEngine::Machine::take_inbox() {
  const std::lock_guard lock(mutex_);
  const bool changed = !inbox_.empty();
  queue_.insert(queue_.end(), inbox_.begin(), inbox_.end());
  running_.insert(running_.end(), inbox_.begin(), inbox_.end());
  inbox_.clear();
  for (const auto& transfer : queue_) {
    if (closing_)
      transfer->fail("the transfer engine was closed before this transfer was complete");
    if (transfer->ticket->cancelled()) transfer->fail("the transfer was cancelled");
  }
  return changed;
}

// Lets go of the steps that have run, in whatever order: gathers and scatters run beside each
// other.
bool TransferEngine::Machine::retire_steps() {
  const std::size_t retired = std::erase_if(in_flight_, [this](const Step& step) {
    try {
      if (!step.ran->done() && !mutated("poll ignores not ready")) return false;
    } catch (const std::exception& error) {
      step.transfer->fail(error.what());
    }
    if (step.region) free_regions_.push_back(*step.region);
    in_flight_bytes_ -= step.bytes;
    --step.transfer->steps_in_flight;
    return true;
  });
  return retired > 0;
}

bool TransferEngine::Machine::enqueue_steps() {
  bool changed = false;
  while (!queue_.empty()) {
    const std::shared_ptr<Transfer> transfer = queue_.front();
    while (!transfer->wholly_enqueued()) {
      if (!transfer->skip_what_is_empty()) {
        const Part part = next_part(*transfer);
        if (!has_room(part.tokens * static_cast<std::int64_t>(part.layers) *
                      transfer->request.paged.row_bytes)) {
          return changed;
        }
        enqueue_step(transfer, part);
      }
      changed = true;
    }
    queue_.pop_front();
  }
  return changed;
}

bool TransferEngine::Machine::has_room(std::int64_t bytes) const {
  if (!direct_) return !free_regions_.empty();
  return in_flight_.empty() || in_flight_bytes_ + bytes <= options_.staging_bytes;
}

// Moves on over a piece without tokens, a piece at its end, a layer that is left alone. Returns
// whether it moved.
bool TransferEngine::Machine::Transfer::skip_what_is_empty() {
  const RowsPiece& at = request.pieces[piece];
  if (at.length == 0 || layer == at.layers.size()) {
    ++piece;
    layer = 0;
    token = 0;
    return true;
  }
  if (at.layers[layer] == nullptr) {
    ++layer;
    return true;
  }
  return false;
}

// As many tokens of as many neighbouring layers as one step takes.
TransferEngine::Machine::Part TransferEngine::Machine::next_part(const Transfer& transfer) const {
  const TransferRequest& request = transfer.request;
  const RowsPiece& piece = request.pieces[transfer.piece];
  if (direct_) return {.token = 0, .tokens = piece.length, .layer = transfer.layer, .layers = 1};
  const std::int64_t rows = region_bytes(options_) / request.paged.row_bytes;
  const auto layers_left = static_cast<std::int64_t>(piece.layers.size() - transfer.layer);
  std::int64_t layers = 1;
  while (layers < std::min(layers_left, rows) &&
         piece.layers[transfer.layer + static_cast<std::size_t>(layers)] != nullptr) {
    ++layers;
  }
  std::int64_t tokens = std::min(piece.length - transfer.token, rows / layers);
  // A range that begins inside a block touches one block more than its length needs.
  if (tokens / request.paged.block_size > kRegionIds - 2) {
    tokens = (kRegionIds - 2) * request.paged.block_size;
  }
  return {.token = transfer.token,
          .tokens = tokens,
          .layer = transfer.layer,
          .layers = static_cast<std::size_t>(layers)};
}

void TransferEngine::Machine::enqueue_step(const std::shared_ptr<Transfer>& transfer,
                                           const Part& part) {
  Step step{.transfer = transfer,
            .ran = nullptr,
            .region = std::nullopt,
            .bytes = part.tokens * static_cast<std::int64_t>(part.layers) *
                     transfer->request.paged.row_bytes};
  Lane& lane = lanes_[next_lane_++ % lanes_.size()];
  try {
    if (!lane.kernels) lane = make_lane();
    if (direct_) {
      step.ran = enqueue_direct(lane, *transfer, part);
    } else {
      step.region = free_regions_.back();
      free_regions_.pop_back();
      step.ran = enqueue_staged(lane, *transfer, part, *step.region);
    }
  } catch (const std::exception& error) {
    transfer->fail(error.what());
    if (mutated("ticket ends at the failure") && step.region) free_regions_.push_back(*step.region);
    if (!lane.kernels || mutated("ticket ends at the failure")) return;
    // What was enqueued before the failure still runs, and its ticket must outlast it.
    try {
      if (lane.copies && !mutated("a failed step forgets its copies")) {
        lane.kernels->wait(lane.copies->record());
      }
      step.ran = lane.kernels->record();
    } catch (const std::exception&) {
      lane = Lane{};  // streams die after their work has run
      if (step.region) free_regions_.push_back(*step.region);
      return;
    }
  }
  if (step.region && mutated("staging reused early")) {
    free_regions_.push_back(*step.region);
    step.region.reset();
  }
  in_flight_bytes_ += step.bytes;
  ++transfer->steps_in_flight;
  in_flight_.push_back(std::move(step));
  // On to the next tokens of these layers, then to the next layers.
  transfer->token += part.tokens;
  if (transfer->token == transfer->request.pieces[transfer->piece].length) {
    transfer->token = 0;
    transfer->layer += part.layers;
  }
}

std::shared_ptr<Event> TransferEngine::Machine::enqueue_direct(Lane& lane, const Transfer& transfer,
                                                               const Part& part) {
  const TransferRequest& request = transfer.request;
  const RowsPiece& piece = request.pieces[transfer.piece];
  const std::int64_t row_bytes = request.paged.row_bytes;
  const RowsTask task{.paged = request.paged.layers(part.layer, 1),
                      .block_ids = request.block_ids.data(),
                      .start = piece.start + part.token,
                      .length = part.tokens,
                      .rows = {piece.layers[part.layer] + part.token * row_bytes, row_bytes, 0}};
  lane.kernels->wait(transfer.after);
  if (request.direction == Direction::kGather) {
    lane.kernels->gather(task);
  } else {
    lane.kernels->scatter(task);
  }
  return lane.kernels->record();
}

std::shared_ptr<Event> TransferEngine::Machine::enqueue_staged(Lane& lane, const Transfer& transfer,
                                                               const Part& part,
                                                               const Region& region) {
  const TransferRequest& request = transfer.request;
  const RowsPiece& piece = request.pieces[transfer.piece];
  const std::int64_t row_bytes = request.paged.row_bytes;
  const std::int64_t layer_bytes = part.tokens * row_bytes;
  const std::int64_t start = piece.start + part.token;

  // The ids of the blocks that this part touches, counted from the first of them.
  const std::int64_t first_block = start / request.paged.block_size;
  const std::int64_t last_block = (start + part.tokens - 1) / request.paged.block_size;
  const std::int64_t count = last_block - first_block + 1;
  auto* const host_ids = mutated("pinned ids reused early")
                             ? reinterpret_cast<std::int64_t*>(pinned_ids_->data())
                             : region.host_ids;
  auto* const device_ids = mutated("device ids reused early")
                               ? reinterpret_cast<std::int64_t*>(device_ring_->data())
                               : region.ids;
  std::copy_n(request.block_ids.begin() + first_block, count, host_ids);
  const Copy ids{.to = reinterpret_cast<std::byte*>(device_ids),
                 .from = reinterpret_cast<const std::byte*>(host_ids),
                 .bytes = count * static_cast<std::int64_t>(sizeof(std::int64_t))};
  const RowsTask task{.paged = request.paged.layers(part.layer, part.layers),
                      .block_ids = device_ids,
                      .start = start - first_block * request.paged.block_size,
                      .length = part.tokens,
                      .rows = {region.rows, row_bytes, layer_bytes}};
  std::vector<Copy> moves;
  for (std::size_t i = 0; i < part.layers; ++i) {
    std::byte* const host = piece.layers[part.layer + i] + part.token * row_bytes;
    std::byte* const device = region.rows + static_cast<std::int64_t>(i) * layer_bytes;
    moves.push_back(request.direction == Direction::kGather ? Copy{host, device, layer_bytes}
                                                            : Copy{device, host, layer_bytes});
  }

  const bool unordered = mutated("no wait for what is written before") ||
                         (mutated("stream 0 orders everything") && request.after_stream == 0);
  if (!unordered) lane.kernels->wait(transfer.after);
  lane.kernels->copy_to_device({&ids, 1});
  if (request.direction == Direction::kGather) {
    lane.kernels->gather(task);
    const auto packed = lane.kernels->record();
    if (!mutated("copy before gather")) lane.copies->wait(packed);
    lane.copies->copy_to_host(moves);
    return mutated("done recorded before the copies") ? packed : lane.copies->record();
  }
  lane.copies->copy_to_device(moves);
  const auto moved = lane.copies->record();
  if (!mutated("scatter before copy")) lane.kernels->wait(moved);
  lane.kernels->scatter(task);
  return mutated("done recorded before the scatter") ? moved : lane.kernels->record();
}

// Ends the transfers whose last step has run. Whoever sees an ended ticket finds the room that it
// made: both change under one lock.
bool TransferEngine::Machine::end_transfers() {
  const std::lock_guard lock(mutex_);
  const std::size_t ended = std::erase_if(running_, [](const auto& transfer) {
    const bool running = transfer->steps_in_flight > 0 &&
                         !(mutated("cancel without waiting") && transfer->ticket->cancelled());
    if (running || !transfer->wholly_enqueued()) return false;
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
  if (!mutated("close does not drain")) drain();
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

std::shared_ptr<Ticket> TransferEngine::submit(TransferRequest request, Backpressure policy) {
  if (in_child()) throw std::runtime_error(kForked);
  return machine_->submit(std::move(request), policy);
}

std::unique_ptr<Registration> TransferEngine::register_host(std::byte* data, std::int64_t bytes,
                                                            std::int64_t unit) {
  if (in_child()) throw std::runtime_error(kForked);
  return machine_->register_host(data, bytes, unit);
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
