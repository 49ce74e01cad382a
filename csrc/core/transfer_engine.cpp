#include "core/transfer_engine.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include "core/copy_plan.h"
#include "core/mutation.h"

namespace hscache {
namespace {

// How often the thread looks at copies in flight, where the device does not tell. A copy of one
// chunk takes longer.
constexpr std::chrono::microseconds kPollInterval{50};

// Regions of the ring: while one is filled another is moved, with one to spare on either side.
constexpr std::int64_t kRegions = 4;
// Block ids that one step may need; a step covers fewer tokens where blocks are short.
constexpr std::int64_t kRegionIds = 4096;

// Rows that one step takes where the device reaches host memory: enough to hide what a step costs,
// few enough to share a long piece among lanes.
constexpr std::int64_t kDirectBytes = 4 << 20;

constexpr auto kIdBytes = static_cast<std::int64_t>(sizeof(std::int64_t));
constexpr auto kScaleBytes = static_cast<std::int64_t>(sizeof(float));

std::int64_t region_bytes(const TransferOptions& options) {
  return std::max<std::int64_t>(1, options.staging_bytes / kRegions);
}

BlockTable table(const TransferRequest& request) {
  return BlockTable{std::span<const std::int64_t>(request.block_ids)};
}

bool converts(const TransferRequest& request) { return request.paged_element != Element::kAny; }

bool has_scales(const TransferRequest& request) {
  return (request.paged_element == Element::kFloat8) != (request.rows_element == Element::kFloat8);
}

// Bytes of a row outside paged memory, without its scale.
std::int64_t row_bytes(const TransferRequest& request) {
  return request.paged.row_bytes / element_bytes(request.paged_element) *
         element_bytes(request.rows_element);
}

std::int64_t row_bytes_with_scale(const TransferRequest& request) {
  return row_bytes(request) + (has_scales(request) ? kScaleBytes : 0);
}

void check_elements(const TransferRequest& request) {
  const bool one_known =
      (request.paged_element == Element::kAny) != (request.rows_element == Element::kAny);
  if (one_known || (request.count_non_finite && !converts(request))) {
    throw std::invalid_argument(
        "the elements of one side are not known: name those of both to convert or to count what "
        "is not finite, or those of neither");
  }
  if (request.paged.row_bytes % element_bytes(request.paged_element) != 0) {
    throw std::invalid_argument("a row of " + std::to_string(request.paged.row_bytes) +
                                " bytes is no whole number of elements of " +
                                std::to_string(element_bytes(request.paged_element)) + " bytes");
  }
  const PagedView& paged = request.paged;
  const auto address = reinterpret_cast<std::intptr_t>(paged.data);
  const std::int64_t places =
      address | paged.block_stride | paged.layer_stride | paged.token_stride;
  if (places % element_bytes(request.paged_element) != 0) {
    throw std::invalid_argument(
        "paged memory at " + std::to_string(address) + " with strides of " +
        std::to_string(paged.block_stride) + ", " + std::to_string(paged.layer_stride) + " and " +
        std::to_string(paged.token_stride) + " bytes does not hold whole elements of " +
        std::to_string(element_bytes(request.paged_element)) + " bytes");
  }
}

void check_piece(const TransferRequest& request, const RowsPiece& piece) {
  if (static_cast<std::int64_t>(piece.layers.size()) != request.paged.num_layers) {
    throw std::invalid_argument("a piece has places for " + std::to_string(piece.layers.size()) +
                                " layers, the paged memory has " +
                                std::to_string(request.paged.num_layers) +
                                ": give one for each, null for those left alone");
  }
  if (has_scales(request)) {
    bool complete = piece.scales.size() == piece.layers.size();
    for (std::size_t i = 0; complete && i < piece.layers.size(); ++i) {
      complete = piece.layers[i] == nullptr || piece.scales[i] != nullptr;
    }
    if (!complete) {
      throw std::invalid_argument(
          "rows are converted to or from float8, and a piece lacks the place of a layer's scales: "
          "give one for every layer that is moved");
    }
  }
  for (std::size_t i = 0; i < piece.layers.size(); ++i) {
    const auto misaligned = [](const void* place, std::int64_t bytes) {
      return reinterpret_cast<std::intptr_t>(place) % bytes != 0;
    };
    if (misaligned(piece.layers[i], element_bytes(request.rows_element)) ||
        (has_scales(request) && misaligned(piece.scales[i], kScaleBytes))) {
      throw std::invalid_argument(
          "the place of a layer's rows or scales is not a multiple of their elements' size: make "
          "slots whole numbers of elements");
    }
  }
  check_range(request.paged, table(request), piece.start, piece.length);
}

}  // namespace

// The engine inside the process that made it.
class TransferEngine::Machine {
 public:
  Machine(std::unique_ptr<DeviceRuntime> runtime, TransferOptions options, bool threaded);
  ~Machine() {
    if (mutated("ring freed before the drain")) device_ring_.reset();
    if (mutated("pinned ids freed before the drain")) pinned_heads_.reset();
    close();
  }

  std::shared_ptr<Ticket> submit(TransferRequest request, Backpressure policy);
  std::unique_ptr<Registration> register_host(std::byte* data, std::int64_t bytes) {
    return runtime_->register_host(data, bytes);
  }
  bool poll();
  void drain();
  void close();
  std::int64_t pending() const;

 private:
  // A part of the staging ring, with the block ids of what goes through it.
  struct Region {
    std::byte* rows = nullptr;
    // A word that counts rows which are not finite, then the ids: on the device, and in the pinned
    // memory that they are copied from.
    std::int64_t* head = nullptr;
    std::int64_t* host_head = nullptr;
    std::int64_t* host_count = nullptr;  // pinned, where the count is copied to
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
    std::int64_t non_finite_rows = 0;
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
    std::unique_ptr<Stream> copies;  // null where the device reaches host memory
  };
  // How a part travels.
  enum class Way {
    kHost,      // by one loop, from place to place
    kStaged,    // through a region
    kZeroCopy,  // by kernels that reach host memory
    kDma,       // by the copy engine alone
  };
  // A part on its way.
  struct Step {
    std::shared_ptr<Transfer> transfer;
    std::shared_ptr<Event> ran;
    Lane* lane = nullptr;
    std::optional<Region> region;  // of what is staged; of its ids and count only for kZeroCopy
    std::unique_ptr<std::uint32_t> host_count;  // of kHost
    std::int64_t bytes = 0;
  };

  void make_ring();
  Lane make_lane();
  bool take_inbox();
  bool retire_steps();
  bool enqueue_steps();
  Part next_part(const Transfer& transfer) const;
  std::vector<Copy> dma_copies(const Transfer& transfer, const Part& part) const;
  bool kernels_reach(const Transfer& transfer, const Part& part) const;
  bool has_room(Way way, std::int64_t bytes) const;
  bool enqueue_step(const std::shared_ptr<Transfer>& transfer, const Part& part);
  RowsTask task_of(const Transfer& transfer, const Part& part) const;
  void wait_for_producer(Stream& stream, const Transfer& transfer) const;
  std::shared_ptr<Event> enqueue_host(Lane& lane, const Transfer& transfer, const Part& part,
                                      std::uint32_t* count);
  std::shared_ptr<Event> enqueue_dma(Lane& lane, const Transfer& transfer,
                                     const std::vector<Copy>& copies);
  void upload_head(Lane& lane, RowsTask& task, const Transfer& transfer, const Region& region);
  std::shared_ptr<Event> enqueue_staged(Lane& lane, const Transfer& transfer, const Part& part,
                                        const Region& region);
  std::shared_ptr<Event> enqueue_zero_copy(Lane& lane, const Transfer& transfer, const Part& part,
                                           const Region& region);
  bool end_transfers();
  void wake();
  void run();

  const std::unique_ptr<DeviceRuntime> runtime_;
  const TransferOptions options_;
  const bool threaded_;
  bool told_ = false;  // the device wakes the thread
  const bool direct_;  // rows go to host memory in one step; the ring is only a count of bytes

  // The state machine, driven by whoever holds poll_mutex_. Callers of submit() never take it, so
  // that they do not wait while a long request is enqueued.
  std::mutex poll_mutex_;
  std::unique_ptr<Buffer> device_ring_;
  std::unique_ptr<Buffer> pinned_heads_;
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
  bool progressed_ = false;  // work has run since the thread's last look
  std::thread thread_;
};

TransferEngine::Machine::Machine(std::unique_ptr<DeviceRuntime> runtime, TransferOptions options,
                                 bool threaded)
    : runtime_(std::move(runtime)),
      options_(options),
      threaded_(threaded),
      direct_(runtime_->reaches_host()) {
  if (options.lanes < 1 || options.max_pending < 1 || options.staging_bytes < 1 ||
      options.dma_span_bytes < 1) {
    throw std::invalid_argument("transfer engine options (lanes " + std::to_string(options.lanes) +
                                ", max_pending " + std::to_string(options.max_pending) +
                                ", staging_bytes " + std::to_string(options.staging_bytes) +
                                ", dma_span_bytes " + std::to_string(options.dma_span_bytes) +
                                ") must each be at least 1");
  }
  if (!direct_) make_ring();
  if (threaded) told_ = runtime_->wake_when_done([this] { wake(); });
  for (int i = 0; i < options.lanes; ++i) lanes_.push_back(make_lane());
  if (threaded) thread_ = std::thread([this] { run(); });
}

void TransferEngine::Machine::make_ring() {
  // Everything begins at multiples of 256 bytes, so that kernels move it in their widest words.
  constexpr std::int64_t kAlignment = 256;
  constexpr std::int64_t kHeadBytes = (1 + kRegionIds) * kIdBytes;
  static_assert(kHeadBytes % kIdBytes == 0);
  const auto aligned = [](std::int64_t bytes) {
    return (bytes + kAlignment - 1) / kAlignment * kAlignment;
  };
  const std::int64_t head_bytes = aligned(kHeadBytes);
  // A scale begins at a multiple of its size.
  const std::int64_t device_stride = head_bytes + aligned(region_bytes(options_) + kScaleBytes);
  const std::int64_t pinned_stride = head_bytes + kAlignment;
  device_ring_ = runtime_->allocate_device(kRegions * device_stride);
  pinned_heads_ = runtime_->allocate_pinned(kRegions * pinned_stride);
  for (std::int64_t i = 0; i < kRegions; ++i) {
    std::byte* const device = device_ring_->data() + i * device_stride;
    std::byte* const pinned = pinned_heads_->data() + i * pinned_stride;
    free_regions_.push_back({.rows = device + head_bytes,
                             .head = reinterpret_cast<std::int64_t*>(device),
                             .host_head = reinterpret_cast<std::int64_t*>(pinned),
                             .host_count = reinterpret_cast<std::int64_t*>(pinned + head_bytes)});
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
  check_elements(request);
  for (const RowsPiece& piece : request.pieces) check_piece(request, piece);
  if (!direct_ && row_bytes_with_scale(request) > region_bytes(options_)) {
    throw std::invalid_argument("a row of " + std::to_string(row_bytes_with_scale(request)) +
                                " bytes does not fit a region of the staging ring of " +
                                std::to_string(region_bytes(options_)) +
                                " bytes: set hscache_staging_bytes higher");
  }
  auto transfer = std::make_shared<Transfer>();
  transfer->ticket = std::make_shared<Ticket>();
  // Without the lock: while the driver pins memory it may keep the call waiting.
  transfer->after = runtime_->record_on(request.after_stream);
  transfer->request = std::move(request);
  {
    std::unique_lock lock(mutex_);
    const auto has_room = [this] {
      return closing_ || static_cast<std::int64_t>(pending_.size()) < options_.max_pending;
    };
    if (policy == Backpressure::kRefuse && !has_room()) return nullptr;
    if (threaded_) {
      ended_.wait(lock, has_room);
    } else {
      // Nobody else may be there to make room.
      while (!has_room()) {
        lock.unlock();
        if (!poll()) std::this_thread::sleep_for(kPollInterval);
        lock.lock();
      }
    }
    if (closing_) throw std::runtime_error("the transfer engine is closed: open a new store");
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
  try {
    changed |= enqueue_steps();
  } catch (const std::exception& error) {
    // Out of memory, before the step was enqueued: a transfer fails, not the process.
    queue_.front()->fail(error.what());
    changed = true;
  }
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
  const std::size_t retired = std::erase_if(in_flight_, [this](Step& step) {
    try {
      if (!step.ran->done() && !mutated("poll ignores not ready")) return false;
    } catch (const std::exception& error) {
      step.transfer->fail(error.what());
      // It may still run. Outliving its streams is the way to know that it has.
      if (!mutated("a failed question counts as done")) *step.lane = Lane{};
    }
    if (step.transfer->request.count_non_finite && !step.transfer->error) {
      step.transfer->non_finite_rows +=
          step.host_count ? *step.host_count : *step.region->host_count;
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
        if (!enqueue_step(transfer, next_part(*transfer))) return changed;
      }
      changed = true;
    }
    queue_.pop_front();
  }
  return changed;
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
  const std::int64_t tokens_left = piece.length - transfer.token;
  Part part{.token = transfer.token, .tokens = tokens_left, .layer = transfer.layer, .layers = 1};
  if (direct_) {
    part.tokens =
        std::clamp<std::int64_t>(kDirectBytes / row_bytes_with_scale(request), 1, tokens_left);
    return part;
  }
  const std::int64_t rows = region_bytes(options_) / row_bytes_with_scale(request);
  const std::size_t most_layers =
      std::min(piece.layers.size() - transfer.layer, static_cast<std::size_t>(rows));
  while (part.layers < most_layers && piece.layers[transfer.layer + part.layers] != nullptr) {
    ++part.layers;
  }
  part.tokens = std::min(tokens_left, rows / static_cast<std::int64_t>(part.layers));
  // A range that begins inside a block touches one block more than its length needs.
  if (part.tokens / request.paged.block_size > kRegionIds - 2) {
    part.tokens = (kRegionIds - 2) * request.paged.block_size;
  }
  return part;
}

// What the copy engine does for a part by itself; empty where packing it is better.
std::vector<Copy> TransferEngine::Machine::dma_copies(const Transfer& transfer,
                                                      const Part& part) const {
  const TransferRequest& request = transfer.request;
  const RowsPiece& piece = request.pieces[transfer.piece];
  if (direct_ || options_.zero_copy || converts(request)) return {};
  std::vector<Copy> copies;
  for (std::size_t layer = part.layer; layer < part.layer + part.layers; ++layer) {
    const PagedView paged = request.paged.layers(layer, 1);
    const std::int64_t bytes = request.paged.row_bytes;
    const RowsView rows{piece.layers[layer] + part.token * bytes, bytes, 0};
    const auto plan = plan_copy(paged, table(request), piece.start + part.token, part.tokens, rows);
    if (choose_path(plan, options_.dma_span_bytes) != CopyPath::kDma) return {};
    for (const CopySpan& span : plan) {
      for (std::int64_t i = 0; i < span.count; ++i) {
        std::byte* const scattered = paged.data + span.paged_offset + i * span.paged_step;
        std::byte* const packed = rows.data + span.rows_offset + i * span.rows_step;
        copies.push_back(request.direction == Direction::kGather
                             ? Copy{packed, scattered, span.bytes}
                             : Copy{scattered, packed, span.bytes});
      }
    }
  }
  return copies;
}

// Whether zero-copy is asked for and kernels reach the part's rows in host memory.
bool TransferEngine::Machine::kernels_reach(const Transfer& transfer, const Part& part) const {
  if (!options_.zero_copy) return false;
  const RowsPiece& piece = transfer.request.pieces[transfer.piece];
  const std::int64_t bytes = row_bytes(transfer.request);
  for (std::size_t layer = part.layer; layer < part.layer + part.layers; ++layer) {
    const std::byte* const rows = piece.layers[layer] + part.token * bytes;
    if (!runtime_->kernels_reach(rows) ||
        !runtime_->kernels_reach(rows + part.tokens * bytes - 1)) {
      return false;
    }
  }
  return true;
}

bool TransferEngine::Machine::has_room(Way way, std::int64_t bytes) const {
  if (way == Way::kStaged || way == Way::kZeroCopy) return !free_regions_.empty();
  return in_flight_.empty() || in_flight_bytes_ + bytes <= options_.staging_bytes;
}

// Returns false where there is no room for it yet.
bool TransferEngine::Machine::enqueue_step(const std::shared_ptr<Transfer>& transfer,
                                           const Part& part) {
  const std::int64_t bytes = part.tokens * static_cast<std::int64_t>(part.layers) *
                             row_bytes_with_scale(transfer->request);
  // Before anything is planned: while the ring is full this is asked again and again.
  if (!has_room(Way::kStaged, bytes) && !has_room(Way::kDma, bytes)) return false;
  const std::vector<Copy> dma = dma_copies(*transfer, part);
  const Way way = direct_                          ? Way::kHost
                  : kernels_reach(*transfer, part) ? Way::kZeroCopy
                  : !dma.empty()                   ? Way::kDma
                                                   : Way::kStaged;
  in_flight_.reserve(in_flight_.size() + 1);  // what is enqueued must not be forgotten
  Step step;
  step.transfer = transfer;
  step.bytes = bytes;
  if (!has_room(way, step.bytes)) return false;
  if (way == Way::kStaged || way == Way::kZeroCopy) {
    step.region = free_regions_.back();
    free_regions_.pop_back();
  }
  if (way == Way::kHost) step.host_count = std::make_unique<std::uint32_t>(0);
  Lane& lane = lanes_[next_lane_++ % lanes_.size()];
  step.lane = &lane;
  try {
    if (!lane.kernels) lane = make_lane();
    switch (way) {
      case Way::kHost:
        step.ran = enqueue_host(lane, *transfer, part, step.host_count.get());
        break;
      case Way::kDma:
        step.ran = enqueue_dma(lane, *transfer, dma);
        break;
      case Way::kStaged:
        step.ran = enqueue_staged(lane, *transfer, part, *step.region);
        break;
      case Way::kZeroCopy:
        step.ran = enqueue_zero_copy(lane, *transfer, part, *step.region);
        break;
    }
  } catch (const std::exception& error) {
    transfer->fail(error.what());
    const bool forgets = mutated("ticket ends at the failure");
    // What was enqueued before the failure still runs, and its ticket must outlast it.
    try {
      if (lane.copies && !mutated("a failed step forgets its copies")) {
        lane.kernels->wait(lane.copies->record());
      }
      if (lane.kernels && !forgets) step.ran = lane.kernels->record();
    } catch (const std::exception&) {
      lane = Lane{};  // streams die after their work has run
    }
    if (!step.ran) {
      if (step.region) free_regions_.push_back(*step.region);
      return true;
    }
  }
  if (step.region && mutated("staging reused early")) free_regions_.push_back(*step.region);
  in_flight_bytes_ += step.bytes;
  ++transfer->steps_in_flight;
  in_flight_.push_back(std::move(step));
  // On to the next tokens of these layers, then to the next layers.
  transfer->token += part.tokens;
  if (transfer->token == transfer->request.pieces[transfer->piece].length) {
    transfer->token = 0;
    transfer->layer += part.layers;
  }
  return true;
}

// A part as if whatever moves it reached the block table and the first layer's rows.
RowsTask TransferEngine::Machine::task_of(const Transfer& transfer, const Part& part) const {
  const TransferRequest& request = transfer.request;
  const RowsPiece& piece = request.pieces[transfer.piece];
  RowsTask task;
  task.paged = request.paged.layers(part.layer, part.layers);
  task.tokens = {.ids = table(request), .start = piece.start + part.token};
  task.length = part.tokens;
  const std::int64_t bytes = row_bytes(request);
  task.rows = {piece.layers[part.layer] + part.token * bytes, bytes, 0};
  task.conversion.paged = request.paged_element;
  task.conversion.rows = request.rows_element;
  if (has_scales(request)) {
    task.conversion.scales = piece.scales[part.layer] + part.token;
    task.conversion.scale_token_stride = 1;
  }
  return task;
}

void TransferEngine::Machine::wait_for_producer(Stream& stream, const Transfer& transfer) const {
  const bool unordered =
      mutated("no wait for what is written before") ||
      (mutated("stream 0 orders everything") && transfer.request.after_stream == 0);
  if (!unordered) stream.wait(transfer.after);
}

std::shared_ptr<Event> TransferEngine::Machine::enqueue_host(Lane& lane, const Transfer& transfer,
                                                             const Part& part,
                                                             std::uint32_t* count) {
  RowsTask task = task_of(transfer, part);
  if (transfer.request.count_non_finite) task.conversion.non_finite_rows = count;
  wait_for_producer(*lane.kernels, transfer);
  lane.kernels->move_rows(transfer.request.direction, task);
  return lane.kernels->record();
}

std::shared_ptr<Event> TransferEngine::Machine::enqueue_dma(Lane& lane, const Transfer& transfer,
                                                            const std::vector<Copy>& copies) {
  wait_for_producer(*lane.copies, transfer);
  if (transfer.request.direction == Direction::kGather) {
    lane.copies->copy_to_host(copies);
  } else {
    lane.copies->copy_to_device(copies);
  }
  return lane.copies->record();
}

// Brings the ids of the blocks that a task touches, counted from the first of them, and a count of
// 0 to the device.
void TransferEngine::Machine::upload_head(Lane& lane, RowsTask& task, const Transfer& transfer,
                                          const Region& region) {
  const TransferRequest& request = transfer.request;
  const std::int64_t block_size = request.paged.block_size;
  const std::int64_t first = task.tokens.start / block_size;
  const std::int64_t last = (task.tokens.start + task.length - 1) / block_size;
  const std::int64_t count = last - first + 1;
  std::int64_t* const pinned = mutated("pinned ids reused early")
                                   ? reinterpret_cast<std::int64_t*>(pinned_heads_->data())
                                   : region.host_head;
  std::int64_t* const device = mutated("device ids reused early")
                                   ? reinterpret_cast<std::int64_t*>(device_ring_->data())
                                   : region.head;
  pinned[0] = 0;
  std::copy_n(request.block_ids.begin() + first, count, pinned + 1);
  const Copy head{.to = reinterpret_cast<std::byte*>(device),
                  .from = reinterpret_cast<const std::byte*>(pinned),
                  .bytes = (1 + count) * kIdBytes};
  task.tokens.ids =
      BlockTable{std::span<const std::int64_t>(device + 1, static_cast<std::size_t>(count))};
  task.tokens.start -= first * block_size;
  if (request.count_non_finite) {
    task.conversion.non_finite_rows = reinterpret_cast<std::uint32_t*>(region.head);
  }
  lane.kernels->copy_to_device({&head, 1});
}

std::shared_ptr<Event> TransferEngine::Machine::enqueue_staged(Lane& lane, const Transfer& transfer,
                                                               const Part& part,
                                                               const Region& region) {
  const TransferRequest& request = transfer.request;
  const RowsPiece& piece = request.pieces[transfer.piece];
  const bool gathers = request.direction == Direction::kGather;
  const std::int64_t bytes = row_bytes(request);
  const std::int64_t layer_bytes = part.tokens * bytes;
  const std::int64_t scales_bytes = part.tokens * kScaleBytes;
  // In the region: the rows layer by layer, then their scales.
  const std::int64_t rows_bytes = static_cast<std::int64_t>(part.layers) * layer_bytes;
  std::byte* const scales =
      region.rows + (rows_bytes + kScaleBytes - 1) / kScaleBytes * kScaleBytes;

  RowsTask task = task_of(transfer, part);
  task.rows = {region.rows, bytes, layer_bytes};
  std::vector<Copy> moves;
  const auto move = [&](std::byte* host, std::byte* device, std::int64_t count) {
    moves.push_back(gathers ? Copy{host, device, count} : Copy{device, host, count});
  };
  for (std::size_t i = 0; i < part.layers; ++i) {
    move(piece.layers[part.layer + i] + part.token * bytes,
         region.rows + static_cast<std::int64_t>(i) * layer_bytes, layer_bytes);
    if (!has_scales(request)) continue;
    move(reinterpret_cast<std::byte*>(piece.scales[part.layer + i] + part.token),
         scales + static_cast<std::int64_t>(i) * scales_bytes, scales_bytes);
  }
  if (has_scales(request)) {
    task.conversion.scales = reinterpret_cast<float*>(scales);
    task.conversion.scale_layer_stride = part.tokens;
  }
  const Copy count{.to = reinterpret_cast<std::byte*>(region.host_count),
                   .from = reinterpret_cast<const std::byte*>(region.head),
                   .bytes = kIdBytes};

  wait_for_producer(*lane.kernels, transfer);
  upload_head(lane, task, transfer, region);
  if (gathers) {
    lane.kernels->move_rows(request.direction, task);
    const auto packed = lane.kernels->record();
    if (!mutated("copy before gather")) lane.copies->wait(packed);
    if (request.count_non_finite) moves.push_back(count);
    lane.copies->copy_to_host(moves);
    return mutated("done recorded before the copies") ? packed : lane.copies->record();
  }
  lane.copies->copy_to_device(moves);
  const auto moved = lane.copies->record();
  if (!mutated("scatter before copy")) lane.kernels->wait(moved);
  lane.kernels->move_rows(request.direction, task);
  if (request.count_non_finite) lane.kernels->copy_to_host({&count, 1});
  return mutated("done recorded before the scatter") ? moved : lane.kernels->record();
}

std::shared_ptr<Event> TransferEngine::Machine::enqueue_zero_copy(Lane& lane,
                                                                  const Transfer& transfer,
                                                                  const Part& part,
                                                                  const Region& region) {
  const TransferRequest& request = transfer.request;
  wait_for_producer(*lane.kernels, transfer);
  RowsTask uploaded = task_of(transfer, part);
  upload_head(lane, uploaded, transfer, region);
  for (std::size_t i = 0; i < part.layers; ++i) {
    // Layers lie anywhere in host memory: a launch for each.
    RowsTask task = task_of(transfer, {part.token, part.tokens, part.layer + i, 1});
    task.tokens = uploaded.tokens;
    task.conversion.non_finite_rows = uploaded.conversion.non_finite_rows;
    lane.kernels->move_rows(request.direction, task);
  }
  if (request.count_non_finite) {
    const Copy count{.to = reinterpret_cast<std::byte*>(region.host_count),
                     .from = reinterpret_cast<const std::byte*>(region.head),
                     .bytes = kIdBytes};
    lane.kernels->copy_to_host({&count, 1});
  }
  return lane.kernels->record();
}

// Ends the transfers whose last step has run. Whoever sees an ended ticket finds the room that it
// made: both change under one lock.
bool TransferEngine::Machine::end_transfers() {
  const std::lock_guard lock(mutex_);
  const std::size_t ended = std::erase_if(running_, [](const auto& transfer) {
    const bool running = transfer->steps_in_flight > 0 &&
                         !(mutated("cancel without waiting") && transfer->ticket->cancelled());
    if (running || !transfer->wholly_enqueued()) return false;
    transfer->ticket->end(transfer->error.value_or(""), transfer->non_finite_rows);
    return true;
  });
  if (ended == 0) return false;
  std::erase_if(pending_,
                [](const auto& ticket) { return ticket->state() != Ticket::State::kPending; });
  ended_.notify_all();
  return true;
}

void TransferEngine::Machine::wake() {
  {
    const std::lock_guard lock(mutex_);
    progressed_ = true;
  }
  work_.notify_one();
}

void TransferEngine::Machine::run() {
  try {
    runtime_->enter_thread();
  } catch (const std::exception&) {
    // The first step will say so to whom it concerns.
  }
  while (true) {
    {
      std::unique_lock lock(mutex_);
      work_.wait(lock, [this] { return closing_ || !pending_.empty(); });
      if (pending_.empty()) return;
      progressed_ = false;
    }
    if (!poll()) {
      std::unique_lock lock(mutex_);
      // Another thread's poll() may have ended the last transfer.
      const auto due = [this] { return progressed_ || !inbox_.empty() || pending_.empty(); };
      if (told_) {
        work_.wait(lock, due);
      } else {
        work_.wait_for(lock, kPollInterval, due);
      }
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
  const std::lock_guard turn(poll_mutex_);
  if (!in_flight_.empty()) return;  // another thread's call waits for it still
  for (Lane& lane : lanes_) lane = Lane{};
  free_regions_.clear();
  device_ring_.reset();
  pinned_heads_.reset();
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

std::unique_ptr<Registration> TransferEngine::register_host(std::byte* data, std::int64_t bytes) {
  if (in_child()) throw std::runtime_error(kForked);
  return machine_->register_host(data, bytes);
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
