// The transfer engine on CudaRuntime, on a device that runs everything late and in hostile order.
//
// One seed is one world: a paged cache in device memory, a producer that writes blocks on its own
// stream, gathers and scatters submitted while these still run, blocks and rows that are used for
// something else as soon as their ticket has ended; calls that fail, a context that is lost, an
// engine that is closed or dies in the middle. The engine is right when no byte is ever wrong, no
// ticket stays without an answer and no two accesses are without an order; and every wait in it is
// needed: taking any one out shows within 200 seeds.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "core/mutation.h"
#include "core/row_convert.h"
#include "core/transfer_engine.h"
#include "cuda/cuda_runtime.h"
#include "tests/fake_cuda.h"
#include "tests/harness.h"
#include "tests/layouts.h"
#include "tests/races.h"

namespace hscache::test {
namespace {

constexpr std::int64_t kBlocks = 12;

// What a row holds that was written for the `version`-th time. Where somebody looks at elements
// they are bfloat16 numbers, and some rows hold an infinity.
struct Content {
  bool numbers = false;

  std::byte operator()(std::int64_t version, std::int64_t block, std::int64_t layer,
                       std::int64_t token, std::int64_t byte) const {
    const std::int64_t row = version * 101 + block * 53 + layer * 29 + token * 17;
    if (numbers && byte < 2 && row % 7 == 0) return byte == 0 ? std::byte{0x80} : std::byte{0x7F};
    const auto any = static_cast<std::byte>(row + byte * 7 + 1);
    return numbers ? any & std::byte{0x3F} : any;
  }
};

// What was wrong in one world.
struct Findings {
  std::int64_t wrong = 0;  // rows, blocks, tickets
  std::string first;       // of what was wrong
  std::int64_t races = 0;  // under ThreadSanitizer

  void add(std::int64_t count, const char* what) {
    if (wrong == 0 && count > 0) first = what;
    wrong += count;
  }
};

class World {
 public:
  explicit World(std::uint64_t seed) : random_(seed) {
    fake::reset(seed);
    fake::count_misuse();
    view_.num_blocks = kBlocks;
    view_.num_layers = random_.in(1, 3);
    view_.block_size = random_.in(1, 5);
    view_.row_bytes = random_.pick({4, 16, 24, 32});
    const std::int64_t padding = random_.chance(30) ? view_.row_bytes : 0;
    if (random_.chance(50)) {  // token-major
      view_.layer_stride = view_.row_bytes;
      view_.token_stride = view_.num_layers * view_.row_bytes;
      view_.block_stride = view_.block_size * view_.token_stride + padding;
    } else {
      view_.token_stride = view_.row_bytes;
      view_.layer_stride = view_.block_size * view_.row_bytes;
      view_.block_stride = view_.num_layers * view_.layer_stride + padding;
    }
    void* memory = nullptr;
    static_cast<void>(cudaMalloc(&memory, static_cast<std::size_t>(kBlocks * view_.block_stride)));
    view_.data = static_cast<std::byte*>(memory);
    versions_.assign(kBlocks, 0);
    poll_rate_ = static_cast<int>(random_.pick({0, 10, 50, 90}));
    progress_rate_ = static_cast<int>(random_.pick({0, 20, 80}));
    cancel_rate_ = static_cast<int>(random_.pick({0, 0, 30}));
    unregisters_ = random_.chance(30);
    // Stream 0 at times: it orders itself with blocking streams, which none of ours is.
    if (random_.chance(70)) producer_ = fake::make_stream(random_.chance(30));

    auto runtime = std::make_unique<cuda::CudaRuntime>(0);
    runtime->set_max_grid(2);
    TransferOptions options;
    content_.numbers = random_.chance(50);
    options.staging_bytes = 4 * (2 * view_.row_bytes + 4) * random_.in(1, 12);
    options.dma_span_bytes = random_.pick({std::int64_t{1} << 20, view_.row_bytes + 1, 1L});
    options.zero_copy = random_.chance(15);
    const std::int64_t before = fake::counters().device_bytes;
    engine_ = std::make_unique<TransferEngine>(std::move(runtime), options, false);
    ring_bytes_ = fake::counters().device_bytes - before;
    if (random_.chance(25)) draw_failures();
  }

  Findings run(bool counts_races = true) {
    if (counts_races) races_.emplace();
    try {
      live();
    } catch (const Raced&) {
      // One race brings thousands after it, and each report takes a millisecond: this world ends
      // here, without its engine, which has handles of it.
      static_cast<void>(engine_.release());
      fake::reset(0);
    }
    if (races_) findings_.races = races_->seen();
    races_.reset();
    return findings_;
  }

 private:
  struct Raced {};
  void end_at_a_race() const {
    if (races_ && races_->seen() > 0) throw Raced();
  }

  void live() {
    const std::int64_t requests = random_.in(2, 8);
    const std::int64_t fault = random_.chance(5) ? random_.in(0, requests - 1) : -1;
    for (std::int64_t i = 0; i < requests; ++i) {
      if (i == fault) {
        fake::enqueue_fault(producer_, cudaErrorIllegalAddress);
        lost_ = true;
      }
      submit();
      while (random_.chance(poll_rate_)) poll();
      if (random_.chance(progress_rate_)) fake::progress();
      if (!jobs_.empty() && random_.chance(cancel_rate_)) {
        Job& job = *jobs_[static_cast<std::size_t>(
            random_.in(0, static_cast<std::int64_t>(jobs_.size()) - 1))];
        job.ticket->cancel();
        job.may_fail = true;
      }
    }
    const std::string end = random_.pick({"drain", "drain", "close", "die"});
    if (end == "drain") {
      poll_until([this] { return jobs_.empty(); });
      if (fails_ && !lost_) {
        // What failed is over: the next transfer knows nothing of it.
        fake::fail_no_more();
        fails_ = false;
        submit();
        poll_until([this] { return jobs_.empty(); });
      }
    } else {
      for (const auto& job : jobs_) job->may_fail = true;
      if (end == "close") engine_->close();
      if (end == "die") engine_.reset();
      settle();
      end_at_a_race();
    }
    // Whoever has a ticket gets an answer.
    findings_.add(static_cast<std::int64_t>(jobs_.size()), "a ticket without an answer");
    engine_.reset();
    end_at_a_race();
    if (!lost_) look_at_the_ring();
    fake::finish();
    // What was used for something else after its ticket had ended stayed as it was.
    for (const auto& rows : given_back_) {
      findings_.add(std::count_if(rows->bytes.begin(), rows->bytes.end(),
                                  [](std::byte b) { return b != std::byte{0x77}; }),
                    "rows are written after their ticket");
    }
    findings_.add(fake::counters().pageable_copies, "a copy makes a detour");
    findings_.add(fake::counters().misuses, "memory is let go while it is used");
  }

  // Pinned host memory: rows [layer][token], then their scales.
  struct Rows {
    std::vector<std::byte> bytes;
    explicit Rows(std::int64_t size) : bytes(static_cast<std::size_t>(size), std::byte{0xEE}) {
      if (size > 0) static_cast<void>(cudaHostRegister(bytes.data(), bytes.size(), 0));
    }
  };
  struct Job {
    Direction direction = Direction::kGather;
    std::vector<std::int64_t> blocks;
    std::int64_t start = 0;
    std::int64_t length = 0;
    std::int64_t left_alone = -1;  // a layer without a place, -1 for none
    Element stored = Element::kAny;
    bool counts = false;
    std::int64_t non_finite_rows = 0;
    std::vector<std::byte> expected;  // of what is written: the rows, or the cache's
    std::shared_ptr<Rows> rows;
    std::shared_ptr<Ticket> ticket;
    bool may_fail = false;
  };

  // Calls that fail a few times, in the middle of a step as well; the device itself is sound.
  void draw_failures() {
    fails_ = true;
    for (std::int64_t i = random_.in(1, 2); i > 0; --i) {
      const char* const call =
          random_.pick({"cudaMemcpyAsync", "cudaMemcpyBatchAsync", "cudaLaunchKernel",
                        "cudaStreamWaitEvent", "cudaEventRecord", "cudaEventQuery",
                        "cudaEventCreateWithFlags", "cudaStreamCreateWithPriority"});
      fake::fail(call, random_.pick({cudaErrorMemoryAllocation, cudaErrorInvalidValue}),
                 static_cast<int>(random_.in(0, 12)), false, static_cast<int>(random_.in(1, 4)));
    }
  }

  // Another owner of what was the engine's ring: nothing may come there any more.
  void look_at_the_ring() {
    void* memory = nullptr;
    const auto bytes = static_cast<std::size_t>(ring_bytes_);
    static_cast<void>(cudaMalloc(&memory, bytes));
    {
      const fake::DeviceAccess open;
      std::memset(memory, 0, bytes);
    }
    fake::finish();
    const fake::DeviceAccess open;
    const auto* const data = static_cast<const std::byte*>(memory);
    findings_.add(std::any_of(data, data + bytes, [](std::byte b) { return b != std::byte{}; }),
                  "the ring is written after the engine's death");
  }

  template <class Done>
  void poll_until(Done done) {
    for (int turn = 0; turn < 20'000 && !done(); ++turn) poll();
  }

  Element element() const { return content_.numbers ? Element::kBFloat16 : Element::kAny; }
  std::int64_t row_bytes(const Job& job) const {
    return view_.row_bytes / element_bytes(element()) * element_bytes(job.stored);
  }
  // Places in a job's rows.
  std::int64_t row_at(const Job& job, std::int64_t layer, std::int64_t i) const {
    return (layer * job.length + i) * row_bytes(job);
  }
  std::int64_t scale_at(const Job& job, std::int64_t layer, std::int64_t i) const {
    const std::int64_t rows = view_.num_layers * job.length * row_bytes(job);
    return (rows + 3) / 4 * 4 + (layer * job.length + i) * 4;
  }
  std::int64_t rows_bytes(const Job& job) const {
    return job.stored == Element::kFloat8 ? scale_at(job, view_.num_layers, 0)
                                          : row_at(job, view_.num_layers, 0);
  }

  // What the cache's row becomes on its way to `rows`, or the other way round.
  bool convert(const Job& job, bool to_rows, const std::byte* from, std::byte* to,
               std::byte* scale) const {
    if (!content_.numbers) {
      std::memcpy(to, from, static_cast<std::size_t>(view_.row_bytes));
      return true;
    }
    return convert_row(to_rows ? element() : job.stored, from, to_rows ? job.stored : element(), to,
                       view_.row_bytes / 2, reinterpret_cast<float*>(scale));
  }

  // What the job must write, and for a scatter the rows that it reads.
  void expect(Job& job) {
    const bool gathers = job.direction == Direction::kGather;
    if (!gathers) {
      job.expected.resize(
          static_cast<std::size_t>(view_.num_layers * job.length * view_.row_bytes));
    }
    std::vector<std::byte>& rows = gathers ? job.expected : job.rows->bytes;
    if (gathers) rows = job.rows->bytes;
    for (std::int64_t layer = 0; layer < view_.num_layers; ++layer) {
      if (layer == job.left_alone) continue;
      for (std::int64_t i = 0; i < job.length; ++i) {
        const std::int64_t position = job.start + i;
        const std::int64_t block =
            job.blocks[static_cast<std::size_t>(position / view_.block_size)];
        std::vector<std::byte> row(static_cast<std::size_t>(view_.row_bytes));
        for (std::int64_t byte = 0; byte < view_.row_bytes; ++byte) {
          const std::int64_t version = gathers ? versions_[static_cast<std::size_t>(block)] : 1000;
          row[static_cast<std::size_t>(byte)] =
              content_(version, block, layer, position % view_.block_size, byte);
        }
        std::byte* const packed = rows.data() + row_at(job, layer, i);
        std::byte* const scale =
            job.stored == Element::kFloat8 ? rows.data() + scale_at(job, layer, i) : nullptr;
        const bool finite = convert(job, true, row.data(), packed, scale);
        job.non_finite_rows += job.counts && !finite;
        if (gathers) continue;
        std::byte* const cached = job.expected.data() + (layer * job.length + i) * view_.row_bytes;
        static_cast<void>(convert(job, false, packed, cached, scale));
      }
    }
  }

  // The producer writes a block anew, piece by piece, when its stream comes to it.
  void write_block(std::int64_t block) {
    const std::int64_t version = ++versions_[static_cast<std::size_t>(block)];
    std::vector<std::function<void()>> pieces;
    for (std::int64_t layer = 0; layer < view_.num_layers; ++layer) {
      pieces.push_back([view = view_, content = content_, version, block, layer] {
        for (std::int64_t token = 0; token < view.block_size; ++token) {
          for (std::int64_t byte = 0; byte < view.row_bytes; ++byte) {
            view.data[view.offset(block, layer, token) + byte] =
                content(version, block, layer, token, byte);
          }
        }
      });
    }
    fake::enqueue(producer_, std::move(pieces));
  }

  void submit() {
    // Blocks that no ticket reads or writes: the engine says when they are free again.
    poll_until([this] { return used_.size() + 3 <= kBlocks; });
    std::vector<std::int64_t> free;
    for (std::int64_t block = 0; block < kBlocks; ++block) {
      if (!used_.contains(block)) free.push_back(block);
    }
    if (free.empty()) return;  // nothing ends any more, and that will be counted
    random_.shuffle(free);
    auto job = std::make_unique<Job>();
    job->blocks.assign(free.begin(),
                       free.begin() + random_.in(1, static_cast<std::int64_t>(free.size())));
    const auto tokens = static_cast<std::int64_t>(job->blocks.size()) * view_.block_size;
    job->start = random_.in(0, tokens - 1);
    job->length = random_.in(0, tokens - job->start);
    job->direction = random_.chance(70) ? Direction::kGather : Direction::kScatter;
    if (view_.num_layers > 1 && random_.chance(20))
      job->left_alone = random_.in(0, view_.num_layers - 1);
    if (content_.numbers) {
      job->stored = random_.pick({Element::kBFloat16, Element::kFloat32, Element::kFloat8});
      job->counts = random_.chance(50);
    }
    job->rows = std::make_shared<Rows>(rows_bytes(*job));
    used_.insert(job->blocks.begin(), job->blocks.end());

    // The producer writes these blocks on its stream, sooner or later.
    const bool too_late = mutated("submitted before its write");
    for (const std::int64_t block : job->blocks) {
      if (too_late) {
        ++versions_[static_cast<std::size_t>(block)];
      } else {
        write_block(block);
      }
    }
    expect(*job);

    RowsPiece piece{.start = job->start, .length = job->length, .layers = {}};
    std::byte* const rows = job->rows->bytes.data();
    for (std::int64_t layer = 0; layer < view_.num_layers; ++layer) {
      piece.layers.push_back(layer == job->left_alone ? nullptr : rows + row_at(*job, layer, 0));
      if (job->stored != Element::kFloat8) continue;
      piece.scales.push_back(reinterpret_cast<float*>(rows + scale_at(*job, layer, 0)));
    }
    const auto blocked = fake::counters().blocking_calls;
    job->may_fail = fails_ || lost_;
    try {
      job->ticket = engine_->submit({.direction = job->direction,
                                     .paged = view_,
                                     .block_ids = job->blocks,
                                     .pieces = {piece},
                                     .after_stream = reinterpret_cast<std::uintptr_t>(producer_),
                                     .paged_element = element(),
                                     .rows_element = job->stored,
                                     .count_non_finite = job->counts},
                                    Backpressure::kRefuse);
    } catch (const DeviceError&) {
      findings_.add(!job->may_fail, "a transfer fails for no reason");
      for (const std::int64_t block : job->blocks) used_.erase(block);
      given_back(*job);
      return;
    }
    CHECK(job->ticket != nullptr);
    CHECK_EQ(fake::counters().blocking_calls, blocked);
    if (too_late) {
      for (const std::int64_t block : job->blocks) {
        --versions_[static_cast<std::size_t>(block)];
        write_block(block);
      }
    }
    if (mutated("source reused before the ticket")) {
      for (const std::int64_t block : job->blocks) write_block(block);
    }
    leaves_no_error();
    jobs_.push_back(std::move(job));
    end_at_a_race();
  }

  void poll() {
    const auto blocked = fake::counters().blocking_calls;
    engine_->poll();
    // Where an event cannot be recorded, outliving a stream is the only way to know.
    const bool may_block = fails_ || lost_;
    findings_.add(fake::counters().blocking_calls > blocked && !may_block, "poll() blocks");
    leaves_no_error();
    settle();
    end_at_a_race();
  }

  // An error that was told once is not told again by somebody else's next call.
  void leaves_no_error() {
    const cudaError_t error = cudaGetLastError();
    findings_.add(error != cudaSuccess && !lost_, "an error is told again");
  }

  void given_back(const Job& job) {
    std::fill(job.rows->bytes.begin(), job.rows->bytes.end(), std::byte{0x77});
    if (unregisters_ && !job.rows->bytes.empty()) {
      static_cast<void>(cudaHostUnregister(job.rows->bytes.data()));
    }
    given_back_.push_back(job.rows);
  }

  // Looks at what has ended, and at once uses its blocks and rows for something else.
  void settle() {
    std::erase_if(jobs_, [this](const std::unique_ptr<Job>& job) {
      const Ticket::State state = job->ticket->state();
      const bool hasty = mutated("rows read before the ticket");
      if (state == Ticket::State::kPending && !hasty) return false;
      if (state == Ticket::State::kDone || hasty) check(*job);
      if (state == Ticket::State::kFailed)
        findings_.add(!job->may_fail && !lost_, "a transfer fails for no reason");
      given_back(*job);
      for (const std::int64_t block : job->blocks) {
        used_.erase(block);
        // The producer knows of no transfer: nothing orders it behind one.
        if (random_.chance(50)) write_block(block);
      }
      return true;
    });
  }

  // Equal to the bit, but for the bits of NaNs, which the core and CUDA choose as they like.
  bool same_row(const std::byte* a, const std::byte* b) const {
    if (!content_.numbers) return std::memcmp(a, b, static_cast<std::size_t>(view_.row_bytes)) == 0;
    for (std::int64_t at = 0; at < view_.row_bytes; at += 2) {
      std::uint16_t x = 0;
      std::uint16_t y = 0;
      std::memcpy(&x, a + at, 2);
      std::memcpy(&y, b + at, 2);
      const bool nans = (x & 0x7FFFU) > 0x7F80U && (y & 0x7FFFU) > 0x7F80U;
      if (x != y && !nans) return false;
    }
    return true;
  }

  void check(const Job& job) {
    findings_.add(job.ticket->non_finite_rows() != job.non_finite_rows, "rows counted");
    if (job.direction == Direction::kGather) {
      findings_.add(job.rows->bytes != job.expected, "gathered rows");
      return;
    }
    const fake::DeviceAccess open;
    for (std::int64_t layer = 0; layer < view_.num_layers; ++layer) {
      if (layer == job.left_alone) continue;
      for (std::int64_t i = 0; i < job.length; ++i) {
        const std::int64_t position = job.start + i;
        const std::int64_t block =
            job.blocks[static_cast<std::size_t>(position / view_.block_size)];
        const std::byte* row = view_.data + view_.offset(block, layer, position % view_.block_size);
        const std::byte* expected =
            job.expected.data() + (layer * job.length + i) * view_.row_bytes;
        findings_.add(!same_row(row, expected), "scattered rows");
      }
    }
  }

  Random random_;
  PagedView view_;
  Content content_;
  std::vector<std::int64_t> versions_;
  std::set<std::int64_t> used_;
  cudaStream_t producer_ = nullptr;
  std::vector<std::unique_ptr<Job>> jobs_;
  std::vector<std::shared_ptr<Rows>> given_back_;
  std::unique_ptr<TransferEngine> engine_;
  int poll_rate_ = 0;
  int progress_rate_ = 0;
  int cancel_rate_ = 0;
  bool unregisters_ = false;
  bool fails_ = false;  // calls may fail
  bool lost_ = false;   // the context is or will be lost
  std::int64_t ring_bytes_ = 0;
  Findings findings_;
  std::optional<RaceCount> races_;
};

// HSCACHE_SEEDS asks for more than a test run's share.
std::uint64_t seeds() {
  const char* asked = std::getenv("HSCACHE_SEEDS");
  return asked == nullptr ? 2000 : std::strtoull(asked, nullptr, 10);
}

constexpr std::uint64_t kEnough = 200;  // seeds within which every fault is seen

// Looks for the first seed whose world shows the fault: by what is wrong, and where they are seen,
// by a race as well.
void expect_seen(const char* fault, bool is_a_race) {
  choose_mutation(fault);
  std::uint64_t wrong = 0;
  std::uint64_t race = 0;
  const bool wants_race = sees_races() && is_a_race;
  for (std::uint64_t seed = 1; seed <= kEnough; ++seed) {
    const Findings findings = World(seed).run();
    if (wrong == 0 && findings.wrong > 0) wrong = seed;
    if (race == 0 && findings.races > 0) race = seed;
    if (wants_race ? race > 0 : wrong > 0) break;
  }
  choose_mutation("");
  const auto text = [](std::uint64_t seed) {
    return seed == 0 ? std::string("-") : "seed " + std::to_string(seed);
  };
  std::printf("  %-36s wrong: %-9s race: %s\n", fault, text(wrong).c_str(), text(race).c_str());
  check(wants_race ? race > 0 : wrong > 0, __FILE__, __LINE__, fault);
}

// HSCACHE_SEED=N runs that one only, with every race in full (TSAN_OPTIONS=symbolize=1).
TEST(hostile_streams, no_byte_is_wrong_under_any_schedule) {
  if (const char* const only = std::getenv("HSCACHE_SEED")) {
    const Findings findings = World(std::strtoull(only, nullptr, 10)).run(false);
    check(findings.wrong == 0, __FILE__, __LINE__, findings.first.c_str());
    return;
  }
  for (std::uint64_t seed = 1; seed <= seeds(); ++seed) {
    const Findings findings = World(seed).run();
    if (!CHECK_EQ(findings.wrong, 0) || !CHECK_EQ(findings.races, 0)) {
      std::printf("  seed %llu: %s\n", static_cast<unsigned long long>(seed),
                  findings.first.c_str());
      return;
    }
  }
}

TEST(hostile_streams, every_wait_is_needed) {
  for (const char* fault :
       {"no wait for what is written before", "stream 0 orders everything", "copy before gather",
        "scatter before copy", "done recorded before the copies",
        "done recorded before the scatter", "staging reused early", "pinned ids reused early",
        "device ids reused early", "poll ignores not ready", "cancel without waiting",
        "event given back early", "batch copy in any order", "ring freed before the drain",
        "pinned ids freed before the drain", "ticket ends at the failure",
        "a failed step forgets its copies", "a stream dies before its work",
        "a failed question counts as done"}) {
    expect_seen(fault, true);
  }
  expect_seen("close does not drain", false);  // its streams still wait: tickets without an answer
}

TEST(hostile_streams, callers_that_break_their_promise_are_seen) {
  for (const char* fault : {"submitted before its write", "source reused before the ticket",
                            "rows read before the ticket"}) {
    expect_seen(fault, true);
  }
}

}  // namespace
}  // namespace hscache::test
