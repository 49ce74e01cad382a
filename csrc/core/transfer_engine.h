// Moves rows between paged memory and the pool in the background and answers with tickets.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/copy_path.h"
#include "core/device_runtime.h"
#include "core/ticket.h"

namespace hscache {

// One run of a request's tokens and where its rows are in host memory: for every layer of the paged
// view `length` rows side by side, or null for a layer that is left alone.
struct RowsPiece {
  std::int64_t start = 0;   // first token
  std::int64_t length = 0;  // tokens
  std::vector<std::byte*> layers;
  // Where one side is kFloat8: for every layer that is moved `length` scales side by side.
  std::vector<float*> scales = {};
};

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
  // What the elements are on either side; kAny on both moves them bit for bit.
  Element paged_element = Element::kAny;
  Element rows_element = Element::kAny;
  // Counts rows that are not finite; needs to know the elements.
  bool count_non_finite = false;
};

struct TransferOptions {
  int lanes = 2;                            // steps that run beside each other
  std::int64_t max_pending = 256;           // transfers accepted and not yet ended
  std::int64_t staging_bytes = 64LL << 20;  // of rows on their way at once
  // Pieces of contiguous bytes that are this long on average go by the copy engine alone.
  std::int64_t dma_span_bytes = kDmaSpanBytes;
  // Kernels write and read rows in host memory themselves, where they reach it.
  bool zero_copy = false;
};

enum class Backpressure { kWait, kRefuse };

// The transfer engine: a state machine driven by poll(), with a thread of its own around it unless
// told otherwise.
//
// Rows travel through a ring of regions of `staging_bytes` together, however long the request is:
// a kernel packs scattered rows into a region, the copy engine moves the region to where the rows
// belong, and only then is the region free for other rows (a scatter goes the same way backwards).
// Rows that lie in long enough pieces need no packing: the copy engine moves them by itself, and
// the ring is only a count of bytes. Where the device reaches host memory itself a layer of a piece
// goes in one step, and the ring is only a count (one step at least, whatever its size). Steps run
// in the order of acceptance, spread over lanes.
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

  // Accepts a transfer; only enqueues. At the limit kWait waits for room, polling where no thread
  // does, and kRefuse returns null.
  // Throws what check_range() throws for any piece, std::invalid_argument for a piece that has not
  // one place for each layer (and scale, where it has scales), for elements that rows cannot be
  // converted between, for rows larger than a region, or for a stream that the device does not
  // know, and std::runtime_error when closed.
  std::shared_ptr<Ticket> submit(TransferRequest request, Backpressure policy);

  // Lets the device copy to and from this memory without a detour, as far as it takes it: see
  // DeviceRuntime::register_host(). The registration must die before the engine does.
  std::unique_ptr<Registration> register_host(std::byte* data, std::int64_t bytes);

  // One turn of the state machine: enqueues what there is room for, ends what has run. Returns
  // whether anything changed. Does not block on the device, with two exceptions: rows for host
  // memory that is not registered (yet) make a detour for which CUDA waits, and where the device
  // does not say whether work has run, outliving its stream is the only way to know.
  bool poll();

  // Waits until everything accepted before the call has ended.
  void drain();

  // Refuses new transfers, fails those not wholly enqueued, waits for what is on its way, and gives
  // back streams and ring. Idempotent.
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
